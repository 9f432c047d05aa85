"""From rows of a cache to micro-batches: order, tokens, alignment, cells; ahead of the device, in a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from xtk.evaluation.top1_agreement import TeacherTopTokens
from xtk.losses.fused_loss import LossTensors
from xtk.losses.loss_cells import LossInputs, join_inputs
from xtk.losses.loss_term import LossTerm, TeacherOutput, make_loss_inputs
from xtk.tokens.document import Document
from xtk.tokens.teacher_logprobs import TeacherLogprobs
from xtk.tokens.token_sequence import TokenSequence as TokenSequence
from xtk.tokens.token_sequence import tokenize_documents
from xtk.tokens.tokenizer import Tokenizer
from xtk.training.data_sources import DocumentSource
from xtk.training.teacher_ensemble import ScoreWeighting, score_tallies

_NO_IDS, _NO_NUMBERS = np.zeros(0, np.int32), np.zeros(0, np.float32)
EMPTY_LOGPROBS = TeacherLogprobs(_NO_IDS, np.zeros(1, np.int64), _NO_IDS, *(_NO_NUMBERS,) * 4)


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass of one process takes.

    Attributes:
        input_ids: int64 [B, T], padded on the right; or [1, T], documents one behind the other.
        document_lengths: of the documents in one row, with what fills it at its end; None: each has a row of its own.
        loss_positions: int64 [N], the rows of the flattened hidden states [B * T, H] that are compared.
        terms: one for each objective, not yet scaled.
        tokens: of the documents, without padding.
        trained_tokens: the student's tokens that are trained, each as often as its document counts.
        unaligned: int64 [teachers], trained student tokens that no span of a teacher covers, of the documents that it
            read; and how many tokens those have.
        nan_positions: positions at which a teacher said NaN, which are left out.
        tallies: float64 [teachers, 3], what teachers score in the whole batch, for weights that are a step's.
        teacher_weight_sums: float64 [teachers], the sum over rows of the weights of teachers, where they are not a
            step's.
        is_text: bool [N], whether the token that each row predicts is text.
        teacher_top1: of each teacher, where they are asked for, the tokens that it finds likeliest.
    """

    input_ids: NDArray[np.int64]
    document_lengths: tuple[int, ...] | None
    loss_positions: NDArray[np.int64]
    terms: tuple[LossTensors, ...]
    tokens: int
    trained_tokens: float
    unaligned: NDArray[np.int64]
    nan_positions: int
    tallies: NDArray[np.float64]
    teacher_weight_sums: NDArray[np.float64]
    is_text: NDArray[np.bool_]
    teacher_top1: tuple[TeacherTopTokens, ...] = ()

    @property
    def counts(self) -> NDArray[np.float64]:
        """What adds up over the micro-batches of a step: rows, items of terms, shares and tallies of teachers."""
        items = [term.denominator for term in self.terms]
        return np.concatenate([[self.trained_tokens], items, self.teacher_weight_sums, self.tallies.reshape(-1)])


