"""What a teacher said at the tokens of one document: as it is kept, and as a student trains from it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xtk.errors import XtkError
from xtk.registry import unknown_name_error

SUPPORTS = {
    "top-k": "the K likeliest tokens, and a sum of the rest",
    "top-p": "as many of the likeliest tokens as carry the mass P, K at most, and a sum of the rest",
    "sample": "draws from the whole distribution: unbiased at a few bytes, for forward KL only",
    "top-k+sample": "the K likeliest tokens, and draws from the rest: unbiased, with less noise",
    "candidates": "the tokens that the data names (candidate_ids), and a sum of the rest",
    "none": "the token that stands there alone: enough for losses on realised tokens",
}
DEFAULT_SUPPORT = "top-k+sample"
DEFAULT_TOP_K = {"top-k": 64, "top-p": 64, "top-k+sample": 16}
DEFAULT_TOP_P, DEFAULT_NUM_SAMPLES = 0.99, 16


@dataclass(frozen=True)
class Support:
    """Which tokens of a distribution are kept. The token that stands there always is.

    The kept distribution has an exact part and a drawn one. Draws are from the rest of the distribution, what is
    exact taken out, so that the whole is unbiased.

    Attributes:
        kind: a key of `SUPPORTS`.
        top_k: K, the likeliest ids that are exact; the cap of `top-p`.
        top_p: the mass that `top-p` keeps.
        num_samples: n, from the rest, a set.
        num_sample_sets: independent sets of draws.
        seed: of the draws.
    """

    kind: str
    top_k: int = 0
    top_p: float = 1.0
    num_samples: int = 0
    num_sample_sets: int = 0
    seed: int = 0


def make_support(
    kind: str,
    *,
    top_k: int | None = None,
    top_p: float | None = None,
    num_samples: int | None = None,
    num_sample_sets: int = 1,
    seed: int = 0,
    available_kinds: Collection[str] = SUPPORTS,
) -> Support:
    """Return a support with what its kind knows, and nothing else: equal ones are the same cache.

    Args:
        kind: a key of `SUPPORTS`; "": what the other numbers ask for, and `top-k+sample` if none does.
        top_k: None for the usual one.
        top_p: the mass that `top-p` keeps; None for the usual one.
        num_samples: a set, of kinds that draw; None for the usual number.
        num_sample_sets: of draws.
        seed: of the draws.
        available_kinds: the kinds that whoever is asked can give; `top-k` takes the place of `top-k+sample`.

    Raises:
        XtkError: there is no such kind, or a number makes no sense for it.
    """
    if not kind:
        head = top_k is not None and num_samples is None
        kind = (
            "top-p"
            if top_p is not None
            else "top-k"
            if head or DEFAULT_SUPPORT not in available_kinds
            else DEFAULT_SUPPORT
        )
    if kind not in SUPPORTS:
        raise unknown_name_error("support", kind, SUPPORTS)
    drawn = {}
    if kind in ("sample", "top-k+sample"):
        drawn = {
            "num_samples": DEFAULT_NUM_SAMPLES if num_samples is None else num_samples,
            "num_sample_sets": num_sample_sets,
            "seed": seed,
        }
    support = Support(
        kind,
        top_k=(DEFAULT_TOP_K[kind] if top_k is None else top_k) if kind in DEFAULT_TOP_K else 0,
        top_p=(DEFAULT_TOP_P if top_p is None else top_p) if kind == "top-p" else 1.0,
        **drawn,
    )
    if kind in DEFAULT_TOP_K and support.top_k < 1:
        raise XtkError(f"--top-k is {top_k}; a support holds at least one id")
    if not 0 < support.top_p <= 1:
        raise XtkError(f"--top-p is {top_p}; it is a mass, above 0 and at most 1")
    if drawn and (support.num_samples < 1 or num_sample_sets < 1):
        raise XtkError(
            f"--num-samples is {support.num_samples} and --num-sample-sets {num_sample_sets}; both are at least 1"
        )
    return support


@dataclass(frozen=True)
class StoredLogprobs:
    """A teacher's distributions at the trained tokens of a document, as a cache keeps them.

    P trained positions, E exact entries, R sets of draws, D entries that were drawn. Within a position, and within
    a set, ids rise. All log-probabilities are natural and normalised over the teacher's whole vocabulary.

    Attributes:
        positions: int32 [P], rising: the index of the token that the distribution predicts.
        offsets: int64 [P + 1]: the exact entries of position p are `[offsets[p], offsets[p + 1])`.
        ids: int32 [E]; the token that stands there is among those of its position.
        logprobs: float32 [E].
        sample_offsets: int64 [P * R + 1]: those of set r at position p are `[drawn_offsets[p * R + r], ...)`.
        sample_ids: int32 [D], none of them exact.
        sample_counts: int32 [D], how often each was drawn.
        remainder_mass: float32 [P], the probability outside of the exact ids; draws are from there.
        observed_logprobs: float32 [P], of the token that stands there.
        entropy: float32 [P], nats.
    """

    positions: NDArray[np.int32]
    offsets: NDArray[np.int64]
    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    sample_offsets: NDArray[np.int64]
    sample_ids: NDArray[np.int32]
    sample_counts: NDArray[np.int32]
    remainder_mass: NDArray[np.float32]
    observed_logprobs: NDArray[np.float32]
    entropy: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def num_sample_sets(self) -> int:
        """R, the independent sets of draws."""
        return (len(self.sample_offsets) - 1) // len(self) if len(self) else 0


@dataclass(frozen=True)
class TeacherLogprobs:
    """The teacher's next-token distributions at the trained tokens of a document, as a student trains from them.

    P trained positions, E entries. The token that stands there is among the entries of its position.

    Attributes:
        positions: int32 [P], rising: the index of the token that the distribution predicts.
        offsets: int64 [P + 1]: the entries of position p are `[offsets[p], offsets[p + 1])`.
        ids: int32 [E], in any order but for what `exact` says, none twice at a position.
        logprobs: float32 [E], natural, normalised over the teacher's whole vocabulary. Of an id that was drawn,
            the logarithm of the unbiased estimate: its share of the draws, times the mass they are from.
        remainder_mass: float32 [P], the probability of which no entry tells; 0 where draws tell of it.
        observed_logprobs: float32 [P], of the token that stands there.
        entropy: float32 [P], nats, of the whole distribution.
        exact_counts: int64 [P], how many of the entries of each position, its first, are exact; the others were drawn.
            The
            token that stands there is exact. None: all are.
        precision: to which a cache rounded the log-probabilities, as `--precision` names it; "": to none.
    """

    positions: NDArray[np.int32]
    offsets: NDArray[np.int64]
    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    remainder_mass: NDArray[np.float32]
    observed_logprobs: NDArray[np.float32]
    entropy: NDArray[np.float32]
    exact_counts: NDArray[np.int64] | None = None
    precision: str = ""

    def __len__(self) -> int:
        return len(self.positions)

    def drop_nan_positions(self) -> TeacherLogprobs:
        """Leave out the positions at which something that the teacher said is not a number."""
        bad = np.isnan(self.remainder_mass) | np.isnan(self.observed_logprobs)
        bad[np.searchsorted(self.offsets, np.flatnonzero(np.isnan(self.logprobs)), side="right") - 1] = True
        if not bad.any():
            return self
        sizes = np.diff(self.offsets)
        entries = np.repeat(~bad, sizes)
        return TeacherLogprobs(
            positions=self.positions[~bad],
            offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes[~bad])]),
            ids=self.ids[entries],
            logprobs=self.logprobs[entries],
            remainder_mass=self.remainder_mass[~bad],
            observed_logprobs=self.observed_logprobs[~bad],
            entropy=self.entropy[~bad],
            exact_counts=None if self.exact_counts is None else self.exact_counts[~bad],
            precision=self.precision,
        )


def kl_on_stored_ids(exact: StoredLogprobs, stored: StoredLogprobs) -> NDArray[np.float64]:
    """Return float64 [P], KL(said || held) over the exact ids and the rest as one cell, in nats.

    Args:
        exact: what a teacher says.
        stored: what is kept of it, at the same ids.
    """
    ours, theirs = stored.logprobs.astype(np.float64), exact.logprobs.astype(np.float64)
    rest, other_rest = exact.remainder_mass.astype(np.float64), stored.remainder_mass.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        entries = np.where(np.exp(theirs) > 0, np.exp(theirs) * (theirs - ours), 0.0)
        rests = np.where((rest > 0) & (other_rest > 0), rest * (np.log(rest) - np.log(other_rest)), 0.0)
    owner = np.repeat(np.arange(len(exact)), np.diff(exact.offsets))
    return rests + np.bincount(owner, entries, minlength=len(exact)).astype(np.float64)
