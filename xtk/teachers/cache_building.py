"""Building of teacher caches: plan shards, write the missing ones, resume after a kill."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk import terminal
from xtk.cache.manifest import cache_figures
from xtk.cache.output import find_finished_cache
from xtk.cache.shard_writing import ShardPosition
from xtk.cache.teacher_document import TeacherDocument
from xtk.cache.teacher_logprobs import Support
from xtk.cache.token_ids_by_frequency import VocabularyOrder
from xtk.cache.writer import ShardedCacheWriter, mark_cache_unfinished, store_shard
from xtk.data.corpus_reader import Corpus
from xtk.errors import XtkError
from xtk.files.storage_folders import open_folder
from xtk.name_registry import load_registered
from xtk.progress import Progress
from xtk.teachers import BACKENDS
from xtk.teachers.backend_interface import TeacherBackend
from xtk.teachers.cache_build_config import (
    CacheRequest,
    check_cache_request,
    make_cache_header,
    make_vocabulary_order,
    open_teacher,
    sharding_options,
)
from xtk.teachers.cache_shard_planning import Chunk, ShardingOptions, ShardPlan, make_shard_plan, read_shards
from xtk.teachers.logprob_checks import check_scored_document
from xtk.teachers.teacher_processes import TeacherJob, WorkerPool
from xtk.text.tokenizer import Tokenizer

# Threads that check, pack and write shards while the teacher scores; compiled kernels run side by side in them. Half of
# the cores, since a teacher on a CPU needs them too.
WRITING_THREADS = max(1, min(4, (os.cpu_count() or 1) // 2))


@dataclass(frozen=True)
class CacheJob(TeacherJob):
    """Everything that a process needs to write shards of a cache."""

    corpus: Corpus
    location: str | Path  # path or URL of the cache
    sharding: ShardingOptions
    plan: ShardPlan
    vocabulary_order: VocabularyOrder | None  # of the cache, if the codec needs it

    def inherited_descriptors(self) -> list[int]:
        """Return the open files that a worker process needs: of data from a pipe."""
        return self.corpus.inherited_descriptors()

    def run(
        self, teacher: TeacherBackend, tokenizer: Tokenizer, tasks: Iterable[int]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Score and write these shards: while one is scored, the next is read and the last ones are written."""
        folder = open_folder(self.location)

        def store(place: ShardPosition, documents: list[TeacherDocument], where: str) -> dict[str, Any]:
            check_scored_documents(self.request, documents, teacher.vocab_size, where)
            return store_shard(folder, self.header, place, documents, self.vocabulary_order)

        rows_of = self.plan.chunks_per_shard()
        firsts = [0, *itertools.accumulate(rows_of)]
        written: deque[tuple[int, Future[dict[str, Any]]]] = deque()
        with (
            ThreadPoolExecutor(1, thread_name_prefix="xtk-read") as reading,
            ThreadPoolExecutor(WRITING_THREADS, thread_name_prefix="xtk-write") as writing,
        ):
            shards = read_shards(self.sharding, self.corpus, tokenizer, self.plan, set(tasks))
            coming = reading.submit(next, shards, None)
            while (read := coming.result()) is not None:
                coming = reading.submit(next, shards, None)
                number, pieces = read
                where = f"{self.corpus.name}, shard {number}"
                documents = score_chunks(self.request, teacher, pieces, where)
                place = ShardPosition(number, firsts[number], rows_of[number])
                while len(written) >= WRITING_THREADS or (written and written[0][1].done()):
                    last, entry = written.popleft()
                    yield last, entry.result()
                written.append((number, writing.submit(store, place, documents, where)))
            for last, entry in written:
                yield last, entry.result()


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
    """Return the teacher's outputs for some documents, not yet checked by `check_scored_documents`."""
    candidate_ids = candidate_ids_of(pieces, request.support, where)
    scores = teacher.score([tokens for _, tokens in pieces], candidate_ids)
    if len(scores) != len(pieces):
        raise XtkError(
            f"the teacher's backend returned log-probabilities of {len(scores)} documents instead of {len(pieces)}",
            where=where,
            hint="this is an error of the backend; use another --backend",
        )
    return [TeacherDocument(*piece, logprobs) for piece, logprobs in zip(pieces, scores, strict=True)]


def candidate_ids_of(pieces: Sequence[Chunk], support: Support, where: str) -> list[NDArray[np.int32]] | None:
    """Return the candidate ids of the data at each trained token, for `--support candidates`; None for others."""
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


@dataclass(frozen=True)
class CachePartition:
    """The part of a cache that this run writes, and the number of processes."""

    num_processes: int = 1  # processes on this machine, each with a teacher
    machine_rank: int = 0  # index of this machine, from 0
    num_machines: int = 1  # machines that share the folder; shard i belongs to machine i modulo num_machines

    def check(self) -> None:
        """Check that the machines are numbered from 0."""
        if not 0 <= self.machine_rank < self.num_machines:
            raise XtkError(
                f"--machine-rank is {self.machine_rank}, but must be at least 0 and below --num-machines "
                f"({self.num_machines})",
                hint="number the machines from 0: with --num-machines 2, use --machine-rank 0 and 1",
            )

    def own_shards(self, shards: list[int]) -> list[int]:
        """Return those of these shards that this machine writes."""
        return [number for number in shards if number % self.num_machines == self.machine_rank]


