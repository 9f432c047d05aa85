"""Byte streams of the ANS coder, and variable-length integers (LEB128)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.cache.codec.ans_entropy_coder import SYMBOL_MASK, encode_words
from xtk.cache.codec.integer_coding import NUM_SYMBOLS
from xtk.cache.codec.symbol_frequencies import counts_to_frequencies
from xtk.files.arrow_validation import corrupt_shard_error
from xtk.numba_kernel import numba_kernel

MAX_VARINT_BYTES = 5
Index = np.uint64
ONE, TWO, THREE = Index(1), Index(2), Index(3)
EIGHT, SIXTEEN = np.uint32(8), np.uint32(16)


class StreamEncoder:
    """Encodes records as byte streams, with the frequencies of `records`, all those of the shard."""

    def __init__(self, records: Sequence[NDArray[np.int64]], contexts: int) -> None:
        counts = np.zeros(contexts * NUM_SYMBOLS, np.int64)
        for part in records:
            counts += np.bincount(part & SYMBOL_MASK, minlength=len(counts))
        # int64 [contexts, NUM_SYMBOLS], of these records.
        self.frequencies = counts_to_frequencies(counts.reshape(contexts, NUM_SYMBOLS))
        self._before = np.cumsum(self.frequencies, 1) - self.frequencies

    def encode(self, records: NDArray[np.int64]) -> bytes:
        """Return one stream of records as bytes."""
        words = np.empty(2 * len(records) + 2, np.uint32)
        size = encode_words(records, self.frequencies.ravel(), self._before.ravel(), words)
        # The last word is the most significant one: its trailing zero bytes carry no information.
        return words[:size].astype("<u4").tobytes().rstrip(b"\0")


@numba_kernel
def bytes_to_words(packed: NDArray[np.uint8], start: int, stop: int) -> Any:
    """Return a zero, and then the words of the stream in bytes `[start, stop)`, the last one padded with zeros."""
    words = np.zeros(1 + (stop - start + 3) // 4, np.uint32)
    whole = (stop - start) // 4
    for word in range(whole):
        first = Index(start + 4 * word)
        low = np.uint32(packed[first]) | np.uint32(packed[first + ONE]) << EIGHT
        high = np.uint32(packed[first + TWO]) | np.uint32(packed[first + THREE]) << EIGHT
        words[word + 1] = low | high << SIXTEEN
    for at in range(start + 4 * whole, stop):
        words[whole + 1] |= np.uint32(packed[at]) << np.uint32(8 * (at - start - 4 * whole))
    return words


@numba_kernel
def decode_varints_into(packed: NDArray[np.uint8], numbers: NDArray[np.int64]) -> int:
    """Decode LEB128 integers into `numbers`; return the bytes read, -1 if the data ends or an integer is too long."""
    at = 0
    for index in range(len(numbers)):
        number, digits = np.int64(0), 0
        while not digits or packed[at - 1] > 127:
            if at == len(packed) or digits == MAX_VARINT_BYTES:
                return -1
            number |= np.int64(packed[at] & 127) << 7 * digits
            digits += 1
            at += 1
        numbers[index] = number
    return at


def encode_varints(numbers: Sequence[int]) -> bytes:
    """Return non-negative integers as LEB128: base 128, lowest digit first, 128 added to all digits but the last."""
    packed = bytearray()
    for number in numbers:
        while number > 127:
            packed.append(number & 127 | 128)
            number >>= 7
        packed.append(number)
    return bytes(packed)


def decode_varints(packed: bytes | memoryview, count: int) -> tuple[list[int], int]:
    """Return `count` LEB128 integers from the front of `packed`, and the number of bytes read."""
    numbers = np.empty(count, np.int64)
    at = decode_varints_into(np.frombuffer(packed, np.uint8), numbers)
    if at < 0:
        raise corrupt_shard_error("its compressed data ends too early")
    return numbers.tolist(), at


def split_bytes(packed: bytes | memoryview, at: int, sizes: Sequence[int]) -> list[bytes | memoryview]:
    """Split `packed` from offset `at` into parts of the given sizes, and return them and the remaining bytes."""
    parts = []
    for size in sizes:
        parts.append(packed[at : at + size])
        at += size
    if at > len(packed):
        raise corrupt_shard_error("its compressed data is shorter than its stated length")
    return [*parts, packed[at:]]
