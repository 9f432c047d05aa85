"""gold: KL over tokens with equal bytes in both vocabularies, and L1 over the sorted probabilities of all others."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from xtk.errors import XtkError
from xtk.losses.cells.loss_cells import LossCells
from xtk.losses.cells.sorted_probs import SortedProbCells
from xtk.losses.interface import ComparisonSpace, Loss, LossInputs, span_ranges
from xtk.projection.projection import ProjectionColumns, TokenPairs

DEFAULT_MAX_RANKS = 8192  # as in X-Token, arXiv 2605.21699


@dataclass(frozen=True)
class GOLD(Loss):
    """gold: `a KL((P_t(m), t_rem) | (P_s(m), s_rem)) + b sum_r |P_t(r) - P_s(r)|`, averaged over spans.

    `m` are the paired tokens, with equal bytes in both vocabularies; `r` are the ranks of all other tokens, sorted by
    probability in each model separately. For a span of k tokens `P(v) = x_1 ... x_(k-1) p_k(v)`: the probabilities of
    the model's own tokens before the last, times its last distribution. `t_rem` and `s_rem` are the remainders, all
    mass outside of the pairs. Tokens that the teacher does not list are not guessed: their mass after the last rank is
    between 0 and the teacher's remainder, and only student mass beyond that counts. Options: `paired_weight` (a, the
    fraction of the teacher's vocabulary that is paired); `ranked_weight` (b, 1 - a); `max_ranks` (8192); `divergence`
    and its options, for the pairs; `published=true` (no remainder, and nothing after the last rank; can be negative).
    TRL's GOLD with its "bayesian" merge.
    """

    paired_weight: float | None = None
    ranked_weight: float | None = None
    max_ranks: int = DEFAULT_MAX_RANKS
    published: bool = False

    comparison_space = "pairs"
    averaged_over = "spans"
    unit = "nats, and probability for the ranks"
    requires = "ranks"
    items_are_spans = True

    def __post_init__(self) -> None:
        """Refuse negative or non-finite weights, and a negative number of ranks."""
        for name, weight in (("paired_weight", self.paired_weight), ("ranked_weight", self.ranked_weight)):
            if weight is not None and not 0 <= weight < float("inf"):
                raise XtkError(
                    f"{name} of the losses gold and h-kl must be at least 0 and finite, not {weight}",
                    hint=f"use --loss gold:{name}=1",
                )
        if self.max_ranks < 0:
            raise XtkError(
                f"max_ranks of the losses gold and h-kl must be at least 0, not {self.max_ranks}",
                hint=f"use --loss gold:max_ranks={DEFAULT_MAX_RANKS}; 0 compares only paired tokens",
            )

    def default_weights(self, pairs: TokenPairs) -> tuple[float, float]:
        """Return the default weights of the paired and the ranked part."""
        paired_fraction = np.count_nonzero(pairs.student_of_teacher >= 0) / max(1, len(pairs.student_of_teacher))
        return paired_fraction, 1 - paired_fraction

    def build_cells(self, example: LossInputs, comparison_space: ComparisonSpace) -> LossCells:
        """Return one item per span."""
        assert isinstance(comparison_space, ProjectionColumns)
        pairs = comparison_space.pairs
        common, uncommon = self.default_weights(pairs)
        common = common if self.paired_weight is None else self.paired_weight
        uncommon = uncommon if self.ranked_weight is None else self.ranked_weight
        ranges = span_ranges(example)
        cells = SortedProbCells.from_teacher(example, ranges, pairs.student_of_teacher, self.max_ranks, uncommon)
        cells = replace(cells, excluded_tokens=pairs.paired_students, factor=common)
        if not self.published:
            return cells
        nothing = torch.zeros_like(cells.min_remainder)
        return replace(cells, min_remainder=nothing, max_remainder=nothing + torch.inf, ignores_remainder=True)
