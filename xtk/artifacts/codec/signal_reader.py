"""Bits to signals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.artifacts.codec.contexts import DRAWN_GAP, GAP, NEXT_GAP_STATE, signal_families, starts_of
from xtk.artifacts.codec.draw_kernels import join_drawn, read_drawn
from xtk.artifacts.codec.exact_kernels import Tables, read_exact
from xtk.artifacts.codec.favourites import unpack_favourites
from xtk.artifacts.codec.frequencies import slots_of, unpack_frequencies
from xtk.artifacts.codec.numbers import SYMBOLS
from xtk.artifacts.codec.rounding import Grid, offsets_of, owners_of
from xtk.artifacts.codec.streams import cut, unpack_numbers, words_of
from xtk.errors import Damaged
from xtk.tokens.signal import Scores, Signal

EXACT_STREAMS = 3
NO_WORDS = np.zeros(0, np.uint32)


class SignalReader:
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
        self, tables: bytes | memoryview, order: NDArray[np.int32], precision: str, sets: int, draws: int
    ) -> None:
        self._sets, self._grid = sets, Grid.of(precision)
        self._logs = np.log(np.maximum(np.arange(draws + 1), 1).astype(np.float64))
        (size,), at = unpack_numbers(tables, 1)
        frequencies, favourites = cut(tables, at, [size])
        favourite_starts, ids = unpack_favourites(favourites, order)
        starts = starts_of(signal_families(len(favourite_starts) - 1, sets))
        following = np.zeros((int(starts[-1]), SYMBOLS), np.int64)
        for family in (GAP, DRAWN_GAP) if sets else (GAP,):
            following[starts[family] : starts[family + 1]] = NEXT_GAP_STATE
        slots = slots_of(unpack_frequencies(frequencies, len(following)), following)
        self._tables = Tables(slots, starts, ids, favourite_starts, order)

    def signal(
        self, packed: bytes | memoryview, realised_ids: NDArray[np.int32], positions: NDArray[np.int32], draw: int
    ) -> Signal:
        """Return a document's signal with one set of draws.

        Args:
            packed: its bytes.
            realised_ids: int32 [P], the tokens that stand at its positions.
            positions: int32 [P].
            draw: which set; it counts round.

        Raises:
            Damaged: the bytes are not what was written.
        """
        streams, sizes = self._streams(packed, len(positions))
        offsets, ids, logprobs, kinds, of_positions = self._exact(streams, realised_ids, sizes[0])
        tail_mass, realised_logprobs, entropy = of_positions
        if self._sets:
            number = draw % self._sets
            drawn = self._drawn(streams[EXACT_STREAMS + number], kinds, sizes[1 + number])
            offsets, ids, logprobs = join_drawn(offsets, ids, logprobs, *drawn, self._logs, tail_mass)
        return Signal(positions, offsets, ids, logprobs, tail_mass, realised_logprobs, entropy)

    def scores(
        self, packed: bytes | memoryview, realised_ids: NDArray[np.int32], positions: NDArray[np.int32]
    ) -> Scores:
        """Return everything that was kept of a document; the arguments are those of `signal`.

        Raises:
            Damaged: the bytes are not what was written.
        """
        streams, sizes = self._streams(packed, len(positions))
        offsets, ids, logprobs, kinds, of_positions = self._exact(streams, realised_ids, sizes[0])
        order = np.lexsort((ids, owners_of(offsets)))
        sets = [
            self._drawn(stream, kinds, size) for stream, size in zip(streams[EXACT_STREAMS:], sizes[1:], strict=True)
        ]
        drawn_sizes = np.array([np.diff(part[0]) for part in sets], np.int64).reshape(len(sets), len(positions)).T
        # The sets follow each other; in scores, positions do.
        places = [owners_of(part[0]) * self._sets + number for number, part in enumerate(sets)]
        place, drawn_ids, counts = (
            np.concatenate([np.zeros(0, kind), *parts])
            for kind, parts in (
                (np.int64, places),
                (np.int32, [part[1] for part in sets]),
                (np.int32, [part[2] for part in sets]),
            )
        )
        drawn_order = np.lexsort((drawn_ids, place))
        return Scores(
            positions=positions,
            offsets=offsets,
            ids=ids[order],
            logprobs=logprobs[order],
            drawn_offsets=offsets_of(drawn_sizes.ravel()),
            drawn_ids=drawn_ids[drawn_order],
            counts=counts[drawn_order],
            tail_mass=of_positions[0],
            realised_logprobs=of_positions[1],
            entropy=of_positions[2],
        )

    def _streams(self, packed: bytes | memoryview, positions: int) -> tuple[list[NDArray[np.uint32]], list[int]]:
        """Return the words of each stream of a document, and how many ids it has: exact ones, and of each set."""
        if not positions and not len(packed):
            return [NO_WORDS] * (EXACT_STREAMS + self._sets), [0] * (1 + self._sets)
        numbers, at = unpack_numbers(packed, EXACT_STREAMS + 2 * self._sets)
        sizes, lengths = numbers[: 1 + self._sets], numbers[1 + self._sets :]
        if max(sizes) > positions * len(self._tables.order):
            raise _altered()
        return [words_of(part) for part in cut(packed, at, lengths)], sizes

    def _exact(self, streams: Sequence[NDArray[np.uint32]], realised_ids: NDArray[np.int32], others: int) -> list[Any]:
        grid, words = self._grid, (streams[0], streams[1], streams[2])
        *exact, whole = read_exact(
            words, self._tables, grid.table, grid.values, grid.steps, realised_ids, len(realised_ids) + others
        )
        if not whole:
            raise _altered()
        return list(exact)

    def _drawn(self, words: NDArray[np.uint32], kinds: NDArray[np.int64], count: int) -> list[Any]:
        *drawn, whole = read_drawn(words, self._tables, kinds, len(self._logs) - 1, count)
        if not whole:
            raise _altered()
        return list(drawn)


def _altered() -> Damaged:
    return Damaged("a row of this cache was altered: its signal cannot be read")
