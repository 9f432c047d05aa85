"""Cells: the common ground on which a student and a teacher are compared.

An item (a token, a boundary, a span) has cells. A cell has the teacher's probability, and *entries*: pairs
of a row of the student's logits and a token, whose weighted probabilities add up to the student's
probability of the cell. What both sides have outside of the cells is the other cell.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from xtk.losses.divergences import Divergence, ForwardKLDivergence
from xtk.projection.byte_partition import BytePartition
from xtk.projection.projection import ProjectionColumns
from xtk.tokens.teacher_logprobs import TeacherLogprobs

# What a loss needs beside an example: W by teacher token, or the partition of both vocabularies, or nothing.
ComparisonSpace = ProjectionColumns | BytePartition | None

FORWARD_KL = ForwardKLDivergence()


@dataclass(frozen=True)
class LossInputs:
    """One document or several, seen by both models, on the way into a loss.

    Attributes:
        student_ids: int32 [T], the whole sequence.
        positions: int64 [N], rising: positions whose logits are needed; row r predicts token `rows[r] + 1`.
        spans: int32 [C, 4], the trained spans, in positions of both sequences.
        teacher_ids: int32 [S], the teacher's sequence; empty without a teacher.
        teacher_logprobs: what the teacher said; None without a teacher.
        sampling_logprobs: float32 [N], the log-probabilities at which the student drew the tokens of the rows; nan
            where
            it did not draw them. None: it drew nothing.
        advantages: float32 [N], by how much the reward of the document of each row is better than that of others; None:
            0.
    """

    student_ids: NDArray[np.int32]
    positions: NDArray[np.int64]
    spans: NDArray[np.int32]
    teacher_ids: NDArray[np.int32]
    teacher_logprobs: TeacherLogprobs | None
    sampling_logprobs: NDArray[np.float32] | None = None
    advantages: NDArray[np.float32] | None = None


def join_inputs(examples: Sequence[LossInputs]) -> LossInputs:
    """Put documents one after the other, as if they were one: cells are made for a whole batch at once."""
    students = np.cumsum([0, *(len(example.student_ids) for example in examples)])[:-1]
    teachers = np.cumsum([0, *(len(example.teacher_ids) for example in examples)])[:-1]
    shifts = np.column_stack([students, students, teachers, teachers]).astype(np.int32)
    signals = [example.teacher_logprobs for example in examples if example.teacher_logprobs is not None]
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
        teacher_logprobs=_join_teacher_logprobs(signals, teachers) if len(signals) == len(examples) else None,
        sampling_logprobs=_concatenate_optional([one.sampling_logprobs for one in examples], examples, np.nan),
        advantages=_concatenate_optional([one.advantages for one in examples], examples, 0.0),
    )


def _concatenate_optional(
    parts: Sequence[NDArray[np.float32] | None], examples: Sequence[LossInputs], missing: float
) -> NDArray[np.float32] | None:
    """Return numbers of rows, `missing` where a document has none; None where all have none."""
    if all(part is None for part in parts):
        return None
    filled = [
        np.full(len(example.positions), missing, np.float32) if part is None else part
        for part, example in zip(parts, examples, strict=True)
    ]
    return _concatenate_as(filled, np.float32)


def _join_teacher_logprobs(signals: Sequence[TeacherLogprobs], shifts: NDArray[np.int64]) -> TeacherLogprobs:
    firsts = np.cumsum([0, *(len(signal.ids) for signal in signals)])
    return TeacherLogprobs(
        positions=_concatenate_as(
            [signal.positions + at for signal, at in zip(signals, shifts, strict=True)], np.int32
        ),
        offsets=np.concatenate(
            [*(signal.offsets[:-1] + first for signal, first in zip(signals, firsts, strict=False)), firsts[-1:]]
        ),
        ids=_concatenate_as([signal.ids for signal in signals], np.int32),
        logprobs=_concatenate_as([signal.logprobs for signal in signals], np.float32),
        remainder_mass=_concatenate_as([signal.remainder_mass for signal in signals], np.float32),
        observed_logprobs=_concatenate_as([signal.observed_logprobs for signal in signals], np.float32),
        entropy=_concatenate_as([signal.entropy for signal in signals], np.float32),
        exact_counts=None
        if all(signal.exact_counts is None for signal in signals)
        else _concatenate_as(
            [np.diff(signal.offsets) if signal.exact_counts is None else signal.exact_counts for signal in signals],
            np.int64,
        ),
        precision=next((signal.precision for signal in signals if signal.precision), ""),
    )


def _concatenate_as(parts: Sequence[NDArray[Any]], dtype: type) -> NDArray[Any]:
    whole: NDArray[Any] = np.concatenate([*parts, np.zeros(0, dtype)]).astype(dtype, copy=False)
    return whole


@dataclass(frozen=True)
class PrefixAlternatives:
    """What else the row before could have meant by the bytes that are spelled since.

    The tokens of an item that begin with these bytes are in groups: those that end where the item stands, those that
    go on into none of its cells, then those that go on into each of its cells. Groups of all items follow each
    other, a group is some runs of the student's vocabulary in the order of its bytes, and it may be empty.

    Attributes:
        rows: int32 [C], the row of the student's logits that they are read from; -1: there are none to weigh.
        is_inside_token: bool [C], the item stands inside of a token of the student: no row predicts what comes next
            there.
        sorted_token_ids: int32 [n], the student's tokens in the order of their bytes.
        run_offsets: int64 [2 C + cells + 1], the runs of each group.
        firsts: int32 [runs], in that order.
        stops: int32 [runs].
    """

    rows: NDArray[np.int32]
    is_inside_token: NDArray[np.bool_]
    sorted_token_ids: NDArray[np.int32]
    run_offsets: NDArray[np.int64]
    firsts: NDArray[np.int32]
    stops: NDArray[np.int32]

    def has_no_remainder(self, cell_offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return [C], the items of which nothing of the student can be in the other cell."""
        first = cell_offsets[:-1] + 2 * np.arange(len(self.rows))
        closed: NDArray[np.bool_] = self.is_inside_token & (self.run_offsets[first + 2] == self.run_offsets[first])
        return closed


