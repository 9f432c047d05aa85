"""Character-level alignment of two different texts.

The fallback when a template changes a part of a message, such as a reasoning block that it drops. Substrings that occur
once on each side are anchors; between anchors a dynamic program finds the longest common subsequence. Time grows with
length times differences, memory with length.

Source: E. Myers, An O(ND) Difference Algorithm and Its Variations, 1986 (the middle snake, in linear memory).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xtk.numba_kernel import numba_kernel

ANCHOR_LENGTH = 16  # characters of an anchor: long enough not to repeat by chance, short enough to be found
# With more edits between two anchors, the texts have too little in common to justify the quadratic time.
MAX_EDITS = 2048
_BASE = np.int64(1_000_003)
_UNREACHABLE = -(1 << 40)


def matching_runs(first_text: str, second_text: str) -> NDArray[np.int32]:
    """Return the common substrings of two texts: int32 [R, 3], ascending.

    Characters `[a, a + n)` of the first are `[b, b + n)` of the second, as (a, b, n). A match that is shorter than the
    differences before and after it is a coincidence, and is dropped. Swapping the texts swaps the first two columns.
    """
    left, right = _code_points(first_text), _code_points(second_text)
    # The smaller text first, so that ties fall the same way whichever side it is given on.
    swapped = (len(left), left.tolist()) > (len(right), right.tolist())
    if swapped:
        left, right = right, left
    runs = _find_common_runs(left, right)
    runs = _drop_coincidental_runs(runs, len(left), len(right))
    return runs[:, [1, 0, 2]] if swapped else runs


def character_byte_offsets(text: str) -> NDArray[np.int32]:
    """Return int32 [n + 1], the byte where each character of a text begins, and where the text ends."""
    codes = _code_points(text)
    sizes = 1 + (codes > 0x7F).astype(np.int32) + (codes > 0x7FF) + (codes > 0xFFFF)
    return np.concatenate([np.zeros(1, np.int32), np.cumsum(sizes, dtype=np.int32)])


def _code_points(text: str) -> NDArray[np.int32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.int32)


def _find_common_runs(left: NDArray[np.int32], right: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return maximal runs (a, b, n): no two are adjacent on both sides."""
    # What both texts begin and end with is matched first: all of the rest is found where one has a part cut out.
    start = _common_prefix(left, right)
    suffix = _common_prefix(np.ascontiguousarray(left[start:][::-1]), np.ascontiguousarray(right[start:][::-1]))
    ends = np.array([[0, 0, start], [len(left) - suffix, len(right) - suffix, suffix]], np.int32)
    left, right = left[start : len(left) - suffix], right[start : len(right) - suffix]
    inner = _find_inner_runs(left, right) + np.array([start, start, 0], np.int32)
    return _join_adjacent_runs(np.concatenate([ends[:1], inner, ends[1:]]))


def _find_inner_runs(left: NDArray[np.int32], right: NDArray[np.int32]) -> NDArray[np.int32]:
    chain = _anchors(left, right)
    runs = [np.zeros((0, 3), np.int32)]
    a = b = 0
    for next_a, next_b in [*chain.tolist(), (len(left), len(right))]:
        if next_a < a or next_b < b:
            continue  # inside of the run of the anchor before it
        gap = longest_common_runs(left[a:next_a], right[b:next_b], MAX_EDITS)
        runs.append(gap + np.array([a, b, 0], np.int32))
        size = _common_prefix(left[next_a:], right[next_b:])
        runs.append(np.array([[next_a, next_b, size]], np.int32))
        a, b = next_a + size, next_b + size
    return np.concatenate(runs)


def _join_adjacent_runs(runs: NDArray[np.int32]) -> NDArray[np.int32]:
    runs = runs[runs[:, 2] > 0]
    if not len(runs):
        return runs
    touches = (runs[1:, 0] == runs[:-1, 0] + runs[:-1, 2]) & (runs[1:, 1] == runs[:-1, 1] + runs[:-1, 2])
    first = np.flatnonzero(np.concatenate([[True], ~touches]))
    sizes = np.add.reduceat(runs[:, 2], first)
    return np.column_stack([runs[first, :2], sizes]).astype(np.int32)


