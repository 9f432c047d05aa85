"""Numba kernels that group the student's tokens with a common prefix by the cells that they continue into."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtk.cache.teacher_logprobs import MIN_REMAINDER
from xtk.losses.kernels.sampled_support_correction import TeacherArrays
from xtk.losses.kernels.token_boundaries_numba import (
    BOUNDARY_BYTES,
    BOUNDARY_TOKEN,
    NONE,
    PREVIOUS_DISTRIBUTION,
    prefix_range,
)
from xtk.numba_kernel import numba_kernel
from xtk.projection.vocabulary_byte_partition import PrefixContinuations, SortedVocabulary


class BoundaryScratch(NamedTuple):
    """Scratch memory for one item at a time. An owner entry is valid if it is the item's number; nothing is cleared."""

    cell_owner: NDArray[np.int32]  # [cells], the last item that contains a cell
    slots: NDArray[np.int32]  # [cells], the index of a cell among its item's cells
    teacher_cell_owner: NDArray[np.int32]  # [cells], the last item whose previous teacher distribution reaches a cell
    cells: NDArray[np.int64]  # [cells], the item's cells, in the order of the teacher's support
    probs: NDArray[np.float64]  # [cells], the teacher's probability of each
    exact_probs: NDArray[np.float64]  # [cells], the same without sampled tokens
    sampled_probs: NDArray[np.float64]  # [cells], as in `LossCells`, of the item's cells
    is_at_boundary: NDArray[np.bool_]  # [cells], whether the teacher's next-token distribution at the item reaches each
    teacher_cells: NDArray[np.int64]  # [cells], those that the teacher's previous distribution reaches, in any order
    tokens: NDArray[np.int64]  # [student's tokens + 1], index in byte order << 32 | group
    prefix_slots: NDArray[np.int64]  # [longest support], entries that begin with the bytes since the previous boundary
    prefix_indices: NDArray[np.int64]  # [longest support], the indices of these tokens in byte order


@numba_kernel
def make_scratch(cells: int, tokens: int, support: TeacherArrays) -> BoundaryScratch:
    """Return scratch memory for a number of cells, a number of student tokens and the teacher's longest support."""
    longest = np.diff(support.offsets).max() if len(support.offsets) > 1 else 0
    return BoundaryScratch(
        np.full(cells, NONE, np.int32),
        np.empty(cells, np.int32),
        np.full(cells, NONE, np.int32),
        np.empty(cells, np.int64),
        np.empty(cells, np.float64),
        np.empty(cells, np.float64),
        np.zeros(cells, np.float64),
        np.empty(cells, np.bool_),
        np.empty(cells, np.int64),
        np.empty(tokens + 1, np.int64),
        np.empty(longest, np.int64),
        np.empty(longest, np.int64),
    )


@numba_kernel
def _is_complete(support: TeacherArrays, position: int) -> bool:
    """Return whether the exact entries of a position are the complete distribution."""
    return bool(
        support.remainder_mass[position] <= MIN_REMAINDER
        and support.exact_stops[position] == support.offsets[position + 1]
    )


@numba_kernel
def group_prefix_tokens(
    student: SortedVocabulary,
    teacher: SortedVocabulary,
    after: PrefixContinuations,
    support: TeacherArrays,
    student_item: NDArray[np.int64],
    teacher_item: NDArray[np.int64],
    num_cells: int,
    number: int,
    scratch: BoundaryScratch,
    runs: NDArray[np.int32],
    scan_limit: int,
) -> Any:
    """Write the runs of the student's longer tokens that continue into the item's cells, and return their number."""
    if student_item[PREVIOUS_DISTRIBUTION] == NONE:
        return 0
    if _is_complete(support, teacher_item[PREVIOUS_DISTRIBUTION]):
        return group_all_continuations(student, after, student_item, num_cells, number, scratch, runs, scan_limit)
    since = max(0, student_item[BOUNDARY_BYTES] - teacher_item[BOUNDARY_BYTES])
    own = student.suffix_cells[student.byte_offsets[student.sorted_indices[student_item[BOUNDARY_TOKEN]]] + since]
    num_teacher_cells = collect_teacher_cells(
        teacher,
        support,
        teacher_item,
        max(0, teacher_item[BOUNDARY_BYTES] - student_item[BOUNDARY_BYTES]),
        own,
        number,
        scratch,
    )
    return group_teacher_continuations(
        student, after, student_item, since, num_teacher_cells, number, scratch, runs, scan_limit
    )


