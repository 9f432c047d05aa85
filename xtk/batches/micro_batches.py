"""Micro-batches: sampling, grouping, tokenizing, packing and aligning of documents for a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from xtk.batches.combine_teachers import ScoreWeighting, score_tallies
from xtk.batches.data_sources import DocumentSource
from xtk.batches.first_step_bits_per_byte import ComparedText
from xtk.batches.top1_agreement import TeacherTopTokens
from xtk.cache.teacher_document import TeacherDocument
from xtk.cache.teacher_logprobs import TeacherLogprobs
from xtk.losses.cells.clipped_surrogate import ClippedSurrogateCells
from xtk.losses.cells.loss_cells import LossCells
from xtk.losses.interface import LossInputs, join_inputs
from xtk.losses.term import LossTerm, make_loss_inputs, masks_whitespace
from xtk.text.chat.conversation_tokens import REGIONS
from xtk.text.chat.regions import RegionWeights, token_regions
from xtk.text.document import Document
from xtk.text.token_sequence import TokenSequence as TokenSequence
from xtk.text.tokenizer import Tokenizer

_NO_IDS, _NO_NUMBERS = np.zeros(0, np.int32), np.zeros(0, np.float32)
EMPTY_LOGPROBS = TeacherLogprobs(_NO_IDS, np.zeros(1, np.int64), _NO_IDS, *(_NO_NUMBERS,) * 4)


@dataclass(frozen=True)
class MicroBatch:
    """Inputs of one forward and backward pass of one process."""

    input_ids: NDArray[np.int64]  # int64 [B, T], padded on the right; or [1, T], packed documents
    # Lengths of the packed documents and of the padding at the end; None: not packed.
    document_lengths: tuple[int, ...] | None
    # int64 [N], indices into the flattened hidden states [B * T, H] at which losses are computed.
    loss_positions: NDArray[np.int64]
    terms: tuple[LossCells, ...]  # cells of each loss, not yet scaled
    lengths: tuple[int, ...]  # tokens of each document, without padding
    trained_tokens: float  # trained student tokens, weighted by the document weights
    # int64 [teachers, 2], trained student tokens that no span of the teacher covers, and all trained tokens, of the
    # documents that the teacher scored.
    unaligned: NDArray[np.int64]
    nan_positions: int  # positions with a NaN log-probability of a teacher, which are left out
    # float64 [teachers, 3], sums of the teachers' scores, for teacher weights that are computed per step.
    tallies: NDArray[np.float64]
    # float64 [teachers], sums over positions of the teacher weights, unless they are computed per step.
    teacher_weight_sums: NDArray[np.float64]
    # float64 [1 + 2 * terms, regions], of documents with regions (conversations and rollouts): trained tokens; the
    # items of each term; the sum of each term's advantages. All are weighted.
    region_counts: NDArray[np.float64]
    is_text: NDArray[np.bool_]  # bool [N], whether the token that each position predicts is text (not a special token)
    teacher_top1: tuple[TeacherTopTokens, ...] = ()  # top-1 tokens of each teacher, if requested
    compared_text: tuple[ComparedText, ...] = ()  # text that the student and each teacher predict, if requested

    @property
    def tokens(self) -> int:
        """Tokens of all documents, without padding."""
        return sum(self.lengths)

    @property
    def counts(self) -> NDArray[np.float64]:
        """Counts to sum over the micro-batches of a step, flat.

        They are the tokens, the denominators of losses, the counts by region, teacher weights and tallies.
        """
        denominators = [term.denominator for term in self.terms]
        regions, tallies = self.region_counts.reshape(-1), self.tallies.reshape(-1)
        return np.concatenate([[self.trained_tokens], denominators, regions, self.teacher_weight_sums, tallies])


@dataclass(frozen=True)
class _StudentDocument:
    """A document with the student's tokens."""

    document: Document
    student: TokenSequence  # its tokens; only those of trained regions are trained
    whitespace_mask: NDArray[np.bool_] | None  # bool [T], the tokens of white space; None: no loss needs it
    regions: NDArray[np.uint8]  # uint8 [T], the regions of the tokens

    @property
    def has_regions(self) -> bool:
        """Whether the document has regions: plain text has none."""
        return self.document.conversation is not None or self.document.sampled_tokens is not None


