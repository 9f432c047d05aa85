"""Prefetching of training batches, in a thread or in DataLoader worker processes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from xtk import terminal
from xtk.batches.batch_copies import pinned
from xtk.batches.micro_batches import BatchBuilder, BatchSampler, MicroBatch, prefetch_in_thread
from xtk.errors import XtkError
from xtk.subprocesses import die_with_parent
from xtk.writable_cache_folders import shared_memory_is_writable

PREFETCH_STEPS = 2  # per worker process


@dataclass(frozen=True)
class StepBatchBuilder:
    """Builds the micro-batches of one training process, step by step; deterministic, so workers can call it.

    Attributes:
        batch_builder: builds one micro-batch.
        sampler: chooses the documents of each step.
        documents_per_batch: documents in a micro-batch.
        max_tokens: maximum number of tokens in a micro-batch; 0: `documents_per_batch` decides.
        rank: index of this data shard.
        num_ranks: number of data shards.
        pins: whether cells are moved to pinned memory, for a GPU.
    """

    batch_builder: BatchBuilder
    sampler: BatchSampler
    documents_per_batch: int
    max_tokens: int
    rank: int
    num_ranks: int
    pins: bool = False

    def __call__(self, step: int) -> list[MicroBatch]:
        """Return the micro-batches of a step."""
        micro_batches = self._build(step)
        return [pinned(batch) for batch in micro_batches] if self.pins else micro_batches

    def documents(self, step: int) -> list[int]:
        """Return the documents of a step that this process trains on."""
        if self.max_tokens:
            return self.sampler.documents_of_rank(step, self.rank, self.num_ranks)
        groups = self.sampler.micro_batches_of_rank(step, self.rank, self.num_ranks, self.documents_per_batch)
        return [number for group in groups for number in group]

    def _build(self, step: int) -> list[MicroBatch]:
        epoch, builder, is_first = self.sampler.epoch_of_step(step), self.batch_builder, step == 0
        if self.max_tokens:
            numbers = self.sampler.documents_of_rank(step, self.rank, self.num_ranks)
            return builder.build_within_tokens(numbers, self.max_tokens, epoch, with_compared_text=is_first) or [
                builder.build([], epoch, with_compared_text=is_first)
            ]
        micro_batches = self.sampler.micro_batches_of_rank(step, self.rank, self.num_ranks, self.documents_per_batch)
        return [builder.build(numbers, epoch, with_compared_text=is_first) for numbers in micro_batches]


def prefetch(build_step: StepBatchBuilder, steps: range, num_workers: int) -> Iterator[list[MicroBatch]]:
    """Yield the micro-batches of each step, in order; later steps are built while earlier ones train.

    Args:
        build_step: builds the micro-batches of a step.
        num_workers: number of worker processes; 0: one thread.
    """
    if num_workers and steps and not shared_memory_is_writable():
        terminal.note(
            "distill: warning: /dev/shm is not writable, so that batches are built in a thread; "
            f"--dataloader-num-workers {num_workers} is ignored"
        )
        num_workers = 0
    return (
        _by_processes(build_step, steps, num_workers)
        if num_workers and steps
        else prefetch_in_thread(build_step, steps)
    )


def _by_processes(make: StepBatchBuilder, steps: range, workers: int) -> Iterator[list[MicroBatch]]:
    loader = torch.utils.data.DataLoader(
        _Steps(dataclasses.replace(make, pins=False)),  # a worker process uses no GPU
        batch_size=None,
        sampler=steps,
        num_workers=workers,
        prefetch_factor=PREFETCH_STEPS,
        collate_fn=_identity,
        multiprocessing_context="spawn",  # fork would copy locks that threads hold
        worker_init_fn=functools.partial(_start_worker, os.getpid()),
        generator=torch.Generator(),  # without it the loader advances the global generator
    )
    for made in loader:
        if isinstance(made, XtkError):
            raise made
        batches = [_with_terms(batch, np.ndarray, torch.from_numpy) for batch in made]
        yield [pinned(batch) for batch in batches] if make.pins else batches


@contextlib.contextmanager
def report_killed_workers() -> Iterator[None]:
    """Turn torch's error about a killed DataLoader worker into an `XtkError`; torch raises it from a signal handler."""
    try:
        yield
    except RuntimeError as failure:
        if "DataLoader worker" not in str(failure):
            raise
        raise XtkError(
            f"a process of --dataloader-num-workers was killed: {' '.join(str(failure).split())}",
            where="--dataloader-num-workers",
            hint="use fewer workers if memory ran out; run the same command again to resume from the last checkpoint",
        ) from None


class _Steps(torch.utils.data.Dataset[Any]):
    """Micro-batches by step number, sent as NumPy arrays: each tensor would take a file descriptor."""

    def __init__(self, make: StepBatchBuilder) -> None:
        self._make = make

    def __getitem__(self, step: int) -> list[MicroBatch] | XtkError:
        try:
            return [_with_terms(batch, torch.Tensor, torch.Tensor.numpy) for batch in self._make(step)]
        except XtkError as failure:
            return failure


def _identity(made: Any) -> Any:
    return made


def _start_worker(run: int, number: int) -> None:
    """Make a worker end with the training process (also if that has ended already) and ignore stop signals."""
    die_with_parent(run, signal_number=signal.SIGKILL)
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.SIG_IGN)


def _with_terms(batch: MicroBatch, kind: type, convert: Callable[[Any], Any]) -> MicroBatch:
    """Return a micro-batch whose loss terms have all values of type `kind` converted."""
    return dataclasses.replace(batch, terms=tuple(_converted(term, kind, convert) for term in batch.terms))


def _converted(value: Any, kind: type, convert: Callable[[Any], Any]) -> Any:
    if isinstance(value, kind):
        return convert(value)
    if isinstance(value, list | tuple):
        return type(value)(_converted(item, kind, convert) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        changed = {name: _converted(field, kind, convert) for name, field in fields.items()}
        return dataclasses.replace(value, **changed)
    return value
