"""Surrogates: what stands in the place of a divergence where the student learns from what it drew."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import torch
from torch import Tensor

from xtk.losses.cells import Surrogate

MOST = 20.0  # of the logarithm of a ratio, so that one token cannot overflow a sum


@dataclass(frozen=True)
class SurrogateOfTerm:
    """`Surrogate` of the items of a term, or of some of them.

    Attributes:
        seen: float64 [3], of all items that went through this object or its parts: how many, the sum of their ratios,
            and how many ratios were clipped where that counts, so that their gradient is 0.
    """

    logprobs: Tensor
    advantages: Tensor
    low: float
    high: float
    seen: Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.float64))

    @classmethod
    def of(cls, surrogate: Surrogate) -> SurrogateOfTerm:
        """Take the arrays as they are."""
        arrays = torch.from_numpy(surrogate.logprobs), torch.from_numpy(surrogate.advantages)
        return cls(*arrays, surrogate.low, surrogate.high)

    def to(self, device: torch.device) -> SurrogateOfTerm:
        """Return the same on a device, which has seen nothing."""
        logprobs, advantages = (one.to(device, non_blocking=True) for one in (self.logprobs, self.advantages))
        seen = torch.zeros(3, dtype=torch.float64, device=device)
        return dataclasses.replace(self, logprobs=logprobs, advantages=advantages, seen=seen)

    def part(self, items: slice) -> SurrogateOfTerm:
        """Cut out some items."""
        return dataclasses.replace(self, logprobs=self.logprobs[items], advantages=self.advantages[items])

    def of_items(self, log_probs: Tensor) -> Tensor:
        """Return what each item adds [items].

        Args:
            log_probs: [items], fp64, what the student says now.
        """
        ratios = (log_probs - self.logprobs).clamp_max(MOST).exp()
        # min(ratio a, clip(ratio) a) is clipped above for what is to become likelier, below for all else.
        bounded = torch.where(self.advantages > 0, ratios.clamp_max(self.high), ratios.clamp_min(self.low))
        with torch.no_grad():
            clipped = (bounded != ratios) & (self.advantages != 0)
            self.seen.add_(torch.stack([torch.ones_like(ratios).sum(), ratios.sum(), clipped.sum()]))
        return -bounded * self.advantages
