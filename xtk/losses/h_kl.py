"""h-kl: as gold, with pairs from a projection."""

from __future__ import annotations

from dataclasses import dataclass

from xtk.losses.gold import GOLD
from xtk.projection.projection import TokenPairs


@dataclass(frozen=True)
class HKL(GOLD):
    """h-kl: `a KL((P_t(m), rest) | (P_s(m), rest)) + b sum_r |P_t(r) - P_s(r)|`, averaged over spans.

    As gold, but `m` are a student token and the heaviest entry of its row of W, if that is at least 0.6: one pair a
    teacher token, the heaviest, the lowest student id on ties. So a token that the teacher spells in pieces is
    compared with its first piece. Options as those of gold; both weights are 1. After X-Token's H-KL, arXiv
    2605.21699, with means of log-probabilities over a span; `published=true` leaves out the other cell, as it does.
    """

    comparison_space = "projection"

    def default_weights(self, pairs: TokenPairs) -> tuple[float, float]:
        """Return 1 and 1, as published."""
        return 1.0, 1.0
