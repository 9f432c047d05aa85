"""Where documents and the words of teachers come from: caches, matched document by document, or plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from xtk.artifacts.teacher_cache import TeacherCache
from xtk.errors import MismatchError, XtkError
from xtk.losses.loss_term import TeacherOutput
from xtk.tokens.document import Document
from xtk.training.teacher_mixture import mix_teacher_logprobs

NO_ROW = -1


class DocumentSource(Protocol):
    """Documents to train on, with or without the words of teachers on them."""

    def __len__(self) -> int: ...

    def document(self, number: int) -> Document:
        """Return a document."""

    def teacher_outputs(self, number: int, sample_set: int | None = 0) -> tuple[TeacherOutput | None, ...]:
        """Return each teacher's word on a document; None of one that has none.

        Args:
            number: of the document.
            sample_set: which set of draws; it counts round. None: what is exact alone.
        """

    def text_bytes(self) -> NDArray[np.int64]:
        """Return [documents], the length of each text."""

    def conversations(self) -> NDArray[np.bool_]:
        """Return [documents], which of them are conversations."""

    def weights(self) -> NDArray[np.float64]:
        """Return [documents], how much each counts."""


class CacheSource:
    """The documents of the caches of one teacher or of several.

    Args:
        caches: one a teacher.
        rows: int64 [teachers, documents], where each cache holds a document; -1: nowhere. None: they are those of the
            only cache.
    """

    def __init__(self, *caches: TeacherCache, rows: NDArray[np.int64] | None = None) -> None:
        self._caches = caches
        self._rows = np.arange(len(caches[0]))[None] if rows is None else rows
        self._holders = (self._rows != NO_ROW).argmax(axis=0)  # who tells of a document itself

    def __len__(self) -> int:
        return int(self._rows.shape[1])

    def document(self, number: int) -> Document:
        """Return a document."""
        holder = int(self._holders[number])
        return self._caches[holder].read_document(int(self._rows[holder, number])).document

    def teacher_outputs(self, number: int, sample_set: int | None = 0) -> tuple[TeacherOutput | None, ...]:
        """Return what each cache holds of a document."""
        return tuple(
            None if row == NO_ROW else _read_teacher_output(cache, int(row), sample_set)
            for cache, row in zip(self._caches, self._rows[:, number], strict=True)
        )

    def text_bytes(self) -> NDArray[np.int64]:
        """Return [documents], the length of each text."""
        return self._collected([cache.text_sizes() for cache in self._caches])

    def conversations(self) -> NDArray[np.bool_]:
        """Return [documents], which of them are conversations."""
        return self._collected([cache.is_conversation() for cache in self._caches])

    def weights(self) -> NDArray[np.float64]:
        """Return [documents], how much each counts."""
        return self._collected([cache.document_weights() for cache in self._caches])

    def _collected(self, of_caches: list[NDArray[Any]]) -> NDArray[Any]:
        found = np.zeros(len(self), of_caches[0].dtype)
        for number, values in enumerate(of_caches):
            held = self._holders == number
            found[held] = values[self._rows[number, held]]
        return found


def _read_teacher_output(cache: TeacherCache, row: int, draw: int | None) -> TeacherOutput:
    stored = cache.read_document(row, draw)
    return TeacherOutput(stored.tokens, stored.teacher_logprobs)


class MixtureSource(CacheSource):
    """The documents of caches whose teachers speak as one: their probabilities are mixed.

    Args:
        caches: of teachers with one tokenizer.
        rows: as in `CacheSource`.
        weights: of the teachers, summing to 1.
    """

    def __init__(self, *caches: TeacherCache, rows: NDArray[np.int64], weights: Sequence[float]) -> None:
        super().__init__(*caches, rows=rows)
        self._weights = weights

    def teacher_outputs(self, number: int, sample_set: int | None = 0) -> tuple[TeacherOutput | None, ...]:
        """Return the one word of all.

        Raises:
            Mismatch: they did not read the same tokens.
        """
        words = [heard for heard in super().teacher_outputs(number, sample_set) if heard is not None]
        first = words[0]
        said = [first.tokens.ids[first.logprobs.positions]]
        for other in words[1:]:
            said.append(other.tokens.ids[other.logprobs.positions])
            if not np.array_equal(said[0], said[-1]):
                raise MismatchError(
                    "teachers that read other tokens of a document cannot be mixed",
                    where=f"document {number}: {len(said[0]):,} trained tokens of one, {len(said[-1]):,} of the other",
                    hint="--combine-teachers sum",
                )
        return (TeacherOutput(first.tokens, mix_teacher_logprobs([heard.logprobs for heard in words], self._weights)),)


class TextSource:
    """Documents without a teacher, for training with cross-entropy alone."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self._documents = documents

    def __len__(self) -> int:
        return len(self._documents)

    def document(self, number: int) -> Document:
        """Return a document."""
        return self._documents[number]

    def teacher_outputs(self, number: int, sample_set: int | None = 0) -> tuple[TeacherOutput | None, ...]:
        """Return nothing: there is no teacher."""
        return ()

    def text_bytes(self) -> NDArray[np.int64]:
        """Return [documents], the length of each text."""
        return np.array([len(document.text.encode()) for document in self._documents], np.int64)

    def conversations(self) -> NDArray[np.bool_]:
        """Return [documents], which of them are conversations."""
        return np.array([document.conversation is not None for document in self._documents], np.bool_)

    def weights(self) -> NDArray[np.float64]:
        """Return [documents], how much each counts."""
        return np.array([document.weight for document in self._documents], np.float64)


