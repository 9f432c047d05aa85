"""What a cache will cost, from a small sample of its documents: `cache-teacher --plan`."""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xtk.artifacts.corpus import Corpus
from xtk.artifacts.shard import Place, Row, Shard, write_shard
from xtk.errors import XtkError
from xtk.teachers.planning import make_plan
from xtk.teachers.request import CacheRequest, cache_header, check_request, dealing_of, open_teacher, ranks_for
from xtk.tokens.document import Document
from xtk.tokens.sequence import Sequence
from xtk.tokens.tokenizer import Tokenizer

SAMPLED = 32


@dataclass
class Spread:
    """Documents from all over a corpus whose length nobody knows: every one, then every second, every fourth..."""

    size: int
    held: list[tuple[Document, Sequence]] = field(default_factory=list)
    _step: int = 1
    _seen: int = 0

    def add(self, document: Document, sequence: Sequence) -> None:
        """Show it one more."""
        if self._seen % self._step == 0:
            self.held.append((document, sequence))
            if len(self.held) > self.size:
                self.held = self.held[::2]
                self._step *= 2
        self._seen += 1


def forecast(request: CacheRequest, corpus: Corpus) -> dict[str, Any]:
    """Read the data, score a sample of it, and tell what the whole will take.

    Returns:
        `documents`, `tokens`, `positions`, `shards`: counted. `bytes`, `bytes_per_position`, `seconds`,
        `tokens_per_second`: of the whole, as the sample has it, on one process of this machine. `memory_bytes`: the
        most that this process held; `device_memory_bytes`: on the accelerator. `sampled_documents`.

    Raises:
        XtkError: as the caching itself would.
    """
    check_request(request)
    tokenizer = Tokenizer(request.teacher, name=request.name)
    sample = Spread(SAMPLED)
    plan = make_plan(dealing_of(request), corpus, tokenizer, sample.add)
    trained = [(document, tokens) for document, tokens in sample.held if tokens.trained.any()]
    if not trained:
        raise XtkError("none of the sampled documents trains anything", where=corpus.name)
    teacher = open_teacher(request, tokenizer)
    documents = [tokens for _, tokens in trained]
    teacher.score(documents[:1])  # what is compiled and allocated once is no part of the rate
    started = time.perf_counter()
    scores = teacher.score(documents)
    seconds = time.perf_counter() - started
    rows = [Row(*pair, said) for pair, said in zip(trained, scores, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shard"
        ranks = ranks_for(request, tokenizer, plan)
        write_shard(path, cache_header(request, tokenizer, plan, ranks), Place(0, 0, len(rows)), rows, ranks)
        bytes_per_position = path.stat().st_size / Shard(path).figures()["positions"]
    rate = sum(map(len, documents)) / seconds
    return {
        "documents": plan.pieces,
        "tokens": plan.tokens,
        "positions": plan.positions,
        "shards": len(plan.shards),
        "bytes": round(bytes_per_position * plan.positions),
        "bytes_per_position": round(bytes_per_position, 1),
        "seconds": round(plan.tokens / rate, 3),
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
