"""A teacher's tokens and log-probabilities of one document."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtk.cache.teacher_logprobs import StoredLogprobs, TeacherLogprobs
from xtk.text.document import Document
from xtk.text.token_sequence import TokenSequence


class StyleScores(NamedTuple):
    """Log-probabilities that are subtracted as style, by token; nan where a token has none."""

    reference: NDArray[np.float32]  # [S], of the teacher's tokens by its reference
    student_ids: NDArray[np.int32]  # [T], the frozen student's tokens
    frozen_student: NDArray[np.float32]  # [T], of these tokens by the frozen student


class TeacherDocument:
    """One document with a teacher's tokens and log-probabilities. From a cache, parts are decoded when first used."""

    document: Document  # text, and which parts are trained
    tokens: TokenSequence  # the teacher's tokens
    stored_logprobs: StoredLogprobs  # its log-probabilities at the trained tokens, with all sets of samples
    # Log-probabilities of its style reference and of the frozen student; None without a reference.
    style_scores: StyleScores | None = None
    # Log-probabilities of a reference at the entries of `teacher_logprobs`; None without one.
    shift_reference: TeacherLogprobs | None = None

    def __init__(
        self,
        document: Document,
        tokens: TokenSequence,
        stored_logprobs: StoredLogprobs | None = None,
        sample_set: int | None = 0,
    ) -> None:
        self.document, self.tokens, self._sample_set = document, tokens, sample_set
        if stored_logprobs is not None:
            self.stored_logprobs = stored_logprobs

    @cached_property
    def teacher_logprobs(self) -> TeacherLogprobs:
        """The teacher's log-probabilities, with one sample set or none."""
        return self.stored_logprobs.to_teacher_logprobs(self._sample_set)

    def with_sample_set(self, sample_set: int | None) -> TeacherDocument:
        """Return the same document with another set of samples; None: only exact entries."""
        other = copy.copy(self)
        other._sample_set = sample_set
        other.__dict__.pop("teacher_logprobs", None)
        return other

    def with_teacher_logprobs(self, teacher_logprobs: TeacherLogprobs) -> TeacherDocument:
        """Return the same document and tokens with other log-probabilities for training."""
        other = copy.copy(self)
        other.teacher_logprobs = teacher_logprobs
        return other

    def with_shift_reference(self, logprobs: TeacherLogprobs, reference: TeacherLogprobs) -> TeacherDocument:
        """Return the same document with log-probabilities of the teacher and its reference at the same entries."""
        other = self.with_teacher_logprobs(logprobs)
        other.shift_reference = reference
        return other

    def without_nan(self) -> TeacherDocument:
        """Return the same document without positions that have a NaN log-probability."""
        if self.shift_reference is None:
            return self.with_teacher_logprobs(self.teacher_logprobs.drop_nan_positions())
        both = self.teacher_logprobs, self.shift_reference
        bad = both[0].nan_positions | both[1].nan_positions
        return self.with_shift_reference(*(some.select_positions(~bad) for some in both))

    def with_style_scores(self, style_scores: StyleScores) -> TeacherDocument:
        """Return the same document with the log-probabilities of a style reference."""
        other = copy.copy(self)
        other.style_scores = style_scores
        return other


def teacher_tokens(
    ids: NDArray[np.int32],
    byte_ends: NDArray[np.int32],
    train_mask: NDArray[np.bool_],
    text_runs: NDArray[np.int32],
    segment_end_tokens: NDArray[np.int32],
    # ids of tokens that a tokenizer prepends as a space; None: all that have no bytes
    space_ids: NDArray[np.int32] | list[int] | None,
    # returns the function from a token id to its bytes; called only if a token ends in template text
    load_bytes_of: Callable[[], Callable[[int], bytes] | None],
) -> TokenSequence:
    """Return a teacher's tokens of a document, from the arrays that a cache stores.

    `exact` is False if a run starts with a token that has no bytes and is not a space.
    """
    # A token without bytes is a space that the tokenizer prepended, or a part of a rewritten character.
    no_bytes = ids[text_runs[byte_ends[text_runs[:, 0]] == text_runs[:, 2], 0]]
    exact = not len(no_bytes) or space_ids is None or bool(np.isin(no_bytes, space_ids).all())
    sequence = TokenSequence(ids, byte_ends, train_mask, text_runs, segment_end_tokens, exact=exact)
    if sequence.border_mask.any():
        sequence.bytes_of = load_bytes_of()
    return sequence


def without_bytes(tokens: TokenSequence) -> TokenSequence:
    """Return the arrays of a teacher's tokens that a cache stores, to be sent to another process."""
    return TokenSequence(tokens.ids, tokens.byte_ends, tokens.train_mask, tokens.text_runs, tokens.segment_end_tokens)
