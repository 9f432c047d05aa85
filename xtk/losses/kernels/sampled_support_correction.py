"""Corrections of loss values that are computed from sampled tokens, so that they estimate the forward KL.

The forward KL is `sum p ln p - sum p ln q`. With unbiased estimates of the teacher's probabilities p the second sum is
unbiased, and so is the gradient. The first sum is biased: 16 samples look like a distribution over 16 tokens. It does
not depend on the student, and the teacher's entropy is stored: the correction of an item is the first sum computed from
the entropy, minus the first sum computed from the samples.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from xtk.cache.teacher_logprobs import MIN_REMAINDER, TeacherLogprobs
from xtk.numba_kernel import numba_kernel

MIN_LOGPROB = np.float32(-1e4)  # of a token with probability 0; its exponential is 0 in float64 too


class TeacherArrays(NamedTuple):
    """The teacher's support as flat arrays, for kernels."""

    offsets: NDArray[np.int64]  # [P + 1], the entries of each position
    exact_stops: NDArray[np.int64]  # [P], the end of its exact entries; sampled entries follow
    ids: NDArray[np.int32]  # [E], token ids
    logprobs: NDArray[np.float32]  # [E], log-probabilities, finite: kernels divide by the sums of some
    remainder_mass: NDArray[np.float32]  # [P], mass outside of the entries
    mean_surprisals: NDArray[np.float64]  # [P], the mean of -ln t, in nats, over the tokens that were sampled from
    token_logprobs: NDArray[np.float32]  # [E], of each entry's own token; NaN for sampled ids if it is unknown

    @classmethod
    def from_logprobs(cls, teacher: TeacherLogprobs) -> Self:
        """Return the arrays of a teacher's log-probabilities."""
        stops = teacher.offsets[1:]
        if teacher.exact_counts is not None:
            stops = teacher.offsets[:-1] + teacher.exact_counts
        surprisals = mean_surprisals(teacher.offsets, stops, teacher.logprobs, teacher.entropy)
        finite = np.maximum(teacher.logprobs, MIN_LOGPROB)
        known = teacher.token_logprobs
        if known is None:
            known = np.full(len(teacher.ids), np.nan, np.float32)
        return cls(teacher.offsets, stops, teacher.ids, finite, teacher.remainder_mass, surprisals, known)


@numba_kernel
def mean_surprisals(
    offsets: NDArray[np.int64], stops: NDArray[np.int64], logprobs: NDArray[np.float32], entropies: NDArray[np.float32]
) -> NDArray[np.float64]:
    """Return float64 [P], the mean of -ln t, in nats, over the tokens that were sampled from; 0 without samples.

    `stops`: `exact_stops` of `TeacherArrays`. `entropies`: float32 [P], of the full distributions, nats.
    """
    means = np.zeros(len(stops), np.float64)
    for position in range(len(stops)):
        mass = 0.0
        for entry in range(stops[position], offsets[position + 1]):
            mass += math.exp(logprobs[entry])
        if mass > 0:
            left = np.float64(entropies[position])
            for entry in range(offsets[position], stops[position]):
                left += negentropy(math.exp(logprobs[entry]))
            means[position] = left / mass
    return means


@numba_kernel
def negentropy(probability: float) -> float:
    """Return `p ln p`."""
    return probability * math.log(probability) if probability > 0 else 0.0


@numba_kernel
def sampled_log_correction(exact_mass: float, mean_logprob: float, mean_prob: float) -> float:
    """Return the increase of a cell's `p ln p` per unit of mass that a sampled token represents.

    The token gets the mean log-probability, in nats, of all tokens that were sampled from; `mean_prob` is its
    exponential, at most the factor of the position's probabilities. Summed over the samples of a position this is exact
    if each token has a cell for itself. `exact_mass`: the cell's mass without sampled tokens.
    """
    if exact_mass <= 0:
        return mean_logprob
    ratio = mean_prob / exact_mass
    return math.log(exact_mass + mean_prob) + (math.log1p(ratio) / ratio if ratio > 1e-9 else 1.0)


@numba_kernel
def remainder_correction(remainder: float, outside: float) -> float:
    """Return the correction that turns an item's remainder term `r ln(r / q)` into `r ln(outside / q)`.

    With sampled tokens the student's remainder is all mass outside of the cells, and the teacher's, r, is only the mass
    that the student cannot reach. `outside`: the teacher's mass outside of the cells.
    """
    is_some = remainder > MIN_REMAINDER
    return remainder * math.log(max(outside, remainder)) - negentropy(remainder) if is_some else 0.0


@numba_kernel
def known_probability(support: TeacherArrays, entry: int) -> float:
    """Return the teacher's probability of an entry's token; 0 if it is unknown."""
    logprob = support.token_logprobs[entry]
    return 0.0 if math.isnan(logprob) else math.exp(np.float64(logprob))
