"""multitoken: the weight of a token falls off over the pieces of its spelling."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xtk.errors import XtkError
from xtk.projection.vocabulary_pair import SparseEntries, TokenSpellings, VocabularyPair, concatenate_entries

# X-Token, arXiv 2605.21699: a token of up to 4 pieces, each a tenth of the one before, rows normalised.
DEFAULT_MAX_TOKENS = 4
DEFAULT_DECAY = 0.1


@dataclass(frozen=True)
class MultitokenMethod:
    """X-Token, arXiv 2605.21699: equal bytes first; any other token is spread over its pieces.

    Attributes:
        max_tokens_per_entry: a token of more pieces has no row.
        decay: what a piece weighs, of the one before it; 0: all on the first.
        reverse_pass: also spell the teacher's tokens in pieces of the student's, and add what they weigh to the rows
            of those pieces. Rows of tokens that the teacher has stay as they are.
    """

    max_tokens_per_entry: int = DEFAULT_MAX_TOKENS
    decay: float = DEFAULT_DECAY
    reverse_pass: bool = False

    stores_cells = False

    def __post_init__(self) -> None:
        if self.max_tokens_per_entry < 1:
            raise XtkError(f"--max-tokens-per-entry is {self.max_tokens_per_entry}; a token has at least one piece")
        if not 0 <= self.decay <= 1:
            raise XtkError(f"--decay is {self.decay}; a share lies between 0 and 1")

    def build_entries(self, pair: VocabularyPair) -> SparseEntries:
        """Return the entries of all ordinary rows."""
        at, pieces, weights = self._spread(pair.spellings)
        spread = SparseEntries(pair.spellings.token_ids[at], pieces, weights)
        if self.reverse_pass:
            at, pieces, weights = self._spread(pair.swapped.spellings)
            teachers = pair.swapped.spellings.token_ids[at]
            open_rows = pair.equal_ids[pieces] < 0
            more = SparseEntries(pieces[open_rows], teachers[open_rows], weights[open_rows])
            spread = cap_row_sums(concatenate_entries(spread, more))
        return concatenate_entries(pair.exact_entries, spread)

    def _spread(self, spelled: TokenSpellings) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]:
        """Return entries: which spelling, piece, weight."""
        short = spelled.lengths <= self.max_tokens_per_entry
        at = np.repeat(np.arange(len(spelled.token_ids)), spelled.lengths)
        place = np.arange(len(spelled.spelling_ids)) - spelled.offsets[at]
        raw = np.power(float(self.decay), place)
        weights = raw / np.bincount(at, raw, minlength=1)[at]
        kept = short[at] & (weights > 0)
        return at[kept], spelled.spelling_ids[kept], weights[kept].astype(np.float32)


def cap_row_sums(entries: SparseEntries) -> SparseEntries:
    """Scale rows that sum to more than 1 down to 1."""
    masses = np.bincount(entries.rows, entries.weights.astype(np.float64), minlength=1)
    scaled = entries.weights / np.maximum(masses, 1)[entries.rows]
    return entries._replace(weights=scaled.astype(np.float32))