@dataclass(frozen=True)
class PrefixProduct:
    """The student's own tokens that lead to the last row of each item: their probabilities multiply its cells.

    The first cells of an item are its links: one a row, from its first row on, each of one entry, the token that stands
    there. All other cells are of the row behind them. What the links and that row leave over, each
    behind the links before it, is the other cell.

    Attributes:
        num_prefix_tokens: int64 [C], how many of the cells of an item are links.
        temperature: tau. Where it is not 1, items have one cell, of probability P; compared are `P^(1/tau)` and what
            that
            leaves over, as the teacher's probabilities are given.
    """

    num_prefix_tokens: NDArray[np.int64]
    temperature: float = 1.0


@dataclass(frozen=True)
class SortedProbs:
    """Probabilities in the last row of each item that are compared by their ranks, whatever they are of.

    Attributes:
        rows: int32 [C], of the student's logits.
        offsets: int64 [C+1], the ranks of item c.
        probs: float32 [ranks], the teacher's, falling within an item.
        min_remainder: float32 [C], what the teacher has behind the last rank at least,
        max_remainder: float32 [C], and at most.
        excluded_tokens: int32 [n], the student's tokens that take no part; None: all do.
        weight: of the sum of differences, beside the divergence of the cells.
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
    """What was known of items when the student drew them, each of one cell, of probability P.

    In the place of a divergence stands `-min(ratio a, clip(ratio, low, high) a)`, `ratio = P / P_old`.

    Attributes:
        sampling_logprobs: float64 [C], `ln P_old`.
        advantages: float64 [C], a; a constant.
        min_ratio, max_ratio: where the ratio is clipped.
    """

    sampling_logprobs: NDArray[np.float64]
    advantages: NDArray[np.float64]
    min_ratio: float
    max_ratio: float


# What becomes of the mass that is in no cell.
OUTSIDE_MODES = {
    "other": "one more cell on both sides",
    "ignored": "nothing: the divergence of parts of distributions, as GOLD is published; it can be negative",
    "renormalised": "the student's cells are divided by their sum, as p-kl is published; it can be negative",
}


@dataclass(frozen=True)
class LossCells:
    """The cells of one loss over one or more documents: items, their cells, the cells' entries.

    Attributes:
        cell_offsets: int64 [C+1], the cells of item c.
        entry_offsets: int64 [cells+1], the entries of each cell.
        teacher_probs: [cells], sum to at most 1 an item; the rest is the other cell. Those of links are 0.
        rows: int32 [entries], row of the student's logits. Items come in the order of their rows.
        tokens: int32 [entries], student token.
        log_weights: float32 [entries].
        item_rows: int32 [C], the row of each item, rising; None: that of its first entry.
        alternatives: what the rows before say, for losses that look back; None: nothing.
        divergence: between both sides.
        prefix_product: what the cells of each item are multiplied with; None: nothing.
        sorted_probs: what is compared beside the cells; None: nothing.
        remainder_probs: float64 [C], the teacher's probability of the other cell, where `teacher_probs` cannot tell a
            small
            one; None: what they leave over.
        outside_mode: a key of `OUTSIDES`.
        factor: of the divergence.
        surrogate: what stands in the place of the divergence; None: nothing.
        corrections: float64 [C], what is added to the value of each item, not to its gradient, so that from sampled
            tokens it estimates the divergence. None: nothing.
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
        """C, what the loss is averaged over."""
        return len(self.cell_offsets) - 1

    @property
    def first_rows(self) -> NDArray[np.int64]:
        """int64 [C], the row of each item, rising."""
        if self.item_rows is not None:
            return self.item_rows.astype(np.int64)
        # An item without a cell (nothing of the support can be reached) has no row; it goes with its neighbour.
        rows = self.rows if len(self.rows) else np.zeros(1, np.int32)
        return rows[np.minimum(self.entry_offsets[self.cell_offsets[:-1]], len(rows) - 1)].astype(np.int64)


