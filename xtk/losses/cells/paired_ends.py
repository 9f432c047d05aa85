"""Special tokens that end a turn on both sides, but that the comparison of the vocabularies does not pair.

A template may end a turn in several ways: gpt-oss writes `<|call|>` after a tool call, `<|return|>` after the last
answer and `<|end|>` else. Another model has one token for all of them, which is paired with one. Compared there as it
is, the distribution after a tool call would teach the other model not to stop.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from xtk.cache.teacher_logprobs import TeacherLogprobs
from xtk.losses.interface import ComparisonSpace, LossInputs


def with_paired_ends(example: LossInputs, comparison_space: ComparisonSpace) -> LossInputs:
    """Return inputs in which the special tokens of each span are paired.

    In the teacher's distribution at such a span, its token and the one that is paired with the student's are exchanged.
    A span without such a token, whose teacher token is paired with another student token, is left out.
    """
    if comparison_space is None or example.is_end is None or not example.is_end.any():
        return example
    ends = np.flatnonzero(example.is_end)
    own, theirs = example.student_ids[example.spans[ends, 0]], example.teacher_ids[example.spans[ends, 2]]
    pairs = np.unique(np.column_stack([own, theirs]), axis=0)
    wanted = {(pair, other): comparison_space.paired_token(pair, other) for pair, other in pairs.tolist()}
    partners = np.array([wanted[pair] for pair in zip(own.tolist(), theirs.tolist(), strict=True)], np.int32)
    if (partners == theirs).all():
        return example
    is_exchanged = (partners >= 0) & (partners != theirs)
    positions = example.spans[ends, 2]
    kept = np.ones(len(example.spans), np.bool_)
    kept[ends[partners < 0]] = False
    teacher_ids = example.teacher_ids.copy()
    teacher_ids[positions[is_exchanged]] = partners[is_exchanged]
    logprobs = example.teacher_logprobs
    if logprobs is not None:
        logprobs = _exchange(logprobs, positions[is_exchanged], theirs[is_exchanged], partners[is_exchanged])
    spans, is_end = example.spans[kept], example.is_end[kept]
    return replace(example, spans=spans, is_end=is_end, teacher_ids=teacher_ids, teacher_logprobs=logprobs)


def _exchange(
    logprobs: TeacherLogprobs, positions: NDArray[np.int32], tokens: NDArray[np.int32], others: NDArray[np.int32]
) -> TeacherLogprobs:
    """Return distributions in which two tokens are exchanged at some positions."""
    indices = np.searchsorted(logprobs.positions, positions)
    ids = logprobs.ids.copy()
    for index, position, token, other in zip(indices, positions, tokens, others, strict=True):
        if index < len(logprobs.positions) and logprobs.positions[index] == position:
            entries = slice(logprobs.offsets[index], logprobs.offsets[index + 1])
            old = logprobs.ids[entries]
            ids[entries] = np.where(old == token, other, np.where(old == other, token, old))
    return replace(logprobs, ids=ids)
