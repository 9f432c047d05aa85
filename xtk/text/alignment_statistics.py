"""Alignment statistics of two tokenizers over a corpus: spans by kind, bytes, and the worst documents."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.numba_kernel import numba_kernel
from xtk.text.alignment import align, align_sequences, tokenize_batches
from xtk.text.document import Document
from xtk.text.normalization_changes import NormalizationLoss, count_normalization_loss
from xtk.text.token_sequence import TokenSequence as TokenSequence
from xtk.text.token_sequence import tokenize_documents
from xtk.text.tokenizer import EncodedText, Tokenizer

SPAN_KINDS = ("1:1", "1:n", "n:1", "n:m")
SPANS, BYTES, STUDENT_TOKENS, TEACHER_TOKENS = range(4)  # columns of the counts of each kind
NUM_LISTED = 5  # longest spans and worst documents in the JSON
MAX_LONG_SPANS = 1000  # candidates per batch; many may have the same text
EXCERPT_LENGTH = 60  # characters
EXCERPT_CONTEXT = 15  # characters of an excerpt before its position

Spans = NDArray[np.int32]
Tokenized = EncodedText | TokenSequence


@dataclass(frozen=True)
class AlignedDocument:
    """A document with its two tokenizations and their spans."""

    index: int  # index in the corpus, from 0
    text: str  # the text that was tokenized; of a conversation, the contents of its messages
    student: EncodedText  # the student's tokens; of a conversation, including template tokens
    teacher: EncodedText  # the teacher's tokens
    spans: Spans  # int32 [C, 4], see `align`
    is_text: bool = True  # whether it is plain text, not a conversation


def align_documents(
    documents: Iterable[Document], student: Tokenizer, teacher: Tokenizer
) -> Iterator[list[AlignedDocument]]:
    """Yield batches of aligned documents, in order; the next is tokenized meanwhile, each side in its own thread."""
    number = 0
    sides = (partial(_tokenize_batch, side) for side in (student, teacher))
    for group, left, right in tokenize_batches(documents, lambda document: document.text, *sides):
        yield [
            _align_document(number + at, document.text, one, other)
            for at, (document, one, other) in enumerate(zip(group, left, right, strict=True))
        ]
        number += len(group)


def _align_document(number: int, text: str, student: Tokenized, teacher: Tokenized) -> AlignedDocument:
    if isinstance(student, EncodedText) and isinstance(teacher, EncodedText):
        return AlignedDocument(number, text, student, teacher, align(student, teacher))
    assert isinstance(student, TokenSequence)
    assert isinstance(teacher, TokenSequence)
    spans = align_sequences(student, teacher)
    one, other = (EncodedText(side.ids, side.byte_ends, side.exact) for side in (student, teacher))
    return AlignedDocument(number, text, one, other, spans, is_text=False)


def _tokenize_batch(tokenizer: Tokenizer, documents: list[Document]) -> list[Tokenized]:
    """Return the tokens of texts, and of conversations in the tokenizer's chat template."""
    conversations = [document for document in documents if document.conversation is not None]
    sequences = iter(tokenize_documents(tokenizer, conversations))
    texts = iter(tokenizer.encode([document.text for document in documents if document.conversation is None]))
    return [next(texts) if document.conversation is None else next(sequences) for document in documents]


