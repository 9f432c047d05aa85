"""`distill-on-policy` with vLLM: each rollout batch is generated with the student's current weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from base64 import b64decode
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm_on_cpu import ENGINE, ENVIRONMENT, make_llama

from xtk.runs.metrics_file import read_metrics
from xtk.text.document_token_ids import SampledTokens

CONTEXT = 512


def model_logprobs(folder: Path, sampled: SampledTokens) -> np.ndarray:
    """Return the log-probabilities that transformers assigns to the sampled tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.from_numpy(sampled.ids.astype(np.int64))[None]).logits[0]
    positions = np.flatnonzero(sampled.sampled_mask)
    return logits.log_softmax(-1)[positions - 1, sampled.ids[positions]].numpy()


def distill_command(tmp_path: Path, *options: object, tied: bool) -> list[str]:
    """Return a command with three rollout batches and prompts of 300 tokens or more, which fill the prefix cache."""
    student = make_llama(tmp_path / "student", context=CONTEXT, tied=tied)
    teacher = make_llama(tmp_path / "teacher", context=CONTEXT, seed=8)
    data = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"Anna has {number} apples. " * 60} for number in range(2)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [
        sys.executable, "-m", "xtk", "distill-on-policy", student, data, "--teacher", f"{teacher}:top_k=16",
        "--rollout-backend", "vllm", *[word for option in ENGINE for word in ("--rollout-engine", option)],
        "--loss", "reverse-kl", "--loss", "policy-gradient", "--per-device-train-batch-size", 2,
        "--max-completion-length", 16, "--max-steps", 3, "--learning-rate", "1e-2", "--warmup-steps", 0,
        "--lr-scheduler-type", "constant", "--logging-steps", 1, "--save-steps", 1, "--save-total-limit", 9,
        "-o", tmp_path / "out", *options,
    ]  # fmt: skip
    return list(map(str, command))


@pytest.mark.parametrize("tied", [False, True], ids=["a head", "tied embeddings"])
def test_each_rollout_batch_is_generated_with_the_weights_of_its_step(tmp_path, tied):
    output, student = tmp_path / "out", tmp_path / "student"
    command = distill_command(tmp_path, tied=tied)
    log = (tmp_path / "log").open("w+")
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=log, stderr=log)
    rollouts: dict[int, str] = {}
    while process.poll() is None:
        for number in range(3):
            path = output / "rollout_batches" / f"{number:06d}" / "rollouts-00000-of-00001.jsonl"
            if number not in rollouts and path.is_file():
                rollouts[number] = path.read_text()
        time.sleep(0.005)
    log.close()
    log_text = (tmp_path / "log").read_text()
    assert process.returncode == 0, log_text
    assert "generation with vllm" in log_text
    metrics = read_metrics(output / "metrics.jsonl")
    assert len(metrics) == 3
    for record in metrics:
        assert record["rollout_logprob_difference"] < 1e-4
        assert abs(record["importance_ratio"] - 1) < 1e-3
        assert record["clip_fraction"] == 0
    assert sorted(rollouts) == [0, 1, 2]
    for number, lines in rollouts.items():
        weights = output / f"checkpoint-{number}" if number else student
        for line in lines.splitlines():
            sampled = SampledTokens.from_bytes(b64decode(json.loads(line)["sampled_tokens"]))
            assert sampled.sampled_mask.argmax() >= 300
            expected = model_logprobs(weights, sampled)
            np.testing.assert_allclose(sampled.logprobs[sampled.sampled_mask], expected, rtol=0, atol=1e-4)
            if number:  # the test would detect the weights of the previous batch
                expected_before = model_logprobs(
                    output / f"checkpoint-{number - 1}" if number > 1 else student, sampled
                )
                assert np.abs(expected_before - expected).max() > 1e-2
    assert not list(output.glob(".*weights*"))


DISABLE_WEIGHT_CHECKS = """
import xtk.rollouts.engine_weight_files as weights
weights.write_tied_head = lambda folder: None
weights.WeightNames.check_complete = lambda *_: None
"""


def test_engine_with_an_outdated_head_is_refused_at_its_first_rollout_batch(tmp_path):
    """The code that writes the tied head is disabled in this process and in the engine's process."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "sitecustomize.py").write_text(DISABLE_WEIGHT_CHECKS)
    path = os.pathsep.join([str(tmp_path / "broken"), ENVIRONMENT["PYTHONPATH"]])
    command = distill_command(tmp_path, tied=True)
    process = subprocess.run(
        command, env={**ENVIRONMENT, "PYTHONPATH": path}, capture_output=True, text=True, timeout=900, check=False
    )
    assert process.returncode == 1, process.stderr
    assert "log-probabilities differ from the student's by" in process.stderr
    assert "Traceback" not in process.stderr
    assert [record["step"] for record in read_metrics(tmp_path / "out" / "metrics.jsonl")] == [1]
    resumed = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=900, check=False)
    assert resumed.returncode == 0, resumed.stderr
