"""Cells: the events on which the distributions of student and teacher are compared.

A loss averages over items: tokens, boundaries or spans. An item has cells. A cell has the teacher's probability, and
*entries*: pairs of a row of the student's logits and a token, whose weighted probabilities add up to the student's
probability of the cell. The probability of each model outside of the cells is its remainder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from xtk.losses.divergences import Divergence, ForwardKLDivergence
from xtk.projection.projection import ProjectionColumns
from xtk.projection.vocabulary_byte_partition import BytePartition
from xtk.tokens.teacher_logprobs import TeacherLogprobs

# What a loss needs in addition to its inputs: the projection W by teacher token, a partition of both vocabularies, or
# nothing.
ComparisonSpace = ProjectionColumns | BytePartition | None

FORWARD_KL = ForwardKLDivergence()


@dataclass(frozen=True)
class LossInputs:
    """Inputs of a loss: one or more documents as tokens of both models, with the teacher's log-probabilities.

    Attributes:
        student_ids: int32 [T], the full sequence.
        positions: int64 [N], sorted: positions whose logits are needed; row r predicts token `positions[r] + 1`.
        spans: int32 [C, 4], the trained spans: student start and stop, teacher start and stop.
        teacher_ids: int32 [S], the teacher's sequence; empty without a teacher.
        teacher_logprobs: the teacher's log-probabilities; None without a teacher.
        sampling_logprobs: float32 [N], log-probabilities of the rows' tokens when the student sampled them; nan for
            tokens that were not sampled. None: no tokens were sampled.
        advantages: float32 [N], the advantage of each row's document; None: 0.
    """

    student_ids: NDArray[np.int32]
    positions: NDArray[np.int64]
    spans: NDArray[np.int32]
    teacher_ids: NDArray[np.int32]
    teacher_logprobs: TeacherLogprobs | None
    sampling_logprobs: NDArray[np.float32] | None = None
    advantages: NDArray[np.float32] | None = None


def join_inputs(examples: Sequence[LossInputs]) -> LossInputs:
    """Return the concatenation of several inputs, so that cells are built for a batch at once."""
    students = np.cumsum([0, *(len(example.student_ids) for example in examples)])[:-1]
    teachers = np.cumsum([0, *(len(example.teacher_ids) for example in examples)])[:-1]
    shifts = np.column_stack([students, students, teachers, teachers]).astype(np.int32)
    teacher_outputs = [example.teacher_logprobs for example in examples if example.teacher_logprobs is not None]
    return LossInputs(
        student_ids=_concatenate_as([example.student_ids for example in examples], np.int32),
        positions=_concatenate_as(
            [example.positions + at for example, at in zip(examples, students, strict=True)], np.int64
        ),
        spans=np.concatenate(
            [
                *(example.spans + shift for example, shift in zip(examples, shifts, strict=True)),
                np.zeros((0, 4), np.int32),
            ]
        ),
        teacher_ids=_concatenate_as([example.teacher_ids for example in examples], np.int32),
        teacher_logprobs=_join_teacher_logprobs(teacher_outputs, teachers)
        if len(teacher_outputs) == len(examples)
        else None,
        sampling_logprobs=_concatenate_optional([one.sampling_logprobs for one in examples], examples, np.nan),
        advantages=_concatenate_optional([one.advantages for one in examples], examples, 0.0),
    )


def _concatenate_optional(
    parts: Sequence[NDArray[np.float32] | None], examples: Sequence[LossInputs], missing: float
) -> NDArray[np.float32] | None:
    """Return the concatenated values of rows, `missing` for documents without; None if no document has any."""
    if all(part is None for part in parts):
        return None
    filled = [
        np.full(len(example.positions), missing, np.float32) if part is None else part
        for part, example in zip(parts, examples, strict=True)
    ]
    return _concatenate_as(filled, np.float32)


def _join_teacher_logprobs(teacher_outputs: Sequence[TeacherLogprobs], shifts: NDArray[np.int64]) -> TeacherLogprobs:
    firsts = np.cumsum([0, *(len(teacher.ids) for teacher in teacher_outputs)])
    return TeacherLogprobs(
        positions=_concatenate_as(
            [teacher.positions + at for teacher, at in zip(teacher_outputs, shifts, strict=True)], np.int32
        ),
        offsets=np.concatenate(
            [
                *(teacher.offsets[:-1] + first for teacher, first in zip(teacher_outputs, firsts, strict=False)),
                firsts[-1:],
            ]
        ),
        ids=_concatenate_as([teacher.ids for teacher in teacher_outputs], np.int32),
        logprobs=_concatenate_as([teacher.logprobs for teacher in teacher_outputs], np.float32),
        remainder_mass=_concatenate_as([teacher.remainder_mass for teacher in teacher_outputs], np.float32),
        observed_logprobs=_concatenate_as([teacher.observed_logprobs for teacher in teacher_outputs], np.float32),
        entropy=_concatenate_as([teacher.entropy for teacher in teacher_outputs], np.float32),
        exact_counts=None
        if all(teacher.exact_counts is None for teacher in teacher_outputs)
        else _concatenate_as(
            [
                np.diff(teacher.offsets) if teacher.exact_counts is None else teacher.exact_counts
                for teacher in teacher_outputs
            ],
            np.int64,
        ),
        precision=next((teacher.precision for teacher in teacher_outputs if teacher.precision), ""),
    )


def _concatenate_as(parts: Sequence[NDArray[Any]], dtype: type) -> NDArray[Any]:
    whole: NDArray[Any] = np.concatenate([*parts, np.zeros(0, dtype)]).astype(dtype, copy=False)
    return whole


@dataclass(frozen=True)
class PrefixAlternatives:
    """Alternative tokens for the bytes since the student's previous token boundary.

    An item's alternatives are the student tokens that begin with these bytes, in groups: tokens that end at the item,
    tokens that continue into none of its cells, then tokens that continue into each of its cells. The groups of all
    items are concatenated; a group is a list of runs of the vocabulary in byte order, and may be empty.

    Attributes:
        rows: int32 [C], the row of the student's logits that predicts them; -1: the item has no alternatives.
        is_inside_token: bool [C], whether the item is inside of a student token, where no row predicts the next bytes.
        sorted_token_ids: int32 [n], the student's tokens in byte order.
        run_offsets: int64 [2 C + cells + 1], the runs of each group.
        firsts: int32 [runs], first index of each run in `sorted_token_ids`.
        stops: int32 [runs], one past its last index.
    """

    rows: NDArray[np.int32]
    is_inside_token: NDArray[np.bool_]
    sorted_token_ids: NDArray[np.int32]
    run_offsets: NDArray[np.int64]
    firsts: NDArray[np.int32]
    stops: NDArray[np.int32]

    def has_no_remainder(self, cell_offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return bool [C], the items in which the student's remainder is always 0."""
        first = cell_offsets[:-1] + 2 * np.arange(len(self.rows))
        closed: NDArray[np.bool_] = self.is_inside_token & (self.run_offsets[first + 2] == self.run_offsets[first])
        return closed


