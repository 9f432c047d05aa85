"""exact: a student token that the teacher does not have has no row."""

from __future__ import annotations

from dataclasses import dataclass

from xtk.projection.pair import Entries, Pair


@dataclass(frozen=True)
class Exact:
    """Tokens of equal bytes, and nothing else."""

    partitions = False

    def entries(self, pair: Pair) -> Entries:
        """Return one entry of weight 1 for each token that both sides have."""
        return pair.exact
