"""What a teacher says is a distribution, or it does not get into a cache."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xtk.artifacts.cache_shard import ScoredDocument
from xtk.artifacts.codec.quantization_levels import min_observed_logprob
from xtk.errors import XtkError
from xtk.tokens.teacher_logprobs import StoredLogprobs, Support

# Of half-precision arithmetic, in log-probabilities and in the sum of probabilities.
TOLERANCE = 1e-2


def check_scored_document(
    scored: ScoredDocument,
    where: str,
    *,
    vocab_size: int | None = None,
    support: Support | None = None,
    precision: str = "float32",
) -> None:
    """Refuse what is no distribution, so that no bad row ever gets into a cache.

    Args:
        scored: a document, and what the teacher said of it.
        where: how messages call the row.
        vocab_size: U, the ids that there are; None: any.
        support: what the teacher was asked for; None: draws are not counted.
        precision: in which the scores are to be stored.

    Raises:
        XtkError: tells what is wrong with it.
    """
    scores = scored.stored_logprobs
    if wrong := _wrong_shapes(scores, scored, support):
        raise XtkError(wrong, where=where, hint="this is a mistake of the backend: another --backend")
    if wrong := _wrong_numbers(scores):
        raise XtkError(wrong, where=where, hint="another --dtype: float16 overflows in models trained in bfloat16")
    finite = scores.observed_logprobs[np.isfinite(scores.observed_logprobs)]
    if len(finite) and (lowest := float(finite.min())) < (limit := min_observed_logprob(precision)):
        raise XtkError(
            f"the teacher gives an observed token a log-probability of {lowest:,.0f} nats, and --precision {precision} "
            f"stores {limit:,.0f} and above",
            where=where,
            hint="check the teacher's weights: its logits are far too large; --precision float32 stores any number",
        )
    if wrong := _wrong_ids(scores, scored, vocab_size) or _wrong_samples(scores, vocab_size, support):
        raise XtkError(wrong, where=where, hint="this is a mistake of the backend: another --backend")


def _wrong_shapes(scores: StoredLogprobs, row: ScoredDocument, support: Support | None) -> str | None:
    """Look whether each array has the length that the others ask for: nothing else can be looked at before."""
    if not np.array_equal(scores.positions, np.flatnonzero(row.tokens.train_mask)):
        return "the teacher did not score all of the trained tokens"
    size = len(scores.positions)
    sets = len(scores.sample_offsets) - 1
    wanted = size * support.num_sample_sets if support else sets
    if any(len(values) != size for values in (scores.remainder_mass, scores.observed_logprobs, scores.entropy)):
        return "the teacher gives more or fewer numbers than there are trained tokens"
    if (
        not _are_offsets(scores.offsets, size, len(scores.ids), len(scores.logprobs))
        or sets != wanted
        or not _are_offsets(scores.sample_offsets, wanted, len(scores.sample_ids), len(scores.sample_counts))
    ):
        return "the teacher gives entries that belong to no token: its offsets do not fit"
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
        return "the teacher gives log-probabilities that are no numbers"
    if (scores.logprobs > TOLERANCE).any() or (scores.observed_logprobs > TOLERANCE).any():
        return "the teacher gives log-probabilities above 0"
    if (scores.entropy < -TOLERANCE).any():
        return "the teacher gives an entropy below 0"
    owner = np.repeat(np.arange(len(scores)), np.diff(scores.offsets))
    mass = np.bincount(owner, np.exp(scores.logprobs.astype(np.float64)), minlength=len(scores))
    if (np.abs(mass + scores.remainder_mass - 1) > TOLERANCE).any() or (scores.remainder_mass < 0).any():
        return "the teacher gives probabilities that do not sum to 1"
    return None


def _wrong_ids(scores: StoredLogprobs, row: ScoredDocument, width: int | None) -> str | None:
    realised = row.tokens.ids[scores.positions]
    owner = np.repeat(np.arange(len(scores)), np.diff(scores.offsets))
    if _out_of_range(scores.ids, width):
        return "the teacher gives ids that its vocabulary does not have"
    if not _are_ascending(scores.ids, scores.offsets):
        return "the teacher gives ids twice, or not in their order"
    at = np.flatnonzero(scores.ids == realised[owner])
    if not np.array_equal(owner[at], np.arange(len(scores))):
        return "the teacher leaves out the token that stands there"
    with np.errstate(invalid="ignore"):  # two infinities are the same
        apart = np.abs(scores.logprobs[at] - scores.observed_logprobs) > TOLERANCE
    if (apart | (np.isinf(scores.logprobs[at]) != np.isinf(scores.observed_logprobs))).any():
        return "the teacher gives two log-probabilities to the token that stands there"
    return None


def _wrong_samples(scores: StoredLogprobs, width: int | None, support: Support | None) -> str | None:
    if _out_of_range(scores.sample_ids, width):
        return "the teacher draws ids that its vocabulary does not have"
    if not _are_ascending(scores.sample_ids, scores.sample_offsets):
        return "the teacher gives drawn ids twice, or not in their order"
    if (scores.sample_counts < 1).any():
        return "the teacher gives ids that were drawn less than once"
    if support is None or not support.num_sample_sets:
        return None
    drawn = np.diff(scores.sample_offsets)
    counts = np.bincount(np.repeat(np.arange(len(drawn)), drawn), scores.sample_counts, minlength=len(drawn))
    # Where the exact ids carry all of the mass there is nothing to draw from.
    nothing = np.repeat(scores.remainder_mass <= TOLERANCE, support.num_sample_sets) & (counts == 0)
    if not (nothing | (counts == support.num_samples)).all():
        return f"the teacher gives more or fewer than {support.num_samples} draws"
    owner = np.repeat(np.arange(len(scores)), np.diff(scores.offsets))
    drawn_by = np.repeat(np.arange(len(drawn)) // support.num_sample_sets, drawn)
    exact, others = (
        by.astype(np.int64) << 32 | ids for by, ids in ((owner, scores.ids), (drawn_by, scores.sample_ids))
    )
    if np.isin(others, exact).any():
        return "the teacher draws ids that are exact already"
    return None


def _out_of_range(ids: NDArray[np.int32], width: int | None) -> bool:
    return bool((ids < 0).any() or (width is not None and (ids >= width).any()))


def _are_ascending(ids: NDArray[np.int32], offsets: NDArray[np.int64]) -> bool:
    """Say whether ids rise within each range of the offsets."""
    rises = np.diff(ids) > 0
    edges = offsets[1:-1]
    rises[edges[(edges > 0) & (edges < len(ids))] - 1] = True
    return bool(rises.all())
