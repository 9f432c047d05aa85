"""Corrections of the values of losses from sampled tokens, so that they estimate the divergence.

The forward KL is `sum p ln p - sum p ln q`. With unbiased estimates of the teacher's probabilities p the second sum is
unbiased, and so is the gradient. The first sum is not: 16 samples look like a distribution over 16 tokens. It does not
depend on the student, and the teacher's entropy is stored: the correction of an item is the difference of the first
sum, as the entropy gives it, and as the samples give it.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit
from numpy.typing import NDArray

from xtk.tokens.teacher_logprobs import TeacherLogprobs


def exact_entry_stops(signal: TeacherLogprobs) -> NDArray[np.int64]:
    """Return int64 [P], where the exact entries of each position end; sampled ones follow."""
    return signal.offsets[1:] if signal.exact_counts is None else signal.offsets[:-1] + signal.exact_counts


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def mean_surprisals(
    offsets: NDArray[np.int64], stops: NDArray[np.int64], logprobs: NDArray[np.float32], entropies: NDArray[np.float32]
) -> NDArray[np.float64]:
    """Return float64 [P], the mean of -ln t over what tokens were sampled from; 0 where none were.

    Args:
        offsets: int64 [P + 1], of the entries.
        stops: int64 [P], where the exact ones end.
        logprobs: float32 [E].
        entropies: float32 [P], of the whole distributions, nats.
    """
    found = np.zeros(len(stops), np.float64)
    for position in range(len(stops)):
        mass = 0.0
        for entry in range(stops[position], offsets[position + 1]):
            mass += math.exp(logprobs[entry])
        if mass > 0:
            left = np.float64(entropies[position])
            for entry in range(offsets[position], stops[position]):
                left += negentropy(math.exp(logprobs[entry]))
            found[position] = left / mass
    return found


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def negentropy(probability: float) -> float:
    """Return `p ln p`."""
    return probability * math.log(probability) if probability > 0 else 0.0


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def sampled_log_correction(exact_mass: float, position_weight: float, surprisal: float) -> float:
    """Return by how much `p ln p` of a cell grows for each unit of mass that a sampled token stands for.

    The token gets the mean log-probability of all that could be sampled. Summed over the samples of a position this is
    exact where each token is alone in its cell.

    Args:
        exact_mass: the cell's mass without sampled tokens.
        position_weight: what the position's probabilities are multiplied with.
        surprisal: of the position.
    """
    if exact_mass <= 0:
        return math.log(position_weight) - surprisal if position_weight > 0 else 0.0
    more = position_weight * math.exp(-max(surprisal, 0.0))
    ratio = more / exact_mass
    return math.log(exact_mass + more) + (math.log1p(ratio) / ratio if ratio > 1e-9 else 1.0)


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def remainder_correction(remainder: float, outside: float) -> float:
    """Return the correction of an item's other cell, `r ln(r / q)`, so that it is `r ln(outside / q)`.

    With sampled tokens the student's other cell is all that is in no cell, and the teacher's only what the student
    cannot reach.

    Args:
        remainder: r, the teacher's estimate.
        outside: the teacher's mass in no cell.
    """
    return remainder * math.log(max(outside, remainder)) - negentropy(remainder) if remainder > 1e-6 else 0.0
