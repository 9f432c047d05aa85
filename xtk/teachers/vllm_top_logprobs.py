"""Conversion and checks for backends that return only the top-k and the observed tokens of a distribution (vLLM)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xtk.cache.teacher_logprobs import StoredLogprobs, Support
from xtk.engines.server_responses import VLLM_SERVER_HINT, RetryableError
from xtk.errors import XtkError
from xtk.teachers.logprob_checks import BACKEND_HINTS
from xtk.teachers.logprobs_to_cache_arrays import LogprobArrays, arrays_to_stored, trained_positions
from xtk.text.token_sequence import TokenSequence

SUPPORTED_KINDS = frozenset({"top-k", "top-p", "none"})
CLAMPED_LOGPROB = -9999.0  # vLLM's value for minus infinity, which JSON does not have
# Sums of softmax in float32 are off by 1e-5. A larger excess is not rounding: these are logits, or another model's ids.
MAX_EXCESS_MASS = 1e-3


@dataclass(frozen=True)
class TopLogprobs:
    """The most likely tokens of P distributions."""

    ids: NDArray[np.int32]  # int32 [P, K], most likely first
    logprobs: NDArray[np.float32]  # float32 [P, K]
    observed_logprobs: NDArray[np.float32]  # float32 [P], of the observed token, whether it is among `ids` or not


def check_document_lengths(documents: Sequence[TokenSequence], max_tokens: int | None, name: str) -> None:
    """Refuse documents that are longer than the context of the engine or server that runs the teacher."""
    longest = max((num_tokens_to_read(document) for document in documents), default=0)
    if max_tokens is not None and longest > max_tokens:
        raise XtkError(
            f"a document has {longest:,} tokens, but the teacher runs with a context of {max_tokens:,}",
            where=name,
            hint=f"use --max-length {max_tokens} --long-documents split (or truncate, or skip)",
        )


def num_top_ids(support: Support, width: int) -> int:
    """Return K, the number of top ids to request."""
    return 0 if support.kind == "none" else min(support.top_k, width)


def num_tokens_to_read(document: TokenSequence) -> int:
    """Return the number of tokens that the teacher has to read, up to the last trained one; 0 if none is trained."""
    positions = trained_positions(document)
    return int(positions[-1]) + 1 if len(positions) else 0


def empty_top_logprobs(columns: int) -> TopLogprobs:
    """Return the top log-probabilities of zero positions."""
    return TopLogprobs(np.zeros((0, columns), np.int32), np.zeros((0, columns), np.float32), np.zeros(0, np.float32))


def top_logprobs_to_stored(
    document: TokenSequence, top_logprobs: TopLogprobs, support: Support, vocab_size: int, where: str
) -> StoredLogprobs:
    """Return a document's stored log-probabilities from those at its trained tokens, perhaps of more ids than kept."""
    observed_ids = document.ids[trained_positions(document)]
    _check_top_logprobs(top_logprobs, observed_ids, vocab_size, where)
    probs = np.exp(top_logprobs.logprobs.astype(np.float64))
    ids = top_logprobs.ids
    if support.kind == "none":
        ids = ids[:, :0]
    elif support.kind == "top-p":
        ids = np.where(np.cumsum(probs, 1) - probs < support.top_p, ids, -1).astype(np.int32)
    dense = LogprobArrays(
        ids=np.ascontiguousarray(ids),
        logprobs=np.ascontiguousarray(top_logprobs.logprobs[:, : ids.shape[1]]),
        observed_logprobs=top_logprobs.observed_logprobs,
        entropy=entropy_lower_bound(top_logprobs, observed_ids).astype(np.float32),
        sampled_ids=np.zeros((len(ids), support.num_sample_sets, support.num_samples), np.int32),
    )
    return arrays_to_stored([document], dense)[0]


