"""The inner loops over tokens and bytes, compiled by numba, without the GIL.

Each has a slow, readable twin in the tests.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

NO_POSITION = -1


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def token_byte_ends(
    token_bytes: NDArray[np.uint8], token_offsets: NDArray[np.int64], ids: NDArray[np.int32], text: NDArray[np.uint8]
) -> tuple[NDArray[np.int32], bool]:
    """Find the byte of the text where each token ends, and say whether the tokens spell the text.

    A space in front of the text that the tokenizer added belongs to no byte of it.

    Args:
        token_bytes: uint8, the bytes of all tokens of the vocabulary.
        token_offsets: [V+1], where each token's bytes begin.
        ids: [n], the tokens.
        text: uint8 [m].

    Returns:
        ends [n], and True if the tokens spell exactly the text. The ends mean nothing otherwise.
    """
    size = len(ids)
    ends = np.empty(size, np.int32)
    total = 0
    for at in range(size):
        token = ids[at]
        total += token_offsets[token + 1] - token_offsets[token]
        ends[at] = total
    added = total - len(text)
    if added != 0 and added != 1:
        return ends, False
    position = 0
    for at in range(size):
        token = ids[at]
        for byte in range(token_offsets[token], token_offsets[token + 1]):
            if position < added:
                if token_bytes[byte] != 32:
                    return ends, False
            elif token_bytes[byte] != text[position - added]:
                return ends, False
            position += 1
    if added:
        for at in range(size):
            ends[at] = max(ends[at] - 1, 0)
    return ends, True


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def batch_token_byte_ends(
    token_bytes: NDArray[np.uint8],
    token_offsets: NDArray[np.int64],
    ids: NDArray[np.int32],
    id_offsets: NDArray[np.int64],
    texts: NDArray[np.uint8],
    text_offsets: NDArray[np.int64],
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Find the byte ends of many texts in one call, as `token_byte_ends` does of one.

    Args:
        token_bytes: as there.
        token_offsets: as there.
        ids: [n], the tokens of all texts one after the other.
        id_offsets: [D+1], where those of each text begin.
        texts: uint8, the bytes of all texts.
        text_offsets: [D+1].

    Returns:
        ends [n], counted from the start of each text; [D], whether the tokens of a text spell it.
    """
    ends = np.empty(len(ids), np.int32)
    exact = np.empty(len(id_offsets) - 1, np.bool_)
    for text in range(len(exact)):
        first, stop = id_offsets[text], id_offsets[text + 1]
        found, exact[text] = token_byte_ends(
            token_bytes, token_offsets, ids[first:stop], texts[text_offsets[text] : text_offsets[text + 1]]
        )
        ends[first:stop] = found
    return ends, exact


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def minimal_spans(student_ends: NDArray[np.int32], teacher_ends: NDArray[np.int32]) -> NDArray[np.int32]:
    """Walk along the byte ends of two tokenisations and close a span wherever both end.

    Args:
        student_ends: [S], never falling, in bytes.
        teacher_ends: [T], likewise.

    Returns:
        int32 [C, 4]: student tokens `[s0, s1)` and teacher tokens `[t0, t1)` of each span.
    """
    spans = np.empty((min(len(student_ends), len(teacher_ends)), 4), np.int32)
    count = _append_spans(student_ends, teacher_ends, 0, len(student_ends), 0, len(teacher_ends), 0, spans, 0)
    return spans[:count]


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def minimal_spans_with_gaps(
    student_ends: NDArray[np.int32],
    teacher_ends: NDArray[np.int32],
    student_runs: NDArray[np.int32],
    teacher_runs: NDArray[np.int32],
) -> NDArray[np.int32]:
    """Walk along the text that both sides have read, where each may have read it with gaps.

    Args:
        student_ends: [S], in bytes of the document's text.
        teacher_ends: [T], likewise.
        student_runs: int32 [P, 3], rising: tokens `[start, stop)` spell the text from byte `first` on
            without a gap; what lies between pieces (templates, text that was left out) is in no span.
        teacher_runs: int32 [Q, 3], likewise.

    Returns:
        int32 [C, 4], as `minimal_spans`.
    """
    spans = np.empty((min(len(student_ends), len(teacher_ends)), 4), np.int32)
    count = student = teacher = 0
    while student < len(student_runs) and teacher < len(teacher_runs):
        first, stop, byte = student_runs[student]
        other_first, other_stop, other_byte = teacher_runs[teacher]
        end = student_ends[stop - 1] if stop > first else byte
        other_end = teacher_ends[other_stop - 1] if other_stop > other_first else other_byte
        common = max(byte, other_byte)
        first, starts = _first_token_after(student_ends, first, stop, byte, common)
        other_first, other_starts = _first_token_after(teacher_ends, other_first, other_stop, other_byte, common)
        # Where a token runs over the common start, the first span begins where both sides end again.
        closed = common if starts and other_starts else NO_POSITION
        count = _append_spans(student_ends, teacher_ends, first, stop, other_first, other_stop, closed, spans, count)
        student += end <= other_end
        teacher += other_end <= end
    return spans[:count]


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _first_token_after(ends: NDArray[np.int32], first: int, stop: int, byte: int, common: int) -> tuple[int, bool]:
    """Return the first token of a piece that ends after `common`, and whether one starts just there."""
    if byte == common:
        return first, True
    low, high = first, stop
    while low < high:
        middle = (low + high) // 2
        if ends[middle] < common:
            low = middle + 1
        else:
            high = middle
    # Tokens after it that spell nothing belong to the span that begins here.
    starts = low < stop and ends[low] == common
    return low + starts, starts


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _append_spans(
    student_ends: NDArray[np.int32],
    teacher_ends: NDArray[np.int32],
    student: int,
    students: int,
    teacher: int,
    teachers: int,
    closed: int,
    spans: NDArray[np.int32],
    count: int,
) -> int:
    """Add the spans of two stretches of tokens; return how many there are then.

    Both begin at byte `closed`, or NOWHERE together: then the first span begins where both end for the first time.
    """
    first_student, first_teacher = student, teacher
    while student < students and teacher < teachers:
        student_end, teacher_end = student_ends[student], teacher_ends[teacher]
        if student_end < teacher_end or student_end == closed:
            student += 1
        elif teacher_end < student_end:
            teacher += 1
        else:
            student += 1
            teacher += 1
            if closed != NO_POSITION:
                spans[count, 0] = first_student
                spans[count, 1] = student
                spans[count, 2] = first_teacher
                spans[count, 3] = teacher
                count += 1
            first_student, first_teacher = student, teacher
            closed = student_end
    return count
