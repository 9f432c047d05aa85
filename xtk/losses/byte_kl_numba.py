"""Numba kernels of byte-kl: boundaries, cells and prefix alternatives; they release the GIL.

The tests contain a slow, readable reference implementation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from xtk.losses.sampled_support_correction import negentropy, remainder_correction, sampled_log_correction
from xtk.projection.vocabulary_byte_partition import PrefixContinuations, SortedVocabulary

NONE = -1
# Up to this many tokens with the same prefix per cell, a linear scan is faster than a binary search.
LINEAR_SCAN_LIMIT = 50
# A smaller remainder is a rounding error of a complete distribution.
MIN_REMAINDER = 1e-6


class TokenPath(NamedTuple):
    """The tokens of one model, and the index of the distribution that predicts each.

    Attributes:
        ids: int32 [T].
        distribution_indices: int64 [T], the row of the student's logits, or the index into the teacher's
            log-probabilities, that predicts each token; NONE: there is none.
    """

    ids: NDArray[np.int32]
    distribution_indices: NDArray[np.int64]


class TeacherArrays(NamedTuple):
    """The teacher's support as flat arrays: token ids and log-probabilities of each position, and its remainder.

    Exact entries of position p end at `exact_stops[p]`. Sampled entries follow; their mean surprisal, in nats, is
    `mean_surprisals[p]`.
    """

    offsets: NDArray[np.int64]
    exact_stops: NDArray[np.int64]
    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    remainder_mass: NDArray[np.float32]
    mean_surprisals: NDArray[np.float64]


# The columns of an item for one model. NEXT: the distribution over the next token, NONE inside of a token. PREVIOUS:
# that of the last boundary before, NONE where it is not used. TOKEN: the observed token there. BYTES: how many of its
# bytes precede the item.
NEXT_DISTRIBUTION, PREVIOUS_DISTRIBUTION, BOUNDARY_TOKEN, BOUNDARY_BYTES = range(4)
STUDENT_COLUMNS, TEACHER_COLUMNS = 0, 4


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _is_complete(support: TeacherArrays, position: int) -> bool:
    """Return whether the exact entries of a position are the complete distribution."""
    return bool(
        support.remainder_mass[position] <= MIN_REMAINDER
        and support.exact_stops[position] == support.offsets[position + 1]
    )


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _sorted_index(side: SortedVocabulary, token: int) -> int:
    """Return the index of a token in byte order; NONE for tokens without bytes and ids outside of the vocabulary."""
    return side.sorted_indices[token] if token < len(side.sorted_indices) else NONE


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _byte_length(side: SortedVocabulary, token: int) -> int:
    """Return the number of bytes of a token."""
    rank = _sorted_index(side, token)
    return side.byte_offsets[rank + 1] - side.byte_offsets[rank] if rank >= 0 else 0


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _token_cell(side: SortedVocabulary, token: int) -> int:
    """Return the cell of a token; NONE for ids outside of the vocabulary."""
    return side.token_cells[token] if token < len(side.token_cells) else NONE


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _have_equal_bytes(
    student: SortedVocabulary, teacher: SortedVocabulary, student_ids: NDArray[np.int32], teacher_ids: NDArray[np.int32]
) -> bool:
    """Return whether two runs of tokens have equal bytes: no token is empty, or both are one token without bytes."""
    at, byte, left = -1, 0, 0  # of the student: token, index in `token_bytes`, bytes left
    for token in teacher_ids:
        size = _byte_length(teacher, token)
        if size == 0:
            return len(teacher_ids) == 1 and len(student_ids) == 1 and _byte_length(student, student_ids[0]) == 0
        start = teacher.byte_offsets[teacher.sorted_indices[token]]
        for other in range(start, start + size):
            if left == 0:
                at += 1
                if at == len(student_ids):
                    return False
                left = _byte_length(student, student_ids[at])
                if left == 0:
                    return False
                byte = student.byte_offsets[student.sorted_indices[student_ids[at]]]
            if student.token_bytes[byte] != teacher.token_bytes[other]:
                return False
            byte += 1
            left -= 1
    return left == 0 and at == len(student_ids) - 1


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def find_boundaries(
    student: SortedVocabulary,
    teacher: SortedVocabulary,
    student_path: TokenPath,
    teacher_path: TokenPath,
    spans: NDArray[np.int32],
) -> NDArray[np.int64]:
    """Return the token boundaries of either model at which both are compared, in text order.

    Args:
        student: the student's vocabulary.
        teacher: the teacher's vocabulary.
        student_path: the student's tokens.
        teacher_path: the teacher's tokens.
        spans: int32 [C, 4], aligned spans: student start and stop, teacher start and stop.

    Returns:
        int64 [I, 8], the columns NEXT_DISTRIBUTION ... BOUNDARY_BYTES for the student, then for the teacher.
    """
    most = 0
    for span in range(len(spans)):
        most += spans[span, 1] - spans[span, 0] + spans[span, 3] - spans[span, 2]
    items = np.empty((most, 8), np.int64)
    count = 0
    for span in range(len(spans)):
        s, s_stop, t, t_stop = spans[span]
        alike = _have_equal_bytes(student, teacher, student_path.ids[s:s_stop], teacher_path.ids[t:t_stop])
        first = _token_cell(student, student_path.ids[s])
        if alike or (first != NONE and first == _token_cell(teacher, teacher_path.ids[t])):
            count += _add_boundary(student, teacher, student_path, teacher_path, s, 0, t, 0, items[count])
        s_left, t_left = _byte_length(student, student_path.ids[s]), _byte_length(teacher, teacher_path.ids[t])
        s_cut = t_cut = 0
        while alike:
            step = min(s_left, t_left)
            s_cut, s_left, t_cut, t_left = s_cut + step, s_left - step, t_cut + step, t_left - step
            if s_left == 0:
                s, s_cut = s + 1, 0
            if t_left == 0:
                t, t_cut = t + 1, 0
            if s >= s_stop or t >= t_stop:
                break
            s_left = _byte_length(student, student_path.ids[s]) - s_cut
            t_left = _byte_length(teacher, teacher_path.ids[t]) - t_cut
            count += _add_boundary(student, teacher, student_path, teacher_path, s, s_cut, t, t_cut, items[count])
    return items[:count]


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _add_boundary(
    student: SortedVocabulary,
    teacher: SortedVocabulary,
    student_path: TokenPath,
    teacher_path: TokenPath,
    s: int,
    s_cut: int,
    t: int,
    t_cut: int,
    item: NDArray[np.int64],
) -> bool:
    """Write an item, and return whether both models have the distributions that it needs.

    `s_cut` and `t_cut` are the bytes of the current token before the item; 0 at a token boundary.
    """
    _fill_boundary_side(student, student_path, s, s_cut, item[STUDENT_COLUMNS : STUDENT_COLUMNS + 4])
    _fill_boundary_side(teacher, teacher_path, t, t_cut, item[TEACHER_COLUMNS : TEACHER_COLUMNS + 4])
    if student_path.distribution_indices[s] == NONE or teacher_path.distribution_indices[t] == NONE:
        return False
    if item[STUDENT_COLUMNS + PREVIOUS_DISTRIBUTION] == NONE or item[TEACHER_COLUMNS + PREVIOUS_DISTRIBUTION] == NONE:
        # Without a previous boundary on one side neither side uses it; then only shared boundaries can be compared.
        item[STUDENT_COLUMNS + PREVIOUS_DISTRIBUTION] = item[TEACHER_COLUMNS + PREVIOUS_DISTRIBUTION] = NONE
        return s_cut == 0 and t_cut == 0
    return True


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _fill_boundary_side(side: SortedVocabulary, path: TokenPath, at: int, cut: int, place: NDArray[np.int64]) -> None:
    """Write the columns of one model."""
    place[NEXT_DISTRIBUTION] = NONE if cut else path.distribution_indices[at]
    before = at if cut else at - 1
    place[BOUNDARY_TOKEN] = path.ids[before] if before >= 0 else NONE
    place[BOUNDARY_BYTES] = cut if cut or before < 0 else _byte_length(side, path.ids[before])
    place[PREVIOUS_DISTRIBUTION] = path.distribution_indices[before] if before >= 0 and place[BOUNDARY_BYTES] else NONE


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def prefix_range(side: SortedVocabulary, token: int, size: int) -> tuple[int, int, int]:
    """Return the range of the tokens that begin with the first `size` bytes of a token.

    Returns:
        `low, longer, high`: in byte order, tokens `[low, longer)` equal these bytes, those of `[longer, high)` go on.
    """
    rank = side.sorted_indices[token]
    start = side.byte_offsets[rank]
    low, stop = 0, rank  # search the first token with this prefix
    while low < stop:
        middle = (low + stop) // 2
        if _has_prefix(side, middle, start, size):
            stop = middle
        else:
            low = middle + 1
    high, stop = rank + 1, len(side.token_ids)  # search the first token after it with another prefix
    while high < stop:
        middle = (high + stop) // 2
        if _has_prefix(side, middle, start, size):
            high = middle + 1
        else:
            stop = middle
    longer = low
    while longer < high and side.byte_offsets[longer + 1] - side.byte_offsets[longer] == size:
        longer += 1
    return low, longer, high


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _has_prefix(side: SortedVocabulary, rank: int, start: int, size: int) -> bool:
    """Return whether the token at an index in byte order begins with the `size` bytes at `start` in `token_bytes`."""
    at = side.byte_offsets[rank]
    if side.byte_offsets[rank + 1] - at < size:
        return False
    for byte in range(size):  # noqa: SIM110, compiled
        if side.token_bytes[at + byte] != side.token_bytes[start + byte]:
            return False
    return True


class BoundaryScratch(NamedTuple):
    """Scratch memory for one item at a time. An owner entry is valid if it is the item's number; nothing is cleared.

    Attributes:
        cell_owner: int64 [cells], the last item that contains a cell.
        slots: int64 [cells], the index of a cell among its item's cells.
        teacher_cell_owner: int64 [cells], the last item whose previous teacher distribution reaches a cell.
        cells: int64 [cells], the item's cells, in the order of the teacher's support.
        probs: float64 [cells], the teacher's probability of each.
        exact_probs: float64 [cells], the same without sampled tokens.
        is_at_boundary: bool [cells], whether the teacher's next-token distribution at the item reaches each.
        teacher_cells: int64 [cells], the cells that the teacher's previous distribution reaches, in any order.
        tokens: int64 [student's tokens + 1], index in byte order << 32 | group.
        prefix_slots: int64 [longest support], support entries that begin with the bytes since the previous boundary.
        prefix_indices: int64 [longest support], the indices of these tokens in byte order.
    """

    cell_owner: NDArray[np.int64]
    slots: NDArray[np.int64]
    teacher_cell_owner: NDArray[np.int64]
    cells: NDArray[np.int64]
    probs: NDArray[np.float64]
    exact_probs: NDArray[np.float64]
    is_at_boundary: NDArray[np.bool_]
    teacher_cells: NDArray[np.int64]
    tokens: NDArray[np.int64]
    prefix_slots: NDArray[np.int64]
    prefix_indices: NDArray[np.int64]


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def make_scratch(cells: int, tokens: int, support: TeacherArrays) -> BoundaryScratch:
    """Return scratch memory for a number of cells, a number of student tokens and the teacher's longest support."""
    longest = np.diff(support.offsets).max() if len(support.offsets) > 1 else 0
    return BoundaryScratch(
        np.full(cells, NONE, np.int64),
        np.empty(cells, np.int64),
        np.full(cells, NONE, np.int64),
        np.empty(cells, np.int64),
        np.empty(cells, np.float64),
        np.empty(cells, np.float64),
        np.empty(cells, np.bool_),
        np.empty(cells, np.int64),
        np.empty(tokens + 1, np.int64),
        np.empty(longest, np.int64),
        np.empty(longest, np.int64),
    )


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
            rank = _sorted_index(side, support.ids[slot])
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
            count = _add_cell_mass(scratch, number, count, _token_cell(side, support.ids[slot]), mass, True, exact)
    return count, weight


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
        cell = _token_cell(side, support.ids[slot])
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

    Args:
        side: the teacher's vocabulary.
        support: the teacher's support.
        place: the item's columns of the teacher.
        since: the bytes of the teacher's token before the student's token begins; 0 if both begin together.
        own: the cell of the student's token, which is always listed; NONE: it has none.
        number: the item's number.
        scratch: `teacher_cells` and `teacher_cell_owner` are filled.

    Returns:
        The number of cells.
    """
    count = 0
    if own != NONE:
        scratch.teacher_cell_owner[own], scratch.teacher_cells[0] = number, own
        count = 1
    low, high = 0, 0
    if since:
        _, low, high = prefix_range(side, place[BOUNDARY_TOKEN], since)
    for slot in range(support.offsets[place[PREVIOUS_DISTRIBUTION]], support.exact_stops[place[PREVIOUS_DISTRIBUTION]]):
        token = support.ids[slot]
        cell = NONE
        if since == 0:
            cell = _token_cell(side, token)
        elif low <= _sorted_index(side, token) < high:
            cell = side.suffix_cells[side.byte_offsets[_sorted_index(side, token)] + since]
        if cell != NONE and scratch.teacher_cell_owner[cell] != number:
            scratch.teacher_cell_owner[cell], scratch.teacher_cells[count] = number, cell
            count += 1
    return count


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _lower_bound(values: NDArray[np.int32], start: int, stop: int, least: int) -> int:
    """Return the index of the first number >= `least` in the sorted range `[start, stop)`; `stop` if there is none."""
    while start < stop:
        middle = (start + stop) // 2
        if values[middle] < least:
            start = middle + 1
        else:
            stop = middle
    return start


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _list_continuations(
    side: SortedVocabulary,
    after: PrefixContinuations,
    low: int,
    size: int,
    cell: int,
    bounds: Any,
    group: int,
    some: NDArray[np.int64],
) -> int:
    """List the tokens with a prefix whose remaining bytes are in a cell, as index in byte order << 32 | group.

    Args:
        side: the vocabulary.
        after: its continuations.
        low: the first token with the prefix, in byte order.
        size: the prefix's number of bytes.
        cell: the cell of the remaining bytes.
        bounds: the range [start, stop) of indices in byte order.
        group: the group number to store.
        some: output.

    Returns:
        The number of tokens.
    """
    node = side.byte_offsets[low] + size
    first = _lower_bound(after.cells, after.offsets[node], after.offsets[node + 1], cell)
    stop = _lower_bound(after.cells, first, after.offsets[node + 1], cell + 1)
    count = 0
    for entry in range(_lower_bound(after.sorted_indices, first, stop, bounds[0]), stop):
        if after.sorted_indices[entry] >= bounds[1]:
            break
        some[count] = np.int64(after.sorted_indices[entry]) << 32 | group
        count += 1
    return count


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def group_all_continuations(
    side: SortedVocabulary,
    after: PrefixContinuations,
    place: NDArray[np.int64],
    found: int,
    number: int,
    scratch: BoundaryScratch,
    runs: NDArray[np.int32],
    scan_limit: int,
) -> int:
    """Group all student tokens that begin with the bytes since its previous boundary, as runs in byte order.

    Groups: 0, the token ends at the item; 1, it continues into none of the item's cells; 2 + i, into cell i.

    Args:
        side: the student's vocabulary.
        after: its continuations.
        place: the item's columns of the student.
        found: the item's number of cells.
        number: the item's number.
        scratch: the item's cells.
        runs: int32 [., 3], output: group, first and stop, in byte order.
        scan_limit: up to this many tokens per cell are scanned one by one; with more, the cells are searched.

    Returns:
        The number of runs.
    """
    low, longer, high = prefix_range(side, place[BOUNDARY_TOKEN], place[BOUNDARY_BYTES])
    count: int = _add_run(runs, 0, 0, low, longer)
    if high - longer < scan_limit * found:
        for rank in range(longer, high):
            count = _add_run(
                runs, count, _continuation_group(side, scratch, number, rank, place[BOUNDARY_BYTES]), rank, rank + 1
            )
        return count
    size = 0
    for slot in range(found):
        cell, bounds = scratch.cells[slot], (longer, high)
        size += _list_continuations(
            side, after, low, place[BOUNDARY_BYTES], cell, bounds, 2 + slot, scratch.tokens[size:]
        )
    scratch.tokens[:size].sort()
    at = longer
    for token in scratch.tokens[:size]:
        rank = token >> 32
        count = _add_run(runs, count, 1, at, rank)
        count = _add_run(runs, count, token & 0xFFFFFFFF, rank, rank + 1)
        at = rank + 1
    return int(_add_run(runs, count, 1, at, high))


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
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

    Args:
        side: the student's vocabulary.
        after: its continuations.
        place: the item's columns of the student.
        since: the bytes of the student's token before the teacher's token begins; 0 if that begins there or before.
        num_teacher_cells: the number of cells that the teacher's previous distribution reaches.
        number: the item's number.
        scratch: the item's cells, and those that the teacher reaches.
        runs: int32 [., 3], output: group, first and stop, in byte order.
        scan_limit: up to this many tokens per cell are scanned one by one; with more, the cells are searched.

    Returns:
        The number of runs.
    """
    low, longer, high = prefix_range(side, place[BOUNDARY_TOKEN], place[BOUNDARY_BYTES])
    own, count = side.sorted_indices[place[BOUNDARY_TOKEN]], 0
    if high - low < scan_limit * num_teacher_cells:
        for rank in range(low, high):
            cell = side.suffix_cells[side.byte_offsets[rank] + since]
            if rank == own or (cell != NONE and scratch.teacher_cell_owner[cell] == number):
                group = 0 if rank < longer else _continuation_group(side, scratch, number, rank, place[BOUNDARY_BYTES])
                count = _add_run(runs, count, group, rank, rank + 1)
        return count
    lowest = prefix_range(side, place[BOUNDARY_TOKEN], since)[0] if since else 0
    size = 0
    if side.suffix_cells[side.byte_offsets[own] + since] == NONE:
        scratch.tokens[0], size = np.int64(own) << 32, 1
    for cell in scratch.teacher_cells[:num_teacher_cells]:
        size += _list_continuations(side, after, lowest, since, cell, (low, high), 0, scratch.tokens[size:])
    scratch.tokens[:size].sort()
    for token in scratch.tokens[:size]:
        rank = token >> 32
        group = 0 if rank < longer else _continuation_group(side, scratch, number, rank, place[BOUNDARY_BYTES])
        count = _add_run(runs, count, group, rank, rank + 1)
    return count


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _continuation_group(side: SortedVocabulary, scratch: BoundaryScratch, number: int, rank: int, cut: int) -> int:
    """Return the group of a longer token: that of the cell of its bytes after the first `cut`."""
    cell = side.suffix_cells[side.byte_offsets[rank] + cut]
    return 2 + scratch.slots[cell] if cell != NONE and scratch.cell_owner[cell] == number else 1


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _add_run(runs: NDArray[np.int32], count: int, group: int, first: int, stop: int) -> int:
    """Add tokens `[first, stop)`, extending the last run if they continue it, and return the number of runs."""
    if first == stop:
        return count
    if count and runs[count - 1, 0] == group and runs[count - 1, 2] == first:
        runs[count - 1, 2] = stop
        return count
    runs[count, 0], runs[count, 1], runs[count, 2] = group, first, stop
    return count + 1


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
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


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _ensure_capacity(values: NDArray[Any], size: int) -> NDArray[Any]:
    """Return the array itself, or a longer copy, with capacity for `size` values."""
    if size <= len(values):
        return values
    longer = np.empty(2 * size, values.dtype)
    longer[: len(values)] = values
    return longer


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
    """Return the sampling correction of an item, in nats; `both`: it is a boundary of both models."""
    remainder = 1.0 - kept.sum()  # before `sampling_correction` overwrites the probabilities
    correction, outside = sampling_correction(teacher, support, here, weight, number, scratch)
    if both and support.exact_stops[here] < support.offsets[here + 1]:
        outside -= scratch.exact_probs[: len(kept)].sum()
        correction += remainder_correction(remainder, outside)
    return correction


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _group_runs(
    student: SortedVocabulary,
    teacher: SortedVocabulary,
    after: PrefixContinuations,
    support: TeacherArrays,
    student_item: NDArray[np.int64],
    teacher_item: NDArray[np.int64],
    found: int,
    number: int,
    scratch: BoundaryScratch,
    runs: NDArray[np.int32],
    scan_limit: int,
) -> Any:
    """Write the runs of the student's longer tokens that continue into the item's cells, and return their number."""
    if _is_complete(support, teacher_item[PREVIOUS_DISTRIBUTION]):
        return group_all_continuations(student, after, student_item, found, number, scratch, runs, scan_limit)
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
        run_offsets, firsts, stops as in `PrefixAlternatives`, for the previous rows; corrections as in `LossCells`.
    """
    cells_of_both, width = len(member_offsets) - 1, len(student.token_cells)
    scratch = make_scratch(cells_of_both, len(student.token_ids), support)
    runs, ends = np.empty((len(student.token_ids) + 1, 3), np.int32), np.empty(cells_of_both + 2, np.int64)
    cell_offsets = np.zeros(len(items) + 1, np.int64)
    entry_offsets, run_offsets = np.zeros(1024, np.int64), np.zeros(1024, np.int64)
    probs, rows, tokens = np.empty(1024, np.float32), np.empty(1024, np.int32), np.empty(1024, np.int32)
    firsts, stops = np.empty(1024, np.int32), np.empty(1024, np.int32)
    corrections = np.zeros(len(items), np.float64)
    cells = entries = groups = written = 0
    for number in range(len(items)):
        ours = items[number, STUDENT_COLUMNS : STUDENT_COLUMNS + 4]
        theirs = items[number, TEACHER_COLUMNS : TEACHER_COLUMNS + 4]
        row, position = ours[NEXT_DISTRIBUTION], theirs[NEXT_DISTRIBUTION]
        found, weight = fill_teacher_cells(teacher, support, theirs, number, scratch)
        count = 0
        if ours[PREVIOUS_DISTRIBUTION] != NONE:
            count = _group_runs(
                student, teacher, after, support, ours, theirs, found, number, scratch, runs, scan_limit
            )
        # If the teacher's next-token distribution has a remainder, cells that it does not list belong to the remainder.
        is_complete = position == NONE or support.remainder_mass[position] <= MIN_REMAINDER
        run_offsets = _ensure_capacity(run_offsets, groups + found + 3)
        firsts, stops = _ensure_capacity(firsts, written + count), _ensure_capacity(stops, written + count)
        entry_offsets = _ensure_capacity(entry_offsets, cells + found + 2)
        probs = _ensure_capacity(probs, cells + found)
        sort_runs_by_group(runs[:count], found + 2, ends, firsts[written:], stops[written:])
        run_offsets[groups + 1] = written + ends[0]
        run_offsets[groups + 2] = written + ends[1]
        groups += 2
        for slot in range(found):
            cell = scratch.cells[slot]
            before = entries
            if row != NONE and (is_complete or scratch.is_at_boundary[slot]):
                size = member_offsets[cell + 1] - member_offsets[cell]
                rows, tokens = _ensure_capacity(rows, entries + size), _ensure_capacity(tokens, entries + size)
                first = member_offsets[cell]
                for member in range(size):  # a slice assignment costs fifty times as much as one element
                    rows[entries + member] = row
                    tokens[entries + member] = members[first + member]
                entries += size
            if entries == before and ends[slot + 2] == ends[slot + 1]:
                scratch.slots[cell] = NONE
                continue  # the student cannot reach this cell
            kept_slot = cells - cell_offsets[number]  # at most `slot`
            scratch.probs[kept_slot], scratch.exact_probs[kept_slot] = scratch.probs[slot], scratch.exact_probs[slot]
            scratch.slots[cell] = kept_slot
            cells += 1
            groups += 1
            entry_offsets[cells] = entries
            run_offsets[groups] = written + ends[slot + 2]
        written += count
        kept = scratch.probs[: cells - cell_offsets[number]]
        elsewhere = ends[0] > 0 if row == NONE else entries - entry_offsets[cell_offsets[number]] < width
        if ends[1] == ends[0] and not elsewhere:
            total = kept.sum()  # the student cannot have a remainder here: compare within the cells only
            kept /= total
            scratch.exact_probs[: len(kept)] /= total
            weight /= total
        probs[cell_offsets[number] : cells] = kept
        if position != NONE:
            corrections[number] = _boundary_correction(
                teacher, support, position, weight, number, scratch, kept, row != NONE
            )
        cell_offsets[number + 1] = cells
    return (
        cell_offsets, entry_offsets[: cells + 1], probs[:cells], rows[:entries], tokens[:entries],
        run_offsets[: groups + 1], firsts[:written], stops[:written], corrections,
    )  # fmt: skip
