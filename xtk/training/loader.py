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
from xtk.caches import shared_memory_is_writable
from xtk.children import die_with
from xtk.errors import XtkError
from xtk.training.batches import BatchMaker, MicroBatch, Order, ahead

STEPS_AHEAD = 2  # of each process


@dataclass(frozen=True)
class StepBatches:
    """Makes the micro-batches of one process of a run, a step at a time: the same ones wherever it is called.

    Attributes:
        maker: makes micro-batches.
        order: which documents a step takes.
        batch: documents of a micro-batch.
        most: tokens of a micro-batch at most; 0: of so many documents as above.
        rank: which share of the documents is taken.
        ranks: how many shares there are.
    """

    maker: BatchMaker
    order: Order
    batch: int
    most: int
    rank: int
    ranks: int

    def __call__(self, step: int) -> list[MicroBatch]:
        """Return those of a step."""
        draw = self.order.epoch(step)
        if self.most:
            numbers = self.order.dealt(step, self.rank, self.ranks)
            return self.maker.within(numbers, self.most, draw) or [self.maker.make([], draw)]
        shares = self.order.share(step, self.rank, self.ranks, self.batch)
        return [self.maker.make(numbers, draw) for numbers in shares]


def made_ahead(make: StepBatches, steps: range, workers: int) -> Iterator[list[MicroBatch]]:
    """Yield the micro-batches of steps, in order, made while those before them are used.

    Args:
        make: makes those of a step.
        steps: which.
        workers: processes; 0: a thread.

    Raises:
        XtkError: what a process met.
    """
    if workers and steps and not shared_memory_is_writable():
        terminal.note(
            "cannot write to /dev/shm, where processes keep locks: batches are prepared in a thread, without "
            f"--dataloader-num-workers {workers}"
        )
        workers = 0
    return _by_processes(make, steps, workers) if workers and steps else ahead(make, steps)


def _by_processes(make: StepBatches, steps: range, workers: int) -> Iterator[list[MicroBatch]]:
    loader = torch.utils.data.DataLoader(
        _Steps(make),
        batch_size=None,
        sampler=steps,
        num_workers=workers,
        prefetch_factor=STEPS_AHEAD,
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
def killed_ones_told() -> Iterator[None]:
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

    def __init__(self, make: StepBatches) -> None:
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
    die_with(run, number=signal.SIGKILL)
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
