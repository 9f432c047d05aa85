"""From rows of a cache to micro-batches: order, tokens, alignment, cells; ahead of the device, in a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from xtk.evaluation.agreement import Likeliest
from xtk.losses.cells import Example, join_examples
from xtk.losses.head import Term
from xtk.losses.objective import Heard, Objective, example_of
from xtk.tokens.document import Document
from xtk.tokens.sequence import Sequence as TokenSequence
from xtk.tokens.sequence import sequences
from xtk.tokens.signal import Signal
from xtk.tokens.tokenizer import Tokenizer
from xtk.training.combining import Weighing, tallies_of
from xtk.training.sources import Source

_NO_IDS, _NO_NUMBERS = np.zeros(0, np.int32), np.zeros(0, np.float32)
NOTHING = Signal(_NO_IDS, np.zeros(1, np.int64), _NO_IDS, *(_NO_NUMBERS,) * 4)


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass of one process takes.

    Attributes:
        input_ids: int64 [B, T], padded on the right; or [1, T], documents one behind the other.
        lengths: of the documents in one row, with what fills it at its end; None: each has a row of its own.
        places: int64 [N], the rows of the flattened hidden states [B * T, H] that are compared.
        terms: one for each objective, not yet scaled.
        tokens: of the documents, without padding.
        rows: the student's tokens that are trained, each as often as its document counts.
        unaligned: int64 [teachers], trained student tokens that no span of a teacher covers, of the documents that it
            read; and how many tokens those have.
        silent: positions at which a teacher said NaN, which are left out.
        tallies: float64 [teachers, 3], what teachers score in the whole batch, for weights that are a step's.
        shares: float64 [teachers], the sum over rows of the weights of teachers, where they are not a step's.
        spells: bool [N], whether the token that each row predicts is text.
        likeliest: of each teacher, where they are asked for, the tokens that it finds likeliest.
    """

    input_ids: NDArray[np.int64]
    lengths: tuple[int, ...] | None
    places: NDArray[np.int64]
    terms: tuple[Term, ...]
    tokens: int
    rows: float
    unaligned: NDArray[np.int64]
    silent: int
    tallies: NDArray[np.float64]
    shares: NDArray[np.float64]
    spells: NDArray[np.bool_]
    likeliest: tuple[Likeliest, ...] = ()

    @property
    def counts(self) -> NDArray[np.float64]:
        """What adds up over the micro-batches of a step: rows, items of terms, shares and tallies of teachers."""
        items = [term.count for term in self.terms]
        return np.concatenate([[self.rows], items, self.shares, self.tallies.reshape(-1)])


