"""The projection: a sparse matrix W [V, U] from the student's tokens to the teacher's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtk.errors import XtkError
from xtk.projection.vocabulary_array import VocabularyArray

# Fields of a tokenizer in the header that W depends on.
IDENTITY_KEYS = ("tokenizer", "special_tokens", "embedding_rows")
_REBUILD = "build the projection again: xtk build-projection STUDENT TEACHER -o FILE"


def format_tokenizer(side: Mapping[str, Any]) -> str:
    """Return the name of a tokenizer in messages: fingerprint, embedding rows and special tokens."""
    roles = ", ".join(f"{role} {token}" for role, token in sorted(side.get("special_tokens", {}).items()))
    return f"{str(side.get('tokenizer'))[:15]} ({side.get('embedding_rows', 0):,} rows; {roles or 'no special tokens'})"


# A weight above this makes a token pair; X-Token, arXiv 2605.21699.
PAIR_MIN_WEIGHT = 0.6


class TokenPairs(NamedTuple):
    """1:1 pairs of student and teacher tokens."""

    student_of_teacher: NDArray[np.int32]  # [U], the student token paired with each teacher token; -1: none
    paired_students: VocabularyArray  # int32 [n], ascending: student tokens in pairs, or that count as one of them


@dataclass(frozen=True)
class ProjectionColumns:
    """W in columns: for each teacher token, the student tokens mapped to it and their weights."""

    offsets: NDArray[np.int64]  # [U+1], the entries of teacher token u are `offsets[u]:offsets[u + 1]`
    student_ids: NDArray[np.int32]  # [nnz]
    log_weights: NDArray[np.float32]  # [nnz], natural logarithms
    # int32, the student's byte-fallback tokens, such as "<0x61>". Where the vocabulary also has an ordinary token with
    # these bytes, the tokenizer never emits them.
    byte_fallback_ids: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    # int32, the student's stop tokens, of which only the first is mapped and stands for all.
    stop_ids: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    num_merged: int = 0  # number of the teacher's stop tokens that are counted as another one, and so are never listed

    @property
    def width(self) -> int:
        """Number of teacher tokens, U."""
        return len(self.offsets) - 1

    @cached_property
    def num_mapped(self) -> int:
        """Number of teacher tokens to which a student token maps."""
        return int(np.count_nonzero(np.diff(self.offsets)))

    def pad_columns(self, width: int) -> ProjectionColumns:
        """Return W with at least `width` columns; added columns (the teacher's padding rows) are empty."""
        missing = max(0, width + 1 - len(self.offsets))
        offsets = np.concatenate([self.offsets, np.full(missing, self.offsets[-1], np.int64)])
        return replace(self, offsets=offsets)

    def with_stop_tokens(self, student_stops: NDArray[np.int32], teacher_stops: NDArray[np.int32]) -> ProjectionColumns:
        """Return W in which the first stop tokens of both sides map to each other, and the others to nothing."""
        teachers = np.repeat(np.arange(self.width), np.diff(self.offsets))
        kept = ~(np.isin(self.student_ids, student_stops) | np.isin(teachers, teacher_stops))
        at = int(np.searchsorted(teachers[kept], teacher_stops[0]))
        sizes = np.bincount(teachers[kept], minlength=self.width)
        sizes[teacher_stops[0]] = 1
        return replace(
            self,
            offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]),
            student_ids=np.insert(self.student_ids[kept], at, student_stops[0]),
            log_weights=np.insert(self.log_weights[kept], at, np.float32(0)),
            stop_ids=student_stops,
            num_merged=len(teacher_stops) - 1,
        )

    @cached_property
    def pairs(self) -> TokenPairs:
        """Pairs of each student token with the largest weight of its row, if that is at least 0.6.

        Of several student tokens with the same teacher token, the one with the largest weight is paired; on ties an
        ordinary token before byte fallback, then the lowest id. Between equal weights of one row: the lower teacher id.
        """
        width = len(self.offsets) - 1
        teachers = np.repeat(np.arange(width, dtype=np.int32), np.diff(self.offsets))
        heavy = self.log_weights > np.float32(np.log(PAIR_MIN_WEIGHT) - 1e-6)
        students, teachers, weights = self.student_ids[heavy], teachers[heavy], self.log_weights[heavy]
        order = np.lexsort((teachers, -weights, students))
        order = order[np.unique(students[order], return_index=True)[1]]  # the heaviest entry of each row
        students, teachers, weights = students[order], teachers[order], weights[order]
        order = np.lexsort((students, np.isin(students, self.byte_fallback_ids), -weights, teachers))
        order = order[np.unique(teachers[order], return_index=True)[1]]
        partners = np.full(width, -1, np.int32)
        partners[teachers[order]] = students[order]
        paired = students[order]
        if np.isin(self.stop_ids[:1], paired).any():
            paired = np.concatenate([paired, self.stop_ids[1:]])
        return TokenPairs(partners, VocabularyArray(np.sort(paired).astype(np.int32)))

    def paired_token(self, student: int, teacher: int) -> int:
        """Return a teacher token that a student token maps to: the given one if possible, else that of most weight.

        If the student token maps to none, it is the given one if nothing maps to that either; else -1.
        """
        if student not in self._teachers_of:
            entries = np.flatnonzero(self.student_ids == student)
            order = np.argsort(-self.log_weights[entries], kind="stable")
            teachers = np.searchsorted(self.offsets, entries[order], side="right") - 1
            self._teachers_of[student] = teachers.tolist()
        paired = self._teachers_of[student]
        if not paired:
            is_unmapped = teacher >= self.width or self.offsets[teacher] == self.offsets[teacher + 1]
            return teacher if is_unmapped else -1
        return teacher if teacher in paired else paired[0]

    @cached_property
    def _teachers_of(self) -> dict[int, list[int]]:
        """Teacher tokens of student tokens, heaviest first; filled by `paired_token`."""
        return {}


