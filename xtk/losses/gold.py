"""gold: tokens of equal bytes by their names, all others by their ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from xtk.errors import XtkError
from xtk.losses.loss_cells import ComparisonSpace, LossCells, LossInputs, span_ranges
from xtk.losses.pairs_and_ranks import paired_and_ranked_cells
from xtk.projection.projection import ProjectionColumns, TokenPairs

DEFAULT_MAX_RANKS = 8192  # ranks; X-Token, arXiv 2605.21699


@dataclass(frozen=True)
class GOLD:
    """gold: `a KL((P_t(m), rest) | (P_s(m), rest)) + b sum_r |P_t(r) - P_s(r)|`, averaged over spans.

    `m` are tokens of equal bytes on both sides, `r` the ranks of all other tokens, each side's own. Of a span of k
    tokens `P(v) = x_1 ... x_(k-1) p_k(v)`: the probabilities of its own tokens before the last, times the last
    distribution. All that is no pair is in the other cell of the KL. Of what the teacher does not name, no token is
    guessed: behind its ranks is at least nothing and at most its tail; only what the student has beyond that counts.
    Options: `paired_weight`, a, the share of the teacher's vocabulary that has a partner; `ranked_weight`, b, what is
    missing to 1; `max_ranks`, ranks at most, 8192; `divergence` and what it has, of the pairs; `published=true`: no
    other cell and nothing behind the ranks, which can be negative. TRL's GOLD with its "bayesian" merge.
    """

    paired_weight: float | None = None
    ranked_weight: float | None = None
    max_ranks: int = DEFAULT_MAX_RANKS
    published: bool = False

    comparison_space = "pairs"
    averaged_over = "spans"
    unit = "nats, and probability for the ranks"
    requires = "ranks"

    def __post_init__(self) -> None:
        """Refuse weights and caps that make no sense."""
        for name, weight in (("paired_weight", self.paired_weight), ("ranked_weight", self.ranked_weight)):
            if weight is not None and not 0 <= weight < float("inf"):
                raise XtkError(f"{name} of this loss is {weight}", hint="0 or a number above it")
        if self.max_ranks < 0:
            raise XtkError(f"max_ranks of this loss is {self.max_ranks}", hint="how many ranks are compared: 0 or more")

    def default_weights(self, pairs: TokenPairs) -> tuple[float, float]:
        """Return the weights of both parts where none are given."""
        share = len(pairs.paired_students) / max(1, len(pairs.student_of_teacher))
        return share, 1 - share

    def build_cells(self, example: LossInputs, comparison_space: ComparisonSpace) -> LossCells:
        """Return one item a span."""
        assert isinstance(comparison_space, ProjectionColumns)
        pairs = comparison_space.pairs
        common, uncommon = self.default_weights(pairs)
        common = common if self.paired_weight is None else self.paired_weight
        uncommon = uncommon if self.ranked_weight is None else self.ranked_weight
        cells, tails = paired_and_ranked_cells(
            example, span_ranges(example), pairs.student_of_teacher, self.max_ranks, uncommon
        )
        assert cells.sorted_probs is not None
        ranks = replace(
            cells.sorted_probs,
            excluded_tokens=pairs.paired_students,
            max_remainder=cells.sorted_probs.min_remainder + tails,
        )
        if self.published:
            nothing = np.zeros_like(tails)
            ranks = replace(ranks, min_remainder=nothing, max_remainder=nothing + np.inf)
        return replace(cells, sorted_probs=ranks, factor=common, outside_mode="ignored" if self.published else "other")
