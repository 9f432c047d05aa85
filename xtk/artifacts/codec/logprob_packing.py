"""Signals to bits: what a shard's documents have in common, and the bytes of each document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.artifacts.codec.ans_streams import StreamEncoder, encode_varints
from xtk.artifacts.codec.coding_contexts import NUM_LEVEL_CONTEXTS, first_contexts, logprob_families
from xtk.artifacts.codec.frequent_ids import pack_frequent_ids
from xtk.artifacts.codec.integer_symbols import NUMBER_LIMIT
from xtk.artifacts.codec.logprob_stream_kernels import encode_entries, encode_positions
from xtk.artifacts.codec.position_clusters import FrequentIds, choose_num_clusters, cluster_positions, find_frequent_ids
from xtk.artifacts.codec.quantization import QuantizationTables, QuantizedLogprobs, quantize, sizes_to_offsets
from xtk.artifacts.codec.quantization_levels import NUM_LEVELS
from xtk.artifacts.codec.sample_stream_kernels import encode_samples
from xtk.artifacts.codec.symbol_frequencies import pack_frequencies
from xtk.errors import XtkError
from xtk.tokens.teacher_logprobs import StoredLogprobs


def pack_logprobs(
    documents: Sequence[tuple[StoredLogprobs, NDArray[np.int32]]],
    ids_by_frequency: NDArray[np.int32],
    precision: str,
    num_sample_sets: int,
    num_samples: int,
) -> tuple[bytes, list[bytes]]:
    """Return the tables of a shard, and the bytes of the signal of each of its documents.

    Args:
        documents: the scores of each, and int32 [P], the tokens that stand at its positions.
        ids_by_frequency: int32 [U], all ids, those that come most often first.
        precision: a key of `PRECISIONS`.
        num_sample_sets: R, how many sets of draws each has.
        num_samples: n, of a set.

    Raises:
        ValueError: scores that are not what they should be.
        XtkError: the vocabulary is too wide.
    """
    if 2 * len(ids_by_frequency) > NUMBER_LIMIT:
        raise XtkError(f"a vocabulary of {len(ids_by_frequency):,} ids is too wide to pack", hint="--precision float32")
    grid = QuantizationTables.for_precision(precision)
    whole = [quantize(scores, realised_ids, num_sample_sets, num_samples, grid) for scores, realised_ids in documents]
    ranks = np.empty(len(ids_by_frequency), np.int32)
    ranks[ids_by_frequency] = np.arange(len(ids_by_frequency), dtype=np.int32)
    kinds = _cluster_documents(whole, len(ids_by_frequency))
    favourites = _frequent_ids_of(whole, kinds, ranks)
    recorder = _RecordEncoder(grid, favourites, ranks, num_sample_sets, num_samples)
    records = [recorder.encode(document, own) for document, own in zip(whole, kinds, strict=True)]
    writer = StreamEncoder([stream for streams in records for stream in streams], int(recorder.starts[-1]))
    frequencies = pack_frequencies(writer.frequencies)
    tables = encode_varints([len(frequencies)]) + frequencies + pack_frequent_ids(favourites, ranks)
    return tables, [_document_bytes(document, parts, writer) for document, parts in zip(whole, records, strict=True)]


def _cluster_documents(documents: Sequence[QuantizedLogprobs], width: int) -> list[NDArray[np.int64]]:
    """Return the kinds of the positions of each document."""
    edges = sizes_to_offsets(np.array([len(document) for document in documents], np.int64))
    owners, ids = [np.zeros(0, np.int64)], [np.zeros(0, np.int32)]
    for document, first in zip(documents, edges.tolist(), strict=False):
        owners += [document.entry_positions + first, document.sampled_positions + first]
        ids += [document.ids, document.sampled_ids]
    owner, flat = np.concatenate(owners), np.concatenate(ids)
    flat = flat[np.argsort(owner, kind="stable")]
    offsets = sizes_to_offsets(np.bincount(owner, minlength=int(edges[-1])))
    return np.split(cluster_positions(offsets, flat, choose_num_clusters(len(flat)), width), edges[1:-1])


def _frequent_ids_of(
    documents: Sequence[QuantizedLogprobs], kinds: Sequence[NDArray[np.int64]], ranks: NDArray[np.int32]
) -> FrequentIds:
    of_ids, ids, heights = [np.zeros(0, np.int64)], [np.zeros(0, np.int32)], [np.zeros(0, np.int64)]
    for document, own in zip(documents, kinds, strict=True):
        finite = np.where(document.levels < NUM_LEVELS, document.levels, 0)
        floors = np.zeros(len(document), np.int64)
        np.maximum.at(floors, document.entry_positions, finite)
        of_ids += [own[document.entry_positions], own[document.sampled_positions]]
        ids += [document.ids, document.sampled_ids]
        heights += [floors[document.entry_positions] - finite, np.zeros(len(document.sampled_ids), np.int64)]
    return find_frequent_ids(np.concatenate(of_ids), np.concatenate(ids), np.concatenate(heights), ranks)


class _RecordEncoder:
    """Turns documents into records.

    Args:
        grid: the levels.
        favourites: of the kinds.
        ranks: int32 [U], of all ids.
        num_sample_sets: R.
        num_samples: n.
    """

    def __init__(
        self, grid: QuantizationTables, favourites: FrequentIds, ranks: NDArray[np.int32], sets: int, draws: int
    ) -> None:
        self.grid, self.num_sample_sets, self.num_samples = grid, sets, draws
        self.starts = first_contexts(logprob_families(favourites.num_clusters, sets))
        # Of every kind and id, the rank among the ids of the kind, and the class of its levels.
        self._ranks = np.diff(favourites.cluster_starts)[:, None].astype(np.int32) + ranks
        self._classes = np.full(self._ranks.shape, NUM_LEVEL_CONTEXTS - 1, np.int8)
        owners = np.repeat(np.arange(favourites.num_clusters), np.diff(favourites.cluster_starts))
        self._ranks[owners, favourites.ids] = np.arange(len(owners)) - favourites.cluster_starts[owners]
        self._classes[owners, favourites.ids] = favourites.level_contexts

    def encode(self, document: QuantizedLogprobs, kinds: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Return the records of each stream of a document."""
        places = kinds[document.entry_positions], document.ids
        order = _owner_order(document.entry_positions, self._ranks[places])
        ranks, classes = (table[places][order].astype(np.int64) for table in (self._ranks, self._classes))
        levels = document.levels[order]
        floors, positions = np.empty(len(document), np.int64), np.empty(6 * len(document), np.int64)
        used = encode_positions(
            self.starts, kinds, document.observed_odds, document.entropies, document.tail_levels, document.offsets,
                levels,
            self.grid.level_table, self.grid.steps, floors, positions,
        )  # fmt: skip
        of_ids, of_levels = np.empty(len(levels), np.int64), np.empty(len(levels), np.int64)
        encode_entries(self.starts, document.offsets, floors, ranks, classes, levels, of_ids, of_levels)
        drawn = [self._encode_samples(document, kinds, number) for number in range(self.num_sample_sets)]
        return [positions[:used], of_ids, of_levels, *drawn]

    def _encode_samples(self, document: QuantizedLogprobs, kinds: NDArray[np.int64], number: int) -> NDArray[np.int64]:
        firsts = document.sampled_offsets[number : -1 : self.num_sample_sets]
        sizes = document.sampled_offsets[number + 1 :: self.num_sample_sets] - firsts
        offsets = sizes_to_offsets(sizes)
        chosen = np.arange(offsets[-1]) + np.repeat(firsts - offsets[:-1], sizes)
        owners = document.sampled_positions[chosen]
        ranks = self._ranks[kinds[owners], document.sampled_ids[chosen]].astype(np.int64)
        order = _owner_order(owners, ranks)
        counts, out = document.sample_counts[chosen][order], np.empty(len(document) + 2 * len(chosen), np.int64)
        used = encode_samples(self.starts, self.num_samples, offsets, ranks[order], counts, out)
        return out[:used]


def _document_bytes(document: QuantizedLogprobs, records: Sequence[NDArray[np.int64]], writer: StreamEncoder) -> bytes:
    if not len(document):
        return b""
    streams = [writer.encode(stream) for stream in records]
    drawn = np.diff(document.sampled_offsets).reshape(len(document), document.num_sample_sets).sum(0)
    return encode_varints([len(document.ids), *drawn.tolist(), *map(len, streams[:-1])]) + b"".join(streams)


def _owner_order(owners: NDArray[np.int64], ranks: NDArray[Any]) -> NDArray[np.int64]:
    """Return the order by owners, and of one owner by ranks, of which no two are equal."""
    return np.argsort(owners << 32 | ranks)
