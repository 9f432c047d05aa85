"""p-kl: projected distributions, averaged over a span."""

from __future__ import annotations

from xtk.losses.cells import Cells, Example, Ground, projected_cells, span_ranges
from xtk.projection.projection import Columns


class PKL:
    """p-kl: `KL((mean t_A, rest) | (mean y_A, rest))`, `y = W^T s`, averaged over spans.

    Distributions are averaged arithmetically over the positions of the span, on both sides, and both are
    normalised. `A` is the union of the teacher's supports in the span; a token that one position's support does
    not hold counts as 0 there. After X-Token, arXiv 2605.21699, whose published form averages one side
    geometrically and drops what is not in `A`, so that it is not zero for equal models.
    """

    ground = "projection"
    item = "spans"

    def cells(self, example: Example, ground: Ground) -> Cells:
        """Return one item a span."""
        assert isinstance(ground, Columns)
        return projected_cells(example, span_ranges(example), ground)
