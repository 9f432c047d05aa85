"""Online teachers: they score the documents of a block of steps, leave the device, and the student trains on these.

Each block has separate temporary caches in the run folder, removed when the block is done.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from xtk.batches.data_sources import NO_ROW, DocumentSource, TextSource
from xtk.batches.losses_per_teacher import number_duplicate_names
from xtk.batches.micro_batches import BatchSampler
from xtk.cache.reader import TeacherCache
from xtk.cache.writer import ShardedCacheWriter
from xtk.data.corpus_reader import Corpus, InMemoryCorpus
from xtk.errors import XtkError
from xtk.files.atomic_files import TEMPORARY_PREFIX
from xtk.files.storage_folders import open_folder
from xtk.losses.term import TeacherOutput
from xtk.parallel import process_group
from xtk.parallel.graceful_stop import StopListener
from xtk.rollouts.prompts import PromptFormat, read_prompts
from xtk.rollouts.rollout_record import Prompt
from xtk.teachers.cache_shard_writing import CacheJob
from xtk.teachers.online_teacher import OnlineTeacher, read_corpus_for_all
from xtk.text.document import Document

COMMAND_NAME = "distill"
DEFAULT_BLOCK_STEPS, DEFAULT_BLOCK_BYTES = 64, 4 << 30  # limits of a block without --teacher-block-steps

# (caches of a block, index of each document in each cache [teachers, documents]) -> the combined source.
CombineCaches = Callable[[Sequence[TeacherCache], NDArray[np.int64]], DocumentSource]


class OnlineSource(TextSource):
    """Documents in memory, with teacher outputs for the current block.

    Args:
        token_counts: int32 [teachers, documents], tokens of each teacher; -1: the teacher does not score the document.
        columns: columns of the data, stored in the caches' headers.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        teachers: Sequence[OnlineTeacher],
        token_counts: NDArray[np.int32],
        columns: Mapping[str, str],
        combine_caches: CombineCaches,
    ) -> None:
        super().__init__(documents)
        self.teachers, self._sizes, self._columns, self._combine_caches = (
            teachers,
            token_counts,
            columns,
            combine_caches,
        )
        self._block: DocumentSource | None = None

    def teacher_outputs(self, number: int, sample_set: int | None = 0) -> tuple[TeacherOutput | None, ...]:
        """Return the teachers' outputs for a document of the current block."""
        if self._block is None:
            raise RuntimeError("call open_caches before teacher_outputs: no block of documents is scored yet")
        return self._block.teacher_outputs(number, sample_set)

    def plan_jobs(self, numbers: NDArray[np.int64], epoch: int, folder: Path) -> list[CacheJob | None]:
        """Return each teacher's scoring job for a block; None: nothing to score.

        Args:
            numbers: int64 [n], indices of the block's documents, ascending.
        """
        jobs: list[CacheJob | None] = []
        for number, teacher in enumerate(self.teachers):
            own = self._documents_of_teacher(number, numbers)
            block = InMemoryCorpus([self.document(int(at)) for at in own], ["the documents of a block"], self._columns)
            path = folder / str(number)
            jobs.append(teacher.make_job(block, self._sizes[number, own], path, epoch) if len(own) else None)
        return jobs

    def open_caches(self, numbers: NDArray[np.int64], jobs: Sequence[CacheJob | None]) -> None:
        """Open the finished caches of a block.

        Args:
            numbers: as passed to `plan_jobs`.
            jobs: as returned by `plan_jobs`.
        """
        caches = {number: TeacherCache(job.location) for number, job in enumerate(jobs) if job is not None}
        rows = np.full(self._sizes.shape, NO_ROW, np.int64)
        for number in caches:
            own = self._documents_of_teacher(number, numbers)
            rows[number, own] = np.arange(len(own))
        unused = next(iter(caches.values()))  # placeholder for a teacher without documents: no index points to it
        self._block = self._combine_caches([caches.get(number, unused) for number in range(len(jobs))], rows)

    def close_caches(self) -> None:
        """Close the caches of a block."""
        self._block = None

    def bytes_per_document(self) -> float:
        """Return the estimated size of a document's teacher log-probabilities."""
        return sum(teacher.estimated_bytes_per_document for teacher in self.teachers)

    def _documents_of_teacher(self, teacher: int, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        own: NDArray[np.int64] = numbers[self._sizes[teacher, numbers] >= 0]
        return own


class TeacherBlocks:
    """Iterates over the steps of a run in blocks; teachers score each block before it, in all processes.

    Args:
        sampler: chooses the documents of each step.
        block_steps: steps per block; 0: up to `DEFAULT_BLOCK_STEPS`, within `DEFAULT_BLOCK_BYTES`.
        output: the run folder, shared by all processes.

    Attributes:
        teacher_seconds: time of scoring so far.
        lend_student: context manager with the student's `BackboneWithHead`, for `--teacher self`; its argument selects
            the weights. Set by the training loop.
        offload: context manager that moves the student off its device, for --offload-student. Set by the training loop.
    """

    def __init__(
        self,
        source: OnlineSource,
        sampler: BatchSampler,
        num_steps: int,
        block_steps: int,
        output: Path,
        accelerator: Any,
    ) -> None:
        self._source, self._order, self._steps, self._output = source, sampler, num_steps, output
        self._accelerator = accelerator
        step_bytes = source.bytes_per_document() * len(sampler.documents_of_step(0))
        self.lend_student: Callable[[str], AbstractContextManager[Any]] = lambda _: contextlib.nullcontext()
        self.offload: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        self.size = block_steps or max(1, min(DEFAULT_BLOCK_STEPS, int(DEFAULT_BLOCK_BYTES / max(step_bytes, 1.0))))
        self.teacher_seconds = 0.0

    def __call__(self, steps: range, stop_listener: StopListener) -> Iterator[range]:
        """Yield the steps of each block after scoring it; block boundaries do not depend on where a run resumes.

        Iteration ends after a stop signal, in all processes.
        """
        for number, block in enumerate(self.blocks()):
            if block.stop <= steps.start:
                continue
            folder = self._output / f"{TEMPORARY_PREFIX}live-{number:05d}"
            started = time.monotonic()
            try:
                if not self._score_block(block, folder, stop_listener):
                    return
                self.teacher_seconds += time.monotonic() - started
                yield range(max(block.start, steps.start), block.stop)
            finally:
                self._source.close_caches()
                if self._accelerator.is_main_process:
                    shutil.rmtree(folder, ignore_errors=True)

    def blocks(self) -> Iterator[range]:
        """Yield the blocks of the whole run; a block lies within one epoch, which selects the set of sampled tokens."""
        start = 0
        while start < self._steps:
            epoch, stop = self._order.epoch_of_step(start), start + 1
            while stop < min(start + self.size, self._steps) and self._order.epoch_of_step(stop) == epoch:
                stop += 1
            yield range(start, stop)
            start = stop

    @property
    def lends_student(self) -> bool:
        """Whether a teacher is the student itself (`--teacher self`)."""
        return any(teacher.student_weights for teacher in self._source.teachers)

    def metrics(self, step: int) -> dict[str, float]:
        """Return the metrics of scoring so far.

        Args:
            step: the completed step, counted from 0.
        """
        return {"teacher_seconds": round(self.teacher_seconds, 3)}

    def finish(self) -> None:
        """Clean up at the end of the run; nothing to do here."""

    def _score_block(self, block: range, folder: Path, stop: StopListener) -> bool:
        """Score the documents of a block, each process a part, and open the caches; False: stopped by a signal."""
        accelerator, source = self._accelerator, self._source
        numbers = np.unique([number for step in block for number in self._order.documents_of_step(step)])
        jobs = source.plan_jobs(numbers, self._order.epoch_of_step(block.start), folder)
        devices = [accelerator.device] if accelerator.device.type == "cuda" else []
        if devices:
            torch.cuda.empty_cache()  # give memory of training steps to the teachers
        # --teacher self needs the student on its device.
        offload = contextlib.nullcontext if self.lends_student else self.offload
        with offload(), torch.random.fork_rng(devices):  # dropout stays the same as without a teacher
            for teacher, job in zip(source.teachers, jobs, strict=True):
                if job is not None and not self._write_cache(teacher, job, stop):
                    return False
        source.open_caches(numbers, jobs)
        return True

    def _write_cache(self, teacher: OnlineTeacher, job: CacheJob, stop: StopListener) -> bool:
        accelerator = self._accelerator
        shards = len(job.plan.shards)
        writer: ShardedCacheWriter | None = None
        if accelerator.is_main_process:
            shutil.rmtree(job.location, ignore_errors=True)
            writer = ShardedCacheWriter(open_folder(job.location), job.header, job.plan.chunks_per_shard())
        accelerator.wait_for_everyone()
        own_shards = shards_of_process(
            shards, accelerator.process_index, accelerator.num_processes, one_process=teacher.needs_subprocess
        )
        entries = []
        with (
            self.lend_student(teacher.student_weights)
            if teacher.student_weights
            else contextlib.nullcontext() as lent_student,
            contextlib.closing(teacher.write_shards(job, own_shards, lent_student)) as written,
        ):
            more = True
            while more:  # synchronize after each shard: idle processes wait for one shard, not until a timeout
                entry = next(written, None)
                entries += [] if entry is None else [entry]
                if stop.reason(accelerator.device, by_signals=True):
                    return False
                more = bool(process_group.all_reduce_max(int(entry is not None), accelerator.device))
        teacher.release_device()
        for shard, manifest_entry in itertools.chain.from_iterable(process_group.all_gather_object(entries)):
            if writer is not None:
                writer.add_manifest_entry(shard, manifest_entry)
        if writer is not None:
            order = job.vocabulary_order
            writer.write_shared_files(
                teacher.teacher_tokenizer.to_files() | ({} if order is None else {order.file_name: order.file_content})
            )
            writer.finish()
        accelerator.wait_for_everyone()
        return True


def shards_of_process(num_shards: int, rank: int, num_processes: int, *, one_process: bool) -> list[int]:
    """Return the shards that a process scores; with `one_process`, the first one scores all."""
    if one_process:
        return list(range(num_shards)) if rank == 0 else []
    return list(range(rank, num_shards, num_processes))


def read_training_documents(
    teachers: Sequence[OnlineTeacher], corpus: Corpus, *, is_routed: bool
) -> tuple[list[Document], NDArray[np.int32]]:
    """Return the documents of a run with their token counts, checked against the teachers' limits.

    Args:
        teachers: one or more; with routing, their names are distinct.
        is_routed: whether each document names its teacher.

    Returns:
        The documents, and int32 [teachers, documents], tokens of each teacher; -1: not scored by it.
    """
    if not is_routed:
        return read_corpus_for_all(teachers, corpus, COMMAND_NAME)
    names = teacher_names(teachers)
    parts: list[list[Document]] = [[] for _ in teachers]
    for document in _with_known_routes(corpus, names, corpus.name):
        parts[names.index(document.teacher_name)].append(document)
    documents: list[Document] = []
    lengths = []
    for teacher, part in zip(teachers, parts, strict=True):
        read, sizes = read_corpus_for_all([teacher], InMemoryCorpus(part, corpus.sources, corpus.columns), COMMAND_NAME)
        documents += read
        lengths.append(sizes[0])
    sizes = np.full((len(teachers), len(documents)), NO_ROW, np.int32)
    ends = np.cumsum([0, *map(len, lengths)])
    for number, own in enumerate(lengths):
        sizes[number, ends[number] : ends[number + 1]] = own
    return documents, sizes


def _with_known_routes(documents: Iterable[Document], names: Sequence[str], where: str) -> Iterator[Document]:
    """Yield documents after checking that each names a teacher, and, at the end, that each teacher is named."""
    unused = list(names)
    for number, document in enumerate(documents):
        if document.teacher_name not in names:
            unknown = f"has {document.teacher_name!r}, which is not the name of a teacher"
            raise XtkError(
                f"the --route-column of a document {unknown if document.teacher_name else 'is empty'}",
                where=f"{where}, document {number}",
                hint=f"use --route-column with a column of the data that contains {' or '.join(names)}",
            )
        if document.teacher_name in unused:
            unused.remove(document.teacher_name)
        yield document
    if unused:
        raise XtkError(
            f"no document has the teacher {unused[0]} in its --route-column",
            where=where,
            hint="remove this --teacher, or write its name into the --route-column of some documents",
        )


def read_training_prompts(
    teachers: Sequence[OnlineTeacher], corpus: Corpus, prompt_format: PromptFormat, *, is_routed: bool
) -> list[Prompt]:
    """Return the prompts of a run.

    Args:
        teachers: the teachers, which read the prompts to check them.
        prompt_format: how prompts are built from records.
        is_routed: whether each prompt names its teacher.
    """
    prompts = read_prompts(corpus, prompt_format=prompt_format)
    documents = [prompt.document for prompt in prompts]
    if is_routed:
        documents = list(_with_known_routes(documents, teacher_names(teachers), corpus.name))
    held = InMemoryCorpus(documents, corpus.sources, corpus.columns)
    for teacher in teachers:
        teacher.read_corpus(held, "")
    return prompts


def teacher_names(teachers: Sequence[OnlineTeacher]) -> list[str]:
    """Return the teachers' names in metrics and routes: the last parts of their paths or hub ids, numbered if equal."""
    return number_duplicate_names([teacher.request.teacher_short_name for teacher in teachers])
