"""The order of a vocabulary by frequency: frequent ids have small ranks, and small numbers take few bits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xtk.errors import Damaged


def order_of(counts: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return int32 [U], all ids, those that come most often first, of equally frequent ones the lower.

    Args:
        counts: int64 [U], how often each token comes in the corpus.
    """
    return np.argsort(-counts, kind="stable").astype(np.int32)


def pack_order(order: NDArray[np.int32]) -> bytes:
    """Return an order as little-endian int32: those ids after which only rising ones follow, that is, the counted."""
    falls = np.flatnonzero(np.diff(order) < 0)
    return order[: falls[-1] + 1 if len(falls) else 0].astype("<i4").tobytes()


def unpack_order(packed: bytes, width: int) -> NDArray[np.int32]:
    """Return an order of `width` ids.

    Raises:
        Damaged: these are no ids of so wide a vocabulary.
    """
    if len(packed) % 4:
        raise Damaged("the order of a vocabulary is cut short")
    first = np.frombuffer(packed, "<i4")
    rest = np.ones(width, np.bool_)
    if len(first) and not (0 <= first.min() and first.max() < width):
        raise Damaged("the order of a vocabulary names ids that there are not")
    rest[first] = False
    order = np.concatenate([first, np.flatnonzero(rest)]).astype(np.int32)
    if len(order) != width:
        raise Damaged("the order of a vocabulary names an id twice")
    return order