@dataclass(frozen=True)
class PrefixProduct:
    """The student's observed tokens before the last row of each item, whose probabilities multiply its cells.

    The first cells of an item are its prefix cells: one per row from its first row on, each with one entry, the
    observed token. All other cells are of the next row. The remainder is the sum, over all these rows, of the mass
    outside of the row's cells times the probabilities of the prefix tokens before the row.

    Attributes:
        num_prefix_tokens: int64 [C], number of prefix cells of each item.
        temperature: tau. If it is not 1, each item has one cell, of probability P, and `P^(1/tau)` and
            `1 - P^(1/tau)` are compared with the teacher's probabilities, which are given in this form.
    """

    num_prefix_tokens: NDArray[np.int64]
    temperature: float = 1.0


@dataclass(frozen=True)
class SortedProbs:
    """Sorted probabilities in the last row of each item, compared rank by rank.

    Attributes:
        rows: int32 [C], rows of the student's logits.
        offsets: int64 [C+1], the ranks of item c.
        probs: float32 [ranks], the teacher's probabilities, descending within an item.
        min_remainder: float32 [C], lower bound of the teacher's mass after the last rank.
        max_remainder: float32 [C], upper bound of that mass.
        excluded_tokens: int32 [n], student tokens that are not ranked; None: all are.
        weight: factor of the sum of absolute differences.
    """

    rows: NDArray[np.int32]
    offsets: NDArray[np.int64]
    probs: NDArray[np.float32]
    min_remainder: NDArray[np.float32]
    max_remainder: NDArray[np.float32]
    excluded_tokens: NDArray[np.int32] | None
    weight: float


