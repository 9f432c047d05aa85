"""Merges projections of the same two tokenizers by weighted average."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from xtk.errors import MismatchError, XtkError
from xtk.projection.coverage_audit import refresh_audit
from xtk.projection.projection import IDENTITY_KEYS, SparseProjection, format_tokenizer

_HEADER_KEYS = ("method", "options", "special_tokens", "prunings", "merges")


def merge_projections(first: SparseProjection, others: Sequence[tuple[SparseProjection, float]]) -> SparseProjection:
    """Return the weighted average `(1 - sum_i w_i) W + sum_i w_i W_i`.

    Args:
        others: projections with weights in (0, 1), in total below 1.

    Returns:
        A new projection. Cells are kept if they are equal in all; the header lists the merged projections.
    """
    for _, weight in others:
        if not 0 < weight < 1:
            raise XtkError(
                f"a weight of --merge is {weight}, but must be above 0 and below 1",
                hint="use, for example, --merge FILE=0.5",
            )
    rest = 1 - sum(weight for _, weight in others)
    if rest <= 0:
        raise XtkError(
            f"the weights of --merge sum to {1 - rest:g}, but must be below 1",
            hint="use smaller weights; the first projection gets the remainder to 1",
        )
    for other, _ in others:
        _check_same_pair(first, other)
    parts = [(first, rest), *others]
    merged = _weighted_sum(parts)
    same = all(np.array_equal(getattr(first, side), getattr(other, side))
               for other, _ in others for side in ("student_cells", "teacher_cells"))  # fmt: skip
    if not same:
        merged = dataclasses.replace(
            merged,
            student_cells=np.full_like(first.student_cells, -1),
            teacher_cells=np.full_like(first.teacher_cells, -1),
        )
    merges = [{"weight": round(weight, 12), **_merge_record(part)} for part, weight in parts]
    header = {**first.header, "method": "merge", "options": {}, "prunings": [], "merges": merges}
    merged = dataclasses.replace(merged, header=header)
    return dataclasses.replace(merged, header={**header, "audit": refresh_audit(merged)})


def _weighted_sum(parts: Sequence[tuple[SparseProjection, float]]) -> SparseProjection:
    first = parts[0][0]
    width = first.teacher_width
    keys = np.concatenate([part.entry_rows.astype(np.int64) * width + part.teacher_ids for part, _ in parts])
    weights = np.concatenate([part.weights.astype(np.float64) * weight for part, weight in parts])
    places, inverse = np.unique(keys, return_inverse=True)
    summed = np.minimum(np.bincount(inverse, weights, minlength=len(places)), 1).astype(np.float32)
    kept = summed > 0
    counts = np.bincount(places[kept] // width, minlength=first.student_width)
    return dataclasses.replace(
        first,
        row_offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]).astype(np.int64),
        teacher_ids=(places[kept] % width).astype(np.int32),
        weights=summed[kept],
    )


def _merge_record(projection: SparseProjection) -> dict[str, Any]:
    return {key: projection.header[key] for key in _HEADER_KEYS if key in projection.header}


def _check_same_pair(first: SparseProjection, other: SparseProjection) -> None:
    for side in ("student", "teacher"):
        one, two = first.header.get(side, {}), other.header.get(side, {})
        if any(one.get(key) != two.get(key) for key in IDENTITY_KEYS):
            raise MismatchError(
                f"these projections are for different {side} tokenizers",
                where=f"{format_tokenizer(one)} and {format_tokenizer(two)}",
                hint="build all of them with xtk build-projection for the same student and teacher",
            )
    if (first.student_width, first.teacher_width) != (other.student_width, other.teacher_width):
        raise MismatchError(
            "these projections have different shapes (student tokens x teacher tokens)",
            where=f"{first.student_width:,} x {first.teacher_width:,} and "
            f"{other.student_width:,} x {other.teacher_width:,}",
            hint="build all of them with xtk build-projection for the same student and teacher",
        )
