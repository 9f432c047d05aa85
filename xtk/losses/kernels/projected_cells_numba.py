"""Numba kernels for cells (outcomes) that are mapped teacher tokens; they release the GIL.

The tests contain a slow reference of `fill_cells`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.losses.interface import ItemRanges
from xtk.losses.kernels.sampled_support_correction import (
    TeacherArrays,
    known_probability,
    negentropy,
    remainder_correction,
    sampled_log_correction,
)
from xtk.numba_kernel import numba_kernel

# What the kernels return, as arguments of `LossCells.from_numpy`.
CELL_ARRAYS = ("cell_offsets", "entry_offsets", "teacher_probs", "rows", "tokens", "log_weights")


@numba_kernel
def _max_cells_and_entries(
    ranges: ItemRanges, support: TeacherArrays, column_offsets: NDArray[np.int64]
) -> tuple[int, int]:
    """Return upper bounds for the numbers of cells and entries that `fill_cells` writes."""
    width = len(column_offsets) - 1
    most_cells = 0
    most_entries = 0
    for item in range(len(ranges.row_start)):
        rows = ranges.row_stop[item] - ranges.row_start[item]
        for position in range(ranges.position_start[item], ranges.position_stop[item]):
            most_cells += support.offsets[position + 1] - support.offsets[position]
            for slot in range(support.offsets[position], support.offsets[position + 1]):
                token = support.ids[slot]
                if 0 <= token < width:
                    most_entries += rows * (column_offsets[token + 1] - column_offsets[token])
    return most_cells, most_entries


@numba_kernel
def _sampling_correction(
    start: int,
    stop: int,
    first_cell: int,
    cells: int,
    support: TeacherArrays,
    cell_of_token: NDArray[np.int64],
    known: NDArray[np.float64],
    probs: NDArray[np.float32],
    sampled_probs: NDArray[np.float32],
) -> float:
    """Return the sampling correction, in nats, of an item: positions `[start, stop)`, cells `[first_cell, cells)`."""
    # Arrays of a tuple are read once: in a loop, each access would count references, which costs more than the rest.
    ids, logprobs, exact_stops = support.ids, support.logprobs, support.exact_stops
    correction = 0.0
    outside = 1.0
    sampled = False
    share = 1.0 / (stop - start) if stop > start else 0.0
    for position in range(start, stop):
        first, last, surprisal = exact_stops[position], support.offsets[position + 1], support.mean_surprisals[position]
        if first == last:
            continue
        sampled = True
        mean_logprob, mean_prob = np.log(share) - surprisal, share * np.exp(-max(surprisal, 0.0))
        for slot in range(first, last):
            token = ids[slot]
            if 0 <= token < len(cell_of_token) and cell_of_token[token] >= first_cell:
                cell = cell_of_token[token]
                if sampled_probs[cell] > 0:  # its value needs no correction
                    outside -= sampled_probs[cell]
                    continue
                mass = np.exp(logprobs[slot]) * share
                correction += mass * sampled_log_correction(known[cell], mean_logprob, mean_prob)
                outside -= mean_prob
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


@numba_kernel
def fill_cells(
    ranges: ItemRanges,
    support: TeacherArrays,
    column_offsets: NDArray[np.int64],
    column_students: NDArray[np.int32],
    column_log_weights: NDArray[np.float32],
    has_own_tokens: bool = False,
) -> tuple[Any, Any, Any, Any, Any, Any, Any, Any]:
    """Return `CELL_ARRAYS`, for items that average rows and teacher positions; corrections; and `sampled_probs`.

    `has_own_tokens`: whether each cell is the same token of both models; otherwise all `sampled_probs` are 0.
    """
    items = len(ranges.row_start)
    width = len(column_offsets) - 1
    most_cells, most_entries = _max_cells_and_entries(ranges, support, column_offsets)
    cell_offsets = np.zeros(items + 1, np.int64)
    entry_offsets = np.zeros(most_cells + 1, np.int64)
    probs = np.zeros(most_cells, np.float32)
    tokens_of_cells = np.zeros(most_cells, np.int32)
    entry_rows = np.empty(most_entries, np.int32)
    entry_tokens = np.empty(most_entries, np.int32)
    entry_log_weights = np.empty(most_entries, np.float32)
    cell_of_token = np.full(width, -1, np.int64)
    sampled_probs = np.zeros(most_cells, np.float32)
    known = np.zeros(most_cells, np.float64)  # without sampled tokens
    corrections = np.zeros(items, np.float64)
    cells = 0
    entries = 0
    for item in range(items):
        first_cell = cells
        start, stop = ranges.position_start[item], ranges.position_stop[item]
        for position in range(start, stop):
            for slot in range(support.offsets[position], support.offsets[position + 1]):
                token = support.ids[slot]
                if not 0 <= token < width or column_offsets[token + 1] == column_offsets[token]:
                    continue  # no student token maps to this token
                if cell_of_token[token] < first_cell:
                    cell_of_token[token] = cells
                    tokens_of_cells[cells] = token
                    cells += 1
                mass = np.exp(support.logprobs[slot]) / (stop - start)
                probs[cell_of_token[token]] += mass
                if slot < support.exact_stops[position]:
                    known[cell_of_token[token]] += mass
                elif has_own_tokens and stop - start == 1:
                    sampled_probs[cell_of_token[token]] = known_probability(support, slot)
        if has_own_tokens:
            for cell in range(first_cell, cells):
                if sampled_probs[cell] > 0 and known[cell] > 0:  # stop tokens of a class, exact and sampled
                    sampled_probs[cell] = -known[cell]
        corrections[item] = _sampling_correction(
            start, stop, first_cell, cells, support, cell_of_token, known, probs, sampled_probs
        )
        log_num_rows = np.float32(np.log(ranges.row_stop[item] - ranges.row_start[item]))
        for cell in range(first_cell, cells):
            token = tokens_of_cells[cell]
            for row in range(ranges.row_start[item], ranges.row_stop[item]):
                for at in range(column_offsets[token], column_offsets[token + 1]):
                    entry_rows[entries] = row
                    entry_tokens[entries] = column_students[at]
                    entry_log_weights[entries] = column_log_weights[at] - log_num_rows
                    entries += 1
            entry_offsets[cell + 1] = entries
        cell_offsets[item + 1] = cells
    return (
        cell_offsets, entry_offsets[: cells + 1], probs[:cells],
        entry_rows[:entries], entry_tokens[:entries], entry_log_weights[:entries], corrections, sampled_probs[:cells],
    )  # fmt: skip
