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
from xtk.artifacts.corpus import Corpus, HeldCorpus
from xtk.artifacts.files import TEMPORARY
from xtk.artifacts.folders import folder_at
from xtk.artifacts.teacher_cache import CacheWriter, TeacherCache
from xtk.errors import XtkError
from xtk.losses.objective import Heard
from xtk.rollouts.prompts import PromptForm, read_prompts
from xtk.rollouts.rollout import Prompt
from xtk.teachers.caching import Work
from xtk.teachers.live import LiveTeacher, read_together
from xtk.tokens.document import Document
from xtk.training import processes
from xtk.training.batches import Order
from xtk.training.sources import NONE, Source, TextSource
from xtk.training.stopping import Stop
from xtk.training.teachers import distinct

WHO = "distill"
STEPS, BYTES = 64, 4 << 30  # of a block, at most, where nobody says how many

# From the caches of a block, and where they hold each document [teachers, documents], to who tells of them.
Join = Callable[[Sequence[TeacherCache], NDArray[np.int64]], Source]


class LiveSource(TextSource):
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
        teachers: Sequence[LiveTeacher],
        sizes: NDArray[np.int32],
        columns: Mapping[str, str],
        join: Join,
    ) -> None:
        super().__init__(documents)
        self.teachers, self._sizes, self._columns, self._join = teachers, sizes, columns, join
        self._block: Source | None = None

    def heard(self, number: int, draw: int | None = 0) -> tuple[Heard | None, ...]:
        """Return what was said of a document of the present block."""
        if self._block is None:
            raise RuntimeError("no block of documents was scored")
        return self._block.heard(number, draw)

    def works(self, numbers: NDArray[np.int64], epoch: int, folder: Path) -> list[Work | None]:
        """Return what each teacher has to do for a block; None: nothing.

        Args:
            numbers: int64 [n], the documents of the block, rising.
            epoch: how often all documents were seen before.
            folder: of the block's caches.
        """
        works: list[Work | None] = []
        for number, teacher in enumerate(self.teachers):
            own = self._own(number, numbers)
            block = HeldCorpus([self.document(int(at)) for at in own], ["the documents of a block"], self._columns)
            place = folder / str(number)
            works.append(teacher.work(block, self._sizes[number, own], place, epoch) if len(own) else None)
        return works

    def hear(self, numbers: NDArray[np.int64], works: Sequence[Work | None]) -> None:
        """Open the caches of a block, which are finished.

        Args:
            numbers: as they were given to `works`.
            works: what that returned.
        """
        caches = {number: TeacherCache(work.place) for number, work in enumerate(works) if work is not None}
        rows = np.full(self._sizes.shape, NONE, np.int64)
        for number in caches:
            own = self._own(number, numbers)
            rows[number, own] = np.arange(len(own))
        anyone = next(iter(caches.values()))  # in the place of a teacher who was asked nothing: no row leads there
        self._block = self._join([caches.get(number, anyone) for number in range(len(works))], rows)

    def forget(self) -> None:
        """Close the caches of a block."""
        self._block = None

    def bytes_per_document(self) -> float:
        """Return how much the signal of a document takes, about."""
        return sum(teacher.bytes_per_document for teacher in self.teachers)

    def _own(self, teacher: int, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        own: NDArray[np.int64] = numbers[self._sizes[teacher, numbers] >= 0]
        return own


class Blocks:
    """The steps of a run, in blocks; teachers speak before each, in all processes of the run.

    Args:
        source: of the documents.
        order: which of them a step takes.
        steps: of the whole run.
        size: steps of a block; 0: as many as the signal of `BYTES` has, from 1 to `STEPS`.
        output: the run's folder, which all processes see.
        accelerator: Accelerate's.

    Attributes:
        seconds: that the teachers took, so far.
        own: lends the student's `Cut` to a teacher that is the student, with the weights of that name; the run says.
        aside: keeps the student off its device meanwhile, if that is asked for; the run says.
    """

    def __init__(self, source: LiveSource, order: Order, steps: int, size: int, output: Path, accelerator: Any) -> None:
        self._source, self._order, self._steps, self._output = source, order, steps, output
        self._accelerator = accelerator
        signal = source.bytes_per_document() * len(order.step(0))
        self.own: Callable[[str], AbstractContextManager[Any]] = lambda _: contextlib.nullcontext()
        self.aside: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        self.size = size or max(1, min(STEPS, int(BYTES / max(signal, 1.0))))
        self.seconds = 0.0

    def __call__(self, steps: range, stop: Stop) -> Iterator[range]:
        """Yield the steps in blocks that begin where they always do, wherever the steps begin; each is scored before.

        A signal ends them, in all processes, before the block that was to be scored.

        Args:
            steps: those that are left.
            stop: knows of signals.
        """
        for number, block in enumerate(self.cut()):
            if block.stop <= steps.start:
                continue
            folder = self._output / f"{TEMPORARY}live-{number:05d}"
            started = time.monotonic()
            try:
                if not self._scored(block, folder, stop):
                    return
                self.seconds += time.monotonic() - started
                yield range(max(block.start, steps.start), block.stop)
            finally:
                self._source.forget()
                if self._accelerator.is_main_process:
                    shutil.rmtree(folder, ignore_errors=True)

    def cut(self) -> Iterator[range]:
        """Yield the blocks of the whole run; the steps of one are of one epoch, so that draws are."""
        start = 0
        while start < self._steps:
            epoch, stop = self._order.epoch(start), start + 1
            while stop < min(start + self.size, self._steps) and self._order.epoch(stop) == epoch:
                stop += 1
            yield range(start, stop)
            start = stop

    def told(self, step: int) -> dict[str, float]:
        """Return what metrics tell of the blocks so far.

        Args:
            step: that was taken, counted from 0.
        """
        return {"teacher_seconds": round(self.seconds, 3)}

    def finish(self) -> None:
        """Leave nothing of the blocks behind; the run is done."""

    def _scored(self, block: range, folder: Path, stop: Stop) -> bool:
        """Have the documents of a block scored, each process its part, and open what was said; False: asked to stop."""
        accelerator, source = self._accelerator, self._source
        numbers = np.unique([number for step in block for number in self._order.step(step)])
        works = source.works(numbers, self._order.epoch(block.start), folder)
        devices = [accelerator.device] if accelerator.device.type == "cuda" else []
        if devices:
            torch.cuda.empty_cache()  # what the student's steps left is the teachers' now
        # A teacher that is the student needs it where it is.
        aside = contextlib.nullcontext if any(teacher.weights for teacher in source.teachers) else self.aside
        with aside(), torch.random.fork_rng(devices):  # dropout is what it is without a teacher
            for teacher, work in zip(source.teachers, works, strict=True):
                if work is not None and not self._written(teacher, work, stop):
                    return False
        source.hear(numbers, works)
        return True

    def _written(self, teacher: LiveTeacher, work: Work, stop: Stop) -> bool:
        accelerator = self._accelerator
        shards = len(work.plan.shards)
        writer: CacheWriter | None = None
        if accelerator.is_main_process:
            shutil.rmtree(work.place, ignore_errors=True)
            writer = CacheWriter(folder_at(work.place), work.header, work.plan.rows())
        accelerator.wait_for_everyone()
        rank, ranks = accelerator.process_index, accelerator.num_processes
        if teacher.apart:  # on all devices: one process is enough
            rank, ranks = (0, 1) if accelerator.is_main_process else (1, 1)
        entries = []
        with (
            self.own(teacher.weights) if teacher.weights else contextlib.nullcontext() as own,
            contextlib.closing(teacher.fill(work, list(range(rank, shards, ranks)), own)) as filled,
        ):
            more = True
            while more:  # all meet after each shard: whoever has none waits for a shard at most, not for a block
                entry = next(filled, None)
                entries += [] if entry is None else [entry]
                if stop.agreed(accelerator.device, by_signals=True):
                    return False
                more = bool(processes.highest(int(entry is not None), accelerator.device))
        teacher.leave()
        for shard, told in itertools.chain.from_iterable(processes.told_by_all(entries)):
            if writer is not None:
                writer.accept(shard, told)
        if writer is not None:
            ranks = work.ranks
            writer.write_files(teacher.teacher.files() | ({} if ranks is None else {ranks.file: ranks.content}))
            writer.finish()
        accelerator.wait_for_everyone()
        return True


def read_for(
    teachers: Sequence[LiveTeacher], corpus: Corpus, *, routed: bool
) -> tuple[list[Document], NDArray[np.int32]]:
    """Read the data of a run as its teachers will.

    Args:
        teachers: one or more, distinct by name where documents are routed.
        corpus: the data.
        routed: each document names the one teacher that reads it.

    Returns:
        The documents, and int32 [teachers, documents], tokens of each teacher; -1 where it does not read.

    Raises:
        XtkError: the data is empty or too long, or a document names no teacher, or one that is not there.
    """
    if not routed:
        return read_together(teachers, corpus, WHO)
    names = names_of(teachers)
    parts: list[list[Document]] = [[] for _ in teachers]
    for number, document in enumerate(corpus):
        if document.route not in names:
            what = f"names the teacher {document.route!r}" if document.route else "names no teacher"
            raise XtkError(
                f"a document {what}",
                where=f"{corpus.name}, document {number}",
                hint=f"--route-column, a column of the data with {' or '.join(names)}",
            )
        parts[names.index(document.route)].append(document)
    documents: list[Document] = []
    lengths = []
    for teacher, part in zip(teachers, parts, strict=True):
        if not part:
            raise XtkError("no document names a teacher", where=f"{corpus.name}; {names[teachers.index(teacher)]}")
        read, sizes = read_together([teacher], HeldCorpus(part, corpus.sources, corpus.columns), WHO)
        documents += read
        lengths.append(sizes[0])
    sizes = np.full((len(teachers), len(documents)), NONE, np.int32)
    ends = np.cumsum([0, *map(len, lengths)])
    for number, own in enumerate(lengths):
        sizes[number, ends[number] : ends[number + 1]] = own
    return documents, sizes


def read_prompts_for(teachers: Sequence[LiveTeacher], corpus: Corpus, form: PromptForm) -> list[Prompt]:
    """Read the prompts of a run; of what follows them nothing is known yet.

    Args:
        teachers: of the run, which read the prompts too, so that they can tell what they are.
        corpus: the data.
        form: how its records are put.

    Raises:
        XtkError: the data is empty, or a record has no prompt, or one is longer than a teacher reads.
    """
    prompts = read_prompts(corpus, form=form)
    held = HeldCorpus([prompt.document for prompt in prompts], corpus.sources, corpus.columns)
    for teacher in teachers:
        teacher.read(held, "")
    return prompts


def names_of(teachers: Sequence[LiveTeacher]) -> list[str]:
    """Return how metrics and routes call teachers: by their folders, with a number behind names that come twice."""
    return distinct([teacher.request.teacher.resolve().name for teacher in teachers])


def blocks_of(source: Source, order: Order, steps: int, size: int, output: Path, accelerator: Any) -> Blocks | None:
    """Return the blocks of a run with live teachers, and tell of them; None for other runs."""
    if not isinstance(source, LiveSource):
        return None
    blocks = Blocks(source, order, steps, size, output, accelerator)
    teachers = ", ".join(names_of(source.teachers))
    processes = "a process of its own" if any(teacher.apart for teacher in source.teachers) else "each process"
    terminal.note(f"distill: {teachers} scores the documents of {blocks.size} steps at a time, in {processes}")
    return blocks
