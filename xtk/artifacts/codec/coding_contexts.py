"""Which symbols share their frequencies: the contexts of the entropy coder, numbered one after the other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xtk.artifacts.codec.integer_symbols import FIRST_NUMBER, NUM_SYMBOLS, SPECIAL_SYMBOL

# Of gaps: where the sum of the gaps before stands, roughly. Few states, so that their tables stay near the processor.
GAP_STATES = np.array(
    [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 4096, 16384], np.int64
)
NUM_GAP_STATES = len(GAP_STATES)
NUM_ODDS_CONTEXTS = 17  # how likely the realised token is: the logarithm of its odds in nats, between -8 and 8
NUM_TAIL_CONTEXTS = 32  # how much is in the tail: its level, two of them together
NUM_LEVEL_CONTEXTS = 8  # how likely an id mostly is where it is kept; the last is of ids that are nobody's favourites
NUM_TOKEN_CONTEXTS = 48  # after a token: the class of its rank, or the last of these

# Families of contexts, in their order: of a signal, of the favourites in a shard's tables, of tokens.
CLUSTER, OBSERVED_ODDS, COUNT, FLOOR, TAIL, ENTROPY, GAP, LEVEL, SAMPLED_GAP, SAMPLED_COUNT = range(10)
FREQUENT_ID_COUNT, FREQUENT_ID_GAP, FREQUENT_ID_LEVEL = range(3)
TOKEN, LENGTH = range(2)


def logprob_families(num_clusters: int, num_sample_sets: int) -> list[int]:
    """Return how many contexts each family of a signal has.

    Args:
        num_clusters: C, kinds of positions.
        num_sample_sets: R, of draws.
    """
    drawn = NUM_GAP_STATES if num_sample_sets else 0
    return [
        num_clusters,
        1,
        NUM_ODDS_CONTEXTS,
        num_clusters,
        NUM_TAIL_CONTEXTS,
        NUM_ODDS_CONTEXTS + NUM_TAIL_CONTEXTS,
        NUM_GAP_STATES,
        NUM_LEVEL_CONTEXTS,
        drawn,
        drawn,
    ]


FREQUENT_ID_FAMILIES = [1, NUM_GAP_STATES, 1]
TOKEN_FAMILIES = [NUM_TOKEN_CONTEXTS, 1]


def first_contexts(families: list[int]) -> NDArray[np.int64]:
    """Return int64 [families + 1], the first context of each family, and how many contexts there are."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(families, dtype=np.int64)])


def _next_gap_states() -> NDArray[np.int64]:
    sums = GAP_STATES[:, None] + FIRST_NUMBER[None, :SPECIAL_SYMBOL] + 1
    states = np.zeros((NUM_GAP_STATES, NUM_SYMBOLS), np.int64)
    states[:, :SPECIAL_SYMBOL] = np.searchsorted(GAP_STATES, sums, side="right") - 1
    return states


# int64 [GAPS, SYMBOLS], the state after a gap: the last one whose value is at most the sum of the value of the state
# before, the first gap of the class, and 1.
NEXT_GAP_STATE = _next_gap_states()
