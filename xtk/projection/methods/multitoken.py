"""Method `multitoken`: weights that decay over the teacher tokens with the same bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xtk.errors import XtkError
from xtk.projection.vocabulary_pair import SparseEntries, TokenSpellings, VocabularyPair, concatenate_entries

# X-Token, arXiv 2605.21699: at most 4 teacher tokens, each with a tenth of the previous weight, rows normalized.
DEFAULT_MAX_TOKENS = 4
DEFAULT_DECAY = 0.1


@dataclass(frozen=True)
class MultitokenMethod:
    """X-Token, arXiv 2605.21699: equal bytes first; others are mapped to their tokens in the teacher's tokenization."""

    max_tokens_per_entry: int = DEFAULT_MAX_TOKENS  # a student token that needs more teacher tokens has no entries
    decay: float = DEFAULT_DECAY  # weight of each teacher token relative to the previous one; 0: all on the first
    # Also tokenize the teacher's tokens with the student's tokenizer, and add their weights to the rows of these
    # student tokens. Rows of tokens with equal bytes stay unchanged.
    reverse_pass: bool = False

    stores_cells = False

    def __post_init__(self) -> None:
        if self.max_tokens_per_entry < 1:
            raise XtkError(
                f"--max-tokens-per-entry is {self.max_tokens_per_entry}, but must be at least 1",
                hint="use, for example, --max-tokens-per-entry 4",
            )
        if not 0 <= self.decay <= 1:
            raise XtkError(
                f"--decay is {self.decay}, but must be between 0 and 1", hint="use, for example, --decay 0.5"
            )

    def build_entries(self, pair: VocabularyPair) -> SparseEntries:
        """Return the entries of all ordinary tokens."""
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
        """Return entries as (index of the spelling, teacher token, weight)."""
        short = spelled.lengths <= self.max_tokens_per_entry
        at = np.repeat(np.arange(len(spelled.token_ids)), spelled.lengths)
        place = np.arange(len(spelled.spelling_ids)) - spelled.offsets[at]
        raw = np.power(float(self.decay), place)
        weights = raw / np.bincount(at, raw, minlength=1)[at]
        kept = short[at] & (weights > 0)
        return at[kept], spelled.spelling_ids[kept], weights[kept].astype(np.float32)


def cap_row_sums(entries: SparseEntries) -> SparseEntries:
    """Return entries with rows scaled down to 1 where they sum to more."""
    masses = np.bincount(entries.rows, entries.weights.astype(np.float64), minlength=1)
    scaled = entries.weights / np.maximum(masses, 1)[entries.rows]
    return entries._replace(weights=scaled.astype(np.float32))