class BatchBuilder:
    """Builds micro-batches for the student from documents of a source.

    Args:
        max_length: maximum number of tokens of a document; longer ones are truncated. None: no limit.
        score_weighting: how teacher weights follow from their log-probabilities; None: the weights are fixed.
        teacher_names: the teachers' names in metrics; needed for several teachers.
        packing_multiple: with packing, the length of a packed sequence is a multiple of this; 0: no packing.
        ce_on_data_only: whether losses without a teacher ignore documents that the student generated.
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
        region_weights: RegionWeights | None = None,
    ) -> None:
        self._region_weights = region_weights or RegionWeights()
        self._trains_template = not all(objective.uses_teacher for objective in objectives)
        self._with_top1, self._ce_on_data_only = with_top1, ce_on_data_only
        self._source, self._tokenizer, self.objectives = source, tokenizer, objectives
        self._limit, self.score_weighting, self._packing = max_length, score_weighting, packing_multiple
        self.teachers = tuple(teacher_names) if any(objective.uses_teacher for objective in objectives) else ()
        self._teachers = len(self.teachers)
        self._masks_whitespace = masks_whitespace(objectives)
        # A batch is read with sampled tokens, without them, or both: losses differ in what they accept.
        self._sampling_modes = sorted(
            {objective.accepts_samples for objective in objectives if objective.uses_teacher}, reverse=True
        )

    def build(self, numbers: Sequence[int], sample_set: int = 0, *, with_compared_text: bool = False) -> MicroBatch:
        """Return the micro-batch of some documents; without any, one of a single token and no loss.

        `sample_set`: index of the set of sampled tokens, modulo the number of sets in the cache.
        """
        return self._build(numbers, self._tokenize(numbers), sample_set, with_compared_text=with_compared_text)

    def build_within_tokens(
        self, numbers: Sequence[int], max_tokens: int, sample_set: int = 0, *, with_compared_text: bool = False
    ) -> list[MicroBatch]:
        """Return micro-batches of at most `max_tokens`, padding included, or of one document that is longer."""
        read = self._tokenize(numbers)
        groups = group_by_tokens([len(own.student) for own in read], max_tokens, padded=not self._packing)
        return [
            self._build(
                [numbers[at] for at in group],
                [read[at] for at in group],
                sample_set,
                with_compared_text=with_compared_text,
            )
            for group in groups
        ]

    def _tokenize(self, numbers: Sequence[int]) -> list[_StudentDocument]:
        documents = [self._source.document(number) for number in numbers]
        student_documents = []
        for document, sequence in zip(documents, self._source.student_tokens(self._tokenizer, numbers), strict=True):
            student = sequence if self._limit is None else sequence.truncate(self._limit)
            regions = token_regions(document, student)
            student = self._region_weights.select(student, regions, with_template=self._trains_template)
            mask = student.whitespace_mask(document.text) if self._masks_whitespace else None
            student_documents.append(_StudentDocument(document, student, mask, regions))
        return student_documents

    def _loss_inputs(self, read: _StudentDocument, output: TeacherDocument | None) -> LossInputs:
        regions = read.regions if read.has_regions else None
        bounds = self._region_weights.advantage_bounds
        return make_loss_inputs(read.student, read.document, output, read.whitespace_mask, regions, bounds)

    def _build(
        self,
        numbers: Sequence[int],
        own_tokens: list[_StudentDocument],
        sample_set: int,
        *,
        with_compared_text: bool = False,
    ) -> MicroBatch:
        documents, students = [own.document for own in own_tokens], [own.student for own in own_tokens]
        without_teacher = [self._loss_inputs(own, None) for own in own_tokens]
        read = {
            with_samples: self._read(numbers, own_tokens, sample_set if with_samples else None)
            for with_samples in self._sampling_modes
        }
        inputs_of_teachers, num_nan = read[self._sampling_modes[0]] if read else ([], 0)
        joined = {
            with_samples: [
                join_inputs([one or replace(own, teacher_logprobs=EMPTY_LOGPROBS) for own, one in zip(without_teacher,
                    of_teacher, strict=True)])
                for of_teacher in of_teachers
            ]
            for with_samples, (of_teachers, _) in read.items()
        }  # fmt: skip
        lengths = np.array([len(example.positions) for example in without_teacher], np.int64)
        weights = np.repeat([document.weight for document in documents], lengths)
        if (self._region_weights.weights != 1).any():
            weights = weights * np.concatenate(
                [np.zeros(0), *(self._region_weights.weights[own.regions[own.student.loss_mask]] for own in own_tokens)]
            )
        text_weights = weights
        if self._ce_on_data_only:
            text_weights = weights * np.repeat([document.sampled_tokens is None for document in documents], lengths)
        factors, tallies = self._weigh(list(zip(*inputs_of_teachers, strict=True)), students, documents)
        terms = tuple(
            self._term(
                objective,
                joined[objective.accepts_samples][objective.teacher_index]
                if objective.uses_teacher
                else join_inputs(without_teacher),
                weights if objective.uses_teacher else text_weights,
                factors,
            )
            for objective in self.objectives
        )
        ids, starts, document_lengths = pad_or_pack([student.ids for student in students], self._packing)
        return MicroBatch(
            input_ids=ids,
            document_lengths=document_lengths,
            loss_positions=np.concatenate([np.zeros(0, np.int64), *(example.positions for example in without_teacher)])
            + np.repeat(starts, lengths),
            terms=terms,
            lengths=tuple(len(student) for student in students),
            trained_tokens=float(weights.sum()),
            unaligned=np.array(
                [_unaligned(of_teacher, students) for of_teacher in inputs_of_teachers], np.int64
            ).reshape(-1, 2),
            nan_positions=num_nan,
            tallies=tallies,
            teacher_weight_sums=np.zeros(self._teachers) if factors is None else factors @ weights,
            region_counts=_region_counts(join_inputs(without_teacher), weights, terms),
            is_text=np.concatenate(
                [
                    np.zeros(0, np.bool_),
                    *(
                        one.text_mask[example.positions + 1]
                        for one, example in zip(students, without_teacher, strict=True)
                    ),
                ]
            ),
            teacher_top1=tuple(map(TeacherTopTokens.from_example, joined[self._sampling_modes[0]]))
            if self._with_top1 and self._sampling_modes
            else (),
            compared_text=tuple(
                ComparedText.of_documents(of_teacher, students, documents, weights) for of_teacher in inputs_of_teachers
            )
            if with_compared_text
            else (),
        )

    def _term(
        self,
        objective: LossTerm,
        example: LossInputs,
        weights: NDArray[np.float64],
        factors: NDArray[np.float64] | None,
    ) -> LossCells:
        teacher_weights = factors[objective.teacher_index] if objective.uses_teacher and factors is not None else None
        return objective.build_cells(example).with_row_weights(
            None if (weights == 1).all() else weights, teacher_weights
        )

    def _read(
        self,
        numbers: Sequence[int],
        own_tokens: Sequence[_StudentDocument],
        sample_set: int | None,
    ) -> tuple[list[list[LossInputs | None]], int]:
        """Return [teachers][documents], loss inputs, and the number of positions left out because of NaN.

        None: the teacher did not score the document. `sample_set` None: exact entries only.
        """
        finite = [
            [_without_nan(output) for output in teacher.outputs(numbers, sample_set)]
            for teacher in self._source.teachers[: self._teachers]
        ]
        examples = [
            [
                None if output is None else self._loss_inputs(one, output)
                for one, (output, _) in zip(own_tokens, of_teacher, strict=True)
            ]
            for of_teacher in finite
        ]
        return examples, sum(left_out for of_teacher in finite for _, left_out in of_teacher)

    def _weigh(
        self, read: list[tuple[LossInputs | None, ...]], students: list[TokenSequence], documents: list[Document]
    ) -> tuple[NDArray[np.float64] | None, NDArray[np.float64]]:
        """Return teacher weights at each position [teachers, N] (None: fixed or per step), and sums of scores."""
        tallies = np.zeros((self._teachers, 3))
        if self.score_weighting is None or not self._teachers:
            return None, tallies
        factors = [np.zeros((self._teachers, 0))]
        for examples, student, document in zip(read, students, documents, strict=True):
            sizes = np.diff(student.byte_ends, prepend=0).astype(np.int64)
            score_sums, parts = score_tallies(self.score_weighting, examples, sizes)
            if document.weight:  # scores of other documents may be infinite
                tallies += document.weight * score_sums.sum(axis=1)
            factors.append(
                self.score_weighting.teacher_weights(score_sums)[:, parts[np.flatnonzero(student.loss_mask)]]
            )
        return None if self.score_weighting.scope == "batch" else np.concatenate(factors, axis=1), tallies


def _without_nan(output: TeacherDocument | None) -> tuple[TeacherDocument | None, int]:
    """Return a teacher's output without positions that have a NaN log-probability, and the number of these."""
    if output is None:
        return None, 0
    kept = output.without_nan()
    return kept, len(output.teacher_logprobs) - len(kept.teacher_logprobs)


