"""Planning and reading of the shards of a cache: constant memory, linear time."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path

import pytest
import small_inputs

from xtk.cache.teacher_logprobs import Support
from xtk.data.corpus_reader import Corpus
from xtk.models.resolver import ModelRef
from xtk.teachers.cache_build_config import CacheRequest, sharding_options
from xtk.teachers.cache_shard_planning import make_shard_plan, read_shards
from xtk.text.tokenizer import Tokenizer


def planning_peak(request: CacheRequest, tokenizer: Tokenizer, corpus: Path) -> tuple[int, int]:
    """Return the number of documents of a corpus and the peak memory of planning its cache, in bytes."""
    tracemalloc.start()
    try:
        plan = make_shard_plan(sharding_options(request), Corpus([str(corpus)]), tokenizer)
        return plan.num_documents, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.long
def test_planning_eight_times_the_documents_needs_no_more_memory(pair, tmp_path):
    request = CacheRequest(ModelRef(pair.teacher, name="teacher"), Support("top-k", top_k=4))
    tokenizer = Tokenizer(pair.teacher)
    texts = small_inputs.sentences(1500, seed=9)
    few = small_inputs.write_jsonl(tmp_path / "few.jsonl", texts)
    many = small_inputs.write_jsonl(tmp_path / "many.jsonl", texts * 8)
    planning_peak(request, tokenizer, few)  # warm-up: some objects are created once and kept
    (few_documents, few_peak), (many_documents, many_peak) = (
        planning_peak(request, tokenizer, few),
        planning_peak(request, tokenizer, many),
    )
    assert (few_documents, many_documents) == (1500, 12_000)
    assert many_peak < 1.2 * few_peak


def reading_seconds(request: CacheRequest, tokenizer: Tokenizer, corpus: Corpus) -> float:
    sharding = sharding_options(request)
    plan = make_shard_plan(sharding, corpus, tokenizer)
    started = time.process_time()
    chunks = [
        chunk
        for _, shard_chunks in read_shards(sharding, corpus, tokenizer, plan, set(range(len(plan.shards))))
        for chunk in shard_chunks
    ]
    assert len(chunks) == plan.num_chunks
    assert "".join(document.text for document, _ in chunks) == "".join(document.text for document in corpus)
    return time.process_time() - started


def test_a_long_document_in_many_shards_is_tokenized_once(pair, tmp_path):
    """If each shard tokenized the whole document for its chunk, four times the text would take 16 times as long."""
    request = CacheRequest(ModelRef(pair.teacher, name="teacher"), Support("top-k", top_k=4), long_documents="split",
                           max_length=64, shard_tokens=256)  # fmt: skip
    tokenizer = Tokenizer(pair.teacher)
    text = "".join(small_inputs.sentences(400, seed=9))
    corpora = []
    for name, texts in (("short", ["one", text[:6000], "two"]), ("long", ["one", text[:6000] * 4, "two"])):
        corpora.append(Corpus([str(small_inputs.write_jsonl(tmp_path / f"{name}.jsonl", texts))]))
    reading_seconds(request, tokenizer, corpora[0])
    short, long = (min(reading_seconds(request, tokenizer, corpus) for _ in range(3)) for corpus in corpora)
    assert long < 9 * short
