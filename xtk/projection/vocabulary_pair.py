"""A pair of vocabularies: tokens with equal bytes, and how one side tokenizes the other's tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtk.text.tokenizer import Tokenizer


class SparseEntries(NamedTuple):
    """Entries of a sparse matrix in any order; duplicate entries are added."""

    rows: NDArray[np.int32]  # [n], student tokens
    columns: NDArray[np.int32]  # [n], teacher tokens
    weights: NDArray[np.floating[Any]]  # [n], float32, or float64 if duplicates are added


class TokenSpellings(NamedTuple):
    """Tokens that the other side does not have, in its tokens; those that it cannot tokenize are left out."""

    token_ids: NDArray[np.int32]  # [n], ascending
    spelling_ids: NDArray[np.int32]  # [m], the concatenated spellings
    offsets: NDArray[np.int64]  # [n+1], spelling of token i: `spelling_ids[offsets[i]:offsets[i + 1]]`, never empty

    @property
    def first_ids(self) -> NDArray[np.int32]:
        """int32 [n], the first token of each spelling."""
        return self.spelling_ids[self.offsets[:-1]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64 [n], the number of tokens of each spelling."""
        return np.diff(self.offsets)


class VocabularyPair:
    """The vocabularies of a student, whose tokens are the rows of W, and a teacher, whose tokens are the columns."""

    def __init__(self, student: Tokenizer, teacher: Tokenizer) -> None:
        self.student, self.teacher = student, teacher

    @property
    def shape(self) -> tuple[int, int]:
        """V and U, the rows of both embeddings."""
        return self.student.embedding_rows, self.teacher.embedding_rows

    @cached_property
    def swapped(self) -> VocabularyPair:
        """The pair with student and teacher exchanged."""
        other = VocabularyPair(self.teacher, self.student)
        other.__dict__["swapped"] = self
        return other

    @cached_property
    def equal_ids(self) -> NDArray[np.int32]:
        """int32 [student tokens], the teacher token with equal bytes; -1: none."""
        vocabulary = self.student.vocabulary
        if self.student.text_fingerprint == self.teacher.text_fingerprint:
            # Several tokens can have the same bytes ("s" and "##s", "." and "<0x2E>"): each maps to itself.
            return np.where(vocabulary.byte_lengths > 0, np.arange(len(vocabulary), dtype=np.int32), np.int32(-1))
        teacher_ids = map(self.teacher.vocabulary.token_of_bytes.get, vocabulary.bytes_by_id, itertools.repeat(-1))
        return np.fromiter(teacher_ids, np.int32, len(vocabulary))

    @cached_property
    def exact_entries(self) -> SparseEntries:
        """An entry of weight 1 for each student token with equal bytes in the teacher's vocabulary."""
        rows = np.flatnonzero(self.equal_ids >= 0).astype(np.int32)
        return SparseEntries(rows, self.equal_ids[rows], np.ones(len(rows), np.float32))

    @cached_property
    def spellings(self) -> TokenSpellings:
        """The other ordinary tokens of the student, in tokens of the teacher."""
        vocabulary = self.student.vocabulary
        others = np.flatnonzero((vocabulary.byte_lengths > 0) & (self.equal_ids < 0)).astype(np.int32)
        spellings = vocabulary.bytes_by_id
        pieces = self.teacher.encode_bytes([spellings[token] for token in others.tolist()])
        return _make_spellings(others, pieces)

    @cached_property
    def first_token_entries(self) -> SparseEntries:
        """An entry of weight 1 per student token: the token of equal bytes, else the first token of its spelling."""
        spellings = self.spellings
        ones = np.ones(len(spellings.token_ids), np.float32)
        return concatenate_entries(self.exact_entries, SparseEntries(spellings.token_ids, spellings.first_ids, ones))


def concatenate_entries(*parts: SparseEntries) -> SparseEntries:
    """Return the entries of all parts."""
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