class AlignmentStatistics:
    """Alignment statistics over a corpus, in constant memory; the `num_worst` worst documents are kept in full.

    These are those with the largest fraction of bytes in n:m spans or in none.
    """

    def __init__(self, student: Tokenizer, teacher: Tokenizer, *, num_worst: int = 0) -> None:
        self._student, self._teacher = student, teacher
        self._keep = max(num_worst, NUM_LISTED)
        self._span_counts = np.zeros((len(SPAN_KINDS), 4), np.int64)
        self._tokens = np.zeros(2, np.int64)
        self._rewritten = np.zeros(3, np.int64)  # documents normalized by the student, by the teacher, by either
        self._longest: dict[bytes, dict[str, Any]] = {}  # by their bytes
        self._worst: list[tuple[float, AlignedDocument, dict[str, Any]]] = []
        self.normalization_losses = NormalizationLoss(student.name), NormalizationLoss(teacher.name)
        self.num_documents = self.num_bytes = 0
        self._started = time.perf_counter()

    def add(self, documents: Sequence[AlignedDocument]) -> None:
        """Add documents to the statistics."""
        texts, text_edges = _concatenate_with_offsets(
            [np.frombuffer(document.text.encode(), np.uint8) for document in documents]
        )
        spans, span_edges = _concatenate_with_offsets([document.spans for document in documents])
        ends, token_edges = _concatenate_with_offsets([document.student.byte_ends for document in documents])
        counts, starts, sizes = count_spans(spans, span_edges, ends, token_edges)
        rewritten = ~np.array([(document.student.exact, document.teacher.exact) for document in documents]).T
        self.num_documents += len(documents)
        self.num_bytes += len(texts)
        self._span_counts += counts.sum(axis=0)
        self._tokens += (len(ends), sum(len(document.teacher.ids) for document in documents))
        self._rewritten += (*rewritten.sum(axis=1), rewritten.any(axis=0).sum())
        read = [
            document for document in documents if document.is_text
        ]  # in conversations, templates change the text too
        plain = [document.text for document in read]
        self.normalization_losses = (
            self.normalization_losses[0]
            + count_normalization_loss(self._student, plain, [document.student for document in read]),
            self.normalization_losses[1]
            + count_normalization_loss(self._teacher, plain, [document.teacher for document in read]),
        )
        self._note_longest(documents, (texts, text_edges), (spans, span_edges), starts, sizes)
        self._note_worst(documents, counts, np.diff(text_edges), rewritten)

    @property
    def worst_documents(self) -> list[AlignedDocument]:
        """The worst documents, worst first."""
        return [document for _, document, _ in self._worst]

    def to_json(self) -> dict[str, Any]:
        """Return all statistics as JSON values; fractions are of all spans or of all bytes."""
        seconds = time.perf_counter() - self._started
        total_spans, covered = (int(self._span_counts[:, column].sum()) for column in (SPANS, BYTES))
        tokens = int(self._tokens.sum())
        return {
            "kind": "alignment-statistics",
            "student": self._student.name,
            "teacher": self._teacher.name,
            "documents": self.num_documents,
            "bytes": self.num_bytes,
            "student_tokens": int(self._tokens[0]),
            "teacher_tokens": int(self._tokens[1]),
            "student_bytes_per_token": _ratio(self.num_bytes, int(self._tokens[0])),
            "teacher_bytes_per_token": _ratio(self.num_bytes, int(self._tokens[1])),
            "spans": total_spans,
            "span_kinds": {
                name: {
                    "spans": int(row[SPANS]),
                    "span_fraction": _ratio(int(row[SPANS]), total_spans),
                    "bytes": int(row[BYTES]),
                    "byte_fraction": _ratio(int(row[BYTES]), self.num_bytes),
                    "student_tokens": int(row[STUDENT_TOKENS]),
                    "teacher_tokens": int(row[TEACHER_TOKENS]),
                }
                for name, row in zip(SPAN_KINDS, self._span_counts, strict=True)
            },
            "unaligned_bytes": self.num_bytes - covered,
            "unaligned_fraction": _ratio(self.num_bytes - covered, self.num_bytes),
            "normalized_documents": dict(zip(("student", "teacher", "either"), self._rewritten.tolist(), strict=True)),
            "normalization_loss": {
                side: {"rewritten": lost.rewritten, "dropped": lost.dropped, "unknown": lost.unknown}
                for side, lost in zip(("student", "teacher"), self.normalization_losses, strict=True)
            },
            # Only spans with several tokens on a side: a run of spaces that is one token on both sides is aligned well.
            "longest_spans": list(self._longest.values()),
            "worst_documents": [record for fraction, _, record in self._worst[:NUM_LISTED] if fraction > 0],
            "seconds": round(seconds, 3),
            "nanoseconds_per_token": _ratio(1e9 * seconds, tokens),
        }

    def _note_longest(
        self,
        documents: Sequence[AlignedDocument],
        texts: tuple[NDArray[np.uint8], NDArray[np.int64]],
        joined_spans: tuple[Spans, NDArray[np.int64]],
        starts: NDArray[np.int32],
        sizes: NDArray[np.int32],
    ) -> None:
        (letters, text_edges), (spans, span_edges) = texts, joined_spans
        several = (spans[:, 1] - spans[:, 0] > 1) | (spans[:, 3] - spans[:, 2] > 1)
        least = min(record["bytes"] for record in self._longest.values()) if len(self._longest) == NUM_LISTED else 0
        places = np.flatnonzero(several & (sizes > least))
        fresh: dict[bytes, dict[str, Any]] = {}
        for place in places[np.argsort(-sizes[places], kind="stable")][:MAX_LONG_SPANS].tolist():
            at = int(np.searchsorted(span_edges, place, side="right")) - 1
            start = int(text_edges[at]) + int(starts[place])
            spelling = letters[start : start + int(sizes[place])].tobytes()
            if spelling in fresh or spelling in self._longest:
                continue
            s0, s1, t0, t1 = spans[place].tolist()
            fresh[spelling] = {
                "document": documents[at].index,
                "start_byte": int(starts[place]),
                "bytes": len(spelling),
                "student_tokens": s1 - s0,
                "teacher_tokens": t1 - t0,
                "excerpt": _shorten(spelling.decode("utf-8", "replace")),
            }
            if len(fresh) == NUM_LISTED:
                break
        # The sort is stable: of equally long spans, the first in the corpus is kept.
        order = sorted({**self._longest, **fresh}.items(), key=lambda entry: -entry[1]["bytes"])
        self._longest = dict(order[:NUM_LISTED])

    def _note_worst(
        self,
        documents: Sequence[AlignedDocument],
        counts: NDArray[np.int64],
        sizes: NDArray[np.int64],
        rewritten: NDArray[np.bool_],
    ) -> None:
        several = counts[:, SPAN_KINDS.index("n:m"), BYTES]
        unaligned = sizes - counts[:, :, BYTES].sum(axis=1)
        fractions = (several + unaligned) / np.maximum(sizes, 1)
        full = len(self._worst) == self._keep
        least = self._worst[-1][0] if full else -1.0  # if all documents are good, the first ones are kept
        places = np.flatnonzero(fractions > least)
        for place in places[np.argsort(-fractions[places], kind="stable")][: self._keep].tolist():
            sides = [side for side, flag in zip(("student", "teacher"), rewritten[:, place], strict=True) if flag]
            record = {
                "document": documents[place].index,
                "bytes": int(sizes[place]),
                "byte_fraction": round(float(fractions[place]), 6),
                "n:m_bytes": int(several[place]),
                "unaligned_bytes": int(unaligned[place]),
                "normalized_by": sides,
                "excerpt": _excerpt(documents[place]),
            }
            self._worst.append((float(fractions[place]), documents[place], record))
        self._worst.sort(key=lambda entry: (-entry[0], entry[1].index))
        del self._worst[self._keep :]