@numba_kernel
def collect_teacher_cells(
    side: SortedVocabulary,
    support: TeacherArrays,
    place: NDArray[np.int64],
    since: int,
    own: int,
    number: int,
    scratch: BoundaryScratch,
) -> int:
    """List the cells that the teacher's previous distribution reaches, with tokens shortened by `since` bytes.

    `since` are the bytes of the teacher's token before the student's begins; 0 if both begin together. `own`, the cell
    of the student's token, is always listed; NONE: it has none. `teacher_cells` and `teacher_cell_owner` of `scratch`
    are filled; the number of cells is returned.
    """
    # Arrays of a tuple are read once: in a loop, each access would count references, which costs more than the rest.
    owners, cells, ids = scratch.teacher_cell_owner, scratch.teacher_cells, support.ids
    token_cells, sorted_indices = side.token_cells, side.sorted_indices
    suffix_cells, byte_offsets = side.suffix_cells, side.byte_offsets
    count = 0
    if own != NONE:
        owners[own], cells[0] = number, own
        count = 1
    low, high = 0, 0
    if since:
        _, low, high = prefix_range(side, place[BOUNDARY_TOKEN], since)
    for slot in range(support.offsets[place[PREVIOUS_DISTRIBUTION]], support.exact_stops[place[PREVIOUS_DISTRIBUTION]]):
        token = ids[slot]
        cell = NONE
        if token >= len(token_cells):
            continue
        if since == 0:
            cell = token_cells[token]
        elif low <= sorted_indices[token] < high:
            cell = suffix_cells[byte_offsets[sorted_indices[token]] + since]
        if cell != NONE and owners[cell] != number:
            owners[cell], cells[count] = number, cell
            count += 1
    return count


@numba_kernel
def group_all_continuations(
    side: SortedVocabulary,
    after: PrefixContinuations,
    place: NDArray[np.int64],
    num_cells: int,
    number: int,
    scratch: BoundaryScratch,
    runs: NDArray[np.int32],
    scan_limit: int,
) -> int:
    """Group all student tokens that begin with the bytes since its previous boundary, as runs in byte order.

    Groups: 0, the token ends at the item; 1, it continues into none of the item's cells; 2 + i, into cell i. `runs`:
    int32 [., 3], output: group, first and stop; their number is returned. Up to `scan_limit` tokens per cell are
    scanned one by one; with more, the cells are searched. `place`: the item's columns of the student.
    """
    low, longer, high = prefix_range(side, place[BOUNDARY_TOKEN], place[BOUNDARY_BYTES])
    count: int = _add_run(runs, 0, 0, low, longer)
    suffix_cells, byte_offsets, owners, slots = side.suffix_cells, side.byte_offsets, scratch.cell_owner, scratch.slots
    if high - longer < scan_limit * num_cells:
        for rank in range(longer, high):
            group = _continuation_group(owners, slots, suffix_cells[byte_offsets[rank] + place[BOUNDARY_BYTES]], number)
            count = _add_run(runs, count, group, rank, rank + 1)
        return count
    size, node = 0, byte_offsets[low] + place[BOUNDARY_BYTES]
    node_start, node_stop = after.offsets[node], after.offsets[node + 1]
    after_cells, after_indices, cells, tokens = after.cells, after.sorted_indices, scratch.cells, scratch.tokens
    for slot in range(num_cells):
        bounds = node_start, node_stop, longer, high
        size = _list_continuations(after_cells, after_indices, bounds, cells[slot], 2 + slot, tokens, size)
    scratch.tokens[:size].sort()
    at = longer
    for token in scratch.tokens[:size]:
        rank = token >> 32
        count = _add_run(runs, count, 1, at, rank)
        count = _add_run(runs, count, token & 0xFFFFFFFF, rank, rank + 1)
        at = rank + 1
    return int(_add_run(runs, count, 1, at, high))


