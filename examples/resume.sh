#!/usr/bin/env bash
# A run that stops at its time limit exits with code 75; the same command resumes it, with the same result as one run.
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
