"""The favourites of a shard, in its tables."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from xtk.artifacts.codec.ans_coder import append_number, decode_number, decode_raw_bits, decode_symbol, initial_state
from xtk.artifacts.codec.ans_streams import StreamEncoder, bytes_to_words, decode_varints, encode_varints, split_bytes
from xtk.artifacts.codec.coding_contexts import (
    FREQUENT_ID_COUNT,
    FREQUENT_ID_FAMILIES,
    FREQUENT_ID_GAP,
    FREQUENT_ID_LEVEL,
    NEXT_GAP_STATE,
    NUM_LEVEL_CONTEXTS,
    first_contexts,
)
from xtk.artifacts.codec.integer_symbols import NUM_SYMBOLS
from xtk.artifacts.codec.logprob_stream_kernels import ID_BITS
from xtk.artifacts.codec.position_clusters import FrequentIds
from xtk.artifacts.codec.symbol_frequencies import (
    DecodingTables,
    make_decoding_tables,
    pack_frequencies,
    unpack_frequencies,
)
from xtk.errors import CorruptError

FIRST_CONTEXTS = first_contexts(FREQUENT_ID_FAMILIES)
NUM_CONTEXTS = int(FIRST_CONTEXTS[-1])


def pack_frequent_ids(favourites: FrequentIds, ranks: NDArray[np.int32]) -> bytes:
    """Return favourites as bytes.

    Args:
        favourites: of a shard.
        ranks: int32 [U], of all ids.
    """
    out = np.empty(favourites.num_clusters + len(favourites.run_lengths) + 2 * len(favourites.ids), np.int64)
    own = ranks[favourites.ids].astype(np.int64)
    records = out[
        : encode_frequent_ids(
            FIRST_CONTEXTS, favourites.runs, favourites.run_lengths, own, favourites.level_contexts, out
        )
    ]
    writer = StreamEncoder([records], NUM_CONTEXTS)
    frequencies = pack_frequencies(writer.frequencies)
    numbers = [favourites.num_clusters, len(favourites.ids), len(frequencies)]
    return encode_varints(numbers) + frequencies + writer.encode(records)


def unpack_frequent_ids(
    packed: bytes | memoryview, ids_by_frequency: NDArray[np.int32]
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return int64 [C + 1], where the favourites of each kind begin, and int32 [F], ids, with classes above ID_BITS.

    Args:
        packed: what `pack_frequent_ids` gave.
        ids_by_frequency: int32 [U], ids by rank.

    Raises:
        Damaged: it is something else.
    """
    (kinds, count, size), at = decode_varints(packed, 3)
    if not 1 <= kinds <= NUM_SYMBOLS or count > kinds * len(ids_by_frequency):
        raise CorruptError("the codec tables of this shard are corrupt")
    frequencies, stream = split_bytes(packed, at, [size])
    slots = make_decoding_tables(
        unpack_frequencies(frequencies, NUM_CONTEXTS), np.zeros((NUM_CONTEXTS, NUM_SYMBOLS), np.int64)
    )
    starts, favourites = np.zeros(kinds + 1, np.int64), np.zeros(count, np.int32)
    if not decode_frequent_ids(
        np.frombuffer(stream, np.uint8), slots, FIRST_CONTEXTS, ids_by_frequency, starts, favourites
    ):
        raise CorruptError("the codec tables of this shard are corrupt")
    return starts, favourites


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def encode_frequent_ids(
    starts: NDArray[np.int64],
    runs: NDArray[np.int64],
    lengths: NDArray[np.int64],
    ranks: NDArray[np.int64],
    levels: NDArray[np.int64],
    out: NDArray[np.int64],
) -> int:
    """Turn the favourites of a shard into records; return how many they are.

    Args:
        starts: of the families of contexts of favourites.
        runs: [C], of each kind.
        lengths: of runs.
        ranks: [F], among all ids, rising within a run.
        levels: [F].
        out: [C + runs + 2 F], filled.
    """
    size = run = at = 0
    for kind in range(len(runs)):
        size = append_number(out, size, starts[FREQUENT_ID_COUNT], runs[kind])
        for _ in range(runs[kind]):
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


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def decode_frequent_ids(
    stream: NDArray[np.uint8],
    slots: DecodingTables,
    starts: NDArray[np.int64],
    order: NDArray[np.int32],
    favourite_starts: NDArray[np.int64],
    favourites: NDArray[np.int32],
) -> Any:
    """Read the favourites of a shard, and say whether they are whole.

    Args:
        stream: its bytes.
        slots: of the contexts of favourites.
        starts: of the families of those.
        order: [U], ids by rank.
        favourite_starts: [C + 1], filled.
        favourites: [F], filled: id, and class above ID_BITS.
    """
    words = bytes_to_words(stream, 0, len(stream))
    state, left = initial_state(words)
    at = 0
    for kind in range(len(favourite_starts) - 1):
        runs, state, left = decode_number(slots, starts[FREQUENT_ID_COUNT], state, words, left)
        for _ in range(runs):
            length, state, left = decode_number(slots, starts[FREQUENT_ID_COUNT], state, words, left)
            rank = gap_state = 0
            if length <= 0 or length > len(favourites) - at:
                return False
            for _ in range(length):
                symbol, state, left = decode_symbol(slots, starts[FREQUENT_ID_GAP] + gap_state, state, words, left)
                gap_state = NEXT_GAP_STATE[gap_state, symbol & 63]
                gap, state, left = decode_raw_bits(symbol, state, words, left)
                level, state, left = decode_number(slots, starts[FREQUENT_ID_LEVEL], state, words, left)
                rank += gap
                if gap < 0 or rank >= len(order) or level < 0 or level >= NUM_LEVEL_CONTEXTS:
                    return False
                favourites[at] = order[rank] | level << ID_BITS
                rank += 1
                at += 1
        favourite_starts[kind + 1] = at
    return at == len(favourites) and state == 0 and left == 0
