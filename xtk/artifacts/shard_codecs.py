"""How a shard packs tokens and signals: the table of codecs, and the one that packs nothing.

A codec turns the rows of a shard into bytes, two blobs a row, and tables that all of them need.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from xtk.artifacts.vocabulary_order import VocabularyOrder
from xtk.registry import unknown_name_error
from xtk.tokens.teacher_logprobs import StoredLogprobs, TeacherLogprobs
from xtk.tokens.token_sequence import TokenSequence as TokenSequence

CODECS = {"raw": "xtk.artifacts.shard_codecs:RawCodec", "packed": "xtk.artifacts.codec.packed_codec:PackedCodec"}
DEFAULT_PRECISION = "standard"
PRECISION_CODECS = {"float32": "raw", "fine": "packed", DEFAULT_PRECISION: "packed", "coarse": "packed"}


def codec_for_precision(precision: str) -> str:
    """Return the codec of a precision.

    Raises:
        XtkError: there is no such precision.
    """
    if precision not in PRECISION_CODECS:
        raise unknown_name_error("precision", precision, PRECISION_CODECS)
    return PRECISION_CODECS[precision]


class Codec(Protocol):
    """One way to pack; made for a shard.

    Args:
        options: of the header's codec, what it needs to know.
        tables: of the shard.
        ranks: of the cache, for codecs that need them.
    """

    needs_vocabulary_order: ClassVar[bool]

    @classmethod
    def max_logprob_error(cls, options: dict[str, Any]) -> float:
        """Return by how much a log-probability above -32 can be off when it comes back, nats."""

    @classmethod
    def pack(
        cls,
        documents: Sequence[tuple[TokenSequence, StoredLogprobs]],
        options: dict[str, Any],
        vocabulary_order: VocabularyOrder | None,
    ) -> tuple[bytes, list[bytes], list[bytes]]:
        """Return the shard's tables, and for each row the bytes of its tokens and of its signal."""

    def __init__(self, options: dict[str, Any], tables: bytes, vocabulary_order: VocabularyOrder | None) -> None: ...

    def unpack_tokens(self, packed: memoryview, length: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return ids and byte ends of a document."""

    def unpack_stored_logprobs(
        self, packed: memoryview, ids: NDArray[np.int32], positions: NDArray[np.int32]
    ) -> StoredLogprobs:
        """Return everything that was kept of a document."""

    def unpack_teacher_logprobs(
        self, packed: memoryview, ids: NDArray[np.int32], positions: NDArray[np.int32], sample_set: int | None
    ) -> TeacherLogprobs:
        """Return a document's signal with one set of draws; None: with what is exact alone."""


class RawCodec:
    """Plain little-endian arrays, one after the other.

    Tokens: `ids` int32 [T], `token_byte_ends` int32 [T]. Signal: `exact` int32 [P], how many ids of each position are
        exact;
    `sample_set_sizes` int32 [P * R]; `ids` int32 [E], `logprobs` float32 [E], `sample_ids` int32 [D], `counts` int32
        [D], and float32 [P] each `remainder_mass`, `observed_logprobs`, `entropy`.

    Args:
        options: of the header's codec: "num_sample_sets" R, "num_samples" n.
        tables: none.
        ranks: none.
    """

    needs_vocabulary_order: ClassVar[bool] = False

    @classmethod
    def max_logprob_error(cls, options: dict[str, Any]) -> float:
        """Return 0."""
        return 0.0

    def __init__(self, options: dict[str, Any], tables: bytes, vocabulary_order: VocabularyOrder | None) -> None:
        self.num_sample_sets, self.num_samples = int(options["num_sample_sets"]), int(options["num_samples"])

    @classmethod
    def pack(
        cls,
        documents: Sequence[tuple[TokenSequence, StoredLogprobs]],
        options: dict[str, Any],
        vocabulary_order: VocabularyOrder | None,
    ) -> tuple[bytes, list[bytes], list[bytes]]:
        """Return no tables, and the arrays of each row."""
        tokens = [
            b"".join((_array_bytes(sequence.ids, "<i4"), _array_bytes(sequence.byte_ends, "<i4")))
            for sequence, _ in documents
        ]
        signals = [
            b"".join(
                (
                    _array_bytes(np.diff(scores.offsets), "<i4"),
                    _array_bytes(np.diff(scores.sample_offsets), "<i4"),
                    _array_bytes(scores.ids, "<i4"),
                    _array_bytes(scores.logprobs, "<f4"),
                    _array_bytes(scores.sample_ids, "<i4"),
                    _array_bytes(scores.sample_counts, "<i4"),
                    _array_bytes(scores.remainder_mass, "<f4"),
                    _array_bytes(scores.observed_logprobs, "<f4"),
                    _array_bytes(scores.entropy, "<f4"),
                )
            )
            for _, scores in documents
        ]
        return b"", tokens, signals

    def unpack_tokens(self, packed: memoryview, length: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return ids and byte ends of a document."""
        if len(packed) != 8 * length:
            raise ValueError("another number of bytes than the tokens have")
        both = np.frombuffer(packed, "<i4", 2 * length)
        return both[:length], both[length:]

    def unpack_stored_logprobs(
        self, packed: memoryview, ids: NDArray[np.int32], positions: NDArray[np.int32]
    ) -> StoredLogprobs:
        """Return everything that was kept of a document."""
        reader = _ArrayReader(packed)
        size = len(positions)
        offsets = _sizes_to_offsets(reader.read("<i4", size))
        drawn_offsets = _sizes_to_offsets(reader.read("<i4", size * self.num_sample_sets))
        exact, drawn = int(offsets[-1]), int(drawn_offsets[-1])
        if (np.diff(offsets) < 0).any() or (np.diff(drawn_offsets) < 0).any():
            raise ValueError("a negative number of entries")
        if len(packed) != 4 * (size * (4 + self.num_sample_sets) + 2 * exact + 2 * drawn):
            raise ValueError("another number of bytes than the entries have")
        return StoredLogprobs(
            positions=positions,
            offsets=offsets,
            sample_offsets=drawn_offsets,
            ids=reader.read("<i4", exact),
            logprobs=reader.read("<f4", exact),
            sample_ids=reader.read("<i4", drawn),
            sample_counts=reader.read("<i4", drawn),
            remainder_mass=reader.read("<f4", size),
            observed_logprobs=reader.read("<f4", size),
            entropy=reader.read("<f4", size),
        )

    def unpack_teacher_logprobs(
        self, packed: memoryview, ids: NDArray[np.int32], positions: NDArray[np.int32], sample_set: int | None
    ) -> TeacherLogprobs:
        """Return a document's signal with one set of draws; None: with what is exact alone."""
        return to_teacher_logprobs(self.unpack_stored_logprobs(packed, ids, positions), sample_set)


def to_teacher_logprobs(stored_logprobs: StoredLogprobs, sample_set: int | None) -> TeacherLogprobs:
    """Return what a student trains from: the exact ids, and one set of draws if there are any.

    Args:
        stored_logprobs: everything that was kept.
        sample_set: which set; it counts round. None: no draws, and their mass is in the tail.
    """
    if not stored_logprobs.num_sample_sets or sample_set is None:
        return TeacherLogprobs(
            stored_logprobs.positions,
            stored_logprobs.offsets,
            stored_logprobs.ids,
            stored_logprobs.logprobs,
            stored_logprobs.remainder_mass,
            stored_logprobs.observed_logprobs,
            stored_logprobs.entropy,
        )
    sets, size = stored_logprobs.num_sample_sets, len(stored_logprobs)
    places = np.arange(size) * sets + sample_set % sets
    first, stop = stored_logprobs.sample_offsets[places], stored_logprobs.sample_offsets[places + 1]
    exact, drawn = np.diff(stored_logprobs.offsets), stop - first
    offsets = _sizes_to_offsets(exact + drawn)
    ids = np.empty(offsets[-1], np.int32)
    logprobs = np.empty(offsets[-1], np.float32)
    at_exact = _range_indices(offsets[:-1], exact)
    ids[at_exact], logprobs[at_exact] = stored_logprobs.ids, stored_logprobs.logprobs
    at_drawn, chosen = _range_indices(offsets[:-1] + exact, drawn), _range_indices(first, drawn)
    counts = stored_logprobs.sample_counts[chosen].astype(np.float64)
    owner = np.repeat(np.arange(size), drawn)
    draws = np.bincount(owner, counts, minlength=size)
    with np.errstate(divide="ignore"):
        share = np.log(counts) + np.log(stored_logprobs.remainder_mass.astype(np.float64) / np.maximum(draws, 1))[owner]
    ids[at_drawn], logprobs[at_drawn] = stored_logprobs.sample_ids[chosen], share
    return TeacherLogprobs(
        positions=stored_logprobs.positions,
        offsets=offsets,
        ids=ids,
        logprobs=logprobs,
        remainder_mass=np.where(draws > 0, np.float32(0), stored_logprobs.remainder_mass),
        observed_logprobs=stored_logprobs.observed_logprobs,
        entropy=stored_logprobs.entropy,
        exact_counts=exact,
    )


class _ArrayReader:
    """Takes arrays off the front of a blob."""

    def __init__(self, packed: memoryview) -> None:
        self._packed, self._at = packed, 0

    def read(self, kind: str, count: int) -> NDArray[Any]:
        array: NDArray[Any] = np.frombuffer(self._packed, kind, count, self._at)
        self._at += array.nbytes
        return array


def _array_bytes(array: NDArray[Any], kind: str) -> bytes:
    return array.astype(kind, copy=False).tobytes()


def _sizes_to_offsets(sizes: NDArray[Any]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])


def _range_indices(starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return all indices of the ranges `[start, start + size)`, one range after the other."""
    before = np.cumsum(sizes) - sizes
    indices: NDArray[np.int64] = np.arange(sizes.sum()) + np.repeat(starts - before, sizes)
    return indices