class BatchBuilder:
    """Turns documents of a source into micro-batches of a student.

    Args:
        source: the documents.
        tokenizer: the student's.
        objectives: the losses.
        limit: tokens that the student reads; longer documents are cut there.
        score_weighting: how weights of teachers come from what they say; None: they do not.
        teachers: how metrics call them; needed for several.
        packing: how many tokens a row of documents is a multiple of; 0: each document has a row of its own.
        likeliest: whether the tokens that teachers find likeliest are told too.
        of_data: whether losses on the student alone are about documents that it did not write itself.
    """

    def __init__(
        self,
        source: DocumentSource,
        tokenizer: Tokenizer,
        objectives: Sequence[LossTerm],
        max_length: int | None,
        score_weighting: ScoreWeighting | None = None,
        teacher_names: Sequence[str] = ("teacher",),
        packing_multiple: int = 0,
        *,
        with_top1: bool = False,
        ce_on_data_only: bool = False,
    ) -> None:
        self._likeliest, self._of_data = with_top1, ce_on_data_only
        self._source, self._tokenizer, self.objectives = source, tokenizer, objectives
        self._limit, self.score_weighting, self._packing = max_length, score_weighting, packing_multiple
        self.teachers = tuple(teacher_names) if any(objective.uses_teacher for objective in objectives) else ()
        self._teachers = len(self.teachers)
        # Which of the two a batch is read with: draws, if there are any, or what is exact alone.
        self._sampling_modes = sorted(
            {objective.accepts_samples for objective in objectives if objective.uses_teacher}, reverse=True
        )

    def build(self, numbers: Sequence[int], sample_set: int = 0) -> MicroBatch:
        """Return the micro-batch of some documents; without any, one of a single token that trains nothing.

        Args:
            numbers: of the documents.
            sample_set: which set of draws is taken, where the teachers' signals have some; it counts round.
        """
        documents, students = self._tokenised(numbers)
        return self._build(numbers, documents, students, sample_set)

    def build_within_tokens(self, numbers: Sequence[int], max_tokens: int, sample_set: int = 0) -> list[MicroBatch]:
        """Return micro-batches of at most so many tokens, padding included, longest documents first.

        A document that is longer by itself has a micro-batch of its own.

        Args:
            numbers: of the documents.
            max_tokens: tokens.
            sample_set: as in `make`.
        """
        documents, students = self._tokenised(numbers)
        groups = group_by_tokens([len(student) for student in students], max_tokens, padded=not self._packing)
        return [
            self._build(
                [numbers[at] for at in group],
                [documents[at] for at in group],
                [students[at] for at in group],
                sample_set,
            )
            for group in groups
        ]

    def _tokenised(self, numbers: Sequence[int]) -> tuple[list[Document], list[TokenSequence]]:
        documents = [self._source.document(number) for number in numbers]
        students = tokenize_documents(self._tokenizer, documents)
        if self._limit is not None:
            students = [sequence.truncate(self._limit) for sequence in students]
        return documents, students

    def _build(
        self, numbers: Sequence[int], documents: list[Document], students: list[TokenSequence], draw: int
    ) -> MicroBatch:
        alone = [
            make_loss_inputs(student, document, None) for student, document in zip(students, documents, strict=True)
        ]
        read = {
            drawn: self._read(numbers, documents, students, draw if drawn else None) for drawn in self._sampling_modes
        }
        told, silent = read[self._sampling_modes[0]] if read else ([], 0)
        joined = {
            drawn: [
                join_inputs([heard or replace(own, teacher_logprobs=EMPTY_LOGPROBS) for own, heard in zip(alone,
                    of_all, strict=True)])
                for of_all in of_teachers
            ]
            for drawn, (of_teachers, _) in read.items()
        }  # fmt: skip
        rows = np.array([len(example.positions) for example in alone], np.int64)
        counts = np.repeat([document.weight for document in documents], rows)
        of_text = counts
        if self._of_data:
            of_text = np.repeat([document.weight * (document.sampled_tokens is None) for document in documents], rows)
        factors, tallies = self._weigh(list(zip(*told, strict=True)), students, documents)
        ids, starts, lengths = pad_or_pack([student.ids for student in students], self._packing)
        return MicroBatch(
            input_ids=ids,
            document_lengths=lengths,
            loss_positions=np.concatenate([np.zeros(0, np.int64), *(one.positions for one in alone)])
            + np.repeat(starts, rows),
            terms=tuple(
                self._term(
                    objective,
                    joined[objective.accepts_samples][objective.teacher_index]
                    if objective.uses_teacher
                    else join_inputs(alone),
                    counts if objective.uses_teacher else of_text,
                    factors,
                )
                for objective in self.objectives
            ),
            tokens=sum(len(student) for student in students),
            trained_tokens=float(counts.sum()),
            unaligned=np.array([_unaligned(of_teacher) for of_teacher in told], np.int64).reshape(-1, 2),
            nan_positions=silent,
            tallies=tallies,
            teacher_weight_sums=np.zeros(self._teachers) if factors is None else factors @ counts,
            is_text=np.concatenate(
                [
                    np.zeros(0, np.bool_),
                    *(one.text_mask[example.positions + 1] for one, example in zip(students, alone, strict=True)),
                ]
            ),
            teacher_top1=tuple(map(TeacherTopTokens.from_example, joined[self._sampling_modes[0]]))
            if self._likeliest and self._sampling_modes
            else (),
        )

    def _term(
        self,
        objective: LossTerm,
        example: LossInputs,
        counts: NDArray[np.float64],
        factors: NDArray[np.float64] | None,
    ) -> LossTensors:
        weigh = factors[objective.teacher_index] if objective.uses_teacher and factors is not None else None
        return objective.to_tensors(example).with_row_weights(None if (counts == 1).all() else counts, weigh)

    def _read(
        self,
        numbers: Sequence[int],
        documents: Sequence[Document],
        students: Sequence[TokenSequence],
        draw: int | None,
    ) -> tuple[list[list[LossInputs | None]], int]:
        """Read what teachers say of some documents.

        Returns:
            Of each teacher what it and the student see of each document, None of one that it did not read; and at how
            many positions one said NaN, which are left out.
        """
        heard = [self._source.teacher_outputs(number, draw) for number in numbers]
        words = [[_without_nan(of_document[teacher]) for of_document in heard] for teacher in range(self._teachers)]
        examples = [
            [
                None if word is None else make_loss_inputs(student, document, word)
                for student, document, (word, _) in zip(students, documents, of_teacher, strict=True)
            ]
            for of_teacher in words
        ]
        return examples, sum(left_out for of_teacher in words for _, left_out in of_teacher)

    def _weigh(
        self, read: list[tuple[LossInputs | None, ...]], students: list[TokenSequence], documents: list[Document]
    ) -> tuple[NDArray[np.float64] | None, NDArray[np.float64]]:
        """Return the weight of each teacher at each row [teachers, N], and what weights of the step come from."""
        tallies = np.zeros((self._teachers, 3))
        if self.score_weighting is None or not self._teachers:
            return None, tallies
        factors = [np.zeros((self._teachers, 0))]
        for examples, student, document in zip(read, students, documents, strict=True):
            sizes = np.diff(student.byte_ends, prepend=0).astype(np.int64)
            found, parts = score_tallies(self.score_weighting, examples, sizes)
            tallies += document.weight * found.sum(axis=1)
            factors.append(self.score_weighting.teacher_weights(found)[:, parts[np.flatnonzero(student.train_mask)]])
        return None if self.score_weighting.scope == "batch" else np.concatenate(factors, axis=1), tallies


