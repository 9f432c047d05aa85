"""Documents to train on, from caches (matched by document) or in memory, and the teachers' outputs for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from xtk.batches.combine_teachers import mix_teacher_logprobs
from xtk.cache.reader import TeacherCache
from xtk.cache.teacher_document import TeacherDocument
from xtk.errors import MismatchError, XtkError
from xtk.teachers.source import NO_ROW, CacheRows, TeacherSource
from xtk.text.document import Document
from xtk.text.token_sequence import TokenSequence, tokenize_documents
from xtk.text.tokenizer import Tokenizer


class DocumentSource(Protocol):
    """Documents to train on."""

    teachers: Sequence[TeacherSource]  # their outputs for these documents; a mixture is one teacher

    def __len__(self) -> int: ...

    def document(self, number: int) -> Document:
        """Return a document."""

    def student_tokens(self, tokenizer: Tokenizer, numbers: Sequence[int]) -> list[TokenSequence]:
        """Return the student's tokens of some documents."""

    def text_bytes(self) -> NDArray[np.int64]:
        """Return [documents], the length of each text in UTF-8 bytes."""

    def conversations(self) -> NDArray[np.bool_]:
        """Return [documents], which of them are conversations."""

    def weights(self) -> NDArray[np.float64]:
        """Return [documents], the weight of each document in the loss."""


class DocumentsFromCaches:
    """The documents of the cache of one teacher, or of several.

    `rows`: int64 [teachers, documents], index of each document in each cache; -1: not in it. None: one cache, in its
    order.
    """

    def __init__(self, *caches: TeacherCache, rows: NDArray[np.int64] | None = None) -> None:
        self._caches = caches
        self._rows = np.arange(len(caches[0]))[None] if rows is None else rows
        self._holders = (self._rows != NO_ROW).argmax(axis=0)  # the cache to read the document itself from
        self.teachers: Sequence[TeacherSource] = [
            CacheRows(cache, own) for cache, own in zip(caches, self._rows, strict=True)
        ]

    def __len__(self) -> int:
        return int(self._rows.shape[1])

    def document(self, number: int) -> Document:
        """Return a document."""
        holder = int(self._holders[number])
        return self._caches[holder].read_document(int(self._rows[holder, number])).document

    def student_tokens(self, tokenizer: Tokenizer, numbers: Sequence[int]) -> list[TokenSequence]:
        """Return the student's tokens of some documents."""
        return tokenize_documents(tokenizer, [self.document(number) for number in numbers])

    def text_bytes(self) -> NDArray[np.int64]:
        """Return [documents], the length of each text in UTF-8 bytes."""
        return self._collected([cache.text_sizes() for cache in self._caches])

    def conversations(self) -> NDArray[np.bool_]:
        """Return [documents], which of them are conversations."""
        return self._collected([cache.is_conversation() for cache in self._caches])

    def weights(self) -> NDArray[np.float64]:
        """Return [documents], the weight of each document in the loss."""
        return self._collected([cache.document_weights() for cache in self._caches])

    def _collected(self, of_caches: list[NDArray[Any]]) -> NDArray[Any]:
        collected = np.zeros(len(self), of_caches[0].dtype)
        for number, values in enumerate(of_caches):
            held = self._holders == number
            collected[held] = values[self._rows[number, held]]
        return collected


class TextDocuments:
    """Documents in memory, and the outputs of teachers for them; none for losses on the text alone."""

    def __init__(self, documents: Sequence[Document], teachers: Sequence[TeacherSource] = ()) -> None:
        self._documents, self.teachers = documents, teachers

    def __len__(self) -> int:
        return len(self._documents)

    def document(self, number: int) -> Document:
        """Return a document."""
        return self._documents[number]

    def student_tokens(self, tokenizer: Tokenizer, numbers: Sequence[int]) -> list[TokenSequence]:
        """Return the student's tokens of some documents."""
        return tokenize_documents(tokenizer, [self.document(number) for number in numbers])

    def text_bytes(self) -> NDArray[np.int64]:
        """Return [documents], the length of each text in UTF-8 bytes."""
        return np.array([len(document.text.encode()) for document in self._documents], np.int64)

    def conversations(self) -> NDArray[np.bool_]:
        """Return [documents], which of them are conversations."""
        return np.array([document.conversation is not None for document in self._documents], np.bool_)

    def weights(self) -> NDArray[np.float64]:
        """Return [documents], the weight of each document in the loss."""
        return np.array([document.weight for document in self._documents], np.float64)


