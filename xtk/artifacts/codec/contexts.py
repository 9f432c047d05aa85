"""Which symbols share their frequencies: the contexts of the entropy coder, numbered one after the other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xtk.artifacts.codec.numbers import FIRST, SPECIAL, SYMBOLS

# Of gaps: where the sum of the gaps before stands, roughly. Few states, so that their tables stay near the processor.
GAP_STATES = np.array(
    [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 4096, 16384], np.int64
)
GAPS = len(GAP_STATES)
ODDS = 17  # how likely the realised token is: the logarithm of its odds in nats, between -8 and 8
TAILS = 32  # how much is in the tail: its level, two of them together
LEVELS = 8  # how likely an id mostly is where it is kept; the last is of ids that are nobody's favourites
AFTER = 48  # after a token: the class of its rank, or the last of these

# Families of contexts, in their order: of a signal, of the favourites in a shard's tables, of tokens.
KIND, REALISED, COUNT, FLOOR, TAIL, ENTROPY, GAP, LEVEL, DRAWN_GAP, DRAWN_COUNT = range(10)
FAVOURITE_COUNT, FAVOURITE_GAP, FAVOURITE_LEVEL = range(3)
TOKEN, LENGTH = range(2)


def signal_families(kinds: int, sets: int) -> list[int]:
    """Return how many contexts each family of a signal has.

    Args:
        kinds: C, kinds of positions.
        sets: R, of draws.
    """
    drawn = GAPS if sets else 0
    return [kinds, 1, ODDS, kinds, TAILS, ODDS + TAILS, GAPS, LEVELS, drawn, drawn]


FAVOURITE_FAMILIES = [1, GAPS, 1]
TOKEN_FAMILIES = [AFTER, 1]


def starts_of(families: list[int]) -> NDArray[np.int64]:
    """Return int64 [families + 1], the first context of each family, and how many contexts there are."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(families, dtype=np.int64)])


def _next_gap_states() -> NDArray[np.int64]:
    sums = GAP_STATES[:, None] + FIRST[None, :SPECIAL] + 1
    states = np.zeros((GAPS, SYMBOLS), np.int64)
    states[:, :SPECIAL] = np.searchsorted(GAP_STATES, sums, side="right") - 1
    return states


# int64 [GAPS, SYMBOLS], the state after a gap: the last one whose value is at most the sum of the value of the state
# before, the first gap of the class, and 1.
NEXT_GAP_STATE = _next_gap_states()
