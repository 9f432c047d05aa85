"""Alignment of two tokenizations of one text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from xtk.text.alignment_numba import minimal_spans, minimal_spans_with_gaps
from xtk.text.token_sequence import TokenSequence
from xtk.text.tokenizer import EncodedText

# A batch has enough texts to keep all cores busy, and few enough for memory.
BATCH_TEXTS, BATCH_CHARACTERS = 1024, 1 << 20

Item = TypeVar("Item")
Tokens = TypeVar("Tokens")


def tokenize_batches(
    items: Iterable[Item],
    text_of: Callable[[Item], str],
    student: Callable[[list[Item]], list[Tokens]],
    teacher: Callable[[list[Item]], list[Tokens]],
) -> Iterator[tuple[list[Item], list[Tokens], list[Tokens]]]:
    """Yield batches of items with the tokens of both sides; the next is tokenized meanwhile, in two threads."""
    waiting: tuple[list[Item], Future[list[Tokens]], Future[list[Tokens]]] | None = None
    with ThreadPoolExecutor(2, thread_name_prefix="tokenize") as threads:
        for batch in _batches(items, text_of):
            left, right = threads.submit(student, batch), threads.submit(teacher, batch)
            if waiting:
                yield waiting[0], waiting[1].result(), waiting[2].result()
            waiting = batch, left, right
        if waiting:
            yield waiting[0], waiting[1].result(), waiting[2].result()


def _batches(items: Iterable[Item], text_of: Callable[[Item], str]) -> Iterator[list[Item]]:
    batch: list[Item] = []
    size = 0
    for item in items:
        batch.append(item)
        size += len(text_of(item))
        if len(batch) == BATCH_TEXTS or size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def align(student: EncodedText, teacher: EncodedText) -> NDArray[np.int32]:
    """Return int32 [C, 4], `[s0, s1, t0, t1]`, the minimal spans of two tokenizations of one text.

    Student tokens `[s0, s1)` have the same bytes as teacher tokens `[t0, t1)`. Spans follow each other without gaps,
    starting at token 0. Tokens without bytes (an added prefix) belong to the span after them. If one side is truncated,
    the spans end with the shared text.
    """
    spans: NDArray[np.int32] = minimal_spans(student.byte_ends, teacher.byte_ends)
    return spans


def align_sequences(student: TokenSequence, teacher: TokenSequence) -> NDArray[np.int32]:
    """Return int32 [C, 4], ascending spans of two sequences: text by bytes, segment-end tokens with each other.

    Sampled tokens without text (invalid UTF-8, and tokens after it) exist only in sequences of the tokenizer that
    sampled them; two such sequences are aligned token by token there. Tokens that only one side has (template text,
    text that the other's template omits) are in no span. A token that begins in a part and ends in the template's text
    is in a span only if that text has the same bytes on both sides.
    """
    spans: NDArray[np.int32] = minimal_spans_with_gaps(
        student.byte_ends, teacher.byte_ends, student.runs_with_borders(), teacher.runs_with_borders()
    )
    spans = spans[_have_equal_bytes_after_parts(spans, student, teacher)]
    both = (student.segment_end_tokens >= 0) & (teacher.segment_end_tokens >= 0)
    own, other = _match_undecodable_tokens(student, teacher)
    own, other = np.append(student.segment_end_tokens[both], own), np.append(teacher.segment_end_tokens[both], other)
    if not len(own):
        return spans
    spans = np.concatenate([spans, np.column_stack([own, own + 1, other, other + 1]).astype(np.int32)])
    return spans[np.argsort(spans[:, 0])]


def _have_equal_bytes_after_parts(
    spans: NDArray[np.int32], student: TokenSequence, teacher: TokenSequence
) -> NDArray[np.bool_]:
    """Return bool [C], whether the tokens of each span reach equally far over the end of a part on both sides."""
    own, other = student.border_mask[spans[:, 1] - 1], teacher.border_mask[spans[:, 3] - 1]
    equal: NDArray[np.bool_] = np.equal(own, other)
    for at in np.flatnonzero(own & other).tolist():
        after = student.bytes_after_part(int(spans[at, 1]) - 1)
        equal[at] = after is not None and after == teacher.bytes_after_part(int(spans[at, 3]) - 1)
    return equal


def separate_added_spaces(
    spans: NDArray[np.int32], student: TokenSequence, teacher: TokenSequence
) -> NDArray[np.int32]:
    """Return spans of `align_sequences` in which a token that is an added space is not in the span after it.

    A tokenizer may prepend a space to a text, which is a separate token before a digit, for example. If both sides have
    such a token, both are a separate span; if one side has it, it is in no span. So tokens with equal bytes are
    compared with each other, not with an average that includes the space.
    """
    own, other = _begins_with_added_space(spans[:, :2], student), _begins_with_added_space(spans[:, 2:], teacher)
    both = spans[own & other]
    separate = np.column_stack([both[:, 0], both[:, 0] + 1, both[:, 2], both[:, 2] + 1])
    rest = spans.copy()
    rest[:, 0] += own
    rest[:, 2] += other
    spans = np.concatenate([rest, separate.astype(np.int32)])
    return spans[np.argsort(spans[:, 0])]


def _begins_with_added_space(ranges: NDArray[np.int32], sequence: TokenSequence) -> NDArray[np.bool_]:
    """Return bool [C], whether each range `[start, stop)` of tokens has a first token of a run, without bytes."""
    firsts = sequence.text_runs[sequence.byte_ends[sequence.text_runs[:, 0]] == sequence.text_runs[:, 2], 0]
    begins_with_space: NDArray[np.bool_] = (
        sequence.exact & np.isin(ranges[:, 0], firsts) & (ranges[:, 1] - ranges[:, 0] > 1)
    )
    return begins_with_space


def _match_undecodable_tokens(
    student: TokenSequence, teacher: TokenSequence
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices, on both sides, of the same sampled tokens without text."""
    own, other = np.flatnonzero(student.undecodable_mask), np.flatnonzero(teacher.undecodable_mask)
    count = min(len(own), len(other))  # one side may be truncated
    own, other = own[:count], other[:count]
    same = np.array_equal(student.ids[own], teacher.ids[other])
    return (own, other) if same else (own[:0], other[:0])
