"""Checks that a teacher's log-probabilities are valid distributions, before they are written into a cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.cache.codec.quantization_levels import min_observed_logprob
from xtk.cache.teacher_document import TeacherDocument
from xtk.cache.teacher_logprobs import StoredLogprobs, Support, entry_keys
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
    vocab_size: int | None = None,  # U, all ids are below it; None: any
    support: Support | None = None,  # the requested support; None: samples are not counted
    precision: str = "float32",
    # what to do about invalid shapes or ids ("arrays"), values ("values") and logits ("logits")
    hints: Mapping[str, str] = BACKEND_HINTS,
) -> None:
    """Refuse log-probabilities that are not valid distributions."""
    scores = scored.stored_logprobs
    if not _arrays_fit_together(scores, scored):
        raise XtkError(
            "the teacher's backend returned arrays that do not fit together or not the trained tokens",
            where=where,
            hint=hints["arrays"],
        )
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
    if failure := _wrong_ids(scores, scored, vocab_size) or _wrong_samples(scores, support):
        raise XtkError(failure, where=where, hint=hints["arrays"])


def _arrays_fit_together(scores: StoredLogprobs, row: TeacherDocument) -> bool:
    """Return whether positions are the trained tokens, and lengths and offsets belong to each other."""
    size = len(scores.positions)
    return (
        np.array_equal(scores.positions, np.flatnonzero(row.tokens.train_mask))
        and {len(scores.remainder_mass), len(scores.observed_logprobs), len(scores.entropy)} == {size}
        and len(scores.offsets) == size + 1
        and _are_offsets(scores.offsets, scores.ids, scores.logprobs)
        and _are_offsets(scores.sample_offsets, scores.sample_ids, scores.sample_counts)
        and (scores.sample_logprobs is None or len(scores.sample_logprobs) == len(scores.sample_ids))
    )


def _are_offsets(offsets: NDArray[np.int64], *values: NDArray[Any]) -> bool:
    rises = len(offsets) > 0 and offsets[0] == 0 and bool((np.diff(offsets) >= 0).all())
    return rises and all(offsets[-1] == len(array) for array in values)


def _wrong_numbers(scores: StoredLogprobs) -> str | None:
    numbers = (scores.logprobs, scores.observed_logprobs, scores.remainder_mass)
    if any(np.isnan(values).any() for values in numbers) or not np.isfinite(scores.entropy).all():
        return "the teacher returned log-probabilities that are NaN, or an entropy that is not finite"
    sampled = scores.sample_logprobs
    if sampled is not None and not (np.isfinite(sampled) & (sampled <= TOLERANCE)).all():
        return "the teacher returned log-probabilities of sampled tokens that are not finite or above 0"
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
    for ids, offsets in ((scores.ids, scores.offsets), (scores.sample_ids, scores.sample_offsets)):
        if (ids < 0).any() or (width is not None and (ids >= width).any()):
            return "the teacher returned token ids outside of its vocabulary"
        if (np.diff(entry_keys(offsets, ids)) <= 0).any():
            return "the teacher's backend returned token ids of a position that are not strictly increasing"
    keys = entry_keys(scores.offsets, scores.ids)
    observed_keys = np.arange(len(scores)) << 32 | row.tokens.ids[scores.positions]
    at = np.flatnonzero(np.isin(keys, observed_keys))
    if len(at) != len(scores):
        return "the teacher's backend returned no log-probability of the observed token"
    if not np.allclose(scores.logprobs[at], scores.observed_logprobs, rtol=0, atol=TOLERANCE):
        return "the teacher returned two different log-probabilities of the observed token"
    return None


def _wrong_samples(scores: StoredLogprobs, support: Support | None) -> str | None:
    """Return what is wrong with the samples: their number in each set, or ids whose exact values are known too."""
    if support is None:
        return None
    sets = len(scores) * support.num_sample_sets
    owner = np.repeat(np.arange(len(scores.sample_offsets) - 1), np.diff(scores.sample_offsets))
    counts = np.bincount(owner, scores.sample_counts, minlength=sets)
    # Without remainder mass there is nothing to sample from.
    nothing = np.repeat(scores.remainder_mass <= TOLERANCE, support.num_sample_sets)
    if (
        (scores.sample_counts < 1).any()
        or len(scores.sample_offsets) != sets + 1
        or not ((nothing & (counts == 0)) | (counts == support.num_samples)).all()
    ):
        return f"the teacher's backend did not return {support.num_samples} samples in each sample set (--num-samples)"
    if (
        sets
        and np.isin(
            (owner // support.num_sample_sets) << 32 | scores.sample_ids, entry_keys(scores.offsets, scores.ids)
        ).any()
    ):
        return "the teacher's backend sampled token ids whose exact log-probabilities it also returned"
    return None
