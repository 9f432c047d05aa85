"""`distill --on-policy` with vLLM: it writes with the weights that the student has at each round."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from base64 import b64decode
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from vllm_on_cpu import ENGINE, SURROUNDINGS, make_llama

from xtk.tokens.ids import DrawnTokens
from xtk.training.metrics import read_metrics

CONTEXT = 512


def said_by(folder: Path, drawn: DrawnTokens) -> np.ndarray:
    """What a model of transformers says of the tokens that were drawn."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.from_numpy(drawn.ids.astype(np.int64))[None]).logits[0]
    places = np.flatnonzero(drawn.drawn)
    return logits.log_softmax(-1)[places - 1, drawn.ids[places]].numpy()


def test_each_round_is_written_with_the_weights_of_its_step(tmp_path):
    """Prompts of 300 tokens and more, which a stale prefix cache would keep."""
    student = make_llama(tmp_path / "student", context=CONTEXT)
    teacher = make_llama(tmp_path / "teacher", context=CONTEXT, seed=8)
    data = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"Anna has {number} apples. " * 60} for number in range(2)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = tmp_path / "out"
    command = [
        sys.executable, "-m", "xtk", "distill", student, data, "--on-policy", "--teacher", f"{teacher}:top_k=16",
        "--rollout-backend", "vllm", *[word for option in ENGINE for word in ("--rollout-engine", option)],
        "--loss", "reverse-kl", "--per-device-train-batch-size", 2, "--max-completion-length", 16, "--max-steps", 3,
        "--learning-rate", "1e-2", "--warmup-steps", 0, "--lr-scheduler-type", "constant", "--logging-steps", 1,
        "--save-steps", 1, "--save-total-limit", 9, "-o", output,
    ]  # fmt: skip
    log = (tmp_path / "log").open("w+")
    process = subprocess.Popen(list(map(str, command)), env=SURROUNDINGS, stdout=log, stderr=log)
    found: dict[int, str] = {}
    while process.poll() is None:
        for number in range(3):
            path = output / "rounds" / f"{number:06d}" / "rollouts-00000-of-00001.jsonl"
            if number not in found and path.is_file():
                found[number] = path.read_text()
        time.sleep(0.005)
    log.close()
    told = (tmp_path / "log").read_text()
    assert process.returncode == 0, told
    assert "vllm writes, in 1 process(es)" in told
    assert len(read_metrics(output / "metrics.jsonl")) == 3
    assert sorted(found) == [0, 1, 2]
    for number, lines in found.items():
        weights = output / f"checkpoint-{number}" if number else student
        for line in lines.splitlines():
            drawn = DrawnTokens.of_bytes(b64decode(json.loads(line)["drawn"]))
            assert drawn.drawn.argmax() >= 300
            expected = said_by(weights, drawn)
            np.testing.assert_allclose(drawn.logprobs[drawn.drawn], expected, rtol=0, atol=1e-4)
            if number:  # the weights of the round before would be noticed
                before = said_by(output / f"checkpoint-{number - 1}" if number > 1 else student, drawn)
                assert np.abs(before - expected).max() > 1e-2
    assert not list(output.glob(".*weights*"))
