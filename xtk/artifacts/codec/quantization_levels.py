"""How exactly log-probabilities are kept: the precisions, and the levels that each has."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.artifacts.codec.integer_symbols import NUMBER_LIMIT

# Steps double each time that the log-probability falls by so much: error costs divergence in proportion to the
# probability times the square of the step, so that four times less likely tokens may have steps twice as wide.
NATS_PER_DOUBLING = 1.5
# Below exp(-32) nobody looks; the steps are such that any float32 that a softmax gives has a level.
LOW_PROBABILITY_NATS, LOW_PROBABILITY_STEP = 32.0, 8.0
NUM_LEVELS = 512
# Tables of levels begin with places that only a stream leads to that was altered, and end with one for -inf.
LEVEL_PADDING = 32
# How many steps of odds there are on each side of even ones: stored are numbers below BEYOND, for both signs.
MAX_ODDS_STEPS = NUMBER_LIMIT // 2
LEVEL_TABLE_SIZE = LEVEL_PADDING + NUM_LEVELS + 1


@dataclass(frozen=True)
class QuantizationSteps:
    """The widths of steps, in nats; an error is half a step at most, but for what all errors of a position share.

    Attributes:
        first_step: of log-probabilities from 0 down to -1.5; then it doubles every 1.5 nats.
        largest_step: where doubling ends.
        odds_step: of the logarithm of the realised token's odds.
        entropy_step: of the entropy.
    """

    first_step: float
    largest_step: float
    odds_step: float
    entropy_step: float

    def widest_step(self, logprobs: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
        """Return the step between levels at log-probabilities that were read, or within half a nat below them."""
        doublings = np.floor((0.5 - np.maximum(logprobs, -LOW_PROBABILITY_NATS).astype(np.float64)) / NATS_PER_DOUBLING)
        steps: NDArray[np.float64] = np.minimum(self.first_step * 2.0**doublings, self.largest_step)
        return steps


QUANTIZATION_STEPS = {
    "fine": QuantizationSteps(1 / 64, 1 / 8, 1 / 64, 1 / 64),
    "standard": QuantizationSteps(1 / 16, 1 / 2, 1 / 16, 1 / 16),
    "coarse": QuantizationSteps(1 / 8, 1.0, 1 / 8, 1 / 8),
}


def min_observed_logprob(precision: str) -> float:
    """Return the lowest log-probability of an observed token that a precision stores, in nats; but for -inf."""
    return -MAX_ODDS_STEPS * QUANTIZATION_STEPS[precision].odds_step if precision in QUANTIZATION_STEPS else -math.inf


def level_logprobs(precision: QuantizationSteps) -> NDArray[np.float64]:
    """Return the log-probabilities [LEVEL_COUNT] that there are, from 0 down."""
    depths = [0.0]
    while len(depths) < NUM_LEVELS:
        step = LOW_PROBABILITY_STEP
        if depths[-1] < LOW_PROBABILITY_NATS:
            step = min(precision.first_step * 2.0 ** (depths[-1] // NATS_PER_DOUBLING), precision.largest_step)
        depths.append(depths[-1] + step)
    return -np.array(depths)


def nearest_levels(logprobs: NDArray[np.float32], levels: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the level that is nearest to each log-probability, `LEVEL_COUNT` for -inf."""
    middles = (levels[1:] + levels[:-1]) / 2
    found = np.searchsorted(-middles, -logprobs.astype(np.float64))
    return np.where(np.isneginf(logprobs), NUM_LEVELS, found)