# Which row of one cache is which row of another.


def match_documents(caches: Sequence[TeacherCache]) -> NDArray[np.int64]:
    """Find the documents of the first cache in the others, in whatever order they are there.

    A document that comes twice is found twice: its first time is the first time there.

    Returns:
        int64 [caches, documents], where each cache holds a document.

    Raises:
        Mismatch: a document is missing in a cache, or one counts more in one than in another.
    """
    held = [_Held(cache) for cache in caches]
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
    """Find the cache of each document: that of the teacher whom it names, or else the only one that holds it.

    Args:
        caches: one a teacher; each holds the documents of its teacher, and may hold others.
        names: of the teachers.

    Returns:
        int64 [caches, documents], where a document's cache holds it, and -1 elsewhere. Documents are in the order of
        the first cache, then of what the next one has beside them.

    Raises:
        XtkError: a document names no teacher and several caches hold it, names one that is not there, or one whose
            cache does not hold it.
    """
    held = [_Held(cache) for cache in caches]
    owners = np.repeat(np.arange(len(held)), [len(cache.keys) for cache in held])
    _, firsts, documents = np.unique(
        np.concatenate([cache.keys for cache in held]), return_index=True, return_inverse=True
    )
    places = np.argsort(np.argsort(firsts))[documents]
    rows = np.full((len(held), len(firsts)), NO_ROW, np.int64)
    rows[owners, places] = np.concatenate([np.arange(len(cache.keys)) for cache in held])
    told = np.full(rows.shape, NO_ROW, np.int64)
    told[owners, places] = np.concatenate([_named_teachers(cache, names) for cache in caches])
    teachers = np.where(told.max(axis=0) == NO_ROW, (rows != NO_ROW).argmax(axis=0), told.max(axis=0))
    _check_routes(held, names, rows, told, teachers)
    rows[np.arange(len(held))[:, None] != teachers] = NO_ROW
    return rows


def _named_teachers(cache: TeacherCache, names: Sequence[str]) -> NDArray[np.int64]:
    """Return int64 [documents], the number of the teacher that each document names; -1: none."""
    routes = cache.routes()
    numbers = {"": NO_ROW, **{name: number for number, name in enumerate(names)}}
    for row, route in enumerate(routes):
        if route not in numbers:
            where = f"{cache.folder.name}, row {row}"
            raise XtkError(f"a document names the teacher {route!r}", where=where, hint=f"there are {', '.join(names)}")
    return np.array([numbers[route] for route in routes], np.int64)


def _check_routes(
    held: Sequence[_Held],
    names: Sequence[str],
    rows: NDArray[np.int64],
    told: NDArray[np.int64],
    teachers: NDArray[np.int64],
) -> None:
    """Refuse documents of which it is not clear who teaches them, or which their teacher has not read."""
    unnamed = told.max(axis=0) == NO_ROW
    for wrong, what, hint in (
        (
            unnamed & ((rows != NO_ROW).sum(axis=0) > 1),
            "a document that names no teacher is in several caches",
            "xtk cache-teacher --route-column NAME, or caches of other documents each",
        ),
        (
            ~unnamed & ((told != NO_ROW) & (told != teachers)).any(axis=0),
            "a document names other teachers in other caches",
            "the same --route-column for all caches",
        ),
        (
            rows[teachers, np.arange(rows.shape[1])] == NO_ROW,
            "a document is missing in the cache of its teacher",
            "xtk cache-teacher for that teacher, with all documents that name it",
        ),
    ):
        if wrong.any():
            place = int(wrong.argmax())
            holder = int((rows[:, place] != NO_ROW).argmax())
            where = f"{held[holder].name}, row {rows[holder, place]}; its teacher: {names[int(teachers[place])]}"
            raise XtkError(what, where=where, hint=hint)


class _Held:
    """The documents of a cache, as they can be found.

    Attributes:
        keys: uint64 [documents], equal for equal documents, the n-th of several with the n-th of several.
        rows_by_key: int64 [documents], the rows by their keys.
    """

    def __init__(self, cache: TeacherCache) -> None:
        self.cache, self.name = cache, cache.folder.name
        prints = cache.fingerprints()
        by_print = np.argsort(prints, kind="stable")
        firsts = np.flatnonzero(np.diff(prints[by_print], prepend=~prints[by_print[:1]]))
        times = np.arange(len(prints)) - np.repeat(firsts, np.diff(np.append(firsts, len(prints))))
        self.rows_by_key = by_print
        self.keys = prints.copy()
        self.keys[by_print] += times.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def _missing(one: _Held, other: _Held, rows: NDArray[np.int64]) -> MismatchError:
    begins = one.cache.read_document(int(rows[0])).document.text[:40]
    return MismatchError(
        f"{len(rows):,} of {len(one.keys):,} documents of one cache are missing in another",
        where=f"{one.name}, row {rows[0]} ({begins!r}), is not in {other.name}",
        hint="caches of the same data, nothing truncated or split; or --combine-teachers route, where each has its own",
    )


def _check_document_weights(one: _Held, other: _Held, rows: NDArray[np.int64]) -> None:
    ours, theirs = one.cache.document_weights()[rows[0]], other.cache.document_weights()[rows[1]]
    apart = np.flatnonzero(ours != theirs)
    if len(apart):
        at = apart[0]
        raise MismatchError(
            f"a document has the weight {ours[at]:g} in one cache and {theirs[at]:g} in another",
            where=f"{one.name}, row {rows[0, at]}; {other.name}, row {rows[1, at]}",
            hint="the same --weight-column for all caches",
        )
