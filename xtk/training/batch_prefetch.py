"""Batches made ahead of the device: by a thread of the run, or by processes of their own."""

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
from xtk.cache_directories import shared_memory_is_writable
from xtk.errors import XtkError
from xtk.subprocesses import die_with_parent
from xtk.training.micro_batches import BatchBuilder, BatchSampler, MicroBatch, prefetch_in_thread

PREFETCH_STEPS = 2  # of each process


@dataclass(frozen=True)
class StepBatchBuilder:
    """Makes the micro-batches of one process of a run, a step at a time: the same ones wherever it is called.

    Attributes:
        batch_builder: makes micro-batches.
        sampler: which documents a step takes.
        documents_per_batch: documents of a micro-batch.
        max_tokens: tokens of a micro-batch at most; 0: of so many documents as above.
        rank: which share of the documents is taken.
        num_ranks: how many shares there are.
    """

    batch_builder: BatchBuilder
    sampler: BatchSampler
    documents_per_batch: int
    max_tokens: int
    rank: int
    num_ranks: int

    def __call__(self, step: int) -> list[MicroBatch]:
        """Return those of a step."""
        draw = self.sampler.epoch_of_step(step)
        if self.max_tokens:
            numbers = self.sampler.documents_of_rank(step, self.rank, self.num_ranks)
            return self.batch_builder.build_within_tokens(numbers, self.max_tokens, draw) or [
                self.batch_builder.build([], draw)
            ]
        shares = self.sampler.micro_batches_of_rank(step, self.rank, self.num_ranks, self.documents_per_batch)
        return [self.batch_builder.build(numbers, draw) for numbers in shares]


def prefetch(build_step: StepBatchBuilder, steps: range, num_workers: int) -> Iterator[list[MicroBatch]]:
    """Yield the micro-batches of steps, in order, made while those before them are used.

    Args:
        build_step: makes those of a step.
        steps: which.
        num_workers: processes; 0: a thread.

    Raises:
        XtkError: what a process met.
    """
    if num_workers and steps and not shared_memory_is_writable():
        terminal.note(
            "cannot write to /dev/shm, where processes keep locks: batches are prepared in a thread, without "
            f"--dataloader-num-workers {num_workers}"
        )
        num_workers = 0
    return (
        _by_processes(build_step, steps, num_workers)
        if num_workers and steps
        else prefetch_in_thread(build_step, steps)
    )


def _by_processes(make: StepBatchBuilder, steps: range, workers: int) -> Iterator[list[MicroBatch]]:
    loader = torch.utils.data.DataLoader(
        _Steps(make),
        batch_size=None,
        sampler=steps,
        num_workers=workers,
        prefetch_factor=PREFETCH_STEPS,
        collate_fn=_as_it_is,
        multiprocessing_context="spawn",  # a fork would take locks along that threads hold
        worker_init_fn=functools.partial(_begin, os.getpid()),
        generator=torch.Generator(),  # else a number of the run's own generator is drawn
    )
    for made in loader:
        if isinstance(made, XtkError):
            raise made
        yield [_with_terms(batch, np.ndarray, torch.from_numpy) for batch in made]


@contextlib.contextmanager
def report_killed_workers() -> Iterator[None]:
    """Tell of a process that was killed. torch's handler of signals raises wherever the run is at that time.

    Raises:
        XtkError: in the place of torch's error.
    """
    try:
        yield
    except RuntimeError as wrong:
        if "DataLoader worker" not in str(wrong):
            raise
        raise XtkError(
            f"a process that makes batches was killed: {' '.join(str(wrong).split())}",
            where="--dataloader-num-workers",
            hint="fewer of them, if memory ran out; the same command goes on from the last checkpoint",
        ) from None


class _Steps(torch.utils.data.Dataset[Any]):
    """Steps by their numbers. What is made travels as arrays: tensors would each take a file descriptor."""

    def __init__(self, make: StepBatchBuilder) -> None:
        self._make = make

    def __getitem__(self, step: int) -> list[MicroBatch] | XtkError:
        try:
            return [_with_terms(batch, torch.Tensor, torch.Tensor.numpy) for batch in self._make(step)]
        except XtkError as wrong:
            return wrong


def _as_it_is(made: Any) -> Any:
    return made


def _begin(run: int, number: int) -> None:
    """Begin as one of the processes of a run: it ends with the run, also one that has ended already."""
    die_with_parent(run, signal_number=signal.SIGKILL)
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.SIG_IGN)


def _with_terms(batch: MicroBatch, kind: type, convert: Callable[[Any], Any]) -> MicroBatch:
    """Return a micro-batch with the arrays of its terms converted."""
    return dataclasses.replace(batch, terms=tuple(_converted(term, kind, convert) for term in batch.terms))


def _converted(value: Any, kind: type, convert: Callable[[Any], Any]) -> Any:
    if isinstance(value, kind):
        return convert(value)
    if isinstance(value, list | tuple):
        return type(value)(_converted(one, kind, convert) for one in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        changed = {name: _converted(one, kind, convert) for name, one in fields.items()}
        return dataclasses.replace(value, **changed)
    return value