def _region_counts(inputs: LossInputs, weights: NDArray[np.float64], terms: Sequence[LossCells]) -> NDArray[np.float64]:
    """Return `region_counts` of a micro-batch; inputs: of all documents without a teacher; weights: float64 [N]."""
    counts = np.zeros((1 + 2 * len(terms), len(REGIONS)))
    if inputs.regions is not None:
        regions = np.minimum(inputs.regions, len(REGIONS))
        counts[0] = np.bincount(regions, weights, len(REGIONS) + 1)[: len(REGIONS)]
    for number, term in enumerate(terms):
        counts[1 + number] = term.counts_by_region()
        if isinstance(term, ClippedSurrogateCells):
            counts[1 + len(terms) + number] = term.counts_by_region(term.advantages.double().numpy())
    return counts


def _unaligned(examples: Sequence[LossInputs | None], students: Sequence[TokenSequence]) -> tuple[int, int]:
    """Return the number of trained tokens that no span covers, and of all trained tokens."""
    scored = [(example, one.train_mask) for example, one in zip(examples, students, strict=True) if example is not None]
    tokens = sum(int(trained.sum()) for _, trained in scored)
    # A span may also contain tokens that are not trained: the first one without a start token, or one of a prompt.
    trained_before = [(example.spans, np.append(0, np.cumsum(trained))) for example, trained in scored]
    return tokens - sum(int(np.diff(before[spans[:, :2]], axis=1).sum()) for spans, before in trained_before), tokens


