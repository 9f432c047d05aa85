"""The entropy coder: asymmetric numeral systems (Duda 2013) with tables of frequencies, compiled by numba.

A state is a whole number below 2^63. What it no longer holds lies in words of 32 bits: they are written from the last
symbol to the first, and read from the last word to the first, so that symbols come in their order.

All numbers are signed, since numba makes floats of signed and unsigned together; indices that cannot be negative are
made unsigned, so that none is tested for counting from the end.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from xtk.artifacts.codec.frequencies import FIRST_SLOT, SCALE, SCALE_BITS, SYMBOL_BITS, Slots
from xtk.artifacts.codec.numbers import DIRECT, FIRST, RAW_BITS, SPECIAL

SLOT_MASK, FREQUENCY_MASK = SCALE - 1, 2 * SCALE - 1
STATE_BITS, WORD_BITS = 63, 32
LOWEST = 1 << STATE_BITS - WORD_BITS  # a state below takes in another word
WORD_MASK = (1 << WORD_BITS) - 1
Index = np.uint64

# A record: a symbol on its way to a stream, as context * 64 + symbol, how many raw bits follow it, and those bits.
COUNT_SHIFT, RAW_SHIFT = 24, 32
RECORD_MASK = (1 << COUNT_SHIFT) - 1


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def put(records: NDArray[np.int64], size: int, context: int, number: int) -> int:
    """Add a number to records, and return how many there are then."""
    if number < DIRECT:
        records[size] = context << SYMBOL_BITS | number
        return size + 1
    octave = 5
    while number >> (octave + 1):
        octave += 1
    symbol = DIRECT + 2 * (octave - 5) + (number >> (octave - 1) & 1)
    raw = number & ((1 << (octave - 1)) - 1)
    records[size] = (context << SYMBOL_BITS | symbol) | (octave - 1) << COUNT_SHIFT | raw << RAW_SHIFT
    return size + 1


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def put_symbol(records: NDArray[np.int64], size: int, context: int, symbol: int) -> int:
    """Add a symbol that stands for no number to records, and return how many there are then."""
    records[size] = context << SYMBOL_BITS | symbol
    return size + 1


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def write_words(
    records: NDArray[np.int64], frequencies: NDArray[np.int64], before: NDArray[np.int64], words: NDArray[np.uint32]
) -> int:
    """Write records into words, last record first, and return how many words there are.

    Args:
        records: [n].
        frequencies: int64 [contexts * 64], of each symbol.
        before: int64 [contexts * 64], the sum of the frequencies of the lower symbols of its context.
        words: [2 n + 2].
    """
    state = np.int64(0)
    size = 0
    for at in range(len(records) - 1, -1, -1):
        record = records[at]
        raw_bits = record >> COUNT_SHIFT & 63
        if raw_bits:
            if state >> (STATE_BITS - raw_bits):
                words[size] = state & WORD_MASK
                size += 1
                state >>= WORD_BITS
            state = state << raw_bits | record >> RAW_SHIFT
        symbol = record & RECORD_MASK
        frequency = frequencies[symbol]
        if state >> (STATE_BITS - SCALE_BITS) >= frequency:
            words[size] = state & WORD_MASK
            size += 1
            state >>= WORD_BITS
        state = (state // frequency << SCALE_BITS) + state % frequency + before[symbol]
    while state:
        words[size] = state & WORD_MASK
        size += 1
        state >>= WORD_BITS
    return size


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def start(words: NDArray[np.uint32]) -> tuple[Any, Any]:
    """Return the first state of a stream, and how many words are left."""
    state, left = np.int64(0), len(words)
    while state < LOWEST and left > 0:
        left -= 1
        state = state << WORD_BITS | np.int64(words[Index(left)])
    return state, left


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def slot_of(context: int, state: int) -> Any:
    """Return the index of the slot in which a state stands in a context."""
    return Index(context << SCALE_BITS | state & SLOT_MASK)


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def fact_of(context: int, symbol: int) -> Any:
    """Return the index of the fact of a symbol in a context."""
    return Index(context << SYMBOL_BITS | symbol)


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def after(state: Any, fact: Any) -> Any:
    """Return the state after a symbol, by its fact."""
    return (fact & FREQUENCY_MASK) * (state >> SCALE_BITS) + (state & SLOT_MASK) - (fact >> FIRST_SLOT & SLOT_MASK)


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def take(slots: Slots, context: int, state: Any, words: NDArray[np.uint32], left: int) -> tuple[Any, Any, Any]:
    """Return the next symbol, the state after it, and how many words are left.

    Nothing is ever read from before the first word: a stream that was altered ends in zeros.
    """
    symbol = np.int64(slots.symbols[slot_of(context, state)])
    state = after(state, np.int64(slots.facts[fact_of(context, symbol)]))
    if state < LOWEST and left > 0:
        left -= 1
        state = state << WORD_BITS | np.int64(words[Index(left)])
    return symbol, state, left


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def take_raw(symbol: int, state: Any, words: NDArray[np.uint32], left: int) -> tuple[Any, Any, Any]:
    """Return the number that a symbol and the raw bits after it make, the state after them, and the words left.

    A symbol that stands for no number gives its negative.
    """
    if symbol < DIRECT:
        return symbol, state, left
    if symbol >= SPECIAL:
        return -symbol, state, left
    bits: Any = RAW_BITS[symbol]
    number: Any = FIRST[symbol] + (state & ((1 << bits) - 1))
    state >>= bits
    if state < LOWEST and left > 0:
        left -= 1
        state = state << WORD_BITS | np.int64(words[Index(left)])
    return number, state, left


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def take_number(slots: Slots, context: int, state: int, words: NDArray[np.uint32], left: int) -> tuple[Any, Any, Any]:
    """Return the next number, the state after it, and how many words are left, as `take` and `take_raw` do."""
    symbol, state, left = take(slots, context, state, words, left)
    found: tuple[Any, Any, Any] = take_raw(symbol, state, words, left)
    return found
