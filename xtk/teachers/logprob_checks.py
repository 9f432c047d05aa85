"""Checks that a teacher's log-probabilities are valid distributions, before they are written into a cache."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from xtk.cache.codec.quantization_levels import min_observed_logprob
from xtk.cache.teacher_document import TeacherDocument
from xtk.cache.teacher_logprobs import StoredLogprobs, Support
from xtk.errors import XtkError

# Error of half-precision arithmetic in log-probabilities and in sums of probabilities.
TOLERANCE = 1e-2
BACKEND_HINTS = {
    "arrays": "this is an error of the backend; use another --backend",
    "values": "use another --dtype: float16 overflows in models trained in bfloat16",
    "logits": "check the teacher's weights, since its logits are far too large; or use --precision float32",
}


def check_scored_document(
    scored: TeacherDocument,
    where: str,
    *,
    vocab_size: int | None = None,
    support: Support | None = None,
    precision: str = "float32",
    hints: Mapping[str, str] = BACKEND_HINTS,
) -> None:
    """Refuse log-probabilities that are not valid distributions.

    Args:
        scored: a document with the teacher's log-probabilities.
        where: name of the document in messages.
        vocab_size: U, all ids are below it; None: any.
        support: the requested support; None: samples are not counted.
        hints: what to do about invalid shapes or ids ("arrays"), values ("values") and logits ("logits").
    """
    scores = scored.stored_logprobs
    if failure := _wrong_shapes(scores, scored, support):
        raise XtkError(failure, where=where, hint=hints["arrays"])
    if failure := _wrong_numbers(scores):
        raise XtkError(failure, where=where, hint=hints["values"])
    finite = scores.observed_logprobs[np.isfinite(scores.observed_logprobs)]
    if len(finite) and (lowest := float(finite.min())) < (limit := min_observed_logprob(precision)):
        raise XtkError(
            f"the teacher's log-probability of an observed token is {lowest:,.0f} nats; precision {precision} stores "
            f"at least {limit:,.0f}",
            where=where,
            hint=hints["logits"],
        )
    if failure := _wrong_ids(scores, scored, vocab_size) or _wrong_samples(scores, vocab_size, support):
        raise XtkError(failure, where=where, hint=hints["arrays"])


def _wrong_shapes(scores: StoredLogprobs, row: TeacherDocument, support: Support | None) -> str | None:
    """Return what is wrong with the lengths of the arrays; None if they are consistent."""
    if not np.array_equal(scores.positions, np.flatnonzero(row.tokens.train_mask)):
        return "the teacher did not score exactly the trained tokens"
    size = len(scores.positions)
    sets = len(scores.sample_offsets) - 1
    wanted = size * support.num_sample_sets if support else sets
    if any(len(values) != size for values in (scores.remainder_mass, scores.observed_logprobs, scores.entropy)):
        return "the teacher's backend returned arrays whose length is not the number of trained tokens"
    if (
        not _are_offsets(scores.offsets, size, len(scores.ids), len(scores.logprobs))
        or sets != wanted
        or not _are_offsets(scores.sample_offsets, wanted, len(scores.sample_ids), len(scores.sample_counts))
    ):
        return "the teacher's backend returned offsets that do not match the number of its log-probabilities"
    return None


def _are_offsets(offsets: NDArray[np.int64], size: int, *lengths: int) -> bool:
    return (
        len(offsets) == size + 1
        and offsets[0] == 0
        and bool((np.diff(offsets) >= 0).all())
        and all(offsets[-1] == length for length in lengths)
    )


def _wrong_numbers(scores: StoredLogprobs) -> str | None:
    numbers = (scores.logprobs, scores.observed_logprobs, scores.remainder_mass)
    if any(np.isnan(values).any() for values in numbers) or not np.isfinite(scores.entropy).all():
        return "the teacher returned log-probabilities that are NaN, or an entropy that is not finite"
    if (scores.logprobs > TOLERANCE).any() or (scores.observed_logprobs > TOLERANCE).any():
        return "the teacher returned log-probabilities above 0"
    if (scores.entropy < -TOLERANCE).any():
        return "the teacher returned an entropy below 0"
    owner = np.repeat(np.arange(len(scores)), np.diff(scores.offsets))
    mass = np.bincount(owner, np.exp(scores.logprobs.astype(np.float64)), minlength=len(scores))
    if (np.abs(mass + scores.remainder_mass - 1) > TOLERANCE).any() or (scores.remainder_mass < 0).any():
        return "the teacher returned probabilities that do not sum to 1"
    return None


def _wrong_ids(scores: StoredLogprobs, row: TeacherDocument, width: int | None) -> str | None:
    observed_ids = row.tokens.ids[scores.positions]
    owner = np.repeat(np.arange(len(scores)), np.diff(scores.offsets))
    if _out_of_range(scores.ids, width):
        return "the teacher returned token ids outside of its vocabulary"
    if not _are_ascending(scores.ids, scores.offsets):
        return "the teacher's backend returned token ids of a position that are not strictly increasing"
    at = np.flatnonzero(scores.ids == observed_ids[owner])
    if not np.array_equal(owner[at], np.arange(len(scores))):
        return "the teacher's backend returned no log-probability of the observed token"
    with np.errstate(invalid="ignore"):  # two infinities are the same
        differs = np.abs(scores.logprobs[at] - scores.observed_logprobs) > TOLERANCE
    if (differs | (np.isinf(scores.logprobs[at]) != np.isinf(scores.observed_logprobs))).any():
        return "the teacher returned two different log-probabilities of the observed token"
    return None


def _wrong_samples(scores: StoredLogprobs, width: int | None, support: Support | None) -> str | None:
    if _out_of_range(scores.sample_ids, width):
        return "the teacher sampled token ids outside of its vocabulary"
    if not _are_ascending(scores.sample_ids, scores.sample_offsets):
        return "the teacher's backend returned sampled token ids that are not strictly increasing"
    if (scores.sample_counts < 1).any():
        return "the teacher's backend returned a sampled token id with a count below 1"
    if support is None or not support.num_sample_sets:
        return None
    sampled = np.diff(scores.sample_offsets)
    counts = np.bincount(np.repeat(np.arange(len(sampled)), sampled), scores.sample_counts, minlength=len(sampled))
    # Without remainder mass there is nothing to sample from.
    nothing = np.repeat(scores.remainder_mass <= TOLERANCE, support.num_sample_sets) & (counts == 0)
    if not (nothing | (counts == support.num_samples)).all():
        return f"the teacher's backend did not return {support.num_samples} samples in each sample set (--num-samples)"
    owner = np.repeat(np.arange(len(scores)), np.diff(scores.offsets))
    sampled_owner = np.repeat(np.arange(len(sampled)) // support.num_sample_sets, sampled)
    exact, others = (
        by.astype(np.int64) << 32 | ids for by, ids in ((owner, scores.ids), (sampled_owner, scores.sample_ids))
    )
    if np.isin(others, exact).any():
        return "the teacher's backend sampled token ids whose exact log-probabilities it also returned"
    return None


def _out_of_range(ids: NDArray[np.int32], width: int | None) -> bool:
    return bool((ids < 0).any() or (width is not None and (ids >= width).any()))


def _are_ascending(ids: NDArray[np.int32], offsets: NDArray[np.int64]) -> bool:
    """Return whether ids strictly increase within each range of the offsets."""
    rises = np.diff(ids) > 0
    edges = offsets[1:-1]
    rises[edges[(edges > 0) & (edges < len(ids))] - 1] = True
    return bool(rises.all())
