"""Quantization of stored log-probabilities to integers: the only lossy step of the packed codec."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xtk.cache.codec.logprob_decoding_numba import CERTAIN_ODDS, IMPOSSIBLE_ODDS
from xtk.cache.codec.quantization_levels import (
    LEVEL_PADDING,
    LEVEL_TABLE_SIZE,
    QUANTIZATION_STEPS,
    level_logprobs,
    nearest_levels,
)
from xtk.cache.teacher_logprobs import StoredLogprobs, sizes_to_offsets


@dataclass(frozen=True)
class QuantizationTables:
    """Tables of the quantization levels of a precision."""

    levels: NDArray[np.float64]  # [NUM_LEVELS], log-probabilities from 0 down, nats
    # [3, LEVEL_TABLE_SIZE]: log-probability, probability and their product of each level: first LEVEL_PADDING times
    # NaN, then the levels, then -inf, 0 and 0.
    level_table: NDArray[np.float64]
    logprobs: NDArray[np.float32]  # [LEVEL_TABLE_SIZE], the log-probabilities of `level_table`
    steps: tuple[float, float, int]  # odds step and entropy step in nats, and the number of odds steps per nat

    @classmethod
    def for_precision(cls, name: str) -> QuantizationTables:
        """Return the tables of a precision, a key of `QUANTIZATION_STEPS`."""
        precision = QUANTIZATION_STEPS[name]
        levels = level_logprobs(precision)
        table = np.full((3, LEVEL_TABLE_SIZE), np.nan)
        table[:, LEVEL_PADDING:-1] = levels, np.exp(levels), levels * np.exp(levels)
        table[:, -1] = -np.inf, 0, 0
        steps = (precision.odds_step, precision.entropy_step, round(1 / precision.odds_step))
        return cls(levels, table, table[0].astype(np.float32), steps)


@dataclass(frozen=True)
class QuantizedLogprobs:
    """Quantized log-probabilities of a document; entropies are rounded only when they are encoded."""

    observed_odds: NDArray[np.int64]  # [P], log-odds of the observed tokens, in steps; or CERTAIN_ODDS, IMPOSSIBLE_ODDS
    tail_levels: NDArray[np.int64]  # [P], levels of the remainder mass; NUM_LEVELS: no remainder
    entropies: NDArray[np.float64]  # [P], nats
    offsets: NDArray[np.int64]  # [P + 1], of the exact entries without the observed tokens
    entry_positions: NDArray[np.int64]  # [E], the position of each entry
    ids: NDArray[np.int32]  # [E]
    levels: NDArray[np.int64]  # [E]; NUM_LEVELS: probability 0
    sampled_offsets: NDArray[np.int64]  # [P * R + 1], as in `StoredLogprobs`
    sampled_positions: NDArray[np.int64]  # [D], the positions of sampled ids
    sampled_ids: NDArray[np.int32]  # [D]
    sample_counts: NDArray[np.int64]  # [D]
    num_sample_sets: int  # R
    sampled_depths: NDArray[np.int64]  # [D], log-probabilities below that of the remainder, in steps; empty: not stored

    def __len__(self) -> int:
        return len(self.observed_odds)


def quantize(
    stored_logprobs: StoredLogprobs,
    observed_ids: NDArray[np.int32],  # int32 [P], the observed tokens
    num_sample_sets: int,
    num_samples: int,  # n, samples per set
    grid: QuantizationTables,
    depth_step: float = 0.0,  # of the log-probabilities of sampled ids, nats; 0: they are not stored
) -> QuantizedLogprobs:
    """Return the quantized log-probabilities of a document; ValueError for entries or samples that do not fit."""
    size = len(stored_logprobs)
    owners = entry_owners(stored_logprobs.offsets)
    observed = stored_logprobs.ids == observed_ids[owners]
    if not np.array_equal(owners[observed], np.arange(size)):
        raise ValueError("the exact token ids of a position must contain its observed token exactly once")
    sampled = entry_owners(stored_logprobs.sample_offsets)
    sums = np.bincount(sampled, stored_logprobs.sample_counts, minlength=size * num_sample_sets)
    if (
        len(sums) != size * num_sample_sets
        or (stored_logprobs.sample_counts < 1).any()
        or ((sums != 0) & (sums != num_samples)).any()
    ):
        raise ValueError(
            f"each position of a document must have {num_sample_sets} sample sets whose counts sum to {num_samples}"
        )
    others = ~observed
    logprobs, owners = stored_logprobs.logprobs[others], owners[others]
    tail = stored_logprobs.remainder_mass.astype(np.float64)
    rest = np.bincount(owners, np.exp(logprobs.astype(np.float64)), minlength=size) + tail
    with np.errstate(divide="ignore"):
        odds = stored_logprobs.observed_logprobs.astype(np.float64) - np.log(rest)
        tails = nearest_levels(np.log(tail), grid.levels)
    sampled_positions = sampled // max(num_sample_sets, 1)
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
        sampled_positions=sampled_positions,
        sampled_ids=stored_logprobs.sample_ids,
        sample_counts=stored_logprobs.sample_counts.astype(np.int64),
        num_sample_sets=num_sample_sets,
        sampled_depths=_depths(stored_logprobs, np.log(tail[sampled_positions]), depth_step),
    )


def _depths(
    stored_logprobs: StoredLogprobs, remainder_logprobs: NDArray[np.float64], depth_step: float
) -> NDArray[np.int64]:
    """Return int64 [D], the depths of sampled ids below their position's remainder [D], in steps."""
    if not depth_step:
        return np.zeros(0, np.int64)
    logprobs = stored_logprobs.sample_logprobs
    if logprobs is None or not np.isfinite(logprobs).all():  # an id of probability 0 is never sampled
        raise ValueError("sampled ids must have finite log-probabilities")
    return np.rint(np.maximum(remainder_logprobs - logprobs, 0) / depth_step).astype(np.int64)


def entry_owners(offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return int64 [offsets[-1]], the list that each entry of concatenated lists belongs to."""
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
