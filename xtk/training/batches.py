"""From rows of a cache to micro-batches: order, tokens, alignment, cells; ahead of the device, in a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from xtk.artifacts.teacher_cache import TeacherCache
from xtk.losses.cells import Example, Ground, Loss, join_examples
from xtk.losses.divergences import Divergence
from xtk.losses.head import Term
from xtk.tokens.alignment import align_sequences
from xtk.tokens.document import Document
from xtk.tokens.sequence import Sequence as TokenSequence
from xtk.tokens.sequence import sequences
from xtk.tokens.signal import Signal
from xtk.tokens.tokenizer import Tokenizer


@dataclass(frozen=True)
class Objective:
    """One loss of a run, with all that it needs beside an example.

    Attributes:
        loss: makes the cells.
        divergence: between both sides of them.
        ground: what both sides stand on.
    """

    loss: Loss
    divergence: Divergence
    ground: Ground

    def term(self, example: Example) -> Term:
        """Return the loss of an example, not yet scaled."""
        return Term.of(replace(self.loss.cells(example, self.ground), divergence=self.divergence))


class Source(Protocol):
    """Documents to train on, with or without a teacher's word on them."""

    def __len__(self) -> int: ...

    def read(self, number: int, draw: int = 0) -> tuple[Document, TokenSequence | None, Signal | None]:
        """Return a document, the teacher's tokens and the teacher's signal with one of its sets of draws."""

    def text_bytes(self) -> NDArray[np.int64]:
        """Return [documents], the length of each text."""

    def conversations(self) -> NDArray[np.bool_]:
        """Return [documents], which of them are conversations."""


class CacheSource:
    """The documents of a teacher cache."""

    def __init__(self, cache: TeacherCache) -> None:
        self._cache = cache

    def __len__(self) -> int:
        return len(self._cache)

    def read(self, number: int, draw: int = 0) -> tuple[Document, TokenSequence | None, Signal | None]:
        """Return one row."""
        row = self._cache.row(number, draw)
        return row.document, row.tokens, row.signal

    def text_bytes(self) -> NDArray[np.int64]:
        """Return [documents], the length of each text."""
        return self._cache.text_bytes()

    def conversations(self) -> NDArray[np.bool_]:
        """Return [documents], which of them are conversations."""
        return self._cache.conversations()


class TextSource:
    """Documents without a teacher, for training with cross-entropy alone."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self._documents = documents

    def __len__(self) -> int:
        return len(self._documents)

    def read(self, number: int, draw: int = 0) -> tuple[Document, TokenSequence | None, Signal | None]:
        """Return one document."""
        return self._documents[number], None, None

    def text_bytes(self) -> NDArray[np.int64]:
        """Return [documents], the length of each text."""
        return np.array([len(document.text.encode()) for document in self._documents], np.int64)

    def conversations(self) -> NDArray[np.bool_]:
        """Return [documents], which of them are conversations."""
        return np.array([document.conversation is not None for document in self._documents], np.bool_)


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass of one process takes.

    Attributes:
        input_ids: int64 [B, T], padded on the right.
        places: int64 [N], the rows of the flattened hidden states [B * T, H] that are compared.
        terms: one for each loss, not yet scaled.
        tokens: of the documents, without padding.
        unaligned: trained student tokens that no span covers.
        silent: positions at which the teacher said NaN, which are left out.
    """

    input_ids: NDArray[np.int64]
    places: NDArray[np.int64]
    terms: tuple[Term, ...]
    tokens: int
    unaligned: int
    silent: int


