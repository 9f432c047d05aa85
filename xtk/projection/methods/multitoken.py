"""multitoken: the weight of a token falls off over the pieces of its spelling."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xtk.errors import XtkError
from xtk.projection.pair import Entries, Pair, Spelled, joined

# X-Token, arXiv 2605.21699: a token of up to 4 pieces, each a tenth of the one before, rows normalised.
MAX_PIECES = 4
DECAY = 0.1


@dataclass(frozen=True)
class Multitoken:
    """X-Token, arXiv 2605.21699: equal bytes first; any other token is spread over its pieces.

    Attributes:
        max_pieces: a token of more pieces has no row.
        decay: what a piece weighs, of the one before it; 0: all on the first.
        reverse_pass: also spell the teacher's tokens in pieces of the student's, and add what they weigh to the rows
            of those pieces. Rows of tokens that the teacher has stay as they are.
    """

    max_pieces: int = MAX_PIECES
    decay: float = DECAY
    reverse_pass: bool = False

    partitions = False

    def __post_init__(self) -> None:
        if self.max_pieces < 1:
            raise XtkError(f"--max-pieces is {self.max_pieces}; a token has at least one piece")
        if not 0 <= self.decay <= 1:
            raise XtkError(f"--decay is {self.decay}; a share lies between 0 and 1")

    def entries(self, pair: Pair) -> Entries:
        """Return the entries of all ordinary rows."""
        at, pieces, weights = self._spread(pair.spelled)
        spread = Entries(pair.spelled.tokens[at], pieces, weights)
        if self.reverse_pass:
            at, pieces, weights = self._spread(pair.swapped.spelled)
            teachers = pair.swapped.spelled.tokens[at]
            open_rows = pair.equal[pieces] < 0
            more = Entries(pieces[open_rows], teachers[open_rows], weights[open_rows])
            spread = at_most_one(joined(spread, more))
        return joined(pair.exact, spread)

    def _spread(self, spelled: Spelled) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]:
        """Return entries: which spelling, piece, weight."""
        short = spelled.sizes <= self.max_pieces
        at = np.repeat(np.arange(len(spelled.tokens)), spelled.sizes)
        place = np.arange(len(spelled.pieces)) - spelled.offsets[at]
        raw = np.power(float(self.decay), place)
        weights = raw / np.bincount(at, raw, minlength=1)[at]
        kept = short[at] & (weights > 0)
        return at[kept], spelled.pieces[kept], weights[kept].astype(np.float32)


def at_most_one(entries: Entries) -> Entries:
    """Scale rows that sum to more than 1 down to 1."""
    masses = np.bincount(entries.rows, entries.weights.astype(np.float64), minlength=1)
    scaled = entries.weights / np.maximum(masses, 1)[entries.rows]
    return entries._replace(weights=scaled.astype(np.float32))
