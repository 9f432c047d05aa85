"""boundary-kl: the teacher's and the projected student's next token, wherever both have spelled the same bytes."""

from __future__ import annotations

from xtk.losses.cells import Cells, Example, Ground, Ranges, projected_cells, span_ranges
from xtk.projection.projection import Columns


class BoundaryKL:
    """boundary-kl: at each common boundary `KL((t_A, rest) | (y_A, rest))`, `y = W^T s`, averaged over boundaries.

    `A` is the teacher's support at the boundary and the realised token.
    """

    ground = "projection"
    item = "common boundaries"
    unit = "nats"
    asks = "distribution"

    def cells(self, example: Example, ground: Ground) -> Cells:
        """Return one item a span: its first distributions on both sides."""
        assert isinstance(ground, Columns)
        spans = span_ranges(example)
        first = Ranges(spans.row_start, spans.row_start + 1, spans.position_start, spans.position_start + 1)
        return projected_cells(example, first, ground)