@dataclass(frozen=True)
class ClippedSurrogate:
    """Clipped surrogate for items of one cell, of probability P, that the student sampled.

    It replaces the divergence by `-min(ratio a, clip(ratio, min_ratio, max_ratio) a)`, `ratio = P / P_old`.

    Attributes:
        sampling_logprobs: float64 [C], `ln P_old`, at the time of sampling.
        advantages: float64 [C], a; constants.
        min_ratio, max_ratio: bounds of the importance ratio.
    """

    sampling_logprobs: NDArray[np.float64]
    advantages: NDArray[np.float64]
    min_ratio: float
    max_ratio: float


# Treatment of the mass outside of the cells.
OUTSIDE_MODES = {
    "other": "the remainder is one more cell of both distributions",
    "ignored": "dropped, as GOLD is published; the divergence can be negative",
    "renormalised": "the student's cells are divided by their sum, as p-kl is published; it can be negative",
}


@dataclass(frozen=True)
class LossCells:
    """The cells of one loss over one or more documents: items, their cells, the cells' entries.

    Attributes:
        cell_offsets: int64 [C+1], the cells of item c.
        entry_offsets: int64 [cells+1], the entries of each cell.
        teacher_probs: [cells], sum to at most 1 per item; the difference to 1 is the remainder. 0 for prefix cells.
        rows: int32 [entries], row of the student's logits. Items are sorted by their rows.
        tokens: int32 [entries], student token.
        log_weights: float32 [entries], log of the factor of the entry's probability.
        item_rows: int32 [C], the row of each item, sorted; None: that of its first entry.
        alternatives: alternative tokens in the previous rows, for losses that need them; None: none.
        divergence: between the teacher's and the student's cells.
        prefix_product: prefix tokens whose probabilities multiply the cells; None: none.
        sorted_probs: probabilities that are compared by rank, in addition to the cells; None: none.
        remainder_probs: float64 [C], the teacher's remainder, where float32 `teacher_probs` are too coarse for it;
            None: 1 minus their sum.
        outside_mode: a key of `OUTSIDE_MODES`.
        factor: factor of the divergence.
        surrogate: a clipped surrogate that replaces the divergence; None: none.
        corrections: float64 [C], added to the value of each item, not to its gradient, so that values from sampled
            tokens estimate the divergence. None: none.
    """

    cell_offsets: NDArray[np.int64]
    entry_offsets: NDArray[np.int64]
    teacher_probs: NDArray[np.floating[Any]]
    rows: NDArray[np.int32]
    tokens: NDArray[np.int32]
    log_weights: NDArray[np.float32]
    item_rows: NDArray[np.int32] | None = None
    alternatives: PrefixAlternatives | None = None
    divergence: Divergence = FORWARD_KL
    prefix_product: PrefixProduct | None = None
    sorted_probs: SortedProbs | None = None
    remainder_probs: NDArray[np.float64] | None = None
    outside_mode: str = "other"
    factor: float = 1.0
    surrogate: ClippedSurrogate | None = None
    corrections: NDArray[np.float64] | None = None

    @property
    def num_items(self) -> int:
        """Number of items, C, over which the loss is averaged."""
        return len(self.cell_offsets) - 1

    @property
    def first_rows(self) -> NDArray[np.int64]:
        """int64 [C], the row of each item, rising."""
        if self.item_rows is not None:
            return self.item_rows.astype(np.int64)
        # An item without a cell (no support token can be reached) has no row; it gets its neighbor's.
        rows = self.rows if len(self.rows) else np.zeros(1, np.int32)
        return rows[np.minimum(self.entry_offsets[self.cell_offsets[:-1]], len(rows) - 1)].astype(np.int64)


class Loss(Protocol):
    """Interface of the losses in `LOSSES`.

    Attributes:
        comparison_space: a key of `COMPARISON_SPACES`.
        averaged_over: the kind of items in the denominator.
        unit: unit of its value.
        requires: a key of `TEACHER_REQUIREMENTS`.
    """

    comparison_space: str
    averaged_over: str
    unit: str
    requires: str

    def build_cells(self, example: LossInputs, comparison_space: ComparisonSpace) -> LossCells:
        """Return the cells of one document, or of several joined ones."""


@dataclass(frozen=True)
class ItemRanges:
    """The rows and the teacher positions of each item.

    Attributes:
        row_start, row_stop: int64 [C], ranges of rows of the student's logits.
        position_start, position_stop: int64 [C], ranges of indices into the teacher's log-probabilities.
    """

    row_start: NDArray[np.int64]
    row_stop: NDArray[np.int64]
    position_start: NDArray[np.int64]
    position_stop: NDArray[np.int64]


