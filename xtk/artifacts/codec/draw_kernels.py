"""Ids that were drawn, between arrays and the symbols of a stream; compiled by numba, without the GIL.

Each function has a slow, readable twin in the tests. docs/reference/codec.md tells what the symbols mean.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from xtk.artifacts.codec.coder import LOWEST, WORD_BITS, Index, after, fact_of, put, put_symbol, slot_of, start
from xtk.artifacts.codec.contexts import DRAWN_COUNT, DRAWN_GAP, NEXT_GAP_STATE
from xtk.artifacts.codec.exact_kernels import ID_MASK, Tables
from xtk.artifacts.codec.frequencies import FOLLOWING
from xtk.artifacts.codec.numbers import FIRST, RAW_BITS, SPECIAL
from xtk.artifacts.codec.streams import words_of


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def drawn_records(
    starts: NDArray[np.int64],
    draws: int,
    offsets: NDArray[np.int64],
    ranks: NDArray[np.int64],
    counts: NDArray[np.int64],
    out: NDArray[np.int64],
) -> int:
    """Turn a set of draws of a document into the records of its stream; return how many they are.

    Args:
        starts: of the families of contexts.
        draws: n, the sum of the counts of a position that has any.
        offsets: [P + 1], of the drawn ids.
        ranks: [D], rising within a position, among the ids of its kind.
        counts: [D].
        out: [P + 2 D], filled.
    """
    size = 0
    for position in range(len(offsets) - 1):
        if offsets[position] == offsets[position + 1]:
            size = put_symbol(out, size, starts[DRAWN_GAP], SPECIAL)
        place, gap_state, left = 0, 0, draws
        for entry in range(offsets[position], offsets[position + 1]):
            size = put(out, size, starts[DRAWN_GAP] + gap_state, ranks[entry] - place)
            gap_state = NEXT_GAP_STATE[gap_state, out[size - 1] & 63]
            place = ranks[entry] + 1
            if left > 1:
                size = put(out, size, starts[DRAWN_COUNT] + gap_state, counts[entry] - 1)
            left -= counts[entry]
    return size


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def read_drawn(
    packed: NDArray[np.uint8],
    start_at: int,
    stop_at: int,
    tables: Tables,
    kinds: NDArray[np.int64],
    draws: int,
    entries: int,
) -> tuple[Any, Any, Any, bool]:
    """Read the stream of a set of draws.

    Args:
        packed: the bytes of the signal.
        start_at: where the stream begins in them.
        stop_at: where it ends.
        tables: of the shard.
        kinds: [P], of positions.
        draws: n.
        entries: D, ids that were drawn.

    Returns:
        offsets int64 [P + 1], ids int32 [D], by rank, counts int32 [D], and whether the stream is whole.
    """
    (symbols, facts), starts, order = tables.slots, tables.starts, tables.order
    favourites, favourite_starts = tables.favourites, tables.favourite_starts
    words = words_of(packed, start_at, stop_at)
    state, left = start(words)
    offsets = np.zeros(len(kinds) + 1, np.int64)
    ids, counts = np.empty(entries, np.int32), np.empty(entries, np.int32)
    at = np.int64(0)
    for position in range(len(kinds)):
        first = favourite_starts[kinds[position]]
        listed = favourite_starts[kinds[position] + 1] - first
        rank, gap_state, to_come, is_gap = np.int64(0), np.int64(0), np.int64(draws), True
        while to_come > 0:
            # `take` and `take_raw`, written out: numba counts references to the arrays of a call each time.
            context = starts[DRAWN_GAP if is_gap else DRAWN_COUNT] + gap_state
            symbol = np.int64(symbols[slot_of(context, state)])
            fact = np.int64(facts[fact_of(context, symbol)])
            state = after(state, fact)
            if state < LOWEST and left > 0:
                left -= 1
                state = state << WORD_BITS | np.int64(words[Index(left)])
            if symbol >= SPECIAL:
                if symbol == SPECIAL and is_gap and to_come == draws:
                    break
                return offsets, ids, counts, False
            bits = RAW_BITS[Index(symbol)]
            number = FIRST[Index(symbol)] + (state & ((1 << bits) - 1))
            state >>= bits
            if state < LOWEST and left > 0:
                left -= 1
                state = state << WORD_BITS | np.int64(words[Index(left)])
            if is_gap:
                rank += number
                if at >= entries or rank - listed >= len(order):
                    return offsets, ids, counts, False
                if rank < listed:
                    ids[Index(at)] = favourites[Index(first + rank)] & ID_MASK
                else:
                    ids[Index(at)] = order[Index(rank - listed)]
                gap_state, is_gap = fact >> FOLLOWING, False
                rank += 1
                if to_come > 1:
                    continue
                number = 0
            if number >= to_come:
                return offsets, ids, counts, False
            counts[Index(at)] = number + 1
            to_come -= number + 1
            is_gap = True
            at += 1
        offsets[position + 1] = at
    return offsets, ids, counts, at == entries and state == 0 and left == 0


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def join_drawn(
    offsets: NDArray[np.int64],
    ids: NDArray[np.int32],
    logprobs: NDArray[np.float32],
    drawn_offsets: NDArray[np.int64],
    drawn_ids: NDArray[np.int32],
    counts: NDArray[np.int32],
    logs: NDArray[np.float64],
    tail_mass: NDArray[np.float32],
) -> tuple[Any, Any, Any]:
    """Put the ids that were drawn behind the exact ones of their positions, with the estimates that they are.

    Args:
        offsets: [P + 1], of what is exact.
        ids: [E].
        logprobs: [E].
        drawn_offsets: [P + 1].
        drawn_ids: [D].
        counts: [D].
        logs: [n + 1], of 0 to n.
        tail_mass: [P]; set to 0 where anything was drawn.

    Returns:
        Offsets int64 [P + 1], ids int32 [E + D] and logprobs float32 [E + D].
    """
    joint_ids = np.empty(len(ids) + len(drawn_ids), np.int32)
    joint_logprobs = np.empty(len(joint_ids), np.float32)
    at = np.int64(0)
    for position in range(len(tail_mass)):
        for entry in range(offsets[position], offsets[position + 1]):
            joint_ids[at], joint_logprobs[at] = ids[entry], logprobs[entry]
            at += 1
        first, stop = drawn_offsets[position], drawn_offsets[position + 1]
        if first < stop:
            share = (math.log(tail_mass[position]) if tail_mass[position] > 0 else -np.inf) - logs[len(logs) - 1]
            for entry in range(first, stop):
                joint_ids[at], joint_logprobs[at] = drawn_ids[entry], logs[counts[entry]] + share
                at += 1
            tail_mass[position] = 0
    return offsets + drawn_offsets, joint_ids, joint_logprobs
