"""Records to bytes and bytes to words: a stream of the entropy coder, and a few whole numbers beside it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from xtk.artifacts.codec.coder import RECORD_MASK, write_words
from xtk.artifacts.codec.frequencies import frequencies_of
from xtk.artifacts.codec.numbers import SYMBOLS
from xtk.errors import Damaged

MOST_DIGITS = 5


class Writer:
    """Turns records into streams.

    Args:
        records: all that are to be written.
        contexts: how many there are.

    Attributes:
        frequencies: int64 [contexts, SYMBOLS], made of these records.
    """

    def __init__(self, records: Sequence[NDArray[np.int64]], contexts: int) -> None:
        counts = np.zeros(contexts * SYMBOLS, np.int64)
        for part in records:
            counts += np.bincount(part & RECORD_MASK, minlength=len(counts))
        self.frequencies = frequencies_of(counts.reshape(contexts, SYMBOLS))
        self._before = np.cumsum(self.frequencies, 1) - self.frequencies

    def stream(self, records: NDArray[np.int64]) -> bytes:
        """Return some of the records as bytes."""
        words = np.empty(2 * len(records) + 2, np.uint32)
        size = write_words(records, self.frequencies.ravel(), self._before.ravel(), words)
        # The last word is the highest part of a number: zeros at its end say nothing.
        return words[:size].astype("<u4").tobytes().rstrip(b"\0")


def words_of(stream: bytes | memoryview) -> NDArray[np.uint32]:
    """Return the words of a stream."""
    words = np.zeros((len(stream) + 3) // 4, "<u4")
    words.view(np.uint8)[: len(stream)] = np.frombuffer(stream, np.uint8)
    return words.astype(np.uint32, copy=False)


def pack_numbers(numbers: Sequence[int]) -> bytes:
    """Return whole numbers in base 128, the lowest digit first, with 128 added to all digits but a number's last."""
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
        Damaged: there are not so many, or one is too long.
    """
    # Arrow's memory comes as signed bytes.
    packed = memoryview(packed).cast("B")
    numbers, at = [], 0
    for _ in range(count):
        number = digits = 0
        while not digits or packed[at - 1] > 127:
            if at == len(packed) or digits == MOST_DIGITS:
                raise Damaged("this was altered: it ends too soon")
            number |= (packed[at] & 127) << 7 * digits
            digits += 1
            at += 1
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
        raise Damaged("this was altered: its parts do not add up")
    return [*parts, packed[at:]]
