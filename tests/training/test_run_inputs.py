"""Before a run starts: each document is read only once, and those that are too long are found."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections import Counter

import numpy as np
import pytest
import small_inputs
import tokenizers
from recorded_training_steps import make_train_config, open_run_inputs

from xtk.batches.micro_batches import pad_or_pack
from xtk.errors import XtkError
from xtk.runs.metrics_file import MetricsFile, metric_name, read_metrics
from xtk.text.tokenizer import Tokenizer
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


def test_documents_that_a_normalizer_makes_longer_are_counted(pair, tmp_path):
    student = shutil.copytree(pair.student, tmp_path / "student")
    backend = tokenizers.Tokenizer.from_file(str(student / "tokenizer.json"))
    backend.normalizer = tokenizers.normalizers.NFD()
    backend.save(str(student / "tokenizer.json"))
    text = "\uac01" * 50  # 3 bytes, 9 after normalization
    (tmp_path / "data.jsonl").write_text(json.dumps({"text": text}) + "\n")
    recipe = make_train_config(["ce"])
    inputs = open_run_inputs(student, [str(tmp_path / "data.jsonl")], recipe)
    assert len(Tokenizer(student).encode([text])[0].ids) > 300
    with pytest.raises(XtkError, match="1 of 1 documents have more tokens than the limit of 200"):
        inputs.training_documents(recipe, 200)


def test_a_packed_batch_of_one_document_without_tokens_has_padding():
    ids, starts, lengths = pad_or_pack([np.zeros(0, np.int32)], 8)
    assert ids.shape == (1, 8)
    assert starts.tolist() == [0]
    assert lengths == (8,)


def test_metrics_of_teachers_whose_names_are_not_utf8_are_written(tmp_path):
    name = metric_name("byte-kl", "t\udcff", ["t\udcff", "other"])
    MetricsFile(tmp_path / "metrics.jsonl", -1).write({"step": 1, name: 1.0})
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "byte-kl/t\\udcff": 1.0}]
