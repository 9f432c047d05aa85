"""The GGUF file that llama.cpp's converter writes from an export has the student's weights, tokens and eos token."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import small_inputs
from transformers import Qwen3Config, Qwen3ForCausalLM

READ_GGUF_SCRIPT = """
import json, sys
import numpy as np
from gguf import GGUFReader, dequantize
from safetensors import safe_open
read = GGUFReader(sys.argv[1] + "/model.gguf")
tensors = {one.name: one for one in read.tensors}
with safe_open(sys.argv[1] + "/model.safetensors", "np") as weights:
    off = []
    for ours, theirs in (("model.embed_tokens", "token_embd"), ("model.layers.1.mlp.down_proj", "blk.1.ffn_down")):
        mine = weights.get_tensor(ours + ".weight")
        other = dequantize(tensors[theirs + ".weight"].data, tensors[theirs + ".weight"].tensor_type)
        off.append(float(np.abs(mine - other).max() / np.abs(mine).max()))
field = lambda name: read.fields[name].contents()
print(json.dumps({
    "off": off, "eos": field("tokenizer.ggml.eos_token_id"), "tokens": len(field("tokenizer.ggml.tokens")),
    "kind": field("general.architecture"), "template": "tokenizer.chat_template" in read.fields,
}))
"""


@pytest.mark.long
def test_gguf_file_of_llama_cpps_converter_contains_the_student(run, real_data, tmp_path):
    converter = Path(os.environ.get("XTK_GGUF_CONVERTER", ""))
    if not converter.is_file():
        pytest.skip("llama.cpp is not here: XTK_GGUF_CONVERTER is to name its convert_hf_to_gguf.py")
    student = tmp_path / "student"
    student.mkdir()
    for file in (real_data / "tokenizers" / "qwen").iterdir():
        shutil.copyfile(file, student / file.name)
    Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=151936, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=32, max_position_embeddings=512, tie_word_embeddings=True,
        )
    ).save_pretrained(student)  # fmt: skip
    data = small_inputs.write_jsonl(tmp_path / "data.jsonl", small_inputs.sentences(4))
    run("distill", student, data, "--loss", "ce", "--max-steps", 1, "-o", tmp_path / "run")
    out = tmp_path / "out"
    run("export", tmp_path / "run", "-o", out, timeout=600)
    command = [sys.executable, converter, out, "--outfile", out / "model.gguf", "--outtype", "q8_0"]
    subprocess.run(command, check=True, capture_output=True)
    environment = {**os.environ, "PYTHONPATH": str(converter.parent / "gguf-py")}
    command = [sys.executable, "-c", READ_GGUF_SCRIPT, str(out)]
    content = json.loads(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert max(content.pop("off")) < 1 / 127  # half a quantization step of 8 bits
    assert content == {"eos": 151645, "tokens": 151936, "kind": "qwen3", "template": True}
