"""EMA of the weights in fp32, sharded like them; offloading of the student to CPU memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from xtk.runs.sharded_state import local_tensor, with_sharding_of


class ExponentialMovingAverage:
    """EMA of the trained weights: `average += (1 - decay) (weights - average)` after each step.

    Polyak, B. and Juditsky, A., Acceleration of Stochastic Approximation by Averaging, 1992, with forgetting.
    `decay`: at least 0 (no average) and below 1; about the last 1 / (1 - decay) steps count.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._decay = decay
        self._weights = (
            {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
            if decay
            else {}
        )
        self.averages: dict[str, Tensor] = {
            name: with_sharding_of(weight, local_tensor(weight.detach()).to(torch.float32, copy=True))
            for name, weight in self._weights.items()
        }

    @torch.no_grad()
    def update(self) -> None:
        """Update the average with the current weights."""
        for name, weight in self._weights.items():
            local_tensor(self.averages[name]).lerp_(local_tensor(weight).float(), 1 - self._decay)

    @contextlib.contextmanager
    def swapped_in(self, wrapped_model: nn.Module) -> Iterator[None]:
        """Give the wrapped model, whose weights FSDP gathers again, the averaged weights in a `with` block."""
        trained = {name: local_tensor(weight.detach()).clone() for name, weight in self._weights.items()}
        self._set_weights({name: local_tensor(average) for name, average in self.averages.items()}, wrapped_model)
        try:
            yield
        finally:
            self._set_weights(trained, wrapped_model)

    @torch.no_grad()
    def _set_weights(self, values: dict[str, Tensor], wrapped: nn.Module) -> None:
        if not values:
            return
        for part in wrapped.modules():
            if isinstance(part, FSDPModule):
                part.reshard()
        for name, value in values.items():
            local_tensor(self._weights[name]).copy_(value)


@contextlib.contextmanager
def offload_student(model: nn.Module, optimizer: torch.optim.Optimizer, storage_device: torch.device) -> Iterator[None]:
    """Move the student's weights, buffers and optimizer state to another device within a `with` block.

    Parameters and buffers stay the same objects; only their data moves. There are no gradients between steps.
    """
    holders: list[Tensor] = [*model.parameters(), *model.buffers()]
    devices = [holder.device for holder in holders]
    states = [
        (state, key, value.device)
        for state in optimizer.state.values()
        for key, value in state.items()
        if isinstance(value, Tensor)
    ]
    for holder in holders:
        holder.data = holder.data.to(storage_device)
    for state, key, _ in states:
        state[key] = state[key].to(storage_device)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    try:
        yield
    finally:
        for holder, device in zip(holders, devices, strict=True):
            holder.data = holder.data.to(device)
        for state, key, device in states:
            state[key] = state[key].to(device)
