"""Numba kernels of the chunked softmax on the CPU: grouped log-sum-exp, scatter-add, and the largest logits of rows.

They release the GIL. On GPUs torch operations replace them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.numba_kernel import numba_kernel


@numba_kernel
def group_logsumexp_(values: NDArray[np.float32], groups: NDArray[np.int64], count: int) -> NDArray[np.float32]:
    """Return the log-sum-exp of each of `count` groups; the values become, in place, their softmax within the group.

    `groups`: int64 [n], the group of each value, sorted; an empty one gets -inf.
    """
    result = np.full(count, -np.inf, values.dtype)
    start = 0
    while start < len(values):
        group, stop = groups[start], start
        highest = values[start]
        while stop < len(values) and groups[stop] == group:
            highest = max(highest, values[stop])
            stop += 1
        total = values.dtype.type(0)
        for at in range(start, stop):
            values[at] = np.exp(values[at] - highest)
            total += values[at]
        for at in range(start, stop):
            values[at] /= total
        result[group] = highest + np.log(total)
        start = stop
    return result


@numba_kernel
def scatter_add_(values: NDArray[np.float32], indices: NDArray[np.int64], increments: NDArray[np.float32]) -> None:
    """Add increments to values, in place, at indices that may repeat."""
    for at in range(len(indices)):
        values[indices[at]] += increments[at]


@numba_kernel
def remove_entries_(
    values: NDArray[np.float32],
    indices: NDArray[np.int64],
    whole: NDArray[np.float32],
    weights: NDArray[np.float32],
    max_rounding: float,
) -> NDArray[np.float32]:
    """Subtract `weights * whole` from values, in place, as `chunked_softmax.remove_entries_`.

    What is left up to `max_rounding`, relative to `whole`, is rounding: it belongs to the entries.
    """
    shares = whole * weights
    for at in range(len(indices)):
        values[indices[at]] -= shares[at]
    is_rounded = False
    for at in range(len(indices)):
        left = values[indices[at]]
        if left != 0 and abs(left) <= max_rounding * whole[at]:
            shares[at] += left * weights[at]
            is_rounded = True
    if is_rounded:
        for at in range(len(indices)):
            if abs(values[indices[at]]) <= max_rounding * whole[at]:
                values[indices[at]] = 0
    return shares


@numba_kernel
def restore_entries_(values: NDArray[np.float32], indices: NDArray[np.int64], whole: NDArray[np.float32]) -> None:
    """Write values at indices that may repeat, with equal values."""
    for at in range(len(indices)):
        values[indices[at]] = whole[at]


@numba_kernel
def largest_columns(
    values: NDArray[np.floating[Any]],
    rows: NDArray[np.int64],
    offsets: NDArray[np.int64],
    included: NDArray[np.bool_],
) -> NDArray[np.int64]:
    """Return the columns of the largest values of some rows, in descending order; -1 where there are no more.

    Uses a heap of the K largest values, the smallest on top: of V values in random order about K ln(V / K) enter it.
    `offsets`: int64 [items + 1], ranges in the result. `included`: bool [V], the columns to consider.
    """
    result = np.full(offsets[-1], -1, np.int64)
    most = 0
    for item in range(len(rows)):
        most = max(most, offsets[item + 1] - offsets[item])
    heap, columns = np.empty(most, values.dtype), np.empty(most, np.int64)
    for item in range(len(rows)):
        row = values[rows[item]]
        count = offsets[item + 1] - offsets[item]
        if count == 0:
            continue
        size = 0
        at = 0
        while at < len(row) and size < count:
            if included[at]:
                heap[size], columns[size] = row[at], at
                size += 1
            at += 1
        for top in range(size // 2 - 1, -1, -1):
            _sift_down(heap, columns, top, size)
        while at < len(row):
            if row[at] > heap[0] and included[at]:
                heap[0], columns[0] = row[at], at
                _sift_down(heap, columns, 0, size)
            at += 1
        while size > 0:
            size -= 1
            result[offsets[item] + size] = columns[0]
            heap[0], columns[0] = heap[size], columns[size]
            _sift_down(heap, columns, 0, size)
    return result


@numba_kernel
def _sift_down(heap: NDArray[np.floating[Any]], columns: NDArray[np.int64], top: int, size: int) -> None:
    """Move the value at `top` down until it is the smallest of its subtree."""
    value, column = heap[top], columns[top]
    while 2 * top + 1 < size:
        child = 2 * top + 1
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= value:
            break
        heap[top], columns[top] = heap[child], columns[child]
        top = child
    heap[top], columns[top] = value, column
