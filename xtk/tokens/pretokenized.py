"""Ids that data brings along: the teacher's tokens of a document, and tokens to be told about."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, eq=False)
class TeacherTokenIds:
    """A document as tokens of the teacher, which are read as they are.

    Attributes:
        ids: int32 [T], padding left out.
        train_mask: bool [T], which of them carry a loss; the first has nothing that predicts it, and carries none.
    """

    ids: NDArray[np.int32]
    train_mask: NDArray[np.bool_]

    @classmethod
    def from_lists(cls, ids: ArrayLike, train_mask: ArrayLike | None = None) -> TeacherTokenIds:
        """Return the tokens of some ids, all of them trained unless it is said which are.

        Raises:
            ValueError: an id is no number of 32 bits, or there are not as many flags as ids.
        """
        numbers = _as_int32_ids(ids, "input_ids")
        flags = np.ones(len(numbers), np.bool_) if train_mask is None else np.array(train_mask, np.bool_)
        if flags.shape != numbers.shape:
            raise ValueError(f"there are {flags.size:,} flags of what is trained, and {len(numbers):,} input_ids")
        return cls(numbers, flags)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TeacherTokenIds) and all(
            np.array_equal(*pair) for pair in ((self.ids, other.ids), (self.train_mask, other.train_mask))
        )

    def __hash__(self) -> int:
        return hash((self.ids.tobytes(), self.train_mask.tobytes()))

    def to_bytes(self) -> bytes:
        """Return what tells these tokens from others."""
        return self.ids.astype("<i4").tobytes() + self.train_mask.tobytes()


@dataclass(frozen=True, eq=False)
class SampledTokens:
    """A document as the student wrote it: the tokens that it read and drew.

    Attributes:
        ids: int32 [T], of the whole document.
        sampled_mask: bool [T], which of them it drew; the others are prompts, templates, and what tools answered.
        logprobs: float32 [T], natural, of the whole distribution that it drew from, before a temperature and
            before anything was cut off; 0 where it did not draw.
        tokenizer_fingerprint: fingerprint of its tokenizer.
        template_fingerprint: that of its chat template, of a conversation; "" of a text.
        advantage: by how much the document's reward is better than that of others; 0 without rewards.
    """

    ids: NDArray[np.int32]
    sampled_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    tokenizer_fingerprint: str
    template_fingerprint: str = ""
    advantage: float = 0.0

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
        """Return tokens from lists.

        Raises:
            ValueError: an id is no number of 32 bits, a log-probability no number up to 0, or the lists are of
                different lengths.
        """
        numbers, flags = _as_int32_ids(ids, "student_ids"), np.asarray(sampled_mask)
        said = np.asarray(logprobs, np.float64)
        if not numbers.shape == flags.shape == said.shape:
            raise ValueError(
                f"there are {numbers.size:,} student_ids, {flags.size:,} in student_mask and {said.size:,} "
                "student_logprobs, and it should be as many"
            )
        if not np.isin(flags, (0, 1)).all():
            raise ValueError("student_mask holds other numbers than 0 and 1")
        flags = flags.astype(np.bool_)
        if not (said[flags] <= 1e-3).all():
            raise ValueError("student_logprobs are natural logarithms of probabilities, at most 0")
        if not np.isfinite(advantage):
            raise ValueError(f"the advantage of a rollout is {advantage}, and is to be a number")
        return cls(
            numbers,
            flags,
            np.where(flags, said, 0).astype(np.float32),
            tokenizer_fingerprint,
            template_fingerprint,
            float(advantage),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SampledTokens) and self.to_bytes() == other.to_bytes()

    def __hash__(self) -> int:
        return hash(self.to_bytes())

    def sampled_runs(self) -> NDArray[np.int64]:
        """Return int64 [R, 2], the stretches `[start, stop)` that were drawn."""
        edges = np.flatnonzero(np.diff(self.sampled_mask.astype(np.int8), prepend=0, append=0))
        return edges.reshape(-1, 2)

    def to_bytes(self) -> bytes:
        """Return the tokens as a cache keeps them."""
        names = json.dumps([self.tokenizer_fingerprint, self.template_fingerprint, self.advantage.hex()]).encode()
        front = np.array([len(names), len(self.ids)], "<u4").tobytes()
        arrays = [self.ids.astype("<i4"), self.logprobs.astype("<f4"), self.sampled_mask.astype("u1")]
        return b"".join([front, names, *(array.tobytes() for array in arrays)])

    @classmethod
    def from_bytes(cls, content: bytes) -> SampledTokens:
        """Return what `to_bytes` wrote."""
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
class CandidateIdLists:
    """Some ids for each trained token of a document, as many as there are for each.

    Attributes:
        offsets: int64 [P + 1], those of the p-th trained token are `ids[offsets[p]:offsets[p + 1]]`.
        ids: int32 [E], rising for each token, none twice.
    """

    offsets: NDArray[np.int64]
    ids: NDArray[np.int32]

    @classmethod
    def from_lists(cls, lists: Sequence[ArrayLike]) -> CandidateIdLists:
        """Return the ids of some lists, in order and each once.

        Raises:
            ValueError: an id is no number of 32 bits.
        """
        parts = [np.unique(_as_int32_ids(ids, "candidate_ids")) for ids in lists]
        flat = np.concatenate([np.zeros(0, np.int32), *parts])
        return cls(np.cumsum([0, *map(len, parts)], dtype=np.int64), flat)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CandidateIdLists) and all(
            np.array_equal(*pair) for pair in ((self.offsets, other.offsets), (self.ids, other.ids))
        )

    def __hash__(self) -> int:
        return hash(self.to_bytes())

    def to_padded(self, num_tokens: int | None = None) -> NDArray[np.int32]:
        """Return int32 [P, G], the ids of the first `count` tokens (of all), -1 behind the shorter lists."""
        stop = len(self) if num_tokens is None else num_tokens
        sizes = np.diff(self.offsets)[:stop]
        table = np.full((len(sizes), int(sizes.max(initial=0))), -1, np.int32)
        table[np.arange(table.shape[1]) < sizes[:, None]] = self.ids[: self.offsets[len(sizes)]]
        return table

    def to_bytes(self) -> bytes:
        """Return what tells these lists from others."""
        return self.offsets.astype("<i8").tobytes() + self.ids.astype("<i4").tobytes()


def _as_int32_ids(values: ArrayLike, name: str) -> NDArray[np.int32]:
    """Return numbers as int32 [n]; a number that is none, or is too large, is refused."""
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):  # lists in lists of several lengths
        raise ValueError(f"{name} are no list of whole numbers") from None
    if not array.size:
        return np.zeros(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"{name} are no list of whole numbers")
    limits = np.iinfo(np.int32)
    for number in (array.min(), array.max()):
        if not limits.min <= int(number) <= limits.max:
            raise ValueError(f"{number} among {name} is no id of a token")
    return array.astype(np.int32)
