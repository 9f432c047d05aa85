"""Mapping of non-negative integers to symbols: an entropy-coded class and raw bits that select a number in it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NUM_DIRECT_SYMBOLS = 32  # smaller numbers are their own symbol; above, each octave has two symbols
NUM_SYMBOLS = 64
SPECIAL_SYMBOL = 62  # not a number; its meaning depends on the context family
UNUSED_SYMBOL = 63  # decoded in contexts that never occur, if a stream is corrupt; also the odds of probability 1
NUMBER_LIMIT = 1 << 20  # the first number that cannot be encoded


def _symbol_classes() -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    first, bits = [*range(NUM_DIRECT_SYMBOLS)], [0] * NUM_DIRECT_SYMBOLS
    for octave in range(NUM_DIRECT_SYMBOLS.bit_length() - 1, NUMBER_LIMIT.bit_length() - 1):
        first += [2 << octave - 1, 3 << octave - 1]
        bits += [octave - 1, octave - 1]
    return np.array([*first, 0, 0], np.int64), np.array([*bits, 0, 0], np.int64)


# int64 [NUM_SYMBOLS]: the first number of each symbol's class, and the number of raw bits that select within it.
FIRST_NUMBER, RAW_BITS = _symbol_classes()


def zigzag(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return 0, 1, 2, 3, 4 for 0, -1, 1, -2, 2 and so on."""
    return np.where(numbers < 0, -2 * numbers - 1, 2 * numbers)
