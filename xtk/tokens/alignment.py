"""The alignment of two tokenisations of one text."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xtk.tokens.kernels import smallest_spans, spans_of_pieces
from xtk.tokens.sequence import Sequence
from xtk.tokens.tokenizer import Encoded


def align(student: Encoded, teacher: Encoded) -> NDArray[np.int32]:
    """Cut two tokenisations of one text into the smallest spans of equal bytes.

    Tokens that spell nothing (an added prefix) join the span after them. Where one side was cut
    short, the spans end with the common text.

    Returns:
        int32 [C, 4], `[s0, s1, t0, t1]`: student tokens `[s0, s1)` spell what teacher tokens `[t0, t1)`
        spell. Spans follow each other without a gap from token 0 on.
    """
    spans: NDArray[np.int32] = smallest_spans(student.ends, teacher.ends)
    return spans


def align_sequences(student: Sequence, teacher: Sequence) -> NDArray[np.int32]:
    """Align what two models read of one document: the text by bytes, ends of segments with ends of segments.

    What only one of them reads (its template, text that the other's template leaves out) is in no span.

    Returns:
        int32 [C, 4], in positions of the sequences, rising.
    """
    spans: NDArray[np.int32] = spans_of_pieces(student.ends, teacher.ends, student.pieces, teacher.pieces)
    both = (student.closers >= 0) & (teacher.closers >= 0)
    ends = np.column_stack([student.closers[both], teacher.closers[both]])
    if not len(ends):
        return spans
    spans = np.concatenate([spans, np.column_stack([ends[:, 0], ends[:, 0] + 1, ends[:, 1], ends[:, 1] + 1])])
    return spans[np.argsort(spans[:, 0])]
