"""Contexts of the ANS coder: the groups of symbols that share a frequency table, and their numbers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xtk.cache.codec.integer_coding import FIRST_NUMBER, NUM_SYMBOLS, SPECIAL_SYMBOL

# Contexts of gaps: a coarse value of the sum of the previous gaps. Few states, so that their tables stay in the
# processor's cache.
GAP_STATES = np.array(
    [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 4096, 16384], np.int64
)
NUM_GAP_STATES = len(GAP_STATES)
NUM_ODDS_CONTEXTS = 17  # log-odds of the observed token in whole nats, clipped to -8 and 8
NUM_TAIL_CONTEXTS = 32  # remainder mass: two of its levels share a context
NUM_LEVEL_CONTEXTS = 8  # usual probability of an id where it is stored; the last: ids that are not frequent
NUM_DEPTH_COUNTS = 3  # contexts of depths: how often the id was sampled, clipped; times the level context of the id
NUM_TOKEN_CONTEXTS = 48  # symbol of the previous token's rank, clipped

# Families of contexts, in this order: log-probabilities, frequent ids in a shard's tables, tokens.
CLUSTER, OBSERVED_ODDS, COUNT, FLOOR, TAIL, ENTROPY, GAP, LEVEL, SAMPLED_GAP, SAMPLED_COUNT, SAMPLED_DEPTH = range(11)
FREQUENT_ID_COUNT, FREQUENT_ID_GAP, FREQUENT_ID_LEVEL = range(3)
TOKEN, LENGTH = range(2)


def logprob_families(num_clusters: int, num_sample_sets: int, *, has_depths: bool = False) -> list[int]:
    """Return the number of contexts of each family for log-probabilities."""
    sampled = NUM_GAP_STATES if num_sample_sets else 0
    return [
        num_clusters,
        1,
        NUM_ODDS_CONTEXTS,
        num_clusters,
        NUM_TAIL_CONTEXTS,
        NUM_ODDS_CONTEXTS + NUM_TAIL_CONTEXTS,
        NUM_GAP_STATES,
        NUM_LEVEL_CONTEXTS,
        sampled,
        sampled,
        NUM_DEPTH_COUNTS * NUM_LEVEL_CONTEXTS if sampled and has_depths else 0,
    ]


FREQUENT_ID_FAMILIES = [1, NUM_GAP_STATES, 1]
TOKEN_FAMILIES = [NUM_TOKEN_CONTEXTS, 1]


def first_contexts(families: list[int]) -> NDArray[np.int64]:
    """Return int64 [families + 1], the first context of each family, and the total number of contexts."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(families, dtype=np.int64)])


def _next_gap_states() -> NDArray[np.int64]:
    sums = GAP_STATES[:, None] + FIRST_NUMBER[None, :SPECIAL_SYMBOL] + 1
    states = np.zeros((NUM_GAP_STATES, NUM_SYMBOLS), np.int64)
    states[:, :SPECIAL_SYMBOL] = np.searchsorted(GAP_STATES, sums, side="right") - 1
    return states


# int64 [NUM_GAP_STATES, NUM_SYMBOLS], the state after a gap: the last one whose value is at most the value of the
# previous state, plus the first gap of the symbol, plus 1.
NEXT_GAP_STATE = _next_gap_states()
