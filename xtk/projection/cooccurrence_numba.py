"""Numba kernels for cooccurrence counts; they release the GIL. The tests have a slow, readable reference."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xtk.numba_kernel import numba_kernel

EMPTY_SLOT = -1


@numba_kernel
def count_first_token_pairs(
    keys: NDArray[np.int64],
    counts: NDArray[np.int64],
    num_used: int,
    width: int,
    texts: tuple[NDArray[np.uint8], NDArray[np.int64]],
    spans: tuple[NDArray[np.int32], NDArray[np.int64]],
    student: tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]],
    teacher: tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]],
    student_vocabulary: tuple[NDArray[np.uint8], NDArray[np.int64]],
    teacher_vocabulary: tuple[NDArray[np.uint8], NDArray[np.int64]],
) -> int:
    """Count, for each span of documents, the pair of its first student token and its first teacher token.

    Tokens without bytes in the text (an added prefix) are skipped. A pair counts only if the bytes of both tokens are
    those of the text from the start of the span on: then one is a prefix of the other. Returns the new number of used
    slots.

    Args:
        keys: int64 [2^k], an open-addressing hash table of `student token * width + teacher token`, EMPTY_SLOT if free.
        counts: int64 [2^k], count of each key.
        num_used: number of used slots; at least as many slots as spans must be free.
        width: larger than every teacher token id.
        texts: uint8, the concatenated bytes of D documents, and int64 [D+1], where each begins; `spans` likewise.
        student: int32, its tokens; int32, their byte ends; and int64 [D+1].
    """
    mask = len(keys) - 1
    for document in range(len(texts[1]) - 1):
        text = texts[0][texts[1][document] : texts[1][document + 1]]
        one_ids, one_ends = _document_tokens(student, document)
        other_ids, other_ends = _document_tokens(teacher, document)
        start = 0
        for at in range(spans[1][document], spans[1][document + 1]):
            span = spans[0][at]
            one = _first_token(text, start, span[0], span[1], one_ids, one_ends, student_vocabulary)
            other = _first_token(text, start, span[2], span[3], other_ids, other_ends, teacher_vocabulary)
            start = one_ends[span[1] - 1]
            if one < 0 or other < 0:
                continue
            key = np.int64(one) * width + other
            place = _find_slot(keys, mask, key)
            if keys[place] == EMPTY_SLOT:
                keys[place] = key
                num_used += 1
            counts[place] += 1
    return num_used


@numba_kernel
def _document_tokens(
    side: tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]], document: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    ids, ends, offsets = side
    first, stop = offsets[document], offsets[document + 1]
    return ids[first:stop], ends[first:stop]


@numba_kernel
def insert_counts(
    keys: NDArray[np.int64], counts: NDArray[np.int64], new_keys: NDArray[np.int64], new_counts: NDArray[np.int64]
) -> None:
    """Insert distinct keys into an empty, larger table."""
    mask = len(keys) - 1
    for at in range(len(new_keys)):
        place = _find_slot(keys, mask, new_keys[at])
        keys[place] = new_keys[at]
        counts[place] = new_counts[at]


@numba_kernel
def _find_slot(keys: NDArray[np.int64], mask: int, key: int) -> int:
    """Return the slot of a key, or the free slot for it."""
    # Fibonacci hashing: the upper bits of a product with 2^64 / golden ratio.
    place = ((key * np.int64(-7046029254386353131)) >> 20) & mask
    while keys[place] != EMPTY_SLOT and keys[place] != key:
        place = (place + 1) & mask
    return int(place)


@numba_kernel
def _first_token(
    text: NDArray[np.uint8],
    start: int,
    first: int,
    stop: int,
    ids: NDArray[np.int32],
    ends: NDArray[np.int32],
    vocabulary: tuple[NDArray[np.uint8], NDArray[np.int64]],
) -> int:
    """Return the first token of a span with bytes; -1 if its bytes are not those of the text."""
    pool, offsets = vocabulary
    while first < stop - 1 and ends[first] <= start:
        first += 1
    token = ids[first]
    size = offsets[token + 1] - offsets[token]
    if size == 0 or start + size > len(text):
        return -1
    for byte in range(size):
        if pool[offsets[token] + byte] != text[start + byte]:
            return -1
    return int(token)
