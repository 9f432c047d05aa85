"""Method `exact`: only tokens with equal bytes have entries."""

from __future__ import annotations

from dataclasses import dataclass

from xtk.projection.vocabulary_pair import SparseEntries, VocabularyPair


@dataclass(frozen=True)
class ExactMatchMethod:
    """Tokens with equal bytes only."""

    stores_cells = False

    def build_entries(self, pair: VocabularyPair) -> SparseEntries:
        """Return one entry of weight 1 for each token that both sides have."""
        return pair.exact_entries
