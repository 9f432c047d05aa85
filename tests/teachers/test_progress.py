"""Progress of `cache-teacher`: it moves with every batch, also within a shard and with worker processes."""

from __future__ import annotations

import re

import pytest

from xtk import progress
from xtk.cache.teacher_logprobs import make_support
from xtk.data.corpus_reader import Corpus
from xtk.models.resolver import ModelRef
from xtk.teachers.cache_build_config import CacheRequest
from xtk.teachers.cache_building import CachePartition, cache_teacher

LINE = re.compile(r"cache-teacher: ([\d,]+)/([\d,]+) tokens  .+ (?:so far|left)")


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 2])
def test_progress_moves_with_every_batch(pair, corpus, tmp_path, monkeypatch, capsys, num_processes):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0)
    shard_tokens = 65536 if num_processes == 1 else 400
    request = CacheRequest(
        ModelRef(pair.teacher, name="teacher"), make_support(""), batch_tokens=200, shard_tokens=shard_tokens
    )
    figures = cache_teacher(
        request, Corpus([str(corpus)]), tmp_path / "cache", partition=CachePartition(num_processes=num_processes)
    )
    lines = [[int(number.replace(",", "")) for number in line] for line in LINE.findall(capsys.readouterr().err)]
    done, totals = zip(*lines, strict=True)
    assert len(done) >= figures["tokens"] // 200  # one line for each batch
    assert list(done) == sorted(done)
    assert done[-1] == figures["tokens"]
    assert set(totals) == {figures["tokens"]}