@dataclass(frozen=True)
class SparseProjection:
    """W in compressed sparse rows. Row v maps the probability of student token v to teacher tokens."""

    row_offsets: NDArray[np.int64]  # [V+1]
    teacher_ids: NDArray[np.int32]  # [nnz], ascending within a row
    # [nnz], in (0, 1]; a row sums to at most 1; the rest is mass without a counterpart in the teacher's vocabulary.
    weights: NDArray[np.float32]
    student_cells: NDArray[np.int32]  # [V], cell of each student token in the partition of both vocabularies; -1: none
    teacher_cells: NDArray[np.int32]  # [U], likewise
    header: Mapping[str, Any] = field(default_factory=dict)  # method, options, and identity of both tokenizers

    @property
    def student_width(self) -> int:
        """V, the rows of the student's embedding."""
        return len(self.student_cells)

    @property
    def teacher_width(self) -> int:
        """U, the rows of the teacher's embedding."""
        return len(self.teacher_cells)

    @property
    def entry_rows(self) -> NDArray[np.int32]:
        """int32 [nnz], the student token of each entry."""
        return np.repeat(np.arange(self.student_width, dtype=np.int32), np.diff(self.row_offsets))

    @property
    def row_masses(self) -> NDArray[np.float64]:
        """float64 [V], the sum of each row."""
        weights = self.weights.astype(np.float64)
        return np.bincount(self.entry_rows, weights, minlength=self.student_width).astype(np.float64)

    @cached_property
    def columns(self) -> ProjectionColumns:
        """W by columns (teacher tokens)."""
        order = np.argsort(self.teacher_ids, kind="stable")
        counts = np.bincount(self.teacher_ids, minlength=self.teacher_width)
        return ProjectionColumns(
            offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]).astype(np.int64),
            student_ids=self.entry_rows[order],
            log_weights=np.log(self.weights[order]),
        )

    @classmethod
    def identity(cls, width: int) -> SparseProjection:
        """Return the identity projection, for equal tokenizers."""
        tokens = np.arange(width, dtype=np.int32)
        return cls(np.arange(width + 1, dtype=np.int64), tokens, np.ones(width, np.float32), tokens, tokens)

    def validate(self) -> None:
        """Refuse an invalid projection."""
        offsets, entries = self.row_offsets, len(self.teacher_ids)
        if len(offsets) != self.student_width + 1 or offsets[0] != 0 or offsets[-1] != entries:
            raise XtkError("the projection's row offsets do not match its number of entries", hint=_REBUILD)
        if len(self.weights) != entries or (np.diff(offsets) < 0).any():
            raise XtkError("the projection's weights do not match its number of entries", hint=_REBUILD)
        if entries and (self.teacher_ids.min() < 0 or self.teacher_ids.max() >= self.teacher_width):
            raise XtkError("the projection has a token id that is not in the teacher's vocabulary", hint=_REBUILD)
        if not ((self.weights > 0) & (self.weights <= 1)).all():
            raise XtkError("the projection has a weight that is not above 0 and at most 1", hint=_REBUILD)
        rising = np.diff(self.teacher_ids) > 0
        rising[offsets[(offsets > 0) & (offsets < entries)] - 1] = True  # at row boundaries ids may decrease
        if not rising.all():
            raise XtkError(
                "the projection has a row whose teacher token ids are not strictly increasing", hint=_REBUILD
            )
        if (self.row_masses > 1 + 1e-5).any():
            raise XtkError("the projection has a row whose weights sum to more than 1", hint=_REBUILD)
        for cells in (self.student_cells, self.teacher_cells):
            if len(cells) and (cells.min() < -1 or cells.max() >= self.student_width + self.teacher_width):
                raise XtkError("the projection is corrupt: numbers of its cells are out of range", hint=_REBUILD)

    @property
    def student_tokens(self) -> int:
        """Number of the student's tokens; rows above are padding."""
        return int(self.header.get("student", {}).get("tokens", self.student_width))

    def unmapped_mass(self, tokens: int) -> float:
        """Return the unmapped mass: 1 minus the row sum, averaged over the first `tokens` rows."""
        return max(0.0, round(float(1 - self.row_masses[:tokens].mean()), 6)) if tokens else 0.0

    def summary(self) -> dict[str, Any]:
        """Return the numbers of rows and entries, and the unmapped mass of the student's tokens."""
        masses = self.row_masses[: self.student_tokens]
        return {
            "rows": self.student_width,
            "columns": self.teacher_width,
            "entries": len(self.teacher_ids),
            "unmapped_mass": self.unmapped_mass(self.student_tokens),
            "unmapped_rows": int((masses == 0).sum()),
            "reachable_teacher_tokens": len(np.unique(self.teacher_ids)),
        }
