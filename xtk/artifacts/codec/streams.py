"""Records to bytes and bytes to words: a stream of the entropy coder, and a few whole numbers beside it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from xtk.artifacts.codec import kernels
from xtk.artifacts.codec.frequencies import frequencies_of
from xtk.artifacts.codec.numbers import SYMBOLS
from xtk.errors import Damaged


def count_symbols(records: Sequence[NDArray[np.int64]], contexts: int) -> NDArray[np.int64]:
    """Return int64 [contexts, SYMBOLS], how often each symbol comes in some records."""
    counts = np.zeros(contexts * SYMBOLS, np.int64)
    for part in records:
        counts += np.bincount(part & kernels.RECORD_MASK, minlength=contexts * SYMBOLS)
    return counts.reshape(contexts, SYMBOLS)


class Writer:
    """Turns records into streams.

    Args:
        records: all that are to be written.
        contexts: how many there are.

    Attributes:
        frequencies: int64 [contexts, SYMBOLS].
    """

    def __init__(self, records: Sequence[NDArray[np.int64]], contexts: int) -> None:
        self.frequencies = frequencies_of(count_symbols(records, contexts))
        self._before = np.cumsum(self.frequencies, 1) - self.frequencies

    def stream(self, records: NDArray[np.int64]) -> bytes:
        """Return records as bytes."""
        words = np.empty(2 * len(records) + 2, np.uint32)
        size = kernels.write_stream(records, self.frequencies.ravel(), self._before.ravel(), words)
        # The last word is the highest part of a number: zeros at its end say nothing.
        return words[:size].astype("<u4").tobytes().rstrip(b"\0")


def words_of(stream: bytes | memoryview) -> NDArray[np.uint32]:
    """Return the words of a stream."""
    words = np.zeros((len(stream) + 3) // 4, np.uint32)
    words.view(np.uint8)[: len(stream)] = np.frombuffer(stream, np.uint8)
    return words


def pack_numbers(numbers: Sequence[int]) -> bytes:
    """Return whole numbers in base 128, lowest digit first; all but the last digit of a number have 128 added."""
    packed = bytearray()
    for number in numbers:
        while number > 127:
            packed.append(number & 127 | 128)
            number >>= 7
        packed.append(number)
    return bytes(packed)


def unpack_numbers(packed: bytes | memoryview, count: int) -> tuple[list[int], int]:
    """Return so many whole numbers from the front of some bytes, and how many bytes they take.

    Raises:
        Damaged: there are not so many, or one of more than 5 digits.
    """
    numbers, at = [], 0
    for _ in range(count):
        number = shift = 0
        while True:
            if at >= len(packed) or shift > 28:
                raise Damaged("a row of this cache is altered: it ends too soon")
            digit = packed[at]
            at += 1
            number |= (digit & 127) << shift
            shift += 7
            if digit < 128:
                break
        numbers.append(number)
    return numbers, at


def cut(packed: bytes | memoryview, at: int, sizes: Sequence[int]) -> list[bytes | memoryview]:
    """Return the parts of some sizes that follow each other from a place on, and what is left.

    Raises:
        Damaged: there is less.
    """
    parts = []
    for size in sizes:
        parts.append(packed[at : at + size])
        at += size
    if at > len(packed):
        raise Damaged("a row of this cache is altered: its parts do not add up")
    return [*parts, packed[at:]]
