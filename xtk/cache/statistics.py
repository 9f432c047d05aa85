"""Statistics of a teacher cache: sizes from its manifest, log-probability statistics from a sample of documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.cache.codec.shard_codec_registry import CODECS, Codec
from xtk.cache.manifest import cache_figures, source_headers
from xtk.cache.reader import TeacherCache
from xtk.cache.shard import PAYLOAD_PARTS
from xtk.cache.teacher_logprobs import StoredLogprobs
from xtk.name_registry import load_registered

INFORMATION_KEYS = ("entropy", "quantization_kl")  # of a shard: sums over its positions, nats
SAMPLE_DOCUMENTS = 200


@dataclass(frozen=True)
class PositionStatistics:
    """Statistics of the N trained positions of some documents, concatenated."""

    entropy: NDArray[np.float32]  # [N], nats
    kept_mass: NDArray[np.float32]  # [N], total probability of the ids with exact log-probabilities
    observed_logprobs: NDArray[np.float32]  # [N], log-probabilities of the observed tokens, nats
    num_exact_ids: NDArray[np.int64]  # [N], number of ids with exact log-probabilities
    num_sampled_ids: NDArray[np.float64]  # [N], distinct ids in a sample set, averaged over sets; 0 without samples
    # [N], whether the observed token is outside of the top-k or top-p set; None: unknown for this support.
    observed_outside_top: NDArray[np.bool_] | None
    observed_ids: NDArray[np.int32]  # [N], the observed tokens


def evenly_spaced_indices(cache: TeacherCache, count: int) -> list[int]:
    """Return the numbers of at most `count` documents, evenly spaced over a cache."""
    numbers = np.linspace(0, len(cache) - 1, num=min(len(cache), count)).astype(int)
    return [int(number) for number in np.unique(numbers)]


def sample_positions(cache: TeacherCache, count: int = SAMPLE_DOCUMENTS) -> PositionStatistics:
    """Return statistics of the positions of at most `count` documents, evenly spaced over a cache."""
    rows = [cache.read_document(number) for number in evenly_spaced_indices(cache, count)]
    scores = [row.stored_logprobs for row in rows]
    longest = max((int(np.diff(row.offsets).max(initial=0)) for row in scores), default=0)
    outside = [_observed_outside_top(row, cache.header["options"], longest) for row in scores]
    return PositionStatistics(
        entropy=_concatenate([row.entropy for row in scores], np.float32),
        kept_mass=1 - _concatenate([row.remainder_mass for row in scores], np.float32),
        observed_logprobs=_concatenate([row.observed_logprobs for row in scores], np.float32),
        num_exact_ids=_concatenate([np.diff(row.offsets) for row in scores], np.int64),
        num_sampled_ids=_concatenate([_mean_sampled_ids(row) for row in scores], np.float64),
        observed_outside_top=None if any(part is None for part in outside) else _concatenate([*outside], np.bool_),  # type: ignore[list-item]
        observed_ids=_concatenate([row.tokens.ids[row.trained_positions] for row in rows], np.int32),
    )


def _concatenate(parts: list[NDArray[Any]], kind: Any) -> NDArray[Any]:
    joined: NDArray[Any] = np.concatenate([np.zeros(0, kind), *parts]).astype(kind, copy=False)
    return joined


def _mean_sampled_ids(scores: StoredLogprobs) -> NDArray[np.float64]:
    if not scores.num_sample_sets:
        return np.zeros(len(scores))
    mean: NDArray[np.float64] = np.diff(scores.sample_offsets).reshape(len(scores), scores.num_sample_sets).mean(1)
    return mean


def _observed_outside_top(scores: StoredLogprobs, options: dict[str, Any], longest: int) -> NDArray[np.bool_] | None:
    """Return where the observed token is not one of the top tokens; None if the support does not determine it.

    Args:
        longest: largest number of exact ids of a position in the sampled documents.
    """
    support = options.get("support")
    owner = np.repeat(np.arange(len(scores)), np.diff(scores.offsets))
    if support in ("top-k", "top-k+sample"):
        top_k = int(options["top_k"])
        if not top_k:
            return None
        more: NDArray[np.bool_] = np.diff(scores.offsets) > top_k
        if longest > top_k + 1:  # lists of different lengths, from another program
            as_likely = scores.logprobs >= scores.observed_logprobs[owner]
            more = np.bincount(owner[as_likely], minlength=len(scores)) > top_k
        return more
    if support != "top-p":
        return None
    # The observed token was added if the other ids reach top_p or top_k without it and are all at least as likely.
    kept = np.bincount(owner, np.exp(scores.logprobs.astype(np.float64)), minlength=len(scores))
    others = kept - np.exp(scores.observed_logprobs.astype(np.float64))
    lowest = np.full(len(scores), np.inf)
    np.minimum.at(lowest, owner, scores.logprobs)
    full = np.diff(scores.offsets) - 1 >= int(options["top_k"])
    is_outside: NDArray[np.bool_] = (full | (others >= options["top_p"] - 1e-6)) & (scores.observed_logprobs <= lowest)
    return is_outside


def bytes_by_section(manifest: dict[str, Any]) -> dict[str, int]:
    """Return the bytes of text, tokens, log-probabilities and everything else of all shards, from the manifest."""
    sums = dict.fromkeys((*PAYLOAD_PARTS, "other"), 0)
    for shard in manifest["shards"]:
        sizes = [stop - start for start, stop in shard["payload_ranges"]]
        for name, size in zip(PAYLOAD_PARTS, sizes, strict=True):
            sums[name] += size
        sums["other"] += int(shard["bytes"]) - sum(sizes)
    return sums


def shared_file_bytes(cache: TeacherCache) -> int:
    """Return the bytes of the files that a cache has once: tokenizer, chat template, tokens by frequency."""
    sizes = cache.folder.file_sizes()
    return sum(sizes.get(file, 0) for file in cache.manifest["files"])


def summarize_cache(cache: TeacherCache, positions: PositionStatistics, documents: int) -> dict[str, Any]:
    """Return the statistics of a cache that `xtk inspect` prints."""
    figures = cache_figures(cache.manifest)
    by_section = bytes_by_section(cache.manifest)
    per = max(figures["positions"], 1)
    entropy, quantization_kl = (
        sum(float(shard[name]) for shard in cache.manifest["shards"]) for name in INFORMATION_KEYS
    )
    return {
        **figures,
        "shards": len(cache.manifest["shards"]),
        "num_source_caches": len(source_headers(cache.manifest)),
        "bytes_by_section": by_section,
        "bytes_per_position": round(figures["bytes"] / per, 2),
        "shared_file_bytes": shared_file_bytes(cache),
        "teacher_logprobs_bytes_per_position": round(by_section["teacher_logprobs"] / per, 2),
        "sampled_documents": documents,
        "mean_entropy_nats": round(entropy / per, 6),
        "quantization_kl_nats": _three_digits(quantization_kl / per),
        "quantization_kl_fraction_of_entropy": _three_digits(quantization_kl / entropy) if entropy > 0 else None,
        "quantization_largest_error_nats": max_stored_error(cache.header["codec"]),
        "mean_stored_mass": rounded_mean(positions.kept_mass),
        "mean_remainder_mass": rounded_mean(1 - positions.kept_mass),
        "mean_observed_logprob": rounded_mean(positions.observed_logprobs),
        "mean_exact_ids": rounded_mean(positions.num_exact_ids),
        "mean_sampled_ids": rounded_mean(positions.num_sampled_ids),
        "observed_outside_top_k_fraction": None
        if positions.observed_outside_top is None
        else rounded_mean(positions.observed_outside_top),
        "distinct_tokens": len(np.unique(positions.observed_ids)),
        "vocabulary_fraction": round(
            len(np.unique(positions.observed_ids)) / max(int(cache.header["teacher"]["embedding_rows"]), 1), 4
        ),
    }


def max_stored_error(options: dict[str, Any]) -> float:
    """Return the maximum quantization error of log-probabilities above -32, nats, by the header's section "codec"."""
    codec: type[Codec] = load_registered(CODECS, options["name"], "codec")
    return codec.max_logprob_error(options)


def _three_digits(value: float) -> float:
    return float(f"{value:.3g}")


def rounded_mean(values: NDArray[Any]) -> float | None:
    """Return the mean, rounded to 6 decimals; None for an empty array."""
    return round(float(values.mean()), 6) if len(values) else None
