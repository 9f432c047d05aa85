"""The loops of byte-kl over spans, supports and vocabularies, compiled by numba, without the GIL.

Their slow, readable twin is in the tests.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from xtk.losses.sampled_values import correct_remainder, log_of_sampled, negentropy
from xtk.projection.next_bytes import Continuations, Side

NONE = -1
# So many tokens that begin alike, for each cell that is to be found, are looked through faster than searched.
WIDEST = 50
# What rounding leaves of a whole distribution is no tail.
SMALLEST_TAIL = 1e-6


class Path(NamedTuple):
    """The tokens of one side, and where its distributions are.

    Attributes:
        ids: int32 [T].
        said: int64 [T], the row, or the index into the signal, of the distribution that predicts a token; NONE.
    """

    ids: NDArray[np.int32]
    said: NDArray[np.int64]


class Said(NamedTuple):
    """What the teacher said, as in a signal: `ids`, `logprobs` of each position, and the mass of the rest.

    The exact ones of position p end at `stops[p]`; behind them are those that were sampled, whose mean surprisal is
    `surprisals[p]`.
    """

    offsets: NDArray[np.int64]
    stops: NDArray[np.int64]
    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    tail_mass: NDArray[np.float32]
    surprisals: NDArray[np.float64]


# The columns of an item. `HERE` is the distribution of what comes next, NONE inside of a token. `PAST` is that of the
# last boundary before, NONE where nobody looks back, `TOKEN` what stands there, `CUT` how many of its bytes lie before.
HERE, PAST, TOKEN, CUT = range(4)
STUDENT, TEACHER = 0, 4


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _tells_all(said: Said, position: int) -> bool:
    """Say whether what is exact at a position is all of the distribution."""
    return bool(said.tail_mass[position] <= SMALLEST_TAIL and said.stops[position] == said.offsets[position + 1])


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _rank(side: Side, token: int) -> int:
    """Return where a token stands in the order of bytes; NONE for one that spells nothing, or that there is not."""
    return side.ranks[token] if token < len(side.ranks) else NONE


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _length(side: Side, token: int) -> int:
    """Return how many bytes a token spells."""
    rank = _rank(side, token)
    return side.starts[rank + 1] - side.starts[rank] if rank >= 0 else 0


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _cell(side: Side, token: int) -> int:
    """Return the cell of a token."""
    return side.token_cells[token] if token < len(side.token_cells) else NONE


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _spell_alike(student: Side, teacher: Side, student_ids: NDArray[np.int32], teacher_ids: NDArray[np.int32]) -> bool:
    """Say whether two runs of tokens spell the same bytes, each token some, or are two tokens that spell none."""
    at, byte, left = -1, 0, 0  # of the student: token, place in the pool, bytes left
    for token in teacher_ids:
        size = _length(teacher, token)
        if size == 0:
            return len(teacher_ids) == 1 and len(student_ids) == 1 and _length(student, student_ids[0]) == 0
        start = teacher.starts[teacher.ranks[token]]
        for other in range(start, start + size):
            if left == 0:
                at += 1
                if at == len(student_ids):
                    return False
                left = _length(student, student_ids[at])
                if left == 0:
                    return False
                byte = student.starts[student.ranks[student_ids[at]]]
            if student.pool[byte] != teacher.pool[other]:
                return False
            byte += 1
            left -= 1
    return left == 0 and at == len(student_ids) - 1


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def find_items(
    student: Side, teacher: Side, student_path: Path, teacher_path: Path, spans: NDArray[np.int32]
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
        alike = _spell_alike(student, teacher, student_path.ids[s:s_stop], teacher_path.ids[t:t_stop])
        first = _cell(student, student_path.ids[s])
        if alike or (first != NONE and first == _cell(teacher, teacher_path.ids[t])):
            count += _add_item(student, teacher, student_path, teacher_path, s, 0, t, 0, items[count])
        s_left, t_left = _length(student, student_path.ids[s]), _length(teacher, teacher_path.ids[t])
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
            s_left = _length(student, student_path.ids[s]) - s_cut
            t_left = _length(teacher, teacher_path.ids[t]) - t_cut
            count += _add_item(student, teacher, student_path, teacher_path, s, s_cut, t, t_cut, items[count])
    return items[:count]


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _add_item(
    student: Side,
    teacher: Side,
    student_path: Path,
    teacher_path: Path,
    s: int,
    s_cut: int,
    t: int,
    t_cut: int,
    item: NDArray[np.int64],
) -> bool:
    """Write an item where both sides know what they need, and say whether they do.

    A side stands `cut` bytes inside of its token, 0 at its beginning.
    """
    _place(student, student_path, s, s_cut, item[STUDENT : STUDENT + 4])
    _place(teacher, teacher_path, t, t_cut, item[TEACHER : TEACHER + 4])
    if student_path.said[s] == NONE or teacher_path.said[t] == NONE:
        return False
    if item[STUDENT + PAST] == NONE or item[TEACHER + PAST] == NONE:
        # Nobody looks back where one cannot, and inside of a token there is nothing else to look at.
        item[STUDENT + PAST] = item[TEACHER + PAST] = NONE
        return s_cut == 0 and t_cut == 0
    return True


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _place(side: Side, path: Path, at: int, cut: int, place: NDArray[np.int64]) -> None:
    """Write where one side stands."""
    place[HERE] = NONE if cut else path.said[at]
    before = at if cut else at - 1
    place[TOKEN] = path.ids[before] if before >= 0 else NONE
    place[CUT] = cut if cut or before < 0 else _length(side, path.ids[before])
    place[PAST] = path.said[before] if before >= 0 and place[CUT] else NONE


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def beginning(side: Side, token: int, size: int) -> tuple[int, int, int]:
    """Find the tokens that begin with the first `size` bytes of a token.

    Returns:
        `low, longer, high`: tokens `order[low:longer]` spell just these bytes, `order[longer:high]` go on.
    """
    rank = side.ranks[token]
    start = side.starts[rank]
    low, stop = 0, rank  # the first that does not come before these bytes
    while low < stop:
        middle = (low + stop) // 2
        if _shares(side, middle, start, size):
            stop = middle
        else:
            low = middle + 1
    high, stop = rank + 1, len(side.order)  # the first after `rank` that begins otherwise
    while high < stop:
        middle = (high + stop) // 2
        if _shares(side, middle, start, size):
            high = middle + 1
        else:
            stop = middle
    longer = low
    while longer < high and side.starts[longer + 1] - side.starts[longer] == size:
        longer += 1
    return low, longer, high


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _shares(side: Side, rank: int, start: int, size: int) -> bool:
    """Say whether the token at a rank begins with `size` bytes of the pool."""
    at = side.starts[rank]
    if side.starts[rank + 1] - at < size:
        return False
    for byte in range(size):  # noqa: SIM110, compiled
        if side.pool[at + byte] != side.pool[start + byte]:
            return False
    return True


class Marks(NamedTuple):
    """Scratch memory for one item at a time. A mark holds where it names the item; nothing is ever cleared.

    Attributes:
        reached: int64 [cells], the item that has a cell.
        slots: int64 [cells], which of the item's cells it is.
        named: int64 [cells], the item for which the teacher's last boundary names a cell.
        cells: int64 [cells], the item's cells, in the order in which the teacher names them.
        probs: float64 [cells], the teacher's probability of each.
        known: float64 [cells], the same without sampled tokens.
        here: bool [cells], whether the teacher names each at the item itself.
        names: int64 [cells], those that the last boundary names, in any order.
        tokens: int64 [student's tokens + 1], ranks << 32 | groups.
        slots_alike: int64 [longest support], those of the teacher's tokens that begin like the one that stands there.
        ranks_alike: int64 [longest support], their ranks.
    """

    reached: NDArray[np.int64]
    slots: NDArray[np.int64]
    named: NDArray[np.int64]
    cells: NDArray[np.int64]
    probs: NDArray[np.float64]
    known: NDArray[np.float64]
    here: NDArray[np.bool_]
    names: NDArray[np.int64]
    tokens: NDArray[np.int64]
    slots_alike: NDArray[np.int64]
    ranks_alike: NDArray[np.int64]


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def make_marks(cells: int, tokens: int, said: Said) -> Marks:
    """Return scratch memory for so many cells, tokens of the student, and for what the teacher said."""
    longest = np.diff(said.offsets).max() if len(said.offsets) > 1 else 0
    return Marks(
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
def _add_mass(marks: Marks, number: int, count: int, cell: int, mass: float, here: bool, known: bool) -> int:
    """Add the teacher's mass of a cell to an item; return how many cells it has now."""
    if cell == NONE or mass <= 0:
        return count
    if marks.reached[cell] != number:
        marks.reached[cell] = number
        marks.slots[cell] = count
        marks.cells[count] = cell
        marks.probs[count] = marks.known[count] = 0.0
        marks.here[count] = False
        count += 1
    marks.probs[marks.slots[cell]] += mass
    if known:
        marks.known[marks.slots[cell]] += mass
    marks.here[marks.slots[cell]] |= here
    return count


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def teacher_cells(side: Side, said: Said, place: NDArray[np.int64], number: int, marks: Marks) -> tuple[int, float]:
    """Write what the teacher says of the next bytes at one item.

    Returns:
        The number of its cells, and what the probabilities of the tokens at the item itself are multiplied with.
    """
    count = 0
    weight = 1.0
    if place[PAST] != NONE:
        low, longer, high = beginning(side, place[TOKEN], place[CUT])
        alike = 0  # what begins like it
        for slot in range(said.offsets[place[PAST]], said.stops[place[PAST]]):
            rank = _rank(side, said.ids[slot])
            if low <= rank < high:
                marks.slots_alike[alike], marks.ranks_alike[alike] = slot, rank
                alike += 1
        highest = -np.inf  # the likeliest of them may be e^-1000
        for slot in marks.slots_alike[:alike]:
            highest = max(highest, said.logprobs[slot])
        ended = runs_past = 0.0
        for entry in range(alike):
            mass = np.exp(said.logprobs[marks.slots_alike[entry]] - highest)
            if marks.ranks_alike[entry] < longer:
                ended += mass
            else:
                runs_past += mass
        weight = ended / (ended + runs_past)
        for entry in range(alike):
            if marks.ranks_alike[entry] >= longer:
                cell = side.cells[side.starts[marks.ranks_alike[entry]] + place[CUT]]
                mass = np.exp(said.logprobs[marks.slots_alike[entry]] - highest) / (ended + runs_past)
                count = _add_mass(marks, number, count, cell, mass, False, True)
    if place[HERE] != NONE:
        for slot in range(said.offsets[place[HERE]], said.offsets[place[HERE] + 1]):
            mass = weight * np.exp(np.float64(said.logprobs[slot]))
            exact = slot < said.stops[place[HERE]]
            count = _add_mass(marks, number, count, _cell(side, said.ids[slot]), mass, True, exact)
    return count, weight


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def correct_value(
    side: Side, said: Said, position: int, weight: float, number: int, marks: Marks
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
    for slot in range(said.stops[position], said.offsets[position + 1]):
        cell = _cell(side, said.ids[slot])
        if cell == NONE or marks.reached[cell] != number or marks.slots[cell] < 0:
            continue
        at, mass = marks.slots[cell], weight * np.exp(np.float64(said.logprobs[slot]))
        correction += mass * log_of_sampled(marks.known[at], weight, said.surprisals[position])
        if marks.probs[at] >= 0:  # once a cell
            correction += negentropy(marks.known[at]) - negentropy(marks.probs[at])
            marks.probs[at] = -1.0
        outside -= weight * np.exp(-max(said.surprisals[position], 0.0))
    return correction, outside


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def name_cells(
    side: Side, said: Said, place: NDArray[np.int64], since: int, own: int, number: int, marks: Marks
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
        marks.named[own], marks.names[0] = number, own
        count = 1
    low, high = 0, 0
    if since:
        _, low, high = beginning(side, place[TOKEN], since)
    for slot in range(said.offsets[place[PAST]], said.stops[place[PAST]]):
        token = said.ids[slot]
        cell = NONE
        if since == 0:
            cell = _cell(side, token)
        elif low <= _rank(side, token) < high:
            cell = side.cells[side.starts[_rank(side, token)] + since]
        if cell != NONE and marks.named[cell] != number:
            marks.named[cell], marks.names[count] = number, cell
            count += 1
    return count


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _lowest(values: NDArray[np.int32], start: int, stop: int, least: int) -> int:
    """Return where, in a rising stretch of an array, the first number of at least `least` stands; `stop`: nowhere."""
    while start < stop:
        middle = (start + stop) // 2
        if values[middle] < least:
            start = middle + 1
        else:
            stop = middle
    return start


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _list_tokens(
    side: Side, after: Continuations, low: int, size: int, cell: int, bounds: Any, group: int, some: NDArray[np.int64]
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
    node = side.starts[low] + size
    first = _lowest(after.cells, after.firsts[node], after.firsts[node + 1], cell)
    stop = _lowest(after.cells, first, after.firsts[node + 1], cell + 1)
    count = 0
    for entry in range(_lowest(after.ranks, first, stop, bounds[0]), stop):
        if after.ranks[entry] >= bounds[1]:
            break
        some[count] = np.int64(after.ranks[entry]) << 32 | group
        count += 1
    return count


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def group_all(
    side: Side,
    after: Continuations,
    place: NDArray[np.int64],
    found: int,
    number: int,
    marks: Marks,
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
    low, longer, high = beginning(side, place[TOKEN], place[CUT])
    count: int = _add_run(runs, 0, 0, low, longer)
    if high - longer < widest * found:
        for rank in range(longer, high):
            count = _add_run(runs, count, _group(side, marks, number, rank, place[CUT]), rank, rank + 1)
        return count
    size = 0
    for slot in range(found):
        cell, bounds = marks.cells[slot], (longer, high)
        size += _list_tokens(side, after, low, place[CUT], cell, bounds, 2 + slot, marks.tokens[size:])
    marks.tokens[:size].sort()
    at = longer
    for token in marks.tokens[:size]:
        rank = token >> 32
        count = _add_run(runs, count, 1, at, rank)
        count = _add_run(runs, count, token & 0xFFFFFFFF, rank, rank + 1)
        at = rank + 1
    return int(_add_run(runs, count, 1, at, high))


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def group_named(
    side: Side,
    after: Continuations,
    place: NDArray[np.int64],
    since: int,
    names: int,
    number: int,
    marks: Marks,
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
    low, longer, high = beginning(side, place[TOKEN], place[CUT])
    own, count = side.ranks[place[TOKEN]], 0
    if high - low < widest * names:
        for rank in range(low, high):
            cell = side.cells[side.starts[rank] + since]
            if rank == own or (cell != NONE and marks.named[cell] == number):
                group = 0 if rank < longer else _group(side, marks, number, rank, place[CUT])
                count = _add_run(runs, count, group, rank, rank + 1)
        return count
    lowest = beginning(side, place[TOKEN], since)[0] if since else 0
    size = 0
    if side.cells[side.starts[own] + since] == NONE:
        marks.tokens[0], size = np.int64(own) << 32, 1
    for cell in marks.names[:names]:
        size += _list_tokens(side, after, lowest, since, cell, (low, high), 0, marks.tokens[size:])
    marks.tokens[:size].sort()
    for token in marks.tokens[:size]:
        rank = token >> 32
        group = 0 if rank < longer else _group(side, marks, number, rank, place[CUT])
        count = _add_run(runs, count, group, rank, rank + 1)
    return count


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _group(side: Side, marks: Marks, number: int, rank: int, cut: int) -> int:
    """Return the group of a token that goes on: that of the cell of what it has left behind `cut` bytes."""
    cell = side.cells[side.starts[rank] + cut]
    return 2 + marks.slots[cell] if cell != NONE and marks.reached[cell] == number else 1


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
def sort_runs(
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
def _grown(values: NDArray[Any], size: int) -> NDArray[Any]:
    """Return the same array, or a longer one with its beginning, so that `size` numbers fit."""
    if size <= len(values):
        return values
    longer = np.empty(2 * size, values.dtype)
    longer[: len(values)] = values
    return longer


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _correction(
    teacher: Side,
    said: Said,
    here: int,
    weight: float,
    number: int,
    marks: Marks,
    kept: NDArray[np.float32],
    both: bool,
) -> Any:
    """Return the correction of an item; `both`: the two sides have a boundary there."""
    remainder = 1.0 - kept.sum()  # before what is sampled is marked there
    correction, outside = correct_value(teacher, said, here, weight, number, marks)
    if both and said.stops[here] < said.offsets[here + 1]:
        outside -= marks.known[: len(kept)].sum()
        correction += correct_remainder(remainder, outside)
    return correction


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _group_runs(
    student: Side,
    teacher: Side,
    after: Continuations,
    said: Said,
    ours: NDArray[np.int64],
    theirs: NDArray[np.int64],
    found: int,
    number: int,
    marks: Marks,
    runs: NDArray[np.int32],
    widest: int,
) -> Any:
    """Write the runs of the student's longer tokens that lead into the item's cells; return how many there are."""
    if _tells_all(said, theirs[PAST]):
        return group_all(student, after, ours, found, number, marks, runs, widest)
    since = max(0, ours[CUT] - theirs[CUT])
    own = student.cells[student.starts[student.ranks[ours[TOKEN]]] + since]
    names = name_cells(teacher, said, theirs, max(0, theirs[CUT] - ours[CUT]), own, number, marks)
    return group_named(student, after, ours, since, names, number, marks, runs, widest)


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def fill_byte_cells(
    student: Side,
    teacher: Side,
    after: Continuations,
    member_offsets: NDArray[np.int64],
    members: NDArray[np.int32],
    said: Said,
    items: NDArray[np.int64],
    widest: int = WIDEST,
) -> tuple[Any, Any, Any, Any, Any, Any, Any, Any, Any]:
    """Make the cells of all items.

    Args:
        student: the student's vocabulary.
        teacher: the teacher's.
        after: the student's continuations.
        member_offsets: as in `NextBytes`.
        members: as in `NextBytes`.
        said: the teacher's signal.
        items: as `find_items` gives them.
        widest: tokens for each cell that are looked through one by one; what is found does not depend on it.

    Returns:
        cell_offsets, entry_offsets, teacher_probs, rows, tokens as in `Cells`, of the rows that predict what comes
        next; run_offsets, firsts, stops as in `Alternatives`, of the rows before; corrections as in `Cells`.
    """
    cells_of_both, width = len(member_offsets) - 1, len(student.token_cells)
    marks = make_marks(cells_of_both, len(student.order), said)
    runs, ends = np.empty((len(student.order) + 1, 3), np.int32), np.empty(cells_of_both + 2, np.int64)
    cell_offsets = np.zeros(len(items) + 1, np.int64)
    entry_offsets, run_offsets = np.zeros(1024, np.int64), np.zeros(1024, np.int64)
    probs, rows, tokens = np.empty(1024, np.float32), np.empty(1024, np.int32), np.empty(1024, np.int32)
    firsts, stops = np.empty(1024, np.int32), np.empty(1024, np.int32)
    corrections = np.zeros(len(items), np.float64)
    cells = entries = groups = written = 0
    for number in range(len(items)):
        ours, theirs = items[number, STUDENT : STUDENT + 4], items[number, TEACHER : TEACHER + 4]
        found, weight = teacher_cells(teacher, said, theirs, number, marks)
        count = 0
        if ours[PAST] != NONE:
            count = _group_runs(student, teacher, after, said, ours, theirs, found, number, marks, runs, widest)
        # What the teacher says nothing of at the item itself, though it has a tail there, is in the other cell.
        all_here = theirs[HERE] == NONE or said.tail_mass[theirs[HERE]] <= SMALLEST_TAIL
        run_offsets = _grown(run_offsets, groups + found + 3)
        firsts, stops = _grown(firsts, written + count), _grown(stops, written + count)
        entry_offsets, probs = _grown(entry_offsets, cells + found + 2), _grown(probs, cells + found)
        sort_runs(runs[:count], found + 2, ends, firsts[written:], stops[written:])
        run_offsets[groups + 1] = written + ends[0]
        run_offsets[groups + 2] = written + ends[1]
        groups += 2
        for slot in range(found):
            cell = marks.cells[slot]
            before = entries
            if ours[HERE] != NONE and (all_here or marks.here[slot]):
                size = member_offsets[cell + 1] - member_offsets[cell]
                rows, tokens = _grown(rows, entries + size), _grown(tokens, entries + size)
                first = member_offsets[cell]
                for member in range(size):  # an assignment of slices has a price of its own, fifty times an item
                    rows[entries + member] = ours[HERE]
                    tokens[entries + member] = members[first + member]
                entries += size
            if entries == before and ends[slot + 2] == ends[slot + 1]:
                marks.slots[cell] = NONE
                continue  # nothing of the student lands here
            kept_slot = cells - cell_offsets[number]  # not after its own place
            marks.probs[kept_slot], marks.known[kept_slot] = marks.probs[slot], marks.known[slot]
            marks.slots[cell] = kept_slot
            cells += 1
            groups += 1
            entry_offsets[cells] = entries
            run_offsets[groups] = written + ends[slot + 2]
        written += count
        kept = marks.probs[: cells - cell_offsets[number]]
        elsewhere = ends[0] > 0 if ours[HERE] == NONE else entries - entry_offsets[cell_offsets[number]] < width
        if ends[1] == ends[0] and not elsewhere:
            total = kept.sum()  # nothing of the student can be in the other cell: it is compared within the cells
            kept /= total
            marks.known[: len(kept)] /= total
            weight /= total
        probs[cell_offsets[number] : cells] = kept
        if theirs[HERE] != NONE:
            both = ours[HERE] != NONE
            corrections[number] = _correction(teacher, said, theirs[HERE], weight, number, marks, kept, both)
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
