"""Two vocabularies beside each other: which tokens are equal, and how one side spells the other's."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtk.tokens.tokenizer import Tokenizer


class SparseEntries(NamedTuple):
    """Entries of a sparse matrix in any order; entries of the same place are added.

    Attributes:
        rows: int32 [n], student tokens.
        columns: int32 [n], teacher tokens.
        weights: [n], float32, or float64 where several are added to one.
    """

    rows: NDArray[np.int32]
    columns: NDArray[np.int32]
    weights: NDArray[np.floating[Any]]


class TokenSpellings(NamedTuple):
    """Tokens that the other side does not have, and how it spells them; those that it cannot spell are left out.

    Attributes:
        token_ids: int32 [n], rising.
        spelling_ids: int32 [m], the pieces of all of them, one spelling after the other.
        offsets: int64 [n+1], the spelling of `tokens[i]` is `pieces[offsets[i]:offsets[i + 1]]`, never empty.
    """

    token_ids: NDArray[np.int32]
    spelling_ids: NDArray[np.int32]
    offsets: NDArray[np.int64]

    @property
    def first_ids(self) -> NDArray[np.int32]:
        """int32 [n], the first piece of each."""
        return self.spelling_ids[self.offsets[:-1]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64 [n], how many pieces each has."""
        return np.diff(self.offsets)


class VocabularyPair:
    """A student's and a teacher's vocabulary.

    Args:
        student: its tokens are the rows of W.
        teacher: its tokens are the columns.
    """

    def __init__(self, student: Tokenizer, teacher: Tokenizer) -> None:
        self.student, self.teacher = student, teacher

    @property
    def shape(self) -> tuple[int, int]:
        """V and U: the widths of both embeddings."""
        return self.student.embedding_rows, self.teacher.embedding_rows

    @cached_property
    def swapped(self) -> VocabularyPair:
        """The same with the teacher as the student."""
        other = VocabularyPair(self.teacher, self.student)
        other.__dict__["swapped"] = self
        return other

    @cached_property
    def equal_ids(self) -> NDArray[np.int32]:
        """int32 [student's tokens], the teacher's token of the same bytes; -1: none."""
        vocabulary = self.student.vocabulary
        if self.student.fingerprint == self.teacher.fingerprint:
            # Several tokens can spell the same ("s" and "##s", "." and "<0x2E>"): each is itself.
            return np.where(vocabulary.byte_lengths > 0, np.arange(len(vocabulary), dtype=np.int32), np.int32(-1))
        found = map(self.teacher.vocabulary.token_of_bytes.get, vocabulary.bytes_by_id, itertools.repeat(-1))
        return np.fromiter(found, np.int32, len(vocabulary))

    @cached_property
    def exact_entries(self) -> SparseEntries:
        """An entry of weight 1 for each student token that the teacher has byte for byte."""
        rows = np.flatnonzero(self.equal_ids >= 0).astype(np.int32)
        return SparseEntries(rows, self.equal_ids[rows], np.ones(len(rows), np.float32))

    @cached_property
    def spellings(self) -> TokenSpellings:
        """The other ordinary tokens of the student in pieces of the teacher's."""
        vocabulary = self.student.vocabulary
        others = np.flatnonzero((vocabulary.byte_lengths > 0) & (self.equal_ids < 0)).astype(np.int32)
        spellings = vocabulary.bytes_by_id
        pieces = self.teacher.encode_bytes([spellings[token] for token in others.tolist()])
        return _make_spellings(others, pieces)

    @cached_property
    def first_token_entries(self) -> SparseEntries:
        """All weight of each student token on the token of the same bytes, else on its first piece."""
        found = self.spellings
        ones = np.ones(len(found.token_ids), np.float32)
        return concatenate_entries(self.exact_entries, SparseEntries(found.token_ids, found.first_ids, ones))


def concatenate_entries(*parts: SparseEntries) -> SparseEntries:
    """Return the entries of all."""
    return SparseEntries(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _make_spellings(tokens: NDArray[np.int32], pieces: Sequence[NDArray[np.int32] | None]) -> TokenSpellings:
    known = [ids is not None and len(ids) > 0 for ids in pieces]
    kept = [ids for ids in pieces if ids is not None and len(ids)]
    sizes = np.fromiter(map(len, kept), np.int64, len(kept))
    return TokenSpellings(
        tokens[np.array(known, np.bool_)],
        np.concatenate(kept) if kept else np.zeros(0, np.int32),
        np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]),
    )
