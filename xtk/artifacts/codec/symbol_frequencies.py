"""The frequencies of symbols in their contexts, which add up to 1,024: what the entropy coder works with.

Made from counts, kept in a shard as bits, and spread out into slots for reading.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtk.artifacts.codec.integer_symbols import NUM_SYMBOLS, UNUSED_SYMBOL
from xtk.errors import CorruptError

FREQUENCY_BITS = 10
FREQUENCY_TOTAL = 1 << FREQUENCY_BITS
SYMBOL_BITS = NUM_SYMBOLS.bit_length() - 1
# Where the parts of a fact begin.
FIRST_SLOT_SHIFT, NEXT_GAP_STATE_SHIFT = FREQUENCY_BITS + 1, 2 * FREQUENCY_BITS + 1


def counts_to_frequencies(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return whole numbers in the proportions of the counts; a symbol that comes at all has at least 1.

    Args:
        counts: [contexts, SYMBOLS].

    Returns:
        int64 [contexts, SYMBOLS]; a context sums to `SCALE`, or to 0 where nothing comes.
    """
    totals = counts.sum(1)
    frequencies = np.zeros_like(counts)
    for context in np.flatnonzero(totals):
        shares, remainders = np.divmod(counts[context] * FREQUENCY_TOTAL, totals[context])
        row = np.maximum(shares, counts[context] > 0)
        left = FREQUENCY_TOTAL - int(row.sum())
        if left > 0:
            # The largest remainders first, of equal ones the lower symbol; what has none has nothing to gain.
            row[np.argsort(-remainders, kind="stable")[:left]] += 1
        for _ in range(-left):
            row[np.argmax(row)] -= 1
        frequencies[context] = row
    return frequencies


def pack_frequencies(frequencies: NDArray[np.int64]) -> bytes:
    """Return frequencies as bits, the lowest bit of a byte first.

    All numbers are in Elias' gamma code: of each context, 1 + the count of its symbols up to the last that comes, and
    1 + the frequency of each of those.
    """
    bits: list[str] = []
    for row in frequencies:
        size = int(np.flatnonzero(row)[-1]) + 1 if row.any() else 0
        for number in (size, *row[:size].tolist()):
            binary = f"{number + 1:b}"
            bits.append("0" * (len(binary) - 1) + binary)
    flat = np.frombuffer("".join(bits).encode(), np.uint8) - ord("0")
    return np.packbits(flat, bitorder="little").tobytes()


def unpack_frequencies(packed: bytes | memoryview, contexts: int) -> NDArray[np.int64]:
    """Return int64 [contexts, SYMBOLS].

    Raises:
        Damaged: these are not the frequencies of so many contexts.
    """
    bits = (np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little") + ord("0")).tobytes().decode()
    frequencies = np.zeros((contexts, NUM_SYMBOLS), np.int64)
    at = 0

    def gamma() -> int:
        nonlocal at
        one = bits.find("1", at, at + FREQUENCY_BITS + 1)
        stop = 2 * one - at + 1
        if one < 0 or stop > len(bits):
            raise CorruptError("the codec tables of this shard are corrupt: they end too soon")
        number = int(bits[one:stop], 2) - 1
        at = stop
        return number

    for row in frequencies:
        size = gamma()
        if size > NUM_SYMBOLS:
            raise CorruptError("the codec tables of this shard are corrupt: they state symbols that do not exist")
        row[:size] = [gamma() for _ in range(size)]
    sums = frequencies.sum(1)
    if ((sums != 0) & (sums != FREQUENCY_TOTAL)).any() or len(bits) - at > 7:
        raise CorruptError("the codec tables of this shard are corrupt: frequencies do not add up")
    return frequencies


class DecodingTables(NamedTuple):
    """What the decoder looks up, small enough to lie near the processor.

    Attributes:
        symbols: uint8 [contexts * SCALE]: for each context, whose symbol each of `SCALE` slots is. Where a context
            never comes, all are NOTHING.
        symbol_info: int32 [contexts * SYMBOLS], from the lowest bit on: the symbol's frequency (11 bits), its first
            slot
            (10), the state of gaps that follows it (5).
    """

    symbols: NDArray[np.uint8]
    symbol_info: NDArray[np.int32]


def make_decoding_tables(frequencies: NDArray[np.int64], next_gap_states: NDArray[np.int64]) -> DecodingTables:
    """Return frequencies as slots.

    Args:
        frequencies: [contexts, SYMBOLS].
        next_gap_states: [contexts, SYMBOLS], the state of gaps that follows each symbol.
    """
    symbols = np.full((len(frequencies), FREQUENCY_TOTAL), UNUSED_SYMBOL, np.uint8)
    facts = np.zeros((len(frequencies), NUM_SYMBOLS), np.int64)
    facts[:, UNUSED_SYMBOL] = FREQUENCY_TOTAL
    first = np.cumsum(frequencies, 1) - frequencies
    comes = frequencies > 0
    facts[comes] = (frequencies | first << FIRST_SLOT_SHIFT | next_gap_states << NEXT_GAP_STATE_SHIFT)[comes]
    for context in np.flatnonzero(comes.any(1)):
        symbols[context] = np.repeat(np.arange(NUM_SYMBOLS, dtype=np.uint8), frequencies[context])
    return DecodingTables(symbols.ravel(), facts.astype(np.int32).ravel())
