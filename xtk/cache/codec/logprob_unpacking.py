"""Decoding of the log-probabilities of the documents of a shard."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtk.cache.codec.entropy_coded_streams import decode_varints, decode_varints_into, split_bytes
from xtk.cache.codec.frequent_token_tables import unpack_frequent_ids
from xtk.cache.codec.integer_coding import NUM_SYMBOLS
from xtk.cache.codec.logprob_decoding_numba import ShardTables, decode_logprobs
from xtk.cache.codec.quantization import QuantizationTables, entry_owners
from xtk.cache.codec.quantization_levels import QUANTIZATION_STEPS
from xtk.cache.codec.sampled_token_coding_numba import append_samples, decode_samples
from xtk.cache.codec.symbol_frequencies import make_decoding_tables, unpack_frequencies
from xtk.cache.codec.symbol_probability_contexts import (
    GAP,
    NEXT_GAP_STATE,
    SAMPLED_GAP,
    first_contexts,
    logprob_families,
)
from xtk.cache.teacher_logprobs import StoredLogprobs, TeacherLogprobs, sizes_to_offsets
from xtk.errors import CorruptError
from xtk.files.arrow_validation import corrupt_shard_error
from xtk.numba_kernel import numba_kernel

NUM_LOGPROB_STREAMS = 3


class DecodingParameters(NamedTuple):
    """Parameters of a shard for decoding its documents."""

    shard_tables: ShardTables
    level_table: NDArray[np.float64]  # [3, LEVEL_TABLE_SIZE]: log-probability, probability, product, of each level
    level_logprobs: NDArray[np.float32]  # [LEVEL_TABLE_SIZE], the log-probabilities as float32
    steps: tuple[float, float, int]  # odds step and entropy step in nats, and the number of odds steps per nat
    count_logs: NDArray[np.float64]  # [n + 1], log(max(i, 1)) for i from 0 to n, the samples per set
    depth_step: float  # of the depths of sampled ids, nats


class LogprobDecoder:
    """Decodes the log-probabilities of the documents of a shard."""

    def __init__(
        self,
        tables: bytes | memoryview,
        ids_by_frequency: NDArray[np.int32],  # int32 [U], all ids, the most frequent first
        precision: str,  # a key of `QUANTIZATION_STEPS`
        num_sample_sets: int,  # R, sample sets per position
        num_samples: int,  # n, samples per set
        has_sample_logprobs: bool,  # whether sampled ids have log-probabilities
    ) -> None:
        self._sets, self._grid, self._precision = (
            num_sample_sets,
            QuantizationTables.for_precision(precision),
            precision,
        )
        logs = np.log(np.maximum(np.arange(num_samples + 1), 1).astype(np.float64))
        (size,), at = decode_varints(tables, 1)
        frequencies, frequent_ids = split_bytes(tables, at, [size])
        frequent_id_starts, ids = unpack_frequent_ids(frequent_ids, ids_by_frequency)
        families = logprob_families(len(frequent_id_starts) - 1, num_sample_sets, has_depths=has_sample_logprobs)
        starts, self._has_sample_logprobs = first_contexts(families), has_sample_logprobs
        depth_step = QUANTIZATION_STEPS[precision].depth_step
        following = np.zeros((int(starts[-1]), NUM_SYMBOLS), np.int64)
        for family in (GAP, SAMPLED_GAP) if num_sample_sets else (GAP,):
            following[starts[family] : starts[family + 1]] = NEXT_GAP_STATE
        slots = make_decoding_tables(unpack_frequencies(frequencies, len(following)), following)
        shared = ShardTables(slots, starts, ids, frequent_id_starts, ids_by_frequency)
        self._parameters = DecodingParameters(
            shared, self._grid.level_table, self._grid.logprobs, self._grid.steps, logs, depth_step
        )

    def decode_teacher_logprobs(
        self,
        packed: bytes | memoryview,
        observed_ids: NDArray[np.int32],  # int32 [P], the observed tokens at its positions
        positions: NDArray[np.int32],  # int32 [P]
        sample_set: int | None,  # number of the sample set, modulo R. None: only exact entries.
    ) -> TeacherLogprobs:
        """Return a document's log-probabilities with one sample set, or with none."""
        offsets, ids, logprobs, token_logprobs, of_positions, exact, whole = decode_document(
            np.frombuffer(packed, np.uint8),
            self._parameters,
            observed_ids,
            -1 if sample_set is None else sample_set,
            self._sets,
        )
        if not whole:
            raise _corruption_error()
        sampled = self._sets > 0 and sample_set is not None
        tail_mass, observed_logprobs, entropy = of_positions
        of_entries = offsets, ids, logprobs
        return TeacherLogprobs(
            positions,
            *of_entries,
            tail_mass,
            observed_logprobs,
            entropy,
            exact if sampled else None,
            precision=self._precision,
            token_logprobs=token_logprobs if sampled and self._has_sample_logprobs else None,
        )

    def decode_stored_logprobs(
        self, packed: bytes | memoryview, observed_ids: NDArray[np.int32], positions: NDArray[np.int32]
    ) -> StoredLogprobs:
        """Return all stored log-probabilities of a document; arguments as for `decode_teacher_logprobs`."""
        content = np.frombuffer(packed, np.uint8)
        sizes, bounds, whole = read_stream_layout(
            content, len(positions), self._sets, len(self._parameters.shard_tables.ids_by_frequency)
        )
        if not whole:
            raise _corruption_error()
        tables, grid, num_samples = self._parameters.shard_tables, self._grid, len(self._parameters.count_logs) - 1
        offsets, ids, logprobs, clusters, of_positions, whole = decode_logprobs(
            content,
            bounds,
            tables,
            grid.level_table,
            grid.logprobs,
            grid.steps,
            observed_ids,
            len(positions) + int(sizes[0]),
        )
        sets = []
        for stream, size in enumerate(sizes[1:].tolist(), NUM_LOGPROB_STREAMS):
            if whole:
                *sampled, whole = decode_samples(
                    content, bounds[stream], bounds[stream + 1], tables, clusters, num_samples, size
                )
                sets.append(sampled)
        if not whole:
            raise _corruption_error()
        order = np.lexsort((ids, entry_owners(offsets)))
        sampled_sizes = np.array([np.diff(part[0]) for part in sets], np.int64).reshape(len(sets), len(positions)).T
        # Streams are ordered by set, then position; StoredLogprobs by position, then set.
        places = [entry_owners(part[0]) * self._sets + number for number, part in enumerate(sets)]
        place, sampled_ids, counts, depths = (
            np.concatenate([np.zeros(0, kind), *parts])
            for kind, parts in (
                (np.int64, places),
                (np.int32, [part[1] for part in sets]),
                (np.int32, [part[2] for part in sets]),
                (np.int32, [part[3] for part in sets]),
            )
        )
        sampled_order, sample_logprobs = np.lexsort((sampled_ids, place)), None
        if self._has_sample_logprobs:
            with np.errstate(divide="ignore"):
                remainders = np.log(of_positions[0].astype(np.float64))[place // max(self._sets, 1)]
            sample_logprobs = (remainders - depths * self._parameters.depth_step).astype(np.float32)[sampled_order]
        return StoredLogprobs(
            positions=positions,
            offsets=offsets,
            ids=ids[order],
            logprobs=logprobs[order],
            sample_offsets=sizes_to_offsets(sampled_sizes.ravel()),
            sample_ids=sampled_ids[sampled_order],
            sample_counts=counts[sampled_order],
            remainder_mass=of_positions[0],
            observed_logprobs=of_positions[1],
            entropy=of_positions[2],
            sample_logprobs=sample_logprobs,
        )


def _corruption_error() -> CorruptError:
    return corrupt_shard_error("its log-probabilities cannot be decoded")


@numba_kernel
def read_stream_layout(
    packed: NDArray[np.uint8], positions: int, num_sample_sets: int, vocab_size: int
) -> tuple[Any, Any, bool]:
    """Decode the sizes at the front of a document's bytes.

    Returns:
        sizes int64 [1 + R]: number of exact ids, without observed tokens, and number of ids of each sample set;
        bounds int64 [streams + 1]: start of each stream and end of the last one; and whether the sizes are valid.
    """
    streams = NUM_LOGPROB_STREAMS + num_sample_sets
    numbers, bounds = np.zeros(1 + num_sample_sets + streams - 1, np.int64), np.zeros(streams + 1, np.int64)
    sizes = numbers[: 1 + num_sample_sets]
    if positions == 0 and len(packed) == 0:
        return sizes, bounds, True
    at = decode_varints_into(packed, numbers)
    bounds[0], bounds[streams] = at, len(packed)
    for stream in range(1, streams):
        bounds[stream] = bounds[stream - 1] + numbers[num_sample_sets + stream]
    return sizes, bounds, at >= 0 and bounds[streams - 1] <= len(packed) and sizes.max() <= positions * vocab_size


@numba_kernel
def decode_document(
    packed: NDArray[np.uint8],
    parameters: DecodingParameters,
    observed_ids: NDArray[np.int32],  # [P]
    sample_set: int,  # number of the sample set, modulo R. Below 0: none.
    num_sample_sets: int,
) -> tuple[Any, Any, Any, Any, Any, Any, bool]:
    """Decode a document with one sample set, or with none.

    Returns:
        offsets int64 [P + 1], ids int32 [E], logprobs float32 [E], token_logprobs float32 [E] (empty if they are not
        stored); float32 [3, P]: remainder mass, log-probability of the observed token, entropy; int64 [P], number of
        exact entries of each position; and whether the bytes are valid. If not, the arrays are meaningless.
    """
    tables, grid, values, steps, logs, depth_step = parameters
    sizes, bounds, whole = read_stream_layout(packed, len(observed_ids), num_sample_sets, len(tables.ids_by_frequency))
    if not whole:
        sizes[:], bounds[:] = 0, 0
    offsets, ids, logprobs, clusters, of_positions, intact = decode_logprobs(
        packed, bounds, tables, grid, values, steps, observed_ids, len(observed_ids) + sizes[0]
    )
    whole, exact, token_logprobs = whole and intact, np.diff(offsets), np.empty(0, np.float32)
    if whole and num_sample_sets and sample_set >= 0:
        number = sample_set % num_sample_sets
        first, stop = bounds[NUM_LOGPROB_STREAMS + number], bounds[NUM_LOGPROB_STREAMS + number + 1]
        sampled_offsets, sampled_ids, counts, depths, intact = decode_samples(
            packed, first, stop, tables, clusters, len(logs) - 1, sizes[1 + number]
        )
        whole = intact
        if whole:
            offsets, ids, logprobs, token_logprobs = append_samples(
                offsets, ids, logprobs, sampled_offsets, sampled_ids, counts, logs, depths, depth_step, of_positions[0]
            )
    return offsets, ids, logprobs, token_logprobs, of_positions, exact, whole