class TeacherMixture:
    """Several teachers with the same tokenizer as one: their probabilities are mixed, with weights that sum to 1."""

    def __init__(self, teachers: Sequence[TeacherSource], weights: Sequence[float]) -> None:
        self._teachers, self._weights = teachers, weights

    def outputs(self, documents: Sequence[int], sample_set: int | None = 0) -> list[TeacherDocument | None]:
        """Return the mixture of the teachers' outputs for some documents."""
        of_teachers = [teacher.outputs(documents, sample_set) for teacher in self._teachers]
        return [
            self._mix(number, [output for output in outputs if output is not None])
            for number, outputs in zip(documents, zip(*of_teachers, strict=True), strict=True)
        ]

    def _mix(self, number: int, outputs: list[TeacherDocument]) -> TeacherDocument:
        ids = [output.tokens.ids[output.teacher_logprobs.positions] for output in outputs]
        for other in ids[1:]:
            if not np.array_equal(ids[0], other):
                raise MismatchError(
                    "--combine-teachers mixture needs the same tokens in all caches, but a document has different ones",
                    where=f"document {number}: {len(ids[0]):,} and {len(other):,} trained tokens",
                    hint="use --combine-teachers sum",
                )
        mixture = mix_teacher_logprobs([output.teacher_logprobs for output in outputs], self._weights)
        return outputs[0].with_teacher_logprobs(mixture)


# Matching of equal documents between caches.


def match_documents(caches: Sequence[TeacherCache]) -> NDArray[np.int64]:
    """Return int64 [caches, documents], where each document of the first cache is in each cache, in any order.

    Duplicates are matched by weight, and those of equal weight in order: the first occurrence to the first.
    """
    held = [_DocumentIndex(cache) for cache in caches]
    rows = np.empty((len(caches), len(held[0].keys)), np.int64)
    for number, cache in enumerate(held):
        for one, other in ((held[0], cache), (cache, held[0])):
            missing = np.flatnonzero(~np.isin(one.keys, other.keys))
            if len(missing):
                raise _missing(one, other, missing)
        rows[number, held[0].rows_by_key] = cache.rows_by_key
        _check_document_weights(held[0], cache, rows[[0, number]])
    return rows


def route_documents(caches: Sequence[TeacherCache], names: Sequence[str]) -> NDArray[np.int64]:
    """Return int64 [caches, documents], where each document is in its teacher's cache; -1 for the other caches.

    Its teacher is the one that it names, or else the only one whose cache has it. Documents are in the order of the
    first cache, followed by those that only later caches have.
    """
    held = [_DocumentIndex(cache) for cache in caches]
    owners = np.repeat(np.arange(len(held)), [len(cache.keys) for cache in held])
    _, firsts, documents = np.unique(
        np.concatenate([cache.keys for cache in held]), return_index=True, return_inverse=True
    )
    documents = np.argsort(np.argsort(firsts))[documents]
    rows = np.full((len(held), len(firsts)), NO_ROW, np.int64)
    rows[owners, documents] = np.concatenate([np.arange(len(cache.keys)) for cache in held])
    named = np.full(rows.shape, NO_ROW, np.int64)
    named[owners, documents] = np.concatenate([_named_teachers(cache, names) for cache in caches])
    teachers = np.where(named.max(axis=0) == NO_ROW, (rows != NO_ROW).argmax(axis=0), named.max(axis=0))
    _check_routes(held, names, rows, named, teachers)
    rows[np.arange(len(held))[:, None] != teachers] = NO_ROW
    return rows


