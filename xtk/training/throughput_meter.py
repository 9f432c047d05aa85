"""Throughput, data wait and memory of training, as logged in `metrics.jsonl`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from xtk import terminal
from xtk.batches.micro_batches import MicroBatch
from xtk.parallel.parallel_config import ParallelConfig
from xtk.runs.metrics_file import metric_name, peak_memory_bytes


class ThroughputMeter:
    """Measures throughput, data wait and memory between logged steps; `tokens`: of the run before this start."""

    def __init__(self, parallel: ParallelConfig, device: torch.device, teachers: Sequence[str], tokens: int) -> None:
        self._layout, self._device, self._teachers = parallel, device, teachers
        self._tokens = self._num_nan = 0
        self._unaligned = np.zeros((len(self._teachers), 2))
        self._all_tokens = tokens
        self._interval_start = self._started = time.monotonic()
        self._waited = 0.0
        self.summary = ""

    def timed(self, batches: Iterator[list[MicroBatch]]) -> Iterator[list[MicroBatch]]:
        """Yield batches, and measure the time until each is available."""
        started = time.monotonic()
        for batch in batches:
            self._waited += time.monotonic() - started
            yield batch
            started = time.monotonic()

    def count(self, batches: list[MicroBatch]) -> None:
        """Count the tokens of a step."""
        self._tokens += sum(batch.tokens for batch in batches)
        self._unaligned += sum(batch.unaligned for batch in batches)
        self._num_nan += sum(batch.nan_positions for batch in batches)

    def total_tokens(self) -> int:
        """Return the tokens of the run so far, over all processes (collective)."""
        tokens = np.array([self._tokens], np.float64)
        return self._all_tokens + int(self._layout.all_reduce_sum_of_host(tokens, "data", self._device)[0])

    @contextlib.contextmanager
    def exclude_from_rate(self) -> Iterator[None]:
        """Exclude the time of a `with` block, which is not training, from the throughput."""
        started = time.monotonic()
        yield
        self._interval_start += time.monotonic() - started

    @contextlib.contextmanager
    def exclude_from_rate_and_wait(self) -> Iterator[None]:
        """Exclude the time of online teachers from the throughput and from the data wait."""
        started = time.monotonic()
        with self.exclude_from_rate():
            yield
        self._waited -= time.monotonic() - started

    def metrics(self) -> dict[str, float]:
        """Return the metrics since the last call, over all processes, and reset (collective)."""
        counts = np.array([self._tokens, self._num_nan, *self._unaligned.reshape(-1)], np.float64)
        tokens, num_nan, *unaligned = self._layout.all_reduce_sum_of_host(counts, "data", self._device)
        now = time.monotonic()
        seconds = max(now - self._interval_start, 1e-9)
        waiting = min(1.0, self._layout.all_reduce_max(round(1e6 * self._waited)) / 1e6 / seconds)
        memory = self._layout.all_reduce_max(peak_memory_bytes(self._device)) / 2**30
        # The first step contains the start of the run: its rate says nothing about the next ones.
        if self._all_tokens:
            self.summary = f"{tokens / seconds:,.0f} tokens/s  {memory:.1f} GiB  data wait {waiting:.1%}"
        self._all_tokens += int(tokens)
        self._tokens, self._waited = 0, 0.0
        self._unaligned[:] = 0
        self._interval_start = now
        if num_nan:
            terminal.note(f"distill: warning: {num_nan:,.0f} positions skipped so far: teacher log-probability is NaN")
        return {
            "tokens": self._all_tokens,
            "tokens_per_second": round(tokens / seconds, 1),
            "training_seconds": round(now - self._started, 3),
            "data_wait_fraction": round(waiting, 6),
            "peak_memory_gib": round(memory, 3),
            **{
                metric_name("unaligned_fraction", name, self._teachers): round(missed / max(rows, 1), 6)
                for name, missed, rows in zip(self._teachers, unaligned[::2], unaligned[1::2], strict=True)
            },
        }
