"""first: all weight on the first piece of the teacher's spelling."""

from __future__ import annotations

from dataclasses import dataclass

from xtk.projection.pair import Entries, Pair


@dataclass(frozen=True)
class First:
    """The token of equal bytes, else the first piece: at a boundary that is the teacher's next token."""

    partitions = False

    def entries(self, pair: Pair) -> Entries:
        """Return one entry of weight 1 for each token that the teacher can spell."""
        return pair.first
