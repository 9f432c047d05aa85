"""Top-1 agreement: how often student and teacher have the same most likely token at shared boundaries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from xtk.cache.codec.quantization_levels import QUANTIZATION_STEPS
from xtk.cache.teacher_logprobs import TeacherLogprobs
from xtk.losses.interface import LossInputs, range_indices, span_ranges
from xtk.projection.projection import SparseProjection
from xtk.projection.special_tokens import match_special_tokens
from xtk.text.tokenizer import Tokenizer

# Supports that always contain the teacher's most likely token.
SUPPORTS_WITH_TOP1 = ("top-k", "top-p", "top-k+sample")


# Nats within which log-probabilities count as equal: normalization adds one number to all of a position.
TIE_TOLERANCE = 1e-5


@dataclass(frozen=True)
class TeacherTopTokens:
    """The teacher's most likely tokens at shared boundaries; several where log-probabilities are tied."""

    student_rows: NDArray[np.int64]  # int64 [C], the student's row of each boundary
    offsets: NDArray[np.int64]  # int64 [C + 1], the tokens of row c are `[offsets[c], offsets[c + 1])`
    tokens: NDArray[np.int32]  # int32, teacher token ids

    @classmethod
    def from_example(cls, example: LossInputs) -> TeacherTopTokens:
        """Return them from the exact log-probabilities; values within the cache's precision are tied."""
        teacher = example.teacher_logprobs
        assert teacher is not None
        sizes = np.diff(teacher.offsets)
        owners = np.repeat(np.arange(len(teacher)), sizes)
        within = np.arange(len(teacher.ids)) - np.repeat(teacher.offsets[:-1], sizes)
        exact = within < np.repeat(sizes if teacher.exact_counts is None else teacher.exact_counts, sizes)
        observed = exact & (teacher.ids == example.teacher_ids[teacher.positions][owners])
        highest = np.full(len(teacher), -np.inf)
        np.maximum.at(highest, owners[exact & ~observed], teacher.logprobs[exact & ~observed])
        own = teacher.observed_logprobs.astype(np.float64)
        error = _observed_rounding_error(teacher, owners, observed, highest)
        with np.errstate(invalid="ignore"):
            tied = np.where(observed, own[owners] >= highest[owners] - error[owners], False)
            others = teacher.logprobs >= np.where(own > highest + error, np.inf, highest)[owners] - TIE_TOLERANCE
        tied |= exact & ~observed & others
        spans = span_ranges(example)
        starts = np.searchsorted(owners[tied], spans.position_start)
        stops = np.searchsorted(owners[tied], spans.position_start, side="right")
        chosen = range_indices(starts, stops)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(stops - starts)])
        return cls(spans.row_start, offsets, teacher.ids[tied][chosen])

    def count_agreements(self, student_tokens: NDArray[np.int64], matching: TokenMatching) -> tuple[int, int]:
        """Return the number of rows where the student's token matches one of the teacher's, and the number of rows.

        `student_tokens`: int64 [C], the student's most likely token of each row; -1: the row is not counted.
        """
        rows = np.repeat(np.arange(len(self.student_rows)), np.diff(self.offsets))
        held = student_tokens[rows] >= 0
        if not held.any():
            return 0, 0
        same = matching.matches(student_tokens[rows][held], self.tokens[held])
        return len(np.unique(rows[held][same])), int((student_tokens >= 0).sum())


def _observed_rounding_error(
    teacher: TeacherLogprobs, owners: NDArray[np.int64], observed: NDArray[np.bool_], highest: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return float64 [P], the rounding error, in nats, between the observed token and the most likely other token.

    The cache quantizes the odds of the observed token, and the log-probability of each other token, to half a step.
    The error sums the half steps of the odds, of the most likely other token, and, as a mean weighted by probability,
    of all other tokens and the remainder.
    """
    if not teacher.precision:
        return np.full(len(teacher), TIE_TOLERANCE)
    precision = QUANTIZATION_STEPS[teacher.precision]
    others = ~observed
    masses = np.exp(teacher.logprobs[others].astype(np.float64))
    steps = masses * precision.widest_step(teacher.logprobs[others])
    with np.errstate(divide="ignore"):
        tails = teacher.remainder_mass * precision.widest_step(np.log(teacher.remainder_mass))
    total = np.bincount(owners[others], masses, minlength=len(teacher)) + teacher.remainder_mass
    steps_of_all = np.bincount(owners[others], steps, minlength=len(teacher)) + tails
    mean = steps_of_all / np.maximum(total, np.finfo(np.float64).tiny)
    errors: NDArray[np.float64] = (precision.odds_step + precision.widest_step(highest) + mean) / 2 + TIE_TOLERANCE
    return errors


class TokenMatching(Protocol):
    """Decides whether tokens of two vocabularies are the same."""

    def matches(self, student_tokens: NDArray[np.int64], teacher_tokens: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return bool [n], whether each student token is the same as the teacher token."""


@dataclass(frozen=True)
class ByProjection:
    """Match by a projection: a student token matches the teacher token with the largest weight in its row."""

    mapped_ids: NDArray[np.int32]  # int32 [V], the teacher token of each student token; -1: none

    @classmethod
    def from_projection(cls, projection: SparseProjection) -> ByProjection:
        """Return the matching by the largest weight of each row, the lowest id on ties."""
        rows = projection.entry_rows
        order = np.lexsort((projection.teacher_ids, -projection.weights, rows))
        students, firsts = np.unique(rows[order], return_index=True)
        mapped_ids = np.full(projection.student_width, -1, np.int32)
        mapped_ids[students] = projection.teacher_ids[order][firsts]
        return cls(mapped_ids)

    def matches(self, student_tokens: NDArray[np.int64], teacher_tokens: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return bool [n]; student tokens outside of the projection match no token."""
        known = student_tokens < len(self.mapped_ids)
        is_match: NDArray[np.bool_] = (
            known & (self.mapped_ids[np.where(known, student_tokens, 0)] == teacher_tokens) & (teacher_tokens >= 0)
        )
        return is_match


@dataclass(frozen=True)
class BySpelling:
    """Match by bytes: one token's bytes begin with the other's. Special tokens match by their roles."""

    student_spellings: Sequence[bytes]  # bytes of each student token; empty for special tokens
    teacher_spellings: Sequence[bytes]  # bytes of each teacher token; empty for special tokens
    special_tokens: Mapping[int, int]  # {student's special token: teacher's special token}

    @classmethod
    def from_tokenizers(cls, student: Tokenizer, teacher: Tokenizer) -> BySpelling:
        """Return the matching of two vocabularies."""
        roles = zip(*(ids.tolist() for ids in match_special_tokens(student, teacher)), strict=True)
        return cls(student.vocabulary.bytes_by_id, teacher.vocabulary.bytes_by_id, dict(roles))

    def matches(self, student_tokens: NDArray[np.int64], teacher_tokens: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return bool [n]."""
        pairs, pair_indices = np.unique(np.column_stack([student_tokens, teacher_tokens]), axis=0, return_inverse=True)
        is_match = np.array([self._is_same(*pair) for pair in pairs.tolist()], np.bool_)
        return is_match[pair_indices.reshape(-1)]

    def _is_same(self, student: int, teacher: int) -> bool:
        if self.special_tokens.get(student) == teacher:
            return True
        if not (0 <= student < len(self.student_spellings) and 0 <= teacher < len(self.teacher_spellings)):
            return False
        ours, theirs = self.student_spellings[student], self.teacher_spellings[teacher]
        return bool(ours) and bool(theirs) and (ours.startswith(theirs) or theirs.startswith(ours))
