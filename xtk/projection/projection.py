"""The sparse matrix W [V, U] from the student's tokens to the teacher's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtk.errors import XtkError

# Of a side in a header, what W depends on.
IDENTITY_KEYS = ("tokenizer", "special_tokens", "embedding_rows")


def format_tokenizer(side: Mapping[str, Any]) -> str:
    """Return how messages call a side of a projection, whose header knows no folder."""
    roles = ", ".join(f"{role} {token}" for role, token in sorted(side.get("special_tokens", {}).items()))
    return f"{str(side.get('tokenizer'))[:15]} ({side.get('embedding_rows', 0):,} rows; {roles or 'no roles'})"


# An entry of a row of W that is heavier than this makes a pair; X-Token, arXiv 2605.21699.
PAIR_MIN_WEIGHT = 0.6


class TokenPairs(NamedTuple):
    """Tokens that stand for each other: at most one of either side for one of the other.

    Attributes:
        student_of_teacher: int32 [U], the student's token for each of the teacher's; -1: none.
        paired_students: int32 [n], rising, the student's tokens that have a partner.
    """

    student_of_teacher: NDArray[np.int32]
    paired_students: NDArray[np.int32]


@dataclass(frozen=True)
class ProjectionColumns:
    """W by teacher token: which student tokens land on it, and how much of each.

    Attributes:
        offsets: int64 [U+1], the entries of teacher token u are `offsets[u]:offsets[u + 1]`.
        student_ids: int32 [nnz].
        log_weights: float32 [nnz], natural logarithms.
    """

    offsets: NDArray[np.int64]
    student_ids: NDArray[np.int32]
    log_weights: NDArray[np.float32]

    def pad_columns(self, width: int) -> ProjectionColumns:
        """Return the same with at least `width` columns: a teacher's padded rows are reached by nothing."""
        missing = max(0, width + 1 - len(self.offsets))
        offsets = np.concatenate([self.offsets, np.full(missing, self.offsets[-1], np.int64)])
        return ProjectionColumns(offsets, self.student_ids, self.log_weights)

    @cached_property
    def pairs(self) -> TokenPairs:
        """Each student token with the heaviest entry of its row, if that is at least 0.6.

        A teacher token that several student tokens claim goes to the heaviest of them, the lowest id on ties; between
        two entries of one row the lower teacher id wins.
        """
        width = len(self.offsets) - 1
        teachers = np.repeat(np.arange(width, dtype=np.int32), np.diff(self.offsets))
        heavy = self.log_weights > np.float32(np.log(PAIR_MIN_WEIGHT) - 1e-6)
        students, teachers, weights = self.student_ids[heavy], teachers[heavy], self.log_weights[heavy]
        order = np.lexsort((teachers, -weights, students))
        order = order[np.unique(students[order], return_index=True)[1]]  # the heaviest entry of each row
        students, teachers, weights = students[order], teachers[order], weights[order]
        order = np.lexsort((students, -weights, teachers))
        order = order[np.unique(teachers[order], return_index=True)[1]]
        partners = np.full(width, -1, np.int32)
        partners[teachers[order]] = students[order]
        return TokenPairs(partners, np.sort(students[order]).astype(np.int32))


