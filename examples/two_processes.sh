#!/usr/bin/env bash
# One student in two processes on this machine, each with separate documents; --parallel fsdp=2 would shard the
# weights over them too, and give the same student.
#
#   examples/two_processes.sh FOLDER
set -euo pipefail
models=$(cd "$(dirname "$0")" && pwd)/models.py
mkdir -p "$1"
cd "$1"
python "$models"

xtk build-projection student teacher -o p
xtk cache-teacher teacher corpus.jsonl --top-k 64 -o cache
xtk distill student cache --projection p --max-steps 10 --per-device-train-batch-size 4 --num-processes 2 -o distilled
xtk inspect distilled --verify
