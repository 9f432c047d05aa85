"""A student set aside while others work on its device: its weights and its optimizer in the memory of the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def offload_student(model: nn.Module, optimizer: torch.optim.Optimizer, storage_device: torch.device) -> Iterator[None]:
    """Keep what a student holds on its device elsewhere, and bring it back.

    Parameters and buffers stay the same objects; what they hold moves. Gradients are none between steps.

    Args:
        model: the student, of which this process has all.
        optimizer: over its parameters.
        storage_device: where it is kept.
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
