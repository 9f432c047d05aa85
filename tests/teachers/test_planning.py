"""What is known of a corpus before the teacher starts does not grow with it."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
import small_inputs

from xtk.artifacts.corpus_reader import Corpus
from xtk.teachers.cache_build_config import CacheRequest, sharding_options
from xtk.teachers.cache_shard_planning import make_shard_plan
from xtk.tokens.teacher_logprobs import Support
from xtk.tokens.tokenizer import Tokenizer


def peak(request: CacheRequest, tokenizer: Tokenizer, corpus: Path) -> tuple[int, int]:
    """Return the documents of a corpus, and the bytes that planning it took at most."""
    tracemalloc.start()
    try:
        plan = make_shard_plan(sharding_options(request), Corpus([str(corpus)]), tokenizer)
        return plan.num_documents, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.long
def test_planning_ten_times_the_documents_takes_no_more_memory(pair, tmp_path):
    request = CacheRequest(pair.teacher, "teacher", Support("top-k", top_k=4))
    tokenizer = Tokenizer(pair.teacher)
    texts = small_inputs.sentences(1500, seed=9)
    few = small_inputs.write_jsonl(tmp_path / "few.jsonl", texts)
    many = small_inputs.write_jsonl(tmp_path / "many.jsonl", texts * 8)
    peak(request, tokenizer, few)  # what is made once and kept
    (one, small), (other, large) = peak(request, tokenizer, few), peak(request, tokenizer, many)
    assert (one, other) == (1500, 12_000)
    assert large < 1.2 * small