def pad_or_pack(
    sequences_of_ids: Sequence[NDArray[np.int32]], packing_multiple: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], tuple[int, ...] | None]:
    """Return token ids [B, T], the flat index where each document begins, and the lengths of packed documents.

    `packing_multiple`: pack, to a length that is a multiple of this; 0: pad.
    """
    sizes = [len(ids) for ids in sequences_of_ids]
    if packing_multiple:
        fill = -sum(sizes) % packing_multiple or (0 if any(sizes) else packing_multiple)
        row = np.concatenate([*sequences_of_ids, np.zeros(fill)]).astype(np.int64)
        lengths = (*(size for size in sizes if size), *([fill] if fill else []))
        return row[None], np.cumsum([0, *sizes])[:-1], lengths
    longest = max([1, *sizes])
    padded = np.zeros((max(1, len(sequences_of_ids)), longest), np.int64)
    for at, ids in enumerate(sequences_of_ids):
        padded[at, : len(ids)] = ids
    return padded, np.arange(len(sequences_of_ids)) * longest, None


def group_by_tokens(sizes: Sequence[int], max_tokens: int, *, padded: bool) -> list[list[int]]:
    """Return groups of document indices of at most `max_tokens`, or of one longer document (first-fit, longest first).

    `padded`: whether a group's tokens are its longest document times its documents, or their sum.
    """
    groups: list[list[int]] = []
    free = np.zeros(len(sizes), np.int64)  # of each group: tokens, or the places of as long documents times their size
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        size = sizes[number]
        fits = free[: len(groups)] >= size
        at = int(fits.argmax()) if len(groups) else 0
        if not len(groups) or not fits[at]:
            at = len(groups)
            groups.append([])
            free[at] = max_tokens
        first = sizes[groups[at][0]] if groups[at] else size
        groups[at].append(number)
        free[at] -= first if padded else size
        if padded and free[at] < first:
            free[at] = -1
    return groups


