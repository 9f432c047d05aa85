"""Signals as bits: what a shard's documents have in common, and the bytes of each document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.artifacts.codec import contexts as families
from xtk.artifacts.codec import kernels
from xtk.artifacts.codec.frequencies import pack_frequencies, slots_of, unpack_frequencies
from xtk.artifacts.codec.grids import LEVEL_COUNT, PRECISIONS, Precision, levels_of, nearest_levels
from xtk.artifacts.codec.kinds import (
    ENTRIES_A_KIND,
    MOST_KINDS,
    Favourites,
    find_favourites,
    find_kinds,
)
from xtk.artifacts.codec.numbers import SYMBOLS
from xtk.artifacts.codec.streams import Writer, cut, pack_numbers, unpack_numbers, words_of
from xtk.errors import Damaged
from xtk.tokens.signal import Scores, Signal


NO_WORDS = np.zeros(0, np.uint32)


@dataclass(frozen=True)
class Grid:
    """The levels of a precision as tables.

    Attributes:
        table: float64 [3, 2 LEVEL_COUNT]: log-probability, probability and their product; -inf, 0, 0 from LEVEL_COUNT on.
        values: float32 [2 LEVEL_COUNT], the log-probabilities.
        steps: of odds and of entropy in nats; how many of odds are a nat.
    """

    table: NDArray[np.float64]
    values: NDArray[np.float32]
    steps: tuple[float, float, int]

    @classmethod
    def of(cls, precision: Precision) -> Grid:
        """Return the tables of a precision."""
        table = np.zeros((3, 2 * LEVEL_COUNT))
        table[0] = -np.inf
        table[0, :LEVEL_COUNT] = levels_of(precision)
        table[1] = np.exp(table[0])
        table[2, :LEVEL_COUNT] = table[0, :LEVEL_COUNT] * table[1, :LEVEL_COUNT]
        steps = (precision.odds_step, precision.entropy_step, round(1 / precision.odds_step))
        return cls(table, table[0].astype(np.float32), steps)


@dataclass(frozen=True)
class Prepared:
    """A document's scores as whole numbers, but for its entropies."""

    odds: NDArray[np.int64]
    tails: NDArray[np.int64]
    entropies: NDArray[np.float64]
    offsets: NDArray[np.int64]
    owners: NDArray[np.int64]
    ids: NDArray[np.int32]
    levels: NDArray[np.int64]
    drawn_offsets: NDArray[np.int64]
    drawn_ids: NDArray[np.int32]
    counts: NDArray[np.int64]
    sets: int

    def __len__(self) -> int:
        return len(self.odds)

    @property
    def drawn_owners(self) -> NDArray[np.int64]:
        """The positions of the ids that were drawn."""
        return np.repeat(np.arange(len(self.drawn_offsets) - 1), np.diff(self.drawn_offsets)) // max(self.sets, 1)


def prepare(scores: Scores, realised_ids: NDArray[np.int32], draws: int, levels: NDArray[np.float64], step: float) -> Prepared:
    """Round the scores of a document.

    Raises:
        ValueError: the scores are not what they should be: the realised token is not among the exact ids, or the
            counts of a set of draws do not sum to n.
    """
    size = len(scores)
    owners = np.repeat(np.arange(size), np.diff(scores.offsets))
    realised = scores.ids == realised_ids[owners]
    if not np.array_equal(owners[realised], np.arange(size)):
        raise ValueError("the realised token is not once among the exact ids of its position")
    others = ~realised
    owners, logprobs = owners[others], scores.logprobs[others]
    drawn = np.repeat(np.arange(len(scores.drawn_offsets) - 1), np.diff(scores.drawn_offsets))
    sums = np.bincount(drawn, scores.counts, minlength=len(scores.drawn_offsets) - 1)
    if (scores.counts < 1).any() or ((sums != 0) & (sums != draws)).any():
        raise ValueError(f"the counts of a set of draws do not sum to {draws}")
    tail = scores.tail_mass.astype(np.float64)
    rest = np.bincount(owners, np.exp(logprobs.astype(np.float64)), minlength=size) + tail
    with np.errstate(divide="ignore", invalid="ignore"):
        odds = scores.realised_logprobs.astype(np.float64) - np.log(rest)
        tails = nearest_levels(np.log(tail), levels)
    certain, impossible = rest == 0, np.isneginf(scores.realised_logprobs)
    steps = np.rint(np.where(certain | impossible, 0, odds) / step).astype(np.int64)
    return Prepared(
        odds=np.where(impossible, kernels.IMPOSSIBLE_ODDS, np.where(certain, kernels.CERTAIN_ODDS, steps)),
        tails=tails,
        entropies=scores.entropy.astype(np.float64),
        offsets=_offsets(np.bincount(owners, minlength=size)),
        owners=owners,
        ids=scores.ids[others],
        levels=nearest_levels(logprobs, levels),
        drawn_offsets=scores.drawn_offsets,
        drawn_ids=scores.drawn_ids,
        counts=scores.counts.astype(np.int64),
        sets=scores.sets,
    )


