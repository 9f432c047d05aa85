"""Scoring and writing of shards of a cache, in this process or in a worker process."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.cache.shard_writing import ShardPosition
from xtk.cache.teacher_document import TeacherDocument
from xtk.cache.teacher_logprobs import Support
from xtk.cache.token_ids_by_frequency import VocabularyOrder
from xtk.cache.writer import store_shard
from xtk.data.corpus_reader import Corpus
from xtk.errors import XtkError
from xtk.files.storage_folders import StorageFolder, open_folder
from xtk.teachers.backend_interface import TeacherBackend
from xtk.teachers.cache_build_config import CacheRequest
from xtk.teachers.cache_shard_planning import Chunk, ShardingOptions, ShardPlan, read_shards
from xtk.teachers.logprob_checks import check_scored_document
from xtk.text.tokenizer import Tokenizer

# Threads that check, pack and write shards while the teacher scores; compiled kernels run side by side in them. Half of
# the cores, since a teacher on a CPU needs them too.
WRITING_THREADS = max(1, min(4, (os.cpu_count() or 1) // 2))


@dataclass(frozen=True)
class CacheJob:
    """Everything that a process needs to write shards of a cache.

    Attributes:
        request: teacher and options.
        corpus: the documents.
        location: path or URL of the cache.
        sharding: how documents are assigned to shards.
        plan: the documents of each shard.
        header: of the cache.
        vocabulary_order: of the cache, if the codec needs it.
    """

    request: CacheRequest
    corpus: Corpus
    location: str | Path
    sharding: ShardingOptions
    plan: ShardPlan
    header: dict[str, Any]
    vocabulary_order: VocabularyOrder | None

    def inherited_descriptors(self) -> list[int]:
        """Return the open files that a worker process needs: of data from a pipe."""
        return self.corpus.inherited_descriptors()

    def run(
        self, teacher: TeacherBackend, tokenizer: Tokenizer, shard_numbers: list[int]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Write some shards, as `write_shards`."""
        return write_shards(self, teacher, tokenizer, shard_numbers)


def write_shards(
    job: CacheJob, teacher: TeacherBackend, tokenizer: Tokenizer, shard_numbers: list[int]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Score and write shards: while one is scored, the next is read and the previous ones are packed and written.

    Yields:
        The number and the manifest entry of each written shard.
    """
    folder = open_folder(job.location)
    rows_of = job.plan.chunks_per_shard()
    firsts = [0, *itertools.accumulate(rows_of)]
    written: deque[tuple[int, Future[dict[str, Any]]]] = deque()
    with (
        ThreadPoolExecutor(1, thread_name_prefix="xtk-read") as reading,
        ThreadPoolExecutor(WRITING_THREADS, thread_name_prefix="xtk-write") as writing,
    ):
        shards = read_shards(job.sharding, job.corpus, tokenizer, job.plan, set(shard_numbers))
        coming = reading.submit(next, shards, None)
        while (read := coming.result()) is not None:
            coming = reading.submit(next, shards, None)
            number, pieces = read
            where = f"{job.corpus.name}, shard {number}"
            documents = score_chunks(job.request, teacher, pieces, where)
            place = ShardPosition(number, firsts[number], rows_of[number])
            while len(written) >= WRITING_THREADS or (written and written[0][1].done()):
                last, entry = written.popleft()
                yield last, entry.result()
            written.append((number, writing.submit(_store, job, folder, place, documents, teacher.vocab_size, where)))
        for last, entry in written:
            yield last, entry.result()


def _store(
    job: CacheJob,
    folder: StorageFolder,
    place: ShardPosition,
    documents: list[TeacherDocument],
    vocab_size: int,
    where: str,
) -> dict[str, Any]:
    """Check and write one shard, and return its manifest entry."""
    check_scored_documents(job.request, documents, vocab_size, where)
    return store_shard(folder, job.header, place, documents, job.vocabulary_order)


def check_scored_documents(
    request: CacheRequest, documents: Sequence[TeacherDocument], vocab_size: int, where: str
) -> None:
    """Refuse log-probabilities that are not valid distributions in the requested support."""
    options: dict[str, Any] = {"vocab_size": vocab_size, "support": request.support, "precision": request.precision}
    for at, row in enumerate(documents):
        check_scored_document(row, f"{where}, row {at}", **options)


def score_chunks(
    request: CacheRequest, teacher: TeacherBackend, pieces: Sequence[Chunk], where: str
) -> list[TeacherDocument]:
    """Return what the teacher says about some documents; `check_scored_documents` checks it.

    Args:
        where: the documents, for errors.
    """
    candidate_ids = candidate_ids_of(pieces, request.support, where)
    scores = teacher.score([tokens for _, tokens in pieces], candidate_ids)
    if len(scores) != len(pieces):
        raise XtkError(
            f"the teacher's backend returned log-probabilities of {len(scores)} documents instead of {len(pieces)}",
            where=where,
            hint="this is an error of the backend; use another --backend",
        )
    return [
        TeacherDocument(document, tokens, logprobs) for (document, tokens), logprobs in zip(pieces, scores, strict=True)
    ]


def candidate_ids_of(pieces: Sequence[Chunk], support: Support, where: str) -> list[NDArray[np.int32]] | None:
    """Return the candidate ids of the data at each trained token, for `--support candidates`; None for others.

    Args:
        where: the data, for errors.
    """
    if support.kind != "candidates":
        return None
    lacking = next((document for document, _ in pieces if document.candidate_ids is None), None)
    if lacking is not None:
        raise XtkError(
            "--support candidates needs the column candidate_ids, which a document of the data lacks",
            where=f"{where}, the document that begins {''.join(segment.text for segment in lacking.segments)[:40]!r}",
            hint="add one list of token ids for each trained teacher token but the first of the text, in order",
        )
    return [
        document.candidate_ids.to_padded(int(tokens.train_mask.sum()))
        for document, tokens in pieces
        if document.candidate_ids is not None
    ]
