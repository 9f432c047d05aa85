"""Symbol frequencies of the ANS coder, 1,024 in total per context: quantization, storage and decoding tables."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtk.cache.codec.integer_coding import NUM_SYMBOLS, UNUSED_SYMBOL
from xtk.files.arrow_validation import corrupt_shard_error

FREQUENCY_BITS = 10
FREQUENCY_TOTAL = 1 << FREQUENCY_BITS
SYMBOL_BITS = NUM_SYMBOLS.bit_length() - 1
# Bit offsets of the fields of `DecodingTables.symbol_info`.
FIRST_SLOT_SHIFT, NEXT_GAP_STATE_SHIFT = FREQUENCY_BITS + 1, 2 * FREQUENCY_BITS + 1


def counts_to_frequencies(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return int64 [contexts, NUM_SYMBOLS], proportional to counts: at least 1 if any, sum FREQUENCY_TOTAL (or 0)."""
    totals = counts.sum(1)
    frequencies = np.zeros_like(counts)
    for context in np.flatnonzero(totals):
        shares, remainders = np.divmod(counts[context] * FREQUENCY_TOTAL, totals[context])
        row = np.maximum(shares, counts[context] > 0)
        left = FREQUENCY_TOTAL - int(row.sum())
        if left > 0:
            # Largest remainders first, ties by lower symbol; more than `left` symbols have a remainder.
            row[np.argsort(-remainders, kind="stable")[:left]] += 1
        for _ in range(-left):
            row[np.argmax(row)] -= 1
        frequencies[context] = row
    return frequencies


def pack_frequencies(frequencies: NDArray[np.int64]) -> bytes:
    """Return frequencies in Elias gamma code, the lowest bit of a byte first.

    For each context: 1 + the number of symbols up to the last that occurs, then 1 + the frequency of each of these.
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
    """Return int64 [contexts, NUM_SYMBOLS], the frequencies in `packed`."""
    bits = (np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little") + ord("0")).tobytes().decode()
    frequencies = np.zeros((contexts, NUM_SYMBOLS), np.int64)
    at = 0

    def gamma() -> int:
        nonlocal at
        one = bits.find("1", at, at + FREQUENCY_BITS + 1)
        stop = 2 * one - at + 1
        if one < 0 or stop > len(bits):
            raise corrupt_shard_error("its compression tables are truncated")
        number = int(bits[one:stop], 2) - 1
        at = stop
        return number

    for row in frequencies:
        size = gamma()
        if size > NUM_SYMBOLS:
            raise corrupt_shard_error("its compression tables are invalid (number of symbols)")
        row[:size] = [gamma() for _ in range(size)]
    sums = frequencies.sum(1)
    if ((sums != 0) & (sums != FREQUENCY_TOTAL)).any() or len(bits) - at > 7:
        raise corrupt_shard_error("its compression tables are invalid (sum of frequencies)")
    return frequencies


class DecodingTables(NamedTuple):
    """Lookup tables of the decoder, small enough for the processor's cache."""

    # [contexts * FREQUENCY_TOTAL], the symbol of each slot; UNUSED_SYMBOL in contexts that never occur.
    symbols: NDArray[np.uint8]
    # [contexts * NUM_SYMBOLS], from the lowest bit: frequency (11 bits), first slot (10), next gap state (5).
    symbol_info: NDArray[np.int32]


def make_decoding_tables(
    frequencies: NDArray[np.int64],  # [contexts, NUM_SYMBOLS]
    next_gap_states: NDArray[np.int64],  # [contexts, NUM_SYMBOLS], the gap state after each symbol
) -> DecodingTables:
    """Return the decoding tables for some frequencies."""
    symbols = np.full((len(frequencies), FREQUENCY_TOTAL), UNUSED_SYMBOL, np.uint8)
    symbol_info = np.zeros((len(frequencies), NUM_SYMBOLS), np.int64)
    symbol_info[:, UNUSED_SYMBOL] = FREQUENCY_TOTAL
    first = np.cumsum(frequencies, 1) - frequencies
    comes = frequencies > 0
    symbol_info[comes] = (frequencies | first << FIRST_SLOT_SHIFT | next_gap_states << NEXT_GAP_STATE_SHIFT)[comes]
    for context in np.flatnonzero(comes.any(1)):
        symbols[context] = np.repeat(np.arange(NUM_SYMBOLS, dtype=np.uint8), frequencies[context])
    return DecodingTables(symbols.ravel(), symbol_info.astype(np.int32).ravel())
