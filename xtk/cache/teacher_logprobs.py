"""Teacher log-probabilities of one document: in the format of the cache, and in the format for training."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.errors import XtkError
from xtk.name_registry import unknown_name_error

SUPPORTS = {
    "top-k": "the K most likely tokens, plus the sum of the remainder",
    "top-p": "the most likely tokens up to mass P, at most K, plus the sum of the remainder",
    "sample": "samples from the full distribution: unbiased with few bytes; for forward KL, or for one tokenizer",
    "top-k+sample": "the K most likely tokens, plus samples from the remainder: unbiased, with less noise",
    "candidates": "the candidate ids in the data (candidate_ids), plus the sum of the remainder",
    "none": "the observed token only: enough for losses on observed tokens",
}
DEFAULT_SUPPORT = "top-k+sample"
MAX_SEED = 2**63 - 1
# Probabilities from stored fp32 log-probabilities sum to 1 within this; a smaller remainder counts as 0.
MIN_REMAINDER = 1e-6
DEFAULT_TOP_K = {"top-k": 64, "top-p": 64, "top-k+sample": 16}
DEFAULT_TOP_P, DEFAULT_NUM_SAMPLES = 0.99, 16


@dataclass(frozen=True)
class Support:
    """Which tokens of a distribution are stored. The observed token always is.

    The stored distribution has an exact part and a sampled part. Samples are from the remainder (the distribution
    without the exact tokens), so that both parts together are unbiased.
    """

    kind: str  # a key of `SUPPORTS`
    top_k: int = 0  # K, the number of exact, most likely ids; the maximum for `top-p`
    top_p: float = 1.0  # the mass that `top-p` stores
    num_samples: int = 0  # samples from the remainder in each set
    num_sample_sets: int = 0  # independent sets of samples
    seed: int = 0  # seed of the samples


def make_support(
    kind: str,  # a key of `SUPPORTS`; "": chosen by the other arguments, `top-k+sample` by default
    *,
    top_k: int | None = None,  # None for the default
    top_p: float | None = None,  # the mass that `top-p` stores; None for the default
    num_samples: int | None = None,  # samples per set, for kinds with samples; None for the default
    num_sample_sets: int = 1,
    seed: int = 0,
    # kinds that the backend supports; without `top-k+sample` the default is `top-k`
    available_kinds: Collection[str] = SUPPORTS,
) -> Support:
    """Return a support with only the fields that its kind uses, so that equal supports share one cache."""
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
    has_samples = kind in ("sample", "top-k+sample")
    unused = {
        "--top-k": top_k is not None and kind not in DEFAULT_TOP_K,
        "--top-p": top_p is not None and kind != "top-p",
        "--num-samples": num_samples is not None and not has_samples,
        "--num-sample-sets": num_sample_sets != 1 and not has_samples,
        "--seed": seed != 0 and not has_samples,
    }
    if failure := next((name for name, is_unused in unused.items() if is_unused), ""):
        raise XtkError(
            f"{failure} has no effect with --support {kind}",
            hint=f"remove {failure}, or use another --support, such as {DEFAULT_SUPPORT}",
        )
    sampling = {}
    if has_samples:
        sampling = {
            "num_samples": DEFAULT_NUM_SAMPLES if num_samples is None else num_samples,
            "num_sample_sets": num_sample_sets,
            "seed": seed,
        }
    support = Support(
        kind,
        top_k=(DEFAULT_TOP_K[kind] if top_k is None else top_k) if kind in DEFAULT_TOP_K else 0,
        top_p=(DEFAULT_TOP_P if top_p is None else top_p) if kind == "top-p" else 1.0,
        **sampling,
    )
    if kind in DEFAULT_TOP_K and support.top_k < 1:
        raise XtkError(f"--top-k is {top_k}, but must be at least 1", hint="use, for example, --top-k 64")
    if not 0 < support.top_p <= 1:
        raise XtkError(f"--top-p is {top_p}, but must be above 0 and at most 1", hint="use, for example, --top-p 0.95")
    if sampling and support.num_samples < 1:
        raise XtkError(
            f"--num-samples is {support.num_samples}, but must be at least 1", hint="use, for example, --num-samples 64"
        )
    if sampling and not 0 <= seed <= MAX_SEED:
        raise XtkError(f"--seed is {seed}, but must be from 0 to {MAX_SEED}", hint="use, for example, --seed 0")
    if sampling and num_sample_sets < 1:
        raise XtkError(
            f"--num-sample-sets is {num_sample_sets}, but must be at least 1",
            hint="use, for example, --num-sample-sets 1",
        )
    return support


@dataclass(frozen=True)
class StoredLogprobs:
    """A teacher's distributions at the trained tokens of a document, as stored in a cache.

    P trained positions, E exact entries, R sets of samples, D distinct sampled ids. Ids are ascending within a position
    and within a set. All log-probabilities are in nats, normalized over the teacher's full vocabulary.
    """

    positions: NDArray[np.int32]  # [P], ascending: index of the token that the distribution predicts
    offsets: NDArray[np.int64]  # [P + 1]: the exact entries of position p are `[offsets[p], offsets[p + 1])`
    ids: NDArray[np.int32]  # [E]; include the observed token of each position
    logprobs: NDArray[np.float32]  # [E]
    sample_offsets: NDArray[np.int64]  # [P * R + 1]: samples of set r at position p: `[sample_offsets[p * R + r], ...)`
    sample_ids: NDArray[np.int32]  # [D], none of them exact
    sample_counts: NDArray[np.int32]  # [D], how often each was sampled
    remainder_mass: NDArray[np.float32]  # [P], the probability outside of the exact ids, from which the samples are
    observed_logprobs: NDArray[np.float32]  # [P], of the observed token
    entropy: NDArray[np.float32]  # [P], nats
    sample_logprobs: NDArray[np.float32] | None = None  # [D]; None: unknown (caches of older versions)

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def num_sample_sets(self) -> int:
        """R, the number of independent sets of samples."""
        return (len(self.sample_offsets) - 1) // len(self) if len(self) else 0

    def to_teacher_logprobs(self, sample_set: int | None = 0) -> TeacherLogprobs:
        """Return what a student trains on: exact entries, and sample set `sample_set` modulo R; None: no samples."""
        same = self.positions, self.observed_logprobs, self.entropy
        if not self.num_sample_sets or sample_set is None:
            return TeacherLogprobs(same[0], self.offsets, self.ids, self.logprobs, self.remainder_mass, *same[1:])
        sets, size = self.num_sample_sets, len(self)
        places = np.arange(size) * sets + sample_set % sets
        first, stop = self.sample_offsets[places], self.sample_offsets[places + 1]
        exact, sampled = np.diff(self.offsets), stop - first
        offsets = sizes_to_offsets(exact + sampled)
        ids = np.empty(offsets[-1], np.int32)
        logprobs = np.empty(offsets[-1], np.float32)
        at_exact = _range_indices(offsets[:-1], exact)
        ids[at_exact], logprobs[at_exact] = self.ids, self.logprobs
        at_sampled, chosen = _range_indices(offsets[:-1] + exact, sampled), _range_indices(first, sampled)
        counts = self.sample_counts[chosen].astype(np.float64)
        owner = np.repeat(np.arange(size), sampled)
        num_samples = np.bincount(owner, counts, minlength=size)
        with np.errstate(divide="ignore"):
            share = np.log(counts) + np.log(self.remainder_mass.astype(np.float64) / np.maximum(num_samples, 1))[owner]
        ids[at_sampled], logprobs[at_sampled] = self.sample_ids[chosen], share
        remainder, token_logprobs = np.where(num_samples > 0, np.float32(0), self.remainder_mass), None
        if self.sample_logprobs is not None:
            token_logprobs = logprobs.copy()
            token_logprobs[at_sampled] = self.sample_logprobs[chosen]
        return TeacherLogprobs(
            same[0], offsets, ids, logprobs, remainder, *same[1:], exact_counts=exact, token_logprobs=token_logprobs
        )


@dataclass(frozen=True)
class TeacherLogprobs:
    """The teacher's next-token distributions at the trained tokens of a document, as input of training.

    P trained positions, E entries. The observed token is among the entries of its position.
    """

    positions: NDArray[np.int32]  # [P], ascending: index of the token that the distribution predicts
    offsets: NDArray[np.int64]  # [P + 1]: the entries of position p are `[offsets[p], offsets[p + 1])`
    ids: NDArray[np.int32]  # [E], unique within a position; exact entries first, otherwise in any order
    # [E], nats, normalized over the teacher's full vocabulary. For a sampled id, the logarithm of the unbiased
    # estimate: its fraction of the samples times the remainder's mass.
    logprobs: NDArray[np.float32]
    remainder_mass: NDArray[np.float32]  # [P], the probability without entries; 0 where samples cover it
    observed_logprobs: NDArray[np.float32]  # [P], of the observed token
    entropy: NDArray[np.float32]  # [P], nats, of the full distribution
    # [P], exact entries of each position, with the observed token; others are sampled. None: all are exact.
    exact_counts: NDArray[np.int64] | None = None
    precision: str = ""  # quantization of the cache, a value of `--precision`; "": not quantized
    # [E], nats, as `logprobs`, but a sampled id's own log-probability; NaN: unknown. None: none is known.
    token_logprobs: NDArray[np.float32] | None = None

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def nan_positions(self) -> NDArray[np.bool_]:
        """Bool [P], which positions have a NaN in remainder, observed or stored log-probabilities."""
        bad: NDArray[np.bool_] = np.isnan(self.remainder_mass) | np.isnan(self.observed_logprobs)
        bad[np.searchsorted(self.offsets, np.flatnonzero(np.isnan(self.logprobs)), side="right") - 1] = True
        return bad

    def drop_nan_positions(self) -> TeacherLogprobs:
        """Return a copy without `nan_positions`."""
        bad = self.nan_positions
        return self.select_positions(~bad) if bad.any() else self

    def select_positions(self, kept: NDArray[np.bool_]) -> TeacherLogprobs:
        """Return a copy with some positions; `kept`: bool [P]."""
        sizes = np.diff(self.offsets)
        entries = np.repeat(kept, sizes)
        return TeacherLogprobs(
            positions=self.positions[kept],
            offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes[kept])]),
            ids=self.ids[entries],
            logprobs=self.logprobs[entries],
            remainder_mass=self.remainder_mass[kept],
            observed_logprobs=self.observed_logprobs[kept],
            entropy=self.entropy[kept],
            exact_counts=None if self.exact_counts is None else self.exact_counts[kept],
            precision=self.precision,
            token_logprobs=None if self.token_logprobs is None else self.token_logprobs[entries],
        )


def kl_on_stored_ids(exact: StoredLogprobs, stored: StoredLogprobs) -> NDArray[np.float64]:
    """Return float64 [P], KL(exact || stored) in nats over the stored ids, the same in both, and the remainder."""
    stored_logprobs, exact_logprobs = stored.logprobs.astype(np.float64), exact.logprobs.astype(np.float64)
    remainder, stored_remainder = exact.remainder_mass.astype(np.float64), stored.remainder_mass.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        entries = np.where(np.exp(exact_logprobs) > 0, np.exp(exact_logprobs) * (exact_logprobs - stored_logprobs), 0.0)
        remainder_terms = np.where(
            (remainder > 0) & (stored_remainder > 0), remainder * (np.log(remainder) - np.log(stored_remainder)), 0.0
        )
    owner = np.repeat(np.arange(len(exact)), np.diff(exact.offsets))
    return remainder_terms + np.bincount(owner, entries, minlength=len(exact)).astype(np.float64)


def entry_keys(offsets: NDArray[np.int64], ids: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return int64 [entries], range of the offsets and id of each entry as one number."""
    return (np.repeat(np.arange(len(offsets) - 1, dtype=np.int64), np.diff(offsets)) << 32) + ids


def sizes_to_offsets(sizes: NDArray[Any]) -> NDArray[np.int64]:
    """Return int64 [n + 1], where each of n ranges of these sizes begins, and the end of the last."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])


def _range_indices(starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return all indices of the ranges `[start, start + size)`, one range after the other."""
    before = np.cumsum(sizes) - sizes
    indices: NDArray[np.int64] = np.arange(sizes.sum()) + np.repeat(starts - before, sizes)
    return indices