class BatchSampler:
    """Chooses the documents of each step, from seed and step alone: the same for any number of processes.

    `sizes`: length of each document, to batch documents of similar length; the shuffle differs per epoch.
    """

    def __init__(
        self, documents: NDArray[np.int64], sizes: NDArray[np.int64], documents_per_step: int, seed: int
    ) -> None:
        self._documents, self._sizes, self.documents_per_step, self._seed = documents, sizes, documents_per_step, seed
        self._epoch = -1
        self._shuffled = documents

    def epoch_of_step(self, step: int) -> int:
        """Return the number of completed epochs before a step."""
        return step * self.documents_per_step // len(self._documents)

    def documents_of_step(self, step: int) -> list[int]:
        """Return the documents of a step, longest first."""
        size = len(self._documents)
        indices = range(step * self.documents_per_step, (step + 1) * self.documents_per_step)
        numbers = [int(self._shuffle_of_epoch(index // size)[index % size]) for index in indices]
        return sorted(numbers, key=lambda number: (-int(self._sizes[number]), number))

    def _shuffle_of_epoch(self, epoch: int) -> NDArray[np.int64]:
        if epoch != self._epoch:
            self._epoch = epoch
            self._shuffled = np.random.default_rng([self._seed, epoch]).permutation(self._documents)
        return self._shuffled

    def micro_batches_of_rank(self, step: int, rank: int, num_ranks: int, documents_per_batch: int) -> list[list[int]]:
        """Return the micro-batches of one process; all processes have the same number, some may be empty."""
        numbers = self.documents_of_step(step)
        groups = [numbers[start : start + documents_per_batch] for start in range(0, len(numbers), documents_per_batch)]
        per_rank = -(-len(groups) // num_ranks)
        groups += [[]] * (per_rank * num_ranks - len(groups))
        return groups[rank::num_ranks]

    def documents_of_rank(self, step: int, rank: int, num_ranks: int) -> list[int]:
        """Return the documents of one process; all processes have about the same number of bytes."""
        numbers = self.documents_of_step(step)
        zigzag = np.arange(len(numbers)) % (2 * num_ranks)  # the rank with the longest document gets the shortest too
        owners = np.minimum(zigzag, 2 * num_ranks - 1 - zigzag)
        return [number for number, owner in zip(numbers, owners.tolist(), strict=True) if owner == rank]


Item = TypeVar("Item")


def prefetch_in_thread(build: Callable[[int], Item], numbers: range) -> Iterator[Item]:
    """Yield `build(number)` in order, each built in a thread while the previous one is used."""
    with ThreadPoolExecutor(1, thread_name_prefix="xtk-batches") as pool:
        pending = [pool.submit(build, number) for number in numbers[:1]]
        for number in numbers:
            current = pending.pop()
            if number + 1 in numbers:
                pending.append(pool.submit(build, number + 1))
            yield current.result()
