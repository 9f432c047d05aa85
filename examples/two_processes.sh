#!/usr/bin/env bash
# One student in two processes on this machine, on the quickstart's kind of models, untrained: the plumbing in a minute.
#
#   examples/two_processes.sh FOLDER
set -euo pipefail
mkdir -p "$1"
cd "$1"

python - <<'PYTHON'
import json
from pathlib import Path

from xtk.quickstart.corpus import documents
from xtk.quickstart.models import make_student, make_teacher

texts = [text for _, text in documents()]
make_student(Path("student"), texts, seed=0)
make_teacher(Path("teacher"), texts, seed=1)
Path("corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:64]))
PYTHON

xtk build-projection student teacher -o p
xtk cache-teacher teacher corpus.jsonl --top-k 64 -o cache
xtk distill student cache --projection p --max-steps 10 --per-device-train-batch-size 4 --num-processes 2 -o distilled
xtk inspect distilled --verify
