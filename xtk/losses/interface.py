"""The interface of losses: what a loss gets for a batch of documents, and what it returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from xtk.cache.teacher_logprobs import TeacherLogprobs
from xtk.losses.cells.loss_cells import LossCells
from xtk.options.declaration import option
from xtk.projection.projection import ProjectionColumns
from xtk.projection.vocabulary_byte_partition import BytePartition
from xtk.text.chat.conversation_tokens import NO_REGION

# Values of the options `where` and `whitespace` of losses.
ALL_POSITIONS, SHARED_BOUNDARIES = "all", "common"
KEEP, MASK = "keep", "mask"
# Values of `Loss.stop_class`: the sides whose stop tokens are added up.
BOTH_STOP_CLASSES, TEACHER_STOP_CLASS, NO_STOP_CLASS = "both", "teacher", "none"

# What a loss needs in addition to its inputs: the projection W by teacher token, a partition of both vocabularies, or
# nothing.
ComparisonSpace = ProjectionColumns | BytePartition | None


@dataclass(frozen=True)
class LossInputs:
    """Inputs of a loss: one or more documents as tokens of both models, with the teacher's log-probabilities."""

    student_ids: NDArray[np.int32]  # [T], the full sequence
    positions: NDArray[np.int64]  # [N], sorted: positions of the logits; row r predicts token `positions[r] + 1`
    spans: NDArray[np.int32]  # [C, 4], the trained spans: student start and stop, teacher start and stop
    teacher_ids: NDArray[np.int32]  # [S], the teacher's sequence; empty without a teacher
    teacher_logprobs: TeacherLogprobs | None  # the teacher's log-probabilities; None without a teacher
    # [N], of the rows' tokens when the student sampled them; nan: not sampled. None: none was.
    sampling_logprobs: NDArray[np.float32] | None = None
    advantages: NDArray[np.float32] | None = None  # [N], the advantage of each row's document; None: 0
    is_whitespace: NDArray[np.bool_] | None = None  # [N], whether each row's token is white space; None: no token is
    regions: NDArray[np.uint8] | None = None  # [N], the region of each row's token; None: regions are not counted
    # [N], largest size of the teacher's advantage, nats; None: none.
    advantage_bounds: NDArray[np.float32] | None = None
    is_end: NDArray[np.bool_] | None = None  # [C], whether a special token that ends a segment or is it; None: none
    # [N], at the first row of each span the log-probability of the teacher's tokens of the span by its style reference;
    # nan elsewhere. None: there is no reference.
    reference_logprobs: NDArray[np.float32] | None = None
    frozen_logprobs: NDArray[np.float32] | None = None  # [N], of the rows' tokens by the frozen student; nan: unknown
    # Of a reference at the entries of `teacher_logprobs`; the ratio shifts the target. None: the target is the teacher.
    shift_reference: TeacherLogprobs | None = None


def join_inputs(examples: Sequence[LossInputs]) -> LossInputs:
    """Return the concatenation of several inputs, so that cells are built for a batch at once."""
    students = np.cumsum([0, *(len(example.student_ids) for example in examples)])[:-1]
    teachers = np.cumsum([0, *(len(example.teacher_ids) for example in examples)])[:-1]
    shifts = np.column_stack([students, students, teachers, teachers]).astype(np.int32)
    teacher_outputs = [example.teacher_logprobs for example in examples if example.teacher_logprobs is not None]
    is_shifted = len(teacher_outputs) == len(examples) and any(example.shift_reference for example in examples)
    # A document without a reference has no teacher either: its log-probabilities are empty.
    references = [
        example.shift_reference or teacher for example, teacher in zip(examples, teacher_outputs, strict=False)
    ]
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
        shift_reference=_join_teacher_logprobs(references, teachers) if is_shifted else None,
        **{name: _concatenate_optional(name, examples) for name in _MISSING_VALUES},
    )


# The optional fields of `LossInputs`, with the value of rows (or spans) of documents that do not have them.
_MISSING_VALUES: dict[str, Any] = {
    "sampling_logprobs": np.float32(np.nan),
    "advantages": np.float32(0),
    "is_whitespace": np.False_,
    "regions": np.uint8(NO_REGION),
    "advantage_bounds": np.float32(np.inf),
    "is_end": np.False_,
    "reference_logprobs": np.float32(np.nan),
    "frozen_logprobs": np.float32(np.nan),
}


def _concatenate_optional(name: str, examples: Sequence[LossInputs]) -> Any:
    """Return the concatenated values of an optional field; None if no document has any."""
    parts, missing = [getattr(example, name) for example in examples], _MISSING_VALUES[name]
    if all(part is None for part in parts):
        return None
    sizes = [len(example.spans if name == "is_end" else example.positions) for example in examples]
    filled = [np.full(size, missing) if part is None else part for part, size in zip(parts, sizes, strict=True)]
    return _concatenate_as(filled, missing.dtype.type)


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
        token_logprobs=None
        if all(teacher.token_logprobs is None for teacher in teacher_outputs)
        else _concatenate_as([_token_logprobs(teacher) for teacher in teacher_outputs], np.float32),
    )


def _token_logprobs(teacher: TeacherLogprobs) -> NDArray[np.float32]:
    """Return [E], the log-probabilities of each entry's own token; NaN for sampled ids if they are unknown."""
    if teacher.token_logprobs is not None or teacher.exact_counts is None:
        return teacher.logprobs if teacher.token_logprobs is None else teacher.token_logprobs
    sizes = np.diff(teacher.offsets)
    within = np.arange(len(teacher.ids)) - np.repeat(teacher.offsets[:-1], sizes)
    return np.where(within < np.repeat(teacher.exact_counts, sizes), teacher.logprobs, np.float32(np.nan))


