"""Cooccurrence counts of a corpus, for `build-projection --method cooccurrence`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from xtk.data.corpus_reader import CorpusFingerprint
from xtk.projection.methods.cooccurrence import CooccurrenceCounter, CooccurrenceCounts, count_cooccurrences
from xtk.text.document import Document
from xtk.text.tokenizer import Tokenizer


def count_corpus_cooccurrences(
    student: Tokenizer,
    teacher: Tokenizer,
    corpus: Iterable[Document],
    advance: Callable[[int], None] = lambda documents: None,
) -> CooccurrenceCounts:
    """Return the cooccurrence counts of a corpus; `advance` is called with the number of newly counted documents."""
    counter, fingerprint = CooccurrenceCounter(student, teacher), CorpusFingerprint()

    def texts() -> Iterator[str]:
        for document in corpus:
            fingerprint.add(document)
            # Messages of a conversation are separated, since no model sees them directly adjacent.
            yield document.text if document.conversation is None else _joined_messages(document)

    counted = 0
    for documents in count_cooccurrences(counter, texts()):
        advance(documents - counted)
        counted = documents
    return counter.to_counts(counted, str(fingerprint))


def corpus_fingerprint(corpus: Iterable[Document]) -> tuple[int, str]:
    """Return the number of documents of a corpus, and its fingerprint."""
    fingerprint, count = CorpusFingerprint(), 0
    for document in corpus:
        fingerprint.add(document)
        count += 1
    return count, str(fingerprint)


def _joined_messages(document: Document) -> str:
    return "\n\n".join(segment.text for segment in document.segments)
