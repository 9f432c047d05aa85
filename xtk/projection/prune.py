"""Prunes a projection: keeps the largest weights of each row."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from xtk.errors import XtkError
from xtk.projection.coverage_audit import refresh_audit
from xtk.projection.projection import SparseProjection


def prune_projection(
    projection: SparseProjection,
    *,
    top_k: int | None = None,
    min_weight: float = 0.0,
    mass: float = 1.0,
    renormalize: bool = False,
) -> SparseProjection:
    """Return a projection with only the largest weights of each row; the same pruning again changes nothing.

    An entry is kept if it passes all limits, each applied to the row before pruning. Pruning with the options of the
    header's last entry changes nothing; otherwise a repeated `mass` would prune forever.

    Args:
        top_k: maximum entries per row; among equal weights the lower teacher id is kept. None: no limit.
        mass: keeps the largest weights that together have this fraction of the row's mass. 1: all.
        renormalize: scale the remaining weights to the row's mass, which is lost otherwise, as the audit shows.
    """
    if top_k is not None and top_k < 1:
        raise XtkError(f"--top-k is {top_k}, but must be at least 1", hint="use, for example, --top-k 4")
    if not 0 <= min_weight <= 1:
        raise XtkError(
            f"--min-weight is {min_weight}, but must be between 0 and 1", hint="use, for example, --min-weight 0.01"
        )
    if not 0 < mass <= 1:
        raise XtkError(f"--mass is {mass}, but must be above 0 and at most 1", hint="use, for example, --mass 0.99")
    step = {"top_k": top_k, "min_weight": float(min_weight), "mass": float(mass), "renormalize": renormalize}
    earlier = list(projection.header.get("prunings", []))
    if step in earlier[-1:]:
        return projection
    keep = projection.weights >= np.float32(min_weight)
    if top_k is not None or mass < 1:
        rank, before = _order_by_weight(projection)
        keep &= rank < (top_k or len(rank) + 1)
        # Without the tolerance, a rounding error above the mass would keep one entry more.
        keep &= (before < mass * projection.row_masses[projection.entry_rows] * (1 - 1e-9)) | (mass == 1)
    pruned = _keep_entries(projection, keep, renormalize)
    pruned = dataclasses.replace(pruned, header={**projection.header, "prunings": [*earlier, step]})
    if keep.all() and "audit" in pruned.header:  # nothing was removed, so the audit is still correct
        return pruned
    return dataclasses.replace(pruned, header={**pruned.header, "audit": refresh_audit(pruned)})


def _order_by_weight(projection: SparseProjection) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return for each entry the number of larger weights in its row, and their sum."""
    rows, weights = projection.entry_rows, projection.weights.astype(np.float64)
    order = np.lexsort((projection.teacher_ids, -weights, rows))
    starts = np.repeat(projection.row_offsets[:-1], np.diff(projection.row_offsets))
    sums = np.cumsum(weights[order]) - weights[order]
    rank, before = np.empty(len(rows), np.int64), np.empty(len(rows), np.float64)
    rank[order] = np.arange(len(rows)) - starts
    before[order] = sums - sums[starts]
    return rank, before


def _keep_entries(projection: SparseProjection, keep: NDArray[np.bool_], renormalize: bool) -> SparseProjection:
    rows = projection.entry_rows[keep]
    weights = projection.weights[keep]
    counts = np.bincount(rows, minlength=projection.student_width)
    if renormalize:
        left = np.bincount(rows, weights.astype(np.float64), minlength=projection.student_width)
        scale = projection.row_masses / np.maximum(left, 1e-30)
        weights = np.minimum(weights * scale[rows], 1).astype(np.float32)
    return dataclasses.replace(
        projection,
        row_offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]).astype(np.int64),
        teacher_ids=projection.teacher_ids[keep],
        weights=weights,
    )
