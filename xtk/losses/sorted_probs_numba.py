"""Numba kernels for losses on paired tokens and sorted probabilities, and for p-kl as published."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

# A smaller remainder of the teacher is a rounding error.
MIN_REMAINDER = 1e-6


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def fill_paired_cells(
    row_start: NDArray[np.int64],
    row_stop: NDArray[np.int64],
    position_start: NDArray[np.int64],
    position_stop: NDArray[np.int64],
    student_tokens: NDArray[np.int32],
    support_offsets: NDArray[np.int64],
    support_ids: NDArray[np.int32],
    support_logprobs: NDArray[np.float32],
    teacher_tokens: NDArray[np.int32],
    observed_logprobs: NDArray[np.float32],
    student_of_teacher: NDArray[np.int32],
    max_ranks: int,
) -> tuple[Any, ...]:
    """Return the prefix cells and paired cells of each item, and the sorted probabilities of unpaired tokens.

    Args:
        row_start: int64 [C], the first student row of each item.
        row_stop: int64 [C], one past its last row.
        position_start: int64 [C], the first teacher position of each item.
        position_stop: int64 [C], one past its last position.
        student_tokens: int32 [N], the observed student token of each row.
        support_offsets: int64 [P+1], the support entries of each teacher position.
        support_ids: int32 [E], their tokens.
        support_logprobs: float32 [E], their log-probabilities.
        teacher_tokens: int32 [P], the observed token of each position.
        observed_logprobs: float32 [P], its log-probability.
        student_of_teacher: int32 [U], the student token paired with each teacher token; -1: none, it is ranked.
        max_ranks: largest number of ranks per item.

    Returns:
        cell_offsets [C+1], probs [cells], rows [cells], tokens [cells], num_prefix_tokens [C], rank_offsets [C+1],
        rank_probs [ranks], after_last_rank [C], the listed mass after the last rank; remainders [C], the mass that the
        teacher does not list.
    """
    items = len(row_start)
    most_cells = 0
    most_ranks = 0
    for item in range(items):
        last = position_stop[item] - 1
        named = support_offsets[last + 1] - support_offsets[last]
        most_cells += named + row_stop[item] - row_start[item] - 1
        most_ranks += named
    cell_offsets, rank_offsets = np.zeros(items + 1, np.int64), np.zeros(items + 1, np.int64)
    probs, rows = np.zeros(most_cells, np.float32), np.empty(most_cells, np.int32)
    tokens, num_prefix_tokens = np.empty(most_cells, np.int32), np.empty(items, np.int64)
    rank_probs = np.empty(most_ranks, np.float32)
    after_last_rank, remainders = np.zeros(items, np.float32), np.zeros(items, np.float32)
    cells = 0
    ranks = 0
    for item in range(items):
        num_prefix_tokens[item] = row_stop[item] - row_start[item] - 1
        for row in range(row_start[item], row_stop[item] - 1):
            rows[cells], tokens[cells] = row, student_tokens[row]
            cells += 1
        before = 0.0
        for position in range(position_start[item], position_stop[item] - 1):
            before += observed_logprobs[position]
        before = np.exp(before)
        last = position_stop[item] - 1
        slots = range(support_offsets[last], support_offsets[last + 1])
        remainder, least = 1.0, 0.0
        for slot in slots:
            remainder -= np.exp(np.float64(support_logprobs[slot]))
            least = min(least, support_logprobs[slot])
        remainder = remainder if remainder > MIN_REMAINDER else 0.0
        first = ranks
        known = 0.0
        for slot in slots:
            token, logprob = support_ids[slot], np.float64(support_logprobs[slot])
            prob = np.exp(logprob)
            paired_token = student_of_teacher[token] if 0 <= token < len(student_of_teacher) else -1
            if paired_token >= 0:
                probs[cells], rows[cells], tokens[cells] = before * prob, row_stop[item] - 1, paired_token
                cells += 1
            elif token == teacher_tokens[last] and logprob <= least and prob < remainder:
                known += prob  # listed only because it is the observed token: unlisted tokens may be more likely
            else:
                rank_probs[ranks] = before * prob
                ranks += 1
        rank_probs[first:ranks] = -np.sort(-rank_probs[first:ranks])
        after_last_rank[item] = before * known + rank_probs[first + max_ranks : ranks].sum()
        remainders[item] = before * remainder
        ranks = min(ranks, first + max_ranks)
        cell_offsets[item + 1], rank_offsets[item + 1] = cells, ranks
    return (
        cell_offsets,
        probs[:cells],
        rows[:cells],
        tokens[:cells],
        num_prefix_tokens,
        rank_offsets,
        rank_probs[:ranks],
        after_last_rank,
        remainders,
    )


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def largest_columns(
    values: NDArray[np.floating[Any]],
    rows: NDArray[np.int64],
    offsets: NDArray[np.int64],
    included: NDArray[np.bool_],
) -> NDArray[np.int64]:
    """Return the columns of the largest values of some rows, in descending order; -1 where there are no more.

    Uses a heap of the K largest values, the smallest on top: of V values in random order about K ln(V / K) enter it.

    Args:
        values: [n, V].
        rows: int64 [items].
        offsets: int64 [items + 1], ranges in the result; their sizes are the numbers of columns per item.
        included: bool [V], the columns to consider.
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


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
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


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def fill_published_cells(
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
) -> tuple[Any, Any, Any, Any, Any, Any]:
    """Return the first six arrays of `LossCells` for p-kl as published.

    The cells of an item are the tokens in the support of all its positions. The teacher's probabilities are geometric
    means of the distributions normalized over these tokens.
    """
    items, width = len(row_start), len(column_offsets) - 1
    most_cells = 0
    most_entries = 0
    for item in range(items):
        for slot in range(support_offsets[position_start[item]], support_offsets[position_start[item] + 1]):
            token = support_ids[slot]
            if 0 <= token < width:
                most_cells += 1
                fan_in = column_offsets[token + 1] - column_offsets[token]
                most_entries += (row_stop[item] - row_start[item]) * fan_in
    cell_offsets, entry_offsets = np.zeros(items + 1, np.int64), np.zeros(most_cells + 1, np.int64)
    probs, entry_log_weights = np.zeros(most_cells, np.float32), np.empty(most_entries, np.float32)
    entry_rows, entry_tokens = np.empty(most_entries, np.int32), np.empty(most_entries, np.int32)
    named, logs = np.zeros(width, np.int64), np.zeros(width, np.float64)
    cells = 0
    entries = 0
    for item in range(items):
        first, stop = position_start[item], position_stop[item]
        for position in range(first, stop):
            for slot in range(support_offsets[position], support_offsets[position + 1]):
                if 0 <= support_ids[slot] < width:
                    named[support_ids[slot]] += 1
        normalizers = 0.0
        for position in range(first, stop):
            total = 0.0
            for slot in range(support_offsets[position], support_offsets[position + 1]):
                token = support_ids[slot]
                if 0 <= token < width and named[token] == stop - first:
                    total += np.exp(support_logprobs[slot])
                    logs[token] += support_logprobs[slot]
            normalizers += np.log(total) if total > 0 else 0.0
        rows = row_stop[item] - row_start[item]
        for slot in range(support_offsets[first], support_offsets[first + 1]):
            token = support_ids[slot]
            if not 0 <= token < width or named[token] < stop - first:
                continue
            probs[cells] = np.exp((logs[token] - normalizers) / (stop - first))
            for row in range(row_start[item], row_stop[item]):
                for at in range(column_offsets[token], column_offsets[token + 1]):
                    entry_rows[entries], entry_tokens[entries] = row, column_students[at]
                    entry_log_weights[entries] = column_log_weights[at] - np.log(rows)
                    entries += 1
            cells += 1
            entry_offsets[cells] = entries
        cell_offsets[item + 1] = cells
        for position in range(first, stop):
            for slot in range(support_offsets[position], support_offsets[position + 1]):
                if 0 <= support_ids[slot] < width:
                    named[support_ids[slot]], logs[support_ids[slot]] = 0, 0.0
    return (
        cell_offsets,
        entry_offsets[: cells + 1],
        probs[:cells],
        entry_rows[:entries],
        entry_tokens[:entries],
        entry_log_weights[:entries],
    )
