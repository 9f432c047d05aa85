"""Surrogates: what stands in the place of a divergence where the student learns from what it drew."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from xtk.losses.cells import Surrogate

MOST = 20.0  # of the logarithm of a ratio, so that one token cannot overflow a sum


@dataclass(frozen=True)
class SurrogateOfTerm:
    """`Surrogate` of the items of a term, or of some of them."""

    logprobs: Tensor
    advantages: Tensor
    low: float
    high: float

    @classmethod
    def of(cls, surrogate: Surrogate) -> SurrogateOfTerm:
        """Take the arrays as they are."""
        arrays = torch.from_numpy(surrogate.logprobs), torch.from_numpy(surrogate.advantages)
        return cls(*arrays, surrogate.low, surrogate.high)

    def to(self, device: torch.device) -> SurrogateOfTerm:
        """Return the same on a device."""
        logprobs, advantages = (one.to(device, non_blocking=True) for one in (self.logprobs, self.advantages))
        return dataclasses.replace(self, logprobs=logprobs, advantages=advantages)

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
        return -bounded * self.advantages