def _without_nan(word: TeacherOutput | None) -> tuple[TeacherOutput | None, int]:
    """Leave out the positions at which a teacher said NaN; return what is left, and how many were left out."""
    if word is None:
        return None, 0
    signal = word.logprobs.drop_nan_positions()
    return TeacherOutput(word.tokens, signal), len(word.logprobs) - len(signal)


def _unaligned(examples: Sequence[LossInputs | None]) -> tuple[int, int]:
    """Return how many trained tokens no span covers, of how many."""
    heard = [example for example in examples if example is not None]
    tokens = sum(len(example.positions) for example in heard)
    return tokens - sum(int((example.spans[:, 1] - example.spans[:, 0]).sum()) for example in heard), tokens


def pad_or_pack(
    sequences_of_ids: Sequence[NDArray[np.int32]], packing_multiple: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], tuple[int, ...] | None]:
    """Lay documents out for one forward pass.

    Args:
        sequences_of_ids: int32 [T] each.
        packing_multiple: how many tokens a row of documents is a multiple of; 0: each document has a row of its own.

    Returns:
        The tokens, where each document begins among them, and the lengths of documents in one row.
    """
    sizes = [len(ids) for ids in sequences_of_ids]
    if packing_multiple:
        fill = -sum(sizes) % packing_multiple or (0 if sizes else packing_multiple)
        row = np.concatenate([*sequences_of_ids, np.zeros(fill)]).astype(np.int64)
        lengths = (*(size for size in sizes if size), *([fill] if fill else []))
        return row[None], np.cumsum([0, *sizes])[:-1], lengths
    longest = max([1, *sizes])
    padded = np.zeros((max(1, len(sequences_of_ids)), longest), np.int64)
    for at, ids in enumerate(sequences_of_ids):
        padded[at, : len(ids)] = ids
    return padded, np.arange(len(sequences_of_ids)) * longest, None


