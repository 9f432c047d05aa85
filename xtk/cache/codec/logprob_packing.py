"""Encoding of stored log-probabilities: the codec tables of a shard and the bytes of each document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.cache.codec.entropy_coded_streams import StreamEncoder, encode_varints
from xtk.cache.codec.frequent_token_tables import pack_frequent_ids
from xtk.cache.codec.integer_coding import NUMBER_LIMIT
from xtk.cache.codec.logprob_encoding_numba import encode_entries, encode_positions
from xtk.cache.codec.position_clusters import FrequentIds, choose_num_clusters, cluster_positions, find_frequent_ids
from xtk.cache.codec.quantization import QuantizationTables, QuantizedLogprobs, quantize
from xtk.cache.codec.quantization_levels import NUM_LEVELS, QUANTIZATION_STEPS
from xtk.cache.codec.sampled_token_coding_numba import encode_samples
from xtk.cache.codec.symbol_frequencies import pack_frequencies
from xtk.cache.codec.symbol_probability_contexts import NUM_LEVEL_CONTEXTS, first_contexts, logprob_families
from xtk.cache.teacher_logprobs import StoredLogprobs, sizes_to_offsets
from xtk.errors import XtkError


def pack_logprobs(
    # the log-probabilities of each document, and int32 [P], the observed tokens at its positions
    documents: Sequence[tuple[StoredLogprobs, NDArray[np.int32]]],
    ids_by_frequency: NDArray[np.int32],  # int32 [U], all ids, the most frequent first
    precision: str,  # a key of `QUANTIZATION_STEPS`
    num_sample_sets: int,  # R, sample sets per position
    num_samples: int,  # n, samples per set
    has_sample_logprobs: bool,  # whether to store log-probabilities of sampled ids
) -> tuple[bytes, list[bytes]]:
    """Return the codec tables of a shard, and the encoded log-probabilities of each of its documents."""
    if 2 * len(ids_by_frequency) > NUMBER_LIMIT:
        raise XtkError(
            f"the teacher's vocabulary has {len(ids_by_frequency):,} token ids; this --precision supports at most "
            f"{NUMBER_LIMIT // 2:,}",
            hint="use --precision float32",
        )
    grid = QuantizationTables.for_precision(precision)
    depth_step = QUANTIZATION_STEPS[precision].depth_step if has_sample_logprobs and num_sample_sets else 0.0
    whole = [
        quantize(scores, observed_ids, num_sample_sets, num_samples, grid, depth_step)
        for scores, observed_ids in documents
    ]
    ranks = np.empty(len(ids_by_frequency), np.int32)
    ranks[ids_by_frequency] = np.arange(len(ids_by_frequency), dtype=np.int32)
    clusters = _cluster_documents(whole, len(ids_by_frequency))
    frequent_ids = _frequent_ids_of(whole, clusters, ranks)
    families = logprob_families(frequent_ids.num_clusters, num_sample_sets, has_depths=has_sample_logprobs)
    recorder = _RecordEncoder(grid, frequent_ids, ranks, families, num_sample_sets, num_samples)
    records = [recorder.encode(document, own) for document, own in zip(whole, clusters, strict=True)]
    writer = StreamEncoder([stream for streams in records for stream in streams], int(recorder.starts[-1]))
    frequencies = pack_frequencies(writer.frequencies)
    tables = encode_varints([len(frequencies)]) + frequencies + pack_frequent_ids(frequent_ids, ranks)
    return tables, [_document_bytes(document, parts, writer) for document, parts in zip(whole, records, strict=True)]


def _cluster_documents(documents: Sequence[QuantizedLogprobs], width: int) -> list[NDArray[np.int64]]:
    """Return the cluster of each position of each document."""
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
    documents: Sequence[QuantizedLogprobs], clusters: Sequence[NDArray[np.int64]], ranks: NDArray[np.int32]
) -> FrequentIds:
    of_ids, ids, heights = [np.zeros(0, np.int64)], [np.zeros(0, np.int32)], [np.zeros(0, np.int64)]
    for document, own in zip(documents, clusters, strict=True):
        finite = np.where(document.levels < NUM_LEVELS, document.levels, 0)
        floors = np.zeros(len(document), np.int64)
        np.maximum.at(floors, document.entry_positions, finite)
        of_ids += [own[document.entry_positions], own[document.sampled_positions]]
        ids += [document.ids, document.sampled_ids]
        heights += [floors[document.entry_positions] - finite, np.zeros(len(document.sampled_ids), np.int64)]
    return find_frequent_ids(np.concatenate(of_ids), np.concatenate(ids), np.concatenate(heights), ranks)


class _RecordEncoder:
    """Converts quantized documents into records."""

    def __init__(
        self,
        grid: QuantizationTables,
        frequent_ids: FrequentIds,
        ranks: NDArray[np.int32],  # int32 [U], frequency rank of each id
        families: list[int],  # the number of contexts of each family
        sets: int,  # R, sample sets
        num_samples: int,  # n, samples per set
    ) -> None:
        self.grid, self.num_sample_sets, self.num_samples = grid, sets, num_samples
        self.starts = first_contexts(families)
        # [C, U]: rank of each id within each cluster, and the context of its levels.
        self._ranks = np.diff(frequent_ids.cluster_starts)[:, None].astype(np.int32) + ranks
        self._classes = np.full(self._ranks.shape, NUM_LEVEL_CONTEXTS - 1, np.int8)
        owners = np.repeat(np.arange(frequent_ids.num_clusters), np.diff(frequent_ids.cluster_starts))
        self._ranks[owners, frequent_ids.ids] = np.arange(len(owners)) - frequent_ids.cluster_starts[owners]
        self._classes[owners, frequent_ids.ids] = frequent_ids.level_contexts

    def encode(self, document: QuantizedLogprobs, clusters: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Return the records of each stream of a document."""
        places = clusters[document.entry_positions], document.ids
        order = _owner_order(document.entry_positions, self._ranks[places])
        ranks, classes = (table[places][order].astype(np.int64) for table in (self._ranks, self._classes))
        levels = document.levels[order]
        floors, positions = np.empty(len(document), np.int64), np.empty(6 * len(document), np.int64)
        used = encode_positions(
            self.starts, clusters, document.observed_odds, document.entropies, document.tail_levels, document.offsets,
                levels,
            self.grid.level_table, self.grid.steps, floors, positions,
        )  # fmt: skip
        of_ids, of_levels = np.empty(len(levels), np.int64), np.empty(len(levels), np.int64)
        encode_entries(self.starts, document.offsets, floors, ranks, classes, levels, of_ids, of_levels)
        sampled = [self._encode_samples(document, clusters, number) for number in range(self.num_sample_sets)]
        return [positions[:used], of_ids, of_levels, *sampled]

    def _encode_samples(
        self, document: QuantizedLogprobs, clusters: NDArray[np.int64], number: int
    ) -> NDArray[np.int64]:
        firsts = document.sampled_offsets[number : -1 : self.num_sample_sets]
        sizes = document.sampled_offsets[number + 1 :: self.num_sample_sets] - firsts
        offsets = sizes_to_offsets(sizes)
        chosen = np.arange(offsets[-1]) + np.repeat(firsts - offsets[:-1], sizes)
        owners = document.sampled_positions[chosen]
        places = clusters[owners], document.sampled_ids[chosen]
        ranks, classes = (table[places].astype(np.int64) for table in (self._ranks, self._classes))
        order = _owner_order(owners, ranks)
        counts, depths = (
            values[chosen][order] if len(values) else values
            for values in (document.sample_counts, document.sampled_depths)
        )
        out = np.empty(len(document) + 3 * len(chosen), np.int64)
        used = encode_samples(self.starts, self.num_samples, offsets, ranks[order], counts, classes[order], depths, out)
        return out[:used]


def _document_bytes(document: QuantizedLogprobs, records: Sequence[NDArray[np.int64]], writer: StreamEncoder) -> bytes:
    if not len(document):
        return b""
    streams = [writer.encode(stream) for stream in records]
    sampled = np.diff(document.sampled_offsets).reshape(len(document), document.num_sample_sets).sum(0)
    return encode_varints([len(document.ids), *sampled.tolist(), *map(len, streams[:-1])]) + b"".join(streams)


def _owner_order(owners: NDArray[np.int64], ranks: NDArray[Any]) -> NDArray[np.int64]:
    """Return the order by owner, then by rank; (owner, rank) pairs are distinct."""
    return np.argsort(owners << 32 | ranks)
