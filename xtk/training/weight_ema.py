"""An exponential moving average of the weights, cut over processes as they are, in fp32."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from xtk.training.sharded_state import local_tensor, with_sharding_of


class ExponentialMovingAverage:
    """Follows the weights: `average += (1 - decay) (weights - average)` after each step; it begins as they are.

    Polyak, B. and Juditsky, A., Acceleration of Stochastic Approximation by Averaging, 1992, with forgetting.

    Args:
        model: of which what is trained is followed.
        decay: from 0, which is no average, to below 1: about the last 1 / (1 - decay) steps count.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._decay = decay
        self._weights = {name: one for name, one in model.named_parameters() if one.requires_grad} if decay else {}
        self.averages: dict[str, Tensor] = {
            name: with_sharding_of(one, local_tensor(one.detach()).to(torch.float32, copy=True))
            for name, one in self._weights.items()
        }

    @torch.no_grad()
    def update(self) -> None:
        """Take a step of the weights into account."""
        for name, weight in self._weights.items():
            local_tensor(self.averages[name]).lerp_(local_tensor(weight).float(), 1 - self._decay)

    @contextlib.contextmanager
    def swapped_in(self, wrapped_model: nn.Module) -> Iterator[None]:
        """Let the model have the average for weights, for a while.

        Args:
            wrapped_model: the model with all that is around it; FSDP gathers its weights again.
        """
        trained = {name: local_tensor(weight.detach()).clone() for name, weight in self._weights.items()}
        self._put({name: local_tensor(average) for name, average in self.averages.items()}, wrapped_model)
        try:
            yield
        finally:
            self._put(trained, wrapped_model)

    @torch.no_grad()
    def _put(self, values: dict[str, Tensor], wrapped: nn.Module) -> None:
        if not values:
            return
        for part in wrapped.modules():
            if isinstance(part, FSDPModule):
                part.reshard()
        for name, value in values.items():
            local_tensor(self._weights[name]).copy_(value)
