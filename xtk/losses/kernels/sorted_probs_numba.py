"""Numba kernel of paired tokens and sorted probabilities; it releases the GIL."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.cache.teacher_logprobs import MIN_REMAINDER
from xtk.losses.interface import ItemRanges
from xtk.losses.kernels.sampled_support_correction import TeacherArrays
from xtk.numba_kernel import numba_kernel


@numba_kernel
def _remainder_and_least(support: TeacherArrays, position: int) -> tuple[float, float]:
    """Return the mass that the teacher does not list at a position, and the smallest listed log-probability."""
    remainder, least = 1.0, 0.0
    for slot in range(support.offsets[position], support.offsets[position + 1]):
        remainder -= np.exp(np.float64(support.logprobs[slot]))
        least = min(least, support.logprobs[slot])
    return remainder if remainder > MIN_REMAINDER else 0.0, least


@numba_kernel
def fill_paired_cells(
    ranges: ItemRanges,
    support: TeacherArrays,
    student_tokens: NDArray[np.int32],
    teacher_tokens: NDArray[np.int32],
    observed_logprobs: NDArray[np.float32],
    student_of_teacher: NDArray[np.int32],
    max_ranks: int,
) -> tuple[Any, ...]:
    """Return the prefix cells and paired cells of each item, and the sorted probabilities of unpaired tokens.

    They are cell_offsets [C+1], probs, rows and tokens [cells], rank_offsets [C+1], rank_probs [ranks]; after_last_rank
    [C], the listed mass after the last rank; remainders [C], the mass that the teacher does not list.

    Args:
        student_tokens: int32 [N], the observed student token of each row.
        teacher_tokens: int32 [P], the observed token of each position; `observed_logprobs`: its log-probability.
        student_of_teacher: int32 [U], the student token paired with each teacher token; -1: none, it is ranked.
    """
    items = len(ranges.row_start)
    most_cells = 0
    most_ranks = 0
    for item in range(items):
        last = ranges.position_stop[item] - 1
        named = support.offsets[last + 1] - support.offsets[last]
        most_cells += named + ranges.row_stop[item] - ranges.row_start[item] - 1
        most_ranks += named
    cell_offsets, rank_offsets = np.zeros(items + 1, np.int64), np.zeros(items + 1, np.int64)
    probs, rows = np.zeros(most_cells, np.float32), np.empty(most_cells, np.int32)
    tokens, rank_probs = np.empty(most_cells, np.int32), np.empty(most_ranks, np.float32)
    after_last_rank, remainders = np.zeros(items, np.float32), np.zeros(items, np.float32)
    cells = 0
    ranks = 0
    for item in range(items):
        for row in range(ranges.row_start[item], ranges.row_stop[item] - 1):
            rows[cells], tokens[cells] = row, student_tokens[row]
            cells += 1
        last, last_row = ranges.position_stop[item] - 1, ranges.row_stop[item] - 1
        before = 0.0
        for position in range(ranges.position_start[item], last):
            before += observed_logprobs[position]
        before = np.exp(before)
        remainder, least = _remainder_and_least(support, last)
        first = ranks
        known = 0.0
        for slot in range(support.offsets[last], support.offsets[last + 1]):
            token, logprob = support.ids[slot], np.float64(support.logprobs[slot])
            prob = np.exp(logprob)
            paired_token = student_of_teacher[token] if 0 <= token < len(student_of_teacher) else -1
            if paired_token >= 0:
                probs[cells], rows[cells], tokens[cells] = before * prob, last_row, paired_token
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
        cell_offsets, probs[:cells], rows[:cells], tokens[:cells],
        rank_offsets, rank_probs[:ranks], after_last_rank, remainders,
    )  # fmt: skip
