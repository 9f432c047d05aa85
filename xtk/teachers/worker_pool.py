"""Pool of worker processes on this machine that write shards of one cache."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any

import torch

from xtk.engines.worker_process import WorkerKind, WorkerProcess, stop_workers
from xtk.errors import XtkError
from xtk.subprocesses import cuda_visible_devices, environment_without_launcher_variables
from xtk.teachers.cache_shard_writing import CacheJob

EXIT_SECONDS = 30.0  # wait for a worker that has finished
RESUME_HINT = "run the same command again; finished parts are kept"
SHARD_WORKER = WorkerKind(
    main="xtk.teachers.cache_shard_writing:serve_shard_writer",
    process="a worker process of the teacher",
    exit_hint="see the messages of this process above",
    signal_hint=RESUME_HINT,
    memory_hint=f"if memory ran out, use a smaller --num-processes or --batch-tokens; {RESUME_HINT}",
)


class WorkerPool:
    """Worker processes that each open the teacher and write some of the shards.

    Args:
        num_processes: number of processes; several have separate devices, if this machine has devices.
        devices: devices that all processes see; (): as above.
    """

    def __init__(self, num_processes: int, job: CacheJob, devices: Sequence[int] = ()) -> None:
        self._job = job
        self._environments = _worker_environments(num_processes)
        if devices:
            for environment in self._environments:
                environment |= cuda_visible_devices(devices)
        self._workers: list[WorkerProcess] = []

    def __enter__(self) -> WorkerPool:
        try:
            inherited = self._job.corpus.inherited_descriptors()
            for number, environment in enumerate(self._environments):
                name = f"process {number} of {len(self._environments)}"
                self._workers.append(WorkerProcess(SHARD_WORKER, name, environment, inherited))
            for worker in self._workers:
                worker.send(self._job)
            for _ in self._messages():  # until each teacher is open
                pass
        except BaseException:
            stop_workers(self._workers, 0.0)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        stop_workers(self._workers, EXIT_SECONDS if kind is None else 0.0)

    def write_shards(self, shard_numbers: list[int]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Distribute shards over the processes; may be called once.

        Yields:
            The number and the manifest entry of each written shard.
        """
        for at, worker in enumerate(self._workers):
            worker.send(shard_numbers[at :: len(self._workers)])
        yield from self._messages()

    def _messages(self) -> Iterator[Any]:
        """Yield the messages of all workers until each has sent None."""
        left: dict[Any, WorkerProcess] = {worker.pipe: worker for worker in self._workers}
        while left:
            for pipe in wait(list(left)):
                message = left[pipe].receive()
                if message is None:
                    del left[pipe]
                else:
                    yield message


def _worker_environments(count: int) -> list[dict[str, str]]:
    """Return the environment of each process, with its device or its number of CPU threads."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    common = environment_without_launcher_variables()
    common.setdefault("OMP_NUM_THREADS", str(max(1, cores // count)))
    if count == 1 or not torch.cuda.is_available():
        return [dict(common) for _ in range(count)]
    devices = torch.cuda.device_count()
    if count > devices:
        raise XtkError(
            f"--num-processes is {count}; this machine has only {devices} devices",
            hint=f"use --num-processes {devices} or less",
        )
    return [common | cuda_visible_devices([number]) for number in range(count)]
