"""p-kl: projected distributions, averaged over a span."""

from __future__ import annotations

from dataclasses import dataclass, replace

from xtk.losses.loss_cells import ComparisonSpace, LossCells, LossInputs, projected_cells, span_ranges
from xtk.projection.projection import ProjectionColumns


@dataclass(frozen=True)
class PKL:
    """p-kl: `KL((mean t_A, rest) | (mean y_A, rest))`, `y = W^T s`, averaged over spans.

    Distributions are averaged arithmetically over the positions of the span, on both sides, and both are
    normalised. `A` is the union of the teacher's supports in the span; a token that one position's support does
    not hold counts as 0 there. Options: `divergence` and what it has; `published=true`. After X-Token, arXiv
    2605.21699, whose published form averages the teacher geometrically without normalising, and the student
    arithmetically, normalised and with 1e-10 added, over the same tokens: here those that every position of a span
    names. So it is not 0 for equal models, can be negative, and pays 23 nats for mass that no student token reaches.
    """

    published: bool = False

    comparison_space = "projection"
    averaged_over = "spans"
    unit = "nats"
    requires = "distribution"

    def build_cells(self, example: LossInputs, comparison_space: ComparisonSpace) -> LossCells:
        """Return one item a span."""
        assert isinstance(comparison_space, ProjectionColumns)
        cells = projected_cells(example, span_ranges(example), comparison_space, published=self.published)
        return replace(cells, outside_mode="renormalised") if self.published else cells
