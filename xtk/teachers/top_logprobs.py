"""Teachers that tell the head of a distribution alone: its likeliest tokens, and the token that stands there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xtk.errors import XtkError
from xtk.teachers.backend import BackendConfig
from xtk.teachers.logprob_arrays import LogprobArrays, arrays_to_stored, trained_positions
from xtk.tokens.teacher_logprobs import StoredLogprobs, Support
from xtk.tokens.token_sequence import TokenSequence as TokenSequence

SUPPORTED_KINDS = frozenset({"top-k", "top-p", "none"})
# Sums of log-softmax in fp32 are off by 1e-5. More than this is no rounding: these are logits, or another model's ids.
MAX_EXCESS_MASS = 1e-3


@dataclass(frozen=True)
class TopLogprobs:
    """The likeliest tokens of P distributions.

    Attributes:
        ids: int32 [P, K], likeliest first.
        logprobs: float32 [P, K].
        observed_logprobs: float32 [P], of the token that stands there, whether it is among them or not.
    """

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    observed_logprobs: NDArray[np.float32]


def check_support_kind(request: BackendConfig) -> None:
    """Refuse a support for which more than the head of a distribution has to be known.

    Raises:
        XtkError: names the backend that can give it.
    """
    kind = request.support.kind
    if kind in SUPPORTED_KINDS:
        return
    needs = {
        "candidates": "the log-probabilities of ids that the data names, which vLLM gives on some GPUs alone",
        "sample": "the whole distribution, to draw from it",
        "top-k+sample": "the whole distribution, to draw from it",
    }.get(kind, "more than the likeliest tokens")
    raise XtkError(
        f"vLLM tells the likeliest tokens alone, and --support {kind} needs {needs}",
        where=request.name,
        hint=f"--support top-k or top-p (or none); or --backend transformers, which gives {kind}",
    )


def check_document_lengths(documents: Sequence[TokenSequence], max_tokens: int | None, name: str) -> None:
    """Refuse documents that are longer than what runs the teacher was set up for.

    Raises:
        XtkError: tells how long a document may be.
    """
    longest = max((num_tokens_to_read(document) for document in documents), default=0)
    if max_tokens is not None and longest > max_tokens:
        raise XtkError(
            f"a document has {longest:,} tokens, and the teacher is run with a context of {max_tokens:,}",
            where=name,
            hint=f"--max-length {max_tokens} --long-documents split (or truncate, or skip)",
        )


def num_top_ids(support: Support, width: int) -> int:
    """Return K, how many of the likeliest ids to ask for."""
    return 0 if support.kind == "none" else min(support.top_k, width)


def num_tokens_to_read(document: TokenSequence) -> int:
    """Return how many tokens of a document have to be read: up to the last trained one; 0 if none is trained."""
    positions = trained_positions(document)
    return int(positions[-1]) + 1 if len(positions) else 0


def empty_top_logprobs(columns: int) -> TopLogprobs:
    """Return the heads of no positions."""
    return TopLogprobs(np.zeros((0, columns), np.int32), np.zeros((0, columns), np.float32), np.zeros(0, np.float32))


def top_logprobs_to_stored(
    document: TokenSequence, top_logprobs: TopLogprobs, support: Support, vocab_size: int, where: str
) -> StoredLogprobs:
    """Return the scores of a document from what was told at its trained tokens.

    Args:
        document: what was read.
        top_logprobs: one a trained token; more ids than the support keeps are welcome.
        support: what is kept.
        vocab_size: U, ids are below it.
        where: who told it, for errors.

    Raises:
        XtkError: something was told that no distribution says.
    """
    realised = document.ids[trained_positions(document)]
    _check_top_logprobs(top_logprobs, realised, vocab_size, where)
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
        entropy=entropy_lower_bound(top_logprobs, realised).astype(np.float32),
        sampled_ids=np.zeros((len(ids), support.num_sample_sets, support.num_samples), np.int32),
    )
    return arrays_to_stored([document], dense)[0]


def entropy_lower_bound(top_logprobs: TopLogprobs, realised: NDArray[np.int32]) -> NDArray[np.float64]:
    """Return [P], the entropy in nats if all tokens of which nothing was told were one: a lower bound of the true one.

    To tell apart what is in one cell adds entropy and never takes any away.
    """
    logprobs, others = _known_and_remainder(top_logprobs, realised)
    cells = np.concatenate([logprobs, others[:, None]], 1)
    entropy: NDArray[np.float64] = -(np.exp(cells) * np.where(np.isneginf(cells), 0, cells)).sum(1)
    return entropy


def _known_and_remainder(
    heads: TopLogprobs, realised: NDArray[np.int32]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the log-probabilities [P, K + 1] of the tokens that are known, none twice, and [P] of all others."""
    among = (heads.ids == realised[:, None]).any(1)
    own = np.where(among, -np.inf, heads.observed_logprobs.astype(np.float64))
    known = np.concatenate([heads.logprobs.astype(np.float64), own[:, None]], 1)
    rest = np.maximum(0, 1 - np.exp(known).sum(1))
    with np.errstate(divide="ignore"):
        return known, np.log(rest)


def _check_top_logprobs(heads: TopLogprobs, realised: NDArray[np.int32], width: int, where: str) -> None:
    if len(heads.observed_logprobs) != len(realised) or len(heads.ids) != len(realised):
        raise XtkError(f"{len(realised):,} distributions were asked for and {len(heads.ids):,} came", where=where)
    if not np.isfinite(heads.observed_logprobs).all() or np.isnan(heads.logprobs).any():
        raise XtkError(
            "the teacher gives log-probabilities that are no numbers",
            where=where,
            hint="another --dtype: float16 overflows in models trained in bfloat16",
        )
    if heads.ids.size and not (heads.ids.min() >= 0 and heads.ids.max() < width):
        raise XtkError(f"the teacher names token {heads.ids.max():,}, and has {width:,} vocabulary rows", where=where)
    in_order = np.sort(heads.ids, 1)
    if (in_order[:, 1:] == in_order[:, :-1]).any():
        raise XtkError("the teacher names a token twice in one distribution", where=where)
    known, _ = _known_and_remainder(heads, realised)
    most = np.exp(known).sum(1).max(initial=0.0)
    if not most <= 1 + MAX_EXCESS_MASS:
        raise XtkError(
            f"the probabilities of some tokens add up to {most:.4g}: these are no log-probabilities",
            where=where,
            hint="a server of vLLM gives them with --logprobs-mode raw_logprobs",
        )
