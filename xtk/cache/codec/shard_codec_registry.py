"""Codecs of shards: the codec interface, the list of codecs, and the uncompressed `raw` codec.

A codec encodes the documents of a shard as two blobs each, tokens and log-probabilities, and shared tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from xtk.cache.teacher_logprobs import StoredLogprobs, TeacherLogprobs, sizes_to_offsets
from xtk.cache.token_ids_by_frequency import VocabularyOrder
from xtk.name_registry import unknown_name_error
from xtk.text.token_sequence import TokenSequence

CODECS = {
    "raw": "xtk.cache.codec.shard_codec_registry:RawCodec",
    "packed": "xtk.cache.codec.packed_shard_codec:PackedCodec",
}
DEFAULT_PRECISION = "standard"
PRECISION_CODECS = {"float32": "raw", "fine": "packed", DEFAULT_PRECISION: "packed", "coarse": "packed"}


# The tokens and log-probabilities of each document; and the codec tables of the shard, and for each document the bytes
# of its tokens and log-probabilities.
CodecInput = Sequence[tuple[TokenSequence, StoredLogprobs]]
CodecOutput = tuple[bytes, list[bytes], list[bytes]]


def codec_for_precision(precision: str) -> str:
    """Return the codec name of a precision."""
    if precision not in PRECISION_CODECS:
        raise unknown_name_error("precision", precision, PRECISION_CODECS)
    return PRECISION_CODECS[precision]


class Codec(Protocol):
    """Encoding of the tokens and log-probabilities of a shard; one object per shard."""

    needs_vocabulary_order: ClassVar[bool]

    @classmethod
    def max_logprob_error(cls, options: dict[str, Any]) -> float:
        """Return the maximum quantization error of a log-probability above -32, nats."""

    @classmethod
    def pack(
        cls, documents: CodecInput, options: dict[str, Any], vocabulary_order: VocabularyOrder | None
    ) -> CodecOutput:
        """Return the shard's codec tables, and for each document the bytes of its tokens and log-probabilities."""

    def __init__(self, options: dict[str, Any], tables: bytes, vocabulary_order: VocabularyOrder | None) -> None: ...

    def unpack_tokens(self, packed: memoryview, length: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return token ids and byte ends of a document, int32 [T] each."""

    def unpack_stored_logprobs(
        self, packed: memoryview, ids: NDArray[np.int32], positions: NDArray[np.int32]
    ) -> StoredLogprobs:
        """Return all stored log-probabilities of a document."""

    def unpack_teacher_logprobs(
        self, packed: memoryview, ids: NDArray[np.int32], positions: NDArray[np.int32], sample_set: int | None
    ) -> TeacherLogprobs:
        """Return a document's log-probabilities with one sample set; with None, only exact entries."""


class RawCodec:
    """Uncompressed codec: concatenated little-endian arrays.

    Tokens: ids int32 [T], byte ends int32 [T]. Log-probabilities: exact ids per position int32 [P], sampled ids per
    position and set int32 [P * R], exact ids int32 [E], their log-probabilities float32 [E], sampled ids int32 [D],
    their counts int32 [D], their log-probabilities float32 [D] (if "sample_logprobs"), and float32 [P] each: remainder
    mass, log-probability of the observed token, entropy.
    `options`: "codec" section of the header: "num_sample_sets" R, "num_samples" n, "sample_logprobs".
    """

    needs_vocabulary_order: ClassVar[bool] = False

    @classmethod
    def max_logprob_error(cls, options: dict[str, Any]) -> float:
        """Return 0."""
        return 0.0

    def __init__(self, options: dict[str, Any], tables: bytes, vocabulary_order: VocabularyOrder | None) -> None:
        self.num_sample_sets, self.num_samples = int(options["num_sample_sets"]), int(options["num_samples"])
        self.has_sample_logprobs = bool(options.get("sample_logprobs", False))

    @classmethod
    def pack(
        cls, documents: CodecInput, options: dict[str, Any], vocabulary_order: VocabularyOrder | None
    ) -> CodecOutput:
        """Return empty tables, and the arrays of each document."""
        tokens = [
            b"".join((_array_bytes(sequence.ids, "<i4"), _array_bytes(sequence.byte_ends, "<i4")))
            for sequence, _ in documents
        ]
        has_sample_logprobs = bool(options.get("sample_logprobs", False))
        signals = [
            b"".join(
                (
                    _array_bytes(np.diff(scores.offsets), "<i4"),
                    _array_bytes(np.diff(scores.sample_offsets), "<i4"),
                    _array_bytes(scores.ids, "<i4"),
                    _array_bytes(scores.logprobs, "<f4"),
                    _array_bytes(scores.sample_ids, "<i4"),
                    _array_bytes(scores.sample_counts, "<i4"),
                    _array_bytes(_sample_logprobs(scores), "<f4") if has_sample_logprobs else b"",
                    _array_bytes(scores.remainder_mass, "<f4"),
                    _array_bytes(scores.observed_logprobs, "<f4"),
                    _array_bytes(scores.entropy, "<f4"),
                )
            )
            for _, scores in documents
        ]
        return b"", tokens, signals

    def unpack_tokens(self, packed: memoryview, length: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return token ids and byte ends of a document, int32 [T] each."""
        if len(packed) != 8 * length:
            raise ValueError("the compressed tokens have a wrong number of bytes")
        both = np.frombuffer(packed, "<i4", 2 * length)
        return both[:length], both[length:]

    def unpack_stored_logprobs(
        self, packed: memoryview, ids: NDArray[np.int32], positions: NDArray[np.int32]
    ) -> StoredLogprobs:
        """Return all stored log-probabilities of a document."""
        reader = _ArrayReader(packed)
        size = len(positions)
        offsets = sizes_to_offsets(reader.read("<i4", size))
        sampled_offsets = sizes_to_offsets(reader.read("<i4", size * self.num_sample_sets))
        exact, sampled = int(offsets[-1]), int(sampled_offsets[-1])
        if (np.diff(offsets) < 0).any() or (np.diff(sampled_offsets) < 0).any():
            raise ValueError("the offsets of the log-probabilities decrease")
        of_samples = 3 if self.has_sample_logprobs else 2
        if len(packed) != 4 * (size * (4 + self.num_sample_sets) + 2 * exact + of_samples * sampled):
            raise ValueError("the compressed log-probabilities have a wrong number of bytes")
        return StoredLogprobs(
            positions=positions,
            offsets=offsets,
            sample_offsets=sampled_offsets,
            ids=reader.read("<i4", exact),
            logprobs=reader.read("<f4", exact),
            sample_ids=reader.read("<i4", sampled),
            sample_counts=reader.read("<i4", sampled),
            sample_logprobs=reader.read("<f4", sampled) if self.has_sample_logprobs else None,
            remainder_mass=reader.read("<f4", size),
            observed_logprobs=reader.read("<f4", size),
            entropy=reader.read("<f4", size),
        )

    def unpack_teacher_logprobs(
        self, packed: memoryview, ids: NDArray[np.int32], positions: NDArray[np.int32], sample_set: int | None
    ) -> TeacherLogprobs:
        """Return a document's log-probabilities with one sample set; with None, only exact entries."""
        return self.unpack_stored_logprobs(packed, ids, positions).to_teacher_logprobs(sample_set)


class _ArrayReader:
    """Reads consecutive arrays from a blob."""

    def __init__(self, packed: memoryview) -> None:
        self._packed, self._at = packed, 0

    def read(self, kind: str, count: int) -> NDArray[Any]:
        array: NDArray[Any] = np.frombuffer(self._packed, kind, count, self._at)
        self._at += array.nbytes
        return array


def _sample_logprobs(stored_logprobs: StoredLogprobs) -> NDArray[np.float32]:
    if stored_logprobs.sample_logprobs is None:
        raise ValueError("sampled ids must have log-probabilities")
    return stored_logprobs.sample_logprobs


def _array_bytes(array: NDArray[Any], kind: str) -> bytes:
    return array.astype(kind, copy=False).tobytes()
