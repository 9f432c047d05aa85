"""Numba kernels of token boundaries: those of two tokenizations of one text, and ranges of tokens with a prefix."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtk.numba_kernel import numba_kernel
from xtk.projection.vocabulary_byte_partition import SortedVocabulary

NONE = -1
# The columns of an item for one model. NEXT: the distribution over the next token, NONE inside of a token. PREVIOUS:
# that of the last boundary before, NONE where it is not used. TOKEN: the observed token there. BYTES: how many of its
# bytes precede the item.
NEXT_DISTRIBUTION, PREVIOUS_DISTRIBUTION, BOUNDARY_TOKEN, BOUNDARY_BYTES = range(4)
STUDENT_COLUMNS, TEACHER_COLUMNS = 0, 4


class TokenPath(NamedTuple):
    """The tokens of one model, and the index of the distribution that predicts each."""

    ids: NDArray[np.int32]  # [T]
    # [T], row of the student's logits, or index into the teacher's log-probabilities, that predicts it; or NONE.
    distribution_indices: NDArray[np.int64]


@numba_kernel
def sorted_index(side: SortedVocabulary, token: int) -> int:
    """Return the index of a token in byte order; NONE for tokens without bytes and ids outside of the vocabulary."""
    return side.sorted_indices[token] if token < len(side.sorted_indices) else NONE


@numba_kernel
def byte_length(side: SortedVocabulary, token: int) -> int:
    """Return the number of bytes of a token."""
    rank = sorted_index(side, token)
    return side.byte_offsets[rank + 1] - side.byte_offsets[rank] if rank >= 0 else 0


@numba_kernel
def token_cell(side: SortedVocabulary, token: int) -> int:
    """Return the cell of a token; NONE for ids outside of the vocabulary."""
    return side.token_cells[token] if token < len(side.token_cells) else NONE


@numba_kernel
def _have_equal_bytes(
    student: SortedVocabulary, teacher: SortedVocabulary, student_ids: NDArray[np.int32], teacher_ids: NDArray[np.int32]
) -> bool:
    """Return whether two runs of tokens have equal bytes: no token is empty, or both are one token without bytes."""
    at, byte, left = -1, 0, 0  # of the student: token, index in `token_bytes`, bytes left
    for token in teacher_ids:
        size = byte_length(teacher, token)
        if size == 0:
            return len(teacher_ids) == 1 and len(student_ids) == 1 and byte_length(student, student_ids[0]) == 0
        start = teacher.byte_offsets[teacher.sorted_indices[token]]
        for other in range(start, start + size):
            if left == 0:
                at += 1
                if at == len(student_ids):
                    return False
                left = byte_length(student, student_ids[at])
                if left == 0:
                    return False
                byte = student.byte_offsets[student.sorted_indices[student_ids[at]]]
            if student.token_bytes[byte] != teacher.token_bytes[other]:
                return False
            byte += 1
            left -= 1
    return left == 0 and at == len(student_ids) - 1


@numba_kernel
def find_boundaries(
    student: SortedVocabulary,
    teacher: SortedVocabulary,
    student_path: TokenPath,
    teacher_path: TokenPath,
    spans: NDArray[np.int32],
) -> NDArray[np.int64]:
    """Return the token boundaries of either model at which both are compared, in text order, within spans.

    They are int64 [I, 8], the columns NEXT_DISTRIBUTION ... BOUNDARY_BYTES for the student, then for the teacher.
    """
    most = 0
    for span in range(len(spans)):
        most += spans[span, 1] - spans[span, 0] + spans[span, 3] - spans[span, 2]
    items = np.empty((most, 8), np.int64)
    count = 0
    for span in range(len(spans)):
        s, s_stop, t, t_stop = spans[span]
        alike = _have_equal_bytes(student, teacher, student_path.ids[s:s_stop], teacher_path.ids[t:t_stop])
        first = token_cell(student, student_path.ids[s])
        if alike or (first != NONE and first == token_cell(teacher, teacher_path.ids[t])):
            count += _add_boundary(student, teacher, student_path, teacher_path, s, 0, t, 0, items[count])
        s_left, t_left = byte_length(student, student_path.ids[s]), byte_length(teacher, teacher_path.ids[t])
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
            s_left = byte_length(student, student_path.ids[s]) - s_cut
            t_left = byte_length(teacher, teacher_path.ids[t]) - t_cut
            count += _add_boundary(student, teacher, student_path, teacher_path, s, s_cut, t, t_cut, items[count])
    return items[:count]


@numba_kernel
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


@numba_kernel
def _fill_boundary_side(side: SortedVocabulary, path: TokenPath, at: int, cut: int, place: NDArray[np.int64]) -> None:
    """Write the columns of one model."""
    place[NEXT_DISTRIBUTION] = NONE if cut else path.distribution_indices[at]
    before = at if cut else at - 1
    place[BOUNDARY_TOKEN] = path.ids[before] if before >= 0 else NONE
    place[BOUNDARY_BYTES] = cut if cut or before < 0 else byte_length(side, path.ids[before])
    place[PREVIOUS_DISTRIBUTION] = path.distribution_indices[before] if before >= 0 and place[BOUNDARY_BYTES] else NONE


@numba_kernel
def prefix_range(side: SortedVocabulary, token: int, size: int) -> tuple[int, int, int]:
    """Return `low, longer, high`, the range of the tokens that begin with the first `size` bytes of a token.

    In byte order, tokens `[low, longer)` equal these bytes, those of `[longer, high)` go on.
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


@numba_kernel
def _has_prefix(side: SortedVocabulary, rank: int, start: int, size: int) -> bool:
    """Return whether the token at an index in byte order begins with the `size` bytes at `start` in `token_bytes`."""
    at = side.byte_offsets[rank]
    if side.byte_offsets[rank + 1] - at < size:
        return False
    for byte in range(size):  # noqa: SIM110, compiled
        if side.token_bytes[at + byte] != side.token_bytes[start + byte]:
            return False
    return True
