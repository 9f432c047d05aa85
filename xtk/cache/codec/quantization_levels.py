"""Precisions of stored log-probabilities and their quantization levels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.cache.codec.integer_coding import NUMBER_LIMIT

# Steps double each time the log-probability falls by 1.5 nats: the KL divergence of an error is proportional to
# probability times the square of the step, so that tokens 4 times less likely may have steps twice as wide.
NATS_PER_DOUBLING = 1.5
# Probabilities below exp(-32) do not matter; with this step every float32 log-probability of a softmax has a level.
LOW_PROBABILITY_NATS, LOW_PROBABILITY_STEP = 32.0, 8.0
NUM_LEVELS = 512
# Level tables begin with padding that only corrupt streams index, and end with an entry for -inf.
LEVEL_PADDING = 32
# Steps of odds on each side of even odds: both signs have to fit into numbers below NUMBER_LIMIT.
MAX_ODDS_STEPS = NUMBER_LIMIT // 2
LEVEL_TABLE_SIZE = LEVEL_PADDING + NUM_LEVELS + 1


@dataclass(frozen=True)
class QuantizationSteps:
    """Quantization steps in nats; the error is at most half a step, plus the renormalization of the position."""

    first_step: float  # of log-probabilities from 0 down to -1.5; then it doubles every 1.5 nats
    largest_step: float  # limit of the doubling
    odds_step: float  # of the log-odds of the observed token
    entropy_step: float  # of the entropy
    depth_step: float  # of the depth of a sampled id below the remainder, `ln(M / t(v))`

    def widest_step(self, logprobs: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
        """Return the widest step between levels at decoded log-probabilities and within half a nat below them."""
        doublings = np.floor((0.5 - np.maximum(logprobs, -LOW_PROBABILITY_NATS).astype(np.float64)) / NATS_PER_DOUBLING)
        steps: NDArray[np.float64] = np.minimum(self.first_step * 2.0**doublings, self.largest_step)
        return steps


QUANTIZATION_STEPS = {
    "fine": QuantizationSteps(1 / 64, 1 / 8, 1 / 64, 1 / 64, 1 / 32),
    "standard": QuantizationSteps(1 / 16, 1 / 2, 1 / 16, 1 / 16, 1 / 8),
    "coarse": QuantizationSteps(1 / 8, 1.0, 1 / 8, 1 / 8, 1 / 4),
}


def min_observed_logprob(precision: str) -> float:
    """Return the lowest finite log-probability of an observed token that a precision stores, nats."""
    return -MAX_ODDS_STEPS * QUANTIZATION_STEPS[precision].odds_step if precision in QUANTIZATION_STEPS else -math.inf


def level_logprobs(precision: QuantizationSteps) -> NDArray[np.float64]:
    """Return float64 [NUM_LEVELS], the log-probabilities of the levels, from 0 down."""
    depths = [0.0]
    while len(depths) < NUM_LEVELS:
        step = LOW_PROBABILITY_STEP
        if depths[-1] < LOW_PROBABILITY_NATS:
            step = min(precision.first_step * 2.0 ** (depths[-1] // NATS_PER_DOUBLING), precision.largest_step)
        depths.append(depths[-1] + step)
    return -np.array(depths)


def nearest_levels(logprobs: NDArray[np.float32], levels: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the nearest level of each log-probability, NUM_LEVELS for -inf."""
    middles = (levels[1:] + levels[:-1]) / 2
    nearest = np.searchsorted(-middles, -logprobs.astype(np.float64))
    return np.where(np.isneginf(logprobs), NUM_LEVELS, nearest)
