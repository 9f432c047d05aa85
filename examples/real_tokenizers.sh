#!/usr/bin/env bash
# The chain with the real Llama-3 and Qwen tokenizers (128,256 and 151,646 tokens) on GSM8K, on a CPU in some minutes.
# The models are small and begin with random weights; the teacher is trained for a few steps first.
#
#   XTK_DATA=folder-with-tokenizers-and-corpora examples/real_tokenizers.sh FOLDER
set -euo pipefail
if [ -z "${XTK_DATA:-}" ]; then
  echo "skipped: XTK_DATA does not point to real tokenizers and corpora" >&2
  exit 0
fi
mkdir -p "$1"
cd "$1"

python - "$XTK_DATA" <<'PYTHON'
import json, shutil, sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

data = Path(sys.argv[1])
torch.manual_seed(0)
shape = dict(hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
             tie_word_embeddings=True, max_position_embeddings=1024)
LlamaForCausalLM(LlamaConfig(vocab_size=128256, **shape)).save_pretrained("student")
Qwen3ForCausalLM(Qwen3Config(vocab_size=151936, head_dim=32, **shape)).save_pretrained("teacher-untrained")
for model, tokenizer in (("student", "llama3"), ("teacher-untrained", "qwen")):
    for file in (data / "tokenizers" / tokenizer).iterdir():
        shutil.copyfile(file, Path(model) / file.name)
for name, rows in (("train", 64), ("test", 16)):
    lines = (data / "corpora" / f"gsm8k_{name}.jsonl").read_text().splitlines()[:rows]
    Path(f"{name}.jsonl").write_text("\n".join(lines) + "\n")
PYTHON

columns="--columns prompt=question,completion=answer"
training="--max-steps 12 --per-device-train-batch-size 8 --learning-rate 1e-2 --save-steps 0"

xtk distill teacher-untrained train.jsonl $columns --loss ce $training -o teacher
xtk build-projection student teacher -o p | xtk prune-projection - --top-k 4 -o p4
xtk cache-teacher teacher train.jsonl $columns --top-k 64 -o cache
xtk distill student cache --projection p4 --loss ce --loss p-kl $training -o distilled |
  xtk evaluate - test.jsonl $columns
