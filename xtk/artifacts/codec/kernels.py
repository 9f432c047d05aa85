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
from xtk.artifacts.codec.frequencies import SCALE_BITS
from xtk.artifacts.codec.grids import LEVEL_COUNT
from xtk.artifacts.codec.numbers import DIRECT, FIRST, OTHER_SPECIAL, RAW_BITS, SPECIAL

SLOT_MASK = (1 << SCALE_BITS) - 1
STATE_BITS, WORD_BITS = 63, 32
LOWEST = 1 << STATE_BITS - WORD_BITS  # a state below takes in another word
WORD_MASK = (1 << WORD_BITS) - 1
Index = np.uint64

KIND, REALISED, COUNT, FLOOR, TAIL = contexts.KIND, contexts.REALISED, contexts.COUNT, contexts.FLOOR, contexts.TAIL
ENTROPY, GAP, LEVEL = contexts.ENTROPY, contexts.GAP, contexts.LEVEL
DRAWN_GAP, DRAWN_COUNT = contexts.DRAWN_GAP, contexts.DRAWN_COUNT
FAVOURITE_COUNT, FAVOURITE_GAP = contexts.FAVOURITE_COUNT, contexts.FAVOURITE_GAP
FAVOURITE_LEVEL = contexts.FAVOURITE_LEVEL
ODDS, TAILS, LEVELS, GAP_STATES = contexts.ODDS, contexts.TAILS, contexts.LEVELS, contexts.GAP_STATES
NEXT_GAP_STATE = contexts.next_gap_states()

# A record: a symbol on its way to a stream, as context * 64 + symbol, how many raw bits follow it, and those bits.
COUNT_SHIFT, RAW_SHIFT = 24, 32
RECORD_MASK = (1 << COUNT_SHIFT) - 1

# What a favourite, or a slot, holds: see `frequencies.slots_of` and `kinds`.
ID_BITS = 20
ID_MASK = (1 << ID_BITS) - 1

NOBODYS = LEVELS - 1 << ID_BITS  # the class of an id that is no favourite