class BatchMaker:
    """Turns documents of a source into micro-batches of a student.

    Args:
        source: the documents.
        tokenizer: the student's.
        objectives: the losses.
        limit: tokens that the student reads; longer documents are cut there.
        weighing: how weights of teachers come from what they say; None: they do not.
        teachers: how metrics call them; needed for several.
        packing: how many tokens a row of documents is a multiple of; 0: each document has a row of its own.
        likeliest: whether the tokens that teachers find likeliest are told too.
        of_data: whether losses on the student alone are about documents that it did not write itself.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: Tokenizer,
        objectives: Sequence[Objective],
        limit: int | None,
        weighing: Weighing | None = None,
        teachers: Sequence[str] = ("teacher",),
        packing: int = 0,
        *,
        likeliest: bool = False,
        of_data: bool = False,
    ) -> None:
        self._likeliest, self._of_data = likeliest, of_data
        self._source, self._tokenizer, self.objectives = source, tokenizer, objectives
        self._limit, self.weighing, self._packing = limit, weighing, packing
        self.teachers = tuple(teachers) if any(objective.distils for objective in objectives) else ()
        self._teachers = len(self.teachers)
        # Which of the two a batch is read with: draws, if there are any, or what is exact alone.
        self._drawn = sorted({objective.takes_draws for objective in objectives if objective.distils}, reverse=True)

    def make(self, numbers: Sequence[int], draw: int = 0) -> MicroBatch:
        """Return the micro-batch of some documents; without any, one of a single token that trains nothing.

        Args:
            numbers: of the documents.
            draw: which set of draws is taken, where the teachers' signals have some; it counts round.
        """
        documents, students = self._tokenised(numbers)
        return self._made(numbers, documents, students, draw)

    def within(self, numbers: Sequence[int], most: int, draw: int = 0) -> list[MicroBatch]:
        """Return micro-batches of at most so many tokens, padding included, longest documents first.

        A document that is longer by itself has a micro-batch of its own.

        Args:
            numbers: of the documents.
            most: tokens.
            draw: as in `make`.
        """
        documents, students = self._tokenised(numbers)
        groups = grouped([len(student) for student in students], most, padded=not self._packing)
        return [
            self._made(
                [numbers[at] for at in group],
                [documents[at] for at in group],
                [students[at] for at in group],
                draw,
            )
            for group in groups
        ]

    def _tokenised(self, numbers: Sequence[int]) -> tuple[list[Document], list[TokenSequence]]:
        documents = [self._source.document(number) for number in numbers]
        students = sequences(self._tokenizer, documents)
        if self._limit is not None:
            students = [sequence.cut(self._limit) for sequence in students]
        return documents, students

    def _made(
        self, numbers: Sequence[int], documents: list[Document], students: list[TokenSequence], draw: int
    ) -> MicroBatch:
        alone = [example_of(student, document, None) for student, document in zip(students, documents, strict=True)]
        read = {drawn: self._read(numbers, documents, students, draw if drawn else None) for drawn in self._drawn}
        told, silent = read[self._drawn[0]] if read else ([], 0)
        joined = {
            drawn: [
                join_examples([heard or replace(own, signal=NOTHING) for own, heard in zip(alone, of_all, strict=True)])
                for of_all in of_teachers
            ]
            for drawn, (of_teachers, _) in read.items()
        }  # fmt: skip
        rows = np.array([len(example.rows) for example in alone], np.int64)
        counts = np.repeat([document.weight for document in documents], rows)
        of_text = counts
        if self._of_data:
            of_text = np.repeat([document.weight * (document.drawn is None) for document in documents], rows)
        factors, tallies = self._weigh(list(zip(*told, strict=True)), students, documents)
        ids, starts, lengths = laid_out([student.ids for student in students], self._packing)
        return MicroBatch(
            input_ids=ids,
            lengths=lengths,
            places=np.concatenate([np.zeros(0, np.int64), *(one.rows for one in alone)]) + np.repeat(starts, rows),
            terms=tuple(
                self._term(
                    objective,
                    joined[objective.takes_draws][objective.teacher] if objective.distils else join_examples(alone),
                    counts if objective.distils else of_text,
                    factors,
                )
                for objective in self.objectives
            ),
            tokens=sum(len(student) for student in students),
            rows=float(counts.sum()),
            unaligned=np.array([_unaligned(of_teacher) for of_teacher in told], np.int64).reshape(-1, 2),
            silent=silent,
            tallies=tallies,
            shares=np.zeros(self._teachers) if factors is None else factors @ counts,
            spells=np.concatenate(
                [
                    np.zeros(0, np.bool_),
                    *(one.spells[example.rows + 1] for one, example in zip(students, alone, strict=True)),
                ]
            ),
            likeliest=tuple(map(Likeliest.of, joined[self._drawn[0]])) if self._likeliest and self._drawn else (),
        )

    def _term(
        self,
        objective: Objective,
        example: Example,
        counts: NDArray[np.float64],
        factors: NDArray[np.float64] | None,
    ) -> Term:
        weigh = factors[objective.teacher] if objective.distils and factors is not None else None
        return objective.term(example).weighted(None if (counts == 1).all() else counts, weigh)

    def _read(
        self,
        numbers: Sequence[int],
        documents: Sequence[Document],
        students: Sequence[TokenSequence],
        draw: int | None,
    ) -> tuple[list[list[Example | None]], int]:
        """Read what teachers say of some documents.

        Returns:
            Of each teacher what it and the student see of each document, None of one that it did not read; and at how
            many positions one said NaN, which are left out.
        """
        heard = [self._source.heard(number, draw) for number in numbers]
        words = [[_without_nan(of_document[teacher]) for of_document in heard] for teacher in range(self._teachers)]
        examples = [
            [
                None if word is None else example_of(student, document, word)
                for student, document, (word, _) in zip(students, documents, of_teacher, strict=True)
            ]
            for of_teacher in words
        ]
        return examples, sum(left_out for of_teacher in words for _, left_out in of_teacher)

    def _weigh(
        self, read: list[tuple[Example | None, ...]], students: list[TokenSequence], documents: list[Document]
    ) -> tuple[NDArray[np.float64] | None, NDArray[np.float64]]:
        """Return the weight of each teacher at each row [teachers, N], and what weights of the step come from."""
        tallies = np.zeros((self._teachers, 3))
        if self.weighing is None or not self._teachers:
            return None, tallies
        factors = [np.zeros((self._teachers, 0))]
        for examples, student, document in zip(read, students, documents, strict=True):
            sizes = np.diff(student.ends, prepend=0).astype(np.int64)
            found, parts = tallies_of(self.weighing, examples, sizes)
            tallies += document.weight * found.sum(axis=1)
            factors.append(self.weighing.shares(found)[:, parts[np.flatnonzero(student.trained)]])
        return None if self.weighing.per == "batch" else np.concatenate(factors, axis=1), tallies


def _without_nan(word: Heard | None) -> tuple[Heard | None, int]:
    """Leave out the positions at which a teacher said NaN; return what is left, and how many were left out."""
    if word is None:
        return None, 0
    signal = word.signal.without_nan()
    return Heard(word.tokens, signal), len(word.signal) - len(signal)


def _unaligned(examples: Sequence[Example | None]) -> tuple[int, int]:
    """Return how many trained tokens no span covers, of how many."""
    heard = [example for example in examples if example is not None]
    tokens = sum(len(example.rows) for example in heard)
    return tokens - sum(int((example.spans[:, 1] - example.spans[:, 0]).sum()) for example in heard), tokens


def laid_out(
    several: Sequence[NDArray[np.int32]], packing: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], tuple[int, ...] | None]:
    """Lay documents out for one forward pass.

    Args:
        several: int32 [T] each.
        packing: how many tokens a row of documents is a multiple of; 0: each document has a row of its own.

    Returns:
        The tokens, where each document begins among them, and the lengths of documents in one row.
    """
    sizes = [len(ids) for ids in several]
    if packing:
        fill = -sum(sizes) % packing or (0 if sizes else packing)
        row = np.concatenate([*several, np.zeros(fill)]).astype(np.int64)
        lengths = (*(size for size in sizes if size), *([fill] if fill else []))
        return row[None], np.cumsum([0, *sizes])[:-1], lengths
    longest = max([1, *sizes])
    padded = np.zeros((max(1, len(several)), longest), np.int64)
    for at, ids in enumerate(several):
        padded[at, : len(ids)] = ids
    return padded, np.arange(len(several)) * longest, None


def grouped(sizes: Sequence[int], most: int, *, padded: bool) -> list[list[int]]:
    """Put documents into groups of at most so many tokens, longest first, each where it fits first.

    Args:
        sizes: tokens of each.
        most: of a group; with `padded`, of its longest document times their number.
        padded: whether each takes as much as the longest of its group.
    """
    groups: list[list[int]] = []
    taken: list[int] = []
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        own = sizes[number]
        for at, group in enumerate(groups):
            price = sizes[group[0]] if padded else own
            if taken[at] + price <= most:
                group.append(number)
                taken[at] += price
                break
        else:
            groups.append([number])
            taken.append(own)
    return groups


class Order:
    """Which documents a step takes: a function of seed and step alone, whatever the number of processes.

    Args:
        documents: the numbers to draw from.
        sizes: how long each is, to put like to like.
        per_step: documents in a step.
        seed: of the shuffle, which is another one each epoch.

    Attributes:
        per_step: documents in a step.
    """

    def __init__(self, documents: NDArray[np.int64], sizes: NDArray[np.int64], per_step: int, seed: int) -> None:
        self._documents, self._sizes, self.per_step, self._seed = documents, sizes, per_step, seed
        self._epoch = -1
        self._shuffled = documents

    def epoch(self, step: int) -> int:
        """Return how often all documents were taken before a step."""
        return step * self.per_step // len(self._documents)

    def step(self, step: int) -> list[int]:
        """Return the documents of a step, longest first."""
        size = len(self._documents)
        places = range(step * self.per_step, (step + 1) * self.per_step)
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

    def dealt(self, step: int, rank: int, processes: int) -> list[int]:
        """Return the documents of one process, of about as many bytes as those of any other."""
        numbers = self.step(step)
        there = np.arange(len(numbers)) % (2 * processes)  # out and back: who has the longest has the shortest too
        owners = np.minimum(there, 2 * processes - 1 - there)
        return [number for number, owner in zip(numbers, owners.tolist(), strict=True) if owner == rank]


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
