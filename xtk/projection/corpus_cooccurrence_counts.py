"""Resumable cooccurrence counting of a corpus, for `build-projection --method cooccurrence`."""

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

from xtk.data.corpus_reader import CorpusFingerprint
from xtk.files.atomic_files import atomic_write, canonical_json, remove_stale_temporary_files, sha256
from xtk.files.output import Output, OutputKind
from xtk.projection.build import ALGORITHM_VERSION
from xtk.projection.methods.cooccurrence import CooccurrenceCounter, CooccurrenceCounts, count_cooccurrences
from xtk.text.document import Document
from xtk.text.tokenizer import Tokenizer

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
    """Return the cooccurrence counts of a corpus; intermediate counts are saved every 30 seconds.

    A run that continues reads the counted documents again, to compare fingerprints (with another corpus it starts
    over), but does not tokenize them again. Counts are sums, so that the result does not depend on interruptions.

    Args:
        corpus: documents, readable twice.
        path: output path of the projection; intermediate counts are saved next to it.
        advance: called with the number of newly counted documents.

    Returns:
        The counts. The file of intermediate counts stays until `remove_counting_state`.
    """
    state = counting_state_path(path)
    Output(state, STATE).find_finished()
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
    """Return the path of the intermediate counts of a projection."""
    return path.parent / (path.name + STATE_SUFFIX)


def remove_counting_state(path: Path) -> None:
    """Remove the intermediate counts of a written projection, and temporary files of killed writers."""
    state = counting_state_path(path)
    if state.is_file() and _is_state(state):
        state.unlink()
    remove_stale_temporary_files(path.parent, state.name)


def _is_state(path: Path) -> bool:
    """Return whether a file begins like intermediate counts of xtk."""
    with path.open("rb") as stream:
        return FORMAT.encode() in stream.read(4096)


STATE = OutputKind[None]("a file of cooccurrence counts", _is_state, has_force=False)


def corpus_fingerprint(corpus: Iterable[Document]) -> tuple[int, str]:
    """Return the number of documents of a corpus, and its fingerprint."""
    fingerprint, count = CorpusFingerprint(), 0
    for document in corpus:
        fingerprint.add(document)
        count += 1
    return count, str(fingerprint)


class _FingerprintedTexts:
    """Yields texts, and keeps the fingerprint of all documents up to each of them."""

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
                # Batches are tokenized ahead of counting, so the hash after each document is kept until it is counted.
                self._hashes[count] = str(fingerprint)
                # Messages of a conversation are separated, since no model sees them directly adjacent.
                yield document.text if document.conversation is None else _joined_messages(document)
        self._hashes[count] = str(fingerprint)

    def fingerprint_at(self, count: int) -> str:
        """Return the fingerprint of the first `count` documents, and drop those of fewer documents."""
        stored = self._hashes[count]
        self._hashes = {number: digest for number, digest in self._hashes.items() if number >= count}
        return stored


def _joined_messages(document: Document) -> str:
    return "\n\n".join(segment.text for segment in document.segments)


def _write_state(state: Path, header: dict[str, Any], counter: CooccurrenceCounter) -> None:
    keys, times = counter.sorted_counts()
    checksum = sha256(canonical_json(header).encode() + keys.tobytes() + times.tobytes())
    metadata = canonical_json({**header, "checksum": checksum})
    with atomic_write(state) as temporary:
        temporary.write_bytes(safetensors.numpy.save({"keys": keys, "times": times}, metadata={"xtk": metadata}))


def _read_state(
    state: Path, wanted: dict[str, Any], corpus: Iterable[Document]
) -> tuple[int, NDArray[np.int64], NDArray[np.int64]]:
    """Return number of documents, keys and counts of a run; empty if they are not of `wanted` and this corpus."""
    nothing = 0, np.zeros(0, np.int64), np.zeros(0, np.int64)
    with contextlib.suppress(Exception):  # any corruption: counting again is correct, only slower
        raw = state.read_bytes()
        size = int.from_bytes(raw[:8], "little")
        header = json.loads(json.loads(raw[8 : 8 + size])["__metadata__"]["xtk"])
        tensors = safetensors.numpy.load(raw)
        keys, times = tensors["keys"], tensors["times"]
        stated = {key: header[key] for key in (*wanted, "documents", "corpus")}
        checksum = sha256(canonical_json(stated).encode() + keys.tobytes() + times.tobytes())
        if header["checksum"] == checksum and wanted.items() <= stated.items():
            first = itertools.islice(iter(corpus), stated["documents"])
            if corpus_fingerprint(first) == (stated["documents"], stated["corpus"]):
                return stated["documents"], keys, times
    return nothing
