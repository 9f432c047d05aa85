"""The inner loops over tokens and bytes, compiled by numba, without the GIL.

Each has a slow, readable twin in the tests.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def byte_ends(
    pool: NDArray[np.uint8], offsets: NDArray[np.int64], ids: NDArray[np.int32], text: NDArray[np.uint8]
) -> tuple[NDArray[np.int32], bool]:
    """Find the byte of the text where each token ends, and say whether the tokens spell the text.

    A space in front of the text that the tokenizer added belongs to no byte of it.

    Args:
        pool: uint8, the bytes of all tokens of the vocabulary.
        offsets: [V+1], where each token's bytes begin.
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
        total += offsets[token + 1] - offsets[token]
        ends[at] = total
    added = total - len(text)
    if added != 0 and added != 1:
        return ends, False
    position = 0
    for at in range(size):
        token = ids[at]
        for byte in range(offsets[token], offsets[token + 1]):
            if position < added:
                if pool[byte] != 32:
                    return ends, False
            elif pool[byte] != text[position - added]:
                return ends, False
            position += 1
    if added:
        for at in range(size):
            ends[at] = max(ends[at] - 1, 0)
    return ends, True


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def smallest_spans(student_ends: NDArray[np.int32], teacher_ends: NDArray[np.int32]) -> NDArray[np.int32]:
    """Walk along the byte ends of two tokenisations and close a span wherever both end.

    Args:
        student_ends: [S], never falling, in bytes.
        teacher_ends: [T], likewise.

    Returns:
        int32 [C, 4]: student tokens `[s0, s1)` and teacher tokens `[t0, t1)` of each span.
    """
    students, teachers = len(student_ends), len(teacher_ends)
    spans = np.empty((min(students, teachers), 4), np.int32)
    count = 0
    closed = 0  # the byte where the last span ended
    student = teacher = 0
    first_student = first_teacher = 0
    while student < students and teacher < teachers:
        student_end, teacher_end = student_ends[student], teacher_ends[teacher]
        if student_end < teacher_end or student_end == closed:
            student += 1
        elif teacher_end < student_end:
            teacher += 1
        else:
            student += 1
            teacher += 1
            spans[count, 0] = first_student
            spans[count, 1] = student
            spans[count, 2] = first_teacher
            spans[count, 3] = teacher
            count += 1
            first_student, first_teacher = student, teacher
            closed = student_end
    return spans[:count]
