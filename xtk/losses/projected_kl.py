"""p-kl: KL between the teacher's and the projected student's distributions, averaged over each span."""

from __future__ import annotations

from dataclasses import dataclass

from xtk.losses.cells.loss_cells import LossCells
from xtk.losses.cells.projected_cells import projected_cells
from xtk.losses.interface import ComparisonSpace, Loss, LossInputs, span_ranges
from xtk.losses.p_kl_as_published import published_cells
from xtk.projection.projection import ProjectionColumns


@dataclass(frozen=True)
class PKL(Loss):
    """p-kl: `KL((mean t_A, t_rem) | (mean y_A, y_rem))`, `y = W^T s`, averaged over spans.

    Both models' distributions are averaged arithmetically over the positions of the span, and are normalized. `A` is
    the union of the teacher's supports in the span; a token counts as 0 at positions whose support lacks it. `t_rem`
    and `y_rem` are the remainders, the probabilities outside of `A`. Options: `divergence` and its options;
    `published=true`. After X-Token, arXiv 2605.21699. Its published form averages the teacher geometrically without
    normalizing, and the student arithmetically, normalized and with 1e-10 added, over the same tokens: here those in
    the support of every position of the span. That form is not 0 for equal models, can be negative, and adds 23 nats
    times the mass that no student token maps to.
    """

    published: bool = False

    comparison_space = "projection"
    averaged_over = "spans"
    items_are_spans = True

    @property
    def compares_only_cells(self) -> bool:
        """Whether it is a divergence over cells; its published form is not."""
        return not self.published

    def build_cells(self, example: LossInputs, comparison_space: ComparisonSpace) -> LossCells:
        """Return one item per span."""
        assert isinstance(comparison_space, ProjectionColumns)
        build = published_cells if self.published else projected_cells
        return build(example, span_ranges(example), comparison_space)