def _named_teachers(cache: TeacherCache, names: Sequence[str]) -> NDArray[np.int64]:
    """Return int64 [documents], the index of the teacher that each document names; -1: none."""
    routes = cache.routes()
    numbers = {"": NO_ROW, **{name: number for number, name in enumerate(names)}}
    for row, route in enumerate(routes):
        if route not in numbers:
            where = f"{cache.folder.name}, document {row}"
            hint = f"use one of {', '.join(names)} in the --route-column, and run cache-teacher again"
            raise XtkError(
                f"the --route-column of a document has {route!r}, which is not the name of a teacher",
                where=where,
                hint=hint,
            )
    return np.array([numbers[route] for route in routes], np.int64)


def _check_routes(
    held: Sequence[_DocumentIndex],
    names: Sequence[str],
    rows: NDArray[np.int64],
    named: NDArray[np.int64],
    teachers: NDArray[np.int64],
) -> None:
    """Raise XtkError for documents whose teacher is ambiguous, or missing in the cache of their teacher."""
    unnamed = named.max(axis=0) == NO_ROW
    for failure, what, hint in (
        (
            unnamed & ((rows != NO_ROW).sum(axis=0) > 1),
            "a document without a value in --route-column is in several caches, so its teacher is ambiguous",
            "name the teachers with xtk cache-teacher --route-column NAME, or use caches without common documents",
        ),
        (
            ~unnamed & ((named != NO_ROW) & (named != teachers)).any(axis=0),
            "the --route-column of a document has different teachers in different caches",
            "run xtk cache-teacher with the same --route-column for all caches",
        ),
        (
            rows[teachers, np.arange(rows.shape[1])] == NO_ROW,
            "a document is missing in the cache of the teacher that its --route-column names",
            "run xtk cache-teacher with that teacher and all documents that name it",
        ),
    ):
        if failure.any():
            at = int(failure.argmax())
            holder = int((rows[:, at] != NO_ROW).argmax())
            where = f"{held[holder].name}, document {rows[holder, at]}; teacher: {names[int(teachers[at])]}"
            raise XtkError(what, where=where, hint=hint)


class _DocumentIndex:
    """The documents of a cache, indexed by fingerprint."""

    def __init__(self, cache: TeacherCache) -> None:
        self.cache, self.name = cache, cache.folder.name
        fingerprints = cache.fingerprints()
        order = np.lexsort((cache.document_weights(), fingerprints))  # stable
        firsts = np.flatnonzero(np.diff(fingerprints[order], prepend=~fingerprints[order[:1]]))
        counts = np.diff(np.append(firsts, len(fingerprints)))
        occurrences = np.arange(len(fingerprints)) - np.repeat(firsts, counts)
        # int64 [documents], document indices sorted by fingerprint, then by weight, then by occurrence.
        self.rows_by_key = order
        # uint64 [documents]; the n-th duplicate of a document, by weight, has the same key in every cache.
        self.keys = fingerprints.copy()
        self.keys[order] += occurrences.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def _missing(one: _DocumentIndex, other: _DocumentIndex, rows: NDArray[np.int64]) -> MismatchError:
    beginning = one.cache.read_document(int(rows[0])).document.text[:40]
    return MismatchError(
        f"{len(rows):,} of {len(one.keys):,} documents of the cache {one.name} are missing in {other.name}",
        where=f"{one.name}, document {rows[0]}, which begins {beginning!r}",
        hint="cache all teachers on the same data with the same length limits; or use --combine-teachers route",
    )


def _check_document_weights(one: _DocumentIndex, other: _DocumentIndex, rows: NDArray[np.int64]) -> None:
    ours, theirs = one.cache.document_weights()[rows[0]], other.cache.document_weights()[rows[1]]
    different = np.flatnonzero(ours != theirs)
    if len(different):
        at = different[0]
        raise MismatchError(
            f"a document has the weight {ours[at]:g} in the cache {one.name} and {theirs[at]:g} in {other.name}",
            where=f"{one.name}, document {rows[0, at]}; {other.name}, document {rows[1, at]}",
            hint="run cache-teacher with the same --weight-column for all caches",
        )
