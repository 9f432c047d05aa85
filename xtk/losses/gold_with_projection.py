"""h-kl: like gold, with token pairs taken from a projection."""

from __future__ import annotations

from dataclasses import dataclass

from xtk.losses.gold import GOLD
from xtk.projection.projection import TokenPairs


@dataclass(frozen=True)
class HKL(GOLD):
    """h-kl: `a KL((P_t(m), t_rem) | (P_s(m), s_rem)) + b sum_r |P_t(r) - P_s(r)|`, averaged over spans.

    Like gold, but a pair `m` is a student token and the teacher token with the largest weight in its row of the
    projection W, if that weight is at least 0.6. Each teacher token is in one pair: that of the largest weight; on ties
    of an ordinary token before byte fallback, then of the lowest student id. So a student token that is several teacher
    tokens is compared with the first of them.
    Options as for gold, with both weights 1. After X-Token's H-KL, arXiv 2605.21699, which averages log-probabilities
    over a span; `published=true` leaves out the remainder, as X-Token does.
    """

    comparison_space = "projection"

    def default_weights(self, pairs: TokenPairs) -> tuple[float, float]:
        """Return 1 for both parts, as published."""
        return 1.0, 1.0
