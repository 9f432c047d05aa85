"""Several teachers as one: their probabilities mixed, position by position."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from xtk.tokens.teacher_logprobs import TeacherLogprobs


def mix_teacher_logprobs(teacher_logprobs: Sequence[TeacherLogprobs], weights: Sequence[float]) -> TeacherLogprobs:
    """Mix what teachers with one tokenizer said of the same tokens: `sum w_k t_k`.

    An id is kept where every teacher tells of it: it is among its entries, or nothing is left for its tail. All else is
    the tail, on which the mixture is exact too: it is the mixture of coarsenings to the same cells. Draws have no tail,
    so an id that one of them names is kept, and counts as 0 where another did not draw it: the estimate of a mixture
    is the mixture of the estimates, and has no bias if they have none.

    Args:
        teacher_logprobs: with equally many positions.
        weights: not negative, of sum 1.

    Returns:
        The mixture, at the positions of the first. Exact are ids that are exact of all; they come first. Ids rise
        among them, and among the others; `entropy` is the mean of the entropies, a lower bound.
    """
    size = len(teacher_logprobs[0])
    shares = np.asarray(weights, np.float64)
    named, entries = np.unique(np.concatenate([_keys(signal) for signal in teacher_logprobs]), return_inverse=True)
    by_teacher = np.repeat(np.arange(len(teacher_logprobs)), [len(signal.ids) for signal in teacher_logprobs])
    mass = (
        np.concatenate([np.exp(signal.logprobs.astype(np.float64)) for signal in teacher_logprobs]) * shares[by_teacher]
    )
    tails = np.array([signal.remainder_mass for signal in teacher_logprobs], np.float64)
    positions = named >> 32
    exact = np.bincount(
        entries, np.concatenate([_exact_entries(signal) for signal in teacher_logprobs]), minlength=len(named)
    )
    exact = exact == len(teacher_logprobs)
    # Who does not name an id tells of it all the same, if it has no tail.
    tells = (tails == 0)[:, positions]
    tells[by_teacher, entries] = True
    kept = tells.all(axis=0)
    kept_ones = np.flatnonzero(kept)
    kept_ones = kept_ones[np.lexsort((kept_ones, ~exact[kept_ones], positions[kept_ones]))]
    probs = np.bincount(entries, mass, minlength=len(named))
    left = np.bincount(positions[~kept], probs[~kept], minlength=size)
    with np.errstate(divide="ignore"):
        logprobs = np.log(probs[kept_ones])
        realised = np.log(
            shares @ np.exp(np.array([signal.observed_logprobs for signal in teacher_logprobs], np.float64))
        )
    counts = np.bincount(positions[kept], minlength=size)
    return TeacherLogprobs(
        positions=teacher_logprobs[0].positions,
        offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]),
        ids=(named[kept_ones] & 0xFFFFFFFF).astype(np.int32),
        logprobs=logprobs.astype(np.float32),
        remainder_mass=(shares @ tails + left).astype(np.float32),
        observed_logprobs=realised.astype(np.float32),
        entropy=(shares @ np.array([signal.entropy for signal in teacher_logprobs], np.float64)).astype(np.float32),
        exact_counts=None
        if all(signal.exact_counts is None for signal in teacher_logprobs)
        else np.bincount(positions[kept & exact], minlength=size),
        precision=next((signal.precision for signal in teacher_logprobs if signal.precision), ""),
    )


def _exact_entries(signal: TeacherLogprobs) -> NDArray[np.bool_]:
    """Return [E], which entries were not drawn."""
    sizes = np.diff(signal.offsets)
    if signal.exact_counts is None:
        return np.ones(len(signal.ids), np.bool_)
    within = np.arange(len(signal.ids)) - np.repeat(signal.offsets[:-1], sizes)
    flags: NDArray[np.bool_] = within < np.repeat(signal.exact_counts, sizes)
    return flags


def _keys(signal: TeacherLogprobs) -> NDArray[np.int64]:
    """Return int64 [E], a number for each pair of a position and an id."""
    owners = np.repeat(np.arange(len(signal), dtype=np.int64), np.diff(signal.offsets))
    keys: NDArray[np.int64] = owners << 32 | signal.ids
    return keys
