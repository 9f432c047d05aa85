"""Signals to bits: what a shard's documents have in common, and the bytes of each document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.artifacts.codec.contexts import LEVELS, signal_families, starts_of
from xtk.artifacts.codec.draw_kernels import drawn_records
from xtk.artifacts.codec.exact_kernels import entry_records, position_records
from xtk.artifacts.codec.favourites import pack_favourites
from xtk.artifacts.codec.frequencies import pack_frequencies
from xtk.artifacts.codec.grids import LEVEL_COUNT
from xtk.artifacts.codec.kinds import Favourites, find_favourites, find_kinds, how_many_kinds
from xtk.artifacts.codec.numbers import BEYOND
from xtk.artifacts.codec.rounding import Grid, Rounded, offsets_of, rounded
from xtk.artifacts.codec.streams import Writer, pack_numbers
from xtk.errors import XtkError
from xtk.tokens.signal import Scores


def pack_signals(
    documents: Sequence[tuple[Scores, NDArray[np.int32]]],
    order: NDArray[np.int32],
    precision: str,
    sets: int,
    draws: int,
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
        XtkError: the vocabulary is too wide.
    """
    if 2 * len(order) > BEYOND:
        raise XtkError(f"a vocabulary of {len(order):,} ids is too wide to pack", hint="--precision float32")
    grid = Grid.of(precision)
    whole = [rounded(scores, realised_ids, sets, draws, grid) for scores, realised_ids in documents]
    ranks = np.empty(len(order), np.int32)
    ranks[order] = np.arange(len(order), dtype=np.int32)
    kinds = _kinds_of(whole, len(order))
    favourites = _favourites_of(whole, kinds, ranks)
    recorder = _Recorder(grid, favourites, ranks, sets, draws)
    records = [recorder.streams(document, own) for document, own in zip(whole, kinds, strict=True)]
    writer = Writer([stream for streams in records for stream in streams], int(recorder.starts[-1]))
    frequencies = pack_frequencies(writer.frequencies)
    tables = pack_numbers([len(frequencies)]) + frequencies + pack_favourites(favourites, ranks)
    return tables, [_bytes_of(document, parts, writer) for document, parts in zip(whole, records, strict=True)]


def _kinds_of(documents: Sequence[Rounded], width: int) -> list[NDArray[np.int64]]:
    """Return the kinds of the positions of each document."""
    edges = offsets_of(np.array([len(document) for document in documents], np.int64))
    owners, ids = [np.zeros(0, np.int64)], [np.zeros(0, np.int32)]
    for document, first in zip(documents, edges.tolist(), strict=False):
        owners += [document.owners + first, document.drawn_owners + first]
        ids += [document.ids, document.drawn_ids]
    owner, flat = np.concatenate(owners), np.concatenate(ids)
    flat = flat[np.argsort(owner, kind="stable")]
    offsets = offsets_of(np.bincount(owner, minlength=int(edges[-1])))
    return np.split(find_kinds(offsets, flat, how_many_kinds(len(flat)), width), edges[1:-1])


def _favourites_of(
    documents: Sequence[Rounded], kinds: Sequence[NDArray[np.int64]], ranks: NDArray[np.int32]
) -> Favourites:
    of_ids, ids, heights = [np.zeros(0, np.int64)], [np.zeros(0, np.int32)], [np.zeros(0, np.int64)]
    for document, own in zip(documents, kinds, strict=True):
        finite = np.where(document.levels < LEVEL_COUNT, document.levels, 0)
        floors = np.zeros(len(document), np.int64)
        np.maximum.at(floors, document.owners, finite)
        of_ids += [own[document.owners], own[document.drawn_owners]]
        ids += [document.ids, document.drawn_ids]
        heights += [floors[document.owners] - finite, np.zeros(len(document.drawn_ids), np.int64)]
    return find_favourites(np.concatenate(of_ids), np.concatenate(ids), np.concatenate(heights), ranks)


class _Recorder:
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
        self.starts = starts_of(signal_families(favourites.kinds, sets))
        # Of every kind and id, the rank among the ids of the kind, and the class of its levels.
        self._ranks = np.diff(favourites.starts)[:, None].astype(np.int32) + ranks
        self._classes = np.full(self._ranks.shape, LEVELS - 1, np.int8)
        owners = np.repeat(np.arange(favourites.kinds), np.diff(favourites.starts))
        self._ranks[owners, favourites.ids] = np.arange(len(owners)) - favourites.starts[owners]
        self._classes[owners, favourites.ids] = favourites.levels

    def streams(self, document: Rounded, kinds: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Return the records of each stream of a document."""
        places = kinds[document.owners], document.ids
        order = _by_owner(document.owners, self._ranks[places])
        ranks, classes = (table[places][order].astype(np.int64) for table in (self._ranks, self._classes))
        levels = document.levels[order]
        floors, positions = np.empty(len(document), np.int64), np.empty(6 * len(document), np.int64)
        used = position_records(
            self.starts, kinds, document.odds, document.entropies, document.tails, document.offsets, levels,
            self.grid.table, self.grid.steps, floors, positions,
        )  # fmt: skip
        of_ids, of_levels = np.empty(len(levels), np.int64), np.empty(len(levels), np.int64)
        entry_records(self.starts, document.offsets, floors, ranks, classes, levels, of_ids, of_levels)
        drawn = [self._drawn(document, kinds, number) for number in range(self.sets)]
        return [positions[:used], of_ids, of_levels, *drawn]

    def _drawn(self, document: Rounded, kinds: NDArray[np.int64], number: int) -> NDArray[np.int64]:
        firsts = document.drawn_offsets[number : -1 : self.sets]
        sizes = document.drawn_offsets[number + 1 :: self.sets] - firsts
        offsets = offsets_of(sizes)
        chosen = np.arange(offsets[-1]) + np.repeat(firsts - offsets[:-1], sizes)
        owners = document.drawn_owners[chosen]
        ranks = self._ranks[kinds[owners], document.drawn_ids[chosen]].astype(np.int64)
        order = _by_owner(owners, ranks)
        counts, out = document.counts[chosen][order], np.empty(len(document) + 2 * len(chosen), np.int64)
        used = drawn_records(self.starts, self.draws, offsets, ranks[order], counts, out)
        return out[:used]


def _bytes_of(document: Rounded, records: Sequence[NDArray[np.int64]], writer: Writer) -> bytes:
    if not len(document):
        return b""
    streams = [writer.stream(stream) for stream in records]
    drawn = np.diff(document.drawn_offsets).reshape(len(document), document.sets).sum(0)
    return pack_numbers([len(document.ids), *drawn.tolist(), *map(len, streams[:-1])]) + b"".join(streams)


def _by_owner(owners: NDArray[np.int64], ranks: NDArray[Any]) -> NDArray[np.int64]:
    """Return the order by owners, and of one owner by ranks, of which no two are equal."""
    return np.argsort(owners << 32 | ranks)
