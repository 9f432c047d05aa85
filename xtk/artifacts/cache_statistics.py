"""What a cache holds, in numbers: bytes from its manifest, the signal from rows spread all over it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.artifacts.codecs import CODECS, Codec
from xtk.artifacts.shard import PAYLOAD
from xtk.artifacts.teacher_cache import TeacherCache, parts_of, totals
from xtk.lookup import lookup
from xtk.tokens.signal import Scores

INFORMATION = ("entropy", "quantization_kl")  # of a shard, sums over its positions
SAMPLE = 200


@dataclass(frozen=True)
class Positions:
    """The positions of some rows, one after the other.

    Attributes:
        entropy: float32 [N], nats.
        kept: float32 [N], the probability of the exact ids.
        realised: float32 [N], log-probabilities.
        exact: int64 [N], how many ids are exact.
        drawn: int64 [N], how many ids a set of draws holds, in the mean; 0 where nothing is drawn.
        outside: bool [N], whether the token that stands there is none of the likeliest; None where nobody can tell.
        ids: int32 [N], the tokens that stand there.
    """

    entropy: NDArray[np.float32]
    kept: NDArray[np.float32]
    realised: NDArray[np.float32]
    exact: NDArray[np.int64]
    drawn: NDArray[np.float64]
    outside: NDArray[np.bool_] | None
    ids: NDArray[np.int32]


def spread(cache: TeacherCache, count: int) -> list[int]:
    """Return the numbers of at most `count` documents, all over a cache."""
    numbers = np.linspace(0, len(cache) - 1, num=min(len(cache), count)).astype(int)
    return [int(number) for number in np.unique(numbers)]


def sampled(cache: TeacherCache, count: int = SAMPLE) -> Positions:
    """Read the positions of documents all over a cache.

    Args:
        cache: which one.
        count: documents at most.
    """
    rows = [cache.row(number) for number in spread(cache, count)]
    scores = [row.scores for row in rows]
    outside = [_outside(row, cache.header["options"]) for row in scores]
    return Positions(
        entropy=_joined([row.entropy for row in scores], np.float32),
        kept=1 - _joined([row.tail_mass for row in scores], np.float32),
        realised=_joined([row.realised_logprobs for row in scores], np.float32),
        exact=_joined([np.diff(row.offsets) for row in scores], np.int64),
        drawn=_joined([_drawn(row) for row in scores], np.float64),
        outside=None if any(part is None for part in outside) else _joined([*outside], np.bool_),  # type: ignore[list-item]
        ids=_joined([row.tokens.ids[row.positions] for row in rows], np.int32),
    )


def _joined(parts: list[NDArray[Any]], kind: Any) -> NDArray[Any]:
    joined: NDArray[Any] = np.concatenate([np.zeros(0, kind), *parts]).astype(kind, copy=False)
    return joined


def _drawn(scores: Scores) -> NDArray[np.float64]:
    if not scores.sets:
        return np.zeros(len(scores))
    mean: NDArray[np.float64] = np.diff(scores.drawn_offsets).reshape(len(scores), scores.sets).mean(1)
    return mean


def _outside(scores: Scores, options: dict[str, Any]) -> NDArray[np.bool_] | None:
    """Say where the token that stands there is kept in addition to the likeliest; None if that cannot be told."""
    support = options.get("support")
    if support in ("top-k", "top-k+sample"):
        more: NDArray[np.bool_] = np.diff(scores.offsets) > int(options["top_k"])
        return more
    if support != "top-p":
        return None
    # It is added when the others carry the mass, or are as many as are allowed, without it, and all are likelier.
    owner = np.repeat(np.arange(len(scores)), np.diff(scores.offsets))
    kept = np.bincount(owner, np.exp(scores.logprobs.astype(np.float64)), minlength=len(scores))
    others = kept - np.exp(scores.realised_logprobs.astype(np.float64))
    lowest = np.full(len(scores), np.inf)
    np.minimum.at(lowest, owner, scores.logprobs)
    full = np.diff(scores.offsets) - 1 >= int(options["top_k"])
    found: NDArray[np.bool_] = (full | (others >= options["top_p"] - 1e-6)) & (scores.realised_logprobs <= lowest)
    return found


def bytes_by_part(manifest: dict[str, Any]) -> dict[str, int]:
    """Return the bytes of text, tokens, signal and everything else, of all shards; none is opened."""
    sums = dict.fromkeys((*PAYLOAD, "rest"), 0)
    for shard in manifest["shards"]:
        sizes = [stop - start for start, stop in shard["payload"]]
        for name, size in zip(PAYLOAD, sizes, strict=True):
            sums[name] += size
        sums["rest"] += int(shard["bytes"]) - sum(sizes)
    return sums


def statistics(cache: TeacherCache, positions: Positions, documents: int) -> dict[str, Any]:
    """Return what `xtk inspect` prints of a cache.

    Args:
        cache: which one.
        positions: what `sampled` gave.
        documents: of how many documents.
    """
    figures = totals(cache.manifest)
    by_part = bytes_by_part(cache.manifest)
    per = max(figures["positions"], 1)
    entropy, quantization_kl = (sum(float(shard[name]) for shard in cache.manifest["shards"]) for name in INFORMATION)
    return {
        **figures,
        "shards": len(cache.manifest["shards"]),
        "merged_of": len(parts_of(cache.manifest)),
        "bytes_by_part": by_part,
        "bytes_per_position": round(figures["bytes"] / per, 2),
        "teacher_logprobs_bytes_per_position": round(by_part["teacher_logprobs"] / per, 2),
        "sampled_documents": documents,
        "mean_entropy_nats": round(entropy / per, 6),
        "quantization_kl_nats": _figures(quantization_kl / per),
        "quantization_kl_share_of_entropy": _figures(quantization_kl / entropy) if entropy > 0 else None,
        "quantization_largest_error_nats": stated_error(cache.header["codec"]),
        "mean_mass_kept": mean(positions.kept),
        "mean_tail_mass": mean(1 - positions.kept),
        "mean_realised_logprob": mean(positions.realised),
        "mean_exact_ids": mean(positions.exact),
        "mean_drawn_ids": mean(positions.drawn),
        "share_outside_of_likeliest": None if positions.outside is None else mean(positions.outside),
        "distinct_tokens": len(np.unique(positions.ids)),
        "share_of_vocabulary": round(len(np.unique(positions.ids)) / max(int(cache.header["teacher"]["width"]), 1), 4),
    }


def stated_error(options: dict[str, Any]) -> float:
    """Return by how much a log-probability above -32 can be off in a cache, nats.

    Args:
        options: the header's codec.
    """
    codec: type[Codec] = lookup(CODECS, options["name"], "codec")
    return codec.largest_error(options)


def _figures(value: float) -> float:
    return float(f"{value:.3g}")


def mean(values: NDArray[Any]) -> float | None:
    """Return the mean of some numbers, or None of none."""
    return round(float(values.mean()), 6) if len(values) else None
