"""vLLM opens a checkpoint folder and reloads its weights into a running engine; trainer state is ignored."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import small_inputs
import torch
from transformers import AutoModelForCausalLM
from vllm_on_cpu import ENVIRONMENT, make_llama

SCRIPT = """
import json, pathlib, sys
from vllm import LLM, SamplingParams
start, checkpoint, output = sys.argv[1:]
prompts = [{"prompt_token_ids": list(range(first, first + 20))} for first in range(5, 205, 25)]
def generate(engine):
    read = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
    return [[next(iter(one.values())).logprob for one in answer.prompt_logprobs[1:]] for answer in read]
engine = LLM(start, dtype="float32", enforce_eager=True, max_model_len=128, kv_cache_memory_bytes=128 << 20,
             enable_prefix_caching=False)
found = []
if start == checkpoint:
    found = generate(engine)
else:
    before = generate(engine)
    engine.collective_rpc("reload_weights", kwargs={"weights_path": checkpoint})
    found = generate(engine)
    assert found != before
pathlib.Path(output).write_text(json.dumps(found))
"""


def test_vllm_opens_a_checkpoint_and_reloads_its_weights(tmp_path):
    student = make_llama(tmp_path / "student", context=128)
    data = small_inputs.write_jsonl(tmp_path / "data.jsonl", small_inputs.sentences(8))
    command = [sys.executable, "-m", "xtk", "distill", student, data, "--loss", "ce", "--max-steps", 2, "--save-steps",
               1, "--learning-rate", "1e-2", "-o", tmp_path / "run"]  # fmt: skip
    subprocess.run(list(map(str, command)), env=ENVIRONMENT, check=True, timeout=600)
    checkpoint = tmp_path / "run" / "checkpoint-1"
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    expected = []
    for first_id in range(5, 205, 25):
        ids = torch.arange(first_id, first_id + 20)
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0].log_softmax(-1)
        expected.append(logprobs[:-1].gather(1, ids[1:, None])[:, 0].tolist())
    for start in (checkpoint, student):
        output = tmp_path / "output.json"
        process = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(start), str(checkpoint), str(output)],
            env={**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, capture_output=True, text=True, timeout=900,
            check=False,
        )  # fmt: skip
        assert process.returncode == 0, process.stderr[-3000:]
        np.testing.assert_allclose(json.loads(output.read_text()), expected, atol=1e-4, rtol=0)