NOT_A_NUMBER, NOTHING = -1, -100  # of `take_number`: -1 - symbol, and where no symbol comes
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
def take(
    slots: NDArray[np.int32], context: int, state: int, words: NDArray[np.uint32], left: int
) -> tuple[int, int, int]:
    """Return a slot, whose symbol is the next one, the state after it, and how many words are left.

    Nothing is ever read from before the first word: a stream that was altered ends in zeros.
    """
    slot = np.int64(slots[Index(context << SCALE_BITS | state & SLOT_MASK)])
    state = ((slot & SLOT_MASK) + 1) * (state >> SCALE_BITS) + (slot >> SCALE_BITS & SLOT_MASK)
    if state < LOWEST and left > 0:
        left -= 1
        state = state << WORD_BITS | np.int64(words[Index(left)])
    return slot, state, left


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def take_number(
    slots: NDArray[np.int32], context: int, state: int, words: NDArray[np.uint32], left: int
) -> tuple[int, int, int]:
    """Return the next number, the state after it, and how many words are left.

    A symbol that stands for no number gives NOT_A_NUMBER - symbol, a context in which nothing comes NOTHING.
    """
    slot, state, left = take(slots, context, state, words, left)
    if slot < 0:
        return NOTHING, state, left
    symbol = slot >> 20 & 63
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
def exact_records(
    starts: NDArray[np.int64],
    kinds: NDArray[np.int64],
    odds: NDArray[np.int64],
    entropies: NDArray[np.float64],
    tails: NDArray[np.int64],
    offsets: NDArray[np.int64],
    ranks: NDArray[np.int64],
    classes: NDArray[np.int64],
    levels: NDArray[np.int64],
    grid: NDArray[np.float64],
    steps: tuple[float, float, int],
    ids_out: NDArray[np.int64],
    levels_out: NDArray[np.int64],
) -> tuple[int, int]:
    """Turn what is exact of a document into the records of its two first streams; return how many each has.

    Args:
        starts: of the families of contexts.
        kinds: [P], of positions.
        odds: [P], of the realised tokens, in steps; or CERTAIN_ODDS, IMPOSSIBLE_ODDS.
        entropies: [P], nats.
        tails: [P], levels of the mass outside; LEVEL_COUNT: none.
        offsets: [P + 1] of the entries, those of realised tokens left out.
        ranks: [E], rising within a position, among the ids of its kind.
        classes: [E], of ids, the contexts of their levels.
        levels: [E].
        grid: [3, LEVEL_COUNT + 1]: log-probability, probability, and their product, of each level.
        steps: of odds, of entropy; how many of odds are a nat.
        ids_out: [6 P + E], filled with the records of the first stream.
        levels_out: [E], with those of the second.
    """
    odds_step, entropy_step, per_nat = steps
    kind = size = entries = 0
    for position in range(len(kinds)):
        size = put_symbol(ids_out, size, starts[KIND] + kind, kinds[position])
        kind = kinds[position]
        chance = context_of_odds(odds[position], per_nat)
        own, others = logs_of_odds(odds[position], odds_step)
        size = put_odds(ids_out, size, starts[REALISED], odds[position])
        first, stop = offsets[position], offsets[position + 1]
        size = put(ids_out, size, starts[COUNT] + chance, stop - first)
        if first == stop:
            size = put(ids_out, size, starts[ENTROPY] + chance, round(entropies[position] / entropy_step))
            continue
        floor = -1
        mass = products = 0.0
        for entry in range(first, stop):
            mass += grid[1, levels[entry]]
            products += grid[2, levels[entry]]
            if levels[entry] < LEVEL_COUNT:
                floor = max(floor, levels[entry])
        tail = tails[position]
        _, _, entropy = shared(others, mass, products, grid[1, tail], grid[2, tail])
        size = put_or_special(ids_out, size, starts[FLOOR] + kind, floor, floor < 0)
        size = put_or_special(ids_out, size, starts[TAIL] + context_of_tail(max(floor, 0)), tail, tail == LEVEL_COUNT)
        rest = round((entropies[position] - entropy - entropy_of(own)) / entropy_step)
        context = starts[ENTROPY] + ODDS + context_of_tail(tail)
        size = put(ids_out, size, context, 2 * rest if rest >= 0 else -2 * rest - 1)
        place = gap_state = 0
        for entry in range(first, stop):
            gap = ranks[entry] - place
            size = put(ids_out, size, starts[GAP] + gap_state, gap)
            gap_state = NEXT_GAP_STATE[gap_state, ids_out[size - 1] & 63]
            place = ranks[entry] + 1
            context = starts[LEVEL] + classes[entry]
            entries = put_or_special(levels_out, entries, context, floor - levels[entry], levels[entry] == LEVEL_COUNT)
    return size, entries


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
def read_head(
    slots: NDArray[np.int32],
    starts: NDArray[np.int64],
    kind: int,
    per_nat: int,
    state: int,
    words: NDArray[np.uint32],
    left: int,
) -> tuple[int, int, int, int, int, int, int, int]:
    """Read what stands before the entries of a position.

    Args:
        slots: of all contexts.
        starts: of the families of contexts.
        kind: of the position before.
        per_nat: steps of odds.
        state, words, left: of the stream.

    Returns:
        The kind, -1 in a stream that was altered; odds, count, floor (-1: none), level of the tail, number of the
        entropy; the state after it, and the words that are left.
    """
    slot, state, left = take(slots, starts[KIND] + kind, state, words, left)
    kind = slot >> 20 & 63
    code, state, left = take_number(slots, starts[REALISED], state, words, left)
    odds = code >> 1 ^ -(code & 1)
    if code < 0:
        odds = CERTAIN_ODDS if code == NOT_A_NUMBER - OTHER_SPECIAL else IMPOSSIBLE_ODDS
    if slot < 0 or kind >= starts[KIND + 1] or code == NOTHING:
        return -1, 0, 0, 0, 0, 0, state, left
    chance = context_of_odds(odds, per_nat)
    count, state, left = take_number(slots, starts[COUNT] + chance, state, words, left)
    if count <= 0:
        entropy, state, left = take_number(slots, starts[ENTROPY] + chance, state, words, left)
        return kind if count == 0 and entropy >= 0 else -1, odds, count, -1, LEVEL_COUNT, entropy, state, left
    floor, state, left = take_number(slots, starts[FLOOR] + kind, state, words, left)
    tail, state, left = take_number(slots, starts[TAIL] + context_of_tail(max(floor, 0)), state, words, left)
    if floor == NOTHING or floor >= LEVEL_COUNT or tail == NOTHING or tail >= LEVEL_COUNT:
        return -1, 0, 0, 0, 0, 0, state, left
    tail = LEVEL_COUNT if tail < 0 else tail
    entropy, state, left = take_number(slots, starts[ENTROPY] + ODDS + context_of_tail(tail), state, words, left)
    return kind if entropy >= 0 else -1, odds, count, max(floor, -1), tail, entropy, state, left


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def read_entries(
    slots: NDArray[np.int32],
    starts: NDArray[np.int64],
    favourites: NDArray[np.int32],
    order: NDArray[np.int32],
    grid: NDArray[np.float64],
    values: NDArray[np.float32],
    floor: int,
    ids: NDArray[np.int32],
    logprobs: NDArray[np.float32],
    id_stream: tuple[int, NDArray[np.uint32], int],
    level_stream: tuple[int, NDArray[np.uint32], int],
) -> tuple[int, int, int, int, float, float, bool]:
    """Read the entries of a position; the arguments are those of `read_exact`, as far as they are of the position.

    Returns:
        State and words left of the first stream, and of the second; the sums of probabilities, and of those times
        their logarithms; whether all is well.
    """
    state, words, left = id_stream
    level_state, level_words, level_left = level_stream
    gaps, mass, products, damaged = starts[GAP], 0.0, 0.0, np.int64(0)
    rank, context = np.int64(0), gaps
    for at in range(len(ids)):
        entry = Index(at)
        slot, state, left = take(slots, context, state, words, left)
        damaged |= slot
        context = gaps + (slot >> 26 & 31)
        symbol = Index(slot >> 20 & 63)
        rank += FIRST[symbol]
        bits = RAW_BITS[symbol]
        if bits:
            rank += state & ((1 << bits) - 1)
            state >>= bits
            if state < LOWEST and left > 0:
                left -= 1
                state = state << WORD_BITS | np.int64(words[Index(left)])
        if rank < len(favourites):
            favourite = np.int64(favourites[Index(rank)])
        elif rank - len(favourites) < len(order):
            favourite = np.int64(order[Index(rank - len(favourites))]) | NOBODYS
        else:
            return state, left, level_state, level_left, mass, products, False
        rank += 1
        ids[entry] = favourite & ID_MASK
        context_of_level = starts[LEVEL] + (favourite >> ID_BITS & (LEVELS - 1))
        slot, level_state, level_left = take(slots, context_of_level, level_state, level_words, level_left)
        damaged |= slot
        level = floor - (slot >> 20 & 63)
        if slot >> 20 & 63 >= DIRECT:
            level, level_state, level_left = far_level(floor, slot >> 20 & 63, level_state, level_words, level_left)
        damaged |= level
        level &= 2 * LEVEL_COUNT - 1
        logprobs[entry] = values[Index(level)]
        mass += grid[1, Index(level)]
        products += grid[2, Index(level)]
    return state, left, level_state, level_left, mass, products, damaged >= 0


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def far_level(floor: int, symbol: int, state: int, words: NDArray[np.uint32], left: int) -> tuple[int, int, int]:
    """Return the level of an entry that is far above the floor, or never comes; the state after it, the words left."""
    if symbol >= SPECIAL:
        return LEVEL_COUNT if symbol == SPECIAL else -1, state, left
    bits = RAW_BITS[symbol]
    level = floor - FIRST[symbol] - (state & ((1 << bits) - 1))
    state >>= bits
    if state < LOWEST and left > 0:
        left -= 1
        state = state << WORD_BITS | np.int64(words[Index(left)])
    return level, state, left


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def read_exact(
    id_words: NDArray[np.uint32],
    level_words: NDArray[np.uint32],
    slots: NDArray[np.int32],
    starts: NDArray[np.int64],
    favourites: NDArray[np.int32],
    favourite_starts: NDArray[np.int64],
    order: NDArray[np.int32],
    grid: NDArray[np.float64],
    values: NDArray[np.float32],
    steps: tuple[float, float, int],
    realised_ids: NDArray[np.int32],
    offsets: NDArray[np.int64],
    ids: NDArray[np.int32],
    logprobs: NDArray[np.float32],
    kinds: NDArray[np.int64],
    of_positions: NDArray[np.float32],
) -> bool:
    """Read the two first streams of a document, and say whether they are whole.

    Args:
        id_words: the first stream, in words.
        level_words: the second.
        slots: of all contexts.
        starts: of the families of contexts.
        favourites: of all kinds, one after the other: id, and class above ID_BITS.
        favourite_starts: [C + 1], where those of each kind begin.
        order: [U], ids by rank.
        grid: [3, 2 LEVEL_COUNT]: log-probability, probability, and their product, of each level.
        values: [2 LEVEL_COUNT], log-probabilities again.
        steps: of odds, of entropy; how many of odds are a nat.
        realised_ids: [P].
        offsets: [P + 1], filled.
        ids: [P + E], filled; the realised token first.
        logprobs: [P + E], filled.
        kinds: [P], filled.
        of_positions: [3, P], filled: tail mass, log-probability of the realised token, entropy.
    """
    odds_step, entropy_step, per_nat = steps
    state, left = start(id_words)
    level_state, level_left = start(level_words)
    kind = at = 0
    for position in range(len(realised_ids)):
        kind, odds, count, floor, tail, number, state, left = read_head(
            slots, starts, kind, per_nat, state, id_words, left
        )
        if kind < 0 or count >= len(ids) - at:
            return False
        own, others = logs_of_odds(odds, odds_step)
        kinds[position], offsets[position + 1] = kind, at + 1 + count
        ids[at], logprobs[at] = realised_ids[position], own
        of_positions[1, position] = own
        at += 1
        if count == 0:
            of_positions[0, position], of_positions[2, position] = math.exp(others), number * entropy_step
            continue
        some = logprobs[at : at + count]
        state, left, level_state, level_left, mass, products, well = read_entries(
            slots, starts, favourites[favourite_starts[kind] : favourite_starts[kind + 1]], order, grid, values, floor,
            ids[at : at + count], some, (state, id_words, left), (level_state, level_words, level_left),
        )  # fmt: skip
        if not well:
            return False
        shift, tail_mass, entropy = shared(others, mass, products, grid[1, tail], grid[2, tail])
        some += np.float32(shift)
        rest = (number >> 1 ^ -(number & 1)) * entropy_step
        of_positions[0, position], of_positions[2, position] = tail_mass, entropy + entropy_of(own) + rest
        at += count
    return at == len(ids) and state == 0 and left == 0 and level_state == 0 and level_left == 0


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
    slots: NDArray[np.int32],
    starts: NDArray[np.int64],
    favourites: NDArray[np.int32],
    favourite_starts: NDArray[np.int64],
    order: NDArray[np.int32],
    kinds: NDArray[np.int64],
    draws: int,
    offsets: NDArray[np.int64],
    ids: NDArray[np.int32],
    counts: NDArray[np.int32],
) -> bool:
    """Read the stream of a set of draws, and say whether it is whole.

    Args:
        words: the stream.
        slots, starts, favourites, favourite_starts, order: as for `read_exact`.
        kinds: [P], of positions.
        draws: n.
        offsets: [P + 1], filled.
        ids: [D], filled, by rank.
        counts: [D], filled.
    """
    state, left = start(words)
    at = 0
    for position in range(len(kinds)):
        first = favourite_starts[kinds[position]]
        favourites_here = favourite_starts[kinds[position] + 1] - first
        rank, gap_state, to_come = 0, 0, draws
        while to_come > 0:
            slot, _, _ = take(slots, starts[DRAWN_GAP] + gap_state, state, words, left)
            gap, state, left = take_number(slots, starts[DRAWN_GAP] + gap_state, state, words, left)
            if gap == NOT_A_NUMBER - SPECIAL and to_come == draws:
                break
            gap_state = slot >> 26 & 31
            rank += gap
            more = 0
            if to_come > 1:
                more, state, left = take_number(slots, starts[DRAWN_COUNT] + gap_state, state, words, left)
            to_come -= more + 1
            if gap < 0 or more < 0 or to_come < 0 or at >= len(ids) or rank - favourites_here >= len(order):
                return False
            id_here = favourites[first + rank] & ID_MASK if rank < favourites_here else order[rank - favourites_here]
            ids[at], counts[at] = id_here, more + 1
            rank += 1
            at += 1
        offsets[position + 1] = at
    return at == len(ids) and state == 0 and left == 0


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def join_drawn(
    offsets: NDArray[np.int64],
    ids: NDArray[np.int32],
    logprobs: NDArray[np.float32],
    drawn_offsets: NDArray[np.int64],
    drawn_ids: NDArray[np.int32],
    counts: NDArray[np.int32],
    draws: int,
    tail_mass: NDArray[np.float32],
    joint_offsets: NDArray[np.int64],
    joint_ids: NDArray[np.int32],
    joint_logprobs: NDArray[np.float32],
) -> None:
    """Put the ids that were drawn behind the exact ones of their positions, with the estimates that they are.

    Args:
        offsets, ids, logprobs: [P + 1], [E], [E], exact.
        drawn_offsets, drawn_ids, counts: [P + 1], [D], [D].
        draws: n.
        tail_mass: [P]; set to 0 where anything was drawn.
        joint_offsets, joint_ids, joint_logprobs: [P + 1], [E + D], [E + D], filled.
    """
    at = 0
    for position in range(len(offsets) - 1):
        for entry in range(offsets[position], offsets[position + 1]):
            joint_ids[at], joint_logprobs[at] = ids[entry], logprobs[entry]
            at += 1
        first, stop = drawn_offsets[position], drawn_offsets[position + 1]
        if first < stop:
            share = math.log(tail_mass[position] / draws) if tail_mass[position] > 0 else -np.inf
            for entry in range(first, stop):
                joint_ids[at], joint_logprobs[at] = drawn_ids[entry], math.log(counts[entry]) + share
                at += 1
            tail_mass[position] = 0
        joint_offsets[position + 1] = at


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
    slots: NDArray[np.int32],
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
                slot, _, _ = take(slots, starts[FAVOURITE_GAP] + gap_state, state, words, left)
                gap, state, left = take_number(slots, starts[FAVOURITE_GAP] + gap_state, state, words, left)
                gap_state = slot >> 26 & 31
                level, state, left = take_number(slots, starts[FAVOURITE_LEVEL], state, words, left)
                rank += gap
                if gap < 0 or rank >= len(order) or level < 0 or level >= LEVELS:
                    return False
                favourites[at] = order[rank] | level << ID_BITS
                rank += 1
                at += 1
        favourite_starts[kind + 1] = at
    return at == len(favourites) and state == 0 and left == 0
