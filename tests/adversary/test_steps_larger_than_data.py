"""Steps with room for more documents than an epoch has take each document once."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from small_inputs import sentences, write_jsonl
from xtk_processes import run_xtk

from xtk.losses.loss_spec import parse_losses
from xtk.training.metrics_file import read_metrics
from xtk.training.on_policy_config import OnPolicyConfig, PromptSampler
from xtk.training.train_config import TrainConfig

NOTE = "each step uses all 15 documents of the data once: --per-device-train-batch-size x "


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("small") / "small.jsonl", sentences(15, seed=4))


def run(pair, data: Path, output: Path, batch: int, *more: object, code: int = 0) -> str:
    return run_xtk("distill", pair.student, data, "--loss", "ce", "--num-train-epochs", 3, "--logging-steps", 1,
                   "--per-device-train-batch-size", batch, *more, "-o", output, code=code).stderr  # fmt: skip


def losses(output: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(output / "metrics.jsonl")]


def test_a_step_of_24_takes_the_15_documents_there_are_once(pair, small, tmp_path):
    assert NOTE not in run(pair, small, tmp_path / "fits", 15)
    told = run(pair, small, tmp_path / "large", 24)
    assert NOTE in told
    assert "distill: 3 steps of 15 documents, 15 documents" in told
    fits, large = (tmp_path / name for name in ("fits", "large"))
    assert losses(fits) == losses(large)
    assert (fits / "model.safetensors").read_bytes() == (large / "model.safetensors").read_bytes()
    assert "3 steps of 15 documents" in (large / "README.md").read_text()
    # However a step is divided into micro-batches.
    run(pair, small, tmp_path / "parts", 4, "--gradient-accumulation-steps", 6)
    assert losses(tmp_path / "parts") == pytest.approx(losses(fits), rel=1e-5)
    # Interrupted after the first step, it goes on with the same documents.
    run(pair, small, tmp_path / "again", 24, "--max-seconds", 0.001, code=75)
    run(pair, small, tmp_path / "again", 24)
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (large / "model.safetensors").read_bytes()


def test_prompts_of_a_step_are_those_there_are_once(pair, tmp_path):
    rows = [{"prompt": f"{name} has 12 apples and", "completion": " gives 2."} for name in ("Anna", "Bert", "Clara")]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run_xtk(
        "distill", pair.student, tmp_path / "prompts.jsonl", "--teacher", f"{pair.teacher}:top_k=16", "--on-policy",
        "--per-device-train-batch-size", 16, "--num-generations", 2, "--max-completion-length", 6, "--max-steps", 2,
        "--logging-steps", 1, "-o", tmp_path / "out",
    )  # fmt: skip
    assert "each step uses all 6 completions of all prompts once: " in done.stderr
    assert "distill: 2 steps of 6 documents" in done.stderr


@pytest.mark.parametrize("lmbda", [1.0, 0.5, 0.0])
def test_no_step_takes_a_document_twice(lmbda):
    sizes = np.arange(5)
    for room, generations in ((24, 4), (24, 2), (10, 2), (64, 1)):
        on_policy = OnPolicyConfig(num_generations=generations, lmbda=lmbda)
        recipe = TrainConfig(losses=tuple(parse_losses(["ce"])), per_device_train_batch_size=room, on_policy=on_policy)
        size = recipe.effective_documents_per_step(5, 1)
        assert size == min(room, 5 * generations)
        assert size % generations == 0
        order = PromptSampler(np.arange(5), sizes, size, 7, on_policy)
        for step in range(20):
            numbers = order.documents_of_step(step)
            if size == 5 * generations or not order.is_on_policy(step):
                assert len(set(numbers)) == len(numbers)
