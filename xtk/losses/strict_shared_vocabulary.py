"""strict: reverse KL over the shared vocabulary, only where one student token is one teacher token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from xtk.errors import XtkError
from xtk.losses.cells.loss_cells import LossCells
from xtk.losses.cells.shared_vocabulary_cells import SharedVocabularyCells, shared_cell_fields
from xtk.losses.interface import ComparisonSpace, ItemRanges, Loss, LossInputs, span_ranges
from xtk.projection.projection import ProjectionColumns


@dataclass(frozen=True)
class Strict(Loss):
    """strict: `KL((s_m, s_rem) | (t_m, t_rem))` at spans of one token on each side, averaged over these spans.

    `m` are the student's `top_k` most likely of the shared tokens in the teacher's support; `s_m` and `t_m` are their
    probabilities given that the token is a shared one; the remainders contain all other shared tokens. A shared token
    has equal bytes in both vocabularies, or is a special token of the same role. With `divergence=forward-kl` all
    shared tokens of the support are compared. Options: `top_k` (16); `divergence` (reverse-kl) and its options. Strict
    shared-vocabulary distillation, arXiv 2610.08448, whose sum over `top_k` tokens has no remainder and can be
    negative.
    """

    top_k: int = 16

    comparison_space = "pairs"
    averaged_over = "spans of one token on each side"
    requires = "candidates"
    default_divergence = "reverse-kl"

    def __post_init__(self) -> None:
        """Refuse a number of tokens below 1."""
        if self.top_k < 1:
            raise XtkError(
                f"top_k of the loss strict must be at least 1, not {self.top_k}", hint="use --loss strict:top_k=16"
            )

    def build_cells(self, example: LossInputs, comparison_space: ComparisonSpace) -> LossCells:
        """Return one item per span of one token on each side."""
        assert isinstance(comparison_space, ProjectionColumns)
        assert example.teacher_logprobs is not None
        ranges, pairs = span_ranges(example), comparison_space.pairs
        is_single = (ranges.row_stop - ranges.row_start == 1) & (ranges.position_stop - ranges.position_start == 1)
        ranges = ItemRanges(*(part[is_single] for part in ranges))
        no_units = np.zeros(len(ranges.row_start))
        shared = shared_cell_fields(ranges, no_units, example.teacher_logprobs, pairs)
        return SharedVocabularyCells.from_numpy(**shared, top_k=self.top_k)
