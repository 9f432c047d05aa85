"""Surrogates: what stands in the place of a divergence where the student learns from what it drew."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import torch
from torch import Tensor

from xtk.losses.loss_cells import ClippedSurrogate

MAX_LOG_RATIO = 20.0  # of the logarithm of a ratio, so that one token cannot overflow a sum


@dataclass(frozen=True)
class TermSurrogate:
    """`ClippedSurrogate` of the items of a term, or of some of them.

    Attributes:
        ratio_statistics: float64 [3], of all items that went through this object or its parts: how many, the sum of
            their ratios,
            and how many ratios were clipped where that counts, so that their gradient is 0.
    """

    sampling_logprobs: Tensor
    advantages: Tensor
    min_ratio: float
    max_ratio: float
    ratio_statistics: Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.float64))

    @classmethod
    def from_surrogate(cls, surrogate: ClippedSurrogate) -> TermSurrogate:
        """Take the arrays as they are."""
        arrays = torch.from_numpy(surrogate.sampling_logprobs), torch.from_numpy(surrogate.advantages)
        return cls(*arrays, surrogate.min_ratio, surrogate.max_ratio)

    def to(self, device: torch.device) -> TermSurrogate:
        """Return the same on a device, which has seen nothing."""
        logprobs, advantages = (one.to(device, non_blocking=True) for one in (self.sampling_logprobs, self.advantages))
        seen = torch.zeros(3, dtype=torch.float64, device=device)
        return dataclasses.replace(self, sampling_logprobs=logprobs, advantages=advantages, ratio_statistics=seen)

    def select(self, items: slice) -> TermSurrogate:
        """Cut out some items."""
        return dataclasses.replace(
            self, sampling_logprobs=self.sampling_logprobs[items], advantages=self.advantages[items]
        )

    def item_losses(self, log_probs: Tensor) -> Tensor:
        """Return what each item adds [items].

        Args:
            log_probs: [items], fp64, what the student says now.
        """
        ratios = (log_probs - self.sampling_logprobs).clamp_max(MAX_LOG_RATIO).exp()
        # min(ratio a, clip(ratio) a) is clipped above for what is to become likelier, below for all else.
        bounded = torch.where(self.advantages > 0, ratios.clamp_max(self.max_ratio), ratios.clamp_min(self.min_ratio))
        with torch.no_grad():
            clipped = (bounded != ratios) & (self.advantages != 0)
            self.ratio_statistics.add_(torch.stack([torch.ones_like(ratios).sum(), ratios.sum(), clipped.sum()]))
        return -bounded * self.advantages
