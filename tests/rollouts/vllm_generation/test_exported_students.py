"""vLLM serves the output of `xtk export`: same tokens as transformers, and it stops at the end of a turn."""

from __future__ import annotations

import json
import subprocess
import sys

import small_inputs
import torch
from transformers import AutoModelForCausalLM
from vllm_on_cpu import ENVIRONMENT, make_llama

SCRIPT = """
import json, pathlib, sys
from vllm import LLM, SamplingParams
engine = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=128, kv_cache_memory_bytes=128 << 20)
prompts = [{"prompt_token_ids": ids} for ids in json.loads(sys.argv[2])]
written = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=40))
results = [[list(one.outputs[0].token_ids), one.outputs[0].finish_reason] for one in written]
pathlib.Path(sys.argv[3]).write_text(json.dumps(results))
"""


def test_vllm_serves_an_exported_student_and_stops_at_the_end_of_a_turn(tmp_path):
    student = make_llama(tmp_path / "student", context=128, eos_scale=4.0)
    tokenizer_config = json.loads((student / "tokenizer_config.json").read_text())
    (student / "tokenizer_config.json").write_text(json.dumps({**tokenizer_config, "eos_token": "<|endoftext|>"}))
    data = small_inputs.write_jsonl(tmp_path / "data.jsonl", small_inputs.sentences(8))
    xtk_command = [sys.executable, "-m", "xtk"]
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    distill_command = [*xtk_command, "distill", str(student), str(data), "--loss", "ce", "--max-steps", "1", "-o", run]
    subprocess.run(distill_command, env=ENVIRONMENT, check=True, timeout=600)
    subprocess.run(
        [*xtk_command, "export", run, "--max-shard-size", "200KB", "-o", out], env=ENVIRONMENT, check=True, timeout=600
    )

    model = AutoModelForCausalLM.from_pretrained(out)
    prompts = [[first, first + 1, first + 2] for first in range(5, 205, 10)]
    with torch.no_grad():
        expected = [
            model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=40)[0, len(ids) :].tolist()
            for ids in prompts
        ]
    finish_reasons = ["stop" if ids[-1] in (0, 1) else "length" for ids in expected]
    assert "stop" in finish_reasons
    output = tmp_path / "output.json"
    command = [sys.executable, "-c", SCRIPT, out, json.dumps(prompts), str(output)]
    process = subprocess.run(
        command, env={**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, capture_output=True, text=True,
        timeout=900, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    assert json.loads(output.read_text()) == [list(pair) for pair in zip(expected, finish_reasons, strict=True)]
