"""Offloading of the student's weights and optimizer state to CPU memory while online teachers use the device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def offload_student(model: nn.Module, optimizer: torch.optim.Optimizer, storage_device: torch.device) -> Iterator[None]:
    """Move the student's weights, buffers and optimizer state to another device within a `with` block.

    Parameters and buffers stay the same objects; only their data moves. There are no gradients between steps.

    Args:
        model: the student, unsharded.
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
