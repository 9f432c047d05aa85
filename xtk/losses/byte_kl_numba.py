"""Numba kernels of byte-kl: the cells of both models' distributions over the next bytes; they release the GIL.

The tests contain a slow, readable reference implementation.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from xtk.losses.prefix_alternatives_numba import (
    MIN_REMAINDER,
    BoundaryScratch,
    group_prefix_tokens,
    make_scratch,
    sort_runs_by_group,
)
from xtk.losses.sampled_support_correction import (
    TeacherArrays,
    negentropy,
    remainder_correction,
    sampled_log_correction,
)
from xtk.losses.token_boundaries_numba import (
    BOUNDARY_BYTES,
    BOUNDARY_TOKEN,
    NEXT_DISTRIBUTION,
    NONE,
    PREVIOUS_DISTRIBUTION,
    STUDENT_COLUMNS,
    TEACHER_COLUMNS,
    prefix_range,
    sorted_index,
    token_cell,
)
from xtk.projection.vocabulary_byte_partition import PrefixContinuations, SortedVocabulary

# Up to this many tokens with the same prefix per cell, a linear scan is faster than a binary search.
LINEAR_SCAN_LIMIT = 50


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def fill_byte_cells(
    student: SortedVocabulary,
    teacher: SortedVocabulary,
    after: PrefixContinuations,
    member_offsets: NDArray[np.int64],
    members: NDArray[np.int32],
    support: TeacherArrays,
    items: NDArray[np.int64],
    scan_limit: int = LINEAR_SCAN_LIMIT,
) -> tuple[Any, Any, Any, Any, Any, Any, Any, Any, Any]:
    """Return the cells of all items as flat arrays.

    Args:
        student: the student's vocabulary.
        teacher: the teacher's vocabulary.
        after: the student's continuations.
        member_offsets: `cell_token_offsets` of `BytePartition`.
        members: `cell_tokens` of `BytePartition`.
        support: the teacher's support.
        items: boundaries, as `find_boundaries` returns them.
        scan_limit: linear scan limit in tokens per cell; the result does not depend on it.

    Returns:
        cell_offsets, entry_offsets, teacher_probs, rows, tokens as in `LossCells`, for the next-token rows;
        run_offsets, firsts, stops as in `NextByteCells`, for the previous rows; corrections as in `LossCells`.
    """
    cells_of_both, width = len(member_offsets) - 1, len(student.token_cells)
    scratch = make_scratch(cells_of_both, len(student.token_ids), support)
    runs, ends = np.empty((len(student.token_ids) + 1, 3), np.int32), np.empty(cells_of_both + 2, np.int64)
    cell_offsets, corrections = np.zeros(len(items) + 1, np.int64), np.zeros(len(items), np.float64)
    entry_offsets, run_offsets = np.zeros(1024, np.int64), np.zeros(1024, np.int64)
    probs, rows, tokens = np.empty(1024, np.float32), np.empty(1024, np.int32), np.empty(1024, np.int32)
    firsts, stops = np.empty(1024, np.int32), np.empty(1024, np.int32)
    cells = entries = groups = written = 0
    for number in range(len(items)):
        ours, theirs = items[number, STUDENT_COLUMNS:TEACHER_COLUMNS], items[number, TEACHER_COLUMNS:]
        row, position = ours[NEXT_DISTRIBUTION], theirs[NEXT_DISTRIBUTION]
        found, weight = fill_teacher_cells(teacher, support, theirs, number, scratch)
        count = group_prefix_tokens(
            student, teacher, after, support, ours, theirs, found, number, scratch, runs, scan_limit
        )
        # If the teacher's next-token distribution has a remainder, cells that it does not list belong to the remainder.
        is_complete = position == NONE or support.remainder_mass[position] <= MIN_REMAINDER
        run_offsets, probs = _ensure_capacity(run_offsets, groups + found + 3), _ensure_capacity(probs, cells + found)
        firsts, stops = _ensure_capacity(firsts, written + count), _ensure_capacity(stops, written + count)
        entry_offsets = _ensure_capacity(entry_offsets, cells + found + 2)
        sort_runs_by_group(runs[:count], found + 2, ends, firsts[written:], stops[written:])
        run_offsets[groups + 1], run_offsets[groups + 2] = written + ends[0], written + ends[1]
        groups += 2
        for slot in range(found):
            cell = scratch.cells[slot]
            if row != NONE and (is_complete or scratch.is_at_boundary[slot]):
                cell_members = members[member_offsets[cell] : member_offsets[cell + 1]]
                rows, tokens = _append_entries(rows, tokens, entries, row, cell_members)
                entries += len(cell_members)
            if entries == entry_offsets[cells] and ends[slot + 2] == ends[slot + 1]:
                scratch.slots[cell] = NONE
                continue  # the student cannot reach this cell
            kept_slot = cells - cell_offsets[number]  # at most `slot`
            scratch.probs[kept_slot], scratch.exact_probs[kept_slot] = scratch.probs[slot], scratch.exact_probs[slot]
            scratch.slots[cell] = kept_slot
            cells, groups = cells + 1, groups + 1
            entry_offsets[cells] = entries
            run_offsets[groups] = written + ends[slot + 2]
        written += count
        kept = scratch.probs[: cells - cell_offsets[number]]
        elsewhere = ends[0] > 0 if row == NONE else entries - entry_offsets[cell_offsets[number]] < width
        if ends[1] == ends[0] and not elsewhere:
            weight /= _normalize(scratch, len(kept))  # the student cannot have a remainder here
        probs[cell_offsets[number] : cells] = kept
        corrections[number] = _boundary_correction(
            teacher, support, position, weight, number, scratch, kept, row != NONE
        )
        cell_offsets[number + 1] = cells
    return (
        cell_offsets, entry_offsets[: cells + 1], probs[:cells], rows[:entries], tokens[:entries],
        run_offsets[: groups + 1], firsts[:written], stops[:written], corrections,
    )  # fmt: skip


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def fill_teacher_cells(
    side: SortedVocabulary, support: TeacherArrays, place: NDArray[np.int64], number: int, scratch: BoundaryScratch
) -> tuple[int, float]:
    """Write the teacher's next-byte distribution at one item into the scratch memory.

    Returns:
        The number of cells, and the weight E / (E + M) of the teacher's next-token distribution.
    """
    count = 0
    weight = 1.0
    if place[PREVIOUS_DISTRIBUTION] != NONE:
        low, longer, high = prefix_range(side, place[BOUNDARY_TOKEN], place[BOUNDARY_BYTES])
        alike = 0  # support entries with this prefix
        for slot in range(
            support.offsets[place[PREVIOUS_DISTRIBUTION]], support.exact_stops[place[PREVIOUS_DISTRIBUTION]]
        ):
            rank = sorted_index(side, support.ids[slot])
            if low <= rank < high:
                scratch.prefix_slots[alike], scratch.prefix_indices[alike] = slot, rank
                alike += 1
        highest = -np.inf  # the largest may be e^-1000, so scale by it
        for slot in scratch.prefix_slots[:alike]:
            highest = max(highest, support.logprobs[slot])
        ended = runs_past = 0.0
        for entry in range(alike):
            mass = np.exp(support.logprobs[scratch.prefix_slots[entry]] - highest)
            if scratch.prefix_indices[entry] < longer:
                ended += mass
            else:
                runs_past += mass
        weight = ended / (ended + runs_past)
        for entry in range(alike):
            if scratch.prefix_indices[entry] >= longer:
                cell = side.suffix_cells[side.byte_offsets[scratch.prefix_indices[entry]] + place[BOUNDARY_BYTES]]
                mass = np.exp(support.logprobs[scratch.prefix_slots[entry]] - highest) / (ended + runs_past)
                count = _add_cell_mass(scratch, number, count, cell, mass, False, True)
    if place[NEXT_DISTRIBUTION] != NONE:
        for slot in range(support.offsets[place[NEXT_DISTRIBUTION]], support.offsets[place[NEXT_DISTRIBUTION] + 1]):
            mass = weight * np.exp(np.float64(support.logprobs[slot]))
            exact = slot < support.exact_stops[place[NEXT_DISTRIBUTION]]
            count = _add_cell_mass(scratch, number, count, token_cell(side, support.ids[slot]), mass, True, exact)
    return count, weight


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _add_cell_mass(
    scratch: BoundaryScratch, number: int, count: int, cell: int, mass: float, here: bool, known: bool
) -> int:
    """Add teacher mass of a cell to an item, and return the item's number of cells."""
    if cell == NONE or mass <= 0:
        return count
    if scratch.cell_owner[cell] != number:
        scratch.cell_owner[cell] = number
        scratch.slots[cell] = count
        scratch.cells[count] = cell
        scratch.probs[count] = scratch.exact_probs[count] = 0.0
        scratch.is_at_boundary[count] = False
        count += 1
    scratch.probs[scratch.slots[cell]] += mass
    if known:
        scratch.exact_probs[scratch.slots[cell]] += mass
    scratch.is_at_boundary[scratch.slots[cell]] |= here
    return count


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _boundary_correction(
    teacher: SortedVocabulary,
    support: TeacherArrays,
    here: int,
    weight: float,
    number: int,
    scratch: BoundaryScratch,
    kept: NDArray[np.float32],
    both: bool,
) -> Any:
    """Return the sampling correction of an item, in nats; `both`: it is a boundary of both models.

    It is 0 without a next-token distribution of the teacher `here`.
    """
    if here == NONE:
        return 0.0
    remainder = 1.0 - kept.sum()  # before `sampling_correction` overwrites the probabilities
    correction, outside = sampling_correction(teacher, support, here, weight, number, scratch)
    if both and support.exact_stops[here] < support.offsets[here + 1]:
        outside -= scratch.exact_probs[: len(kept)].sum()
        correction += remainder_correction(remainder, outside)
    return correction


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def sampling_correction(
    side: SortedVocabulary, support: TeacherArrays, position: int, weight: float, number: int, scratch: BoundaryScratch
) -> tuple[float, float]:
    """Return the sampling correction of one item's cells, and the mass left by the sampled tokens' estimates.

    Args:
        side: the teacher's vocabulary.
        support: the teacher's support.
        position: index of the teacher's next-token distribution at the item.
        weight: factor of its probabilities.
        number: the item's number.
        scratch: the item's cells, `slots` below 0 for those that the student cannot reach; `probs` are overwritten.

    Returns:
        The correction without the remainder, in nats, and 1 minus the mass attributed to sampled tokens.
    """
    correction, outside = 0.0, 1.0
    for slot in range(support.exact_stops[position], support.offsets[position + 1]):
        cell = token_cell(side, support.ids[slot])
        if cell == NONE or scratch.cell_owner[cell] != number or scratch.slots[cell] < 0:
            continue
        at, mass = scratch.slots[cell], weight * np.exp(np.float64(support.logprobs[slot]))
        correction += mass * sampled_log_correction(scratch.exact_probs[at], weight, support.mean_surprisals[position])
        if scratch.probs[at] >= 0:  # once per cell; the sign scratch it as done
            correction += negentropy(scratch.exact_probs[at]) - negentropy(scratch.probs[at])
            scratch.probs[at] = -1.0
        outside -= weight * np.exp(-max(support.mean_surprisals[position], 0.0))
    return correction, outside


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _normalize(scratch: BoundaryScratch, count: int) -> Any:
    """Divide the teacher's probabilities of the first cells of an item by their sum, and return the sum."""
    total = scratch.probs[:count].sum()
    scratch.probs[:count] /= total
    scratch.exact_probs[:count] /= total
    return total


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _append_entries(
    rows: NDArray[np.int32], tokens: NDArray[np.int32], entries: int, row: int, members: NDArray[np.int32]
) -> tuple[Any, Any]:
    """Write one entry of a row per member of a cell, and return the arrays, or longer copies of them."""
    rows, tokens = _ensure_capacity(rows, entries + len(members)), _ensure_capacity(tokens, entries + len(members))
    for member in range(len(members)):  # a slice assignment costs fifty times as much as one element
        rows[entries + member] = row
        tokens[entries + member] = members[member]
    return rows, tokens


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _ensure_capacity(values: NDArray[Any], size: int) -> NDArray[Any]:
    """Return the array itself, or a longer copy, with capacity for `size` values."""
    if size <= len(values):
        return values
    longer = np.empty(2 * size, values.dtype)
    longer[: len(values)] = values
    return longer
