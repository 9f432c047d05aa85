"""Numba kernels for byte ends of tokens and for spans; they release the GIL.

Each has a slow, readable reference implementation in the tests.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xtk.numba_kernel import numba_kernel

NO_POSITION = -1


@numba_kernel
def token_byte_ends(
    token_bytes: NDArray[np.uint8], token_offsets: NDArray[np.int64], ids: NDArray[np.int32], text: NDArray[np.uint8]
) -> tuple[NDArray[np.int32], bool]:
    """Return int32 [n], the byte of the text where each token ends, and whether the tokens' bytes equal the text.

    If they do not, the ends are invalid. A space that the tokenizer prepended belongs to no byte of the text.
    `token_bytes` and `token_offsets` [V+1] are those of the vocabulary.
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


@numba_kernel
def batch_token_byte_ends(
    token_bytes: NDArray[np.uint8],
    token_offsets: NDArray[np.int64],
    ids: NDArray[np.int32],
    id_offsets: NDArray[np.int64],
    texts: NDArray[np.uint8],
    text_offsets: NDArray[np.int64],
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Return the byte ends of many texts in one call, from the start of each, and bool [D], as `token_byte_ends`.

    `ids` and `texts` are concatenated; `id_offsets` and `text_offsets`, [D+1], are where those of each text begin.
    """
    ends = np.empty(len(ids), np.int32)
    exact = np.empty(len(id_offsets) - 1, np.bool_)
    for text in range(len(exact)):
        first, stop = id_offsets[text], id_offsets[text + 1]
        text_ends, exact[text] = token_byte_ends(
            token_bytes, token_offsets, ids[first:stop], texts[text_offsets[text] : text_offsets[text + 1]]
        )
        ends[first:stop] = text_ends
    return ends, exact


@numba_kernel
def minimal_spans(student_ends: NDArray[np.int32], teacher_ends: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return int32 [C, 4], student tokens `[s0, s1)` and teacher tokens `[t0, t1)` of each span, from byte ends.

    A span ends at every shared boundary.
    """
    spans = np.empty((min(len(student_ends), len(teacher_ends)), 4), np.int32)
    count = _append_spans(student_ends, teacher_ends, 0, len(student_ends), 0, len(teacher_ends), 0, spans, 0)
    return spans[:count]


@numba_kernel
def minimal_spans_with_gaps(
    student_ends: NDArray[np.int32],
    teacher_ends: NDArray[np.int32],
    student_runs: NDArray[np.int32],
    teacher_runs: NDArray[np.int32],
) -> NDArray[np.int32]:
    """Return the minimal spans where both sides have tokens of the text, each side possibly with gaps.

    `student_runs` and `teacher_runs`: int32 [P, 3], ascending: tokens `[start, stop)` cover the text from byte `first`
    on without a gap; tokens between runs (template text, omitted text) are in no span.
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
        # Where a token crosses the common start, the first span begins at the next shared boundary.
        closed = common if starts and other_starts else NO_POSITION
        count = _append_spans(student_ends, teacher_ends, first, stop, other_first, other_stop, closed, spans, count)
        student += end <= other_end
        teacher += other_end <= end
    return spans[:count]


@numba_kernel
def _first_token_after(ends: NDArray[np.int32], first: int, stop: int, byte: int, common: int) -> tuple[int, bool]:
    """Return the first token of a run that ends after byte `common`, and whether a token starts exactly there."""
    if byte == common:
        return first, True
    low, high = first, stop
    while low < high:
        middle = (low + high) // 2
        if ends[middle] < common:
            low = middle + 1
        else:
            high = middle
    # Tokens without bytes after it belong to the span that begins here.
    starts = low < stop and ends[low] == common
    return low + starts, starts


@numba_kernel
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
    """Append the spans of two runs of tokens; return the new number of spans.

    Both start at byte `closed`; if it is NO_POSITION, the first span begins at the first shared boundary.
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
