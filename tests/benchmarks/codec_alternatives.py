"""Other encodings of exact ids and their log-probabilities, in bytes per position, of the same scores.

Sizes are entropies under the frequencies of the scores themselves, without the size of tables, so that layouts can be
compared; and real bytes where an encoding is a program. `bench_codec.py` measures `PackedCodec` itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from xtk.cache.codec.position_clusters import cluster_positions, find_frequent_ids
from xtk.cache.codec.quantization_levels import QUANTIZATION_STEPS, level_logprobs, nearest_levels
from xtk.cache.teacher_logprobs import StoredLogprobs
from xtk.cache.token_ids_by_frequency import VocabularyOrder
from xtk.text.token_sequence import TokenSequence as TokenSequence

Array = NDArray[np.int64]
EDGES = np.array([*range(16), *(start << octave - 1 for octave in range(4, 20) for start in (2, 3))])
RAW = np.array([0] * 16 + [octave - 1 for octave in range(4, 20) for _ in range(2)])


@dataclass(frozen=True)
class Entries:
    """The exact entries of all positions except those of observed tokens, sorted by position, then by id.

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
        owners, ids, logprobs, before, num_positions = [], [], [], [], 0
        for row, scores in rows:
            owner = np.repeat(np.arange(len(scores)), np.diff(scores.offsets))
            not_observed = scores.ids != row.ids[scores.positions][owner]
            owners.append(owner[not_observed] + num_positions)
            ids.append(scores.ids[not_observed].astype(np.int64))
            logprobs.append(scores.logprobs[not_observed])
            before.append(row.ids[scores.positions - 1].astype(np.int64))
            num_positions += len(scores)
        return cls(*(np.concatenate(arrays) for arrays in (owners, ids, logprobs, before)), positions=num_positions)

    @cached_property
    def levels(self) -> Array:
        """Quantization levels of the log-probabilities, in standard precision."""
        return nearest_levels(self.logprobs, level_logprobs(QUANTIZATION_STEPS["standard"]))

    @cached_property
    def heights(self) -> Array:
        """Number of levels of each entry above the least likely entry of its position."""
        floors = np.zeros(self.positions, np.int64)
        np.maximum.at(floors, self.owners, self.levels)
        return floors[self.owners] - self.levels

    @cached_property
    def offsets(self) -> Array:
        """Offsets of positions into the entries: [P + 1]."""
        return np.concatenate([[0], np.cumsum(np.bincount(self.owners, minlength=self.positions))])


def alternative_encodings(
    rows: Sequence[tuple[TokenSequence, StoredLogprobs]], ranks: VocabularyOrder
) -> Iterator[tuple[str, float, float]]:
    """Yield encodings with their bytes per position: of ids, and of log-probabilities."""
    entries = Entries.of(rows)
    rank_of = np.empty(len(ranks.ids_by_frequency), np.int64)
    rank_of[ranks.ids_by_frequency] = np.arange(len(ranks.ids_by_frequency))
    ranks_of_entries, num_entries = rank_of[entries.ids], len(entries.ids)
    per_position = 1 / 8 / entries.positions
    yield "int32 and float32", 4.0 * num_entries * 8 * per_position, 4.0 * num_entries * 8 * per_position
    yield "the same, zstd -19", *(8 * per_position * size for size in zstd(entries))
    bits = int(len(ranks.ids_by_frequency) - 1).bit_length()
    yield f"{bits} bits and 8 bits", bits * num_entries * per_position, 8 * num_entries * per_position
    level_bytes = entropy(entries.levels) * per_position
    yield "gaps of ids, Rice", rice(gaps(entries.owners, entries.ids)[0]) * per_position, level_bytes
    yield "ranks, Elias-Fano", elias_fano(entries, len(ranks.ids_by_frequency)) * per_position, level_bytes
    rank_gaps, order = gaps(entries.owners, ranks_of_entries)
    yield "gaps of ranks, Rice", rice(rank_gaps) * per_position, level_bytes
    height_bytes = entropy(entries.heights[order]) * per_position
    yield "gaps of ranks, entropy", number_bits(rank_gaps) * per_position, level_bytes
    yield "the same, levels from the floor", number_bits(rank_gaps) * per_position, height_bytes
    context = octave(
        np.where(is_first(entries.owners[order]), 0, np.concatenate([[0], ranks_of_entries[order][:-1] + 1]))
    )
    yield "the same, gaps by the rank before", number_bits(rank_gaps, context) * per_position, height_bytes
    yield "the same as bytes, zstd -19", *(8 * per_position * size for size in zstd_columns(entries, rank_gaps, order))
    yield "most likely first (negative)", most_likely_first(entries, ranks_of_entries) * per_position, 0.0
    yield (
        "successors of the token before apart (negative)",
        successors(entries, rows, ranks_of_entries) * per_position,
        height_bytes,
    )
    for clusters in (1, 8, 64):
        gap, level = clustered(entries, rank_of.astype(np.int32), clusters)
        yield f"{clusters} clusters with lists of frequent ids", gap[0] * per_position, level[0] * per_position
        if clusters == 64:
            yield "the same, levels by class of frequent id", gap[0] * per_position, level[1] * per_position
            yield "the same in Huffman codes (negative)", gap[1] * per_position, level[2] * per_position


