"""Before a run starts, each of its input documents is read only once."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections import Counter

import small_inputs
from recorded_training_steps import make_train_config, open_run_inputs

from xtk.training.distill import evaluation_identity, run_identity
from xtk.training.train_config import LoggingConfig


class CountedSource:
    """A source of documents that counts the reads of each document."""

    def __init__(self, source) -> None:
        self._source, self.reads = source, Counter()

    def __getattr__(self, name):
        return getattr(self._source, name)

    def __len__(self) -> int:
        return len(self._source)

    def document(self, number: int):
        self.reads[number] += 1
        return self._source.document(number)


def test_the_checks_at_the_start_read_each_document_once(pair, tmp_path):
    student = shutil.copytree(pair.student, tmp_path / "student")
    (student / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    rows = [*({"text": text} for text in small_inputs.sentences(8)), {"messages": messages}]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = make_train_config(["ce"])
    inputs = open_run_inputs(student, [str(tmp_path / "data.jsonl")], recipe)
    source = CountedSource(inputs.source)
    dataclasses.replace(inputs, source=source).training_documents(recipe, None)
    assert source.reads == dict.fromkeys(range(len(rows)), 1)


def test_held_out_documents_are_hashed_once(pair, cache):
    recipe = dataclasses.replace(make_train_config(["byte-kl"]), early_stopping_patience=2)
    logging = LoggingConfig(eval_steps=1)
    inputs = open_run_inputs(pair.student, [cache], recipe, (), (cache,))
    source = CountedSource(inputs.held_out.source)
    inputs = dataclasses.replace(inputs, held_out=dataclasses.replace(inputs.held_out, source=source))
    evaluation = evaluation_identity(inputs, logging)
    assert run_identity(recipe, inputs, 1, logging)["eval_documents"] == evaluation["--eval-data"]
    assert source.reads == dict.fromkeys(range(len(source)), 1)
