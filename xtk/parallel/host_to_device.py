"""Copies between host and GPU: those for which the host does not wait, and one read for several tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from xtk.projection.vocabulary_array import VocabularyArray


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Return values on a device; on a GPU, host tensors are copied from pinned memory, after the call has returned.

    Torch keeps the pinned memory until the copy is complete. A copy from other memory would wait for all work that is
    queued on the GPU.
    """
    if device.type != "cuda" or values.device.type != "cpu":
        return values.to(device)
    pinned = values if values.is_pinned() else values.pin_memory()
    return pinned.to(device, non_blocking=True)


def to_device_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return host tensors on a device; on a GPU they are copied as one tensor, since each copy is a launch."""
    if device.type != "cuda":
        return [tensor.to(device) for tensor in tensors]
    # The largest elements first, so that each tensor begins at a multiple of its element size.
    order = sorted(range(len(tensors)), key=lambda number: -tensors[number].element_size())
    parts = [tensors[number].reshape(-1).view(torch.uint8) for number in order]
    pieces = torch.split(to_device(torch.cat(parts), device), [len(part) for part in parts])
    there = list(tensors)
    for number, piece in zip(order, pieces, strict=True):
        there[number] = piece.view(tensors[number].dtype).view(tensors[number].shape)
    return there


def vocabulary_tensor(array: VocabularyArray, device: torch.device) -> Tensor:
    """Return an array of the vocabularies on a device; it is copied there at the first call and kept."""
    if device not in array.copies:
        array.copies[device] = to_device(torch.from_numpy(array.values), device)
    copy: Tensor = array.copies[device]
    return copy


def start_copy_to_host(values: Tensor) -> Callable[[], Tensor]:
    """Start to copy values to the host; return a function that waits for the copy and returns it.

    On a GPU the copy goes to pinned memory while later work is queued.
    """
    if values.device.type != "cuda":
        return lambda: values
    host = torch.empty(values.shape, dtype=values.dtype).pin_memory()
    host.copy_(values, non_blocking=True)
    copied: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record(torch.cuda.current_stream(values.device))  # of a teacher on several GPUs, not the current one

    def wait() -> Tensor:
        copied.synchronize()
        return host

    return wait


def read_together(tensors: Sequence[Tensor]) -> list[list[float]]:
    """Return the elements of each tensor as floats, with one read per device."""
    values: list[list[float]] = [[] for _ in tensors]
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        numbers = [number for number, tensor in enumerate(tensors) if tensor.device == device]
        flat = torch.cat([tensors[number].detach().double().reshape(-1) for number in numbers]).tolist()
        for number in numbers:
            count = tensors[number].numel()
            values[number], flat = flat[:count], flat[count:]
    return values
