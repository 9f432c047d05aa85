"""PPO-style clipped surrogate, used instead of a divergence for completions sampled from the student."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import torch
from torch import Tensor

from xtk.losses.loss_interface import ClippedSurrogate

MAX_LOG_RATIO = 20.0  # nats, so that one importance ratio cannot overflow a sum


@dataclass(frozen=True)
class TermSurrogate:
    """`ClippedSurrogate` for the items of a loss term, or for some of them.

    Attributes:
        ratio_statistics: float64 [3], accumulated over all items that this object or its selections evaluated: their
            number, the sum of their importance ratios, and the number of ratios whose clipping sets the gradient to 0.
    """

    sampling_logprobs: Tensor
    advantages: Tensor
    min_ratio: float
    max_ratio: float
    ratio_statistics: Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.float64))

    @classmethod
    def from_surrogate(cls, surrogate: ClippedSurrogate) -> TermSurrogate:
        """Return the surrogate with its arrays as CPU tensors."""
        arrays = torch.from_numpy(surrogate.sampling_logprobs), torch.from_numpy(surrogate.advantages)
        return cls(*arrays, surrogate.min_ratio, surrogate.max_ratio)

    def to(self, device: torch.device) -> TermSurrogate:
        """Return a copy on a device, with statistics of 0."""
        logprobs, advantages = (one.to(device, non_blocking=True) for one in (self.sampling_logprobs, self.advantages))
        zeros = torch.zeros(3, dtype=torch.float64, device=device)
        return dataclasses.replace(self, sampling_logprobs=logprobs, advantages=advantages, ratio_statistics=zeros)

    def select(self, items: slice) -> TermSurrogate:
        """Return the surrogate of some items; the statistics are shared."""
        return dataclasses.replace(
            self, sampling_logprobs=self.sampling_logprobs[items], advantages=self.advantages[items]
        )

    def item_losses(self, log_probs: Tensor) -> Tensor:
        """Return each item's loss [items], and update the statistics.

        Args:
            log_probs: [items], fp64, the current student's log-probabilities.
        """
        ratios = (log_probs - self.sampling_logprobs).clamp_max(MAX_LOG_RATIO).exp()
        # min(ratio a, clip(ratio) a) is clipped from above for positive advantages, from below for all others.
        bounded = torch.where(self.advantages > 0, ratios.clamp_max(self.max_ratio), ratios.clamp_min(self.min_ratio))
        with torch.no_grad():
            clipped = (bounded != ratios) & (self.advantages != 0)
            self.ratio_statistics.add_(torch.stack([torch.ones_like(ratios).sum(), ratios.sum(), clipped.sum()]))
        return -bounded * self.advantages
