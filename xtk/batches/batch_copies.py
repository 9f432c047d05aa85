"""Copies of micro-batches to a GPU, on a separate CUDA stream, while the previous micro-batch is computed."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from xtk.batches.micro_batches import MicroBatch
from xtk.losses.cells.loss_cells import LossCells


def pinned(batch: MicroBatch) -> MicroBatch:
    """Return a micro-batch whose cells are in pinned memory, from which a GPU copies while the host goes on."""
    return dataclasses.replace(batch, terms=tuple(term.pinned() for term in batch.terms))


def copied_ahead(
    micro_batches: Sequence[MicroBatch], scales: Sequence[float], device: torch.device
) -> Iterator[tuple[MicroBatch, list[LossCells]]]:
    """Yield each micro-batch with its losses' cells on the device, scaled; the next one's are copied meanwhile."""
    ahead: list[tuple[list[LossCells], Any]] = []
    for number, batch in enumerate(micro_batches):
        next_ones = micro_batches[number + len(ahead) : number + 2]
        ahead.extend(_start_copies(later, scales, device) for later in next_ones)
        terms, copies_end = ahead.pop(0)
        if copies_end is not None:
            _wait_for(copies_end, terms, device)
        yield batch, terms


def _start_copies(batch: MicroBatch, scales: Sequence[float], device: torch.device) -> tuple[list[LossCells], Any]:
    """Return the cells of a micro-batch on the device, and on a GPU the event that the copies end with, else None."""
    stream = _copy_stream(device)
    with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
        terms = [term.to(device, scale) for term, scale in zip(batch.terms, scales, strict=True)]
    return terms, None if stream is None else stream.record_event()


def _wait_for(copies_end: Any, terms: Sequence[LossCells], device: torch.device) -> None:
    """Make the GPU, not the host, wait for the copies of cells."""
    current = torch.cuda.current_stream(device)
    current.wait_event(copies_end)
    for term in terms:
        for field in dataclasses.fields(term):
            tensor = getattr(term, field.name)
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                tensor.record_stream(current)  # its memory was allocated for the other stream


@functools.cache
def _copy_stream(device: torch.device) -> Any:
    """Return the stream for copies to a GPU; None for the CPU."""
    on_gpu = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
