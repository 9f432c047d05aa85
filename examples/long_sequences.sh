#!/usr/bin/env bash
# Long documents split over two processes (cp), with a limit of tokens per pass and gradient checkpointing.
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
