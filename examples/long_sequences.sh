#!/usr/bin/env bash
# Rows of documents shared by two processes (cp), in passes of a bounded number of tokens, with checkpointed gradients.
#
#   examples/long_sequences.sh FOLDER
set -euo pipefail
models=$(cd "$(dirname "$0")" && pwd)/models.py
mkdir -p "$1"
cd "$1"
python "$models"

xtk cache-teacher teacher corpus.jsonl --top-k 64 -o cache
xtk distill student cache --num-processes 2 --parallel cp=2 --max-batch-tokens 2048 --gradient-checkpointing \
  --max-steps 4 -o distilled
xtk inspect distilled
