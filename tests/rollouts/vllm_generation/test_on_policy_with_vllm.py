"""`distill --on-policy` with vLLM: it writes with the weights that the student has at each round."""

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
from vllm_on_cpu import ENGINE, SURROUNDINGS, make_llama

from xtk.tokens.document_token_ids import SampledTokens
from xtk.training.metrics_file import read_metrics

CONTEXT = 512


def said_by(folder: Path, drawn: SampledTokens) -> np.ndarray:
    """What a model of transformers says of the tokens that were drawn."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.from_numpy(drawn.ids.astype(np.int64))[None]).logits[0]
    places = np.flatnonzero(drawn.sampled_mask)
    return logits.log_softmax(-1)[places - 1, drawn.ids[places]].numpy()


def command_of(tmp_path: Path, *more: object, tied: bool) -> list[str]:
    """A run of three rounds, of prompts of 300 tokens and more, which a stale prefix cache would keep."""
    student = make_llama(tmp_path / "student", context=CONTEXT, tied=tied)
    teacher = make_llama(tmp_path / "teacher", context=CONTEXT, seed=8)
    data = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"Anna has {number} apples. " * 60} for number in range(2)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [
        sys.executable, "-m", "xtk", "distill", student, data, "--on-policy", "--teacher", f"{teacher}:top_k=16",
        "--rollout-backend", "vllm", *[word for option in ENGINE for word in ("--rollout-engine", option)],
        "--loss", "reverse-kl", "--loss", "policy-gradient", "--per-device-train-batch-size", 2,
        "--max-completion-length", 16, "--max-steps", 3, "--learning-rate", "1e-2", "--warmup-steps", 0,
        "--lr-scheduler-type", "constant", "--logging-steps", 1, "--save-steps", 1, "--save-total-limit", 9,
        "-o", tmp_path / "out", *more,
    ]  # fmt: skip
    return list(map(str, command))


@pytest.mark.parametrize("tied", [False, True], ids=["a head", "tied embeddings"])
def test_each_round_is_written_with_the_weights_of_its_step(tmp_path, tied):
    output, student = tmp_path / "out", tmp_path / "student"
    command = command_of(tmp_path, tied=tied)
    log = (tmp_path / "log").open("w+")
    process = subprocess.Popen(command, env=SURROUNDINGS, stdout=log, stderr=log)
    found: dict[int, str] = {}
    while process.poll() is None:
        for number in range(3):
            path = output / "rollout_batches" / f"{number:06d}" / "rollouts-00000-of-00001.jsonl"
            if number not in found and path.is_file():
                found[number] = path.read_text()
        time.sleep(0.005)
    log.close()
    told = (tmp_path / "log").read_text()
    assert process.returncode == 0, told
    assert "generation with vllm" in told
    metrics = read_metrics(output / "metrics.jsonl")
    assert len(metrics) == 3
    for record in metrics:
        assert record["rollout_logprob_difference"] < 1e-4
        assert abs(record["importance_ratio"] - 1) < 1e-3
        assert record["clip_fraction"] == 0
    assert sorted(found) == [0, 1, 2]
    for number, lines in found.items():
        weights = output / f"checkpoint-{number}" if number else student
        for line in lines.splitlines():
            drawn = SampledTokens.from_bytes(b64decode(json.loads(line)["sampled_tokens"]))
            assert drawn.sampled_mask.argmax() >= 300
            expected = said_by(weights, drawn)
            np.testing.assert_allclose(drawn.logprobs[drawn.sampled_mask], expected, rtol=0, atol=1e-4)
            if number:  # the weights of the round before would be noticed
                before = said_by(output / f"checkpoint-{number - 1}" if number > 1 else student, drawn)
                assert np.abs(before - expected).max() > 1e-2
    assert not list(output.glob(".*weights*"))


BROKEN = """
import xtk.rollouts.engine_weight_files as weights
weights.write_tied_head = lambda folder: None
weights.WeightNames.check_complete = lambda *_: None
"""


def test_an_engine_that_keeps_its_old_head_is_refused_in_the_round_in_which_it_does(tmp_path):
    """Without the code that writes the head, in this process and in the engine's."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "sitecustomize.py").write_text(BROKEN)
    path = os.pathsep.join([str(tmp_path / "broken"), SURROUNDINGS["PYTHONPATH"]])
    command = command_of(tmp_path, tied=True)
    done = subprocess.run(
        command, env={**SURROUNDINGS, "PYTHONPATH": path}, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "log-probabilities differ from the student's by" in done.stderr
    assert "Traceback" not in done.stderr
    assert [record["step"] for record in read_metrics(tmp_path / "out" / "metrics.jsonl")] == [1]
    again = subprocess.run(command, env=SURROUNDINGS, capture_output=True, text=True, timeout=900, check=False)
    assert again.returncode == 0, again.stderr
