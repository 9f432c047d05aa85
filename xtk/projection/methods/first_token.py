"""Method `first-token`: all weight on the first token of the teacher's tokenization."""

from __future__ import annotations

from dataclasses import dataclass

from xtk.projection.vocabulary_pair import SparseEntries, VocabularyPair


@dataclass(frozen=True)
class FirstTokenMethod:
    """The token of equal bytes, else the first token: at a shared boundary that is the teacher's next token."""

    stores_cells = False

    def build_entries(self, pair: VocabularyPair) -> SparseEntries:
        """Return one entry of weight 1 for each token that the teacher can tokenize."""
        return pair.first_token_entries