class BatchMaker:
    """Turns documents of a source into micro-batches of a student.

    Args:
        source: the documents.
        tokenizer: the student's.
        objectives: the losses.
        limit: tokens that the student reads; longer documents are cut there.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: Tokenizer,
        objectives: Sequence[Objective],
        limit: int | None,
    ) -> None:
        self._source, self._tokenizer, self._objectives = source, tokenizer, objectives
        self._limit = limit

    def make(self, numbers: Sequence[int], draw: int = 0) -> MicroBatch:
        """Return the micro-batch of some documents; without any, one of a single token that trains nothing.

        Args:
            numbers: of the documents.
            draw: which set of draws is taken, where the teacher's signal has some; it counts round.
        """
        rows = [self._source.read(number, draw) for number in numbers]
        heard = [None if signal is None else signal.without_nan() for _, _, signal in rows]
        said = [signal for _, _, signal in rows if signal is not None]
        students = sequences(self._tokenizer, [document for document, _, _ in rows])
        if self._limit is not None:
            students = [sequence.cut(self._limit) for sequence in students]
        examples = [
            _example(student, teacher, signal)
            for student, (_, teacher, _), signal in zip(students, rows, heard, strict=True)
        ]
        longest = max([1, *(len(student) for student in students)])
        ids = np.zeros((max(1, len(students)), longest), np.int64)
        for at, student in enumerate(students):
            ids[at, : len(student)] = student.ids
        joined = join_examples(examples)
        return MicroBatch(
            input_ids=ids,
            places=np.concatenate(
                [*(example.rows + at * longest for at, example in enumerate(examples)), np.zeros(0, np.int64)]
            ),
            terms=tuple(objective.term(joined) for objective in self._objectives),
            tokens=sum(len(student) for student in students),
            unaligned=len(joined.rows) - int((joined.spans[:, 1] - joined.spans[:, 0]).sum()),
            silent=sum(map(len, said)) - sum(len(signal) for signal in heard if signal is not None),
        )


def _example(student: TokenSequence, teacher: TokenSequence | None, signal: Signal | None) -> Example:
    rows = np.flatnonzero(student.trained).astype(np.int64) - 1
    if teacher is None:
        return Example(student.ids, rows, np.zeros((0, 4), np.int32), np.zeros(0, np.int32), None)
    spans = align_sequences(student, teacher)
    spans = spans[student.trained[spans[:, 1] - 1]]
    return Example(student.ids, rows, spans, teacher.ids, signal)


class Order:
    """Which documents a step takes: a function of seed and step alone, whatever the number of processes.

    Args:
        documents: the numbers to draw from.
        sizes: how long each is, to put like to like.
        per_step: documents in a step.
        seed: of the shuffle, which is another one each epoch.
    """

    def __init__(self, documents: NDArray[np.int64], sizes: NDArray[np.int64], per_step: int, seed: int) -> None:
        self._documents, self._sizes, self._per_step, self._seed = documents, sizes, per_step, seed
        self._epoch = -1
        self._shuffled = documents

    def epoch(self, step: int) -> int:
        """Return how often all documents were taken before a step."""
        return step * self._per_step // len(self._documents)

    def step(self, step: int) -> list[int]:
        """Return the documents of a step, longest first."""
        size = len(self._documents)
        places = range(step * self._per_step, (step + 1) * self._per_step)
        numbers = [int(self._of_epoch(place // size)[place % size]) for place in places]
        return sorted(numbers, key=lambda number: (-int(self._sizes[number]), number))

    def _of_epoch(self, epoch: int) -> NDArray[np.int64]:
        if epoch != self._epoch:
            self._epoch = epoch
            self._shuffled = np.random.default_rng([self._seed, epoch]).permutation(self._documents)
        return self._shuffled

    def share(self, step: int, rank: int, processes: int, batch: int) -> list[list[int]]:
        """Return the micro-batches of one process: every process has as many, of like lengths, perhaps empty."""
        numbers = self.step(step)
        groups = [numbers[start : start + batch] for start in range(0, len(numbers), batch)]
        rounds = -(-len(groups) // processes)
        groups += [[]] * (rounds * processes - len(groups))
        return groups[rank::processes]


Item = TypeVar("Item")


def ahead(make: Callable[[int], Item], numbers: range) -> Iterator[Item]:
    """Yield `make(number)` in order, each made in a thread while the one before it is used."""
    with ThreadPoolExecutor(1, thread_name_prefix="xtk-batches") as pool:
        pending = [pool.submit(make, number) for number in numbers[:1]]
        for number in numbers:
            current = pending.pop()
            if number + 1 in numbers:
                pending.append(pool.submit(make, number + 1))
            yield current.result()
