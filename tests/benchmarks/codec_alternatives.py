"""Other ways to write down exact ids and their log-probabilities, in bytes a position, on the same scores.

Entropies under the frequencies of the scores themselves, without what tables take: what a coder could reach, so that
layouts compare; and real bytes where a way is a program. `PackedCodec` itself is measured in `bench_codec.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from xtk.artifacts.codec.position_clusters import cluster_positions, find_frequent_ids
from xtk.artifacts.codec.quantization_levels import QUANTIZATION_STEPS, level_logprobs, nearest_levels
from xtk.artifacts.token_ids_by_frequency import VocabularyOrder
from xtk.tokens.teacher_logprobs import StoredLogprobs
from xtk.tokens.token_sequence import TokenSequence as TokenSequence

Array = NDArray[np.int64]
EDGES = np.array([*range(16), *(start << octave - 1 for octave in range(4, 20) for start in (2, 3))])
RAW = np.array([0] * 16 + [octave - 1 for octave in range(4, 20) for _ in range(2)])


@dataclass(frozen=True)
class Entries:
    """The exact entries of all positions but those of the tokens that stand there, by position, then by id.

    Attributes:
        owners: [E], positions.
        ids: [E].
        logprobs: float32 [E].
        before: [P], the token before each position.
        positions: P.
    """

    owners: Array
    ids: Array
    logprobs: NDArray[np.float32]
    before: Array
    positions: int

    @classmethod
    def of(cls, rows: Sequence[tuple[TokenSequence, StoredLogprobs]]) -> Entries:
        """Return the entries of some documents."""
        owners, ids, logprobs, before, first = [], [], [], [], 0
        for row, scores in rows:
            owner = np.repeat(np.arange(len(scores)), np.diff(scores.offsets))
            others = scores.ids != row.ids[scores.positions][owner]
            owners.append(owner[others] + first)
            ids.append(scores.ids[others].astype(np.int64))
            logprobs.append(scores.logprobs[others])
            before.append(row.ids[scores.positions - 1].astype(np.int64))
            first += len(scores)
        return cls(*(np.concatenate(part) for part in (owners, ids, logprobs, before)), positions=first)

    @cached_property
    def levels(self) -> Array:
        """Of the standard precision."""
        return nearest_levels(self.logprobs, level_logprobs(QUANTIZATION_STEPS["standard"]))

    @cached_property
    def heights(self) -> Array:
        """By how many levels each is above the least likely of its position."""
        floors = np.zeros(self.positions, np.int64)
        np.maximum.at(floors, self.owners, self.levels)
        return floors[self.owners] - self.levels

    @cached_property
    def offsets(self) -> Array:
        """[P + 1]."""
        return np.concatenate([[0], np.cumsum(np.bincount(self.owners, minlength=self.positions))])


def alternatives(
    rows: Sequence[tuple[TokenSequence, StoredLogprobs]], ranks: VocabularyOrder
) -> Iterator[tuple[str, float, float]]:
    """Yield ways, and bytes a position: of ids, and of log-probabilities."""
    entries = Entries.of(rows)
    rank_of = np.empty(len(ranks.ids_by_frequency), np.int64)
    rank_of[ranks.ids_by_frequency] = np.arange(len(ranks.ids_by_frequency))
    own, count = rank_of[entries.ids], len(entries.ids)
    share = 1 / 8 / entries.positions
    yield "int32 and float32", 4.0 * count * 8 * share, 4.0 * count * 8 * share
    yield "the same, zstd -19", *(8 * share * size for size in zstd(entries))
    bits = int(len(ranks.ids_by_frequency) - 1).bit_length()
    yield f"{bits} bits and 8 bits", bits * count * share, 8 * count * share
    plain = entropy(entries.levels) * share
    yield "gaps of ids, Rice", rice(gaps(entries.owners, entries.ids)[0]) * share, plain
    yield "ranks, Elias-Fano", elias_fano(entries, len(ranks.ids_by_frequency)) * share, plain
    by_rank, place = gaps(entries.owners, own)
    yield "gaps of ranks, Rice", rice(by_rank) * share, plain
    heights = entropy(entries.heights[place]) * share
    yield "gaps of ranks, entropy", number_bits(by_rank) * share, plain
    yield "the same, levels from the floor", number_bits(by_rank) * share, heights
    state = octave(np.where(first_of(entries.owners[place]), 0, np.concatenate([[0], own[place][:-1] + 1])))
    yield "the same, gaps by the rank before", number_bits(by_rank, state) * share, heights
    yield "the same as bytes, zstd -19", *(8 * share * size for size in zstd_columns(entries, by_rank, place))
    yield "likeliest first (negative)", likeliest_first(entries, own) * share, 0.0
    yield "successors of the token before apart (negative)", successors(entries, rows, own) * share, heights
    for kinds in (1, 8, 64):
        gap, level = with_kinds(entries, rank_of.astype(np.int32), kinds)
        yield f"{kinds} kinds with favourites", gap[0] * share, level[0] * share
        if kinds == 64:
            yield "the same, levels by class of favourite", gap[0] * share, level[1] * share
            yield "the same in Huffman codes (negative)", gap[1] * share, level[2] * share


def entropy(symbols: Array, contexts: Array | None = None) -> float:
    """Return the bits of symbols whose frequencies in their contexts are known."""
    contexts = np.zeros(len(symbols), np.int64) if contexts is None else contexts
    pairs = np.unique(contexts * (int(symbols.max()) + 1) + symbols, return_counts=True)[1]
    groups = np.unique(contexts, return_counts=True)[1]
    return float((groups * np.log2(groups)).sum() - (pairs * np.log2(pairs)).sum())


def huffman(symbols: Array, contexts: Array) -> float:
    """Return the bits of symbols in Huffman codes, one a context."""
    import heapq

    total = 0
    for context in np.unique(contexts):
        heap = sorted(np.unique(symbols[contexts == context], return_counts=True)[1].tolist())
        while len(heap) > 1:
            both = heapq.heappop(heap) + heapq.heappop(heap)
            total += both
            heapq.heappush(heap, both)
    return float(total)


def classes(numbers: Array) -> tuple[Array, Array]:
    """Return the class of each number, and the raw bits that choose within it."""
    found = np.searchsorted(EDGES, numbers, side="right") - 1
    return found, RAW[found]


def number_bits(numbers: Array, contexts: Array | None = None) -> float:
    """Return the bits of numbers as classes and raw bits."""
    found, raw = classes(numbers)
    return entropy(found, contexts) + float(raw.sum())


def octave(numbers: Array) -> Array:
    """Return 0 for 0, 1 for 1, 2 for 2 and 3, and so on."""
    return np.where(numbers > 0, np.floor(np.log2(np.maximum(numbers, 1))).astype(np.int64) + 1, 0)


def first_of(owners: Array) -> NDArray[np.bool_]:
    """Return which entries are the first of their owner."""
    return np.concatenate([[True], owners[1:] != owners[:-1]])


def gaps(owners: Array, numbers: Array) -> tuple[Array, Array]:
    """Return the gaps between the numbers of each owner, rising, and the order that they stand in."""
    order = np.lexsort((numbers, owners))
    owner, number = owners[order], numbers[order]
    before = np.where(first_of(owner), -1, np.concatenate([[0], number[:-1]]))
    return number - before - 1, order


def rice(numbers: Array) -> float:
    """Return the bits of numbers in the best Rice code."""
    return float(min(len(numbers) * (1 + bits) + (numbers >> bits).sum() for bits in range(20)))


def elias_fano(entries: Entries, width: int) -> float:
    """Return the bits of sets of ids in Elias and Fano's form."""
    sizes = np.diff(entries.offsets)
    sizes = sizes[sizes > 0]
    low = np.maximum(0, np.floor(np.log2(width / sizes)))
    return float((sizes * low + 2 * sizes).sum())


