"""The loops of byte-kl over spans, supports and vocabularies, compiled by numba, without the GIL.

Their slow, readable twin is in the tests.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from xtk.losses.sampling_correction import negentropy, remainder_correction, sampled_log_correction
from xtk.projection.byte_partition import PrefixContinuations, SortedVocabulary

NONE = -1
# So many tokens that begin alike, for each cell that is to be found, are looked through faster than searched.
LINEAR_SCAN_LIMIT = 50
# What rounding leaves of a whole distribution is no tail.
MIN_REMAINDER = 1e-6


class TokenPath(NamedTuple):
    """The tokens of one side, and where its distributions are.

    Attributes:
        ids: int32 [T].
        distribution_indices: int64 [T], the row, or the index into the signal, of the distribution that predicts a
            token; NONE.
    """

    ids: NDArray[np.int32]
    distribution_indices: NDArray[np.int64]


class TeacherArrays(NamedTuple):
    """What the teacher said, as in a signal: `ids`, `logprobs` of each position, and the mass of the rest.

    The exact ones of position p end at `stops[p]`; behind them are those that were sampled, whose mean surprisal is
    `surprisals[p]`.
    """

    offsets: NDArray[np.int64]
    exact_stops: NDArray[np.int64]
    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    remainder_mass: NDArray[np.float32]
    mean_surprisals: NDArray[np.float64]


# The columns of an item. `HERE` is the distribution of what comes next, NONE inside of a token. `PAST` is that of the
# last boundary before, NONE where nobody looks back, `TOKEN` what stands there, `CUT` how many of its bytes lie before.
NEXT_DISTRIBUTION, PREVIOUS_DISTRIBUTION, BOUNDARY_TOKEN, BOUNDARY_BYTES = range(4)
STUDENT_COLUMNS, TEACHER_COLUMNS = 0, 4


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _is_complete(said: TeacherArrays, position: int) -> bool:
    """Say whether what is exact at a position is all of the distribution."""
    return bool(
        said.remainder_mass[position] <= MIN_REMAINDER and said.exact_stops[position] == said.offsets[position + 1]
    )


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _sorted_index(side: SortedVocabulary, token: int) -> int:
    """Return where a token stands in the order of bytes; NONE for one that spells nothing, or that there is not."""
    return side.sorted_indices[token] if token < len(side.sorted_indices) else NONE


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _byte_length(side: SortedVocabulary, token: int) -> int:
    """Return how many bytes a token spells."""
    rank = _sorted_index(side, token)
    return side.byte_offsets[rank + 1] - side.byte_offsets[rank] if rank >= 0 else 0


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _token_cell(side: SortedVocabulary, token: int) -> int:
    """Return the cell of a token."""
    return side.token_cells[token] if token < len(side.token_cells) else NONE


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _have_equal_bytes(
    student: SortedVocabulary, teacher: SortedVocabulary, student_ids: NDArray[np.int32], teacher_ids: NDArray[np.int32]
) -> bool:
    """Say whether two runs of tokens spell the same bytes, each token some, or are two tokens that spell none."""
    at, byte, left = -1, 0, 0  # of the student: token, place in the pool, bytes left
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
    """Return the byte offsets at which the sides are compared, in their order: the boundaries of either side.

    Args:
        student: the student's vocabulary.
        teacher: the teacher's.
        student_path: the student's tokens.
        teacher_path: the teacher's.
        spans: int32 [C, 4].

    Returns:
        int64 [I, 8], the columns above for the student, then for the teacher.
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
    """Write an item where both sides know what they need, and say whether they do.

    A side stands `cut` bytes inside of its token, 0 at its beginning.
    """
    _fill_boundary_side(student, student_path, s, s_cut, item[STUDENT_COLUMNS : STUDENT_COLUMNS + 4])
    _fill_boundary_side(teacher, teacher_path, t, t_cut, item[TEACHER_COLUMNS : TEACHER_COLUMNS + 4])
    if student_path.distribution_indices[s] == NONE or teacher_path.distribution_indices[t] == NONE:
        return False
    if item[STUDENT_COLUMNS + PREVIOUS_DISTRIBUTION] == NONE or item[TEACHER_COLUMNS + PREVIOUS_DISTRIBUTION] == NONE:
        # Nobody looks back where one cannot, and inside of a token there is nothing else to look at.
        item[STUDENT_COLUMNS + PREVIOUS_DISTRIBUTION] = item[TEACHER_COLUMNS + PREVIOUS_DISTRIBUTION] = NONE
        return s_cut == 0 and t_cut == 0
    return True


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _fill_boundary_side(side: SortedVocabulary, path: TokenPath, at: int, cut: int, place: NDArray[np.int64]) -> None:
    """Write where one side stands."""
    place[NEXT_DISTRIBUTION] = NONE if cut else path.distribution_indices[at]
    before = at if cut else at - 1
    place[BOUNDARY_TOKEN] = path.ids[before] if before >= 0 else NONE
    place[BOUNDARY_BYTES] = cut if cut or before < 0 else _byte_length(side, path.ids[before])
    place[PREVIOUS_DISTRIBUTION] = path.distribution_indices[before] if before >= 0 and place[BOUNDARY_BYTES] else NONE


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def prefix_range(side: SortedVocabulary, token: int, size: int) -> tuple[int, int, int]:
    """Find the tokens that begin with the first `size` bytes of a token.

    Returns:
        `low, longer, high`: tokens `order[low:longer]` spell just these bytes, `order[longer:high]` go on.
    """
    rank = side.sorted_indices[token]
    start = side.byte_offsets[rank]
    low, stop = 0, rank  # the first that does not come before these bytes
    while low < stop:
        middle = (low + stop) // 2
        if _has_prefix(side, middle, start, size):
            stop = middle
        else:
            low = middle + 1
    high, stop = rank + 1, len(side.token_ids)  # the first after `rank` that begins otherwise
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
    """Say whether the token at a rank begins with `size` bytes of the pool."""
    at = side.byte_offsets[rank]
    if side.byte_offsets[rank + 1] - at < size:
        return False
    for byte in range(size):  # noqa: SIM110, compiled
        if side.token_bytes[at + byte] != side.token_bytes[start + byte]:
            return False
    return True