def pack_signals(
    documents: Sequence[tuple[Scores, NDArray[np.int32]]], order: NDArray[np.int32], precision: str, sets: int, draws: int
) -> tuple[bytes, list[bytes]]:
    """Return the tables of a shard, and the bytes of the signal of each of its documents.

    Args:
        documents: the scores of each, and int32 [P], the tokens that stand at its positions.
        order: int32 [U], all ids, those that come most often first.
        precision: a key of `PRECISIONS`.
        sets: R, how many sets of draws each has.
        draws: n, of a set.

    Raises:
        ValueError: scores that are not what they should be.
    """
    grid = Grid.of(PRECISIONS[precision])
    levels = grid.table[0, :LEVEL_COUNT]
    prepared = [prepare(scores, realised, draws, levels, grid.steps[0]) for scores, realised in documents]
    if any(document.sets not in (0, sets) for document in prepared):
        raise ValueError(f"not all documents have {sets} sets of draws")
    ranks = np.empty(len(order), np.int32)
    ranks[order] = np.arange(len(order), dtype=np.int32)
    kinds = _kinds_of(prepared, len(order))
    favourites = _favourites_of(prepared, kinds, ranks)
    packer = _Packer(grid, favourites, ranks, sets, draws)
    records = [packer.records(document, own) for document, own in zip(prepared, kinds, strict=True)]
    writer = Writer([part for parts in records for part in parts], int(packer.starts[-1]))
    return _pack_tables(writer.frequencies, favourites, ranks), [_pack_document(document, parts, writer) for document, parts in zip(prepared, records, strict=True)]


