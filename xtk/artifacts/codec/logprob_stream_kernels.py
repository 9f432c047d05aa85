"""What is exact of a signal, between arrays and the symbols of its streams; compiled by numba, without the GIL.

Each function has a slow, readable twin in the tests. docs/reference/codec.md tells what the symbols mean.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from xtk.artifacts.codec.ans_coder import (
    MIN_STATE,
    WORD_BITS,
    Index,
    append_number,
    append_symbol,
    initial_state,
    next_state,
    slot_index,
    symbol_info_index,
)
from xtk.artifacts.codec.ans_streams import bytes_to_words
from xtk.artifacts.codec.coding_contexts import (
    CLUSTER,
    COUNT,
    ENTROPY,
    FLOOR,
    GAP,
    LEVEL,
    NEXT_GAP_STATE,
    NUM_LEVEL_CONTEXTS,
    NUM_ODDS_CONTEXTS,
    NUM_TAIL_CONTEXTS,
    OBSERVED_ODDS,
    TAIL,
)
from xtk.artifacts.codec.integer_symbols import (
    FIRST_NUMBER,
    NUM_DIRECT_SYMBOLS,
    RAW_BITS,
    SPECIAL_SYMBOL,
    UNUSED_SYMBOL,
)
from xtk.artifacts.codec.quantization_levels import LEVEL_PADDING, NUM_LEVELS
from xtk.artifacts.codec.symbol_frequencies import NEXT_GAP_STATE_SHIFT, DecodingTables

ONE = Index(1)
ID_BITS = 20
ID_MASK = (1 << ID_BITS) - 1
NOT_FREQUENT = NUM_LEVEL_CONTEXTS - 1 << ID_BITS  # beside an id that is no favourite
CERTAIN_ODDS, IMPOSSIBLE_ODDS = 1 << 40, -(1 << 40)  # of a realised token of probability 1 and 0
NO_FLOOR = -1

# What is told of a position, in this order.
CLUSTER_FIELD, ODDS_FIELD, COUNT_FIELD, FLOOR_FIELD, TAIL_FIELD, ENTROPY_FIELD = range(6)
NUM_FIELDS = 6


class ShardTables(NamedTuple):
    """What the documents of a shard share.

    Attributes:
        decoding_tables: of all contexts.
        context_offsets: int64 [families + 1], the first context of each family.
        frequent_ids: int32 [F], of all kinds, one after the other: id, and above ID_BITS the class of its levels.
        frequent_id_starts: int64 [C + 1], where those of each kind begin.
        ids_by_frequency: int32 [U], ids by rank.
    """

    decoding_tables: DecodingTables
    context_offsets: NDArray[np.int64]
    frequent_ids: NDArray[np.int32]
    frequent_id_starts: NDArray[np.int64]
    ids_by_frequency: NDArray[np.int32]


# ----------------------------------------------------------------------------------------------- the realised token


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def odds_to_logprobs(odds: int, step: float) -> tuple[float, float]:
    """Return the log-probability of the realised token, and that of all others together."""
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


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def decode_odds(number: int) -> int:
    """Return the odds that were read as a number, or as a symbol's negative."""
    if number >= 0:
        return number >> 1 ^ -(number & 1)
    return CERTAIN_ODDS if number == -UNUSED_SYMBOL else IMPOSSIBLE_ODDS


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def odds_context(odds: int, per_nat: int) -> int:
    """Return the context of what depends on how likely the realised token is: its odds in whole nats."""
    if odds == CERTAIN_ODDS:
        return NUM_ODDS_CONTEXTS - 1
    if odds == IMPOSSIBLE_ODDS:
        return 0
    return min(max((odds + per_nat // 2) // per_nat + NUM_ODDS_CONTEXTS // 2, 0), NUM_ODDS_CONTEXTS - 1)


# --------------------------------------------------------------------------------------------------- what both need


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def renormalize_position(
    others: float, mass: float, products: float, tail: float, tail_product: float
) -> tuple[float, float, float]:
    """Make the entries of a position and its tail add up to what the realised token leaves.

    Args:
        others: the logarithm of what the realised token leaves.
        mass: the sum of the entries' probabilities, as their levels tell them.
        products: the sum of those times their logarithms.
        tail: the mass outside, as its level tells it.
        tail_product: that times its logarithm.

    Returns:
        What is to be added to each log-probability, the tail's mass, and what entries and tail, taken as one, add to
        the entropy.
    """
    total = mass + tail
    shift = 0.0
    if total > 0 and others > -np.inf:
        shift = others - math.log(total)
    scale = math.exp(shift)
    return shift, scale * tail, -scale * (products + tail_product + shift * total)


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def tail_context(level: int) -> int:
    """Return the context of what depends on the mass outside."""
    return min(level // 2, NUM_TAIL_CONTEXTS - 1)


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def entropy_term(logprob: float) -> float:
    """Return what one token adds to the entropy."""
    return -logprob * math.exp(logprob) if logprob > -np.inf else 0.0


# ---------------------------------------------------------------------------------------------------------- writing


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def append_odds(records: NDArray[np.int64], size: int, context: int, odds: int) -> Any:
    """Add odds to records, and return how many there are then."""
    if odds == CERTAIN_ODDS:
        return append_symbol(records, size, context, UNUSED_SYMBOL)
    return append_number_or_special(
        records, size, context, 2 * odds if odds >= 0 else -2 * odds - 1, odds == IMPOSSIBLE_ODDS
    )


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def append_number_or_special(records: NDArray[np.int64], size: int, context: int, number: int, special: bool) -> Any:
    """Add a number, or SPECIAL in its place, to records, and return how many there are then."""
    return (
        append_symbol(records, size, context, SPECIAL_SYMBOL)
        if special
        else append_number(records, size, context, number)
    )


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def encode_positions(
    starts: NDArray[np.int64],
    kinds: NDArray[np.int64],
    odds: NDArray[np.int64],
    entropies: NDArray[np.float64],
    tails: NDArray[np.int64],
    offsets: NDArray[np.int64],
    levels: NDArray[np.int64],
    grid: NDArray[np.float64],
    steps: tuple[float, float, int],
    floors: NDArray[np.int64],
    out: NDArray[np.int64],
) -> int:
    """Turn what stands before the entries of a document's positions into records; return how many they are.

    Args:
        starts: of the families of contexts.
        kinds: [P], of positions.
        odds: [P], of the realised tokens, in steps; or CERTAIN_ODDS, IMPOSSIBLE_ODDS.
        entropies: [P], nats.
        tails: [P], levels of the mass outside; LEVEL_COUNT: none.
        offsets: [P + 1] of the entries, those of realised tokens left out.
        levels: [E].
        grid: [3, PLACES]: log-probability, probability, and their product, of each level.
        steps: of odds, of entropy; how many of odds are a nat.
        floors: [P], filled: the lowest finite level of the entries of each; -1: none.
        out: [6 P], filled.
    """
    odds_step, entropy_step, per_nat = steps
    kind = size = 0
    for position in range(len(kinds)):
        size = append_symbol(out, size, starts[CLUSTER] + kind, kinds[position])
        kind = kinds[position]
        chance = odds_context(odds[position], per_nat)
        size = append_odds(out, size, starts[OBSERVED_ODDS], odds[position])
        first, stop = offsets[position], offsets[position + 1]
        size = append_number(out, size, starts[COUNT] + chance, stop - first)
        if first == stop:
            floors[position] = NO_FLOOR
            size = append_number(out, size, starts[ENTROPY] + chance, round(entropies[position] / entropy_step))
            continue
        floor, tail = NO_FLOOR, tails[position]
        mass = products = 0.0
        for entry in range(first, stop):
            mass += grid[1, LEVEL_PADDING + levels[entry]]
            products += grid[2, LEVEL_PADDING + levels[entry]]
            if levels[entry] < NUM_LEVELS:
                floor = max(floor, levels[entry])
        floors[position] = floor
        own, others = odds_to_logprobs(odds[position], odds_step)
        _, _, entropy = renormalize_position(
            others, mass, products, grid[1, LEVEL_PADDING + tail], grid[2, LEVEL_PADDING + tail]
        )
        size = append_number_or_special(out, size, starts[FLOOR] + kind, floor, floor < 0)
        size = append_number_or_special(out, size, starts[TAIL] + tail_context(max(floor, 0)), tail, tail == NUM_LEVELS)
        rest = round((entropies[position] - entropy - entropy_term(own)) / entropy_step)
        context = starts[ENTROPY] + NUM_ODDS_CONTEXTS + tail_context(tail)
        size = append_number(out, size, context, 2 * rest if rest >= 0 else -2 * rest - 1)
    return size


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def encode_entries(
    starts: NDArray[np.int64],
    offsets: NDArray[np.int64],
    floors: NDArray[np.int64],
    ranks: NDArray[np.int64],
    classes: NDArray[np.int64],
    levels: NDArray[np.int64],
    ids_out: NDArray[np.int64],
    levels_out: NDArray[np.int64],
) -> None:
    """Turn the entries of a document into records: of their ids, and of their levels.

    Args:
        starts: of the families of contexts.
        offsets: [P + 1].
        floors: [P].
        ranks: [E], rising within a position, among the ids of its kind.
        classes: [E], of ids, the contexts of their levels.
        levels: [E].
        ids_out: [E], filled.
        levels_out: [E], filled.
    """
    for position in range(len(floors)):
        place = gap_state = 0
        for entry in range(offsets[position], offsets[position + 1]):
            append_number(ids_out, entry, starts[GAP] + gap_state, ranks[entry] - place)
            gap_state = NEXT_GAP_STATE[gap_state, ids_out[entry] & 63]
            place = ranks[entry] + 1
            level = levels[entry]
            context = starts[LEVEL] + classes[entry]
            append_number_or_special(levels_out, entry, context, floors[position] - level, level == NUM_LEVELS)


# ---------------------------------------------------------------------------------------------------------- reading


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def decode_positions(
    words: NDArray[np.uint32],
    tables: ShardTables,
    per_nat: int,
    most: int,
    offsets: NDArray[np.int64],
    found: NDArray[np.int64],
) -> Any:
    """Read the first stream of a document, and say whether it is whole.

    Args:
        words: the stream.
        tables: of the shard.
        per_nat: steps of odds.
        most: E, how many entries there can be, realised tokens among them.
        offsets: [P + 1], filled, with a place for the realised token in front of the entries of each position.
        found: [FIELDS, P], filled.
    """
    (symbols, facts), starts = tables.decoding_tables, tables.context_offsets
    state, left = initial_state(words)
    kind = np.int64(0)
    for position in range(len(offsets) - 1):
        field, context, chance = CLUSTER_FIELD, starts[CLUSTER] + kind, 0
        found[FLOOR_FIELD, position], found[TAIL_FIELD, position] = NO_FLOOR, NUM_LEVELS
        while field < NUM_FIELDS:
            # `take` and `decode_raw_bits`, written out: numba counts references to the arrays of a call each time.
            symbol = np.int64(symbols[slot_index(context, state)])
            fact = np.int64(facts[symbol_info_index(context, symbol)])
            state = next_state(state, fact)
            if state < MIN_STATE and left > 0:
                left -= 1
                state = state << WORD_BITS | np.int64(words[Index(left)])
            number: Any = symbol
            if symbol >= NUM_DIRECT_SYMBOLS and field > CLUSTER_FIELD:
                bits = RAW_BITS[Index(symbol)]
                number = (
                    -symbol if symbol >= SPECIAL_SYMBOL else FIRST_NUMBER[Index(symbol)] + (state & ((1 << bits) - 1))
                )
                state >>= bits
                if state < MIN_STATE and left > 0:
                    left -= 1
                    state = state << WORD_BITS | np.int64(words[Index(left)])
            following = field + 1
            if field == CLUSTER_FIELD:
                if number >= starts[CLUSTER + 1]:
                    return False
                kind, context = number, starts[OBSERVED_ODDS]
            elif field == ODDS_FIELD:
                number = decode_odds(number)
                chance = odds_context(number, per_nat)
                context = starts[COUNT] + chance
            elif field == COUNT_FIELD:
                if number < 0 or number >= most - offsets[position]:
                    return False
                offsets[position + 1] = offsets[position] + 1 + number
                context = starts[FLOOR] + kind
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
            found[field, position] = number
            field = following
    return state == 0 and left == 0


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def decode_entries(
    words: NDArray[np.uint32],
    level_words: NDArray[np.uint32],
    tables: ShardTables,
    grid: NDArray[np.float64],
    values: NDArray[np.float32],
    offsets: NDArray[np.int64],
    kinds: NDArray[np.int64],
    floors: NDArray[np.int64],
    ids: NDArray[np.int32],
    logprobs: NDArray[np.float32],
    sums: NDArray[np.float64],
) -> Any:
    """Read the second and the third stream of a document, and say whether they are whole.

    Here is where the time goes, so that `take` and `decode_number` are written out: numba counts references to the
    arrays of a call each time that it is made.

    Args:
        words: the second stream, in words.
        level_words: the third.
        tables: of the shard.
        grid: [3, PLACES]: log-probability, probability, and their product, of each level.
        values: [PLACES], log-probabilities again.
        offsets: [P + 1], with a place for the realised token in front of the entries of each position.
        kinds: [P].
        floors: [P].
        ids: [E], filled but for realised tokens.
        logprobs: [E], likewise, as levels tell them.
        sums: [2, P], filled: of their probabilities, and of those times their logarithms.
    """
    favourites, favourite_starts, order = tables.frequent_ids, tables.frequent_id_starts, tables.ids_by_frequency
    symbols, facts = tables.decoding_tables
    probs, products = grid[1], grid[2]
    gaps, classes, known = tables.context_offsets[GAP], tables.context_offsets[LEVEL], len(order)
    state, left = initial_state(words)
    level_state, level_left = initial_state(level_words)
    for position in range(len(kinds)):
        first, base = favourite_starts[kinds[position]], floors[position] + LEVEL_PADDING
        listed = favourite_starts[kinds[position] + 1] - first
        at, stop = Index(offsets[position] + 1), Index(offsets[position + 1])
        context, rank, mass, product = gaps, np.int64(0), 0.0, 0.0
        while at < stop:
            symbol = np.int64(symbols[slot_index(context, state)])
            fact = np.int64(facts[symbol_info_index(context, symbol)])
            state = next_state(state, fact)
            if state < MIN_STATE and left > 0:
                left -= 1
                state = state << WORD_BITS | np.int64(words[Index(left)])
            context = gaps + (fact >> NEXT_GAP_STATE_SHIFT)
            if symbol < NUM_DIRECT_SYMBOLS:
                rank += symbol
            else:
                bits = RAW_BITS[Index(symbol)]
                rank += FIRST_NUMBER[Index(symbol)] + (state & ((1 << bits) - 1))
                state >>= bits
                if state < MIN_STATE and left > 0:
                    left -= 1
                    state = state << WORD_BITS | np.int64(words[Index(left)])
            if rank < listed:
                favourite = np.int64(favourites[Index(first + rank)])
            elif rank - listed < known and symbol < SPECIAL_SYMBOL:
                favourite = np.int64(order[Index(rank - listed)]) | NOT_FREQUENT
            else:
                return False
            rank += 1
            ids[at] = favourite & ID_MASK
            of_level = classes + (favourite >> ID_BITS)
            symbol = np.int64(symbols[slot_index(of_level, level_state)])
            level_state = next_state(level_state, np.int64(facts[symbol_info_index(of_level, symbol)]))
            if level_state < MIN_STATE and level_left > 0:
                level_left -= 1
                level_state = level_state << WORD_BITS | np.int64(level_words[Index(level_left)])
            level = base - symbol
            if symbol >= NUM_DIRECT_SYMBOLS:
                bits = RAW_BITS[Index(symbol)]
                level = max(base - FIRST_NUMBER[Index(symbol)] - (level_state & ((1 << bits) - 1)), 0)
                level_state >>= bits
                if level_state < MIN_STATE and level_left > 0:
                    level_left -= 1
                    level_state = level_state << WORD_BITS | np.int64(level_words[Index(level_left)])
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


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def complete_positions(
    observed_ids: NDArray[np.int32],
    offsets: NDArray[np.int64],
    found: NDArray[np.int64],
    sums: NDArray[np.float64],
    grid: NDArray[np.float64],
    steps: tuple[float, float, int],
    ids: NDArray[np.int32],
    logprobs: NDArray[np.float32],
    of_positions: NDArray[np.float32],
) -> None:
    """Put the realised tokens in their places, and make the probabilities of each position add up to 1.

    Args:
        observed_ids: [P].
        offsets: [P + 1].
        found: [FIELDS, P], of `decode_positions`.
        sums: [2, P], of `decode_entries`.
        grid: [3, PLACES].
        steps: of odds, of entropy; how many of odds are a nat.
        ids: [E], completed.
        logprobs: [E], completed and changed.
        of_positions: [3, P], filled: tail mass, log-probability of the realised token, entropy.
    """
    odds_step, entropy_step, _ = steps
    for position in range(len(observed_ids)):
        own, others = odds_to_logprobs(found[ODDS_FIELD, position], odds_step)
        at, number = offsets[position], found[ENTROPY_FIELD, position]
        ids[at], logprobs[at] = observed_ids[position], own
        of_positions[1, position] = own
        if offsets[position + 1] == at + 1:
            of_positions[0, position], of_positions[2, position] = math.exp(others), number * entropy_step
            continue
        tail = LEVEL_PADDING + found[TAIL_FIELD, position]
        shift, mass, entropy = renormalize_position(
            others, sums[0, position], sums[1, position], grid[1, tail], grid[2, tail]
        )
        rest = (number >> 1 ^ -(number & 1)) * entropy_step
        of_positions[0, position], of_positions[2, position] = mass, entropy + entropy_term(own) + rest
        entry, stop, small = Index(at + 1), Index(offsets[position + 1]), np.float32(shift)
        while entry < stop:
            logprobs[entry] += small
            entry += ONE


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def decode_logprobs(
    packed: NDArray[np.uint8],
    bounds: NDArray[np.int64],
    tables: ShardTables,
    grid: NDArray[np.float64],
    values: NDArray[np.float32],
    steps: tuple[float, float, int],
    observed_ids: NDArray[np.int32],
    entries: int,
) -> tuple[Any, Any, Any, Any, Any, bool]:
    """Read what is exact of a document: the three functions above, one after the other.

    Args:
        packed: the bytes of the signal.
        bounds: where its streams begin, one after the other, and the last one ends; the first three are read.
        tables: of the shard.
        grid: [3, PLACES].
        values: [PLACES].
        steps: of odds, of entropy; how many of odds are a nat.
        observed_ids: [P].
        entries: E, realised tokens among them.

    Returns:
        offsets int64 [P + 1], ids int32 [E], logprobs float32 [E], kinds int64 [P]; float32 [3, P]: tail mass,
        log-probability of the realised token, entropy; and whether the streams are whole: the arrays mean nothing
        otherwise.
    """
    size = len(observed_ids)
    offsets, found = np.zeros(size + 1, np.int64), np.empty((NUM_FIELDS, size), np.int64)
    ids, logprobs = np.empty(entries, np.int32), np.empty(entries, np.float32)
    sums, of_positions = np.empty((2, size), np.float64), np.empty((3, size), np.float32)
    of_position, of_ids = bytes_to_words(packed, bounds[0], bounds[1]), bytes_to_words(packed, bounds[1], bounds[2])
    of_levels = bytes_to_words(packed, bounds[2], bounds[3])
    whole = decode_positions(of_position, tables, steps[2], entries, offsets, found) and offsets[size] == entries
    whole = whole and decode_entries(
        of_ids, of_levels, tables, grid, values, offsets, found[CLUSTER_FIELD], found[FLOOR_FIELD], ids, logprobs, sums
    )
    if whole:
        complete_positions(observed_ids, offsets, found, sums, grid, steps, ids, logprobs, of_positions)
    return offsets, ids, logprobs, found[CLUSTER_FIELD], of_positions, whole
