"""forward-kl: for a teacher and a student with the same tokenizer."""

from __future__ import annotations

from xtk.losses.cells import Cells, Example, Ground, projected_cells, span_ranges
from xtk.projection.projection import Columns


class ForwardKL:
    """forward-kl: `sum_A t ln(t/s) + t_rest ln(t_rest/s_rest)` at each token, averaged over tokens.

    The exact KL of the coarsening to `A` and one other cell: a lower bound of the full KL, equal to it when
    the support holds the whole vocabulary.
    """

    ground = "tokens"
    item = "tokens"

    def cells(self, example: Example, ground: Ground) -> Cells:
        """Return one item a token; `ground` is the identity."""
        assert isinstance(ground, Columns)
        return projected_cells(example, span_ranges(example), ground)
