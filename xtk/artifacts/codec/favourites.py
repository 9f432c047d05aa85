"""The favourites of a shard, in its tables."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from xtk.artifacts.codec.coder import put, start, take, take_number, take_raw
from xtk.artifacts.codec.contexts import (
    FAVOURITE_COUNT,
    FAVOURITE_FAMILIES,
    FAVOURITE_GAP,
    FAVOURITE_LEVEL,
    LEVELS,
    NEXT_GAP_STATE,
    starts_of,
)
from xtk.artifacts.codec.exact_kernels import ID_BITS
from xtk.artifacts.codec.frequencies import Slots, pack_frequencies, slots_of, unpack_frequencies
from xtk.artifacts.codec.kinds import Favourites
from xtk.artifacts.codec.numbers import SYMBOLS
from xtk.artifacts.codec.streams import Writer, cut, pack_numbers, unpack_numbers, words_of
from xtk.errors import Damaged

STARTS = starts_of(FAVOURITE_FAMILIES)
CONTEXTS = int(STARTS[-1])


def pack_favourites(favourites: Favourites, ranks: NDArray[np.int32]) -> bytes:
    """Return favourites as bytes.

    Args:
        favourites: of a shard.
        ranks: int32 [U], of all ids.
    """
    out = np.empty(favourites.kinds + len(favourites.lengths) + 2 * len(favourites.ids), np.int64)
    own = ranks[favourites.ids].astype(np.int64)
    records = out[: favourite_records(STARTS, favourites.runs, favourites.lengths, own, favourites.levels, out)]
    writer = Writer([records], CONTEXTS)
    frequencies = pack_frequencies(writer.frequencies)
    numbers = [favourites.kinds, len(favourites.ids), len(frequencies)]
    return pack_numbers(numbers) + frequencies + writer.stream(records)


def unpack_favourites(
    packed: bytes | memoryview, order: NDArray[np.int32]
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return int64 [C + 1], where the favourites of each kind begin, and int32 [F], ids, with classes above ID_BITS.

    Args:
        packed: what `pack_favourites` gave.
        order: int32 [U], ids by rank.

    Raises:
        Damaged: it is something else.
    """
    (kinds, count, size), at = unpack_numbers(packed, 3)
    if not 1 <= kinds <= SYMBOLS or count > kinds * len(order):
        raise Damaged("the codec tables of this shard are corrupt")
    frequencies, stream = cut(packed, at, [size])
    slots = slots_of(unpack_frequencies(frequencies, CONTEXTS), np.zeros((CONTEXTS, SYMBOLS), np.int64))
    starts, favourites = np.zeros(kinds + 1, np.int64), np.zeros(count, np.int32)
    if not read_favourites(np.frombuffer(stream, np.uint8), slots, STARTS, order, starts, favourites):
        raise Damaged("the codec tables of this shard are corrupt")
    return starts, favourites


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def favourite_records(
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
        size = put(out, size, starts[FAVOURITE_COUNT], runs[kind])
        for _ in range(runs[kind]):
            size = put(out, size, starts[FAVOURITE_COUNT], lengths[run])
            place = gap_state = 0
            for _ in range(lengths[run]):
                size = put(out, size, starts[FAVOURITE_GAP] + gap_state, ranks[at] - place)
                gap_state = NEXT_GAP_STATE[gap_state, out[size - 1] & 63]
                place = ranks[at] + 1
                size = put(out, size, starts[FAVOURITE_LEVEL], levels[at])
                at += 1
            run += 1
    return size


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def read_favourites(
    stream: NDArray[np.uint8],
    slots: Slots,
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
    words = words_of(stream, 0, len(stream))
    state, left = start(words)
    at = 0
    for kind in range(len(favourite_starts) - 1):
        runs, state, left = take_number(slots, starts[FAVOURITE_COUNT], state, words, left)
        for _ in range(runs):
            length, state, left = take_number(slots, starts[FAVOURITE_COUNT], state, words, left)
            rank = gap_state = 0
            if length <= 0 or length > len(favourites) - at:
                return False
            for _ in range(length):
                symbol, state, left = take(slots, starts[FAVOURITE_GAP] + gap_state, state, words, left)
                gap_state = NEXT_GAP_STATE[gap_state, symbol & 63]
                gap, state, left = take_raw(symbol, state, words, left)
                level, state, left = take_number(slots, starts[FAVOURITE_LEVEL], state, words, left)
                rank += gap
                if gap < 0 or rank >= len(order) or level < 0 or level >= LEVELS:
                    return False
                favourites[at] = order[rank] | level << ID_BITS
                rank += 1
                at += 1
        favourite_starts[kind + 1] = at
    return at == len(favourites) and state == 0 and left == 0
