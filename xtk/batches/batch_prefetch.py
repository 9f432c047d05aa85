"""Prefetching of training batches, in a thread or in DataLoader worker processes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from xtk import terminal
from xtk.batches.micro_batches import BatchBuilder, BatchSampler, MicroBatch, prefetch_in_thread
from xtk.errors import XtkError
from xtk.losses.cells.loss_cells import LossCells
from xtk.projection.vocabulary_array import VocabularyArray
from xtk.subprocesses import die_with_parent
from xtk.writable_cache_folders import shared_memory_is_writable

PREFETCH_STEPS = 2  # per worker process
MAX_SHUTDOWN_SECONDS = 30  # for what a worker sends while a run ends


@dataclass(frozen=True)
class StepBatchBuilder:
    """Builds the micro-batches of one training process, step by step; deterministic, so workers can call it."""

    batch_builder: BatchBuilder  # builds one micro-batch
    sampler: BatchSampler  # chooses the documents of each step
    documents_per_batch: int  # documents in a micro-batch
    max_tokens: int  # maximum number of tokens in a micro-batch; 0: `documents_per_batch` decides
    rank: int  # index of this data shard
    num_ranks: int  # number of data shards
    pins: bool = False  # whether cells are moved to pinned memory, for a GPU

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
    """Yield the micro-batches of each step, in order, built while earlier steps train; `num_workers` 0: by a thread."""
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
    arrays: dict[str, VocabularyArray] = {}  # those that workers have sent, by digest

    def known(array: VocabularyArray | _SentArray) -> VocabularyArray:
        return arrays[array.digest] if isinstance(array, _SentArray) else arrays.setdefault(array.digest, array)

    def received(made: list[MicroBatch] | XtkError) -> list[MicroBatch]:
        if isinstance(made, XtkError):
            raise made
        batches = [_with_terms(batch, np.ndarray, torch.from_numpy) for batch in made]
        batches = [_with_terms(batch, (VocabularyArray, _SentArray), known) for batch in batches]
        return [pinned(batch) for batch in batches] if make.pins else batches

    # The iterator begins here: torch reports killed workers only to the main thread.
    yield from _receive_in_thread(iter(loader), received, len(steps))


def _receive_in_thread(messages: Any, convert: Callable[[Any], list[MicroBatch]], count: int) -> Iterator[Any]:
    """Yield converted messages of a DataLoader's iterator, each received while the previous one is used.

    Not by an executor, whose thread is waited for when the process ends: that of a killed worker may wait for ever.
    """
    requests: queue.SimpleQueue[bool] = queue.SimpleQueue()
    replies: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def receive() -> None:
        while requests.get():
            try:
                replies.put((convert(next(messages)), None))
            except BaseException as failure:  # raised where the batch is used
                replies.put((None, failure))

    thread = threading.Thread(target=receive, name="xtk-batches", daemon=True)
    thread.start()
    try:
        requests.put(True)
        for number in range(count):
            batches, failure = replies.get()
            if failure is not None:
                raise failure
            requests.put(number + 1 < count)
            yield batches
    finally:
        requests.put(False)
        thread.join(MAX_SHUTDOWN_SECONDS)
        if thread.is_alive():
            messages._shutdown_workers()  # else done when the iterator is deleted, which the thread prevents


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
    """Micro-batches by step number, sent as NumPy arrays: each tensor would take a file descriptor.

    Arrays of the vocabularies are sent once.
    """

    def __init__(self, make: StepBatchBuilder) -> None:
        self._make = make
        self._sent: set[str] = set()  # digests

    def __getitem__(self, step: int) -> list[MicroBatch] | XtkError:
        try:
            batches = [_with_terms(batch, torch.Tensor, torch.Tensor.numpy) for batch in self._make(step)]
        except XtkError as failure:
            return failure
        return [_with_terms(batch, VocabularyArray, self._send) for batch in batches]

    def _send(self, array: VocabularyArray) -> VocabularyArray | _SentArray:
        if array.digest in self._sent:
            return _SentArray(array.digest)
        self._sent.add(array.digest)
        return array


@dataclass(frozen=True)
class _SentArray:
    """Stands for an array of the vocabularies that this worker has sent before."""

    digest: str


def _identity(made: Any) -> Any:
    return made


def _start_worker(run: int, number: int) -> None:
    """Make a worker end with the training process (also if that has ended already) and ignore stop signals."""
    die_with_parent(run, signal_number=signal.SIGKILL)
    for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # Slurm signals all processes of a step
        signal.signal(stop, signal.SIG_IGN)


def _with_terms(batch: MicroBatch, kind: type | tuple[type, ...], convert: Callable[[Any], Any]) -> MicroBatch:
    """Return a micro-batch whose loss terms have all values of a type converted."""
    return dataclasses.replace(batch, terms=tuple(converted(term, kind, convert) for term in batch.terms))


def converted(value: Any, kind: type | tuple[type, ...], convert: Callable[[Any], Any]) -> Any:
    """Return a value whose parts of a type, in lists, tuples, dictionaries and dataclasses, are converted."""
    if isinstance(value, kind):
        return convert(value)
    if isinstance(value, list | tuple):
        return type(value)(converted(item, kind, convert) for item in value)
    if isinstance(value, dict):
        return {name: converted(item, kind, convert) for name, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **converted(fields, kind, convert))
    return value


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
