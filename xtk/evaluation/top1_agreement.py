"""Top-1 agreement: how often the student's likeliest token is the teacher's, where both begin a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from xtk.artifacts.codec.quantization_levels import QUANTIZATION_STEPS
from xtk.losses.loss_cells import LossInputs, range_indices, span_ranges
from xtk.projection.projection import Projection
from xtk.projection.special_tokens import match_special_tokens
from xtk.tokens.teacher_logprobs import TeacherLogprobs
from xtk.tokens.tokenizer import Tokenizer

# Supports that hold the teacher's likeliest token for certain.
SUPPORTS_WITH_TOP1 = ("top-k", "top-p", "top-k+sample")


# Rounded log-probabilities that were equal are equal within this: one number was added to all of a position.
TIE_TOLERANCE = 1e-5


@dataclass(frozen=True)
class TeacherTopTokens:
    """The teacher's most likely tokens, where both begin a token: several where its log-probabilities are tied.

    Attributes:
        student_rows: int64 [C], rows of the student.
        offsets: int64 [C + 1], the tokens of row c are `[offsets[c], offsets[c + 1])`.
        tokens: int32.
    """

    student_rows: NDArray[np.int64]
    offsets: NDArray[np.int64]
    tokens: NDArray[np.int32]

    @classmethod
    def from_example(cls, example: LossInputs) -> TeacherTopTokens:
        """Read them from the exact log-probabilities; what a cache's precision cannot tell apart is tied."""
        signal = example.teacher_logprobs
        assert signal is not None
        sizes = np.diff(signal.offsets)
        owners = np.repeat(np.arange(len(signal)), sizes)
        within = np.arange(len(signal.ids)) - np.repeat(signal.offsets[:-1], sizes)
        exact = within < np.repeat(sizes if signal.exact_counts is None else signal.exact_counts, sizes)
        observed = exact & (signal.ids == example.teacher_ids[signal.positions][owners])
        highest = np.full(len(signal), -np.inf)
        np.maximum.at(highest, owners[exact & ~observed], signal.logprobs[exact & ~observed])
        own = signal.observed_logprobs.astype(np.float64)
        error = _observed_rounding_error(signal, owners, observed, highest)
        with np.errstate(invalid="ignore"):
            tied = np.where(observed, own[owners] >= highest[owners] - error[owners], False)
            others = signal.logprobs >= np.where(own > highest + error, np.inf, highest)[owners] - TIE_TOLERANCE
        tied |= exact & ~observed & others
        spans = span_ranges(example)
        starts = np.searchsorted(owners[tied], spans.position_start)
        stops = np.searchsorted(owners[tied], spans.position_start, side="right")
        chosen = range_indices(starts, stops)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(stops - starts)])
        return cls(spans.row_start, offsets, signal.ids[tied][chosen])

    def count_agreements(self, student_tokens: NDArray[np.int64], matching: TokenMatching) -> tuple[int, int]:
        """Return in how many rows one of the tokens is the student's, and of how many rows.

        Args:
            student_tokens: int64 [C], the student's most likely token of each row; -1: the row is not counted.
            matching: how two tokens can be the same one.
        """
        rows = np.repeat(np.arange(len(self.student_rows)), np.diff(self.offsets))
        held = student_tokens[rows] >= 0
        if not held.any():
            return 0, 0
        same = matching.matches(student_tokens[rows][held], self.tokens[held])
        return len(np.unique(rows[held][same])), int((student_tokens >= 0).sum())


def _observed_rounding_error(
    signal: TeacherLogprobs, owners: NDArray[np.int64], observed: NDArray[np.bool_], highest: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return float64 [P], by how much rounding can move the observed token against the most likely other one, nats.

    The odds of the observed token are rounded, and so is each other log-probability, by half a step: the most likely
    one's own, and of the sum of all of them and the tail the mean.
    """
    if not signal.precision:
        return np.full(len(signal), TIE_TOLERANCE)
    precision = QUANTIZATION_STEPS[signal.precision]
    others = ~observed
    masses = np.exp(signal.logprobs[others].astype(np.float64))
    steps = masses * precision.widest_step(signal.logprobs[others])
    with np.errstate(divide="ignore"):
        tails = signal.remainder_mass * precision.widest_step(np.log(signal.remainder_mass))
    total = np.bincount(owners[others], masses, minlength=len(signal)) + signal.remainder_mass
    steps_of_all = np.bincount(owners[others], steps, minlength=len(signal)) + tails
    mean = steps_of_all / np.maximum(total, np.finfo(np.float64).tiny)
    errors: NDArray[np.float64] = (precision.odds_step + precision.widest_step(highest) + mean) / 2 + TIE_TOLERANCE
    return errors


class TokenMatching(Protocol):
    """How tokens of two vocabularies can be the same one."""

    def matches(self, student_tokens: NDArray[np.int64], teacher_tokens: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return bool [n], whether each token of the student is that of the teacher."""


@dataclass(frozen=True)
class ByProjection:
    """Through a projection: the teacher's token on which most of a student's token lands.

    Attributes:
        mapped_ids: int32 [V]; -1: it lands nowhere.
    """

    mapped_ids: NDArray[np.int32]

    @classmethod
    def from_projection(cls, projection: Projection) -> ByProjection:
        """Take the heaviest entry of each row, the lowest id on ties."""
        rows = projection.entry_rows
        order = np.lexsort((projection.teacher_ids, -projection.weights, rows))
        students, firsts = np.unique(rows[order], return_index=True)
        images = np.full(projection.student_width, -1, np.int32)
        images[students] = projection.teacher_ids[order][firsts]
        return cls(images)

    def matches(self, student_tokens: NDArray[np.int64], teacher_tokens: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return bool [n]; rows of the student's head that have no image are nobody's."""
        known = student_tokens < len(self.mapped_ids)
        found: NDArray[np.bool_] = (
            known & (self.mapped_ids[np.where(known, student_tokens, 0)] == teacher_tokens) & (teacher_tokens >= 0)
        )
        return found


@dataclass(frozen=True)
class BySpelling:
    """By bytes: one of the two begins with the other. Special tokens meet by their roles.

    Attributes:
        student_spellings: what each token of the student spells; nothing for special tokens.
        teacher_spellings: likewise.
        special_tokens: {special token of the student: that of the teacher}.
    """

    student_spellings: Sequence[bytes]
    teacher_spellings: Sequence[bytes]
    special_tokens: Mapping[int, int]

    @classmethod
    def from_tokenizers(cls, student: Tokenizer, teacher: Tokenizer) -> BySpelling:
        """Take both vocabularies as they are."""
        roles = zip(*(ids.tolist() for ids in match_special_tokens(student, teacher)), strict=True)
        return cls(student.vocabulary.bytes_by_id, teacher.vocabulary.bytes_by_id, dict(roles))

    def matches(self, student_tokens: NDArray[np.int64], teacher_tokens: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return bool [n]."""
        pairs, places = np.unique(np.column_stack([student_tokens, teacher_tokens]), axis=0, return_inverse=True)
        found = np.array([self._is_same(*pair) for pair in pairs.tolist()], np.bool_)
        return found[places.reshape(-1)]

    def _is_same(self, student: int, teacher: int) -> bool:
        if self.special_tokens.get(student) == teacher:
            return True
        if not (0 <= student < len(self.student_spellings) and 0 <= teacher < len(self.teacher_spellings)):
            return False
        ours, theirs = self.student_spellings[student], self.teacher_spellings[teacher]
        return bool(ours) and bool(theirs) and (ours.startswith(theirs) or theirs.startswith(ours))
