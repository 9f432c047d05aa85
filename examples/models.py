"""Write an untrained student, teacher and corpus of the quickstart's kind into this folder: plumbing, in seconds."""

import json
from pathlib import Path

from xtk.quickstart.python_docs_corpus import python_documents
from xtk.quickstart.tiny_models import make_student, make_teacher

texts = [text[:1500] for _, text in python_documents()]
make_student(Path("student"), texts, seed=0)
make_teacher(Path("teacher"), texts, seed=1)
Path("corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:64]))
