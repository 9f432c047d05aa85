"""Mixture of several teachers' distributions at each position (`--combine-teachers mixture`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from xtk.cache.teacher_logprobs import TeacherLogprobs


def mix_teacher_logprobs(teacher_logprobs: Sequence[TeacherLogprobs], weights: Sequence[float]) -> TeacherLogprobs:
    """Return the mixture `sum w_k t_k` of teachers with the same tokenizer, on the same tokens.

    An id is stored if every teacher gives it a probability: it is one of its entries, or the teacher has no remainder.
    All other mass goes to the remainder, which is exact too: all teachers are coarsened to the same cells. Where all
    teachers have samples instead of a remainder, an id that one teacher sampled is stored, and counts as 0 for a
    teacher that did not sample it: the mixture of unbiased estimates is an unbiased estimate of the mixture. Where one
    teacher has a remainder, the samples of the others are part of the remainder.

    Args:
        teacher_logprobs: one per teacher, with the same number of positions.
        weights: at least 0, sum 1.

    Returns:
        The mixture, at the positions of the first teacher. Ids that are exact for all teachers come first; both groups
        are in ascending order. `entropy` is the mean of the entropies, a lower bound.
    """
    size = len(teacher_logprobs[0])
    weight_per_teacher = np.asarray(weights, np.float64)
    has_remainder = np.any([teacher.remainder_mass > 0 for teacher in teacher_logprobs], axis=0)
    teacher_logprobs = [_without_samples(teacher, has_remainder) for teacher in teacher_logprobs]
    unique_keys, entries = np.unique(
        np.concatenate([_keys(teacher) for teacher in teacher_logprobs]), return_inverse=True
    )
    by_teacher = np.repeat(np.arange(len(teacher_logprobs)), [len(teacher.ids) for teacher in teacher_logprobs])
    mass = (
        np.concatenate([np.exp(teacher.logprobs.astype(np.float64)) for teacher in teacher_logprobs])
        * weight_per_teacher[by_teacher]
    )
    remainders = np.array([teacher.remainder_mass for teacher in teacher_logprobs], np.float64)
    positions = unique_keys >> 32
    exact = np.bincount(
        entries, np.concatenate([_exact_entries(teacher) for teacher in teacher_logprobs]), minlength=len(unique_keys)
    )
    exact = exact == len(teacher_logprobs)
    # A teacher without a remainder gives every id that it does not list probability 0.
    gives_probability = (remainders == 0)[:, positions]
    gives_probability[by_teacher, entries] = True
    kept = gives_probability.all(axis=0)
    kept_ones = np.flatnonzero(kept)
    kept_ones = kept_ones[np.lexsort((kept_ones, ~exact[kept_ones], positions[kept_ones]))]
    probs = np.bincount(entries, mass, minlength=len(unique_keys))
    left = np.bincount(positions[~kept], probs[~kept], minlength=size)
    with np.errstate(divide="ignore"):
        logprobs = np.log(probs[kept_ones])
        observed = np.log(
            weight_per_teacher
            @ np.exp(np.array([teacher.observed_logprobs for teacher in teacher_logprobs], np.float64))
        )
    counts = np.bincount(positions[kept], minlength=size)
    return TeacherLogprobs(
        positions=teacher_logprobs[0].positions,
        offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]),
        ids=(unique_keys[kept_ones] & 0xFFFFFFFF).astype(np.int32),
        logprobs=logprobs.astype(np.float32),
        remainder_mass=(weight_per_teacher @ remainders + left).astype(np.float32),
        observed_logprobs=observed.astype(np.float32),
        entropy=(weight_per_teacher @ np.array([teacher.entropy for teacher in teacher_logprobs], np.float64)).astype(
            np.float32
        ),
        exact_counts=None
        if all(teacher.exact_counts is None for teacher in teacher_logprobs)
        else np.bincount(positions[kept & exact], minlength=size),
        precision=next((teacher.precision for teacher in teacher_logprobs if teacher.precision), ""),
    )


def _without_samples(logprobs: TeacherLogprobs, where: NDArray[np.bool_]) -> TeacherLogprobs:
    """Return a teacher's log-probabilities with the sampled entries of some positions moved to the remainder.

    Args:
        where: [P], the positions.
    """
    owners = np.repeat(np.arange(len(logprobs)), np.diff(logprobs.offsets))
    dropped = ~_exact_entries(logprobs) & where[owners]
    if not dropped.any():
        return logprobs
    sampled = np.bincount(owners[dropped], np.exp(logprobs.logprobs[dropped].astype(np.float64)), minlength=len(where))
    counts = np.bincount(owners[~dropped], minlength=len(where))
    return replace(
        logprobs,
        offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]),
        ids=logprobs.ids[~dropped],
        logprobs=logprobs.logprobs[~dropped],
        remainder_mass=(logprobs.remainder_mass + sampled).astype(np.float32),
    )


def _exact_entries(logprobs: TeacherLogprobs) -> NDArray[np.bool_]:
    """Return [E], which entries are exact (not sampled)."""
    sizes = np.diff(logprobs.offsets)
    if logprobs.exact_counts is None:
        return np.ones(len(logprobs.ids), np.bool_)
    within = np.arange(len(logprobs.ids)) - np.repeat(logprobs.offsets[:-1], sizes)
    flags: NDArray[np.bool_] = within < np.repeat(logprobs.exact_counts, sizes)
    return flags


def _keys(logprobs: TeacherLogprobs) -> NDArray[np.int64]:
    """Return int64 [E], a unique key of each (position, id) pair."""
    owners = np.repeat(np.arange(len(logprobs), dtype=np.int64), np.diff(logprobs.offsets))
    keys: NDArray[np.int64] = owners << 32 | logprobs.ids
    return keys
