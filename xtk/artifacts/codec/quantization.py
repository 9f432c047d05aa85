"""Scores as whole numbers: what is lost is lost here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xtk.artifacts.codec.logprob_stream_kernels import CERTAIN_ODDS, IMPOSSIBLE_ODDS
from xtk.artifacts.codec.quantization_levels import (
    LEVEL_PADDING,
    LEVEL_TABLE_SIZE,
    QUANTIZATION_STEPS,
    level_logprobs,
    nearest_levels,
)
from xtk.tokens.teacher_logprobs import StoredLogprobs


@dataclass(frozen=True)
class QuantizationTables:
    """The levels of a precision as tables.

    Attributes:
        levels: float64 [LEVEL_COUNT], from 0 down.
        level_table: float64 [3, PLACES]: the log-probability, the probability and their product of each level, from
            BELOW
            on; NaN below; at last -inf, 0 and 0.
        logprobs: float32 [PLACES], the log-probabilities.
        steps: of odds and of entropy in nats; how many of odds are a nat.
    """

    levels: NDArray[np.float64]
    level_table: NDArray[np.float64]
    logprobs: NDArray[np.float32]
    steps: tuple[float, float, int]

    @classmethod
    def for_precision(cls, name: str) -> QuantizationTables:
        """Return the tables of a precision, by its name."""
        precision = QUANTIZATION_STEPS[name]
        levels = level_logprobs(precision)
        table = np.full((3, LEVEL_TABLE_SIZE), np.nan)
        table[:, LEVEL_PADDING:-1] = levels, np.exp(levels), levels * np.exp(levels)
        table[:, -1] = -np.inf, 0, 0
        steps = (precision.odds_step, precision.entropy_step, round(1 / precision.odds_step))
        return cls(levels, table, table[0].astype(np.float32), steps)


@dataclass(frozen=True)
class QuantizedLogprobs:
    """A document's scores as whole numbers, but for its entropies.

    Attributes:
        observed_odds: int64 [P], of the realised tokens, in steps; or CERTAIN_ODDS, IMPOSSIBLE_ODDS.
        tail_levels: int64 [P], levels of the mass outside; LEVEL_COUNT: none.
        entropies: float64 [P], nats.
        offsets: int64 [P + 1], of the exact ids but for the realised ones.
        entry_positions: int64 [E], the positions of those.
        ids: int32 [E].
        levels: int64 [E]; LEVEL_COUNT: of what never comes.
        sampled_offsets: int64 [P * R + 1], as `Scores` have them.
        sampled_positions: int64 [D], the positions of ids that were drawn.
        sampled_ids: int32 [D].
        sample_counts: int64 [D].
        num_sample_sets: R.
    """

    observed_odds: NDArray[np.int64]
    tail_levels: NDArray[np.int64]
    entropies: NDArray[np.float64]
    offsets: NDArray[np.int64]
    entry_positions: NDArray[np.int64]
    ids: NDArray[np.int32]
    levels: NDArray[np.int64]
    sampled_offsets: NDArray[np.int64]
    sampled_positions: NDArray[np.int64]
    sampled_ids: NDArray[np.int32]
    sample_counts: NDArray[np.int64]
    num_sample_sets: int

    def __len__(self) -> int:
        return len(self.observed_odds)


def quantize(
    stored_logprobs: StoredLogprobs,
    observed_ids: NDArray[np.int32],
    num_sample_sets: int,
    num_samples: int,
    grid: QuantizationTables,
) -> QuantizedLogprobs:
    """Round the scores of a document.

    Args:
        stored_logprobs: of the document.
        observed_ids: int32 [P], the tokens that stand there.
        num_sample_sets: R.
        num_samples: n, of a set.
        grid: of the precision.

    Raises:
        ValueError: the scores are not what they should be: the realised token is not among the exact ids, there are
            more or fewer sets of draws, or the counts of one do not sum to n.
    """
    size = len(stored_logprobs)
    owners = entry_owners(stored_logprobs.offsets)
    realised = stored_logprobs.ids == observed_ids[owners]
    if not np.array_equal(owners[realised], np.arange(size)):
        raise ValueError("the token that stands there is not once among the exact ids of its position")
    drawn = entry_owners(stored_logprobs.sample_offsets)
    sums = np.bincount(drawn, stored_logprobs.sample_counts, minlength=size * num_sample_sets)
    if (
        len(sums) != size * num_sample_sets
        or (stored_logprobs.sample_counts < 1).any()
        or ((sums != 0) & (sums != num_samples)).any()
    ):
        raise ValueError(f"the draws of a document are not {num_sample_sets} sets whose counts sum to {num_samples}")
    others = ~realised
    logprobs, owners = stored_logprobs.logprobs[others], owners[others]
    tail = stored_logprobs.remainder_mass.astype(np.float64)
    rest = np.bincount(owners, np.exp(logprobs.astype(np.float64)), minlength=size) + tail
    with np.errstate(divide="ignore"):
        odds = stored_logprobs.observed_logprobs.astype(np.float64) - np.log(rest)
        tails = nearest_levels(np.log(tail), grid.levels)
    certain, impossible = rest == 0, np.isneginf(stored_logprobs.observed_logprobs)
    steps = np.rint(np.where(certain | impossible, 0, odds) / grid.steps[0]).astype(np.int64)
    return QuantizedLogprobs(
        observed_odds=np.where(impossible, IMPOSSIBLE_ODDS, np.where(certain, CERTAIN_ODDS, steps)),
        tail_levels=tails,
        entropies=stored_logprobs.entropy.astype(np.float64),
        offsets=sizes_to_offsets(np.bincount(owners, minlength=size)),
        entry_positions=owners,
        ids=stored_logprobs.ids[others],
        levels=nearest_levels(logprobs, grid.levels),
        sampled_offsets=stored_logprobs.sample_offsets,
        sampled_positions=drawn // max(num_sample_sets, 1),
        sampled_ids=stored_logprobs.sample_ids,
        sample_counts=stored_logprobs.sample_counts.astype(np.int64),
        num_sample_sets=num_sample_sets,
    )


def sizes_to_offsets(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return int64 [n + 1], where each of n lists that follow each other begins, and where the last ends."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])


def entry_owners(offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return of each entry of such lists the number of its list."""
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
