"""Cells of teacher tokens that the projection maps: shared by the losses of one tokenizer and of a projection."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xtk.losses.loss_cells import LossCells
from xtk.losses.loss_interface import ItemRanges, LossInputs
from xtk.losses.projected_cells_numba import CELL_ARRAYS, fill_cells
from xtk.losses.sampled_support_correction import TeacherArrays
from xtk.projection.projection import ProjectionColumns


def projected_cells(
    example: LossInputs, ranges: ItemRanges, columns: ProjectionColumns, *, is_projection: bool = True
) -> LossCells:
    """Return items with one cell per teacher token that is in the teacher's support and mapped by the projection.

    The teacher's probability of a cell is its mean over the item's positions; a support without the token counts as 0,
    and its mass goes to the remainder. The student's is the mean over the item's rows of its projected probability.
    Teacher tokens that no student token maps to are in the remainder of both. Where the support contains all other
    tokens, the student's remainder has no tokens: such an item compares the distributions given that the token is one
    to which a student token maps.
    """
    teacher = example.teacher_logprobs
    assert teacher is not None
    *arrays, corrections = fill_cells(
        ranges, TeacherArrays.from_logprobs(teacher), columns.offsets, columns.student_ids, columns.log_weights
    )
    if is_projection:
        _condition_on_mapped_tokens(arrays[0], arrays[2], columns)
    return LossCells.from_numpy(
        **dict(zip(CELL_ARRAYS, arrays, strict=True)),
        item_rows=ranges.row_start.astype(np.int32),
        corrections=None if teacher.exact_counts is None else corrections,
    )


def _condition_on_mapped_tokens(
    cell_offsets: NDArray[np.int64], teacher_probs: NDArray[np.float32], columns: ProjectionColumns
) -> None:
    """Normalize, in place, the teacher's probabilities of items that have a cell for every mapped teacher token."""
    has_all = np.diff(cell_offsets) == columns.num_mapped
    if columns.num_mapped == columns.width or not has_all.any():
        return
    items = np.repeat(np.arange(len(has_all)), np.diff(cell_offsets))
    sums = np.bincount(items, teacher_probs.astype(np.float64), minlength=len(has_all))
    sums[~has_all] = 1
    teacher_probs /= np.maximum(sums, np.finfo(np.float64).tiny)[items]
