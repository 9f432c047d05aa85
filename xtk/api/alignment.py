"""Alignment of two tokenizations of one text, as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.api.tokenizer_argument import to_tokenizer
from xtk.text.alignment import align as align_tokens


@dataclass(frozen=True)
class Alignment:
    """Two tokenizations of one text, and the spans on which they agree.

    Attributes:
        student_ids: int32 [S], without special tokens.
        teacher_ids: int32 [T], without special tokens.
        spans: int32 [C, 4], `[s0, s1, t0, t1]`: student tokens `[s0, s1)` have the same bytes as teacher tokens
            `[t0, t1)`. Spans are minimal, ascending and without gaps.
        student_byte_ends: int32 [S], the byte of the text where each student token ends.
        teacher_byte_ends: int32 [T], the byte of the text where each teacher token ends.
        is_exact: whether the tokens' bytes equal the text. If not, a tokenizer normalized it, and ends come from its
            offsets.
    """

    student_ids: NDArray[np.int32]
    teacher_ids: NDArray[np.int32]
    spans: NDArray[np.int32]
    student_byte_ends: NDArray[np.int32]
    teacher_byte_ends: NDArray[np.int32]
    is_exact: bool


def align(student_tokenizer: Any, teacher_tokenizer: Any, text: str) -> Alignment:
    """Align the tokens of two tokenizers on a text by bytes.

    Args:
        student_tokenizer: a folder, a hub id, or a fast tokenizer of transformers.
        teacher_tokenizer: likewise.
        text: any text; it is not parsed for special tokens.

    Returns:
        The tokens of both, and their spans.

    Raises:
        XtkError: a tokenizer cannot be loaded.
    """
    student, teacher = to_tokenizer(student_tokenizer), to_tokenizer(teacher_tokenizer)
    (own,), (other,) = student.encode([text]), teacher.encode([text])
    spans = align_tokens(own, other)
    return Alignment(own.ids, other.ids, spans, own.byte_ends, other.byte_ends, own.exact and other.exact)
