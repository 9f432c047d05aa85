"""Records to bytes and bytes to words: a stream of the entropy coder, and a few whole numbers beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from xtk.artifacts.codec.ans_coder import SYMBOL_MASK, encode_words
from xtk.artifacts.codec.integer_symbols import NUM_SYMBOLS
from xtk.artifacts.codec.symbol_frequencies import counts_to_frequencies
from xtk.errors import CorruptError

MAX_VARINT_BYTES = 5
Index = np.uint64
ONE, TWO, THREE = Index(1), Index(2), Index(3)
EIGHT, SIXTEEN = np.uint32(8), np.uint32(16)


class StreamEncoder:
    """Turns records into streams.

    Args:
        records: all that are to be written.
        contexts: how many there are.

    Attributes:
        frequencies: int64 [contexts, SYMBOLS], made of these records.
    """

    def __init__(self, records: Sequence[NDArray[np.int64]], contexts: int) -> None:
        counts = np.zeros(contexts * NUM_SYMBOLS, np.int64)
        for part in records:
            counts += np.bincount(part & SYMBOL_MASK, minlength=len(counts))
        self.frequencies = counts_to_frequencies(counts.reshape(contexts, NUM_SYMBOLS))
        self._before = np.cumsum(self.frequencies, 1) - self.frequencies

    def encode(self, records: NDArray[np.int64]) -> bytes:
        """Return some of the records as bytes."""
        words = np.empty(2 * len(records) + 2, np.uint32)
        size = encode_words(records, self.frequencies.ravel(), self._before.ravel(), words)
        # The last word is the highest part of a number: zeros at its end say nothing.
        return words[:size].astype("<u4").tobytes().rstrip(b"\0")


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def bytes_to_words(packed: NDArray[np.uint8], start: int, stop: int) -> Any:
    """Return the words of the stream that bytes `[start, stop)` are, the last one filled up with zeros."""
    words = np.zeros((stop - start + 3) // 4, np.uint32)
    whole = (stop - start) // 4
    for word in range(whole):
        first = Index(start + 4 * word)
        low = np.uint32(packed[first]) | np.uint32(packed[first + ONE]) << EIGHT
        high = np.uint32(packed[first + TWO]) | np.uint32(packed[first + THREE]) << EIGHT
        words[word] = low | high << SIXTEEN
    for at in range(start + 4 * whole, stop):
        words[whole] |= np.uint32(packed[at]) << np.uint32(8 * (at - start - 4 * whole))
    return words


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def decode_varints_into(packed: NDArray[np.uint8], numbers: NDArray[np.int64]) -> int:
    """Fill in whole numbers from the front of some bytes; return how many bytes they take, -1 where one is cut short.

    They are written as `encode_varints` does.
    """
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
    """Return whole numbers in base 128, the lowest digit first, with 128 added to all digits but a number's last."""
    packed = bytearray()
    for number in numbers:
        while number > 127:
            packed.append(number & 127 | 128)
            number >>= 7
        packed.append(number)
    return bytes(packed)


def decode_varints(packed: bytes | memoryview, count: int) -> tuple[list[int], int]:
    """Return so many whole numbers from the front of some bytes, and how many bytes they take.

    Raises:
        Damaged: there are not so many, or one is too long.
    """
    numbers = np.empty(count, np.int64)
    at = decode_varints_into(np.frombuffer(packed, np.uint8), numbers)
    if at < 0:
        raise CorruptError("corrupt data: it ends too soon")
    return numbers.tolist(), at


def split_bytes(packed: bytes | memoryview, at: int, sizes: Sequence[int]) -> list[bytes | memoryview]:
    """Return the parts of some sizes that follow each other from a place on, and what is left.

    Raises:
        Damaged: there is less.
    """
    parts = []
    for size in sizes:
        parts.append(packed[at : at + size])
        at += size
    if at > len(packed):
        raise CorruptError("corrupt data: its parts do not add up")
    return [*parts, packed[at:]]