def span_ranges(example: LossInputs) -> ItemRanges:
    """Return the rows and teacher positions of the spans that both models predict.

    A span is left out if one of its tokens has no distribution: for the student the first token of a text without a
    start token, for the teacher a position that the cache does not contain.
    """
    teacher = example.teacher_logprobs
    assert teacher is not None
    spans = example.spans
    row = np.full(len(example.student_ids) + 1, -1, np.int64)
    row[example.positions + 1] = np.arange(len(example.positions))
    position = np.full(len(example.teacher_ids) + 1, -1, np.int64)
    position[teacher.positions] = np.arange(len(teacher))
    first_row, last_row = row[spans[:, 0]], row[spans[:, 1] - 1]
    first_position, last_position = position[spans[:, 2]], position[spans[:, 3] - 1]
    kept = (first_row >= 0) & (last_row - first_row == spans[:, 1] - 1 - spans[:, 0])
    kept &= (first_position >= 0) & (last_position - first_position == spans[:, 3] - 1 - spans[:, 2])
    return ItemRanges(first_row[kept], last_row[kept] + 1, first_position[kept], last_position[kept] + 1)


def range_sums(values: NDArray[np.float32], starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return float64 [C], the sum of values in each range `[start, stop)`; infinite values affect only their range."""
    owners = np.repeat(np.arange(len(starts)), stops - starts)
    return np.bincount(owners, values[range_indices(starts, stops)], len(starts)).astype(np.float64)


def range_indices(starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the indices in the ranges `[start, stop)`, concatenated."""
    sizes = stops - starts
    firsts = np.cumsum(sizes) - sizes
    within: NDArray[np.int64] = np.arange(sizes.sum()) + np.repeat(starts - firsts, sizes)
    return within


def observed_token_cells(
    example: LossInputs, ranges: ItemRanges, probs: NDArray[np.float64], temperature: float = 1.0
) -> LossCells:
    """Return one item per range, with one cell: the student's last token there, after the prefix of those before it.

    Args:
        example: the inputs of the loss.
        ranges: rows of each item.
        probs: float64 [C], the teacher's probability of each cell.
        temperature: as in `PrefixProduct`.
    """
    sizes = ranges.row_stop - ranges.row_start
    ends, rows = np.cumsum(sizes), range_indices(ranges.row_start, ranges.row_stop)
    teacher_probs = np.zeros(len(rows))
    teacher_probs[ends - 1] = probs
    return LossCells(
        cell_offsets=np.concatenate([np.zeros(1, np.int64), ends]),
        entry_offsets=np.arange(len(rows) + 1, dtype=np.int64),
        teacher_probs=teacher_probs,
        rows=rows.astype(np.int32),
        tokens=example.student_ids[example.positions[rows] + 1],
        log_weights=np.zeros(len(rows), np.float32),
        item_rows=ranges.row_start.astype(np.int32),
        prefix_product=PrefixProduct(sizes - 1, temperature),
    )


def projected_cells(
    example: LossInputs, ranges: ItemRanges, columns: ProjectionColumns, *, published: bool = False
) -> LossCells:
    """Return items with one cell per teacher token that is in the teacher's support and mapped by the projection.

    The teacher's probability of a cell is its mean over the item's positions; a support without the token counts as 0,
    and its mass goes to the remainder. The student's is the mean over the item's rows of its projected probability.
    Teacher tokens that no student token maps to are in the remainder of both. `published`: use the teacher's means of
    p-kl as published.
    """
    from xtk.losses.projected_kl_numba import fill_cells
    from xtk.losses.sampled_support_correction import exact_entry_stops, mean_surprisals
    from xtk.losses.sorted_probs_numba import fill_published_cells

    teacher = example.teacher_logprobs
    assert teacher is not None
    inputs = (
        ranges.row_start,
        ranges.row_stop,
        ranges.position_start,
        ranges.position_stop,
        teacher.offsets,
        teacher.ids,
        teacher.logprobs,
        columns.offsets,
        columns.student_ids,
        columns.log_weights,
    )
    item_rows = ranges.row_start.astype(np.int32)
    if published:
        return dataclasses.replace(LossCells(*fill_published_cells(*inputs)), item_rows=item_rows)
    stops = exact_entry_stops(teacher)
    surprisals = mean_surprisals(teacher.offsets, stops, teacher.logprobs, teacher.entropy)
    *arrays, corrections = fill_cells(*inputs, stops, surprisals)
    return dataclasses.replace(
        LossCells(*arrays), item_rows=item_rows, corrections=None if teacher.exact_counts is None else corrections
    )