@dataclass(frozen=True)
class Projection:
    """W in compressed rows. Row v tells where the probability of student token v lands.

    Attributes:
        row_offsets: int64 [V+1].
        teacher_ids: int32 [nnz], rising within a row.
        weights: float32 [nnz], in (0, 1]; a row sums to at most 1, and what is missing is mass that
            has no counterpart in the teacher's vocabulary.
        student_cells: int32 [V], the cell of each student token in the partition of both vocabularies; -1: none.
        teacher_cells: int32 [U], likewise.
        header: what was built from what: method, options, identity of both tokenizers.
    """

    row_offsets: NDArray[np.int64]
    teacher_ids: NDArray[np.int32]
    weights: NDArray[np.float32]
    student_cells: NDArray[np.int32]
    teacher_cells: NDArray[np.int32]
    header: Mapping[str, Any] = field(default_factory=dict)

    @property
    def student_width(self) -> int:
        """V, the rows: the student's embedding."""
        return len(self.student_cells)

    @property
    def teacher_width(self) -> int:
        """U, the columns: the teacher's embedding."""
        return len(self.teacher_cells)

    @property
    def entry_rows(self) -> NDArray[np.int32]:
        """int32 [nnz], the student token of each entry."""
        return np.repeat(np.arange(self.student_width, dtype=np.int32), np.diff(self.row_offsets))

    @property
    def row_masses(self) -> NDArray[np.float64]:
        """float64 [V], how much of each row lands anywhere."""
        weights = self.weights.astype(np.float64)
        return np.bincount(self.entry_rows, weights, minlength=self.student_width).astype(np.float64)

    @cached_property
    def columns(self) -> ProjectionColumns:
        """W by teacher token."""
        order = np.argsort(self.teacher_ids, kind="stable")
        counts = np.bincount(self.teacher_ids, minlength=self.teacher_width)
        return ProjectionColumns(
            offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]).astype(np.int64),
            student_ids=self.entry_rows[order],
            log_weights=np.log(self.weights[order]),
        )

    @classmethod
    def identity(cls, width: int) -> Projection:
        """Return the projection of a tokenizer onto itself."""
        tokens = np.arange(width, dtype=np.int32)
        return cls(np.arange(width + 1, dtype=np.int64), tokens, np.ones(width, np.float32), tokens, tokens)

    def validate(self) -> None:
        """Refuse a matrix that is no projection.

        Raises:
            XtkError: a shape does not fit, an id is out of range or does not rise within its row, a weight is not in
                (0, 1], a row sums to more than 1, a cell is out of range.
        """
        offsets, entries = self.row_offsets, len(self.teacher_ids)
        if len(offsets) != self.student_width + 1 or offsets[0] != 0 or offsets[-1] != entries:
            raise XtkError("the projection's row offsets do not fit its entries")
        if len(self.weights) != entries or (np.diff(offsets) < 0).any():
            raise XtkError("the projection's weights do not fit its entries")
        if entries and (self.teacher_ids.min() < 0 or self.teacher_ids.max() >= self.teacher_width):
            raise XtkError("the projection names teacher tokens that the teacher's vocabulary does not have")
        if not ((self.weights > 0) & (self.weights <= 1)).all():
            raise XtkError("the projection has weights outside of (0, 1]")
        rising = np.diff(self.teacher_ids) > 0
        rising[offsets[(offsets > 0) & (offsets < entries)] - 1] = True  # where the next row begins
        if not rising.all():
            raise XtkError("the projection has rows whose teacher tokens do not rise: some stand twice or out of order")
        if (self.row_masses > 1 + 1e-5).any():
            raise XtkError("the projection has rows that sum to more than 1")
        for cells in (self.student_cells, self.teacher_cells):
            if len(cells) and (cells.min() < -1 or cells.max() >= self.student_width + self.teacher_width):
                raise XtkError("the projection names cells that a partition of both vocabularies cannot have")

    @property
    def student_tokens(self) -> int:
        """The tokens that the student has: rows above are padding."""
        return int(self.header.get("student", {}).get("tokens", self.student_width))

    def unmapped_mass(self, tokens: int) -> float:
        """Return what has no counterpart, averaged over the first `tokens` rows."""
        return max(0.0, round(float(1 - self.row_masses[:tokens].mean()), 6)) if tokens else 0.0

    def summary(self) -> dict[str, Any]:
        """Return rows, entries and the missing mass of the tokens that the student has."""
        masses = self.row_masses[: self.student_tokens]
        return {
            "rows": self.student_width,
            "columns": self.teacher_width,
            "entries": len(self.teacher_ids),
            "unmapped_mass": self.unmapped_mass(self.student_tokens),
            "unmapped_rows": int((masses == 0).sum()),
            "reachable_teacher_tokens": len(np.unique(self.teacher_ids)),
        }
