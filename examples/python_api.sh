#!/usr/bin/env bash
# The Python API in three training loops: plain torch, the Trainer of transformers, and TRL's SFTTrainer.
#
#   examples/python_api.sh FOLDER
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
cd "$1"
python "$here/models.py"

xtk cache-teacher teacher corpus.jsonl -o cache
python "$here/own_loop.py" student cache own-loop
python "$here/trainer.py" student cache trainer
if python -c "import trl" 2> /dev/null; then
  python "$here/trl_sft.py" student cache trl
else
  echo "skipped: TRL is not installed" >&2
fi
for run in own-loop trainer trl; do
  if [ -d "$run" ]; then xtk evaluate "$run" corpus.jsonl; fi
done
