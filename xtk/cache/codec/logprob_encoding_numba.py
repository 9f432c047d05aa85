"""Numba kernels that encode the exact log-probabilities of a document; they release the GIL.

Each function has a slow, readable reference implementation in the tests. docs/reference/codec.md defines the symbols.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.cache.codec.ans_entropy_coder import append_number, append_symbol
from xtk.cache.codec.integer_coding import SPECIAL_SYMBOL, UNUSED_SYMBOL
from xtk.cache.codec.logprob_decoding_numba import (
    CERTAIN_ODDS,
    IMPOSSIBLE_ODDS,
    NO_FLOOR,
    entropy_term,
    odds_context,
    odds_to_logprobs,
    renormalize_position,
    tail_context,
)
from xtk.cache.codec.quantization_levels import LEVEL_PADDING, NUM_LEVELS
from xtk.cache.codec.symbol_probability_contexts import (
    CLUSTER,
    COUNT,
    ENTROPY,
    FLOOR,
    GAP,
    LEVEL,
    NEXT_GAP_STATE,
    NUM_ODDS_CONTEXTS,
    OBSERVED_ODDS,
    TAIL,
)
from xtk.numba_kernel import numba_kernel


@numba_kernel
def append_odds(records: NDArray[np.int64], size: int, context: int, odds: int) -> Any:
    """Append odds to the records and return their new count."""
    if odds == CERTAIN_ODDS:
        return append_symbol(records, size, context, UNUSED_SYMBOL)
    return append_number_or_special(
        records, size, context, 2 * odds if odds >= 0 else -2 * odds - 1, odds == IMPOSSIBLE_ODDS
    )


@numba_kernel
def append_number_or_special(records: NDArray[np.int64], size: int, context: int, number: int, special: bool) -> Any:
    """Append a number, or SPECIAL_SYMBOL if `special`, to the records and return their new count."""
    return (
        append_symbol(records, size, context, SPECIAL_SYMBOL)
        if special
        else append_number(records, size, context, number)
    )


@numba_kernel
def encode_positions(
    starts: NDArray[np.int64],
    clusters: NDArray[np.int64],  # [P], of positions
    odds: NDArray[np.int64],  # [P], log-odds of the observed tokens, in steps; or CERTAIN_ODDS, IMPOSSIBLE_ODDS
    entropies: NDArray[np.float64],  # [P], nats
    tails: NDArray[np.int64],  # [P], levels of the remainder mass; NUM_LEVELS: no remainder
    offsets: NDArray[np.int64],  # [P + 1] of the entries, without observed tokens
    levels: NDArray[np.int64],  # [E]
    grid: NDArray[np.float64],  # [3, LEVEL_TABLE_SIZE]: log-probability, probability, and their product, of each level
    steps: tuple[float, float, int],  # odds step and entropy step in nats, and the number of odds steps per nat
    floors: NDArray[np.int64],  # [P], filled: the level of the least likely finite entry; -1: no finite entry
    out: NDArray[np.int64],  # [6 P], filled
) -> int:
    """Convert the fields of a document's positions into records; return the number of records."""
    odds_step, entropy_step, per_nat = steps
    cluster = size = 0
    for position in range(len(clusters)):
        size = append_symbol(out, size, starts[CLUSTER] + cluster, clusters[position])
        cluster = clusters[position]
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
        size = append_number_or_special(out, size, starts[FLOOR] + cluster, floor, floor < 0)
        size = append_number_or_special(out, size, starts[TAIL] + tail_context(max(floor, 0)), tail, tail == NUM_LEVELS)
        rest = round((entropies[position] - entropy - entropy_term(own)) / entropy_step)
        context = starts[ENTROPY] + NUM_ODDS_CONTEXTS + tail_context(tail)
        size = append_number(out, size, context, 2 * rest if rest >= 0 else -2 * rest - 1)
    return size


@numba_kernel
def encode_entries(
    starts: NDArray[np.int64],
    offsets: NDArray[np.int64],  # [P + 1]
    floors: NDArray[np.int64],  # [P]
    ranks: NDArray[np.int64],  # [E], ranks among the ids of the cluster, increasing within a position
    classes: NDArray[np.int64],  # [E], level context of each id
    levels: NDArray[np.int64],  # [E]
    ids_out: NDArray[np.int64],  # [E], filled
    levels_out: NDArray[np.int64],  # [E], filled
) -> None:
    """Convert the entries of a document into records: one of its id and one of its level for each entry."""
    for position in range(len(floors)):
        place = gap_state = 0
        for entry in range(offsets[position], offsets[position + 1]):
            append_number(ids_out, entry, starts[GAP] + gap_state, ranks[entry] - place)
            gap_state = NEXT_GAP_STATE[gap_state, ids_out[entry] & 63]
            place = ranks[entry] + 1
            level = levels[entry]
            context = starts[LEVEL] + classes[entry]
            append_number_or_special(levels_out, entry, context, floors[position] - level, level == NUM_LEVELS)