def _concatenate_as(parts: Sequence[NDArray[Any]], dtype: type) -> NDArray[Any]:
    whole: NDArray[Any] = np.concatenate([*parts, np.zeros(0, dtype)]).astype(dtype, copy=False)
    return whole


@dataclass(frozen=True)
class Loss:
    """Base class of the losses in `LOSSES`. Its docstring is its help text; the fields of a dataclass are options."""

    # `all`, or `common`: only items of positions that are token boundaries of both models.
    where: str = option(ALL_POSITIONS, "Positions of the items.", choices=(ALL_POSITIONS, SHARED_BOUNDARIES))
    # `keep`, or `mask`: leave out items of student tokens that are all spaces, tabs or newlines.
    whitespace: str = option(KEEP, "Items of tokens of white space.", choices=(KEEP, MASK))

    comparison_space: ClassVar[str]  # a key of `COMPARISON_SPACES`
    averaged_over: ClassVar[str]  # the kind of items in the denominator
    unit: ClassVar[str] = "nats"  # unit of its value
    requires: ClassVar[str] = "distribution"  # a key of `TEACHER_REQUIREMENTS`
    takes_divergence: ClassVar[bool] = True  # whether the divergence between its cells is an option
    default_divergence: ClassVar[str] = "forward-kl"  # a key of `DIVERGENCES`, the default of that option
    items_are_spans: ClassVar[bool] = False  # whether an item is a span, and not the position of its first row
    stop_class: ClassVar[str] = BOTH_STOP_CLASSES  # sides whose stop tokens are one event: `both`, `teacher` or `none`
    # Whether each cell is one token of the teacher, so that a sampled token's log-probability is that of its cell.
    compares_single_tokens: ClassVar[bool] = False
    compares_cells: ClassVar[bool] = False  # a divergence of cells and remainders, whose target can be shifted

    @property
    def compares_only_cells(self) -> bool:
        """As `compares_cells`, which may depend on an option."""
        return self.compares_cells

    @property
    def covers_spans(self) -> bool:
        """As `items_are_spans`, which may depend on an option."""
        return self.items_are_spans

    def build_cells(self, example: LossInputs, comparison_space: ComparisonSpace) -> LossCells:
        """Return the cells of one document, or of several joined ones, for all positions."""
        raise NotImplementedError

    def build_selected_cells(self, example: LossInputs, comparison_space: ComparisonSpace) -> LossCells:
        """Return the cells with a weight of 0 for items that the options `where` and `whitespace` leave out."""
        cells = self.build_cells(example, comparison_space)
        if example.regions is not None:
            cells = replace(cells, regions=torch.from_numpy(example.regions[cells.first_rows.numpy()]))
        if self.where == ALL_POSITIONS and self.whitespace == KEEP:
            return cells
        selected = self._selected_rows(example)
        if self.covers_spans:  # all rows of a span must be selected
            left_out = np.append(0, np.cumsum(~selected))
            row = np.full(len(example.student_ids) + 1, -1, np.int64)
            row[example.positions + 1] = np.arange(len(example.positions))
            firsts, lasts = row[example.spans[:, 0]], row[example.spans[:, 1] - 1]
            known = (firsts >= 0) & (lasts >= firsts)
            selected[firsts[known]] = left_out[lasts[known] + 1] == left_out[firsts[known]]
        items = selected[cells.first_rows.numpy()]
        if self.where == SHARED_BOUNDARIES:
            items &= cells.is_token_start.numpy()
        return cells.weighted(items.astype(np.float64))

    def _selected_rows(self, example: LossInputs) -> NDArray[np.bool_]:
        """Return bool [N], the rows whose position and token `where` and `whitespace` select."""
        selected = np.ones(len(example.positions), np.bool_)
        if self.where == SHARED_BOUNDARIES:
            selected = np.isin(example.positions + 1, example.spans[:, 0])
        if self.whitespace == MASK and example.is_whitespace is not None:
            selected &= ~example.is_whitespace
        return selected


class ItemRanges(NamedTuple):
    """The rows and the teacher positions of each item; kernels take it too."""

    row_start: NDArray[np.int64]  # [C], ranges of rows of the student's logits
    row_stop: NDArray[np.int64]  # [C]
    position_start: NDArray[np.int64]  # [C], ranges of indices into the teacher's log-probabilities
    position_stop: NDArray[np.int64]  # [C]

    def first_only(self) -> ItemRanges:
        """Return only the first row and the first position of each item."""
        return ItemRanges(self.row_start, self.row_start + 1, self.position_start, self.position_start + 1)


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


def range_sums(
    values: NDArray[np.floating[Any]], starts: NDArray[np.int64], stops: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return float64 [C], the sum of values in each range `[start, stop)`; infinite values affect only their range."""
    owners = np.repeat(np.arange(len(starts)), stops - starts)
    return np.bincount(owners, values[range_indices(starts, stops)], len(starts)).astype(np.float64)


def range_indices(starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the indices in the ranges `[start, stop)`, concatenated."""
    sizes = stops - starts
    firsts = np.cumsum(sizes) - sizes
    within: NDArray[np.int64] = np.arange(sizes.sum()) + np.repeat(starts - firsts, sizes)
    return within
