"""Filling a teacher cache: read, plan shards, score, write; and go on after a kill."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk import terminal
from xtk.artifacts.cache_shard import ScoredDocument, ShardPosition
from xtk.artifacts.corpus import Corpus
from xtk.artifacts.output_checks import check_output_folder
from xtk.artifacts.storage import LocalFolder, StorageFolder, open_folder
from xtk.artifacts.teacher_cache import (
    CacheWriter,
    cache_totals,
    mark_cache_unfinished,
    read_finished_cache,
    refuse_foreign_cache_folder,
    remove_cache,
    store_shard,
)
from xtk.artifacts.vocabulary_order import VocabularyOrder
from xtk.artifacts.write_locks import exclusive_write_lock
from xtk.errors import XtkError
from xtk.registry import load_registered
from xtk.teachers import BACKENDS
from xtk.teachers.backend import TeacherBackend
from xtk.teachers.cache_request import (
    CacheRequest,
    check_cache_request,
    make_cache_header,
    make_vocabulary_order,
    open_teacher,
    sharding_options,
)
from xtk.teachers.logprob_checks import check_scored_document
from xtk.teachers.shard_planning import ShardingOptions, ShardPlan, make_shard_plan, read_shards
from xtk.teachers.worker_pool import WorkerPool
from xtk.tokens.document import Document
from xtk.tokens.token_sequence import TokenSequence
from xtk.tokens.tokenizer import Tokenizer

SHARDS_IN_FLIGHT = 1  # scored, and not yet written


@dataclass(frozen=True)
class CachePartition:
    """Which part of a cache this run writes, and in how many processes.

    Attributes:
        num_processes: on this machine, a teacher each.
        machine_rank: of this machine.
        num_machines: that share the folder, shards dealt by index.
    """

    num_processes: int = 1
    machine_rank: int = 0
    num_machines: int = 1

    def check(self) -> None:
        """Refuse what makes no sense.

        Raises:
            XtkError: tells which option.
        """
        if self.num_processes < 1:
            raise XtkError(f"--num-processes is {self.num_processes}; there is at least one")
        if not 0 <= self.machine_rank < self.num_machines:
            raise XtkError(
                f"--machine-rank is {self.machine_rank} of --num-machines {self.num_machines}",
                hint="ranks count from 0: 0 and 1 of two machines",
            )

    def own_shards(self, shards: list[int]) -> list[int]:
        """Return those that are this machine's."""
        return [number for number in shards if number % self.num_machines == self.machine_rank]


@dataclass(frozen=True)
class CacheJob:
    """All that a process needs to know to write shards of a cache.

    Attributes:
        request: what the cache is to hold.
        corpus: the documents.
        location: where the cache goes.
        sharding: how documents become shards.
        plan: which documents each shard holds.
        header: of the cache.
        vocabulary_order: of the cache, for a codec that needs them.
    """

    request: CacheRequest
    corpus: Corpus
    location: str | Path
    sharding: ShardingOptions
    plan: ShardPlan
    header: dict[str, Any]
    vocabulary_order: VocabularyOrder | None


# Writes shards of a cache, and tells of each what the manifest is to tell.
WriteShards = Callable[[list[int]], Iterator[tuple[int, dict[str, Any]]]]


def cache_teacher(
    request: CacheRequest,
    corpus: Corpus,
    location: str | Path,
    *,
    force: bool = False,
    partition: CachePartition | None = None,
) -> dict[str, Any] | None:
    """Score a corpus with a teacher into a cache; finished shards of a killed run are kept.

    Args:
        request: what it is to hold.
        corpus: the documents, read twice: once to plan, once to score.
        location: where the cache goes: a folder, or a remote one.
        force: replace whatever cache is there.
        partition: which part of it is this run's, and in how many processes; None: all of it, in this process.

    Returns:
        `documents`, `positions`, `tokens`, `bytes` of the finished cache; None while shards of other machines are
        to come.

    Raises:
        XtkError: the data is empty or too long for the teacher, the folder holds another cache or has another
            writer, a model cannot be loaded.
    """
    partition = partition or CachePartition()
    check_cache_request(request)
    partition.check()
    if force and partition.num_machines > 1:
        raise XtkError("--force would remove what other machines write", hint="remove the folder, then start them all")
    folder = open_folder(location)
    if isinstance(folder, LocalFolder):
        check_output_folder(folder.path, "a cache", (request.teacher_folder, *corpus.sources))
    if force:
        refuse_foreign_cache_folder(folder)
    tokenizer = Tokenizer(request.teacher_folder, name=request.teacher_name)
    dealing = sharding_options(request)
    plan = make_shard_plan(dealing, corpus, tokenizer)
    ranks = make_vocabulary_order(request, tokenizer, plan)
    opening = replace(request, backend_options={**request.backend_options, "longest": plan.max_chunk_tokens})
    work = CacheJob(opening, corpus, location, dealing, plan, make_cache_header(request, tokenizer, plan, ranks), ranks)
    if not force and (finished := read_finished_cache(folder, work.header)):
        return cache_totals(finished)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_lock_folder(folder, partition))
        fill: WriteShards | None = None
        if force:
            # What cannot be made anew is not removed.
            fill = stack.enter_context(_open_shard_writer(work, tokenizer, partition, len(plan.shards)))
            remove_cache(folder)
        elif finished := read_finished_cache(folder, work.header):
            return cache_totals(finished)
        else:
            mark_cache_unfinished(folder)
        mine = partition.own_shards(list(range(len(plan.shards))))
        writer = CacheWriter(folder, work.header, plan.chunks_per_shard(), mine)
        missing = partition.own_shards(writer.missing_shards())
        # A folder that cannot be written to is known before the teacher starts.
        writer.write_shared_files(
            tokenizer.to_files() | ({} if ranks is None else {ranks.file_name: ranks.file_content})
        )
        if missing:
            fill = fill or stack.enter_context(_open_shard_writer(work, tokenizer, partition, len(missing)))
            _write_missing_shards(fill, writer, plan, partition, missing)
        if others := writer.refresh_missing_shards():
            terminal.note(
                f"cache-teacher: the shards of machine {partition.machine_rank} are there; {len(others)} of "
                f"{len(plan.shards)} are "
                "still to come from others. The one that ends last writes the manifest; run one again if none did"
            )
            return None
        return cache_totals(writer.finish())


