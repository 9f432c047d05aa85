"""Comparison on the teacher tokens that the projection maps: each is a cell, one outcome; all others the remainder."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xtk.losses.cells.loss_cells import LossCells
from xtk.losses.interface import ItemRanges, LossInputs
from xtk.losses.kernels.projected_cells_numba import CELL_ARRAYS, fill_cells
from xtk.losses.kernels.sampled_support_correction import TeacherArrays
from xtk.projection.projection import ProjectionColumns

MIN_MAPPED_PROBABILITY = 1e-30  # float32 probabilities below are too coarse to be normalized


def projected_cells(
    example: LossInputs, ranges: ItemRanges, columns: ProjectionColumns, *, is_projection: bool = True
) -> LossCells:
    """Return items with one cell per teacher token that is in the teacher's support and mapped by the projection.

    The teacher's probability of a cell is its mean over the item's positions; a support without the token counts as 0,
    and its mass goes to the remainder. The student's is the mean over the item's rows of its projected probability.
    Teacher tokens that no student token maps to are in the remainder of both. If the support is the whole vocabulary,
    the student's remainder may have no mass for them: there the teacher's distribution is conditional on the mapped
    tokens, so that no item costs `ln(1/epsilon)`. `is_projection`: False for equal tokenizers, where all tokens are
    mapped but padding rows of the embedding.
    """
    teacher = example.teacher_logprobs
    assert teacher is not None
    *arrays, corrections, sampled_probs = fill_cells(
        ranges,
        TeacherArrays.from_logprobs(teacher),
        columns.offsets,
        columns.student_ids,
        columns.log_weights,
        not is_projection,
    )
    if is_projection and columns.num_mapped < columns.width:
        incomplete = np.append(0, np.cumsum(np.diff(teacher.offsets) < columns.width - columns.num_merged))
        is_complete = incomplete[ranges.position_start] == incomplete[ranges.position_stop]
        _normalize(arrays[2], arrays[0], is_complete)
    return LossCells.from_numpy(
        **dict(zip(CELL_ARRAYS, arrays, strict=True)),
        item_rows=ranges.row_start.astype(np.int32),
        corrections=None if teacher.exact_counts is None else corrections,
        sampled_probs=sampled_probs if sampled_probs.any() else None,
    )


def _normalize(probs: NDArray[np.float32], offsets: NDArray[np.int64], chosen: NDArray[np.bool_]) -> None:
    """Normalize, in place, the probabilities of chosen items; `MIN_MAPPED_PROBABILITY` is the smallest sum."""
    if not chosen.any():
        return
    items = np.repeat(np.arange(len(chosen)), np.diff(offsets))
    sums = np.bincount(items, probs.astype(np.float64), minlength=len(chosen))
    probs /= np.where(chosen & (sums > MIN_MAPPED_PROBABILITY), sums, 1)[items]
