"""Write an untrained student, teacher and corpus of the quickstart's kind into this folder: plumbing, in seconds."""

import json
from pathlib import Path

from xtk.quickstart.corpus import documents
from xtk.quickstart.models import make_student, make_teacher

texts = [text[:1500] for _, text in documents()]
make_student(Path("student"), texts, seed=0)
make_teacher(Path("teacher"), texts, seed=1)
Path("corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:64]))