@numba_kernel
def group_teacher_continuations(
    side: SortedVocabulary,
    after: PrefixContinuations,
    place: NDArray[np.int64],
    since: int,
    num_teacher_cells: int,
    number: int,
    scratch: BoundaryScratch,
    runs: NDArray[np.int32],
    scan_limit: int,
) -> int:
    """Group like `group_all_continuations`, but only the observed token and those in cells that the teacher reaches.

    `since`: the bytes of the student's token before the teacher's begins; 0 if that begins there or before.
    """
    low, longer, high = prefix_range(side, place[BOUNDARY_TOKEN], place[BOUNDARY_BYTES])
    own, count, cut = side.sorted_indices[place[BOUNDARY_TOKEN]], 0, place[BOUNDARY_BYTES]
    # Arrays of a tuple are read once: in a loop, each access would count references, which costs more than the rest.
    suffix_cells, byte_offsets, cell_owner, slots = (
        side.suffix_cells,
        side.byte_offsets,
        scratch.cell_owner,
        scratch.slots,
    )
    if high - low < scan_limit * num_teacher_cells:
        owners = scratch.teacher_cell_owner
        for rank in range(low, high):
            cell = suffix_cells[byte_offsets[rank] + since]
            if rank == own or (cell != NONE and owners[cell] == number):
                group = 0
                if rank >= longer:
                    group = _continuation_group(cell_owner, slots, suffix_cells[byte_offsets[rank] + cut], number)
                count = _add_run(runs, count, group, rank, rank + 1)
        return count
    lowest = prefix_range(side, place[BOUNDARY_TOKEN], since)[0] if since else 0
    size, node = 0, byte_offsets[lowest] + since
    node_start, node_stop = after.offsets[node], after.offsets[node + 1]
    if suffix_cells[byte_offsets[own] + since] == NONE:
        scratch.tokens[0], size = np.int64(own) << 32, 1
    after_cells, after_indices, tokens = after.cells, after.sorted_indices, scratch.tokens
    for cell in scratch.teacher_cells[:num_teacher_cells]:
        bounds = node_start, node_stop, low, high
        size = _list_continuations(after_cells, after_indices, bounds, cell, 0, tokens, size)
    scratch.tokens[:size].sort()
    for token in scratch.tokens[:size]:
        rank = token >> 32
        group = 0
        if rank >= longer:
            group = _continuation_group(cell_owner, slots, suffix_cells[byte_offsets[rank] + cut], number)
        count = _add_run(runs, count, group, rank, rank + 1)
    return count


@numba_kernel
def _list_continuations(
    after_cells: NDArray[np.int32],
    after_indices: NDArray[np.int32],
    bounds: tuple[int, int, int, int],
    cell: int,
    group: int,
    tokens: NDArray[np.int64],
    size: int,
) -> int:
    """List the tokens with a prefix whose remaining bytes are in a cell, as index in byte order << 32 | group.

    `after_cells` and `after_indices` are those of `PrefixContinuations`, `bounds` the range of the prefix in these, and
    a range of indices in byte order. The first `size` elements of `tokens` are used; the new size is returned.
    """
    start, end, low, high = bounds
    first = _lower_bound(after_cells, start, end, cell)
    if first == end or after_cells[first] != cell:
        return size  # as for most cells
    stop = _lower_bound(after_cells, first, end, cell + 1)
    for entry in range(_lower_bound(after_indices, first, stop, low), stop):
        if after_indices[entry] >= high:
            break
        tokens[size] = np.int64(after_indices[entry]) << 32 | group
        size += 1
    return size


@numba_kernel
def _lower_bound(values: NDArray[np.int32], start: int, stop: int, least: int) -> int:
    """Return the index of the first number >= `least` in the sorted range `[start, stop)`; `stop` if there is none."""
    while start < stop:
        middle = (start + stop) // 2
        if values[middle] < least:
            start = middle + 1
        else:
            stop = middle
    return start


@numba_kernel
def _continuation_group(owners: NDArray[np.int32], slots: NDArray[np.int32], cell: int, number: int) -> int:
    """Return the group of a longer token whose bytes after the item are in a cell."""
    return 2 + slots[cell] if cell != NONE and owners[cell] == number else 1


@numba_kernel
def _add_run(runs: NDArray[np.int32], count: int, group: int, first: int, stop: int) -> int:
    """Add tokens `[first, stop)`, extending the last run if they continue it, and return the number of runs."""
    if first == stop:
        return count
    if count and runs[count - 1, 0] == group and runs[count - 1, 2] == first:
        runs[count - 1, 2] = stop
        return count
    runs[count, 0], runs[count, 1], runs[count, 2] = group, first, stop
    return count + 1


@numba_kernel
def sort_runs_by_group(
    runs: NDArray[np.int32],
    groups: int,
    ends: NDArray[np.int64],
    firsts: NDArray[np.int32],
    stops: NDArray[np.int32],
) -> None:
    """Write runs sorted by group, in stable order, and the end of each group's runs."""
    ends[:groups] = 0
    for run in range(len(runs)):
        ends[runs[run, 0]] += 1
    for group in range(1, groups):
        ends[group] += ends[group - 1]
    for run in range(len(runs) - 1, -1, -1):
        group = runs[run, 0]
        ends[group] -= 1
        firsts[ends[group]], stops[ends[group]] = runs[run, 1], runs[run, 2]
    for run in range(len(runs)):
        ends[runs[run, 0]] += 1
