"""Steps whose batch size exceeds the documents of an epoch use each document once."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from small_inputs import sentences, write_jsonl
from xtk_processes import run_xtk

from xtk.losses.spec import parse_losses
from xtk.runs.metrics_file import read_metrics
from xtk.training.on_policy_config import OnPolicyConfig, PromptSampler
from xtk.training.train_config import TrainConfig

NOTE = "each step uses all 15 documents of the data once: --per-device-train-batch-size x "


@pytest.fixture(scope="module")
def small_data(tmp_path_factory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("small") / "small.jsonl", sentences(15, seed=4))


def train(pair, data: Path, output: Path, batch_size: int, *options: object, code: int = 0) -> str:
    return run_xtk("distill", pair.student, data, "--loss", "ce", "--num-train-epochs", 3, "--logging-steps", 1,
                   "--per-device-train-batch-size", batch_size, *options, "-o", output, code=code).stderr  # fmt: skip


def losses(output: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(output / "metrics.jsonl")]


def test_step_of_24_uses_each_of_15_documents_once(pair, small_data, tmp_path):
    assert NOTE not in train(pair, small_data, tmp_path / "fits", 15)
    stderr = train(pair, small_data, tmp_path / "large", 24)
    assert NOTE in stderr
    assert "distill: 3 steps of 15 documents, 15 documents" in stderr
    fits, large = (tmp_path / name for name in ("fits", "large"))
    assert losses(fits) == losses(large)
    assert (fits / "model.safetensors").read_bytes() == (large / "model.safetensors").read_bytes()
    assert "3 steps of 15 documents" in (large / "README.md").read_text()
    # The same for other divisions of a step into micro-batches.
    train(pair, small_data, tmp_path / "parts", 4, "--gradient-accumulation-steps", 6)
    assert losses(tmp_path / "parts") == pytest.approx(losses(fits), rel=1e-5)
    # A run interrupted after the first step resumes with the same documents.
    train(pair, small_data, tmp_path / "again", 24, "--max-seconds", 0.001, code=75)
    train(pair, small_data, tmp_path / "again", 24)
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (large / "model.safetensors").read_bytes()


def test_on_policy_step_uses_each_completion_once(pair, tmp_path):
    rows = [{"prompt": f"{name} has 12 apples and", "completion": " gives 2."} for name in ("Anna", "Bert", "Clara")]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = run_xtk(
        "distill-on-policy", pair.student, tmp_path / "prompts.jsonl", "--teacher", f"{pair.teacher}:top_k=16",
        "--per-device-train-batch-size", 16, "--num-generations", 2, "--max-completion-length", 6, "--max-steps", 2,
        "--logging-steps", 1, "-o", tmp_path / "out",
    )  # fmt: skip
    assert "each step uses all 6 completions of all prompts once: " in result.stderr
    assert "distill: 2 steps of 6 documents" in result.stderr


@pytest.mark.parametrize("lmbda", [1.0, 0.5, 0.0])
def test_no_step_uses_a_document_twice(lmbda):
    sizes = np.arange(5)
    for batch_size, generations in ((24, 4), (24, 2), (10, 2), (64, 1)):
        on_policy = OnPolicyConfig(num_generations=generations, lmbda=lmbda)
        config = TrainConfig(
            losses=tuple(parse_losses(["ce"])), per_device_train_batch_size=batch_size, on_policy=on_policy
        )
        size = config.effective_documents_per_step(5, 1)
        assert size == min(batch_size, 5 * generations)
        assert size % generations == 0
        sampler = PromptSampler(np.arange(5), sizes, size, 7, on_policy)
        for step in range(20):
            documents = sampler.documents_of_step(step)
            if size == 5 * generations or not sampler.is_on_policy(step):
                assert len(set(documents)) == len(documents)
