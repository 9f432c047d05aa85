"""What is exact of a signal, between arrays and the symbols of its streams; compiled by numba, without the GIL.

Each function has a slow, readable twin in the tests. docs/reference/codec.md tells what the symbols mean.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from xtk.artifacts.codec.coder import (
    LOWEST,
    WORD_BITS,
    Index,
    after,
    fact_of,
    put,
    put_symbol,
    slot_of,
    start,
)
from xtk.artifacts.codec.contexts import (
    COUNT,
    ENTROPY,
    FLOOR,
    GAP,
    KIND,
    LEVEL,
    LEVELS,
    NEXT_GAP_STATE,
    ODDS,
    REALISED,
    TAIL,
    TAILS,
)
from xtk.artifacts.codec.frequencies import FOLLOWING, Slots
from xtk.artifacts.codec.grids import BELOW, LEVEL_COUNT
from xtk.artifacts.codec.numbers import DIRECT, FIRST, NOTHING, RAW_BITS, SPECIAL
from xtk.artifacts.codec.streams import words_of

ONE = Index(1)
ID_BITS = 20
ID_MASK = (1 << ID_BITS) - 1
NOBODYS = LEVELS - 1 << ID_BITS  # beside an id that is no favourite
CERTAIN_ODDS, IMPOSSIBLE_ODDS = 1 << 40, -(1 << 40)  # of a realised token of probability 1 and 0
NO_FLOOR = -1

# What is told of a position, in this order.
KIND_FIELD, ODDS_FIELD, COUNT_FIELD, FLOOR_FIELD, TAIL_FIELD, ENTROPY_FIELD = range(6)
FIELDS = 6


class Tables(NamedTuple):
    """What the documents of a shard share.

    Attributes:
        slots: of all contexts.
        starts: int64 [families + 1], the first context of each family.
        favourites: int32 [F], of all kinds, one after the other: id, and above ID_BITS the class of its levels.
        favourite_starts: int64 [C + 1], where those of each kind begin.
        order: int32 [U], ids by rank.
    """

    slots: Slots
    starts: NDArray[np.int64]
    favourites: NDArray[np.int32]
    favourite_starts: NDArray[np.int64]
    order: NDArray[np.int32]


# ----------------------------------------------------------------------------------------------- the realised token


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def logs_of_odds(odds: int, step: float) -> tuple[float, float]:
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
def odds_of(number: int) -> int:
    """Return the odds that were read as a number, or as a symbol's negative."""
    if number >= 0:
        return number >> 1 ^ -(number & 1)
    return CERTAIN_ODDS if number == -NOTHING else IMPOSSIBLE_ODDS


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def context_of_odds(odds: int, per_nat: int) -> int:
    """Return the context of what depends on how likely the realised token is: its odds in whole nats."""
    if odds == CERTAIN_ODDS:
        return ODDS - 1
    if odds == IMPOSSIBLE_ODDS:
        return 0
    return min(max((odds + per_nat // 2) // per_nat + ODDS // 2, 0), ODDS - 1)


# --------------------------------------------------------------------------------------------------- what both need


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def shared(others: float, mass: float, products: float, tail: float, tail_product: float) -> tuple[float, float, float]:
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
def context_of_tail(level: int) -> int:
    """Return the context of what depends on the mass outside."""
    return min(level // 2, TAILS - 1)


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def entropy_of(logprob: float) -> float:
    """Return what one token adds to the entropy."""
    return -logprob * math.exp(logprob) if logprob > -np.inf else 0.0


# ---------------------------------------------------------------------------------------------------------- writing


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def put_odds(records: NDArray[np.int64], size: int, context: int, odds: int) -> Any:
    """Add odds to records, and return how many there are then."""
    if odds == CERTAIN_ODDS:
        return put_symbol(records, size, context, NOTHING)
    return put_or_special(records, size, context, 2 * odds if odds >= 0 else -2 * odds - 1, odds == IMPOSSIBLE_ODDS)


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def put_or_special(records: NDArray[np.int64], size: int, context: int, number: int, special: bool) -> Any:
    """Add a number, or SPECIAL in its place, to records, and return how many there are then."""
    return put_symbol(records, size, context, SPECIAL) if special else put(records, size, context, number)


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def position_records(
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
        size = put_symbol(out, size, starts[KIND] + kind, kinds[position])
        kind = kinds[position]
        chance = context_of_odds(odds[position], per_nat)
        size = put_odds(out, size, starts[REALISED], odds[position])
        first, stop = offsets[position], offsets[position + 1]
        size = put(out, size, starts[COUNT] + chance, stop - first)
        if first == stop:
            floors[position] = NO_FLOOR
            size = put(out, size, starts[ENTROPY] + chance, round(entropies[position] / entropy_step))
            continue
        floor, tail = NO_FLOOR, tails[position]
        mass = products = 0.0
        for entry in range(first, stop):
            mass += grid[1, BELOW + levels[entry]]
            products += grid[2, BELOW + levels[entry]]
            if levels[entry] < LEVEL_COUNT:
                floor = max(floor, levels[entry])
        floors[position] = floor
        own, others = logs_of_odds(odds[position], odds_step)
        _, _, entropy = shared(others, mass, products, grid[1, BELOW + tail], grid[2, BELOW + tail])
        size = put_or_special(out, size, starts[FLOOR] + kind, floor, floor < 0)
        size = put_or_special(out, size, starts[TAIL] + context_of_tail(max(floor, 0)), tail, tail == LEVEL_COUNT)
        rest = round((entropies[position] - entropy - entropy_of(own)) / entropy_step)
        context = starts[ENTROPY] + ODDS + context_of_tail(tail)
        size = put(out, size, context, 2 * rest if rest >= 0 else -2 * rest - 1)
    return size


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def entry_records(
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
            put(ids_out, entry, starts[GAP] + gap_state, ranks[entry] - place)
            gap_state = NEXT_GAP_STATE[gap_state, ids_out[entry] & 63]
            place = ranks[entry] + 1
            level = levels[entry]
            context = starts[LEVEL] + classes[entry]
            put_or_special(levels_out, entry, context, floors[position] - level, level == LEVEL_COUNT)


# ---------------------------------------------------------------------------------------------------------- reading


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def read_positions(
    words: NDArray[np.uint32],
    tables: Tables,
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
    (symbols, facts), starts = tables.slots, tables.starts
    state, left = start(words)
    kind = np.int64(0)
    for position in range(len(offsets) - 1):
        field, context, chance = KIND_FIELD, starts[KIND] + kind, 0
        found[FLOOR_FIELD, position], found[TAIL_FIELD, position] = NO_FLOOR, LEVEL_COUNT
        while field < FIELDS:
            # `take` and `take_raw`, written out: numba counts references to the arrays of a call each time.
            symbol = np.int64(symbols[slot_of(context, state)])
            fact = np.int64(facts[fact_of(context, symbol)])
            state = after(state, fact)
            if state < LOWEST and left > 0:
                left -= 1
                state = state << WORD_BITS | np.int64(words[Index(left)])
            number: Any = symbol
            if symbol >= DIRECT and field > KIND_FIELD:
                bits = RAW_BITS[Index(symbol)]
                number = -symbol if symbol >= SPECIAL else FIRST[Index(symbol)] + (state & ((1 << bits) - 1))
                state >>= bits
                if state < LOWEST and left > 0:
                    left -= 1
                    state = state << WORD_BITS | np.int64(words[Index(left)])
            following = field + 1
            if field == KIND_FIELD:
                if number >= starts[KIND + 1]:
                    return False
                kind, context = number, starts[REALISED]
            elif field == ODDS_FIELD:
                number = odds_of(number)
                chance = context_of_odds(number, per_nat)
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
                if number == -NOTHING or number >= LEVEL_COUNT:
                    return False
                if field == FLOOR_FIELD:
                    context = starts[TAIL] + context_of_tail(max(number, 0))
                    number = max(number, NO_FLOOR)
                else:
                    number = number if number >= 0 else LEVEL_COUNT
                    context = starts[ENTROPY] + ODDS + context_of_tail(number)
            found[field, position] = number
            field = following
    return state == 0 and left == 0


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def read_entries(
    words: NDArray[np.uint32],
    level_words: NDArray[np.uint32],
    tables: Tables,
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

    Here is where the time goes, so that `take` and `take_number` are written out: numba counts references to the
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
    favourites, favourite_starts, order = tables.favourites, tables.favourite_starts, tables.order
    symbols, facts = tables.slots
    probs, products = grid[1], grid[2]
    gaps, classes, known = tables.starts[GAP], tables.starts[LEVEL], len(order)
    state, left = start(words)
    level_state, level_left = start(level_words)
    for position in range(len(kinds)):
        first, base = favourite_starts[kinds[position]], floors[position] + BELOW
        listed = favourite_starts[kinds[position] + 1] - first
        at, stop = Index(offsets[position] + 1), Index(offsets[position + 1])
        context, rank, mass, product = gaps, np.int64(0), 0.0, 0.0
        while at < stop:
            symbol = np.int64(symbols[slot_of(context, state)])
            fact = np.int64(facts[fact_of(context, symbol)])
            state = after(state, fact)
            if state < LOWEST and left > 0:
                left -= 1
                state = state << WORD_BITS | np.int64(words[Index(left)])
            context = gaps + (fact >> FOLLOWING)
            if symbol < DIRECT:
                rank += symbol
            else:
                bits = RAW_BITS[Index(symbol)]
                rank += FIRST[Index(symbol)] + (state & ((1 << bits) - 1))
                state >>= bits
                if state < LOWEST and left > 0:
                    left -= 1
                    state = state << WORD_BITS | np.int64(words[Index(left)])
            if rank < listed:
                favourite = np.int64(favourites[Index(first + rank)])
            elif rank - listed < known and symbol < SPECIAL:
                favourite = np.int64(order[Index(rank - listed)]) | NOBODYS
            else:
                return False
            rank += 1
            ids[at] = favourite & ID_MASK
            of_level = classes + (favourite >> ID_BITS)
            symbol = np.int64(symbols[slot_of(of_level, level_state)])
            level_state = after(level_state, np.int64(facts[fact_of(of_level, symbol)]))
            if level_state < LOWEST and level_left > 0:
                level_left -= 1
                level_state = level_state << WORD_BITS | np.int64(level_words[Index(level_left)])
            level = base - symbol
            if symbol >= DIRECT:
                bits = RAW_BITS[Index(symbol)]
                level = max(base - FIRST[Index(symbol)] - (level_state & ((1 << bits) - 1)), 0)
                level_state >>= bits
                if level_state < LOWEST and level_left > 0:
                    level_left -= 1
                    level_state = level_state << WORD_BITS | np.int64(level_words[Index(level_left)])
                if symbol >= SPECIAL:
                    level = BELOW + LEVEL_COUNT if symbol == SPECIAL else 0
            logprobs[at] = values[Index(level)]
            mass += probs[Index(level)]
            product += products[Index(level)]
            at += ONE
        if not mass >= 0:
            return False
        sums[0, position], sums[1, position] = mass, product
    return state == 0 and left == 0 and level_state == 0 and level_left == 0


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def finish(
    realised_ids: NDArray[np.int32],
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
        realised_ids: [P].
        offsets: [P + 1].
        found: [FIELDS, P], of `read_positions`.
        sums: [2, P], of `read_entries`.
        grid: [3, PLACES].
        steps: of odds, of entropy; how many of odds are a nat.
        ids: [E], completed.
        logprobs: [E], completed and changed.
        of_positions: [3, P], filled: tail mass, log-probability of the realised token, entropy.
    """
    odds_step, entropy_step, _ = steps
    for position in range(len(realised_ids)):
        own, others = logs_of_odds(found[ODDS_FIELD, position], odds_step)
        at, number = offsets[position], found[ENTROPY_FIELD, position]
        ids[at], logprobs[at] = realised_ids[position], own
        of_positions[1, position] = own
        if offsets[position + 1] == at + 1:
            of_positions[0, position], of_positions[2, position] = math.exp(others), number * entropy_step
            continue
        tail = BELOW + found[TAIL_FIELD, position]
        shift, mass, entropy = shared(others, sums[0, position], sums[1, position], grid[1, tail], grid[2, tail])
        rest = (number >> 1 ^ -(number & 1)) * entropy_step
        of_positions[0, position], of_positions[2, position] = mass, entropy + entropy_of(own) + rest
        entry, stop, small = Index(at + 1), Index(offsets[position + 1]), np.float32(shift)
        while entry < stop:
            logprobs[entry] += small
            entry += ONE


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def read_exact(
    packed: NDArray[np.uint8],
    bounds: NDArray[np.int64],
    tables: Tables,
    grid: NDArray[np.float64],
    values: NDArray[np.float32],
    steps: tuple[float, float, int],
    realised_ids: NDArray[np.int32],
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
        realised_ids: [P].
        entries: E, realised tokens among them.

    Returns:
        offsets int64 [P + 1], ids int32 [E], logprobs float32 [E], kinds int64 [P]; float32 [3, P]: tail mass,
        log-probability of the realised token, entropy; and whether the streams are whole: the arrays mean nothing
        otherwise.
    """
    size = len(realised_ids)
    offsets, found = np.zeros(size + 1, np.int64), np.empty((FIELDS, size), np.int64)
    ids, logprobs = np.empty(entries, np.int32), np.empty(entries, np.float32)
    sums, of_positions = np.empty((2, size), np.float64), np.empty((3, size), np.float32)
    of_position, of_ids = words_of(packed, bounds[0], bounds[1]), words_of(packed, bounds[1], bounds[2])
    of_levels = words_of(packed, bounds[2], bounds[3])
    whole = read_positions(of_position, tables, steps[2], entries, offsets, found) and offsets[size] == entries
    whole = whole and read_entries(
        of_ids, of_levels, tables, grid, values, offsets, found[KIND_FIELD], found[FLOOR_FIELD], ids, logprobs, sums
    )
    if whole:
        finish(realised_ids, offsets, found, sums, grid, steps, ids, logprobs, of_positions)
    return offsets, ids, logprobs, found[KIND_FIELD], of_positions, whole