def zstd(entries: Entries) -> tuple[int, int]:
    """Return the bytes of gaps of ids, and of log-probabilities as float16, in columns that zstd packs."""
    codec = pa.Codec("zstd", compression_level=19)
    numbers, order = gaps(entries.owners, entries.ids)
    return len(codec.compress(numbers.astype(np.int32).tobytes())), len(
        codec.compress(entries.logprobs[order].astype(np.float16).tobytes())
    )


def zstd_columns(entries: Entries, numbers: Array, order: Array) -> tuple[int, int]:
    """Return the bytes of gaps of ranks, a column for each of their bytes, and of levels from the floor, with zstd."""
    codec = pa.Codec("zstd", compression_level=19)
    columns = [(numbers >> shift & 255).astype(np.uint8).tobytes() for shift in (0, 8, 16)]
    levels = np.concatenate([entries.heights[order], entries.offsets[1:] - entries.offsets[:-1]]).astype(np.uint8)
    return sum(len(codec.compress(column)) for column in columns), len(codec.compress(levels.tobytes()))


def likeliest_first(entries: Entries, ranks: Array) -> float:
    """Return the bits where levels fall, and of one level ranks rise: both in one symbol, by the rank before."""
    order = np.lexsort((ranks, entries.levels, entries.owners))
    owner, level, rank = entries.owners[order], entries.levels[order], ranks[order]
    first = first_of(owner)
    fall = level - np.where(first, 0, np.concatenate([[0], level[:-1]]))
    before = np.where(first, 0, np.concatenate([[0], rank[:-1]]) + 1)
    found, raw = classes(rank - np.where((fall == 0) & ~first, before, 0))
    return entropy(np.minimum(fall, 63) * 64 + found, octave(before) + 32 * first) + float(raw.sum())


