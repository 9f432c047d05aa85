"""What a cache will cost, from a small sample of its documents: `cache-teacher --estimate`."""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xtk.artifacts.cache_shard import CacheShard, ScoredDocument, ShardPosition, write_shard
from xtk.artifacts.corpus import Corpus
from xtk.errors import XtkError
from xtk.teachers.cache_request import (
    CacheRequest,
    check_cache_request,
    make_cache_header,
    make_vocabulary_order,
    open_teacher,
    sharding_options,
)
from xtk.teachers.shard_planning import make_shard_plan
from xtk.tokens.document import Document
from xtk.tokens.token_sequence import TokenSequence
from xtk.tokens.tokenizer import Tokenizer

SAMPLE_SIZE = 32


@dataclass
class EvenSample:
    """Documents from all over a corpus whose length nobody knows: every one, then every second, every fourth..."""

    max_size: int
    documents: list[tuple[Document, TokenSequence]] = field(default_factory=list)
    _step: int = 1
    _seen: int = 0

    def add(self, document: Document, sequence: TokenSequence) -> None:
        """Show it one more."""
        if self._seen % self._step == 0:
            self.documents.append((document, sequence))
            if len(self.documents) > self.max_size:
                self.documents = self.documents[::2]
                self._step *= 2
        self._seen += 1


def estimate_cache_cost(request: CacheRequest, corpus: Corpus) -> dict[str, Any]:
    """Read the data, score a sample of it, and tell what the whole will take.

    Returns:
        `documents`, `tokens`, `positions`, `shards`: counted. `bytes`, `bytes_per_position`, `seconds`,
        `tokens_per_second`: of the whole, as the sample has it, on one process of this machine. `memory_bytes`: the
        most that this process held; `device_memory_bytes`: on the accelerator. `sampled_documents`.

    Raises:
        XtkError: as the caching itself would.
    """
    check_cache_request(request)
    tokenizer = Tokenizer(request.teacher_folder, name=request.teacher_name)
    sample = EvenSample(SAMPLE_SIZE)
    plan = make_shard_plan(sharding_options(request), corpus, tokenizer, sample.add)
    trained = [(document, tokens) for document, tokens in sample.documents if tokens.train_mask.any()]
    if not trained:
        raise XtkError("none of the sampled documents trains anything", where=corpus.name)
    teacher = open_teacher(request, tokenizer)
    documents = [tokens for _, tokens in trained]
    teacher.score(documents[:1])  # what is compiled and allocated once is no part of the rate
    started = time.perf_counter()
    scores = teacher.score(documents)
    seconds = time.perf_counter() - started
    rows = [ScoredDocument(*pair, said) for pair, said in zip(trained, scores, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shard"
        ranks = make_vocabulary_order(request, tokenizer, plan)
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
    }


def _peak_memory() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _peak_memory_of_device() -> int:
    import torch

    return int(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else 0
