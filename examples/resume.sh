#!/usr/bin/env bash
# A run whose time is up goes on with the same command (75 says so), and ends as the one that had all the time it wanted.
#
#   examples/resume.sh FOLDER
set -euo pipefail
models=$(cd "$(dirname "$0")" && pwd)/models.py
mkdir -p "$1"
cd "$1"
python "$models"

run="xtk distill student corpus.jsonl --loss ce --max-steps 2 --logging-steps 1"
$run -o whole
until $run --max-seconds 1 -o sliced; do
  [ $? -eq 75 ] || exit 1
done
cmp whole/model.safetensors sliced/model.safetensors
