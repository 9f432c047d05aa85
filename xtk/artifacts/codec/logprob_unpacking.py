"""Bits to signals."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from xtk.artifacts.codec.ans_streams import decode_varints, decode_varints_into, split_bytes
from xtk.artifacts.codec.coding_contexts import GAP, NEXT_GAP_STATE, SAMPLED_GAP, first_contexts, logprob_families
from xtk.artifacts.codec.frequent_ids import unpack_frequent_ids
from xtk.artifacts.codec.integer_symbols import NUM_SYMBOLS
from xtk.artifacts.codec.logprob_stream_kernels import ShardTables, decode_logprobs
from xtk.artifacts.codec.quantization import QuantizationTables, entry_owners, sizes_to_offsets
from xtk.artifacts.codec.sample_stream_kernels import append_samples, decode_samples
from xtk.artifacts.codec.symbol_frequencies import make_decoding_tables, unpack_frequencies
from xtk.errors import CorruptError
from xtk.tokens.teacher_logprobs import StoredLogprobs, TeacherLogprobs

NUM_LOGPROB_STREAMS = 3


class DecodingParameters(NamedTuple):
    """What reading a document needs of its shard.

    Attributes:
        shard_tables: of the shard.
        level_table: float64 [3, PLACES]: log-probability, probability, and their product, of each level.
        level_logprobs: float32 [PLACES], log-probabilities again.
        steps: of odds, of entropy; how many of odds are a nat.
        count_logs: float64 [n + 1], logarithms of 0 (as of 1) to n, the draws of a set.
    """

    shard_tables: ShardTables
    level_table: NDArray[np.float64]
    level_logprobs: NDArray[np.float32]
    steps: tuple[float, float, int]
    count_logs: NDArray[np.float64]


class LogprobDecoder:
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
        self,
        tables: bytes | memoryview,
        ids_by_frequency: NDArray[np.int32],
        precision: str,
        num_sample_sets: int,
        num_samples: int,
    ) -> None:
        self._sets, self._grid, self._precision = (
            num_sample_sets,
            QuantizationTables.for_precision(precision),
            precision,
        )
        logs = np.log(np.maximum(np.arange(num_samples + 1), 1).astype(np.float64))
        (size,), at = decode_varints(tables, 1)
        frequencies, favourites = split_bytes(tables, at, [size])
        favourite_starts, ids = unpack_frequent_ids(favourites, ids_by_frequency)
        starts = first_contexts(logprob_families(len(favourite_starts) - 1, num_sample_sets))
        following = np.zeros((int(starts[-1]), NUM_SYMBOLS), np.int64)
        for family in (GAP, SAMPLED_GAP) if num_sample_sets else (GAP,):
            following[starts[family] : starts[family + 1]] = NEXT_GAP_STATE
        slots = make_decoding_tables(unpack_frequencies(frequencies, len(following)), following)
        shared = ShardTables(slots, starts, ids, favourite_starts, ids_by_frequency)
        self._parameters = DecodingParameters(
            shared, self._grid.level_table, self._grid.logprobs, self._grid.steps, logs
        )

    def decode_teacher_logprobs(
        self,
        packed: bytes | memoryview,
        observed_ids: NDArray[np.int32],
        positions: NDArray[np.int32],
        sample_set: int | None,
    ) -> TeacherLogprobs:
        """Return a document's signal with one set of draws, or with none.

        Args:
            packed: its bytes.
            observed_ids: int32 [P], the tokens that stand at its positions.
            positions: int32 [P].
            sample_set: which set; it counts round. None: what is exact alone.

        Raises:
            Damaged: the bytes are not what was written.
        """
        offsets, ids, logprobs, of_positions, exact, whole = decode_document(
            np.frombuffer(packed, np.uint8),
            self._parameters,
            observed_ids,
            -1 if sample_set is None else sample_set,
            self._sets,
        )
        if not whole:
            raise _corruption_error()
        drawn = self._sets > 0 and sample_set is not None
        tail_mass, realised_logprobs, entropy = of_positions
        of_entries = offsets, ids, logprobs
        return TeacherLogprobs(
            positions,
            *of_entries,
            tail_mass,
            realised_logprobs,
            entropy,
            exact if drawn else None,
            precision=self._precision,
        )

    def decode_stored_logprobs(
        self, packed: bytes | memoryview, observed_ids: NDArray[np.int32], positions: NDArray[np.int32]
    ) -> StoredLogprobs:
        """Return everything that was kept of a document; the arguments are those of `signal`.

        Raises:
            Damaged: the bytes are not what was written.
        """
        content = np.frombuffer(packed, np.uint8)
        sizes, bounds, whole = read_stream_layout(
            content, len(positions), self._sets, len(self._parameters.shard_tables.ids_by_frequency)
        )
        if not whole:
            raise _corruption_error()
        tables, grid, draws = self._parameters.shard_tables, self._grid, len(self._parameters.count_logs) - 1
        offsets, ids, logprobs, kinds, of_positions, whole = decode_logprobs(
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
                *drawn, whole = decode_samples(content, bounds[stream], bounds[stream + 1], tables, kinds, draws, size)
                sets.append(drawn)
        if not whole:
            raise _corruption_error()
        order = np.lexsort((ids, entry_owners(offsets)))
        drawn_sizes = np.array([np.diff(part[0]) for part in sets], np.int64).reshape(len(sets), len(positions)).T
        # The sets follow each other; in scores, positions do.
        places = [entry_owners(part[0]) * self._sets + number for number, part in enumerate(sets)]
        place, drawn_ids, counts = (
            np.concatenate([np.zeros(0, kind), *parts])
            for kind, parts in (
                (np.int64, places),
                (np.int32, [part[1] for part in sets]),
                (np.int32, [part[2] for part in sets]),
            )
        )
        drawn_order = np.lexsort((drawn_ids, place))
        return StoredLogprobs(
            positions=positions,
            offsets=offsets,
            ids=ids[order],
            logprobs=logprobs[order],
            sample_offsets=sizes_to_offsets(drawn_sizes.ravel()),
            sample_ids=drawn_ids[drawn_order],
            sample_counts=counts[drawn_order],
            remainder_mass=of_positions[0],
            observed_logprobs=of_positions[1],
            entropy=of_positions[2],
        )


def _corruption_error() -> CorruptError:
    return CorruptError("corrupt data: the log-probabilities cannot be decoded")


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def read_stream_layout(
    packed: NDArray[np.uint8], positions: int, num_sample_sets: int, vocab_size: int
) -> tuple[Any, Any, bool]:
    """Read what stands before the streams of a document.

    Args:
        packed: its bytes.
        positions: P.
        num_sample_sets: R.
        vocab_size: U.

    Returns:
        sizes int64 [1 + R]: how many ids are exact, realised tokens left out, and how many each set has; bounds int64
        [streams + 1]: where the streams begin, one after the other, and the last one ends; and whether all this is
        possible.
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


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def decode_document(
    packed: NDArray[np.uint8],
    parameters: DecodingParameters,
    observed_ids: NDArray[np.int32],
    sample_set: int,
    num_sample_sets: int,
) -> tuple[Any, Any, Any, Any, Any, bool]:
    """Read a document with one set of draws, or with none.

    Args:
        packed: its bytes.
        parameters: of the shard.
        observed_ids: [P].
        sample_set: which set; it counts round. Below 0: none.
        num_sample_sets: R.

    Returns:
        offsets int64 [P + 1], ids int32 [E], logprobs float32 [E]; float32 [3, P]: tail mass, log-probability of the
        realised token, entropy; int64 [P], how many entries of each position are exact; and whether the bytes are
        whole: the arrays mean nothing otherwise.
    """
    tables, grid, values, steps, logs = parameters
    sizes, bounds, whole = read_stream_layout(packed, len(observed_ids), num_sample_sets, len(tables.ids_by_frequency))
    if not whole:
        sizes[:], bounds[:] = 0, 0
    offsets, ids, logprobs, kinds, of_positions, intact = decode_logprobs(
        packed, bounds, tables, grid, values, steps, observed_ids, len(observed_ids) + sizes[0]
    )
    whole, exact = whole and intact, np.diff(offsets)
    if whole and num_sample_sets and sample_set >= 0:
        number = sample_set % num_sample_sets
        first, stop = bounds[NUM_LOGPROB_STREAMS + number], bounds[NUM_LOGPROB_STREAMS + number + 1]
        drawn_offsets, drawn_ids, counts, intact = decode_samples(
            packed, first, stop, tables, kinds, len(logs) - 1, sizes[1 + number]
        )
        whole = intact
        if whole:
            offsets, ids, logprobs = append_samples(
                offsets, ids, logprobs, drawn_offsets, drawn_ids, counts, logs, of_positions[0]
            )
    return offsets, ids, logprobs, of_positions, exact, whole
