"""Top-1 agreement: how often the student's likeliest token is the teacher's, where both begin a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from xtk.losses.cells import Example, span_ranges
from xtk.projection.projection import Projection
from xtk.projection.special import match_special_tokens
from xtk.tokens.tokenizer import Tokenizer

# Supports that hold the teacher's likeliest token for certain.
SUPPORTS = ("top-k", "top-p", "top-k+sample")


@dataclass(frozen=True)
class Likeliest:
    """The teacher's likeliest tokens, where both begin a token.

    Attributes:
        rows: int64 [C], rows of the student.
        tokens: int32 [C].
    """

    rows: NDArray[np.int64]
    tokens: NDArray[np.int32]

    @classmethod
    def of(cls, example: Example) -> Likeliest:
        """Read them off what the teacher said, draws left out; the lowest id on ties."""
        signal = example.signal
        assert signal is not None
        sizes = np.diff(signal.offsets)
        within = np.arange(len(signal.ids)) - np.repeat(signal.offsets[:-1], sizes)
        named = within < np.repeat(sizes if signal.exact is None else signal.exact, sizes)
        owners = np.repeat(np.arange(len(signal)), sizes)[named]
        ids, logprobs = signal.ids[named], signal.logprobs[named]
        order = np.lexsort((ids, -logprobs, owners))
        at, firsts = np.unique(owners[order], return_index=True)
        tokens = np.full(len(signal), -1, np.int32)
        tokens[at] = ids[order][firsts]
        spans = span_ranges(example)
        return cls(spans.row_start, tokens[spans.position_start])


class Meeting(Protocol):
    """How tokens of two vocabularies can be the same one."""

    def agree(self, students: NDArray[np.int64], teachers: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return bool [n], whether each token of the student is that of the teacher."""


@dataclass(frozen=True)
class ByImage:
    """Through a projection: the teacher's token on which most of a student's token lands.

    Attributes:
        images: int32 [V]; -1: it lands nowhere.
    """

    images: NDArray[np.int32]

    @classmethod
    def of(cls, projection: Projection) -> ByImage:
        """Take the heaviest entry of each row, the lowest id on ties."""
        rows = projection.rows_of_entries
        order = np.lexsort((projection.teacher_ids, -projection.weights, rows))
        students, firsts = np.unique(rows[order], return_index=True)
        images = np.full(projection.student_width, -1, np.int32)
        images[students] = projection.teacher_ids[order][firsts]
        return cls(images)

    def agree(self, students: NDArray[np.int64], teachers: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return bool [n]; rows of the student's head that have no image are nobody's."""
        known = students < len(self.images)
        found: NDArray[np.bool_] = known & (self.images[np.where(known, students, 0)] == teachers) & (teachers >= 0)
        return found


@dataclass(frozen=True)
class BySpelling:
    """By bytes: one of the two begins with the other. Special tokens meet by their roles.

    Attributes:
        students: what each token of the student spells; nothing for special tokens.
        teachers: likewise.
        roles: {special token of the student: that of the teacher}.
    """

    students: Sequence[bytes]
    teachers: Sequence[bytes]
    roles: Mapping[int, int]

    @classmethod
    def of(cls, student: Tokenizer, teacher: Tokenizer) -> BySpelling:
        """Take both vocabularies as they are."""
        roles = zip(*(ids.tolist() for ids in match_special_tokens(student, teacher)), strict=True)
        return cls(student.vocabulary.spellings, teacher.vocabulary.spellings, dict(roles))

    def agree(self, students: NDArray[np.int64], teachers: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return bool [n]."""
        pairs, places = np.unique(np.column_stack([students, teachers]), axis=0, return_inverse=True)
        found = np.array([self._are_one(*pair) for pair in pairs.tolist()], np.bool_)
        return found[places.reshape(-1)]

    def _are_one(self, student: int, teacher: int) -> bool:
        if self.roles.get(student) == teacher:
            return True
        if not (0 <= student < len(self.students) and 0 <= teacher < len(self.teachers)):
            return False
        ours, theirs = self.students[student], self.teachers[teacher]
        return bool(ours) and bool(theirs) and (ours.startswith(theirs) or theirs.startswith(ours))