def span_kinds(spans: Spans) -> NDArray[np.int64]:
    """Return the index in SPAN_KINDS of each span, int64 [C]."""
    kinds: NDArray[np.int64] = 2 * (spans[:, 1] - spans[:, 0] > 1) + 1 * (spans[:, 3] - spans[:, 2] > 1)
    return kinds


@numba_kernel
def count_spans(
    spans: Spans, span_edges: NDArray[np.int64], ends: NDArray[np.int32], token_edges: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]]:
    """Return int64 [D, 4 kinds, 4]: spans, bytes, student tokens, teacher tokens of documents.

    And int32 [C], the first byte of each span, and its number of bytes. `spans` and `ends`, the byte ends of the
    student's tokens, are concatenated; `span_edges` and `token_edges`, [D+1], are where those of each document begin.
    """
    documents = len(span_edges) - 1
    counts = np.zeros((documents, 4, 4), np.int64)
    starts, sizes = np.empty(len(spans), np.int32), np.empty(len(spans), np.int32)
    for document in range(documents):
        first = token_edges[document]
        for at in range(span_edges[document], span_edges[document + 1]):
            student, teacher = spans[at, 1] - spans[at, 0], spans[at, 3] - spans[at, 2]
            start = ends[first + spans[at, 0] - 1] if spans[at, 0] > 0 else 0
            starts[at] = start
            sizes[at] = ends[first + spans[at, 1] - 1] - start
            kind = (2 if student > 1 else 0) + (1 if teacher > 1 else 0)
            counts[document, kind, 0] += 1
            counts[document, kind, 1] += sizes[at]
            counts[document, kind, 2] += student
            counts[document, kind, 3] += teacher
    return counts, starts, sizes


def _concatenate_with_offsets(parts: list[NDArray[Any]]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    return np.concatenate(parts), np.cumsum([0, *map(len, parts)], dtype=np.int64)


def _ratio(amount: float, total: int) -> float:
    return round(amount / total, 6) if total else 0.0


def _excerpt(document: AlignedDocument) -> str:
    """Return the text around the longest n:m span; without one, around the first byte in no span."""
    spans, ends = document.spans, document.student.byte_ends
    several = spans[span_kinds(spans) == SPAN_KINDS.index("n:m")]
    if len(several):
        starts = np.where(several[:, 0] > 0, ends[several[:, 0] - 1], 0)
        start = int(starts[np.argmax(ends[several[:, 1] - 1] - starts)])
    else:
        start = int(ends[spans[-1, 1] - 1]) if len(spans) else 0
    at = max(0, len(document.text.encode()[:start].decode("utf-8", "ignore")) - EXCERPT_CONTEXT)
    return ("…" if at else "") + _shorten(document.text[at:])


def _shorten(text: str) -> str:
    return text if len(text) <= EXCERPT_LENGTH else text[: EXCERPT_LENGTH - 1] + "…"