# Writes shards of a cache and yields the number and the manifest entry of each; calls a function with the number of
# tokens of each batch that the teacher has scored.
WriteShards = Callable[[list[int], Callable[[int], None]], Iterator[tuple[int, dict[str, Any]]]]


def cache_teacher(
    request: CacheRequest,
    corpus: Corpus,  # the documents, read twice: once to plan, once to score
    location: str | Path,
    *,
    force: bool = False,
    # the part that this run writes, and the number of processes; None: everything, in this process
    partition: CachePartition | None = None,
) -> dict[str, Any] | None:
    """Score a corpus with a teacher into a cache, and return its figures; finished shards of a killed run are kept.

    Returns:
        `documents`, `positions`, `tokens`, `bytes` and `teacher_bits_per_byte` of the finished cache; None while shards
        of other machines are missing.
    """
    partition = partition or CachePartition()
    check_cache_request(request)
    partition.check()
    if force and partition.num_machines > 1:
        raise XtkError(
            "--force cannot be combined with --num-machines: it would move shards of other machines",
            hint="move the folder away, then start all machines without --force",
        )
    folder = open_folder(location)
    folder.check_as_output("a cache", (request.teacher.folder, *corpus.sources), force=force)
    tokenizer = request.teacher_tokenizer()
    sharding = sharding_options(request)
    hashing = _start_hashing(request)
    # Data without candidate ids is refused before anything is written.
    plan = make_shard_plan(
        sharding,
        corpus,
        tokenizer,
        lambda document, piece: candidate_ids_of([(document, piece)], request.support, corpus.name),
    )
    ranks = make_vocabulary_order(request.precision, tokenizer, plan)
    hashing.join()
    opening = replace(request, backend_options={**request.backend_options, "longest": plan.max_chunk_tokens})
    header = make_cache_header(request, tokenizer, plan, ranks)
    job = CacheJob(opening, header, corpus, location, sharding, plan, ranks)
    with contextlib.ExitStack() as stack:
        stack.enter_context(folder.lock("cache", partition.machine_rank))
        write: WriteShards | None = None
        if force:
            # Open the teacher before moving the old cache: it stays if the teacher cannot be loaded.
            write = stack.enter_context(_open_shard_writer(job, tokenizer, partition, len(plan.shards)))
            folder.move_aside()
        elif finished := find_finished_cache(folder, job.header):
            return cache_figures(finished)
        else:
            mark_cache_unfinished(folder)
        mine = partition.own_shards(list(range(len(plan.shards))))
        writer = ShardedCacheWriter(folder, job.header, plan.chunks_per_shard(), mine)
        missing = partition.own_shards(writer.missing_shards())
        # Fails for a folder without write permission before the teacher is loaded.
        writer.write_shared_files(
            tokenizer.to_files() | ({} if ranks is None else {ranks.file_name: ranks.file_content})
        )
        if missing:
            write = write or stack.enter_context(_open_shard_writer(job, tokenizer, partition, len(missing)))
            _write_missing_shards(write, writer, plan, partition, missing)
        if others := writer.refresh_missing_shards():
            terminal.note(
                f"cache-teacher: machine {partition.machine_rank} has written its shards; {len(others)} of "
                f"{len(plan.shards)} shards of other machines are missing. The last machine to finish writes the "
                "manifest; if there is none at the end, run one of the commands again"
            )
            return None
        return cache_figures(writer.finish())


def _start_hashing(request: CacheRequest) -> threading.Thread:
    """Start to hash the weights, while shards are planned; `make_cache_header` raises the errors."""

    def read() -> None:
        with contextlib.suppress(Exception):
            load_registered(BACKENDS, request.backend, "backend").weights_identity(
                request.teacher, request.backend_options
            )

    thread = threading.Thread(target=read, name="xtk-weight-hash", daemon=True)
    thread.start()
    return thread


@contextlib.contextmanager
def _open_shard_writer(
    job: CacheJob, tokenizer: Tokenizer, share: CachePartition, shards: int
) -> Iterator[WriteShards]:
    """Open the teacher, in this process or in worker processes."""
    processes = min(share.num_processes, shards)
    if processes > 1:
        try:
            with WorkerPool(processes, job) as workers:
                yield workers.run
        finally:
            open_folder(job.location).remove_stale_temporary_files()  # of a killed worker
    else:
        teacher = open_teacher(job.request, tokenizer, job.header["teacher"]["weights"])

        def write(numbers: list[int], report_tokens: Callable[[int], None]) -> Iterator[tuple[int, dict[str, Any]]]:
            teacher.report_tokens = report_tokens
            return job.run(teacher, tokenizer, numbers)

        try:
            yield write
        finally:
            teacher.close()  # `evaluate` loads the student after that


def _write_missing_shards(
    write: WriteShards, writer: ShardedCacheWriter, plan: ShardPlan, share: CachePartition, missing: list[int]
) -> None:
    """Write the missing shards, with a progress bar."""
    mine = share.own_shards(list(range(len(plan.shards))))
    tokens = {number: plan.shards[number].num_tokens for number in mine}
    if len(missing) < len(mine):
        terminal.note(f"cache-teacher: continuing, {len(mine) - len(missing)} of {len(mine)} shards already exist")
    total = sum(tokens.values())
    done = total - sum(tokens[number] for number in missing)
    with Progress("cache-teacher", total, "tokens", done=done) as progress:
        for number, entry in write(missing, progress.advance_with_rate):
            writer.add_manifest_entry(number, entry)