def successors(entries: Entries, rows: Sequence[tuple[TokenSequence, StoredLogprobs]], ranks: Array) -> float:
    """Return the bits where an id that follows the token before anywhere in the documents has its place among those."""
    width = int(max(row.ids.max() for row, _ in rows)) + int(entries.ids.max()) + 2
    pairs = np.concatenate([row.ids[:-1].astype(np.int64) * width + row.ids[1:] for row, _ in rows])
    names, times = np.unique(pairs, return_counts=True)
    order = np.lexsort((names, -times, names // width))
    listed = names[order]
    starts = np.searchsorted(listed // width, listed // width)
    places = np.empty(len(names), np.int64)
    places[order] = np.arange(len(names)) - starts
    wanted = entries.before[entries.owners] * width + entries.ids
    at = np.minimum(np.searchsorted(names, wanted), len(names) - 1)
    known = names[at] == wanted
    apart = 1 << 18
    numbers = np.where(known, places[at], apart + ranks)
    order = np.lexsort((numbers, entries.owners))
    owner, number, hit = entries.owners[order], numbers[order], known[order]
    changes = first_of(owner * 2 + ~hit)
    before = np.where(changes, np.where(hit, -1, apart - 1), np.concatenate([[0], number[:-1]]))
    found, raw = classes(number - before - 1)
    contexts = octave(np.where(changes, 0, before + 1 - np.where(hit, 0, apart))) + 32 * hit + 64 * first_of(owner)
    return entropy(found + 64 * hit, contexts) + float(raw.sum())


def with_kinds(entries: Entries, ranks: NDArray[np.int32], kinds: int) -> tuple[list[float], list[float]]:
    """Return the bits where kinds of positions have favourites, kinds and floors among them.

    Returns:
        Of ids: entropy, Huffman. Of levels: entropy, entropy by class of favourite, Huffman by class.
    """
    width = len(ranks)
    found = cluster_positions(entries.offsets, entries.ids.astype(np.int32), kinds, width)
    favourites = find_frequent_ids(found[entries.owners], entries.ids.astype(np.int32), entries.heights, ranks)
    sizes = np.diff(favourites.cluster_starts)
    owners = np.repeat(np.arange(len(sizes)), sizes)
    table = sizes[:, None] + ranks
    table[owners, favourites.ids] = np.arange(len(owners)) - favourites.cluster_starts[owners]
    levels = np.full(table.shape, 7, np.int64)
    levels[owners, favourites.ids] = favourites.level_contexts
    kind = found[entries.owners]
    own = table[kind, entries.ids]
    number, order = gaps(entries.owners, own)
    state = octave(np.where(first_of(entries.owners[order]), 0, np.concatenate([[0], own[order][:-1] + 1])))
    gap, raw = classes(number)
    floors = np.zeros(entries.positions, np.int64)
    np.maximum.at(floors, entries.owners, entries.levels)
    heads = entropy(found, np.concatenate([[0], found[:-1]])) + entropy(floors, found)
    heights, of_class = entries.heights[order], levels[kind, entries.ids][order]
    return (
        [heads + entropy(gap, state) + raw.sum(), heads + huffman(gap, state) + raw.sum()],
        [entropy(heights), entropy(heights, of_class), huffman(heights, of_class)],
    )