def entropy(symbols: Array, contexts: Array | None = None) -> float:
    """Return the bits of symbols, coded with their own frequencies in their contexts."""
    contexts = np.zeros(len(symbols), np.int64) if contexts is None else contexts
    pairs = np.unique(contexts * (int(symbols.max()) + 1) + symbols, return_counts=True)[1]
    groups = np.unique(contexts, return_counts=True)[1]
    return float((groups * np.log2(groups)).sum() - (pairs * np.log2(pairs)).sum())


def huffman(symbols: Array, contexts: Array) -> float:
    """Return the bits of symbols in Huffman codes, one code per context."""
    import heapq

    num_bits = 0
    for context in np.unique(contexts):
        heap = sorted(np.unique(symbols[contexts == context], return_counts=True)[1].tolist())
        while len(heap) > 1:
            sum_of_two = heapq.heappop(heap) + heapq.heappop(heap)
            num_bits += sum_of_two
            heapq.heappush(heap, sum_of_two)
    return float(num_bits)


def classes(numbers: Array) -> tuple[Array, Array]:
    """Return the class of each number, and the number of raw bits that select it within its class."""
    number_class = np.searchsorted(EDGES, numbers, side="right") - 1
    return number_class, RAW[number_class]


def number_bits(numbers: Array, contexts: Array | None = None) -> float:
    """Return the bits of numbers that are coded as classes and raw bits."""
    number_class, raw = classes(numbers)
    return entropy(number_class, contexts) + float(raw.sum())


def octave(numbers: Array) -> Array:
    """Return 0 for 0, 1 for 1, 2 for 2 and 3, 3 for 4 to 7, and so on."""
    return np.where(numbers > 0, np.floor(np.log2(np.maximum(numbers, 1))).astype(np.int64) + 1, 0)


def is_first(owners: Array) -> NDArray[np.bool_]:
    """Return whether each entry is the first of its owner."""
    return np.concatenate([[True], owners[1:] != owners[:-1]])


def gaps(owners: Array, numbers: Array) -> tuple[Array, Array]:
    """Return the gaps between the sorted numbers of each owner, and the indices that sort them."""
    order = np.lexsort((numbers, owners))
    owner, number = owners[order], numbers[order]
    before = np.where(is_first(owner), -1, np.concatenate([[0], number[:-1]]))
    return number - before - 1, order


def rice(numbers: Array) -> float:
    """Return the bits of numbers in the best Rice code."""
    return float(min(len(numbers) * (1 + bits) + (numbers >> bits).sum() for bits in range(20)))


def elias_fano(entries: Entries, width: int) -> float:
    """Return the bits of sets of ids in Elias-Fano coding."""
    sizes = np.diff(entries.offsets)
    sizes = sizes[sizes > 0]
    low = np.maximum(0, np.floor(np.log2(width / sizes)))
    return float((sizes * low + 2 * sizes).sum())


def zstd(entries: Entries) -> tuple[int, int]:
    """Return the bytes of gaps of ids, and of log-probabilities as float16, as columns compressed with zstd."""
    codec = pa.Codec("zstd", compression_level=19)
    numbers, order = gaps(entries.owners, entries.ids)
    return len(codec.compress(numbers.astype(np.int32).tobytes())), len(
        codec.compress(entries.logprobs[order].astype(np.float16).tobytes())
    )


def zstd_columns(entries: Entries, numbers: Array, order: Array) -> tuple[int, int]:
    """Return the bytes of gaps of ranks, one column for each of their bytes, and of heights, with zstd."""
    codec = pa.Codec("zstd", compression_level=19)
    columns = [(numbers >> shift & 255).astype(np.uint8).tobytes() for shift in (0, 8, 16)]
    levels = np.concatenate([entries.heights[order], entries.offsets[1:] - entries.offsets[:-1]]).astype(np.uint8)
    return sum(len(codec.compress(column)) for column in columns), len(codec.compress(levels.tobytes()))


