"""Top-1 agreement: how often the student's likeliest token is the teacher's, where both begin a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from xtk.artifacts.codec.grids import PRECISIONS
from xtk.losses.cells import Example, span_ranges, within_ranges
from xtk.projection.projection import Projection
from xtk.projection.special import match_special_tokens
from xtk.tokens.signal import Signal
from xtk.tokens.tokenizer import Tokenizer

# Supports that hold the teacher's likeliest token for certain.
SUPPORTS = ("top-k", "top-p", "top-k+sample")


# Rounded log-probabilities that were equal are equal within this: one number was added to all of a position.
EQUAL = 1e-5


@dataclass(frozen=True)
class Likeliest:
    """The teacher's most likely tokens, where both begin a token: several where its log-probabilities are tied.

    Attributes:
        rows: int64 [C], rows of the student.
        offsets: int64 [C + 1], the tokens of row c are `[offsets[c], offsets[c + 1])`.
        tokens: int32.
    """

    rows: NDArray[np.int64]
    offsets: NDArray[np.int64]
    tokens: NDArray[np.int32]

    @classmethod
    def of(cls, example: Example) -> Likeliest:
        """Read them from the exact log-probabilities; what a cache's precision cannot tell apart is tied."""
        signal = example.signal
        assert signal is not None
        sizes = np.diff(signal.offsets)
        owners = np.repeat(np.arange(len(signal)), sizes)
        within = np.arange(len(signal.ids)) - np.repeat(signal.offsets[:-1], sizes)
        exact = within < np.repeat(sizes if signal.exact is None else signal.exact, sizes)
        observed = exact & (signal.ids == example.teacher_ids[signal.positions][owners])
        highest = np.full(len(signal), -np.inf)
        np.maximum.at(highest, owners[exact & ~observed], signal.logprobs[exact & ~observed])
        own = signal.realised_logprobs.astype(np.float64)
        error = _error_of_observed(signal, owners, observed, highest)
        with np.errstate(invalid="ignore"):
            tied = np.where(observed, own[owners] >= highest[owners] - error[owners], False)
            others = signal.logprobs >= np.where(own > highest + error, np.inf, highest)[owners] - EQUAL
        tied |= exact & ~observed & others
        spans = span_ranges(example)
        starts = np.searchsorted(owners[tied], spans.position_start)
        stops = np.searchsorted(owners[tied], spans.position_start, side="right")
        chosen = within_ranges(starts, stops)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(stops - starts)])
        return cls(spans.row_start, offsets, signal.ids[tied][chosen])

    def agreed(self, students: NDArray[np.int64], meeting: Meeting) -> tuple[int, int]:
        """Return in how many rows one of the tokens is the student's, and of how many rows.

        Args:
            students: int64 [C], the student's most likely token of each row; -1: the row is not counted.
            meeting: how two tokens can be the same one.
        """
        rows = np.repeat(np.arange(len(self.rows)), np.diff(self.offsets))
        held = students[rows] >= 0
        if not held.any():
            return 0, 0
        same = meeting.agree(students[rows][held], self.tokens[held])
        return len(np.unique(rows[held][same])), int((students >= 0).sum())


def _error_of_observed(
    signal: Signal, owners: NDArray[np.int64], observed: NDArray[np.bool_], highest: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return float64 [P], by how much rounding can move the observed token against the most likely other one, nats.

    The odds of the observed token are rounded, and so is each other log-probability, by half a step: the most likely
    one's own, and of the sum of all of them and the tail the mean.
    """
    if not signal.precision:
        return np.full(len(signal), EQUAL)
    precision = PRECISIONS[signal.precision]
    others = ~observed
    masses = np.exp(signal.logprobs[others].astype(np.float64))
    steps = masses * precision.widest_step(signal.logprobs[others])
    with np.errstate(divide="ignore"):
        tails = signal.tail_mass * precision.widest_step(np.log(signal.tail_mass))
    total = np.bincount(owners[others], masses, minlength=len(signal)) + signal.tail_mass
    steps_of_all = np.bincount(owners[others], steps, minlength=len(signal)) + tails
    mean = steps_of_all / np.maximum(total, np.finfo(np.float64).tiny)
    errors: NDArray[np.float64] = (precision.odds_step + precision.widest_step(highest) + mean) / 2 + EQUAL
    return errors


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
