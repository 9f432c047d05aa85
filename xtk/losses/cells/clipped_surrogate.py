"""PPO-style clipped surrogate, used instead of a divergence for completions sampled from the student."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from xtk.losses.cells.span_probability_products import SpanProductCells

MAX_LOG_RATIO = 20.0  # nats, so that one importance ratio cannot overflow a sum


@dataclass(frozen=True, kw_only=True)
class ClippedSurrogateCells(SpanProductCells):
    """Spans of probability P that the student sampled, and their clipped surrogate.

    An item's value is `-min(ratio a, clip(ratio, min_ratio, max_ratio) a)`, `ratio = P / P_old`. It has one final cell.
    """

    sampling_logprobs: Tensor  # float64 [C], `ln P_old`, at the time of sampling
    advantages: Tensor  # float64 [C], a; constants
    min_ratio: float  # lower bound of the importance ratio
    max_ratio: float  # upper bound of it
    ignores_remainder: bool = True
    # float64 [3], accumulated over all evaluated items with a weight above 0: their number, the sum of their importance
    # ratios, and the number of ratios whose clipping sets the gradient to 0.
    ratio_statistics: Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.float64))

    PER_ITEM: ClassVar[tuple[str, ...]] = (*SpanProductCells.PER_ITEM, "sampling_logprobs", "advantages")
    ON_DEVICE: ClassVar[tuple[str, ...]] = (*SpanProductCells.ON_DEVICE, "sampling_logprobs", "advantages")

    def to(self, device: torch.device, scale: float) -> Self:
        """Return a copy on a device, with a scale, and with statistics of 0."""
        return replace(super().to(device, scale), ratio_statistics=torch.zeros(3, dtype=torch.float64, device=device))

    def value(self, cells: Tensor, remainders: Tensor, *others: Tensor) -> Tensor:
        """Return the weighted sum of the surrogates, and update the statistics."""
        log_probs = torch.cat(self.apply_prefix(cells, remainders, self.prefix_sums(cells)))  # there are no remainders
        ratios = (log_probs - self.sampling_logprobs).clamp_max(MAX_LOG_RATIO).exp()
        # min(ratio a, clip(ratio) a) is clipped from above for positive advantages, from below for all others.
        bounded = torch.where(self.advantages > 0, ratios.clamp_max(self.max_ratio), ratios.clamp_min(self.min_ratio))
        with torch.no_grad():
            clipped = (bounded != ratios) & (self.advantages != 0)
            counted = torch.ones_like(ratios) if self.weights is None else (self.weights != 0).to(ratios)
            self.ratio_statistics.add_(
                torch.stack([counted.sum(), (counted * ratios).sum(), (counted * clipped).sum()])
            )
        values = -bounded * self.advantages
        return (values if self.weights is None else values * self.weights).sum()