def _anchors(left: NDArray[np.int32], right: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return [n, 2] positions of substrings of ANCHOR_LENGTH that occur once on each side, in the same order."""
    if min(len(left), len(right)) < 4 * ANCHOR_LENGTH:
        return np.zeros((0, 2), np.int64)
    one, other = _rolling_hashes(left, ANCHOR_LENGTH), _rolling_hashes(right, ANCHOR_LENGTH)
    values, at, counts = np.unique(one, return_index=True, return_counts=True)
    other_values, other_at, other_counts = np.unique(other, return_index=True, return_counts=True)
    _, mine, theirs = np.intersect1d(values[counts == 1], other_values[other_counts == 1], return_indices=True)
    places = np.column_stack([at[counts == 1][mine], other_at[other_counts == 1][theirs]]).astype(np.int64)
    places = places[np.argsort(places[:, 0])]
    steps = np.arange(ANCHOR_LENGTH)
    same = (left[places[:, :1] + steps] == right[places[:, 1:] + steps]).all(1)  # hashes may collide
    places = places[same]
    rising: NDArray[np.int64] = places[_longest_increasing_subsequence(places[:, 1])]
    return rising


@numba_kernel
def _rolling_hashes(codes: NDArray[np.int32], size: int) -> NDArray[np.int64]:
    result = np.empty(len(codes) - size + 1, np.int64)
    power = np.int64(1)
    for _ in range(size):
        power *= _BASE
    value = np.int64(0)
    for at in range(len(codes)):
        value = value * _BASE + codes[at] + 1
        if at >= size:
            value -= power * (codes[at - size] + 1)
        if at >= size - 1:
            result[at - size + 1] = value
    return result


@numba_kernel
def _longest_increasing_subsequence(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the indices of a longest strictly increasing subsequence."""
    size = len(values)
    before = np.full(size, -1, np.int64)
    last = np.empty(size, np.int64)  # last index of the best subsequence of each length
    length = 0
    for at in range(size):
        low, high = 0, length
        while low < high:
            middle = (low + high) // 2
            if values[last[middle]] < values[at]:
                low = middle + 1
            else:
                high = middle
        if low:
            before[at] = last[low - 1]
        last[low] = at
        length = max(length, low + 1)
    result = np.empty(length, np.int64)
    at = last[length - 1] if length else -1
    for place in range(length - 1, -1, -1):
        result[place] = at
        at = before[at]
    return result


@numba_kernel
def _common_prefix(left: NDArray[np.int32], right: NDArray[np.int32]) -> int:
    size = 0
    while size < len(left) and size < len(right) and left[size] == right[size]:
        size += 1
    return size


@numba_kernel
def longest_common_runs(left: NDArray[np.int32], right: NDArray[np.int32], max_edits: int) -> NDArray[np.int32]:
    """Return a longest common subsequence, as runs: int32 [R, 3], (a, b, n), ascending; runs may be adjacent.

    Divides recursively at the middle of a shortest edit script, with a stack. If a script is longer than twice
    `max_edits`, the limit from each end, it divides at the furthest point instead; the result may then not be the
    longest.
    """
    runs = np.empty((min(len(left), len(right)) + 1, 3), np.int32)
    count = 0
    stack = [(0, len(left), 0, len(right))]
    forward = np.empty(2 * max_edits + 3, np.int64)
    backward = np.empty(2 * max_edits + 3, np.int64)
    while len(stack):
        a, a_stop, b, b_stop = stack.pop()
        size = _common_prefix(left[a:a_stop], right[b:b_stop])
        if size:
            runs[count, 0], runs[count, 1], runs[count, 2] = a, b, size
            count += 1
            a, b = a + size, b + size
        if a == a_stop or b == b_stop:
            continue
        x, y, run = _middle_snake(left[a:a_stop], right[b:b_stop], max_edits, forward, backward)
        # The stack is last in, first out: push the part after the middle first. The middle run is its entry's prefix.
        stack.append((a + x + run, a_stop, b + y + run, b_stop))
        stack.append((a + x, a + x + run, b + y, b + y + run))
        stack.append((a, a + x, b, b + y))
    return runs[:count]


@numba_kernel
def _middle_snake(
    left: NDArray[np.int32],
    right: NDArray[np.int32],
    max_edits: int,
    forward: NDArray[np.int64],
    backward: NDArray[np.int64],
) -> tuple[int, int, int]:
    """Return the run (a, b, n), maybe empty, in the middle of a shortest edit script; first characters must differ."""
    n, m = len(left), len(right)
    delta = n - m
    odd = delta % 2 != 0
    center = max_edits + 1
    best_x, best_y = 0, 0
    for edits in range(max_edits + 1):
        for k in range(-edits, edits + 1, 2):
            start = _furthest_x(forward, center, k, edits, n, m)
            x = start
            while 0 <= x < n and x - k < m and left[x] == right[x - k]:
                x += 1
            forward[center + k] = x
            if x >= 0 and 2 * x - k > best_x + best_y:
                best_x, best_y = x, x - k
            other = delta - k  # the same diagonal in the numbering of the other search
            if odd and -edits < other < edits and x + backward[center + other] >= n:
                return start, start - k, x - start
        for k in range(-edits, edits + 1, 2):
            start = _furthest_x(backward, center, k, edits, n, m)
            x = start
            while 0 <= x < n and x - k < m and left[n - 1 - x] == right[m - 1 - x + k]:
                x += 1
            backward[center + k] = x
            other = delta - k
            if not odd and -edits <= other <= edits and x + forward[center + other] >= n:
                return n - x, m - x + k, x - start
    return best_x, best_y, 0


@numba_kernel
def _furthest_x(reached: NDArray[np.int64], center: int, k: int, edits: int, n: int, m: int) -> int:
    """Return the furthest x on diagonal k after one more edit; a large negative number if the text ends before."""
    if edits == 0:
        return 0
    x = _UNREACHABLE
    if k != -edits and reached[center + k - 1] < n:
        x = reached[center + k - 1] + 1
    if k != edits and reached[center + k + 1] - k <= m:
        x = max(x, reached[center + k + 1])
    return x


def _drop_coincidental_runs(runs: NDArray[np.int32], left: int, right: int) -> NDArray[np.int32]:
    """Drop runs shorter than the differences on both sides, from left to right."""
    kept: list[tuple[int, int, int]] = []
    pending = [tuple(run) for run in runs.tolist()]
    for at, run in enumerate(pending):
        kept.append((run[0], run[1], run[2]))
        following = pending[at + 1] if at + 1 < len(pending) else (left, right, 0)
        while kept:
            a, b, size = kept[-1]
            before = kept[-2] if len(kept) > 1 else (0, 0, 0)
            gap = max(a - before[0] - before[2], b - before[1] - before[2])
            next_gap = max(following[0] - a - size, following[1] - b - size)
            if size >= gap or size >= next_gap:
                break
            kept.pop()
    return np.array(kept, np.int32).reshape(-1, 3)
