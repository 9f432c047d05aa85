"""Worker processes of teachers on this machine: each opens the teacher, and writes shards of a cache or scores."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

import torch

from xtk.engines.worker_process import WorkerKind, WorkerProcess, stop_workers
from xtk.errors import XtkError
from xtk.subprocesses import cuda_visible_devices, environment_without_launcher_variables
from xtk.teachers.backend_interface import TeacherBackend
from xtk.teachers.cache_build_config import CacheRequest, open_teacher
from xtk.text.tokenizer import Tokenizer

EXIT_SECONDS = 30.0  # wait for a worker that has finished
RESUME_HINT = "run the same command again; finished parts are kept"
TEACHER_WORKER = WorkerKind(
    main=f"{__name__}:serve_teacher",
    process="a worker process of the teacher",
    exit_hint="see the messages of this process above",
    signal_hint=RESUME_HINT,
    memory_hint=f"if memory ran out, use a smaller --num-processes or --batch-tokens; {RESUME_HINT}",
)


@dataclass(frozen=True)
class TeacherJob(ABC):
    """Work for a teacher, in this process or in worker processes."""

    request: CacheRequest  # teacher and options
    header: dict[str, Any]  # of the cache; it states the teacher's weights

    def inherited_descriptors(self) -> list[int]:
        """Return the open files that a worker process needs."""
        return []

    @abstractmethod
    def run(self, teacher: TeacherBackend, tokenizer: Tokenizer, tasks: Iterable[Any]) -> Iterator[Any]:
        """Yield the result of each task."""


class WorkerPool:
    """Worker processes that each open the teacher and run some of the tasks of a job.

    Args:
        num_processes: number of processes; several have separate devices, if this machine has devices.
        devices: devices that all processes see; (): as above.
    """

    def __init__(self, num_processes: int, job: TeacherJob, devices: Sequence[int] = ()) -> None:
        self._job = job
        self._environments = _worker_environments(num_processes)
        if devices:
            for environment in self._environments:
                environment |= cuda_visible_devices(devices)
        self._workers: list[WorkerProcess] = []

    def __enter__(self) -> WorkerPool:
        try:
            inherited = self._job.inherited_descriptors()
            for number, environment in enumerate(self._environments):
                name = f"process {number} of {len(self._environments)}"
                self._workers.append(WorkerProcess(TEACHER_WORKER, name, environment, inherited))
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
        self.close(EXIT_SECONDS if kind is None else 0.0)

    def close(self, seconds: float) -> None:
        """End the processes; those that run after `seconds` are stopped."""
        stop_workers(self._workers, seconds)

    def run(self, tasks: list[Any], report_tokens: Callable[[int], None] = lambda count: None) -> Iterator[Any]:
        """Distribute tasks, report the tokens of each batch, and yield results; may be called again after that."""
        for at, worker in enumerate(self._workers):
            worker.send(tasks[at :: len(self._workers)])
        for message in self._messages():
            if isinstance(message, int):
                report_tokens(message)
            else:
                yield message

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


def serve_teacher(pipe: Connection) -> None:
    """Run in a worker process: receive a job, send None when its teacher is open, receive tasks, send their results.

    In between, the number of tokens of each batch is sent. After the last result, None. Then the next tasks are read,
    until the pipe is closed.
    """
    job: TeacherJob = pipe.recv()
    tokenizer = job.request.teacher_tokenizer()
    teacher = open_teacher(job.request, tokenizer, job.header["teacher"]["weights"])
    pipe.send(None)
    teacher.report_tokens = pipe.send  # an int
    while True:
        try:
            tasks = pipe.recv()
        except EOFError:
            return
        for result in job.run(teacher, tokenizer, tasks):
            pipe.send(result)
        pipe.send(None)
