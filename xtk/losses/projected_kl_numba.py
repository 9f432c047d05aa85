"""Numba kernels for projected cells: building them, and grouped log-sum-exp and scatter-add on the CPU.

They release the GIL. The tests contain a slow reference of `fill_cells`; on GPUs torch operations replace the others.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from xtk.losses.sampled_support_correction import negentropy, remainder_correction, sampled_log_correction


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _max_cells_and_entries(
    row_start: NDArray[np.int64],
    row_stop: NDArray[np.int64],
    position_start: NDArray[np.int64],
    position_stop: NDArray[np.int64],
    support_offsets: NDArray[np.int64],
    support_ids: NDArray[np.int32],
    column_offsets: NDArray[np.int64],
) -> tuple[int, int]:
    """Return upper bounds for the numbers of cells and entries that `fill_cells` writes."""
    width = len(column_offsets) - 1
    most_cells = 0
    most_entries = 0
    for item in range(len(row_start)):
        rows = row_stop[item] - row_start[item]
        for position in range(position_start[item], position_stop[item]):
            most_cells += support_offsets[position + 1] - support_offsets[position]
            for slot in range(support_offsets[position], support_offsets[position + 1]):
                token = support_ids[slot]
                if 0 <= token < width:
                    most_entries += rows * (column_offsets[token + 1] - column_offsets[token])
    return most_cells, most_entries


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _sampling_correction(
    start: int,
    stop: int,
    first_cell: int,
    cells: int,
    support_offsets: NDArray[np.int64],
    support_ids: NDArray[np.int32],
    support_logprobs: NDArray[np.float32],
    exact_stops: NDArray[np.int64],
    surprisals: NDArray[np.float64],
    cell_of_token: NDArray[np.int64],
    known: NDArray[np.float64],
    probs: NDArray[np.float32],
) -> float:
    """Return the sampling correction, in nats, of an item: positions `[start, stop)`, cells `[first_cell, cells)`."""
    correction = 0.0
    outside = 1.0
    sampled = False
    positions = stop - start
    for position in range(start, stop):
        sampled = sampled or exact_stops[position] < support_offsets[position + 1]
        for slot in range(exact_stops[position], support_offsets[position + 1]):
            token = support_ids[slot]
            if 0 <= token < len(cell_of_token) and cell_of_token[token] >= first_cell:
                cell = cell_of_token[token]
                mass = np.exp(support_logprobs[slot]) / positions
                correction += mass * sampled_log_correction(known[cell], 1 / positions, surprisals[position])
                outside -= np.exp(-max(surprisals[position], 0.0)) / positions
                if probs[cell] >= 0:  # once per cell; the sign marks it as done
                    correction += negentropy(known[cell]) - negentropy(probs[cell])
                    probs[cell] = -probs[cell]
    remainder = 1.0
    for cell in range(first_cell, cells):
        probs[cell] = abs(probs[cell])
        remainder -= probs[cell]
        outside -= known[cell]
    if sampled:
        correction += remainder_correction(remainder, outside)
    return correction


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def fill_cells(
    row_start: NDArray[np.int64],
    row_stop: NDArray[np.int64],
    position_start: NDArray[np.int64],
    position_stop: NDArray[np.int64],
    support_offsets: NDArray[np.int64],
    support_ids: NDArray[np.int32],
    support_logprobs: NDArray[np.float32],
    column_offsets: NDArray[np.int64],
    column_students: NDArray[np.int32],
    column_log_weights: NDArray[np.float32],
    exact_stops: NDArray[np.int64],
    surprisals: NDArray[np.float64],
) -> tuple[Any, Any, Any, Any, Any, Any, Any]:
    """Return the first six arrays of `LossCells`, for items that average rows and teacher positions; and corrections.

    `exact_stops` and `surprisals` are those of `xtk.losses.sampled_support_correction`, per teacher position.
    """
    items = len(row_start)
    width = len(column_offsets) - 1
    most_cells, most_entries = _max_cells_and_entries(
        row_start, row_stop, position_start, position_stop, support_offsets, support_ids, column_offsets
    )
    cell_offsets = np.zeros(items + 1, np.int64)
    entry_offsets = np.zeros(most_cells + 1, np.int64)
    probs = np.zeros(most_cells, np.float32)
    tokens_of_cells = np.zeros(most_cells, np.int32)
    entry_rows = np.empty(most_entries, np.int32)
    entry_tokens = np.empty(most_entries, np.int32)
    entry_log_weights = np.empty(most_entries, np.float32)
    cell_of_token = np.full(len(column_offsets) - 1, -1, np.int64)
    known = np.zeros(most_cells, np.float64)  # without sampled tokens
    corrections = np.zeros(items, np.float64)
    cells = 0
    entries = 0
    for item in range(items):
        first_cell = cells
        positions = position_stop[item] - position_start[item]
        for position in range(position_start[item], position_stop[item]):
            for slot in range(support_offsets[position], support_offsets[position + 1]):
                token = support_ids[slot]
                if not 0 <= token < width or column_offsets[token + 1] == column_offsets[token]:
                    continue  # no student token maps to this token
                if cell_of_token[token] < first_cell:
                    cell_of_token[token] = cells
                    tokens_of_cells[cells] = token
                    cells += 1
                mass = np.exp(support_logprobs[slot]) / positions
                probs[cell_of_token[token]] += mass
                if slot < exact_stops[position]:
                    known[cell_of_token[token]] += mass
        corrections[item] = _sampling_correction(
            position_start[item],
            position_stop[item],
            first_cell,
            cells,
            support_offsets,
            support_ids,
            support_logprobs,
            exact_stops,
            surprisals,
            cell_of_token,
            known,
            probs,
        )
        rows = row_stop[item] - row_start[item]
        log_num_rows = np.float32(np.log(rows))
        for cell in range(first_cell, cells):
            token = tokens_of_cells[cell]
            for row in range(row_start[item], row_stop[item]):
                for at in range(column_offsets[token], column_offsets[token + 1]):
                    entry_rows[entries] = row
                    entry_tokens[entries] = column_students[at]
                    entry_log_weights[entries] = column_log_weights[at] - log_num_rows
                    entries += 1
            entry_offsets[cell + 1] = entries
        cell_offsets[item + 1] = cells
    return (
        cell_offsets, entry_offsets[: cells + 1], probs[:cells],
        entry_rows[:entries], entry_tokens[:entries], entry_log_weights[:entries], corrections,
    )  # fmt: skip


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def group_logsumexp_(values: NDArray[np.float32], groups: NDArray[np.int64], count: int) -> NDArray[np.float32]:
    """Return the log-sum-exp of each group; the values become, in place, their softmax within the group.

    Args:
        values: [n]; overwritten.
        groups: int64 [n], the group of each value, sorted.
        count: number of groups; an empty one gets -inf.
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


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def scatter_add_(values: NDArray[np.float32], indices: NDArray[np.int64], increments: NDArray[np.float32]) -> None:
    """Add increments to values, in place, at indices that may repeat."""
    for at in range(len(indices)):
        values[indices[at]] += increments[at]
