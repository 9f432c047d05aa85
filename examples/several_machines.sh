#!/usr/bin/env bash
# Two machines that share a folder, each with its own torchrun; here both run on this machine.
#
#   examples/several_machines.sh FOLDER
set -euo pipefail
models=$(cd "$(dirname "$0")" && pwd)/models.py
mkdir -p "$1"
cd "$1"
python "$models"

port=$(python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
machine() {
  torchrun --nnodes 2 --node-rank "$1" --nproc-per-node 1 --master-addr 127.0.0.1 --master-port "$port" \
    -m xtk distill student corpus.jsonl --teacher teacher --max-steps 4 --per-device-train-batch-size 4 -o distilled
}
machine 1 &
machine 0
wait $!
xtk inspect distilled