def most_likely_first(entries: Entries, ranks: Array) -> float:
    """Return the bits of entries sorted by level, then by rank.

    An entry is one symbol of its level and rank, in the context of the rank before.
    """
    order = np.lexsort((ranks, entries.levels, entries.owners))
    owner, level, rank = entries.owners[order], entries.levels[order], ranks[order]
    first_entry = is_first(owner)
    drop = level - np.where(first_entry, 0, np.concatenate([[0], level[:-1]]))
    before = np.where(first_entry, 0, np.concatenate([[0], rank[:-1]]) + 1)
    number_class, raw = classes(rank - np.where((drop == 0) & ~first_entry, before, 0))
    return entropy(np.minimum(drop, 63) * 64 + number_class, octave(before) + 32 * first_entry) + float(raw.sum())


def successors(entries: Entries, rows: Sequence[tuple[TokenSequence, StoredLogprobs]], ranks: Array) -> float:
    """Return the bits if successors of the last token are coded by their rank among its successors.

    Successors of a token are the ids that follow it anywhere in the documents.
    """
    width = int(max(row.ids.max() for row, _ in rows)) + int(entries.ids.max()) + 2
    pairs = np.concatenate([row.ids[:-1].astype(np.int64) * width + row.ids[1:] for row, _ in rows])
    pair_ids, counts = np.unique(pairs, return_counts=True)
    order = np.lexsort((pair_ids, -counts, pair_ids // width))
    sorted_pairs = pair_ids[order]
    starts = np.searchsorted(sorted_pairs // width, sorted_pairs // width)
    successor_ranks = np.empty(len(pair_ids), np.int64)
    successor_ranks[order] = np.arange(len(pair_ids)) - starts
    entry_pairs = entries.before[entries.owners] * width + entries.ids
    indices = np.minimum(np.searchsorted(pair_ids, entry_pairs), len(pair_ids) - 1)
    is_successor = pair_ids[indices] == entry_pairs
    offset = 1 << 18
    numbers = np.where(is_successor, successor_ranks[indices], offset + ranks)
    order = np.lexsort((numbers, entries.owners))
    owner, number, hits = entries.owners[order], numbers[order], is_successor[order]
    is_new_sequence = is_first(owner * 2 + ~hits)
    before = np.where(is_new_sequence, np.where(hits, -1, offset - 1), np.concatenate([[0], number[:-1]]))
    number_class, raw = classes(number - before - 1)
    contexts = (
        octave(np.where(is_new_sequence, 0, before + 1 - np.where(hits, 0, offset))) + 32 * hits + 64 * is_first(owner)
    )
    return entropy(number_class + 64 * hits, contexts) + float(raw.sum())


def clustered(entries: Entries, ranks: NDArray[np.int32], num_clusters: int) -> tuple[list[float], list[float]]:
    """Return the bits if positions are clustered and clusters have frequent ids, including clusters and floors.

    Returns:
        Of ids: entropy, Huffman. Of levels: entropy, entropy by class of frequent id, Huffman by class.
    """
    width = len(ranks)
    cluster_of_position = cluster_positions(entries.offsets, entries.ids.astype(np.int32), num_clusters, width)
    frequent = find_frequent_ids(
        cluster_of_position[entries.owners], entries.ids.astype(np.int32), entries.heights, ranks
    )
    sizes = np.diff(frequent.cluster_starts)
    owners = np.repeat(np.arange(len(sizes)), sizes)
    table = sizes[:, None] + ranks
    table[owners, frequent.ids] = np.arange(len(owners)) - frequent.cluster_starts[owners]
    levels = np.full(table.shape, 7, np.int64)
    levels[owners, frequent.ids] = frequent.level_contexts
    cluster_of_entry = cluster_of_position[entries.owners]
    numbers = table[cluster_of_entry, entries.ids]
    gap_numbers, order = gaps(entries.owners, numbers)
    context = octave(np.where(is_first(entries.owners[order]), 0, np.concatenate([[0], numbers[order][:-1] + 1])))
    gap, raw = classes(gap_numbers)
    floors = np.zeros(entries.positions, np.int64)
    np.maximum.at(floors, entries.owners, entries.levels)
    position_bits = entropy(cluster_of_position, np.concatenate([[0], cluster_of_position[:-1]])) + entropy(
        floors, cluster_of_position
    )
    heights, level_class = entries.heights[order], levels[cluster_of_entry, entries.ids][order]
    return (
        [position_bits + entropy(gap, context) + raw.sum(), position_bits + huffman(gap, context) + raw.sum()],
        [entropy(heights), entropy(heights, level_class), huffman(heights, level_class)],
    )
