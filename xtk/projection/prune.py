"""Making a projection smaller."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from xtk.errors import XtkError
from xtk.projection.coverage_audit import refresh_audit
from xtk.projection.projection import Projection


def prune_projection(
    projection: Projection,
    *,
    top_k: int | None = None,
    min_weight: float = 0.0,
    mass: float = 1.0,
    renormalize: bool = False,
) -> Projection:
    """Keep the heaviest entries of each row.

    An entry stays if it passes all limits, each read on the row as it is before. Pruning in the same way as the
    header's last entry changes nothing: of a share of a share there is no end.

    Args:
        projection: what to prune; stays as it is.
        top_k: entries a row at most; of equal weights the lower teacher id stays. None: all.
        min_weight: entries lighter than this go.
        mass: the heaviest entries that carry this share of the row stay. 1: all.
        renormalize: scale what is left of a row to the mass that it had. Else the mass is missing, and shown.

    Returns:
        A new projection; pruning it again in the same way changes nothing.

    Raises:
        XtkError: top_k below 1, min_weight outside of [0, 1], or mass outside of (0, 1].
    """
    if top_k is not None and top_k < 1:
        raise XtkError(f"--top-k is {top_k}; a row keeps at least one entry")
    if not 0 <= min_weight <= 1:
        raise XtkError(f"--min-weight is {min_weight}; weights lie between 0 and 1")
    if not 0 < mass <= 1:
        raise XtkError(f"--mass is {mass}; a share of a row is above 0 and at most 1")
    step = {"top_k": top_k, "min_weight": float(min_weight), "mass": float(mass), "renormalize": renormalize}
    earlier = list(projection.header.get("prunings", []))
    if step in earlier[-1:]:
        return projection
    keep = projection.weights >= np.float32(min_weight)
    if top_k is not None or mass < 1:
        rank, before = _order_by_weight(projection)
        keep &= rank < (top_k or len(rank) + 1)
        # A rounding above what is carried already is no reason to keep another entry.
        keep &= (before < mass * projection.row_masses[projection.entry_rows] * (1 - 1e-9)) | (mass == 1)
    pruned = _keep_entries(projection, keep, renormalize)
    pruned = dataclasses.replace(pruned, header={**projection.header, "prunings": [*earlier, step]})
    if keep.all() and "audit" in pruned.header:  # nothing went, so what was told is true
        return pruned
    return dataclasses.replace(pruned, header={**pruned.header, "audit": refresh_audit(pruned)})


def _order_by_weight(projection: Projection) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return for each entry how many of its row are heavier, and what those weigh together."""
    rows, weights = projection.entry_rows, projection.weights.astype(np.float64)
    order = np.lexsort((projection.teacher_ids, -weights, rows))
    starts = np.repeat(projection.row_offsets[:-1], np.diff(projection.row_offsets))
    sums = np.cumsum(weights[order]) - weights[order]
    rank, before = np.empty(len(rows), np.int64), np.empty(len(rows), np.float64)
    rank[order] = np.arange(len(rows)) - starts
    before[order] = sums - sums[starts]
    return rank, before


def _keep_entries(projection: Projection, keep: NDArray[np.bool_], renormalize: bool) -> Projection:
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
