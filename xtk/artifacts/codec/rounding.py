"""Scores as whole numbers: what is lost is lost here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xtk.artifacts.codec.exact_kernels import CERTAIN_ODDS, IMPOSSIBLE_ODDS
from xtk.artifacts.codec.grids import BELOW, PLACES, PRECISIONS, levels_of, nearest_levels
from xtk.tokens.signal import Scores


@dataclass(frozen=True)
class Grid:
    """The levels of a precision as tables.

    Attributes:
        levels: float64 [LEVEL_COUNT], from 0 down.
        table: float64 [3, PLACES]: the log-probability, the probability and their product of each level, from BELOW
            on; NaN below; at last -inf, 0 and 0.
        values: float32 [PLACES], the log-probabilities.
        steps: of odds and of entropy in nats; how many of odds are a nat.
    """

    levels: NDArray[np.float64]
    table: NDArray[np.float64]
    values: NDArray[np.float32]
    steps: tuple[float, float, int]

    @classmethod
    def of(cls, name: str) -> Grid:
        """Return the tables of a precision, by its name."""
        precision = PRECISIONS[name]
        levels = levels_of(precision)
        table = np.full((3, PLACES), np.nan)
        table[:, BELOW:-1] = levels, np.exp(levels), levels * np.exp(levels)
        table[:, -1] = -np.inf, 0, 0
        steps = (precision.odds_step, precision.entropy_step, round(1 / precision.odds_step))
        return cls(levels, table, table[0].astype(np.float32), steps)


@dataclass(frozen=True)
class Rounded:
    """A document's scores as whole numbers, but for its entropies.

    Attributes:
        odds: int64 [P], of the realised tokens, in steps; or CERTAIN_ODDS, IMPOSSIBLE_ODDS.
        tails: int64 [P], levels of the mass outside; LEVEL_COUNT: none.
        entropies: float64 [P], nats.
        offsets: int64 [P + 1], of the exact ids but for the realised ones.
        owners: int64 [E], the positions of those.
        ids: int32 [E].
        levels: int64 [E]; LEVEL_COUNT: of what never comes.
        drawn_offsets: int64 [P * R + 1], as `Scores` have them.
        drawn_owners: int64 [D], the positions of ids that were drawn.
        drawn_ids: int32 [D].
        counts: int64 [D].
        sets: R.
    """

    odds: NDArray[np.int64]
    tails: NDArray[np.int64]
    entropies: NDArray[np.float64]
    offsets: NDArray[np.int64]
    owners: NDArray[np.int64]
    ids: NDArray[np.int32]
    levels: NDArray[np.int64]
    drawn_offsets: NDArray[np.int64]
    drawn_owners: NDArray[np.int64]
    drawn_ids: NDArray[np.int32]
    counts: NDArray[np.int64]
    sets: int

    def __len__(self) -> int:
        return len(self.odds)


def rounded(scores: Scores, realised_ids: NDArray[np.int32], sets: int, draws: int, grid: Grid) -> Rounded:
    """Round the scores of a document.

    Args:
        scores: of the document.
        realised_ids: int32 [P], the tokens that stand there.
        sets: R.
        draws: n, of a set.
        grid: of the precision.

    Raises:
        ValueError: the scores are not what they should be: the realised token is not among the exact ids, there are
            more or fewer sets of draws, or the counts of one do not sum to n.
    """
    size = len(scores)
    owners = owners_of(scores.offsets)
    realised = scores.ids == realised_ids[owners]
    if not np.array_equal(owners[realised], np.arange(size)):
        raise ValueError("the token that stands there is not once among the exact ids of its position")
    drawn = owners_of(scores.drawn_offsets)
    sums = np.bincount(drawn, scores.counts, minlength=size * sets)
    if len(sums) != size * sets or (scores.counts < 1).any() or ((sums != 0) & (sums != draws)).any():
        raise ValueError(f"the draws of a document are not {sets} sets whose counts sum to {draws}")
    others = ~realised
    logprobs, owners = scores.logprobs[others], owners[others]
    tail = scores.tail_mass.astype(np.float64)
    rest = np.bincount(owners, np.exp(logprobs.astype(np.float64)), minlength=size) + tail
    with np.errstate(divide="ignore"):
        odds = scores.realised_logprobs.astype(np.float64) - np.log(rest)
        tails = nearest_levels(np.log(tail), grid.levels)
    certain, impossible = rest == 0, np.isneginf(scores.realised_logprobs)
    steps = np.rint(np.where(certain | impossible, 0, odds) / grid.steps[0]).astype(np.int64)
    return Rounded(
        odds=np.where(impossible, IMPOSSIBLE_ODDS, np.where(certain, CERTAIN_ODDS, steps)),
        tails=tails,
        entropies=scores.entropy.astype(np.float64),
        offsets=offsets_of(np.bincount(owners, minlength=size)),
        owners=owners,
        ids=scores.ids[others],
        levels=nearest_levels(logprobs, grid.levels),
        drawn_offsets=scores.drawn_offsets,
        drawn_owners=drawn // max(sets, 1),
        drawn_ids=scores.drawn_ids,
        counts=scores.counts.astype(np.int64),
        sets=sets,
    )


def offsets_of(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return int64 [n + 1], where each of n lists that follow each other begins, and where the last ends."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])


def owners_of(offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return of each entry of such lists the number of its list."""
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
