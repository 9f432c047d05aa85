"""boundary-kl: the teacher's and the projected student's next token, wherever both have spelled the same bytes."""

from __future__ import annotations

from xtk.losses.loss_cells import ComparisonSpace, ItemRanges, LossCells, LossInputs, projected_cells, span_ranges
from xtk.projection.projection import ProjectionColumns


class BoundaryKL:
    """boundary-kl: at each common boundary `KL((t_A, rest) | (y_A, rest))`, `y = W^T s`, averaged over boundaries.

    `A` is the teacher's support at the boundary and the realised token.
    """

    comparison_space = "projection"
    averaged_over = "common boundaries"
    unit = "nats"
    requires = "distribution"

    def build_cells(self, example: LossInputs, comparison_space: ComparisonSpace) -> LossCells:
        """Return one item a span: its first distributions on both sides."""
        assert isinstance(comparison_space, ProjectionColumns)
        spans = span_ranges(example)
        first = ItemRanges(spans.row_start, spans.row_start + 1, spans.position_start, spans.position_start + 1)
        return projected_cells(example, first, comparison_space)
