#!/usr/bin/env bash
# LoRA adapters with an online teacher; the resulting student is a whole model, with the adapter in a separate folder.
#
#   examples/lora.sh FOLDER
set -euo pipefail
models=$(cd "$(dirname "$0")" && pwd)/models.py
mkdir -p "$1"
cd "$1"
python "$models"

xtk distill student corpus.jsonl --teacher teacher --lora-r 8 --learning-rate 1e-3 --max-steps 8 -o adapted
ls adapted/model.safetensors adapted/adapter/adapter_model.safetensors
