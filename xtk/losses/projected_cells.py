"""Cells of teacher tokens that the projection maps: shared by the losses of one tokenizer and of a projection."""

from __future__ import annotations

import numpy as np

from xtk.losses.loss_cells import LossCells
from xtk.losses.loss_interface import ItemRanges, LossInputs
from xtk.losses.projected_cells_numba import CELL_ARRAYS, fill_cells
from xtk.losses.sampled_support_correction import TeacherArrays
from xtk.projection.projection import ProjectionColumns


def projected_cells(example: LossInputs, ranges: ItemRanges, columns: ProjectionColumns) -> LossCells:
    """Return items with one cell per teacher token that is in the teacher's support and mapped by the projection.

    The teacher's probability of a cell is its mean over the item's positions; a support without the token counts as 0,
    and its mass goes to the remainder. The student's is the mean over the item's rows of its projected probability.
    Teacher tokens that no student token maps to are in the remainder of both.
    """
    teacher = example.teacher_logprobs
    assert teacher is not None
    *arrays, corrections = fill_cells(
        ranges, TeacherArrays.from_logprobs(teacher), columns.offsets, columns.student_ids, columns.log_weights
    )
    return LossCells.from_numpy(
        **dict(zip(CELL_ARRAYS, arrays, strict=True)),
        item_rows=ranges.row_start.astype(np.int32),
        corrections=None if teacher.exact_counts is None else corrections,
    )
