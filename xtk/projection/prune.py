"""Making a projection smaller."""

from __future__ import annotations

import dataclasses

import numpy as np

from xtk.errors import XtkError
from xtk.projection.projection import Projection


def prune_projection(
    projection: Projection, *, top_k: int | None = None, min_weight: float = 0.0, renormalise: bool = False
) -> Projection:
    """Keep the heaviest entries of each row.

    Args:
        projection: what to prune; stays as it is.
        top_k: entries a row at most; of equal weights the lower teacher id stays. None: all.
        min_weight: entries lighter than this go.
        renormalise: scale what is left of a row to the mass that it had. Else the mass is missing, and shown.

    Returns:
        A new projection; pruning it again in the same way changes nothing.

    Raises:
        XtkError: top_k below 1, or min_weight outside of [0, 1].
    """
    if top_k is not None and top_k < 1:
        raise XtkError(f"--top-k is {top_k}; a row keeps at least one entry")
    if not 0 <= min_weight <= 1:
        raise XtkError(f"--min-weight is {min_weight}; weights lie between 0 and 1")
    rows = projection.rows_of_entries
    keep = projection.weights >= min_weight
    if top_k is not None:
        heaviest_first = np.lexsort((projection.teacher_ids, -projection.weights, rows))
        rank = np.empty(len(rows), np.int64)
        rank[heaviest_first] = np.arange(len(rows)) - np.repeat(
            projection.row_offsets[:-1], np.diff(projection.row_offsets)
        )
        keep &= rank < top_k
    weights = projection.weights[keep]
    counts = np.bincount(rows[keep], minlength=projection.student_width)
    if renormalise:
        left = np.bincount(rows[keep], weights.astype(np.float64), minlength=projection.student_width)
        scale = projection.row_masses / np.maximum(left, 1e-30)
        weights = np.minimum(weights * scale[rows[keep]], 1).astype(np.float32)
    step = {"top_k": top_k, "min_weight": min_weight, "renormalise": renormalise}
    earlier = list(projection.header.get("prunings", []))
    return dataclasses.replace(
        projection,
        row_offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]).astype(np.int64),
        teacher_ids=projection.teacher_ids[keep],
        weights=weights,
        header={**projection.header, "prunings": earlier if step in earlier[-1:] else [*earlier, step]},
    )
