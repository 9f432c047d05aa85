"""Numba kernels that decode the exact log-probabilities of a document; they release the GIL.

Each function has a slow, readable reference implementation in the tests. docs/reference/codec.md defines the symbols.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtk.cache.codec.ans_entropy_coder import (
    MIN_STATE,
    Index,
    append_word,
    initial_state,
    next_state,
    raw_bits_to_number,
    slot_index,
    symbol_info_index,
)
from xtk.cache.codec.entropy_coded_streams import bytes_to_words
from xtk.cache.codec.integer_coding import NUM_DIRECT_SYMBOLS, SPECIAL_SYMBOL, UNUSED_SYMBOL
from xtk.cache.codec.quantization_levels import LEVEL_PADDING, NUM_LEVELS
from xtk.cache.codec.symbol_frequencies import NEXT_GAP_STATE_SHIFT, DecodingTables
from xtk.cache.codec.symbol_probability_contexts import (
    CLUSTER,
    COUNT,
    ENTROPY,
    FLOOR,
    GAP,
    LEVEL,
    NUM_LEVEL_CONTEXTS,
    NUM_ODDS_CONTEXTS,
    NUM_TAIL_CONTEXTS,
    OBSERVED_ODDS,
    TAIL,
)
from xtk.numba_kernel import numba_kernel

ONE = Index(1)
ID_BITS = 20
ID_MASK = (1 << ID_BITS) - 1
NOT_FREQUENT = NUM_LEVEL_CONTEXTS - 1 << ID_BITS  # level context of an id that is not frequent
CERTAIN_ODDS, IMPOSSIBLE_ODDS = 1 << 40, -(1 << 40)  # of an observed token of probability 1 and 0
NO_FLOOR = -1

# Fields of a position, in the order of the stream.
CLUSTER_FIELD, ODDS_FIELD, COUNT_FIELD, FLOOR_FIELD, TAIL_FIELD, ENTROPY_FIELD = range(6)
NUM_FIELDS = 6


class ShardTables(NamedTuple):
    """Decoding tables that all documents of a shard share."""

    decoding_tables: DecodingTables  # of all contexts
    context_offsets: NDArray[np.int64]  # [families + 1], the first context of each family
    frequent_ids: NDArray[np.int32]  # [F], of all clusters: id, and level context above ID_BITS
    frequent_id_starts: NDArray[np.int64]  # [C + 1], offsets of the clusters in `frequent_ids`
    ids_by_frequency: NDArray[np.int32]  # [U], ids by frequency rank


# ----------------------------------------------------------------------------------------------- the observed token


@numba_kernel
def odds_to_logprobs(odds: int, step: float) -> tuple[float, float]:
    """Return the log-probabilities of the observed token and of all other tokens together."""
    if odds == CERTAIN_ODDS:
        return 0.0, -np.inf
    if odds == IMPOSSIBLE_ODDS:
        return -np.inf, 0.0
    logarithm = odds * step
    if logarithm >= 0:
        own = -math.log1p(math.exp(-logarithm))
        return own, own - logarithm
    others = -math.log1p(math.exp(logarithm))
    return others + logarithm, others


@numba_kernel
def decode_odds(number: int) -> int:
    """Return the odds for a decoded number, or for the negative of a special symbol."""
    if number >= 0:
        return number >> 1 ^ -(number & 1)
    return CERTAIN_ODDS if number == -UNUSED_SYMBOL else IMPOSSIBLE_ODDS


@numba_kernel
def odds_context(odds: int, per_nat: int) -> int:
    """Return the context index for the odds of the observed token: the log-odds in whole nats, clipped."""
    if odds == CERTAIN_ODDS:
        return NUM_ODDS_CONTEXTS - 1
    if odds == IMPOSSIBLE_ODDS:
        return 0
    return min(max((odds + per_nat // 2) // per_nat + NUM_ODDS_CONTEXTS // 2, 0), NUM_ODDS_CONTEXTS - 1)


# --------------------------------------------------------------------------------- shared by encoding and decoding


@numba_kernel
def renormalize_position(
    others: float,  # log of (1 - probability of the observed token)
    mass: float,  # sum of the quantized probabilities of the entries
    products: float,  # sum of probability times log-probability of the entries, quantized
    tail: float,
    tail_product: float,  # `tail` times its logarithm
) -> tuple[float, float, float]:
    """Return the correction that makes a position's entries and remainder sum to 1 minus the observed probability.

    Returns:
        The shift of each log-probability, the corrected remainder mass, and the entropy term of the entries and of
        the remainder as one outcome.
    """
    total = mass + tail
    shift = 0.0
    if total > 0 and others > -np.inf:
        shift = others - math.log(total)
    scale = math.exp(shift)
    return shift, scale * tail, -scale * (products + tail_product + shift * total)


@numba_kernel
def tail_context(level: int) -> int:
    """Return the context index for a level of the remainder mass, or for a floor."""
    return min(level // 2, NUM_TAIL_CONTEXTS - 1)


@numba_kernel
def entropy_term(logprob: float) -> float:
    """Return -p log p of one token."""
    return -logprob * math.exp(logprob) if logprob > -np.inf else 0.0


# --------------------------------------------------------------------------------------------------------- decoding


@numba_kernel
def decode_positions(
    words: NDArray[np.uint32],
    tables: ShardTables,
    per_nat: int,
    most: int,  # E, maximum number of entries, including observed tokens
    offsets: NDArray[np.int64],  # [P + 1], filled; the first entry of each position is the observed token's
    fields: NDArray[np.int64],  # [NUM_FIELDS, P], filled
) -> Any:
    """Decode the first stream of a document, the fields of its positions, and return whether it is valid."""
    (symbols, symbol_info), starts = tables.decoding_tables, tables.context_offsets
    state, left = initial_state(words)
    cluster = np.int64(0)
    for position in range(len(offsets) - 1):
        field, context, chance = CLUSTER_FIELD, starts[CLUSTER] + cluster, 0
        fields[FLOOR_FIELD, position], fields[TAIL_FIELD, position] = NO_FLOOR, NUM_LEVELS
        while field < NUM_FIELDS:
            symbol = np.int64(symbols[slot_index(context, state)])
            info = np.int64(symbol_info[symbol_info_index(context, symbol)])
            state = next_state(state, info)
            if state < MIN_STATE:
                state, left = append_word(state, left, words[Index(left)])
            number: Any = symbol
            if symbol >= NUM_DIRECT_SYMBOLS and field > CLUSTER_FIELD:
                number, state = raw_bits_to_number(symbol, state)
                if state < MIN_STATE:
                    state, left = append_word(state, left, words[Index(left)])
                if symbol >= SPECIAL_SYMBOL:
                    number = -symbol
            following = field + 1
            if field == CLUSTER_FIELD:
                if number >= starts[CLUSTER + 1]:
                    return False
                cluster, context = number, starts[OBSERVED_ODDS]
            elif field == ODDS_FIELD:
                number = decode_odds(number)
                chance = odds_context(number, per_nat)
                context = starts[COUNT] + chance
            elif field == COUNT_FIELD:
                if number < 0 or number >= most - offsets[position]:
                    return False
                offsets[position + 1] = offsets[position] + 1 + number
                context = starts[FLOOR] + cluster
                if number == 0:
                    following, context = ENTROPY_FIELD, starts[ENTROPY] + chance
            elif field == ENTROPY_FIELD:
                if number < 0:
                    return False
            else:
                if number == -UNUSED_SYMBOL or number >= NUM_LEVELS:
                    return False
                if field == FLOOR_FIELD:
                    context = starts[TAIL] + tail_context(max(number, 0))
                    number = max(number, NO_FLOOR)
                else:
                    number = number if number >= 0 else NUM_LEVELS
                    context = starts[ENTROPY] + NUM_ODDS_CONTEXTS + tail_context(number)
            fields[field, position] = number
            field = following
    return state == 0 and left == 0


@numba_kernel
def decode_entries(
    words: NDArray[np.uint32],  # the second stream: ids
    level_words: NDArray[np.uint32],  # the third stream: levels
    tables: ShardTables,
    grid: NDArray[np.float64],  # [3, LEVEL_TABLE_SIZE]: log-probability, probability, and their product, of each level
    values: NDArray[np.float32],  # [LEVEL_TABLE_SIZE], the log-probabilities as float32
    offsets: NDArray[np.int64],  # [P + 1]; the first entry of each position is the observed token's
    clusters: NDArray[np.int64],  # [P]
    floors: NDArray[np.int64],  # [P]
    ids: NDArray[np.int32],  # [E], filled except for observed tokens
    logprobs: NDArray[np.float32],  # [E], filled likewise, not yet renormalized
    sums: NDArray[np.float64],  # [2, P], filled: sums of p and of p log p of these entries
) -> Any:
    """Decode the second and third stream of a document, ids and levels, and return whether they are valid."""
    frequent_ids, frequent_id_starts, order = tables.frequent_ids, tables.frequent_id_starts, tables.ids_by_frequency
    symbols, symbol_info = tables.decoding_tables
    probs, products = grid[1], grid[2]
    gaps, classes, known = tables.context_offsets[GAP], tables.context_offsets[LEVEL], len(order)
    state, left = initial_state(words)
    level_state, level_left = initial_state(level_words)
    for position in range(len(clusters)):
        first, base = frequent_id_starts[clusters[position]], floors[position] + LEVEL_PADDING
        listed = frequent_id_starts[clusters[position] + 1] - first
        at, stop = Index(offsets[position] + 1), Index(offsets[position + 1])
        context, rank, mass, product = gaps, np.int64(0), 0.0, 0.0
        while at < stop:
            symbol = np.int64(symbols[slot_index(context, state)])
            info = np.int64(symbol_info[symbol_info_index(context, symbol)])
            state = next_state(state, info)
            if state < MIN_STATE:
                state, left = append_word(state, left, words[Index(left)])
            context, number = gaps + (info >> NEXT_GAP_STATE_SHIFT), symbol
            if symbol >= NUM_DIRECT_SYMBOLS:
                number, state = raw_bits_to_number(symbol, state)
                if state < MIN_STATE:
                    state, left = append_word(state, left, words[Index(left)])
            rank += number
            if rank < listed:
                frequent_id = np.int64(frequent_ids[Index(first + rank)])
            elif rank - listed < known and symbol < SPECIAL_SYMBOL:
                frequent_id = np.int64(order[Index(rank - listed)]) | NOT_FREQUENT
            else:
                return False
            rank += 1
            ids[at] = frequent_id & ID_MASK
            of_level = classes + (frequent_id >> ID_BITS)
            symbol = np.int64(symbols[slot_index(of_level, level_state)])
            level_state = next_state(level_state, np.int64(symbol_info[symbol_info_index(of_level, symbol)]))
            if level_state < MIN_STATE:
                level_state, level_left = append_word(level_state, level_left, level_words[Index(level_left)])
            level = base - symbol
            if symbol >= NUM_DIRECT_SYMBOLS:
                number, level_state = raw_bits_to_number(symbol, level_state)
                level = max(base - number, 0)
                if level_state < MIN_STATE:
                    level_state, level_left = append_word(level_state, level_left, level_words[Index(level_left)])
                if symbol >= SPECIAL_SYMBOL:
                    level = LEVEL_PADDING + NUM_LEVELS if symbol == SPECIAL_SYMBOL else 0
            logprobs[at] = values[Index(level)]
            mass += probs[Index(level)]
            product += products[Index(level)]
            at += ONE
        if not mass >= 0:
            return False
        sums[0, position], sums[1, position] = mass, product
    return state == 0 and left == 0 and level_state == 0 and level_left == 0


@numba_kernel
def complete_positions(
    observed_ids: NDArray[np.int32],  # [P]
    offsets: NDArray[np.int64],  # [P + 1]
    fields: NDArray[np.int64],  # [NUM_FIELDS, P], from `decode_positions`
    sums: NDArray[np.float64],  # [2, P], from `decode_entries`
    grid: NDArray[np.float64],  # [3, LEVEL_TABLE_SIZE]
    steps: tuple[float, float, int],  # odds step and entropy step in nats, and the number of odds steps per nat
    ids: NDArray[np.int32],  # [E], completed
    logprobs: NDArray[np.float32],  # [E], completed and renormalized
    of_positions: NDArray[np.float32],  # [3, P], filled: remainder mass, log-probability of the observed token, entropy
) -> None:
    """Fill in the observed tokens, and renormalize the probabilities of each position to sum to 1."""
    odds_step, entropy_step, _ = steps
    for position in range(len(observed_ids)):
        own, others = odds_to_logprobs(fields[ODDS_FIELD, position], odds_step)
        at, number = offsets[position], fields[ENTROPY_FIELD, position]
        ids[at], logprobs[at] = observed_ids[position], own
        of_positions[1, position] = own
        if offsets[position + 1] == at + 1:
            of_positions[0, position], of_positions[2, position] = math.exp(others), number * entropy_step
            continue
        tail = LEVEL_PADDING + fields[TAIL_FIELD, position]
        shift, mass, entropy = renormalize_position(
            others, sums[0, position], sums[1, position], grid[1, tail], grid[2, tail]
        )
        rest = (number >> 1 ^ -(number & 1)) * entropy_step
        of_positions[0, position], of_positions[2, position] = mass, entropy + entropy_term(own) + rest
        entry, stop, small = Index(at + 1), Index(offsets[position + 1]), np.float32(shift)
        while entry < stop:
            logprobs[entry] += small
            entry += ONE


@numba_kernel
def decode_logprobs(
    packed: NDArray[np.uint8],
    bounds: NDArray[np.int64],  # start of each stream and end of the last one; the first three streams are decoded
    tables: ShardTables,
    grid: NDArray[np.float64],  # [3, LEVEL_TABLE_SIZE]
    values: NDArray[np.float32],  # [LEVEL_TABLE_SIZE]
    steps: tuple[float, float, int],  # odds step and entropy step in nats, and the number of odds steps per nat
    observed_ids: NDArray[np.int32],  # [P]
    entries: int,  # E, including observed tokens
) -> tuple[Any, Any, Any, Any, Any, bool]:
    """Decode the exact entries of a document, with the three functions above.

    Returns:
        offsets int64 [P + 1], ids int32 [E], logprobs float32 [E], clusters int64 [P]; float32 [3, P]: remainder
        mass, log-probability of the observed token, entropy; and whether the streams are valid. If not, the arrays
        are meaningless.
    """
    size = len(observed_ids)
    offsets, fields = np.zeros(size + 1, np.int64), np.empty((NUM_FIELDS, size), np.int64)
    ids, logprobs = np.empty(entries, np.int32), np.empty(entries, np.float32)
    sums, of_positions = np.empty((2, size), np.float64), np.empty((3, size), np.float32)
    of_position, of_ids = bytes_to_words(packed, bounds[0], bounds[1]), bytes_to_words(packed, bounds[1], bounds[2])
    of_levels = bytes_to_words(packed, bounds[2], bounds[3])
    whole = decode_positions(of_position, tables, steps[2], entries, offsets, fields) and offsets[size] == entries
    whole = whole and decode_entries(
        of_ids,
        of_levels,
        tables,
        grid,
        values,
        offsets,
        fields[CLUSTER_FIELD],
        fields[FLOOR_FIELD],
        ids,
        logprobs,
        sums,
    )
    if whole:
        complete_positions(observed_ids, offsets, fields, sums, grid, steps, ids, logprobs, of_positions)
    return offsets, ids, logprobs, fields[CLUSTER_FIELD], of_positions, whole
