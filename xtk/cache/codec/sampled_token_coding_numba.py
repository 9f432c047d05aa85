"""Numba kernels that encode and decode the sampled token ids of a document; they release the GIL.

Each function has a slow, readable reference implementation in the tests. docs/reference/codec.md defines the symbols.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.cache.codec.ans_entropy_coder import (
    MIN_STATE,
    Index,
    append_number,
    append_symbol,
    append_word,
    initial_state,
    next_state,
    raw_bits_to_number,
    slot_index,
    symbol_info_index,
)
from xtk.cache.codec.entropy_coded_streams import bytes_to_words
from xtk.cache.codec.integer_coding import SPECIAL_SYMBOL
from xtk.cache.codec.logprob_decoding_numba import ID_BITS, ID_MASK, NOT_FREQUENT, ShardTables
from xtk.cache.codec.symbol_frequencies import NEXT_GAP_STATE_SHIFT
from xtk.cache.codec.symbol_probability_contexts import (
    NEXT_GAP_STATE,
    NUM_DEPTH_COUNTS,
    NUM_LEVEL_CONTEXTS,
    SAMPLED_COUNT,
    SAMPLED_DEPTH,
    SAMPLED_GAP,
)
from xtk.numba_kernel import numba_kernel


@numba_kernel
def encode_samples(
    context_offsets: NDArray[np.int64],
    num_samples: int,  # n, the sum of the counts of a position with samples
    offsets: NDArray[np.int64],  # [P + 1], of the sampled ids
    ranks: NDArray[np.int64],  # [D], ranks among the ids of the cluster, increasing within a position
    counts: NDArray[np.int64],  # [D], how often each id was sampled
    classes: NDArray[np.int64],  # [D], level contexts of the ids
    depths: NDArray[np.int64],  # [D]; empty: not stored
    out: NDArray[np.int64],  # [P + 3 D], filled
) -> int:
    """Convert one sample set of a document into records; return the number of records."""
    size = 0
    for position in range(len(offsets) - 1):
        if offsets[position] == offsets[position + 1]:
            size = append_symbol(out, size, context_offsets[SAMPLED_GAP], SPECIAL_SYMBOL)
        place, gap_state, left = 0, 0, num_samples
        for entry in range(offsets[position], offsets[position + 1]):
            size = append_number(out, size, context_offsets[SAMPLED_GAP] + gap_state, ranks[entry] - place)
            gap_state = NEXT_GAP_STATE[gap_state, out[size - 1] & 63]
            place = ranks[entry] + 1
            if left > 1:
                size = append_number(out, size, context_offsets[SAMPLED_COUNT] + gap_state, counts[entry] - 1)
            left -= counts[entry]
            if len(depths):
                context = context_offsets[SAMPLED_DEPTH] + depth_context(counts[entry], classes[entry])
                size = append_number(out, size, context, depths[entry])
    return size


@numba_kernel
def depth_context(count: int, level_context: int) -> int:
    """Return the context index for the depth of an id that was sampled `count` times."""
    return min(count - 1, NUM_DEPTH_COUNTS - 1) * NUM_LEVEL_CONTEXTS + level_context


@numba_kernel
def decode_samples(
    packed: NDArray[np.uint8],
    start_at: int,  # start of the stream in `packed`
    stop_at: int,
    tables: ShardTables,
    clusters: NDArray[np.int64],  # [P], of positions
    num_samples: int,
    entries: int,  # D, number of sampled ids
) -> tuple[Any, Any, Any, Any, bool]:
    """Decode the stream of one sample set.

    Returns:
        offsets int64 [P + 1], ids int32 [D] by rank, counts int32 [D], depths int32 [D] (empty if they are not
        stored), and whether the stream is valid.
    """
    (symbols, symbol_info), starts, order = tables.decoding_tables, tables.context_offsets, tables.ids_by_frequency
    frequent_ids, frequent_id_starts = tables.frequent_ids, tables.frequent_id_starts
    words = bytes_to_words(packed, start_at, stop_at)
    state, left = initial_state(words)
    offsets = np.zeros(len(clusters) + 1, np.int64)
    ids, counts = np.empty(entries, np.int32), np.empty(entries, np.int32)
    has_depths, level_context = starts[SAMPLED_DEPTH + 1] > starts[SAMPLED_DEPTH], np.int64(0)
    depths = np.empty(entries if has_depths else 0, np.int32)
    at = np.int64(0)
    for position in range(len(clusters)):
        first = frequent_id_starts[clusters[position]]
        listed = frequent_id_starts[clusters[position] + 1] - first
        rank, gap_state, to_come, is_gap = np.int64(0), np.int64(0), np.int64(num_samples), True
        while to_come > 0:
            context = starts[SAMPLED_GAP if is_gap else SAMPLED_COUNT] + gap_state
            symbol = np.int64(symbols[slot_index(context, state)])
            info = np.int64(symbol_info[symbol_info_index(context, symbol)])
            state = next_state(state, info)
            if state < MIN_STATE:
                state, left = append_word(state, left, words[Index(left)])
            if symbol >= SPECIAL_SYMBOL:
                if symbol == SPECIAL_SYMBOL and is_gap and to_come == num_samples:
                    break
                return offsets, ids, counts, depths, False
            number, state = raw_bits_to_number(symbol, state)
            if state < MIN_STATE:
                state, left = append_word(state, left, words[Index(left)])
            if is_gap:
                rank += number
                if at >= entries or rank - listed >= len(order):
                    return offsets, ids, counts, depths, False
                if rank < listed:
                    frequent_id = np.int64(frequent_ids[Index(first + rank)])
                else:
                    frequent_id = np.int64(order[Index(rank - listed)]) | NOT_FREQUENT
                ids[Index(at)], level_context = frequent_id & ID_MASK, frequent_id >> ID_BITS
                gap_state, is_gap = info >> NEXT_GAP_STATE_SHIFT, False
                rank += 1
                if to_come > 1:
                    continue
                number = 0
            if number >= to_come:
                return offsets, ids, counts, depths, False
            counts[Index(at)] = number + 1
            if has_depths:
                context = starts[SAMPLED_DEPTH] + depth_context(number + 1, level_context)
                symbol = np.int64(symbols[slot_index(context, state)])
                state = next_state(state, np.int64(symbol_info[symbol_info_index(context, symbol)]))
                if state < MIN_STATE:
                    state, left = append_word(state, left, words[Index(left)])
                if symbol >= SPECIAL_SYMBOL:
                    return offsets, ids, counts, depths, False
                depth, state = raw_bits_to_number(symbol, state)
                if state < MIN_STATE:
                    state, left = append_word(state, left, words[Index(left)])
                depths[Index(at)] = depth
            to_come -= number + 1
            is_gap = True
            at += 1
        offsets[position + 1] = at
    return offsets, ids, counts, depths, at == entries and state == 0 and left == 0


@numba_kernel
def append_samples(
    offsets: NDArray[np.int64],  # [P + 1], of the exact entries
    ids: NDArray[np.int32],  # [E]
    logprobs: NDArray[np.float32],  # [E]
    sampled_offsets: NDArray[np.int64],  # [P + 1]
    sampled_ids: NDArray[np.int32],  # [D]
    sample_counts: NDArray[np.int32],  # [D]
    logs: NDArray[np.float64],  # [n + 1], log(max(i, 1)) for i from 0 to n
    depths: NDArray[np.int32],  # [D]; empty: not stored
    depth_step: float,  # of the depths, nats
    tail_mass: NDArray[np.float32],  # [P], remainder mass; set to 0 where there are samples
) -> tuple[Any, Any, Any, Any]:
    """Append the sampled ids to the exact entries of their positions, with their estimated log-probabilities.

    Returns:
        offsets int64 [P + 1], ids int32 [E + D], logprobs float32 [E + D], and token_logprobs float32 [E + D], with the
        log-probabilities of the sampled ids; empty if they are not stored.
    """
    joint_ids = np.empty(len(ids) + len(sampled_ids), np.int32)
    joint_logprobs = np.empty(len(joint_ids), np.float32)
    token_logprobs = np.empty(len(joint_ids) if len(depths) == len(sampled_ids) else 0, np.float32)
    at = np.int64(0)
    for position in range(len(tail_mass)):
        for entry in range(offsets[position], offsets[position + 1]):
            joint_ids[at], joint_logprobs[at] = ids[entry], logprobs[entry]
            if len(token_logprobs):
                token_logprobs[at] = logprobs[entry]
            at += 1
        first, stop = sampled_offsets[position], sampled_offsets[position + 1]
        if first < stop:
            remainder = math.log(tail_mass[position]) if tail_mass[position] > 0 else -np.inf
            share = remainder - logs[len(logs) - 1]
            for entry in range(first, stop):
                joint_ids[at], joint_logprobs[at] = sampled_ids[entry], logs[sample_counts[entry]] + share
                if len(token_logprobs):
                    token_logprobs[at] = remainder - depths[entry] * depth_step
                at += 1
            tail_mass[position] = 0
    return offsets + sampled_offsets, joint_ids, joint_logprobs, token_logprobs
