"""Counting a corpus for `--method cooccurrence` so that a killed run goes on where it was."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from xtk.artifacts.atomic_files import atomic_write, canonical_json, remove_stale_temporary_files, sha256
from xtk.artifacts.corpus import CorpusFingerprint
from xtk.artifacts.output_checks import check_output_file
from xtk.projection.build import ALGORITHM_VERSION
from xtk.projection.methods.cooccurrence import CooccurrenceCounter, CooccurrenceCounts, count_cooccurrences
from xtk.tokens.document import Document
from xtk.tokens.tokenizer import Tokenizer

STATE_SUFFIX = ".xtk-cooccurrence-state"
FORMAT, VERSION = "xtk-cooccurrence-state", 2
SAVE_INTERVAL_SECONDS = 30.0


def count_corpus_cooccurrences(
    student: Tokenizer,
    teacher: Tokenizer,
    corpus: Iterable[Document],
    path: Path,
    advance: Callable[[int], None] = lambda documents: None,
) -> CooccurrenceCounts:
    """Count a corpus, and keep the counts so far beside the projection, whole, every half minute.

    After a kill the documents that were counted are read again (for the fingerprint: another corpus begins anew)
    and not tokenised again. Counts are sums, so the result is the same wherever it was interrupted.

    Args:
        student: its tokens are the rows.
        teacher: its tokens are the columns.
        corpus: documents, readable twice.
        path: where the projection is to be.
        advance: told how many more documents are counted.

    Returns:
        The counts. The unfinished file stays until `remove_counting_state`.

    Raises:
        XtkError: the file of the counts so far is the user's.
    """
    state = counting_state_path(path)
    check_output_file(state, "counts", _is_state)
    wanted = {
        "format": FORMAT,
        "version": VERSION,
        "algorithm_version": ALGORITHM_VERSION,
        "student": student.fingerprint,
        "teacher": teacher.fingerprint,
    }
    done, keys, times = _read_state(state, wanted, corpus)
    counter = CooccurrenceCounter(student, teacher)
    counter.restore(keys, times)
    advance(done)
    reader = _FingerprintedTexts(corpus, done)
    saved = time.monotonic()
    counted = done
    for documents in count_cooccurrences(counter, reader.texts()):
        advance(done + documents - counted)
        counted = done + documents
        if time.monotonic() - saved >= SAVE_INTERVAL_SECONDS:
            _write_state(state, {**wanted, "documents": counted, "corpus": reader.fingerprint_at(counted)}, counter)
            saved = time.monotonic()
    return counter.to_counts(counted, reader.fingerprint_at(counted))


def counting_state_path(path: Path) -> Path:
    """Return where the counts so far of a projection lie."""
    return path.parent / (path.name + STATE_SUFFIX)


def remove_counting_state(path: Path) -> None:
    """Remove the counts so far, and what a writer left that was killed, once the projection is written."""
    state = counting_state_path(path)
    if state.is_file() and _is_state(state):
        state.unlink()
    remove_stale_temporary_files(path.parent, state.name)


def _is_state(path: Path) -> bool:
    """Say whether a file begins as counts of xtk's do, whole or damaged further on."""
    with path.open("rb") as stream:
        return FORMAT.encode() in stream.read(4096)


def corpus_fingerprint(corpus: Iterable[Document]) -> tuple[int, str]:
    """Return how many documents a corpus has, and its fingerprint."""
    reader = _FingerprintedTexts(corpus, 0)
    count = sum(1 for _ in reader.texts())
    return count, reader.fingerprint_at(count)


class _FingerprintedTexts:
    """Hands out texts, and knows the fingerprint of the documents before each batch that was handed out."""

    def __init__(self, corpus: Iterable[Document], skipped: int) -> None:
        self._corpus, self._skipped = corpus, skipped
        self._hashes: dict[int, str] = {}

    def texts(self) -> Iterator[str]:
        fingerprint = CorpusFingerprint()
        count = 0
        for document in self._corpus:
            fingerprint.add(document)
            count += 1
            if count > self._skipped:
                # Batches are tokenised ahead of what is counted, so the hash at each document is kept until it is.
                self._hashes[count] = str(fingerprint)
                # Of a conversation, no model reads one content right after the other.
                yield document.text if document.conversation is None else _joined_messages(document)
        self._hashes[count] = str(fingerprint)

    def fingerprint_at(self, count: int) -> str:
        """Return the fingerprint of the first `count` documents; those of fewer are forgotten."""
        found = self._hashes[count]
        self._hashes = {number: digest for number, digest in self._hashes.items() if number >= count}
        return found


def _joined_messages(document: Document) -> str:
    return "\n\n".join(segment.text for segment in document.segments)


def _write_state(state: Path, header: dict[str, Any], counter: CooccurrenceCounter) -> None:
    keys, times = counter.sorted_counts()
    checksum = sha256(canonical_json(header).encode() + keys.tobytes() + times.tobytes())
    told = canonical_json({**header, "checksum": checksum})
    with atomic_write(state) as temporary:
        temporary.write_bytes(safetensors.numpy.save({"keys": keys, "times": times}, metadata={"xtk": told}))


def _read_state(
    state: Path, wanted: dict[str, Any], corpus: Iterable[Document]
) -> tuple[int, NDArray[np.int64], NDArray[np.int64]]:
    """Return documents, keys and times of an interrupted run; nothing if it was another's, or is damaged.

    Args:
        state: where it lies.
        wanted: format, version, rules and both sides, all of which have to be the same.
        corpus: begins with the documents that were counted, or it is another.
    """
    nothing = 0, np.zeros(0, np.int64), np.zeros(0, np.int64)
    with contextlib.suppress(Exception):  # whatever is wrong with it: counting anew is right, only slower
        raw = state.read_bytes()
        size = int.from_bytes(raw[:8], "little")
        header = json.loads(json.loads(raw[8 : 8 + size])["__metadata__"]["xtk"])
        tensors = safetensors.numpy.load(raw)
        keys, times = tensors["keys"], tensors["times"]
        told = {key: header[key] for key in (*wanted, "documents", "corpus")}
        checksum = sha256(canonical_json(told).encode() + keys.tobytes() + times.tobytes())
        if header["checksum"] == checksum and wanted.items() <= told.items():
            first = itertools.islice(iter(corpus), told["documents"])
            if corpus_fingerprint(first) == (told["documents"], told["corpus"]):
                return told["documents"], keys, times
    return nothing
