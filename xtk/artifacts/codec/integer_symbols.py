"""Whole numbers as a class, which is entropy-coded, and raw bits that choose within it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NUM_DIRECT_SYMBOLS = 32  # numbers below are classes of their own; above, each octave is two classes
NUM_SYMBOLS = 64
SPECIAL_SYMBOL = 62  # stands for no number; what it means depends on where it is
UNUSED_SYMBOL = (
    63  # what is read in a context that never comes, if a stream was altered; and the odds of what is certain
)
NUMBER_LIMIT = 1 << 20  # the first number that has no class


def _symbol_classes() -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    first, bits = [*range(NUM_DIRECT_SYMBOLS)], [0] * NUM_DIRECT_SYMBOLS
    for octave in range(NUM_DIRECT_SYMBOLS.bit_length() - 1, NUMBER_LIMIT.bit_length() - 1):
        first += [2 << octave - 1, 3 << octave - 1]
        bits += [octave - 1, octave - 1]
    return np.array([*first, 0, 0], np.int64), np.array([*bits, 0, 0], np.int64)


# Of each symbol, int64 [SYMBOLS]: the first number of its class, and how many raw bits choose within it.
FIRST_NUMBER, RAW_BITS = _symbol_classes()


def zigzag(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return 0, 1, 2, 3, 4 for 0, -1, 1, -2, 2 and so on."""
    return np.where(numbers < 0, -2 * numbers - 1, 2 * numbers)
