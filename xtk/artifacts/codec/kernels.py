"""The inner loops of the codec, compiled by numba, without the GIL.

Each has a slow, readable twin in the tests; docs/reference/codec.md says what the bits mean. All numbers are signed,
since numba makes floats of signed and unsigned together; indices that cannot be negative are made unsigned, so that
none is tested for counting from the end.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from xtk.artifacts.codec import contexts
from xtk.artifacts.codec.frequencies import SCALE_BITS, SYMBOL_BITS, Slots
from xtk.artifacts.codec.grids import LEVEL_COUNT
from xtk.artifacts.codec.numbers import DIRECT, FIRST, OTHER_SPECIAL, RAW_BITS, SPECIAL

SLOT_MASK = (1 << SCALE_BITS) - 1
STATE_BITS, WORD_BITS = 63, 32
LOWEST = 1 << STATE_BITS - WORD_BITS  # a state below takes in another word
WORD_MASK = (1 << WORD_BITS) - 1
Index = np.uint64
ONE = Index(1)

KIND, REALISED, COUNT, FLOOR, TAIL = contexts.KIND, contexts.REALISED, contexts.COUNT, contexts.FLOOR, contexts.TAIL
ENTROPY, GAP, LEVEL = contexts.ENTROPY, contexts.GAP, contexts.LEVEL
DRAWN_GAP, DRAWN_COUNT = contexts.DRAWN_GAP, contexts.DRAWN_COUNT
FAVOURITE_COUNT, FAVOURITE_GAP = contexts.FAVOURITE_COUNT, contexts.FAVOURITE_GAP
FAVOURITE_LEVEL = contexts.FAVOURITE_LEVEL
TOKEN, LENGTH, AFTER = contexts.TOKEN, contexts.LENGTH, contexts.AFTER
ODDS, TAILS, LEVELS, GAP_STATES = contexts.ODDS, contexts.TAILS, contexts.LEVELS, contexts.GAP_STATES
NEXT_GAP_STATE = contexts.next_gap_states()

# A record: a symbol on its way to a stream, as context * 64 + symbol, how many raw bits follow it, and those bits.
COUNT_SHIFT, RAW_SHIFT = 24, 32
RECORD_MASK = (1 << COUNT_SHIFT) - 1

# What a favourite, or a slot, holds: see `frequencies.slots_of` and `kinds`.
ID_BITS = 20
ID_MASK = (1 << ID_BITS) - 1

NOBODYS = LEVELS - 1 << ID_BITS  # the class of an id that is no favourite

NOT_A_NUMBER, NOTHING = -1, -100  # of `take_number`: -1 - symbol, and where a symbol never comes
CERTAIN_ODDS, IMPOSSIBLE_ODDS = 1 << 40, -(1 << 40)  # of a realised token of probability 1 and 0


# ------------------------------------------------------------------------------------------------------------- writing


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def put(records: NDArray[np.int64], size: int, context: int, number: int) -> int:
    """Add a number to records, and return how many there are then."""
    if number < DIRECT:
        records[size] = context << 6 | number
        return size + 1
    octave = 5
    while number >> (octave + 1):
        octave += 1
    symbol = DIRECT + 2 * (octave - 5) + (number >> (octave - 1) & 1)
    raw = number & ((1 << (octave - 1)) - 1)
    records[size] = (context << 6 | symbol) | (octave - 1) << COUNT_SHIFT | raw << RAW_SHIFT
    return size + 1


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def put_symbol(records: NDArray[np.int64], size: int, context: int, symbol: int) -> int:
    """Add a symbol that stands for no number to records, and return how many there are then."""
    records[size] = context << 6 | symbol
    return size + 1


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def write_stream(
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


# ------------------------------------------------------------------------------------------------------------- reading


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def start(words: NDArray[np.uint32]) -> tuple[int, int]:
    """Return the first state of a stream, and how many words are left."""
    state, left = np.int64(0), len(words)
    while state < LOWEST and left > 0:
        left -= 1
        state = state << WORD_BITS | np.int64(words[Index(left)])
    return state, left


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def take(slots: Slots, context: int, state: int, words: NDArray[np.uint32], left: int) -> tuple[int, int, int]:
    """Return the next symbol, the state after it, and how many words are left.

    A symbol that never comes is NOTHING. Nothing is ever read from before the first word: a stream that was altered
    ends in zeros.
    """
    place = state & SLOT_MASK
    symbol = np.int64(slots.symbols[Index(context << SCALE_BITS | place)])
    facts = np.int64(slots.symbol_facts[Index(context << SYMBOL_BITS | symbol)])
    state = ((facts & SLOT_MASK) + 1) * (state >> SCALE_BITS) + place - (facts >> SCALE_BITS & SLOT_MASK)
    if state < LOWEST and left > 0:
        left -= 1
        state = state << WORD_BITS | np.int64(words[Index(left)])
    return symbol if facts >= 0 else NOTHING, state, left


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def take_raw(symbol: int, state: int, words: NDArray[np.uint32], left: int) -> tuple[int, int, int]:
    """Return the number that a symbol of a class and the raw bits after it make, as `take` does.

    A symbol that stands for no number gives NOT_A_NUMBER - symbol, and NOTHING gives NOTHING.
    """
    if symbol < DIRECT:
        return symbol, state, left
    if symbol >= SPECIAL:
        return NOT_A_NUMBER - symbol, state, left
    bits = RAW_BITS[symbol]
    number = FIRST[symbol] + (state & ((1 << bits) - 1))
    state >>= bits
    if state < LOWEST and left > 0:
        left -= 1
        state = state << WORD_BITS | np.int64(words[Index(left)])
    return number, state, left


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def take_number(slots: Slots, context: int, state: int, words: NDArray[np.uint32], left: int) -> tuple[int, int, int]:
    """Return the next number, the state after it, and how many words are left; see `take_raw`."""
    symbol, state, left = take(slots, context, state, words, left)
    return take_raw(symbol, state, words, left)


# ----------------------------------------------------------------------------------------------------- the realised token


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
def context_of_odds(odds: int, per_nat: int) -> int:
    """Return the context of what depends on how likely the realised token is: its odds in whole nats."""
    if odds == CERTAIN_ODDS:
        return ODDS - 1
    if odds == IMPOSSIBLE_ODDS:
        return 0
    return min(max((odds + per_nat // 2) // per_nat + ODDS // 2, 0), ODDS - 1)


# ---------------------------------------------------------------------------------------------------- the exact entries


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
        grid: [3, 2 LEVEL_COUNT]: log-probability, probability, and their product, of each level.
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
            floors[position] = -1
            size = put(out, size, starts[ENTROPY] + chance, round(entropies[position] / entropy_step))
            continue
        floor, tail = -1, tails[position]
        mass = products = 0.0
        for entry in range(first, stop):
            mass += grid[1, levels[entry]]
            products += grid[2, levels[entry]]
            if levels[entry] < LEVEL_COUNT:
                floor = max(floor, levels[entry])
        floors[position] = floor
        own, others = logs_of_odds(odds[position], odds_step)
        _, _, entropy = shared(others, mass, products, grid[1, tail], grid[2, tail])
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
        ids_out, levels_out: [E] each, filled.
    """
    for position in range(len(floors)):
        place = gap_state = 0
        for entry in range(offsets[position], offsets[position + 1]):
            put(ids_out, entry, starts[GAP] + gap_state, ranks[entry] - place)
            gap_state = NEXT_GAP_STATE[gap_state, ids_out[entry] & 63]
            place = ranks[entry] + 1
            level = levels[entry]
            put_or_special(levels_out, entry, starts[LEVEL] + classes[entry], floors[position] - level, level == LEVEL_COUNT)


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def put_odds(records: NDArray[np.int64], size: int, context: int, odds: int) -> int:
    """Add odds to records, and return how many there are then."""
    if odds == CERTAIN_ODDS:
        return put_symbol(records, size, context, OTHER_SPECIAL)
    return put_or_special(records, size, context, 2 * odds if odds >= 0 else -2 * odds - 1, odds == IMPOSSIBLE_ODDS)


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def put_or_special(records: NDArray[np.int64], size: int, context: int, number: int, special: bool) -> int:
    """Add a number, or SPECIAL in its place, to records, and return how many there are then."""
    return put_symbol(records, size, context, SPECIAL) if special else put(records, size, context, number)


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def entropy_of(logprob: float) -> float:
    """Return what one token adds to the entropy."""
    return -logprob * math.exp(logprob) if logprob > -np.inf else 0.0


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def read_positions(
    words: NDArray[np.uint32],
    slots: Slots,
    starts: NDArray[np.int64],
    per_nat: int,
    most: int,
    offsets: NDArray[np.int64],
    found: NDArray[np.int64],
) -> bool:
    """Read the first stream of a document, and say whether it is whole.

    Args:
        words: the stream.
        slots: of all contexts.
        starts: of the families of contexts.
        per_nat: steps of odds.
        most: E, how many entries there can be, realised tokens among them.
        offsets: [P + 1], filled, with a place for the realised token in front of the entries of each position.
        found: [5, P], filled: kind, odds, floor (-1: none), level of the tail, number of the entropy.
    """
    state, left = start(words)
    kind = 0
    for position in range(len(offsets) - 1):
        kind, state, left = take(slots, starts[KIND] + kind, state, words, left)
        if kind < 0 or kind >= starts[KIND + 1]:
            return False
        code, state, left = take_number(slots, starts[REALISED], state, words, left)
        odds = code >> 1 ^ -(code & 1)
        if code < 0:
            odds = CERTAIN_ODDS if code == NOT_A_NUMBER - OTHER_SPECIAL else IMPOSSIBLE_ODDS
        if code == NOTHING:
            return False
        chance = context_of_odds(odds, per_nat)
        count, state, left = take_number(slots, starts[COUNT] + chance, state, words, left)
        floor, tail = -1, LEVEL_COUNT
        context = starts[ENTROPY] + chance
        if count > 0:
            floor, state, left = take_number(slots, starts[FLOOR] + kind, state, words, left)
            tail, state, left = take_number(slots, starts[TAIL] + context_of_tail(max(floor, 0)), state, words, left)
            if floor == NOTHING or floor >= LEVEL_COUNT or tail == NOTHING or tail >= LEVEL_COUNT:
                return False
            floor, tail = max(floor, -1), tail if tail >= 0 else LEVEL_COUNT
            context = starts[ENTROPY] + ODDS + context_of_tail(tail)
        entropy, state, left = take_number(slots, context, state, words, left)
        if count < 0 or entropy < 0 or count >= most - offsets[position]:
            return False
        offsets[position + 1] = offsets[position] + 1 + count
        found[0, position], found[1, position], found[2, position] = kind, odds, floor
        found[3, position], found[4, position] = tail, entropy
    return state == 0 and left == 0


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def read_entries(
    words: NDArray[np.uint32],
    level_words: NDArray[np.uint32],
    slots: Slots,
    starts: NDArray[np.int64],
    favourites: NDArray[np.int32],
    favourite_starts: NDArray[np.int64],
    order: NDArray[np.int32],
    grid: NDArray[np.float64],
    values: NDArray[np.float32],
    offsets: NDArray[np.int64],
    kinds: NDArray[np.int64],
    floors: NDArray[np.int64],
    ids: NDArray[np.int32],
    logprobs: NDArray[np.float32],
    sums: NDArray[np.float64],
) -> bool:
    """Read the second and the third stream of a document, and say whether they are whole.

    Here is where the time goes, so that `take` and `take_number` are written out: numba counts references to the
    arrays of a call each time that it is made.

    Args:
        words: the second stream, in words.
        level_words: the third.
        slots: of all contexts.
        starts: of the families of contexts.
        favourites: of all kinds, one after the other: id, and class above ID_BITS.
        favourite_starts: [C + 1], where those of each kind begin.
        order: [U], ids by rank.
        grid: [3, 2 LEVEL_COUNT]: log-probability, probability, and their product, of each level.
        values: [2 LEVEL_COUNT], log-probabilities again.
        offsets: [P + 1], with a place for the realised token in front of the entries of each position.
        kinds: [P].
        floors: [P].
        ids: [E], filled but for realised tokens.
        logprobs: [E], likewise, as levels tell them.
        sums: [2, P], filled: of their probabilities, and of those times their logarithms.
    """
    state, left = start(words)
    level_state, level_left = start(level_words)
    symbols, facts = slots
    gaps, classes, known, damaged = starts[GAP], starts[LEVEL], len(order), np.int64(0)
    for position in range(len(kinds)):
        first, floor = favourite_starts[kinds[position]], floors[position]
        listed = favourite_starts[kinds[position] + 1] - first
        at, stop = Index(offsets[position] + 1), Index(offsets[position + 1])
        context, rank, mass, products = gaps, np.int64(0), 0.0, 0.0
        while at < stop:
            slot = state & SLOT_MASK
            symbol = np.int64(symbols[Index(context << SCALE_BITS | slot)])
            fact = np.int64(facts[Index(context << SYMBOL_BITS | symbol)])
            state = ((fact & SLOT_MASK) + 1) * (state >> SCALE_BITS) + slot - (fact >> SCALE_BITS & SLOT_MASK)
            if state < LOWEST and left > 0:
                left -= 1
                state = state << WORD_BITS | np.int64(words[Index(left)])
            damaged |= fact
            context = gaps + (fact >> 2 * SCALE_BITS & 31)
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
            elif rank - listed < known:
                favourite = np.int64(order[Index(rank - listed)]) | NOBODYS
            else:
                return False
            rank += 1
            ids[at] = favourite & ID_MASK
            of_level, slot = classes + (favourite >> ID_BITS & (LEVELS - 1)), level_state & SLOT_MASK
            symbol = np.int64(symbols[Index(of_level << SCALE_BITS | slot)])
            fact = np.int64(facts[Index(of_level << SYMBOL_BITS | symbol)])
            level_state = (
                ((fact & SLOT_MASK) + 1) * (level_state >> SCALE_BITS) + slot - (fact >> SCALE_BITS & SLOT_MASK)
            )
            if level_state < LOWEST and level_left > 0:
                level_left -= 1
                level_state = level_state << WORD_BITS | np.int64(level_words[Index(level_left)])
            damaged |= fact
            level = floor - symbol
            if symbol >= DIRECT:
                bits = RAW_BITS[Index(symbol)]
                level = floor - FIRST[Index(symbol)] - (level_state & ((1 << bits) - 1))
                level_state >>= bits
                if level_state < LOWEST and level_left > 0:
                    level_left -= 1
                    level_state = level_state << WORD_BITS | np.int64(level_words[Index(level_left)])
                if symbol >= SPECIAL:
                    level = LEVEL_COUNT if symbol == SPECIAL else -1
            damaged |= level
            level &= 2 * LEVEL_COUNT - 1
            logprobs[at] = values[Index(level)]
            mass += grid[1, Index(level)]
            products += grid[2, Index(level)]
            at += ONE
        sums[0, position], sums[1, position] = mass, products
    return damaged >= 0 and state == 0 and left == 0 and level_state == 0 and level_left == 0


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
        found: [5, P], of `read_positions`.
        sums: [2, P], of `read_entries`.
        grid: [3, 2 LEVEL_COUNT].
        steps: of odds, of entropy; how many of odds are a nat.
        ids: [E], completed.
        logprobs: [E], completed and changed.
        of_positions: [3, P], filled: tail mass, log-probability of the realised token, entropy.
    """
    odds_step, entropy_step, _ = steps
    for position in range(len(realised_ids)):
        own, others = logs_of_odds(found[1, position], odds_step)
        at, number, tail = offsets[position], found[4, position], found[3, position]
        ids[at], logprobs[at] = realised_ids[position], own
        of_positions[1, position] = own
        if offsets[position + 1] == at + 1:
            of_positions[0, position], of_positions[2, position] = math.exp(others), number * entropy_step
            continue
        shift, mass, entropy = shared(others, sums[0, position], sums[1, position], grid[1, tail], grid[2, tail])
        rest = (number >> 1 ^ -(number & 1)) * entropy_step
        of_positions[0, position], of_positions[2, position] = mass, entropy + entropy_of(own) + rest
        small = np.float32(shift)
        for entry in range(at + 1, offsets[position + 1]):
            logprobs[entry] += small


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def read_exact(
    words: tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32]],
    slots: Slots,
    starts: NDArray[np.int64],
    favourites: NDArray[np.int32],
    favourite_starts: NDArray[np.int64],
    order: NDArray[np.int32],
    grid: NDArray[np.float64],
    values: NDArray[np.float32],
    steps: tuple[float, float, int],
    realised_ids: NDArray[np.int32],
    entries: int,
) -> tuple[Any, Any, Any, Any, Any, bool]:
    """Read what is exact of a document: the three functions above, one after the other.

    Args:
        words: the first three streams.
        realised_ids: [P].
        entries: E, realised tokens among them.

    Returns:
        offsets int64 [P + 1], ids int32 [E], logprobs float32 [E], kinds int64 [P]; float32 [3, P]: tail mass,
        log-probability of the realised token, entropy; and whether the streams are whole: the arrays mean nothing
        otherwise.
    """
    size = len(realised_ids)
    offsets, found = np.zeros(size + 1, np.int64), np.empty((5, size), np.int64)
    ids, logprobs = np.empty(entries, np.int32), np.empty(entries, np.float32)
    sums, of_positions = np.empty((2, size), np.float64), np.empty((3, size), np.float32)
    whole = read_positions(words[0], slots, starts, steps[2], entries, offsets, found) and offsets[size] == entries
    whole = whole and read_entries(
        words[1], words[2], slots, starts, favourites, favourite_starts, order, grid, values, offsets, found[0],
        found[2], ids, logprobs, sums,
    )  # fmt: skip
    if whole:
        finish(realised_ids, offsets, found, sums, grid, steps, ids, logprobs, of_positions)
    return offsets, ids, logprobs, found[0], of_positions, whole


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
    words: NDArray[np.uint32],
    slots: Slots,
    starts: NDArray[np.int64],
    favourites: NDArray[np.int32],
    favourite_starts: NDArray[np.int64],
    order: NDArray[np.int32],
    kinds: NDArray[np.int64],
    draws: int,
    entries: int,
) -> tuple[Any, Any, Any, bool]:
    """Read the stream of a set of draws.

    Args:
        words: the stream.
        slots, starts, favourites, favourite_starts, order: as for `read_entries`.
        kinds: [P], of positions.
        draws: n.
        entries: D, ids that were drawn.

    Returns:
        offsets int64 [P + 1], ids int32 [D], by rank, counts int32 [D], and whether the stream is whole.
    """
    state, left = start(words)
    offsets = np.zeros(len(kinds) + 1, np.int64)
    ids, counts = np.empty(entries, np.int32), np.empty(entries, np.int32)
    gaps, known, at = starts[DRAWN_GAP], len(order), np.int64(0)
    for position in range(len(kinds)):
        first = favourite_starts[kinds[position]]
        listed = favourite_starts[kinds[position] + 1] - first
        rank, gap_state, to_come = np.int64(0), np.int64(0), draws
        while to_come > 0:
            symbol, state, left = take(slots, gaps + gap_state, state, words, left)
            if symbol == SPECIAL and to_come == draws:
                break
            gap, state, left = take_raw(symbol, state, words, left)
            gap_state = NEXT_GAP_STATE[gap_state, Index(symbol & 63)]
            rank += gap
            more = np.int64(0)
            if to_come > 1:
                more, state, left = take_number(slots, starts[DRAWN_COUNT] + gap_state, state, words, left)
            to_come -= more + 1
            if gap < 0 or more < 0 or to_come < 0 or at >= entries or rank - listed >= known:
                return offsets, ids, counts, False
            if rank < listed:
                ids[Index(at)] = favourites[Index(first + rank)] & ID_MASK
            else:
                ids[Index(at)] = order[Index(rank - listed)]
            counts[Index(at)] = more + 1
            rank += 1
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
        offsets, ids, logprobs: [P + 1], [E], [E], exact.
        drawn_offsets, drawn_ids, counts: [P + 1], [D], [D].
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


# ---------------------------------------------------------------------------------------------------------- the favourites


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def favourite_records(
    starts: NDArray[np.int64],
    runs: NDArray[np.int64],
    lengths: NDArray[np.int64],
    ranks: NDArray[np.int64],
    levels: NDArray[np.int64],
    out: NDArray[np.int64],
) -> int:
    """Turn the favourites of a shard into records; return how many they are.

    Args:
        starts: of the families of contexts of favourites.
        runs: [C], of each kind.
        lengths: of runs.
        ranks: [F], among all ids, rising within a run.
        levels: [F].
        out: [C + runs + 2 F], filled.
    """
    size = run = at = 0
    for kind in range(len(runs)):
        size = put(out, size, starts[FAVOURITE_COUNT], runs[kind])
        for _ in range(runs[kind]):
            size = put(out, size, starts[FAVOURITE_COUNT], lengths[run])
            place = gap_state = 0
            for _ in range(lengths[run]):
                size = put(out, size, starts[FAVOURITE_GAP] + gap_state, ranks[at] - place)
                gap_state = NEXT_GAP_STATE[gap_state, out[size - 1] & 63]
                place = ranks[at] + 1
                size = put(out, size, starts[FAVOURITE_LEVEL], levels[at])
                at += 1
            run += 1
    return size


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def read_favourites(
    words: NDArray[np.uint32],
    slots: Slots,
    starts: NDArray[np.int64],
    order: NDArray[np.int32],
    favourite_starts: NDArray[np.int64],
    favourites: NDArray[np.int32],
) -> bool:
    """Read the favourites of a shard, and say whether they are whole.

    Args:
        words: the stream.
        slots: of the contexts of favourites.
        starts: of the families of those.
        order: [U], ids by rank.
        favourite_starts: [C + 1], filled.
        favourites: [F], filled: id, and class above ID_BITS.
    """
    state, left = start(words)
    at = 0
    for kind in range(len(favourite_starts) - 1):
        runs, state, left = take_number(slots, starts[FAVOURITE_COUNT], state, words, left)
        for _ in range(runs):
            length, state, left = take_number(slots, starts[FAVOURITE_COUNT], state, words, left)
            rank = gap_state = 0
            if length <= 0 or length > len(favourites) - at:
                return False
            for _ in range(length):
                symbol, state, left = take(slots, starts[FAVOURITE_GAP] + gap_state, state, words, left)
                gap_state = NEXT_GAP_STATE[gap_state, symbol & 63]
                gap, state, left = take_raw(symbol, state, words, left)
                level, state, left = take_number(slots, starts[FAVOURITE_LEVEL], state, words, left)
                rank += gap
                if gap < 0 or rank >= len(order) or level < 0 or level >= LEVELS:
                    return False
                favourites[at] = order[rank] | level << ID_BITS
                rank += 1
                at += 1
        favourite_starts[kind + 1] = at
    return at == len(favourites) and state == 0 and left == 0


# -------------------------------------------------------------------------------------------------------------- the tokens


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def token_records(
    starts: NDArray[np.int64], ranks: NDArray[np.int64], lengths: NDArray[np.int64], out: NDArray[np.int64]
) -> int:
    """Turn the tokens of a document into records; return how many they are.

    Args:
        starts: of the families of contexts.
        ranks: [T].
        lengths: [T], by how many bytes each is longer than its token in the vocabulary, zigzag.
        out: [2 T], filled.
    """
    size = before = 0
    for token in range(len(ranks)):
        size = put(out, size, starts[TOKEN] + before, ranks[token])
        before = min(out[size - 1] & 63, AFTER - 1)
        size = put(out, size, starts[LENGTH], lengths[token])
    return size


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def read_tokens(
    words: NDArray[np.uint32],
    slots: Slots,
    starts: NDArray[np.int64],
    order: NDArray[np.int32],
    token_bytes: NDArray[np.int32],
    length: int,
) -> tuple[Any, Any, bool]:
    """Read the stream of a document's tokens.

    Args:
        words: the stream.
        slots: of all contexts.
        starts: of the families of contexts.
        order: [U], ids by rank.
        token_bytes: [U], how many bytes each token of the vocabulary has.
        length: T.

    Returns:
        ids int32 [T], byte ends int32 [T], and whether the stream is whole.
    """
    state, left = start(words)
    ids, ends = np.empty(length, np.int32), np.empty(length, np.int32)
    before, end = np.int64(0), np.int64(0)
    for token in range(length):
        symbol, state, left = take(slots, starts[TOKEN] + before, state, words, left)
        before = min(symbol, AFTER - 1)
        rank, state, left = take_raw(symbol, state, words, left)
        more, state, left = take_number(slots, starts[LENGTH], state, words, left)
        if rank < 0 or rank >= len(order) or more < 0:
            return ids, ends, False
        ids[token] = order[rank]
        end += token_bytes[order[rank]] + (more >> 1 ^ -(more & 1))
        ends[token] = end
    return ids, ends, state == 0 and left == 0