def group_by_tokens(sizes: Sequence[int], max_tokens: int, *, padded: bool) -> list[list[int]]:
    """Put documents into groups of at most so many tokens, longest first, each where it fits first.

    Args:
        sizes: tokens of each.
        max_tokens: of a group; with `padded`, of its longest document times their number.
        padded: whether each takes as much as the longest of its group.
    """
    groups: list[list[int]] = []
    taken: list[int] = []
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        own = sizes[number]
        for at, group in enumerate(groups):
            price = sizes[group[0]] if padded else own
            if taken[at] + price <= max_tokens:
                group.append(number)
                taken[at] += price
                break
        else:
            groups.append([number])
            taken.append(own)
    return groups


class BatchSampler:
    """Which documents a step takes: a function of seed and step alone, whatever the number of processes.

    Args:
        documents: the numbers to draw from.
        sizes: how long each is, to put like to like.
        documents_per_step: documents in a step.
        seed: of the shuffle, which is another one each epoch.

    Attributes:
        documents_per_step: documents in a step.
    """

    def __init__(
        self, documents: NDArray[np.int64], sizes: NDArray[np.int64], documents_per_step: int, seed: int
    ) -> None:
        self._documents, self._sizes, self.documents_per_step, self._seed = documents, sizes, documents_per_step, seed
        self._epoch = -1
        self._shuffled = documents

    def epoch_of_step(self, step: int) -> int:
        """Return how often all documents were taken before a step."""
        return step * self.documents_per_step // len(self._documents)

    def documents_of_step(self, step: int) -> list[int]:
        """Return the documents of a step, longest first."""
        size = len(self._documents)
        places = range(step * self.documents_per_step, (step + 1) * self.documents_per_step)
        numbers = [int(self._of_epoch(place // size)[place % size]) for place in places]
        return sorted(numbers, key=lambda number: (-int(self._sizes[number]), number))

    def _of_epoch(self, epoch: int) -> NDArray[np.int64]:
        if epoch != self._epoch:
            self._epoch = epoch
            self._shuffled = np.random.default_rng([self._seed, epoch]).permutation(self._documents)
        return self._shuffled

    def micro_batches_of_rank(self, step: int, rank: int, num_ranks: int, documents_per_batch: int) -> list[list[int]]:
        """Return the micro-batches of one process: every process has as many, of like lengths, perhaps empty."""
        numbers = self.documents_of_step(step)
        groups = [numbers[start : start + documents_per_batch] for start in range(0, len(numbers), documents_per_batch)]
        rounds = -(-len(groups) // num_ranks)
        groups += [[]] * (rounds * num_ranks - len(groups))
        return groups[rank::num_ranks]

    def documents_of_rank(self, step: int, rank: int, num_ranks: int) -> list[int]:
        """Return the documents of one process, of about as many bytes as those of any other."""
        numbers = self.documents_of_step(step)
        there = np.arange(len(numbers)) % (2 * num_ranks)  # out and back: who has the longest has the shortest too
        owners = np.minimum(there, 2 * num_ranks - 1 - there)
        return [number for number, owner in zip(numbers, owners.tolist(), strict=True) if owner == rank]


Item = TypeVar("Item")


def prefetch_in_thread(build: Callable[[int], Item], numbers: range) -> Iterator[Item]:
    """Yield `make(number)` in order, each made in a thread while the one before it is used."""
    with ThreadPoolExecutor(1, thread_name_prefix="xtk-batches") as pool:
        pending = [pool.submit(build, number) for number in numbers[:1]]
        for number in numbers:
            current = pending.pop()
            if number + 1 in numbers:
                pending.append(pool.submit(build, number + 1))
            yield current.result()
