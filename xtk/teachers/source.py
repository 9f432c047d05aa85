"""A teacher's outputs for the documents of a run: one interface for a cache, a model, a server and rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from xtk.cache.reader import TeacherCache
from xtk.cache.teacher_document import TeacherDocument

NO_ROW = -1


class TeacherSource(Protocol):
    """One teacher's tokens and log-probabilities of documents.

    Implemented by `TeacherCache` (for its own documents), by `CacheRows` (for those of a run) and by `OnlineTeacher` (a
    model in this process or another one, or a server).
    """

    def outputs(self, documents: Sequence[int], sample_set: int | None = 0) -> list[TeacherDocument | None]:
        """Return outputs for documents; None: not there. `sample_set`: modulo their number; None: exact values."""


class CacheRows:
    """The documents of a run in one cache: int64 [documents], the index of each in the cache; -1: not in it."""

    def __init__(self, cache: TeacherCache, rows: NDArray[np.int64]) -> None:
        self.cache, self.rows = cache, rows

    def outputs(self, documents: Sequence[int], sample_set: int | None = 0) -> list[TeacherDocument | None]:
        """Return the outputs for some documents; None for a document that the teacher does not have."""
        rows = self.rows[list(documents)].tolist()
        return [None if row == NO_ROW else self.cache.read_document(row, sample_set) for row in rows]
