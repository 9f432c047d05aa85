"""Numba kernels of escd: event sets of the teacher's tokens, and the student tokens that complete them.

They release the GIL. The tests contain a slow, readable reference implementation.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.losses.kernels.byte_kl_numba import ensure_capacity
from xtk.losses.kernels.sampled_support_correction import TeacherArrays
from xtk.losses.kernels.token_boundaries_numba import NONE, byte_length, sorted_index
from xtk.numba_kernel import numba_kernel
from xtk.projection.vocabulary_byte_partition import SortedVocabulary, first_with_byte


@numba_kernel
def fill_event_sets(
    student: SortedVocabulary,
    teacher: SortedVocabulary,
    heads: NDArray[np.int32],
    support: TeacherArrays,
    roots: NDArray[np.int64],
    first_tokens: NDArray[np.int32],
) -> tuple[Any, Any, Any, Any]:
    """Return the event sets that the student's next token completes, at each item: int64 [I + 1], and their masses.

    And the first index and one past the last index in byte order of the student tokens that complete each.

    Args:
        heads: int32 [U], `LongestPrefixes.event_heads`.
        roots: int64 [I], the teacher's distribution at the student's position before the item; NONE: no event sets.
        first_tokens: int32 [I], the student's observed token at that position.
    """
    set_offsets, masses = np.zeros(len(roots) + 1, np.int64), np.empty(256, np.float64)
    firsts, stops = np.empty(256, np.int32), np.empty(256, np.int32)
    owners, slots = np.full(len(teacher.token_ids), NONE, np.int64), np.empty(len(teacher.token_ids), np.int64)
    # Arrays of a tuple are read once: in a loop, each access would count references, which costs more than the rest.
    ids, logprobs, offsets, byte_offsets = support.ids, support.logprobs, support.offsets, teacher.byte_offsets
    count = 0
    for item in range(len(roots)):
        set_offsets[item + 1] = count
        size = byte_length(student, first_tokens[item])
        if roots[item] == NONE or size == 0:
            continue
        own = student.byte_offsets[sorted_index(student, first_tokens[item])]
        for entry in range(offsets[roots[item]], offsets[roots[item] + 1]):
            head = heads[ids[entry]] if ids[entry] < len(heads) else NONE
            mass = math.exp(np.float64(logprobs[entry]))
            if head == NONE or mass <= 0:
                continue
            if owners[head] == item:
                if slots[head] != NONE:
                    masses[slots[head]] += mass
                continue
            owners[head], slots[head] = item, NONE
            start = byte_offsets[head]
            if byte_offsets[head + 1] - start <= size or not _equal_bytes(student, own, teacher, start, size):
                continue
            first, stop = tokens_that_begin_with(student, teacher, start + size, byte_offsets[head + 1])
            if first == stop:
                continue  # no student token begins with what is left
            masses, firsts = ensure_capacity(masses, count + 1), ensure_capacity(firsts, count + 1)
            stops = ensure_capacity(stops, count + 1)
            masses[count], firsts[count], stops[count], slots[head] = mass, first, stop, count
            count += 1
        set_offsets[item + 1] = count
    return set_offsets, masses[:count], firsts[:count], stops[:count]


@numba_kernel
def _equal_bytes(
    student: SortedVocabulary, student_start: int, teacher: SortedVocabulary, teacher_start: int, size: int
) -> bool:
    for byte in range(size):
        if student.token_bytes[student_start + byte] != teacher.token_bytes[teacher_start + byte]:
            return False
    return True


@numba_kernel
def tokens_that_begin_with(
    student: SortedVocabulary, teacher: SortedVocabulary, start: int, stop: int
) -> tuple[int, int]:
    """Return the range in byte order of the student tokens that begin with bytes `[start, stop)` of the teacher's."""
    low, high = 0, len(student.token_ids)
    for size in range(stop - start):
        byte = np.int64(teacher.token_bytes[start + size])
        low = first_with_byte(student.token_bytes, student.byte_offsets, low, high, size, byte)
        high = first_with_byte(student.token_bytes, student.byte_offsets, low, high, size, byte + 1)
    return low, high