class BoundaryScratch(NamedTuple):
    """Scratch memory for one item at a time. A mark holds where it names the item; nothing is ever cleared.

    Attributes:
        cell_owner: int64 [cells], the item that has a cell.
        slots: int64 [cells], which of the item's cells it is.
        teacher_cell_owner: int64 [cells], the item for which the teacher's last boundary names a cell.
        cells: int64 [cells], the item's cells, in the order in which the teacher names them.
        probs: float64 [cells], the teacher's probability of each.
        exact_probs: float64 [cells], the same without sampled tokens.
        is_at_boundary: bool [cells], whether the teacher names each at the item itself.
        teacher_cells: int64 [cells], those that the last boundary names, in any order.
        tokens: int64 [student's tokens + 1], ranks << 32 | groups.
        prefix_slots: int64 [longest support], those of the teacher's tokens that begin like the one that stands there.
        prefix_indices: int64 [longest support], their ranks.
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
def make_scratch(cells: int, tokens: int, said: TeacherArrays) -> BoundaryScratch:
    """Return scratch memory for so many cells, tokens of the student, and for what the teacher said."""
    longest = np.diff(said.offsets).max() if len(said.offsets) > 1 else 0
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
    marks: BoundaryScratch, number: int, count: int, cell: int, mass: float, here: bool, known: bool
) -> int:
    """Add the teacher's mass of a cell to an item; return how many cells it has now."""
    if cell == NONE or mass <= 0:
        return count
    if marks.cell_owner[cell] != number:
        marks.cell_owner[cell] = number
        marks.slots[cell] = count
        marks.cells[count] = cell
        marks.probs[count] = marks.exact_probs[count] = 0.0
        marks.is_at_boundary[count] = False
        count += 1
    marks.probs[marks.slots[cell]] += mass
    if known:
        marks.exact_probs[marks.slots[cell]] += mass
    marks.is_at_boundary[marks.slots[cell]] |= here
    return count


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def fill_teacher_cells(
    side: SortedVocabulary, said: TeacherArrays, place: NDArray[np.int64], number: int, marks: BoundaryScratch
) -> tuple[int, float]:
    """Write what the teacher says of the next bytes at one item.

    Returns:
        The number of its cells, and what the probabilities of the tokens at the item itself are multiplied with.
    """
    count = 0
    weight = 1.0
    if place[PREVIOUS_DISTRIBUTION] != NONE:
        low, longer, high = prefix_range(side, place[BOUNDARY_TOKEN], place[BOUNDARY_BYTES])
        alike = 0  # what begins like it
        for slot in range(said.offsets[place[PREVIOUS_DISTRIBUTION]], said.exact_stops[place[PREVIOUS_DISTRIBUTION]]):
            rank = _sorted_index(side, said.ids[slot])
            if low <= rank < high:
                marks.prefix_slots[alike], marks.prefix_indices[alike] = slot, rank
                alike += 1
        highest = -np.inf  # the likeliest of them may be e^-1000
        for slot in marks.prefix_slots[:alike]:
            highest = max(highest, said.logprobs[slot])
        ended = runs_past = 0.0
        for entry in range(alike):
            mass = np.exp(said.logprobs[marks.prefix_slots[entry]] - highest)
            if marks.prefix_indices[entry] < longer:
                ended += mass
            else:
                runs_past += mass
        weight = ended / (ended + runs_past)
        for entry in range(alike):
            if marks.prefix_indices[entry] >= longer:
                cell = side.suffix_cells[side.byte_offsets[marks.prefix_indices[entry]] + place[BOUNDARY_BYTES]]
                mass = np.exp(said.logprobs[marks.prefix_slots[entry]] - highest) / (ended + runs_past)
                count = _add_cell_mass(marks, number, count, cell, mass, False, True)
    if place[NEXT_DISTRIBUTION] != NONE:
        for slot in range(said.offsets[place[NEXT_DISTRIBUTION]], said.offsets[place[NEXT_DISTRIBUTION] + 1]):
            mass = weight * np.exp(np.float64(said.logprobs[slot]))
            exact = slot < said.exact_stops[place[NEXT_DISTRIBUTION]]
            count = _add_cell_mass(marks, number, count, _token_cell(side, said.ids[slot]), mass, True, exact)
    return count, weight


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def sampling_correction(
    side: SortedVocabulary, said: TeacherArrays, position: int, weight: float, number: int, marks: BoundaryScratch
) -> tuple[float, float]:
    """Return the correction of the value of one item, its other cell aside, and 1 without the sampled tokens.

    Args:
        side: the teacher's vocabulary.
        said: its signal.
        position: where it predicts what comes next at the item.
        weight: what these probabilities are multiplied with.
        number: of the item.
        marks: its cells, `slots` below 0 for those that the student cannot reach; `probs` are used up.
    """
    correction, outside = 0.0, 1.0
    for slot in range(said.exact_stops[position], said.offsets[position + 1]):
        cell = _token_cell(side, said.ids[slot])
        if cell == NONE or marks.cell_owner[cell] != number or marks.slots[cell] < 0:
            continue
        at, mass = marks.slots[cell], weight * np.exp(np.float64(said.logprobs[slot]))
        correction += mass * sampled_log_correction(marks.exact_probs[at], weight, said.mean_surprisals[position])
        if marks.probs[at] >= 0:  # once a cell
            correction += negentropy(marks.exact_probs[at]) - negentropy(marks.probs[at])
            marks.probs[at] = -1.0
        outside -= weight * np.exp(-max(said.mean_surprisals[position], 0.0))
    return correction, outside


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def collect_teacher_cells(
    side: SortedVocabulary,
    said: TeacherArrays,
    place: NDArray[np.int64],
    since: int,
    own: int,
    number: int,
    marks: BoundaryScratch,
) -> int:
    """List the cells that the teacher's last boundary names, as tokens of either side are seen from `since` bytes on.

    Args:
        side: the teacher's vocabulary.
        said: its signal.
        place: where it stands.
        since: the bytes of its token after which the student's token begins; 0 if that began at the same time.
        own: the cell of the student's token, which is named in any case; NONE.
        number: of the item.
        marks: its `names` are filled.

    Returns:
        The number of cells.
    """
    count = 0
    if own != NONE:
        marks.teacher_cell_owner[own], marks.teacher_cells[0] = number, own
        count = 1
    low, high = 0, 0
    if since:
        _, low, high = prefix_range(side, place[BOUNDARY_TOKEN], since)
    for slot in range(said.offsets[place[PREVIOUS_DISTRIBUTION]], said.exact_stops[place[PREVIOUS_DISTRIBUTION]]):
        token = said.ids[slot]
        cell = NONE
        if since == 0:
            cell = _token_cell(side, token)
        elif low <= _sorted_index(side, token) < high:
            cell = side.suffix_cells[side.byte_offsets[_sorted_index(side, token)] + since]
        if cell != NONE and marks.teacher_cell_owner[cell] != number:
            marks.teacher_cell_owner[cell], marks.teacher_cells[count] = number, cell
            count += 1
    return count


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _lower_bound(values: NDArray[np.int32], start: int, stop: int, least: int) -> int:
    """Return where, in a rising stretch of an array, the first number of at least `least` stands; `stop`: nowhere."""
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
    """List the tokens that begin with some bytes, and have a cell behind them, as rank << 32 | group.

    Args:
        side: their vocabulary.
        after: its continuations.
        low: the first token that begins with these bytes.
        size: how many they are.
        cell: of what is left.
        bounds: the lowest rank that is listed, and the one above the highest.
        group: that is noted.
        some: filled.

    Returns:
        Their number.
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
    marks: BoundaryScratch,
    runs: NDArray[np.int32],
    widest: int,
) -> int:
    """Cut the student's tokens that begin with the bytes that are spelled into runs of one group.

    Groups are 0: they end here; 1: they go on into no cell of the item; 2 and more: into each of its cells.

    Args:
        side: the student's vocabulary.
        after: its continuations.
        place: where it stands.
        found: the number of the item's cells.
        number: of the item.
        marks: its cells.
        runs: int32 [., 3], written: group, first and stop, in the order of bytes.
        widest: so many tokens for each cell are looked through one by one; of more, those of the cells are searched.

    Returns:
        The number of runs.
    """
    low, longer, high = prefix_range(side, place[BOUNDARY_TOKEN], place[BOUNDARY_BYTES])
    count: int = _add_run(runs, 0, 0, low, longer)
    if high - longer < widest * found:
        for rank in range(longer, high):
            count = _add_run(
                runs, count, _continuation_group(side, marks, number, rank, place[BOUNDARY_BYTES]), rank, rank + 1
            )
        return count
    size = 0
    for slot in range(found):
        cell, bounds = marks.cells[slot], (longer, high)
        size += _list_continuations(
            side, after, low, place[BOUNDARY_BYTES], cell, bounds, 2 + slot, marks.tokens[size:]
        )
    marks.tokens[:size].sort()
    at = longer
    for token in marks.tokens[:size]:
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
    names: int,
    number: int,
    marks: BoundaryScratch,
    runs: NDArray[np.int32],
    widest: int,
) -> int:
    """Do the same with the tokens alone whose cells, seen from `since` bytes on, the teacher names; and the own token.

    Args:
        side: the student's vocabulary.
        after: its continuations.
        place: where it stands.
        since: the bytes of its token after which the teacher's begins; 0 if that began at the same time or before.
        names: how many cells are named.
        number: of the item.
        marks: its cells, and the named ones.
        runs: int32 [., 3], written: group, first and stop, in the order of bytes.
        widest: so many tokens for each cell are looked through one by one; of more, those of the cells are searched.

    Returns:
        The number of runs.
    """
    low, longer, high = prefix_range(side, place[BOUNDARY_TOKEN], place[BOUNDARY_BYTES])
    own, count = side.sorted_indices[place[BOUNDARY_TOKEN]], 0
    if high - low < widest * names:
        for rank in range(low, high):
            cell = side.suffix_cells[side.byte_offsets[rank] + since]
            if rank == own or (cell != NONE and marks.teacher_cell_owner[cell] == number):
                group = 0 if rank < longer else _continuation_group(side, marks, number, rank, place[BOUNDARY_BYTES])
                count = _add_run(runs, count, group, rank, rank + 1)
        return count
    lowest = prefix_range(side, place[BOUNDARY_TOKEN], since)[0] if since else 0
    size = 0
    if side.suffix_cells[side.byte_offsets[own] + since] == NONE:
        marks.tokens[0], size = np.int64(own) << 32, 1
    for cell in marks.teacher_cells[:names]:
        size += _list_continuations(side, after, lowest, since, cell, (low, high), 0, marks.tokens[size:])
    marks.tokens[:size].sort()
    for token in marks.tokens[:size]:
        rank = token >> 32
        group = 0 if rank < longer else _continuation_group(side, marks, number, rank, place[BOUNDARY_BYTES])
        count = _add_run(runs, count, group, rank, rank + 1)
    return count


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _continuation_group(side: SortedVocabulary, marks: BoundaryScratch, number: int, rank: int, cut: int) -> int:
    """Return the group of a token that goes on: that of the cell of what it has left behind `cut` bytes."""
    cell = side.suffix_cells[side.byte_offsets[rank] + cut]
    return 2 + marks.slots[cell] if cell != NONE and marks.cell_owner[cell] == number else 1


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _add_run(runs: NDArray[np.int32], count: int, group: int, first: int, stop: int) -> int:
    """Add tokens `[first, stop)`, to the last run if they go on with it; return how many runs there are then."""
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
    """Write runs group by group, each in its order, and where the runs of each group end."""
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
    """Return the same array, or a longer one with its beginning, so that `size` numbers fit."""
    if size <= len(values):
        return values
    longer = np.empty(2 * size, values.dtype)
    longer[: len(values)] = values
    return longer


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _boundary_correction(
    teacher: SortedVocabulary,
    said: TeacherArrays,
    here: int,
    weight: float,
    number: int,
    marks: BoundaryScratch,
    kept: NDArray[np.float32],
    both: bool,
) -> Any:
    """Return the correction of an item; `both`: the two sides have a boundary there."""
    remainder = 1.0 - kept.sum()  # before what is sampled is marked there
    correction, outside = sampling_correction(teacher, said, here, weight, number, marks)
    if both and said.exact_stops[here] < said.offsets[here + 1]:
        outside -= marks.exact_probs[: len(kept)].sum()
        correction += remainder_correction(remainder, outside)
    return correction


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _group_runs(
    student: SortedVocabulary,
    teacher: SortedVocabulary,
    after: PrefixContinuations,
    said: TeacherArrays,
    ours: NDArray[np.int64],
    theirs: NDArray[np.int64],
    found: int,
    number: int,
    marks: BoundaryScratch,
    runs: NDArray[np.int32],
    widest: int,
) -> Any:
    """Write the runs of the student's longer tokens that lead into the item's cells; return how many there are."""
    if _is_complete(said, theirs[PREVIOUS_DISTRIBUTION]):
        return group_all_continuations(student, after, ours, found, number, marks, runs, widest)
    since = max(0, ours[BOUNDARY_BYTES] - theirs[BOUNDARY_BYTES])
    own = student.suffix_cells[student.byte_offsets[student.sorted_indices[ours[BOUNDARY_TOKEN]]] + since]
    names = collect_teacher_cells(
        teacher, said, theirs, max(0, theirs[BOUNDARY_BYTES] - ours[BOUNDARY_BYTES]), own, number, marks
    )
    return group_teacher_continuations(student, after, ours, since, names, number, marks, runs, widest)


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def fill_byte_cells(
    student: SortedVocabulary,
    teacher: SortedVocabulary,
    after: PrefixContinuations,
    member_offsets: NDArray[np.int64],
    members: NDArray[np.int32],
    said: TeacherArrays,
    items: NDArray[np.int64],
    widest: int = LINEAR_SCAN_LIMIT,
) -> tuple[Any, Any, Any, Any, Any, Any, Any, Any, Any]:
    """Make the cells of all items.

    Args:
        student: the student's vocabulary.
        teacher: the teacher's.
        after: the student's continuations.
        member_offsets: as in `BytePartition`.
        members: as in `BytePartition`.
        said: the teacher's signal.
        items: as `find_boundaries` gives them.
        widest: tokens for each cell that are looked through one by one; what is found does not depend on it.

    Returns:
        cell_offsets, entry_offsets, teacher_probs, rows, tokens as in `Cells`, of the rows that predict what comes
        next; run_offsets, firsts, stops as in `PrefixAlternatives`, of the rows before; corrections as in `Cells`.
    """
    cells_of_both, width = len(member_offsets) - 1, len(student.token_cells)
    marks = make_scratch(cells_of_both, len(student.token_ids), said)
    runs, ends = np.empty((len(student.token_ids) + 1, 3), np.int32), np.empty(cells_of_both + 2, np.int64)
    cell_offsets = np.zeros(len(items) + 1, np.int64)
    entry_offsets, run_offsets = np.zeros(1024, np.int64), np.zeros(1024, np.int64)
    probs, rows, tokens = np.empty(1024, np.float32), np.empty(1024, np.int32), np.empty(1024, np.int32)
    firsts, stops = np.empty(1024, np.int32), np.empty(1024, np.int32)
    corrections = np.zeros(len(items), np.float64)
    cells = entries = groups = written = 0
    for number in range(len(items)):
        ours, theirs = (
            items[number, STUDENT_COLUMNS : STUDENT_COLUMNS + 4],
            items[number, TEACHER_COLUMNS : TEACHER_COLUMNS + 4],
        )
        found, weight = fill_teacher_cells(teacher, said, theirs, number, marks)
        count = 0
        if ours[PREVIOUS_DISTRIBUTION] != NONE:
            count = _group_runs(student, teacher, after, said, ours, theirs, found, number, marks, runs, widest)
        # What the teacher says nothing of at the item itself, though it has a tail there, is in the other cell.
        all_here = theirs[NEXT_DISTRIBUTION] == NONE or said.remainder_mass[theirs[NEXT_DISTRIBUTION]] <= MIN_REMAINDER
        run_offsets = _ensure_capacity(run_offsets, groups + found + 3)
        firsts, stops = _ensure_capacity(firsts, written + count), _ensure_capacity(stops, written + count)
        entry_offsets, probs = (
            _ensure_capacity(entry_offsets, cells + found + 2),
            _ensure_capacity(probs, cells + found),
        )
        sort_runs_by_group(runs[:count], found + 2, ends, firsts[written:], stops[written:])
        run_offsets[groups + 1] = written + ends[0]
        run_offsets[groups + 2] = written + ends[1]
        groups += 2
        for slot in range(found):
            cell = marks.cells[slot]
            before = entries
            if ours[NEXT_DISTRIBUTION] != NONE and (all_here or marks.is_at_boundary[slot]):
                size = member_offsets[cell + 1] - member_offsets[cell]
                rows, tokens = _ensure_capacity(rows, entries + size), _ensure_capacity(tokens, entries + size)
                first = member_offsets[cell]
                for member in range(size):  # an assignment of slices has a price of its own, fifty times an item
                    rows[entries + member] = ours[NEXT_DISTRIBUTION]
                    tokens[entries + member] = members[first + member]
                entries += size
            if entries == before and ends[slot + 2] == ends[slot + 1]:
                marks.slots[cell] = NONE
                continue  # nothing of the student lands here
            kept_slot = cells - cell_offsets[number]  # not after its own place
            marks.probs[kept_slot], marks.exact_probs[kept_slot] = marks.probs[slot], marks.exact_probs[slot]
            marks.slots[cell] = kept_slot
            cells += 1
            groups += 1
            entry_offsets[cells] = entries
            run_offsets[groups] = written + ends[slot + 2]
        written += count
        kept = marks.probs[: cells - cell_offsets[number]]
        elsewhere = (
            ends[0] > 0 if ours[NEXT_DISTRIBUTION] == NONE else entries - entry_offsets[cell_offsets[number]] < width
        )
        if ends[1] == ends[0] and not elsewhere:
            total = kept.sum()  # nothing of the student can be in the other cell: it is compared within the cells
            kept /= total
            marks.exact_probs[: len(kept)] /= total
            weight /= total
        probs[cell_offsets[number] : cells] = kept
        if theirs[NEXT_DISTRIBUTION] != NONE:
            both = ours[NEXT_DISTRIBUTION] != NONE
            corrections[number] = _boundary_correction(
                teacher, said, theirs[NEXT_DISTRIBUTION], weight, number, marks, kept, both
            )
        cell_offsets[number + 1] = cells
    return (
        cell_offsets,
        entry_offsets[: cells + 1],
        probs[:cells],
        rows[:entries],
        tokens[:entries],
        run_offsets[: groups + 1],
        firsts[:written],
        stops[:written],
        corrections,
    )
