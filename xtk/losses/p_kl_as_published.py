"""p-kl as X-Token publishes it, arXiv 2605.21699: only for comparisons; not a distance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from xtk.losses.cells.loss_cells import LossCells
from xtk.losses.interface import ItemRanges, LossInputs
from xtk.losses.kernels.projected_cells_numba import CELL_ARRAYS
from xtk.losses.kernels.sampled_support_correction import TeacherArrays
from xtk.numba_kernel import numba_kernel
from xtk.parallel.host_to_device import to_device
from xtk.projection.projection import ProjectionColumns

# Smallest probability of the student in a cell, as in X-Token.
PUBLISHED_EPSILON = 1e-10


@dataclass(frozen=True, kw_only=True)
class RenormalizedCells(LossCells):
    """Cells of the student that are divided by their sum in the item; the value can be negative."""

    ignores_remainder: bool = True

    def value(self, cells: Tensor, remainders: Tensor, *others: Tensor) -> Tensor:
        """Return the weighted sum of the divergence between the teacher's cells and the renormalized ones."""
        items, probs = to_device(self.cell_items, cells.device), cells.exp()
        sums = probs.new_zeros(self.num_items).scatter_add(0, items, probs) + PUBLISHED_EPSILON
        return super().value((probs / sums[items] + PUBLISHED_EPSILON).log(), remainders)


def published_cells(example: LossInputs, ranges: ItemRanges, columns: ProjectionColumns) -> LossCells:
    """Return items with one cell per teacher token that is in the support of all their positions."""
    assert example.teacher_logprobs is not None
    support = TeacherArrays.from_logprobs(example.teacher_logprobs)
    arrays = _fill_published_cells(ranges, support, columns.offsets, columns.student_ids, columns.log_weights)
    named = dict(zip(CELL_ARRAYS, arrays, strict=True))
    return RenormalizedCells.from_numpy(**named, item_rows=ranges.row_start.astype(np.int32))


@numba_kernel
def _fill_published_cells(
    ranges: ItemRanges,
    support: TeacherArrays,
    column_offsets: NDArray[np.int64],
    column_students: NDArray[np.int32],
    column_log_weights: NDArray[np.float32],
) -> tuple[Any, Any, Any, Any, Any, Any]:
    """Return `CELL_ARRAYS`.

    The cells of an item are the tokens in the support of all its positions. The teacher's probabilities are geometric
    means of the distributions normalized over these tokens.
    """
    items, width = len(ranges.row_start), len(column_offsets) - 1
    most_cells = 0
    most_entries = 0
    for item in range(items):
        first = ranges.position_start[item]
        for slot in range(support.offsets[first], support.offsets[first + 1]):
            token = support.ids[slot]
            if 0 <= token < width:
                most_cells += 1
                fan_in = column_offsets[token + 1] - column_offsets[token]
                most_entries += (ranges.row_stop[item] - ranges.row_start[item]) * fan_in
    cell_offsets, entry_offsets = np.zeros(items + 1, np.int64), np.zeros(most_cells + 1, np.int64)
    probs, entry_log_weights = np.zeros(most_cells, np.float32), np.empty(most_entries, np.float32)
    entry_rows, entry_tokens = np.empty(most_entries, np.int32), np.empty(most_entries, np.int32)
    named, logs = np.zeros(width, np.int64), np.zeros(width, np.float64)
    cells = 0
    entries = 0
    for item in range(items):
        first, stop = ranges.position_start[item], ranges.position_stop[item]
        for position in range(first, stop):
            for slot in range(support.offsets[position], support.offsets[position + 1]):
                if 0 <= support.ids[slot] < width:
                    named[support.ids[slot]] += 1
        normalizers = 0.0
        for position in range(first, stop):
            total = 0.0
            for slot in range(support.offsets[position], support.offsets[position + 1]):
                token = support.ids[slot]
                if 0 <= token < width and named[token] == stop - first:
                    total += np.exp(support.logprobs[slot])
                    logs[token] += support.logprobs[slot]
            normalizers += np.log(total) if total > 0 else 0.0
        rows = ranges.row_stop[item] - ranges.row_start[item]
        for slot in range(support.offsets[first], support.offsets[first + 1]):
            token = support.ids[slot]
            if not 0 <= token < width or named[token] < stop - first:
                continue
            probs[cells] = np.exp((logs[token] - normalizers) / (stop - first))
            for row in range(ranges.row_start[item], ranges.row_stop[item]):
                for at in range(column_offsets[token], column_offsets[token + 1]):
                    entry_rows[entries], entry_tokens[entries] = row, column_students[at]
                    entry_log_weights[entries] = column_log_weights[at] - np.log(rows)
                    entries += 1
            cells += 1
            entry_offsets[cells] = entries
        cell_offsets[item + 1] = cells
        for position in range(first, stop):
            for slot in range(support.offsets[position], support.offsets[position + 1]):
                if 0 <= support.ids[slot] < width:
                    named[support.ids[slot]], logs[support.ids[slot]] = 0, 0.0
    return (
        cell_offsets, entry_offsets[: cells + 1], probs[:cells],
        entry_rows[:entries], entry_tokens[:entries], entry_log_weights[:entries],
    )  # fmt: skip
