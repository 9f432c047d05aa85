"""Token ids that come with the data: teacher token ids, sampled tokens of rollouts, and candidate ids."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


class _EqualByBytes(ABC):
    """Equality and hash by the bytes of the arrays."""

    @abstractmethod
    def to_bytes(self) -> bytes:
        """Return bytes that identify the object."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.to_bytes() == other.to_bytes()

    def __hash__(self) -> int:
        return hash(self.to_bytes())


@dataclass(frozen=True, eq=False)
class TeacherTokenIds(_EqualByBytes):
    """A document given as token ids of the teacher, which are used unchanged."""

    ids: NDArray[np.int32]  # [T], without padding
    train_mask: NDArray[np.bool_]  # [T], which tokens are trained; never the first one, which has no prediction

    @classmethod
    def from_lists(cls, ids: ArrayLike, train_mask: ArrayLike | None = None) -> TeacherTokenIds:
        """Return a document of token ids, all trained by default; ValueError: an invalid id, or another length."""
        numbers = _as_int32_ids(ids, "input_ids")
        flags = np.ones(len(numbers), np.bool_) if train_mask is None else np.array(train_mask, np.bool_)
        if flags.shape != numbers.shape:
            raise ValueError(
                f"the train mask of a document has {flags.size:,} entries, but its input_ids has {len(numbers):,}"
            )
        return cls(numbers, flags)

    def to_bytes(self) -> bytes:
        """Return bytes that identify these tokens, for hashing."""
        return self.ids.astype("<i4").tobytes() + self.train_mask.tobytes()


@dataclass(frozen=True, eq=False)
class SampledTokens(_EqualByBytes):
    """The tokens of a rollout: prompt tokens and sampled tokens."""

    ids: NDArray[np.int32]  # [T], of the whole document
    sampled_mask: NDArray[np.bool_]  # [T], which of them the student sampled; others: prompts, templates, tool results
    # [T], in nats, of the full distribution before temperature, top-k and top-p; 0 for tokens that were not sampled.
    logprobs: NDArray[np.float32]
    tokenizer_fingerprint: str  # fingerprint of the student's tokenizer
    template_fingerprint: str = ""  # fingerprint of its chat template for a conversation; "" for text
    advantage: float = 0.0  # group-relative advantage of the rollout's reward; 0 without rewards

    @classmethod
    def from_lists(
        cls,
        ids: ArrayLike,
        sampled_mask: ArrayLike,
        logprobs: ArrayLike,
        tokenizer_fingerprint: str,
        template_fingerprint: str = "",
        advantage: float = 0.0,
    ) -> SampledTokens:
        """Return sampled tokens from lists; ValueError: invalid ids or log-probabilities, or different lengths."""
        numbers, flags = _as_int32_ids(ids, "student_ids"), np.asarray(sampled_mask)
        if (numbers < 0).any():
            raise ValueError(f"student_ids of a rollout has the negative token id {numbers.min()}")
        if np.asarray(logprobs).dtype.kind not in "iuf":
            raise ValueError("student_logprobs of a rollout must be numbers")
        values = np.asarray(logprobs, np.float64)
        if not numbers.shape == flags.shape == values.shape:
            raise ValueError(
                f"student_ids of a rollout has {numbers.size:,} entries, sampled_mask {flags.size:,} and "
                f"student_logprobs {values.size:,}; the lengths must be equal"
            )
        if not np.isin(flags, (0, 1)).all():
            raise ValueError("sampled_mask of a rollout must contain only 0 and 1")
        flags = flags.astype(np.bool_)
        if not ((values[flags] <= 1e-3) & np.isfinite(values[flags])).all():
            raise ValueError(
                "student_logprobs of a rollout must be natural logarithms of probabilities, finite and at most 0"
            )
        if not np.isfinite(advantage):
            raise ValueError(f"the advantage of a rollout is {advantage}, but must be finite")
        return cls(
            numbers,
            flags,
            np.where(flags, values, 0).astype(np.float32),
            tokenizer_fingerprint,
            template_fingerprint,
            float(advantage),
        )

    def sampled_runs(self) -> NDArray[np.int64]:
        """Return int64 [R, 2], the runs `[start, stop)` of sampled tokens."""
        edges = np.flatnonzero(np.diff(self.sampled_mask.astype(np.int8), prepend=0, append=0))
        return edges.reshape(-1, 2)

    def to_bytes(self) -> bytes:
        """Return the tokens in the format of the cache."""
        names = json.dumps([self.tokenizer_fingerprint, self.template_fingerprint, self.advantage.hex()]).encode()
        front = np.array([len(names), len(self.ids)], "<u4").tobytes()
        arrays = [self.ids.astype("<i4"), self.logprobs.astype("<f4"), self.sampled_mask.astype("u1")]
        return b"".join([front, names, *(array.tobytes() for array in arrays)])

    @classmethod
    def from_bytes(cls, content: bytes) -> SampledTokens:
        """Return the sampled tokens of `to_bytes`."""
        size, count = np.frombuffer(content, "<u4", 2).tolist()
        tokenizer, template, advantage = json.loads(content[8 : 8 + size])
        at = 8 + size
        return cls(
            np.frombuffer(content, "<i4", count, at).astype(np.int32),
            np.frombuffer(content, "u1", count, at + 8 * count).astype(np.bool_),
            np.frombuffer(content, "<f4", count, at + 4 * count).astype(np.float32),
            tokenizer,
            template,
            float.fromhex(advantage),
        )


@dataclass(frozen=True, eq=False)
class CandidateIdLists(_EqualByBytes):
    """Candidate ids for each trained token of a document, as lists of any length."""

    offsets: NDArray[np.int64]  # [P + 1], the ids of the p-th trained token are `ids[offsets[p]:offsets[p + 1]]`
    ids: NDArray[np.int32]  # [E], ascending and unique for each token

    @classmethod
    def from_lists(cls, lists: Sequence[ArrayLike]) -> CandidateIdLists:
        """Return the ids of lists, sorted, without duplicates; ValueError: an id is not a 32-bit integer."""
        parts = [np.unique(_as_int32_ids(ids, "candidate_ids")) for ids in lists]
        flat = np.concatenate([np.zeros(0, np.int32), *parts])
        return cls(np.cumsum([0, *map(len, parts)], dtype=np.int64), flat)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def to_padded(self, num_tokens: int | None = None) -> NDArray[np.int32]:
        """Return int32 [P, G], the ids of the first `num_tokens` tokens (all by default), padded with -1."""
        stop = len(self) if num_tokens is None else num_tokens
        sizes = np.diff(self.offsets)[:stop]
        table = np.full((len(sizes), int(sizes.max(initial=0))), -1, np.int32)
        table[np.arange(table.shape[1]) < sizes[:, None]] = self.ids[: self.offsets[len(sizes)]]
        return table

    def to_bytes(self) -> bytes:
        """Return bytes that identify these lists, for hashing."""
        return self.offsets.astype("<i8").tobytes() + self.ids.astype("<i4").tobytes()


def _as_int32_ids(values: ArrayLike, name: str) -> NDArray[np.int32]:
    """Return ids as int32 [n]; refuse other types and values outside of int32."""
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):  # nested lists of different lengths
        raise ValueError(f"{name} must be a flat list of integers") from None
    if not array.size:
        return np.zeros(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be a flat list of integers")
    limits = np.iinfo(np.int32)
    for number in (array.min(), array.max()):
        if not limits.min <= int(number) <= limits.max:
            raise ValueError(f"{name} contains {number}, which is not a token id: it does not fit into 32 bits")
    return array.astype(np.int32)
