"""How a shard packs tokens and signals: the table of codecs, and the one that packs nothing.

A codec turns the rows of a shard into bytes, two blobs a row, and tables that all of them need.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from xtk.artifacts.ranks import Ranks
from xtk.lookup import unknown
from xtk.tokens.sequence import Sequence as TokenSequence
from xtk.tokens.signal import Scores, Signal

CODECS = {"raw": "xtk.artifacts.codecs:RawCodec", "packed": "xtk.artifacts.codec.packed:PackedCodec"}
STANDARD = "standard"
PRECISIONS = {"float32": "raw", "fine": "packed", STANDARD: "packed", "coarse": "packed"}


def codec_of(precision: str) -> str:
    """Return the codec of a precision.

    Raises:
        XtkError: there is no such precision.
    """
    if precision not in PRECISIONS:
        raise unknown("precision", precision, PRECISIONS)
    return PRECISIONS[precision]


class Codec(Protocol):
    """One way to pack; made for a shard.

    Args:
        options: of the header's codec, what it needs to know.
        tables: of the shard.
        ranks: of the cache, for codecs that need them.
    """

    needs_ranks: ClassVar[bool]

    @classmethod
    def largest_error(cls, options: dict[str, Any]) -> float:
        """Return by how much a log-probability above -32 can be off when it comes back, nats."""

    @classmethod
    def pack(
        cls, rows: Sequence[tuple[TokenSequence, Scores]], options: dict[str, Any], ranks: Ranks | None
    ) -> tuple[bytes, list[bytes], list[bytes]]:
        """Return the shard's tables, and for each row the bytes of its tokens and of its signal."""

    def __init__(self, options: dict[str, Any], tables: bytes, ranks: Ranks | None) -> None: ...

    def tokens(self, packed: memoryview, length: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return ids and byte ends of a document."""

    def scores(self, packed: memoryview, ids: NDArray[np.int32], positions: NDArray[np.int32]) -> Scores:
        """Return everything that was kept of a document."""

    def signal(
        self, packed: memoryview, ids: NDArray[np.int32], positions: NDArray[np.int32], draw: int | None
    ) -> Signal:
        """Return a document's signal with one set of draws; None: with what is exact alone."""


class RawCodec:
    """Plain little-endian arrays, one after the other.

    Tokens: `ids` int32 [T], `byte_ends` int32 [T]. Signal: `exact` int32 [P], how many ids of each position are exact;
    `drawn` int32 [P * R]; `ids` int32 [E], `logprobs` float32 [E], `drawn_ids` int32 [D], `counts` int32 [D], and
    float32 [P] each `tail_mass`, `realised_logprobs`, `entropy`.

    Args:
        options: of the header's codec: "num_sample_sets" R, "num_samples" n.
        tables: none.
        ranks: none.
    """

    needs_ranks: ClassVar[bool] = False

    @classmethod
    def largest_error(cls, options: dict[str, Any]) -> float:
        """Return 0."""
        return 0.0

    def __init__(self, options: dict[str, Any], tables: bytes, ranks: Ranks | None) -> None:
        self.sets, self.draws = int(options["num_sample_sets"]), int(options["num_samples"])

    @classmethod
    def pack(
        cls, rows: Sequence[tuple[TokenSequence, Scores]], options: dict[str, Any], ranks: Ranks | None
    ) -> tuple[bytes, list[bytes], list[bytes]]:
        """Return no tables, and the arrays of each row."""
        tokens = [b"".join((_bytes(sequence.ids, "<i4"), _bytes(sequence.ends, "<i4"))) for sequence, _ in rows]
        signals = [
            b"".join(
                (
                    _bytes(np.diff(scores.offsets), "<i4"),
                    _bytes(np.diff(scores.drawn_offsets), "<i4"),
                    _bytes(scores.ids, "<i4"),
                    _bytes(scores.logprobs, "<f4"),
                    _bytes(scores.drawn_ids, "<i4"),
                    _bytes(scores.counts, "<i4"),
                    _bytes(scores.tail_mass, "<f4"),
                    _bytes(scores.realised_logprobs, "<f4"),
                    _bytes(scores.entropy, "<f4"),
                )
            )
            for _, scores in rows
        ]
        return b"", tokens, signals

    def tokens(self, packed: memoryview, length: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return ids and byte ends of a document."""
        if len(packed) != 8 * length:
            raise ValueError("another number of bytes than the tokens have")
        both = np.frombuffer(packed, "<i4", 2 * length)
        return both[:length], both[length:]

    def scores(self, packed: memoryview, ids: NDArray[np.int32], positions: NDArray[np.int32]) -> Scores:
        """Return everything that was kept of a document."""
        reader = _Arrays(packed)
        size = len(positions)
        offsets = _offsets(reader.take("<i4", size))
        drawn_offsets = _offsets(reader.take("<i4", size * self.sets))
        exact, drawn = int(offsets[-1]), int(drawn_offsets[-1])
        if (np.diff(offsets) < 0).any() or (np.diff(drawn_offsets) < 0).any():
            raise ValueError("a negative number of entries")
        if len(packed) != 4 * (size * (4 + self.sets) + 2 * exact + 2 * drawn):
            raise ValueError("another number of bytes than the entries have")
        return Scores(
            positions=positions,
            offsets=offsets,
            drawn_offsets=drawn_offsets,
            ids=reader.take("<i4", exact),
            logprobs=reader.take("<f4", exact),
            drawn_ids=reader.take("<i4", drawn),
            counts=reader.take("<i4", drawn),
            tail_mass=reader.take("<f4", size),
            realised_logprobs=reader.take("<f4", size),
            entropy=reader.take("<f4", size),
        )

    def signal(
        self, packed: memoryview, ids: NDArray[np.int32], positions: NDArray[np.int32], draw: int | None
    ) -> Signal:
        """Return a document's signal with one set of draws; None: with what is exact alone."""
        return signal_of(self.scores(packed, ids, positions), draw)


def signal_of(scores: Scores, draw: int | None) -> Signal:
    """Return what a student trains from: the exact ids, and one set of draws if there are any.

    Args:
        scores: everything that was kept.
        draw: which set; it counts round. None: no draws, and their mass is in the tail.
    """
    if not scores.sets or draw is None:
        return Signal(
            scores.positions,
            scores.offsets,
            scores.ids,
            scores.logprobs,
            scores.tail_mass,
            scores.realised_logprobs,
            scores.entropy,
        )
    sets, size = scores.sets, len(scores)
    places = np.arange(size) * sets + draw % sets
    first, stop = scores.drawn_offsets[places], scores.drawn_offsets[places + 1]
    exact, drawn = np.diff(scores.offsets), stop - first
    offsets = _offsets(exact + drawn)
    ids = np.empty(offsets[-1], np.int32)
    logprobs = np.empty(offsets[-1], np.float32)
    at_exact = _within(offsets[:-1], exact)
    ids[at_exact], logprobs[at_exact] = scores.ids, scores.logprobs
    at_drawn, chosen = _within(offsets[:-1] + exact, drawn), _within(first, drawn)
    counts = scores.counts[chosen].astype(np.float64)
    owner = np.repeat(np.arange(size), drawn)
    draws = np.bincount(owner, counts, minlength=size)
    with np.errstate(divide="ignore"):
        share = np.log(counts) + np.log(scores.tail_mass.astype(np.float64) / np.maximum(draws, 1))[owner]
    ids[at_drawn], logprobs[at_drawn] = scores.drawn_ids[chosen], share
    return Signal(
        positions=scores.positions,
        offsets=offsets,
        ids=ids,
        logprobs=logprobs,
        tail_mass=np.where(draws > 0, np.float32(0), scores.tail_mass),
        realised_logprobs=scores.realised_logprobs,
        entropy=scores.entropy,
        exact=exact,
    )


class _Arrays:
    """Takes arrays off the front of a blob."""

    def __init__(self, packed: memoryview) -> None:
        self._packed, self._at = packed, 0

    def take(self, kind: str, count: int) -> NDArray[Any]:
        array: NDArray[Any] = np.frombuffer(self._packed, kind, count, self._at)
        self._at += array.nbytes
        return array


def _bytes(array: NDArray[Any], kind: str) -> bytes:
    return array.astype(kind, copy=False).tobytes()


def _offsets(sizes: NDArray[Any]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])


def _within(starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return all indices of the ranges `[start, start + size)`, one range after the other."""
    before = np.cumsum(sizes) - sizes
    indices: NDArray[np.int64] = np.arange(sizes.sum()) + np.repeat(starts - before, sizes)
    return indices
