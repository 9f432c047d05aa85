"""boundary-kl: KL between the teacher's and the projected student's next-token distributions at shared boundaries."""

from __future__ import annotations

from xtk.losses.cells.loss_cells import LossCells
from xtk.losses.cells.projected_cells import projected_cells
from xtk.losses.interface import ComparisonSpace, Loss, LossInputs, span_ranges
from xtk.projection.projection import ProjectionColumns


class BoundaryKL(Loss):
    """boundary-kl: `KL((t_A, t_rem) | (y_A, y_rem))` at each shared boundary, `y = W^T s`, averaged over boundaries.

    A shared boundary is a byte offset where both models begin a token. `A` is the teacher's support there with the
    observed token; `t_rem` and `y_rem` are the remainders, the probabilities outside of `A`.
    """

    comparison_space = "projection"
    averaged_over = "shared boundaries"
    compares_cells = True

    def build_cells(self, example: LossInputs, comparison_space: ComparisonSpace) -> LossCells:
        """Return one item per span: the distributions of both models at its first token."""
        assert isinstance(comparison_space, ProjectionColumns)
        return projected_cells(example, span_ranges(example).first_only(), comparison_space)
