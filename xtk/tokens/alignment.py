"""The alignment of two tokenisations of one text."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xtk.tokens.alignment_kernels import minimal_spans, minimal_spans_with_gaps
from xtk.tokens.token_sequence import TokenSequence
from xtk.tokens.tokenizer import EncodedText


def align(student: EncodedText, teacher: EncodedText) -> NDArray[np.int32]:
    """Cut two tokenisations of one text into the smallest spans of equal bytes.

    Tokens that spell nothing (an added prefix) join the span after them. Where one side was cut
    short, the spans end with the common text.

    Returns:
        int32 [C, 4], `[s0, s1, t0, t1]`: student tokens `[s0, s1)` spell what teacher tokens `[t0, t1)`
        spell. Spans follow each other without a gap from token 0 on.
    """
    spans: NDArray[np.int32] = minimal_spans(student.byte_ends, teacher.byte_ends)
    return spans


def align_sequences(student: TokenSequence, teacher: TokenSequence) -> NDArray[np.int32]:
    """Align what two models read of one document: text by bytes, segment ends with segment ends.

    Sampled tokens that belong to no text (invalid UTF-8, and what follows it) are read as tokens only by models with
    the tokenizer that sampled them; two of those are aligned token by token there. What only one side reads (its
    template, text that the other's template leaves out) is in no span.

    Returns:
        int32 [C, 4], in positions of the sequences, rising.
    """
    spans: NDArray[np.int32] = minimal_spans_with_gaps(
        student.byte_ends, teacher.byte_ends, student.text_runs, teacher.text_runs
    )
    both = (student.segment_end_tokens >= 0) & (teacher.segment_end_tokens >= 0)
    own, other = _match_undecodable_tokens(student, teacher)
    own, other = np.append(student.segment_end_tokens[both], own), np.append(teacher.segment_end_tokens[both], other)
    if not len(own):
        return spans
    spans = np.concatenate([spans, np.column_stack([own, own + 1, other, other + 1]).astype(np.int32)])
    return spans[np.argsort(spans[:, 0])]


def _match_undecodable_tokens(
    student: TokenSequence, teacher: TokenSequence
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the positions, on both sides, of the same sampled tokens that belong to no text."""
    own, other = np.flatnonzero(student.undecodable_mask), np.flatnonzero(teacher.undecodable_mask)
    count = min(len(own), len(other))  # one side may be cut
    own, other = own[:count], other[:count]
    same = np.array_equal(student.ids[own], teacher.ids[other])
    return (own, other) if same else (own[:0], other[:0])
