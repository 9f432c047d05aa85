"""Bits to signals."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from xtk.artifacts.codec.contexts import DRAWN_GAP, GAP, NEXT_GAP_STATE, signal_families, starts_of
from xtk.artifacts.codec.draw_kernels import join_drawn, read_drawn
from xtk.artifacts.codec.exact_kernels import Tables, read_exact
from xtk.artifacts.codec.favourites import unpack_favourites
from xtk.artifacts.codec.frequencies import slots_of, unpack_frequencies
from xtk.artifacts.codec.numbers import SYMBOLS
from xtk.artifacts.codec.rounding import Grid, offsets_of, owners_of
from xtk.artifacts.codec.streams import cut, read_numbers, unpack_numbers
from xtk.errors import Damaged
from xtk.tokens.signal import Scores, Signal

EXACT_STREAMS = 3


class Parameters(NamedTuple):
    """What reading a document needs of its shard.

    Attributes:
        tables: of the shard.
        grid: float64 [3, PLACES]: log-probability, probability, and their product, of each level.
        values: float32 [PLACES], log-probabilities again.
        steps: of odds, of entropy; how many of odds are a nat.
        logs: float64 [n + 1], logarithms of 0 (as of 1) to n, the draws of a set.
    """

    tables: Tables
    grid: NDArray[np.float64]
    values: NDArray[np.float32]
    steps: tuple[float, float, int]
    logs: NDArray[np.float64]


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
        self._sets, self._grid, self._precision = sets, Grid.of(precision), precision
        logs = np.log(np.maximum(np.arange(draws + 1), 1).astype(np.float64))
        (size,), at = unpack_numbers(tables, 1)
        frequencies, favourites = cut(tables, at, [size])
        favourite_starts, ids = unpack_favourites(favourites, order)
        starts = starts_of(signal_families(len(favourite_starts) - 1, sets))
        following = np.zeros((int(starts[-1]), SYMBOLS), np.int64)
        for family in (GAP, DRAWN_GAP) if sets else (GAP,):
            following[starts[family] : starts[family + 1]] = NEXT_GAP_STATE
        slots = slots_of(unpack_frequencies(frequencies, len(following)), following)
        shared = Tables(slots, starts, ids, favourite_starts, order)
        self._parameters = Parameters(shared, self._grid.table, self._grid.values, self._grid.steps, logs)

    def signal(
        self,
        packed: bytes | memoryview,
        realised_ids: NDArray[np.int32],
        positions: NDArray[np.int32],
        draw: int | None,
    ) -> Signal:
        """Return a document's signal with one set of draws, or with none.

        Args:
            packed: its bytes.
            realised_ids: int32 [P], the tokens that stand at its positions.
            positions: int32 [P].
            draw: which set; it counts round. None: what is exact alone.

        Raises:
            Damaged: the bytes are not what was written.
        """
        offsets, ids, logprobs, of_positions, exact, whole = read_signal(
            np.frombuffer(packed, np.uint8), self._parameters, realised_ids, -1 if draw is None else draw, self._sets
        )
        if not whole:
            raise _corrupt()
        drawn = self._sets > 0 and draw is not None
        tail_mass, realised_logprobs, entropy = of_positions
        of_entries = offsets, ids, logprobs
        return Signal(
            positions,
            *of_entries,
            tail_mass,
            realised_logprobs,
            entropy,
            exact if drawn else None,
            precision=self._precision,
        )

    def scores(
        self, packed: bytes | memoryview, realised_ids: NDArray[np.int32], positions: NDArray[np.int32]
    ) -> Scores:
        """Return everything that was kept of a document; the arguments are those of `signal`.

        Raises:
            Damaged: the bytes are not what was written.
        """
        content = np.frombuffer(packed, np.uint8)
        sizes, bounds, whole = layout(content, len(positions), self._sets, len(self._parameters.tables.order))
        if not whole:
            raise _corrupt()
        tables, grid, draws = self._parameters.tables, self._grid, len(self._parameters.logs) - 1
        offsets, ids, logprobs, kinds, of_positions, whole = read_exact(
            content, bounds, tables, grid.table, grid.values, grid.steps, realised_ids, len(positions) + int(sizes[0])
        )
        sets = []
        for stream, size in enumerate(sizes[1:].tolist(), EXACT_STREAMS):
            if whole:
                *drawn, whole = read_drawn(content, bounds[stream], bounds[stream + 1], tables, kinds, draws, size)
                sets.append(drawn)
        if not whole:
            raise _corrupt()
        order = np.lexsort((ids, owners_of(offsets)))
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


def _corrupt() -> Damaged:
    return Damaged("corrupt data: the log-probabilities cannot be decoded")


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def layout(packed: NDArray[np.uint8], positions: int, sets: int, known: int) -> tuple[Any, Any, bool]:
    """Read what stands before the streams of a document.

    Args:
        packed: its bytes.
        positions: P.
        sets: R.
        known: U.

    Returns:
        sizes int64 [1 + R]: how many ids are exact, realised tokens left out, and how many each set has; bounds int64
        [streams + 1]: where the streams begin, one after the other, and the last one ends; and whether all this is
        possible.
    """
    streams = EXACT_STREAMS + sets
    numbers, bounds = np.zeros(1 + sets + streams - 1, np.int64), np.zeros(streams + 1, np.int64)
    sizes = numbers[: 1 + sets]
    if positions == 0 and len(packed) == 0:
        return sizes, bounds, True
    at = read_numbers(packed, numbers)
    bounds[0], bounds[streams] = at, len(packed)
    for stream in range(1, streams):
        bounds[stream] = bounds[stream - 1] + numbers[sets + stream]
    return sizes, bounds, at >= 0 and bounds[streams - 1] <= len(packed) and sizes.max() <= positions * known


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def read_signal(
    packed: NDArray[np.uint8], parameters: Parameters, realised_ids: NDArray[np.int32], draw: int, sets: int
) -> tuple[Any, Any, Any, Any, Any, bool]:
    """Read a document with one set of draws, or with none.

    Args:
        packed: its bytes.
        parameters: of the shard.
        realised_ids: [P].
        draw: which set; it counts round. Below 0: none.
        sets: R.

    Returns:
        offsets int64 [P + 1], ids int32 [E], logprobs float32 [E]; float32 [3, P]: tail mass, log-probability of the
        realised token, entropy; int64 [P], how many entries of each position are exact; and whether the bytes are
        whole: the arrays mean nothing otherwise.
    """
    tables, grid, values, steps, logs = parameters
    sizes, bounds, whole = layout(packed, len(realised_ids), sets, len(tables.order))
    if not whole:
        sizes[:], bounds[:] = 0, 0
    offsets, ids, logprobs, kinds, of_positions, intact = read_exact(
        packed, bounds, tables, grid, values, steps, realised_ids, len(realised_ids) + sizes[0]
    )
    whole, exact = whole and intact, np.diff(offsets)
    if whole and sets and draw >= 0:
        number = draw % sets
        first, stop = bounds[EXACT_STREAMS + number], bounds[EXACT_STREAMS + number + 1]
        drawn_offsets, drawn_ids, counts, intact = read_drawn(
            packed, first, stop, tables, kinds, len(logs) - 1, sizes[1 + number]
        )
        whole = intact
        if whole:
            offsets, ids, logprobs = join_drawn(
                offsets, ids, logprobs, drawn_offsets, drawn_ids, counts, logs, of_positions[0]
            )
    return offsets, ids, logprobs, of_positions, exact, whole
