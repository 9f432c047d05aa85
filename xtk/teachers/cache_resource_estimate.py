"""Estimate of the time, memory and disk space of a cache from a sample of documents: `cache-teacher --estimate`."""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xtk.cache.shard import CacheShard
from xtk.cache.shard_writing import ShardPosition, write_shard
from xtk.cache.teacher_document import TeacherDocument
from xtk.data.corpus_reader import Corpus
from xtk.errors import XtkError
from xtk.teachers.cache_build_config import (
    CacheRequest,
    check_cache_request,
    make_cache_header,
    make_vocabulary_order,
    open_teacher,
    sharding_options,
)
from xtk.teachers.cache_building import candidate_ids_of
from xtk.teachers.cache_shard_planning import make_shard_plan
from xtk.text.chat.conversation_tokens import MARKUP
from xtk.text.chat.regions import RegionStatistics
from xtk.text.document import Document
from xtk.text.token_sequence import TokenSequence

SAMPLE_SIZE = 32


@dataclass
class EvenSample:
    """An evenly spaced sample of a corpus of unknown length: keeps every document, then every second, every fourth."""

    max_size: int
    documents: list[tuple[Document, TokenSequence]] = field(default_factory=list)
    _step: int = 1
    _seen: int = 0

    def add(self, document: Document, sequence: TokenSequence) -> None:
        """Offer the next document of the corpus to the sample."""
        if self._seen % self._step == 0:
            self.documents.append((document, sequence))
            if len(self.documents) > self.max_size:
                self.documents = self.documents[::2]
                self._step *= 2
        self._seen += 1


def estimate_cache_cost(request: CacheRequest, corpus: Corpus) -> dict[str, Any]:
    """Return the cost of a cache, estimated by reading all data and scoring a sample.

    Returns:
        `documents`, `tokens`, `positions`, `shards`: exact. `bytes`, `bytes_per_position`, `seconds`,
        `tokens_per_second`: extrapolated from the sample, for one process on this machine. `memory_bytes`: peak memory
        of this process; `device_memory_bytes`: of the accelerator. `sampled_documents`. `regions`: of the sample, as in
        `RegionStatistics.to_json`; empty if it has no conversation.
    """
    check_cache_request(request)
    tokenizer = request.teacher_tokenizer()
    sample = EvenSample(SAMPLE_SIZE)
    plan = make_shard_plan(sharding_options(request), corpus, tokenizer, sample.add)
    trained = [(document, tokens) for document, tokens in sample.documents if tokens.train_mask.any()]
    if not trained:
        raise XtkError(
            "none of the documents sampled for the estimate has trained tokens",
            where=corpus.name,
            hint="check the columns with masks and labels in the data, and the train flags of messages",
        )
    teacher = open_teacher(request, tokenizer)
    documents = [tokens for _, tokens in trained]
    candidates = candidate_ids_of(trained, request.support, corpus.name)
    # The first is the warm-up: compilation and allocation do not count.
    teacher.score(documents[:1], None if candidates is None else candidates[:1])
    started = time.perf_counter()
    scores = teacher.score(documents, candidates)
    seconds = time.perf_counter() - started
    rows = [TeacherDocument(*pair, logprobs) for pair, logprobs in zip(trained, scores, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shard"
        ranks = make_vocabulary_order(request.precision, tokenizer, plan)
        write_shard(
            path, make_cache_header(request, tokenizer, plan, ranks), ShardPosition(0, 0, len(rows)), rows, ranks
        )
        bytes_per_position = path.stat().st_size / CacheShard(path).counts()["positions"]
    rate = sum(map(len, documents)) / seconds
    return {
        "documents": plan.num_chunks,
        "tokens": plan.num_tokens,
        "positions": plan.num_positions,
        "shards": len(plan.shards),
        "bytes": round(bytes_per_position * plan.num_positions),
        "bytes_per_position": round(bytes_per_position, 1),
        "seconds": round(plan.num_tokens / rate, 3),
        "tokens_per_second": round(rate, 1),
        "memory_bytes": _peak_memory(),
        "device_memory_bytes": _peak_memory_of_device(),
        "sampled_documents": len(documents),
        "regions": _regions(sample.documents),
    }


def _regions(documents: list[tuple[Document, TokenSequence]]) -> dict[str, Any]:
    """Return the sizes of regions of conversations, and how much of each the teacher's chat template writes."""
    statistics = RegionStatistics()
    for document, tokens in documents:
        if document.conversation is not None:
            statistics.add(document, tokens)
    regions = {name: figures for name, figures in statistics.to_json().items() if name != MARKUP}
    return {
        name: {"size": figures["size"], "scored_fraction": figures["trained_fraction"]}
        for name, figures in regions.items()
    }


def _peak_memory() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _peak_memory_of_device() -> int:
    import torch

    return int(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else 0
