"""Encoding of a shard's frequent ids per position cluster, part of its codec tables."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.cache.codec.ans_entropy_coder import append_number, decode_number, initial_state
from xtk.cache.codec.entropy_coded_streams import (
    StreamEncoder,
    bytes_to_words,
    decode_varints,
    encode_varints,
    split_bytes,
)
from xtk.cache.codec.integer_coding import NUM_SYMBOLS, SPECIAL_SYMBOL
from xtk.cache.codec.logprob_decoding_numba import ID_BITS
from xtk.cache.codec.position_clusters import FrequentIds
from xtk.cache.codec.symbol_frequencies import (
    DecodingTables,
    make_decoding_tables,
    pack_frequencies,
    unpack_frequencies,
)
from xtk.cache.codec.symbol_probability_contexts import (
    FREQUENT_ID_COUNT,
    FREQUENT_ID_FAMILIES,
    FREQUENT_ID_GAP,
    FREQUENT_ID_LEVEL,
    NEXT_GAP_STATE,
    NUM_LEVEL_CONTEXTS,
    first_contexts,
)
from xtk.files.arrow_validation import corrupt_shard_error
from xtk.numba_kernel import numba_kernel

FIRST_CONTEXTS = first_contexts(FREQUENT_ID_FAMILIES)
NUM_CONTEXTS = int(FIRST_CONTEXTS[-1])


def pack_frequent_ids(frequent_ids: FrequentIds, ranks: NDArray[np.int32]) -> bytes:
    """Return the frequent ids of a shard as bytes; `ranks`: int32 [U], frequency rank of each id."""
    out = np.empty(frequent_ids.num_clusters + len(frequent_ids.run_lengths) + 2 * len(frequent_ids.ids), np.int64)
    own = ranks[frequent_ids.ids].astype(np.int64)
    records = out[
        : encode_frequent_ids(
            FIRST_CONTEXTS, frequent_ids.runs, frequent_ids.run_lengths, own, frequent_ids.level_contexts, out
        )
    ]
    writer = StreamEncoder([records], NUM_CONTEXTS)
    frequencies = pack_frequencies(writer.frequencies)
    numbers = [frequent_ids.num_clusters, len(frequent_ids.ids), len(frequencies)]
    return encode_varints(numbers) + frequencies + writer.encode(records)


def unpack_frequent_ids(
    packed: bytes | memoryview,  # returned by `pack_frequent_ids`
    ids_by_frequency: NDArray[np.int32],  # int32 [U], ids by frequency rank
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return int64 [C + 1], offsets of the clusters, and int32 [F], their ids, with level contexts above ID_BITS."""
    (clusters, count, size), at = decode_varints(packed, 3)
    if not 1 <= clusters <= NUM_SYMBOLS or count > clusters * len(ids_by_frequency):
        raise corrupt_shard_error("its table of frequent token ids is invalid")
    frequencies, stream = split_bytes(packed, at, [size])
    slots = make_decoding_tables(
        unpack_frequencies(frequencies, NUM_CONTEXTS), np.zeros((NUM_CONTEXTS, NUM_SYMBOLS), np.int64)
    )
    starts, frequent_ids = np.zeros(clusters + 1, np.int64), np.zeros(count, np.int32)
    if not decode_frequent_ids(
        np.frombuffer(stream, np.uint8), slots, FIRST_CONTEXTS, ids_by_frequency, starts, frequent_ids
    ):
        raise corrupt_shard_error("its table of frequent token ids is invalid")
    return starts, frequent_ids


@numba_kernel
def encode_frequent_ids(
    starts: NDArray[np.int64],  # first context of each family (`FIRST_CONTEXTS`)
    runs: NDArray[np.int64],  # [C], number of runs of each cluster
    lengths: NDArray[np.int64],
    ranks: NDArray[np.int64],  # [F], frequency ranks of the ids, increasing within a run
    levels: NDArray[np.int64],  # [F], level contexts
    out: NDArray[np.int64],  # [C + runs + 2 F], filled
) -> int:
    """Convert the frequent ids of a shard into records; return the number of records."""
    size = run = at = 0
    for cluster in range(len(runs)):
        size = append_number(out, size, starts[FREQUENT_ID_COUNT], runs[cluster])
        for _ in range(runs[cluster]):
            size = append_number(out, size, starts[FREQUENT_ID_COUNT], lengths[run])
            place = gap_state = 0
            for _ in range(lengths[run]):
                size = append_number(out, size, starts[FREQUENT_ID_GAP] + gap_state, ranks[at] - place)
                gap_state = NEXT_GAP_STATE[gap_state, out[size - 1] & 63]
                place = ranks[at] + 1
                size = append_number(out, size, starts[FREQUENT_ID_LEVEL], levels[at])
                at += 1
            run += 1
    return size


@numba_kernel
def decode_frequent_ids(
    stream: NDArray[np.uint8],
    slots: DecodingTables,
    starts: NDArray[np.int64],  # first context of each family (`FIRST_CONTEXTS`)
    order: NDArray[np.int32],  # [U], ids by frequency rank
    frequent_id_starts: NDArray[np.int64],  # [C + 1], filled
    frequent_ids: NDArray[np.int32],  # [F], filled: id, and level context above ID_BITS
) -> Any:
    """Decode the frequent ids of a shard and return whether the stream is valid."""
    words = bytes_to_words(stream, 0, len(stream))
    state, left = initial_state(words)
    at = 0
    for cluster in range(len(frequent_id_starts) - 1):
        _, runs, state, left = decode_number(slots, starts[FREQUENT_ID_COUNT], words, state, left)
        for _ in range(runs):
            _, length, state, left = decode_number(slots, starts[FREQUENT_ID_COUNT], words, state, left)
            rank = gap_state = 0
            if length <= 0 or length > len(frequent_ids) - at:
                return False
            for _ in range(length):
                context = starts[FREQUENT_ID_GAP] + gap_state
                symbol, gap, state, left = decode_number(slots, context, words, state, left)
                gap_state = NEXT_GAP_STATE[gap_state, symbol & 63]
                second, level, state, left = decode_number(slots, starts[FREQUENT_ID_LEVEL], words, state, left)
                rank += gap
                if max(symbol, second) >= SPECIAL_SYMBOL or rank >= len(order) or level >= NUM_LEVEL_CONTEXTS:
                    return False
                frequent_ids[at] = order[rank] | level << ID_BITS
                rank += 1
                at += 1
        frequent_id_starts[cluster + 1] = at
    return at == len(frequent_ids) and state == 0 and left == 0