def _kinds_of(prepared: Sequence[Prepared], width: int) -> list[NDArray[np.int64]]:
    """Return the kinds of the positions of each document."""
    edges = _offsets(np.array([len(document) for document in prepared], np.int64))
    owners, ids = [], []
    for document, first in zip(prepared, edges.tolist(), strict=False):
        owners += [document.owners + first, document.drawn_owners + first]
        ids += [document.ids, document.drawn_ids]
    owner, flat = np.concatenate(owners), np.concatenate(ids)
    flat = flat[np.argsort(owner, kind="stable")]
    count = min(MOST_KINDS, len(flat) // ENTRIES_A_KIND)
    kinds = find_kinds(_offsets(np.bincount(owner, minlength=int(edges[-1]))), flat, count, width)
    return np.split(kinds, edges[1:-1])


def _favourites_of(
    prepared: Sequence[Prepared], kinds: Sequence[NDArray[np.int64]], ranks: NDArray[np.int32]
) -> Favourites:
    of_entries, ids, heights = [], [], []
    for document, own in zip(prepared, kinds, strict=True):
        finite = np.where(document.levels < LEVEL_COUNT, document.levels, 0)
        floors = np.zeros(len(document), np.int64)
        np.maximum.at(floors, document.owners, finite)
        of_entries += [own[document.owners], own[document.drawn_owners]]
        ids += [document.ids, document.drawn_ids]
        heights += [floors[document.owners] - finite, np.zeros(len(document.drawn_ids), np.int64)]
    return find_favourites(np.concatenate(of_entries), np.concatenate(ids), np.concatenate(heights), ranks)


class _Packer:
    """Turns documents into records.

    Args:
        grid: the levels.
        favourites: of the kinds.
        ranks: int32 [U], of all ids.
        sets: R.
        draws: n.
    """

    def __init__(self, grid: Grid, favourites: Favourites, ranks: NDArray[np.int32], sets: int, draws: int) -> None:
        self.grid, self.sets, self.draws = grid, sets, draws
        self.starts = families.starts_of(families.signal_families(favourites.kinds))
        # Of every kind and id, the rank among the ids of the kind, and the class of its levels.
        self._ranks = np.diff(favourites.starts)[:, None].astype(np.int32) + ranks
        self._classes = np.full(self._ranks.shape, families.LEVELS - 1, np.int8)
        owners = np.repeat(np.arange(favourites.kinds), np.diff(favourites.starts))
        self._ranks[owners, favourites.ids] = np.arange(len(owners)) - favourites.starts[owners]
        self._classes[owners, favourites.ids] = favourites.levels

    def records(self, document: Prepared, kinds: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Return the records of each stream of a document."""
        places = kinds[document.owners], document.ids
        order = _by_owner(document.owners, self._ranks[places])
        ranks, classes = (table[places][order].astype(np.int64) for table in (self._ranks, self._classes))
        size, entries, levels = len(document), len(document.ids), document.levels[order]
        floors, positions = np.empty(size, np.int64), np.empty(6 * size, np.int64)
        used = kernels.position_records(
            self.starts, kinds, document.odds, document.entropies, document.tails, document.offsets, levels,
            self.grid.table, self.grid.steps, floors, positions,
        )  # fmt: skip
        ids_out, levels_out = np.empty(entries, np.int64), np.empty(entries, np.int64)
        kernels.entry_records(
            self.starts, document.offsets, floors, ranks, classes, levels, ids_out, levels_out
        )
        drawn = [self._drawn(document, kinds, number) for number in range(document.sets)]
        return [positions[:used], ids_out, levels_out, *drawn]

    def _drawn(self, document: Prepared, kinds: NDArray[np.int64], number: int) -> NDArray[np.int64]:
        starts = document.drawn_offsets[number:-1:self.sets]
        sizes = document.drawn_offsets[number + 1 :: self.sets] - starts
        offsets = _offsets(sizes)
        chosen = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], sizes)
        owners = np.repeat(np.arange(len(document)), sizes)
        ranks = self._ranks[kinds[owners], document.drawn_ids[chosen]].astype(np.int64)
        order = _by_owner(owners, ranks)
        out = np.empty(len(document) + 2 * len(chosen), np.int64)
        used = kernels.drawn_records(self.starts, self.draws, offsets, ranks[order], document.counts[chosen][order], out)
        return out[:used]


def _pack_document(document: Prepared, records: Sequence[NDArray[np.int64]], writer: Writer) -> bytes:
    if not len(document):
        return b""
    streams = [writer.stream(part) for part in records]
    drawn = [int(document.drawn_offsets[number + 1 :: document.sets].sum() - document.drawn_offsets[number:-1:document.sets].sum())
             for number in range(document.sets)]  # fmt: skip
    return pack_numbers([len(document.ids), *drawn, *map(len, streams[:-1])]) + b"".join(streams)


def _pack_tables(frequencies: NDArray[np.int64], favourites: Favourites, ranks: NDArray[np.int32]) -> bytes:
    starts = families.starts_of(families.FAVOURITE_FAMILIES)
    out = np.empty(favourites.kinds + len(favourites.lengths) + 2 * len(favourites.ids), np.int64)
    own = ranks[favourites.ids].astype(np.int64)
    used = kernels.favourite_records(starts, favourites.runs, favourites.lengths, own, favourites.levels, out)
    writer = Writer([out[:used]], int(starts[-1]))
    parts = [pack_frequencies(frequencies), pack_frequencies(writer.frequencies), writer.stream(out[:used])]
    numbers = [favourites.kinds, len(favourites.ids), *map(len, parts[:-1])]
    return pack_numbers(numbers) + b"".join(parts)


class SignalReader:
    """Reads the signals of the documents of a shard.

    Args:
        tables: of the shard.
        order: int32 [U], all ids, those that come most often first.
        precision: a key of `PRECISIONS`.
        sets: R, how many sets of draws each document has.
        draws: n, of a set.

    Raises:
        Damaged: the tables are not what was written.
    """

    def __init__(
        self, tables: bytes | memoryview, order: NDArray[np.int32], precision: str, sets: int, draws: int
    ) -> None:
        self._order, self._sets, self._draws = order, sets, draws
        self._grid = Grid.of(PRECISIONS[precision])
        self._logs = np.log(np.maximum(np.arange(draws + 1), 1).astype(np.float64))
        (kinds, favourites, *sizes), at = unpack_numbers(tables, 4)
        starts = families.starts_of(families.FAVOURITE_FAMILIES)
        if not 1 <= kinds <= SYMBOLS or favourites > kinds * len(order):
            raise Damaged("the tables of this shard are altered")
        of_signals, of_favourites, stream = cut(tables, at, sizes)
        own = slots_of(unpack_frequencies(of_favourites, int(starts[-1])), _following(starts, families.FAVOURITE_GAP))
        self._favourite_starts = np.zeros(kinds + 1, np.int64)
        self._favourites = np.zeros(favourites, np.int32)
        if not kernels.read_favourites(
            words_of(stream), own, starts, order, self._favourite_starts, self._favourites
        ):
            raise Damaged("the tables of this shard are altered")
        self._starts = families.starts_of(families.signal_families(kinds))
        frequencies = unpack_frequencies(of_signals, int(self._starts[-1]))
        following = _following(self._starts, families.GAP, families.DRAWN_GAP)
        self._slots = slots_of(frequencies, following)

    def signal(
        self, packed: bytes | memoryview, realised_ids: NDArray[np.int32], positions: NDArray[np.int32], draw: int
    ) -> Signal:
        """Return a document's signal with one set of draws.

        Args:
            packed: its bytes.
            realised_ids: int32 [P], the tokens that stand at its positions.
            positions: int32 [P].
            draw: which set; it counts round.

        Raises:
            Damaged: the bytes are not what was written.
        """
        streams, drawn = self._split(packed, len(positions))
        offsets, ids, logprobs, kinds, of_positions = self._exact(streams, realised_ids, drawn[0])
        tail_mass, realised_logprobs, entropy = of_positions
        if self._sets:
            draw %= self._sets
            some = self._drawn(streams[3 + draw], kinds, drawn[1 + draw])
            offsets, ids, logprobs = kernels.join_drawn(offsets, ids, logprobs, *some, self._logs, tail_mass)
        return Signal(positions, offsets, ids, logprobs, tail_mass, realised_logprobs, entropy)

    def scores(
        self, packed: bytes | memoryview, realised_ids: NDArray[np.int32], positions: NDArray[np.int32]
    ) -> Scores:
        """Return everything that was kept of a document; the arguments are those of `signal`.

        Raises:
            Damaged: the bytes are not what was written.
        """
        streams, drawn = self._split(packed, len(positions))
        offsets, ids, logprobs, kinds, (tail_mass, realised_logprobs, entropy) = self._exact(streams, realised_ids, drawn[0])
        order = _by_owner(np.repeat(np.arange(len(positions)), np.diff(offsets)), ids)
        sets = [self._drawn(stream, kinds, size) for stream, size in zip(streams[3:], drawn[1:], strict=True)]
        # From set by set to position by position.
        sizes = np.array([np.diff(part) for part, _, _ in sets], np.int64).reshape(self._sets, len(positions))
        owners = [np.repeat(np.arange(len(positions)) * self._sets + at, size) for at, size in enumerate(sizes)]
        owner, drawn_ids, counts = (
            np.concatenate([np.zeros(0, np.int64), *parts])
            for parts in (owners, [part for _, part, _ in sets], [part for _, _, part in sets])
        )
        by_owner = _by_owner(owner, drawn_ids)
        return Scores(
            positions=positions,
            offsets=offsets,
            ids=ids[order],
            logprobs=logprobs[order],
            drawn_offsets=_offsets(sizes.T.ravel()),
            drawn_ids=drawn_ids[by_owner].astype(np.int32),
            counts=counts[by_owner].astype(np.int32),
            tail_mass=tail_mass,
            realised_logprobs=realised_logprobs,
            entropy=entropy,
        )

    def _split(self, packed: bytes | memoryview, positions: int) -> tuple[list[NDArray[np.uint32]], list[int]]:
        """Return the streams of a document, and how many entries it has: exact ones, and of each set of draws."""
        if not positions and not len(packed):
            return [NO_WORDS] * (3 + self._sets), [0] * (1 + self._sets)
        numbers, at = unpack_numbers(packed, 3 + 2 * self._sets)
        entries = numbers[: 1 + self._sets]
        if max(entries) > positions * len(self._order):
            raise _altered()
        return [words_of(part) for part in cut(packed, at, numbers[1 + self._sets :])], entries

    def _exact(
        self, streams: Sequence[NDArray[np.uint32]], realised_ids: NDArray[np.int32], entries: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]:
        grid = self._grid
        *exact, whole = kernels.read_exact(
            (streams[0], streams[1], streams[2]), self._slots, self._starts, self._favourites, self._favourite_starts,
            self._order, grid.table, grid.values, grid.steps, realised_ids, len(realised_ids) + entries,
        )  # fmt: skip
        if not whole:
            raise _altered()
        return tuple(exact)

    def _drawn(
        self, stream: NDArray[np.uint32], kinds: NDArray[np.int64], entries: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]]:
        *drawn, whole = kernels.read_drawn(
            stream, self._slots, self._starts, self._favourites, self._favourite_starts, self._order, kinds,
            self._draws, entries,
        )  # fmt: skip
        if not whole:
            raise _altered()
        return tuple(drawn)


def _following(starts: NDArray[np.int64], *gaps: int) -> NDArray[np.int64]:
    """Return what lies beside the symbols of all contexts: the next state where they are gaps."""
    following = np.zeros((int(starts[-1]), SYMBOLS), np.int64)
    for family in gaps:
        following[starts[family] : starts[family + 1]] = families.next_gap_states()
    return following


def _altered() -> Damaged:
    return Damaged("a row of this cache is altered: its signal cannot be read")


def _by_owner(owners: NDArray[np.int64], ranks: NDArray[Any]) -> NDArray[np.int64]:
    """Return the order by owners, and of one owner by ranks, none of which are equal."""
    return np.argsort(owners << 32 | ranks)


def _offsets(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])
