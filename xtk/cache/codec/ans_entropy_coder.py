"""ANS entropy coder (asymmetric numeral systems, Duda 2013) with frequency tables, compiled by numba.

The state is an integer below 2^63; its overflow is stored in 32-bit words. Encoding goes from the last symbol to the
first, decoding from the last word to the first, so that symbols are decoded in order.

All numbers are signed, since numba converts mixed signed and unsigned arithmetic to floats. Indices that cannot be
negative are cast to unsigned, which saves numba's check for negative indices.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.cache.codec.integer_coding import FIRST_NUMBER, NUM_DIRECT_SYMBOLS, RAW_BITS
from xtk.cache.codec.symbol_frequencies import (
    FIRST_SLOT_SHIFT,
    FREQUENCY_BITS,
    FREQUENCY_TOTAL,
    SYMBOL_BITS,
    DecodingTables,
)
from xtk.numba_kernel import numba_kernel

SLOT_MASK, FREQUENCY_MASK = FREQUENCY_TOTAL - 1, 2 * FREQUENCY_TOTAL - 1
STATE_BITS, WORD_BITS = 63, 32
MIN_STATE = 1 << STATE_BITS - WORD_BITS  # below it, the decoder reads another word
WORD_MASK = (1 << WORD_BITS) - 1
Index = np.uint64

# A record is one symbol to encode: context * 64 + symbol, the number of raw bits after it, and these bits.
RAW_COUNT_SHIFT, RAW_SHIFT = 24, 32
SYMBOL_MASK = (1 << RAW_COUNT_SHIFT) - 1


@numba_kernel
def append_number(records: NDArray[np.int64], size: int, context: int, number: int) -> int:
    """Append a number to the records and return their new count."""
    if number < NUM_DIRECT_SYMBOLS:
        records[size] = context << SYMBOL_BITS | number
        return size + 1
    octave = 5
    while number >> (octave + 1):
        octave += 1
    symbol = NUM_DIRECT_SYMBOLS + 2 * (octave - 5) + (number >> (octave - 1) & 1)
    raw = number & ((1 << (octave - 1)) - 1)
    records[size] = (context << SYMBOL_BITS | symbol) | (octave - 1) << RAW_COUNT_SHIFT | raw << RAW_SHIFT
    return size + 1


@numba_kernel
def append_symbol(records: NDArray[np.int64], size: int, context: int, symbol: int) -> int:
    """Append a symbol that does not represent a number to the records and return their new count."""
    records[size] = context << SYMBOL_BITS | symbol
    return size + 1


@numba_kernel
def encode_words(
    records: NDArray[np.int64],  # [n]
    frequencies: NDArray[np.int64],  # int64 [contexts * 64], of each symbol
    # int64 [contexts * 64], the sum of the frequencies of the lower symbols of the same context
    before: NDArray[np.int64],
    words: NDArray[np.uint32],  # [2 n + 2], filled
) -> int:
    """Encode records into words, last record first, and return the number of words."""
    state = np.int64(0)
    size = 0
    for at in range(len(records) - 1, -1, -1):
        record = records[at]
        raw_bits = record >> RAW_COUNT_SHIFT & 63
        if raw_bits:
            if state >> (STATE_BITS - raw_bits):
                words[size] = state & WORD_MASK
                size += 1
                state >>= WORD_BITS
            state = state << raw_bits | record >> RAW_SHIFT
        symbol = record & SYMBOL_MASK
        frequency = frequencies[symbol]
        if state >> (STATE_BITS - FREQUENCY_BITS) >= frequency:
            words[size] = state & WORD_MASK
            size += 1
            state >>= WORD_BITS
        state = (state // frequency << FREQUENCY_BITS) + state % frequency + before[symbol]
    while state:
        words[size] = state & WORD_MASK
        size += 1
        state >>= WORD_BITS
    return size


@numba_kernel
def initial_state(words: NDArray[np.uint32]) -> tuple[Any, Any]:
    """Return the first state of a stream, from `bytes_to_words`, and the number of words left."""
    state, left = np.int64(0), len(words) - 1
    while state < MIN_STATE and left > 0:
        state, left = append_word(state, left, words[Index(left)])
    return state, left


# The functions from here to `decode_number` take no arrays: numba counts references to array arguments at each call.
@numba_kernel
def append_word(state: Any, left: Any, word: Any) -> tuple[Any, Any]:
    """Return a state below MIN_STATE after appending the next word, `words[left]`, and the number of words left.

    Without words left, the state stays as it is, so that corrupt streams are safe to decode.
    """
    return (state << WORD_BITS | np.int64(word), left - 1) if left > 0 else (state, left)


@numba_kernel
def raw_bits_to_number(symbol: int, state: Any) -> tuple[Any, Any]:
    """Return the number (0: none) of a symbol and the raw bits in a state, and the state without these bits."""
    bits = RAW_BITS[Index(symbol)]
    return FIRST_NUMBER[Index(symbol)] + (state & ((1 << bits) - 1)), state >> bits


@numba_kernel
def slot_index(context: int, state: int) -> Any:
    """Return the index of a state's slot in the decoding table of a context."""
    return Index(context << FREQUENCY_BITS | state & SLOT_MASK)


@numba_kernel
def symbol_info_index(context: int, symbol: int) -> Any:
    """Return the index of a symbol's info in a context."""
    return Index(context << SYMBOL_BITS | symbol)


@numba_kernel
def next_state(state: Any, info: Any) -> Any:
    """Return the state after decoding a symbol with this info."""
    return (
        (info & FREQUENCY_MASK) * (state >> FREQUENCY_BITS)
        + (state & SLOT_MASK)
        - (info >> FIRST_SLOT_SHIFT & SLOT_MASK)
    )


@numba_kernel
def decode_number(
    slots: DecodingTables, context: int, words: NDArray[np.uint32], state: Any, left: Any
) -> tuple[Any, Any, Any, Any]:
    """Return the next symbol, its number (0 if it does not represent one), the state after it, and the words left."""
    symbol = np.int64(slots.symbols[slot_index(context, state)])
    state = next_state(state, np.int64(slots.symbol_info[symbol_info_index(context, symbol)]))
    if state < MIN_STATE:
        state, left = append_word(state, left, words[Index(left)])
    number, state = raw_bits_to_number(symbol, state)
    if state < MIN_STATE:
        state, left = append_word(state, left, words[Index(left)])
    return symbol, number, state, left