def entropy_lower_bound(top_logprobs: TopLogprobs, observed_ids: NDArray[np.int32]) -> NDArray[np.float64]:
    """Return float64 [P], the entropy in nats with all unknown tokens as one outcome: a lower bound.

    Splitting one outcome into several never decreases the entropy.
    """
    logprobs, others = _known_and_remainder(top_logprobs, observed_ids)
    cells = np.concatenate([logprobs, others[:, None]], 1)
    entropy: NDArray[np.float64] = -(np.exp(cells) * np.where(np.isneginf(cells), 0, cells)).sum(1)
    return entropy


def _known_and_remainder(
    heads: TopLogprobs, observed_ids: NDArray[np.int32]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the log-probabilities [P, K + 1] of the known tokens, each once, and [P] of all others together."""
    among = (heads.ids == observed_ids[:, None]).any(1)
    own = np.where(among, -np.inf, heads.observed_logprobs.astype(np.float64))
    known = np.concatenate([heads.logprobs.astype(np.float64), own[:, None]], 1)
    rest = np.maximum(0, 1 - np.exp(known).sum(1))
    with np.errstate(divide="ignore"):
        return known, np.log(rest)


def _check_top_logprobs(heads: TopLogprobs, observed_ids: NDArray[np.int32], width: int, where: str) -> None:
    count, in_order = len(observed_ids), np.sort(heads.ids, 1)
    if len(heads.observed_logprobs) != count or len(heads.ids) != count:
        failure = f"the teacher's backend returned log-probabilities for {len(heads.ids):,} tokens instead of {count:,}"
        hint = BACKEND_HINTS["arrays"]
    elif not np.isfinite(heads.observed_logprobs).all() or np.isnan(heads.logprobs).any():
        failure, hint = "the teacher returned log-probabilities that are NaN or infinite", BACKEND_HINTS["values"]
    elif heads.ids.size and not (heads.ids.min() >= 0 and heads.ids.max() < width):
        failure = f"the teacher returned the token id {heads.ids.max():,}, but its vocabulary has {width:,} ids"
        hint = "check that tokenizer and config.json of TEACHER belong to the model that the backend or server runs"
    elif (in_order[:, 1:] == in_order[:, :-1]).any():
        failure = "the teacher's backend returned two log-probabilities of the same token at one position"
        hint = BACKEND_HINTS["arrays"]
    else:
        most = np.exp(_known_and_remainder(heads, observed_ids)[0]).sum(1).max(initial=0.0)
        if most <= 1 + MAX_EXCESS_MASS:
            return
        failure = f"the values from vLLM are not log-probabilities: the probabilities of a position sum to {most:.4g}"
        hint = "start vLLM's server with --logprobs-mode raw_logprobs"
    raise XtkError(failure, where=where, hint=hint)


def separate_observed(
    ids: NDArray[np.int32],  # of all positions, concatenated
    logprobs: NDArray[np.float32],
    lengths: NDArray[np.int64],  # [P], K, or K + 1 if the observed token is not among the top K
    observed_ids: NDArray[np.int32],
    top_k: int,
) -> TopLogprobs:
    """Return the top K ids of each position and the observed token, which may be one of them."""
    filled = np.arange(top_k + 1) < lengths[:, None]
    table = np.full(filled.shape, -1, np.int32)
    values = np.full(filled.shape, -np.inf, np.float32)
    table[filled] = ids
    values[filled] = np.where(logprobs <= CLAMPED_LOGPROB, -np.inf, logprobs)
    own = table == observed_ids[:, None]
    if not (own.sum(1) == 1).all():
        raise RetryableError(
            "the server's response has log-probabilities of other tokens than those in the request", VLLM_SERVER_HINT
        )
    # An observed token outside of the top K is sorted after them, even with equal log-probabilities.
    last = (~filled | (own & (lengths == top_k + 1)[:, None])).astype(np.int8)
    order = np.lexsort((-values, last), axis=1)[:, :top_k]
    return TopLogprobs(np.take_along_axis(table, order, 1), np.take_along_axis(values, order, 1), values[own])
