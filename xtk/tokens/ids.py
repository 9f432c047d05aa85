"""Ids that data brings along: the teacher's tokens of a document, and tokens to be told about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, eq=False)
class TeacherTokens:
    """A document as tokens of the teacher, which are read as they are.

    Attributes:
        ids: int32 [T], padding left out.
        trained: bool [T], which of them carry a loss; the first has nothing that predicts it, and carries none.
    """

    ids: NDArray[np.int32]
    trained: NDArray[np.bool_]

    @classmethod
    def of(cls, ids: ArrayLike, trained: ArrayLike | None = None) -> TeacherTokens:
        """Return the tokens of some ids, all of them trained unless it is said which are.

        Raises:
            ValueError: an id is no number of 32 bits, or there are not as many flags as ids.
        """
        numbers = _int32(ids, "input_ids")
        flags = np.ones(len(numbers), np.bool_) if trained is None else np.array(trained, np.bool_)
        if flags.shape != numbers.shape:
            raise ValueError(f"there are {flags.size:,} flags of what is trained, and {len(numbers):,} input_ids")
        return cls(numbers, flags)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TeacherTokens) and all(
            np.array_equal(*pair) for pair in ((self.ids, other.ids), (self.trained, other.trained))
        )

    def __hash__(self) -> int:
        return hash((self.ids.tobytes(), self.trained.tobytes()))

    def to_bytes(self) -> bytes:
        """Return what tells these tokens from others."""
        return self.ids.astype("<i4").tobytes() + self.trained.tobytes()


@dataclass(frozen=True, eq=False)
class IdLists:
    """Some ids for each trained token of a document, as many as there are for each.

    Attributes:
        offsets: int64 [P + 1], those of the p-th trained token are `ids[offsets[p]:offsets[p + 1]]`.
        ids: int32 [E], rising for each token, none twice.
    """

    offsets: NDArray[np.int64]
    ids: NDArray[np.int32]

    @classmethod
    def of(cls, lists: Sequence[ArrayLike]) -> IdLists:
        """Return the ids of some lists, in order and each once.

        Raises:
            ValueError: an id is no number of 32 bits.
        """
        parts = [np.unique(_int32(ids, "given_ids")) for ids in lists]
        flat = np.concatenate([np.zeros(0, np.int32), *parts])
        return cls(np.cumsum([0, *map(len, parts)], dtype=np.int64), flat)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdLists) and all(
            np.array_equal(*pair) for pair in ((self.offsets, other.offsets), (self.ids, other.ids))
        )

    def __hash__(self) -> int:
        return hash(self.to_bytes())

    def padded(self, count: int | None = None) -> NDArray[np.int32]:
        """Return int32 [P, G], the ids of the first `count` tokens (of all), -1 behind the shorter lists."""
        stop = len(self) if count is None else count
        sizes = np.diff(self.offsets)[:stop]
        table = np.full((len(sizes), int(sizes.max(initial=0))), -1, np.int32)
        table[np.arange(table.shape[1]) < sizes[:, None]] = self.ids[: self.offsets[len(sizes)]]
        return table

    def to_bytes(self) -> bytes:
        """Return what tells these lists from others."""
        return self.offsets.astype("<i8").tobytes() + self.ids.astype("<i4").tobytes()


def _int32(values: ArrayLike, name: str) -> NDArray[np.int32]:
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