class Loss(Protocol):
    """One line of the table of losses.

    Attributes:
        comparison_space: a key of `GROUNDS`.
        averaged_over: what it is averaged over.
        unit: of its value.
        requires: a key of `ASKS`.
    """

    comparison_space: str
    averaged_over: str
    unit: str
    requires: str

    def build_cells(self, example: LossInputs, comparison_space: ComparisonSpace) -> LossCells:
        """Cut one document into cells."""


@dataclass(frozen=True)
class ItemRanges:
    """Which rows and which teacher positions make up each item.

    Attributes:
        row_start, row_stop: int64 [C], rows of the student's logits, averaged.
        position_start, position_stop: int64 [C], indices into the signal, averaged.
    """

    row_start: NDArray[np.int64]
    row_stop: NDArray[np.int64]
    position_start: NDArray[np.int64]
    position_stop: NDArray[np.int64]


def span_ranges(example: LossInputs) -> ItemRanges:
    """Return the rows and signal positions of the spans that both models predict.

    A span is left out where one of its tokens has no distribution: on the student's side the first token
    of a text without a start token, on the teacher's a position that the cache does not hold.
    """
    signal = example.teacher_logprobs
    assert signal is not None
    spans = example.spans
    row = np.full(len(example.student_ids) + 1, -1, np.int64)
    row[example.positions + 1] = np.arange(len(example.positions))
    position = np.full(len(example.teacher_ids) + 1, -1, np.int64)
    position[signal.positions] = np.arange(len(signal))
    first_row, last_row = row[spans[:, 0]], row[spans[:, 1] - 1]
    first_position, last_position = position[spans[:, 2]], position[spans[:, 3] - 1]
    whole = (first_row >= 0) & (last_row - first_row == spans[:, 1] - 1 - spans[:, 0])
    whole &= (first_position >= 0) & (last_position - first_position == spans[:, 3] - 1 - spans[:, 2])
    return ItemRanges(first_row[whole], last_row[whole] + 1, first_position[whole], last_position[whole] + 1)


def range_sums(values: NDArray[np.float32], starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return float64 [C], the sum of values in each range `[start, stop)`; infinite ones stay in theirs."""
    owners = np.repeat(np.arange(len(starts)), stops - starts)
    return np.bincount(owners, values[range_indices(starts, stops)], len(starts)).astype(np.float64)


def range_indices(starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return what is in the ranges `[start, stop)`, one range behind the other."""
    sizes = stops - starts
    firsts = np.cumsum(sizes) - sizes
    within: NDArray[np.int64] = np.arange(sizes.sum()) + np.repeat(starts - firsts, sizes)
    return within


def observed_token_cells(
    example: LossInputs, ranges: ItemRanges, probs: NDArray[np.float64], temperature: float = 1.0
) -> LossCells:
    """Make one cell of each range: the student's own tokens, its last in a cell and those before it as links.

    Args:
        example: both sides.
        ranges: whose rows these are.
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
    """Make one cell of each teacher token that the teacher's support reaches and the projection can reach.

    The teacher's probability of a cell is its mean over the item's positions, where a support that does not
    hold the token counts as 0 and its mass goes to the other cell. The student's is the mean over the item's rows of
    what W carries to the token. Teacher tokens that no student token reaches are in the other cell on both sides.
    `published`: the teacher's means are those of p-kl as published.
    """
    from xtk.losses.cell_kernels import fill_cells
    from xtk.losses.sampling_correction import exact_entry_stops, mean_surprisals
    from xtk.losses.sorted_prob_kernels import fill_published_cells

    signal = example.teacher_logprobs
    assert signal is not None
    inputs = (
        ranges.row_start,
        ranges.row_stop,
        ranges.position_start,
        ranges.position_stop,
        signal.offsets,
        signal.ids,
        signal.logprobs,
        columns.offsets,
        columns.student_ids,
        columns.log_weights,
    )
    item_rows = ranges.row_start.astype(np.int32)
    if published:
        return dataclasses.replace(LossCells(*fill_published_cells(*inputs)), item_rows=item_rows)
    stops = exact_entry_stops(signal)
    surprisals = mean_surprisals(signal.offsets, stops, signal.logprobs, signal.entropy)
    *arrays, corrections = fill_cells(*inputs, stops, surprisals)
    return dataclasses.replace(
        LossCells(*arrays), item_rows=item_rows, corrections=None if signal.exact_counts is None else corrections
    )
