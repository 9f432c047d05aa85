"""Live teachers: they score the documents of some steps, leave the device, and the student trains from what they said.

What they said is a cache of its own for each block of steps, in the run's folder, removed when the block is done.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from xtk import terminal
from xtk.artifacts.atomic_files import TEMPORARY_PREFIX
from xtk.artifacts.corpus import Corpus, InMemoryCorpus
from xtk.artifacts.storage import open_folder
from xtk.artifacts.teacher_cache import CacheWriter, TeacherCache
from xtk.errors import XtkError
from xtk.losses.loss_term import TeacherOutput
from xtk.rollouts.prompts import PromptFormat, read_prompts
from xtk.rollouts.rollout import Prompt
from xtk.teachers.cache_building import CacheJob
from xtk.teachers.online_teacher import OnlineTeacher, read_corpus_for_all
from xtk.tokens.document import Document
from xtk.training import distributed
from xtk.training.data_sources import NO_ROW, DocumentSource, TextSource
from xtk.training.graceful_stop import StopListener
from xtk.training.loss_assignment import number_duplicate_names
from xtk.training.micro_batches import BatchSampler

COMMAND_NAME = "distill"
DEFAULT_BLOCK_STEPS, DEFAULT_BLOCK_BYTES = 64, 4 << 30  # of a block, at most, where nobody says how many

# From the caches of a block, and where they hold each document [teachers, documents], to who tells of them.
CombineCaches = Callable[[Sequence[TeacherCache], NDArray[np.int64]], DocumentSource]


class OnlineSource(TextSource):
    """Documents in memory, and what teachers said of the present block of them.

    Args:
        documents: all of them.
        teachers: who score them.
        sizes: int32 [teachers, documents], tokens of each teacher; -1 of a document that it does not read.
        columns: of the data, which a block's caches are told about.
        join: how several teachers speak together.
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
        self.teachers, self._sizes, self._columns, self._join = teachers, token_counts, columns, combine_caches
        self._block: DocumentSource | None = None

    def teacher_outputs(self, number: int, sample_set: int | None = 0) -> tuple[TeacherOutput | None, ...]:
        """Return what was said of a document of the present block."""
        if self._block is None:
            raise RuntimeError("no block of documents was scored")
        return self._block.teacher_outputs(number, sample_set)

    def plan_jobs(self, numbers: NDArray[np.int64], epoch: int, folder: Path) -> list[CacheJob | None]:
        """Return what each teacher has to do for a block; None: nothing.

        Args:
            numbers: int64 [n], the documents of the block, rising.
            epoch: how often all documents were seen before.
            folder: of the block's caches.
        """
        works: list[CacheJob | None] = []
        for number, teacher in enumerate(self.teachers):
            own = self._documents_of_teacher(number, numbers)
            block = InMemoryCorpus([self.document(int(at)) for at in own], ["the documents of a block"], self._columns)
            place = folder / str(number)
            works.append(teacher.make_job(block, self._sizes[number, own], place, epoch) if len(own) else None)
        return works

    def open_caches(self, numbers: NDArray[np.int64], jobs: Sequence[CacheJob | None]) -> None:
        """Open the caches of a block, which are finished.

        Args:
            numbers: as they were given to `works`.
            jobs: what that returned.
        """
        caches = {number: TeacherCache(work.location) for number, work in enumerate(jobs) if work is not None}
        rows = np.full(self._sizes.shape, NO_ROW, np.int64)
        for number in caches:
            own = self._documents_of_teacher(number, numbers)
            rows[number, own] = np.arange(len(own))
        anyone = next(iter(caches.values()))  # in the place of a teacher who was asked nothing: no row leads there
        self._block = self._join([caches.get(number, anyone) for number in range(len(jobs))], rows)

    def close_caches(self) -> None:
        """Close the caches of a block."""
        self._block = None

    def bytes_per_document(self) -> float:
        """Return how much the signal of a document takes, about."""
        return sum(teacher.estimated_bytes_per_document for teacher in self.teachers)

    def _documents_of_teacher(self, teacher: int, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        own: NDArray[np.int64] = numbers[self._sizes[teacher, numbers] >= 0]
        return own


class TeacherBlocks:
    """The steps of a run, in blocks; teachers speak before each, in all processes of the run.

    Args:
        source: of the documents.
        order: which of them a step takes.
        steps: of the whole run.
        size: steps of a block; 0: as many as the signal of `BYTES` has, from 1 to `STEPS`.
        output: the run's folder, which all processes see.
        accelerator: Accelerate's.

    Attributes:
        teacher_seconds: that the teachers took, so far.
        lend_student: lends the student's `BackboneWithHead` to a teacher that is the student, with the weights of that
            name; the run says.
        offload: keeps the student off its device meanwhile, if that is asked for; the run says.
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
        signal = source.bytes_per_document() * len(sampler.documents_of_step(0))
        self.lend_student: Callable[[str], AbstractContextManager[Any]] = lambda _: contextlib.nullcontext()
        self.offload: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        self.size = block_steps or max(1, min(DEFAULT_BLOCK_STEPS, int(DEFAULT_BLOCK_BYTES / max(signal, 1.0))))
        self.teacher_seconds = 0.0

    def __call__(self, steps: range, stop_listener: StopListener) -> Iterator[range]:
        """Yield the steps in blocks that begin where they always do, wherever the steps begin; each is scored before.

        A signal ends them, in all processes, before the block that was to be scored.

        Args:
            steps: those that are left.
            stop_listener: knows of signals.
        """
        for number, block in enumerate(self.blocks()):
            if block.stop <= steps.start:
                continue
            folder = self._output / f"{TEMPORARY_PREFIX}live-{number:05d}"
            started = time.monotonic()
            try:
                if not self._scored(block, folder, stop_listener):
                    return
                self.teacher_seconds += time.monotonic() - started
                yield range(max(block.start, steps.start), block.stop)
            finally:
                self._source.close_caches()
                if self._accelerator.is_main_process:
                    shutil.rmtree(folder, ignore_errors=True)

    def blocks(self) -> Iterator[range]:
        """Yield the blocks of the whole run; the steps of one are of one epoch, so that draws are."""
        start = 0
        while start < self._steps:
            epoch, stop = self._order.epoch_of_step(start), start + 1
            while stop < min(start + self.size, self._steps) and self._order.epoch_of_step(stop) == epoch:
                stop += 1
            yield range(start, stop)
            start = stop

    def metrics(self, step: int) -> dict[str, float]:
        """Return what metrics tell of the blocks so far.

        Args:
            step: that was taken, counted from 0.
        """
        return {"teacher_seconds": round(self.teacher_seconds, 3)}

    def finish(self) -> None:
        """Leave nothing of the blocks behind; the run is done."""

    def _scored(self, block: range, folder: Path, stop: StopListener) -> bool:
        """Have the documents of a block scored, each process its part, and open what was said; False: asked to stop."""
        accelerator, source = self._accelerator, self._source
        numbers = np.unique([number for step in block for number in self._order.documents_of_step(step)])
        works = source.plan_jobs(numbers, self._order.epoch_of_step(block.start), folder)
        devices = [accelerator.device] if accelerator.device.type == "cuda" else []
        if devices:
            torch.cuda.empty_cache()  # what the student's steps left is the teachers' now
        # A teacher that is the student needs it where it is.
        aside = contextlib.nullcontext if any(teacher.student_weights for teacher in source.teachers) else self.offload
        with aside(), torch.random.fork_rng(devices):  # dropout is what it is without a teacher
            for teacher, work in zip(source.teachers, works, strict=True):
                if work is not None and not self._write_cache(teacher, work, stop):
                    return False
        source.open_caches(numbers, works)
        return True

    def _write_cache(self, teacher: OnlineTeacher, work: CacheJob, stop: StopListener) -> bool:
        accelerator = self._accelerator
        shards = len(work.plan.shards)
        writer: CacheWriter | None = None
        if accelerator.is_main_process:
            shutil.rmtree(work.location, ignore_errors=True)
            writer = CacheWriter(open_folder(work.location), work.header, work.plan.chunks_per_shard())
        accelerator.wait_for_everyone()
        rank, ranks = accelerator.process_index, accelerator.num_processes
        if teacher.needs_subprocess:  # on all devices: one process is enough
            rank, ranks = (0, 1) if accelerator.is_main_process else (1, 1)
        entries = []
        with (
            self.lend_student(teacher.student_weights) if teacher.student_weights else contextlib.nullcontext() as own,
            contextlib.closing(teacher.write_shards(work, list(range(rank, shards, ranks)), own)) as filled,
        ):
            more = True
            while more:  # all meet after each shard: whoever has none waits for a shard at most, not for a block
                entry = next(filled, None)
                entries += [] if entry is None else [entry]
                if stop.reason(accelerator.device, by_signals=True):
                    return False
                more = bool(distributed.all_reduce_max(int(entry is not None), accelerator.device))
        teacher.release_device()
        for shard, told in itertools.chain.from_iterable(distributed.all_gather_object(entries)):
            if writer is not None:
                writer.add_manifest_entry(shard, told)
        if writer is not None:
            ranks = work.vocabulary_order
            writer.write_shared_files(
                teacher.teacher_tokenizer.to_files() | ({} if ranks is None else {ranks.file_name: ranks.file_content})
            )
            writer.finish()
        accelerator.wait_for_everyone()
        return True


def read_training_documents(
    teachers: Sequence[OnlineTeacher], corpus: Corpus, *, is_routed: bool
) -> tuple[list[Document], NDArray[np.int32]]:
    """Read the data of a run as its teachers will.

    Args:
        teachers: one or more, distinct by name where documents are routed.
        corpus: the data.
        is_routed: each document names the one teacher that reads it.

    Returns:
        The documents, and int32 [teachers, documents], tokens of each teacher; -1 where it does not read.

    Raises:
        XtkError: the data is empty or too long, or a document names no teacher, or one that is not there.
    """
    if not is_routed:
        return read_corpus_for_all(teachers, corpus, COMMAND_NAME)
    names = teacher_names(teachers)
    parts: list[list[Document]] = [[] for _ in teachers]
    for number, document in enumerate(corpus):
        if document.teacher_name not in names:
            what = f"names the teacher {document.teacher_name!r}" if document.teacher_name else "names no teacher"
            raise XtkError(
                f"a document {what}",
                where=f"{corpus.name}, document {number}",
                hint=f"--route-column, a column of the data with {' or '.join(names)}",
            )
        parts[names.index(document.teacher_name)].append(document)
    documents: list[Document] = []
    lengths = []
    for teacher, part in zip(teachers, parts, strict=True):
        if not part:
            raise XtkError("no document names a teacher", where=f"{corpus.name}; {names[teachers.index(teacher)]}")
        read, sizes = read_corpus_for_all([teacher], InMemoryCorpus(part, corpus.sources, corpus.columns), COMMAND_NAME)
        documents += read
        lengths.append(sizes[0])
    sizes = np.full((len(teachers), len(documents)), NO_ROW, np.int32)
    ends = np.cumsum([0, *map(len, lengths)])
    for number, own in enumerate(lengths):
        sizes[number, ends[number] : ends[number + 1]] = own
    return documents, sizes


def read_training_prompts(
    teachers: Sequence[OnlineTeacher], corpus: Corpus, prompt_format: PromptFormat
) -> list[Prompt]:
    """Read the prompts of a run; of what follows them nothing is known yet.

    Args:
        teachers: of the run, which read the prompts too, so that they can tell what they are.
        corpus: the data.
        prompt_format: how its records are put.

    Raises:
        XtkError: the data is empty, or a record has no prompt, or one is longer than a teacher reads.
    """
    prompts = read_prompts(corpus, prompt_format=prompt_format)
    held = InMemoryCorpus([prompt.document for prompt in prompts], corpus.sources, corpus.columns)
    for teacher in teachers:
        teacher.read_corpus(held, "")
    return prompts


def teacher_names(teachers: Sequence[OnlineTeacher]) -> list[str]:
    """Return how metrics and routes call teachers: by their folders, with a number behind names that come twice."""
    return number_duplicate_names([teacher.request.teacher_folder.resolve().name for teacher in teachers])


def create_teacher_blocks(
    source: DocumentSource, sampler: BatchSampler, num_steps: int, block_steps: int, output: Path, accelerator: Any
) -> TeacherBlocks | None:
    """Return the blocks of a run with live teachers, and tell of them; None for other runs."""
    if not isinstance(source, OnlineSource):
        return None
    blocks = TeacherBlocks(source, sampler, num_steps, block_steps, output, accelerator)
    teachers = ", ".join(teacher_names(source.teachers))
    processes = (
        "a process of its own" if any(teacher.needs_subprocess for teacher in source.teachers) else "each process"
    )
    terminal.note(f"distill: {teachers} scores the documents of {blocks.size} steps at a time, in {processes}")
    return blocks