def _lock_folder(folder: StorageFolder, share: CachePartition) -> contextlib.AbstractContextManager[None]:
    """Hold a folder against a second writer by mistake; remote ones have no locks."""
    if isinstance(folder, LocalFolder):
        return exclusive_write_lock(folder.path, "cache", share.machine_rank)
    return contextlib.nullcontext()


@contextlib.contextmanager
def _open_shard_writer(
    work: CacheJob, tokenizer: Tokenizer, share: CachePartition, shards: int
) -> Iterator[WriteShards]:
    """Open the teacher, here or in processes of their own."""
    processes = min(share.num_processes, shards)
    if processes > 1:
        on_devices = getattr(load_registered(BACKENDS, work.request.backend, "backend"), "on_devices", True)
        try:
            with WorkerPool(processes, work, device_per_process=on_devices) as workers:
                yield workers.write_shards
        finally:
            open_folder(work.location).remove_stale_temporary_files()  # of one that was killed
    else:
        teacher = open_teacher(work.request, tokenizer)
        yield lambda numbers: write_shards(work, teacher, tokenizer, numbers)


def _write_missing_shards(
    fill: WriteShards, writer: CacheWriter, plan: ShardPlan, share: CachePartition, missing: list[int]
) -> None:
    """Write the shards that are missing, and show how far it is."""
    mine = share.own_shards(list(range(len(plan.shards))))
    tokens = {number: plan.shards[number].num_tokens for number in mine}
    if len(missing) < len(mine):
        terminal.note(f"cache-teacher: going on, {len(mine) - len(missing)} of {len(mine)} shards are there")
    total = sum(tokens.values())
    done = total - sum(tokens[number] for number in missing)
    with terminal.Progress("cache-teacher", total, "tokens", done=done) as progress:
        for number, entry in fill(missing):
            writer.add_manifest_entry(number, entry)
            progress.advance(tokens[number])


def write_shards(
    job: CacheJob, teacher: TeacherBackend, tokenizer: Tokenizer, shard_numbers: list[int]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Score and write shards: while one is scored, the next is read and the last is written.

    Args:
        job: which cache.
        teacher: opened.
        tokenizer: the teacher's.
        shard_numbers: the shards that are wanted.

    Yields:
        The number of a shard that is written, and what the manifest is to tell of it.

    Raises:
        XtkError: the data changed, or the teacher says what is no distribution.
    """
    folder = open_folder(job.location)
    rows_of = job.plan.chunks_per_shard()
    firsts = [0, *itertools.accumulate(rows_of)]
    written: deque[tuple[int, Future[dict[str, Any]]]] = deque()
    with (
        ThreadPoolExecutor(1, thread_name_prefix="xtk-read") as reading,
        ThreadPoolExecutor(1, thread_name_prefix="xtk-write") as writing,
    ):
        shards = read_shards(job.sharding, job.corpus, tokenizer, job.plan, set(shard_numbers))
        coming = reading.submit(next, shards, None)
        while (read := coming.result()) is not None:
            coming = reading.submit(next, shards, None)
            number, pieces = read
            rows = _score_documents(job, teacher, number, pieces)
            place = ShardPosition(number, firsts[number], rows_of[number])
            while len(written) >= SHARDS_IN_FLIGHT or (written and written[0][1].done()):
                last, entry = written.popleft()
                yield last, entry.result()
            written.append((number, writing.submit(store_shard, folder, job.header, place, rows, job.vocabulary_order)))
        for last, entry in written:
            yield last, entry.result()


def _score_documents(
    work: CacheJob, teacher: TeacherBackend, number: int, pieces: list[tuple[Document, TokenSequence]]
) -> list[ScoredDocument]:
    """Score the documents of a shard.

    Raises:
        XtkError: what the teacher says of one of them is no distribution.
    """
    scores = teacher.score([tokens for _, tokens in pieces], _candidate_ids(work, pieces))
    where = f"{work.corpus.name}, shard {number}"
    if len(scores) != len(pieces):
        raise XtkError(
            f"the teacher was asked for {len(pieces)} documents and answered for {len(scores)}",
            where=where,
            hint="this is a mistake of the backend: another --backend",
        )
    rows = [ScoredDocument(document, tokens, said) for (document, tokens), said in zip(pieces, scores, strict=True)]
    for at, row in enumerate(rows):
        check_scored_document(
            row,
            f"{where}, row {at}",
            vocab_size=teacher.vocab_size,
            support=work.request.support,
            precision=work.request.precision,
        )
    return rows


def _candidate_ids(work: CacheJob, pieces: list[tuple[Document, TokenSequence]]) -> list[NDArray[np.int32]] | None:
    """Return the ids that the data names at each trained token, for `--support candidates`."""
    if work.request.support.kind != "candidates":
        return None
    if any(document.candidate_ids is None for document, _ in pieces):
        raise XtkError(
            "a document names no ids",
            where=work.corpus.name,
            hint="--support candidates reads a column candidate_ids: a list of ids for each trained token",
        )
    return [
        document.candidate_ids.to_padded(int(tokens.train_mask.sum()))
        for document, tokens in pieces
        if document.candidate_ids is not None
    ]
