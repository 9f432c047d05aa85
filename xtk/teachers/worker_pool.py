"""Pool of worker processes on this machine that write shards of one cache.

They are new processes, not forks: CUDA does not work after a fork, and each needs its own environment variables. They
are not started by `multiprocessing`, which would import the caller's main module in each of them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import TYPE_CHECKING, Any

from xtk.errors import XtkError
from xtk.subprocesses import block_sigint, cuda_visible_devices, environment_without_launcher_variables

if TYPE_CHECKING:
    from xtk.teachers.cache_building import CacheJob

TERMINATE_SECONDS = 3.0  # wait after SIGTERM
EXIT_SECONDS = 30.0  # wait for a worker that has finished
# A parent that ends during the start is not an error of the worker.
WORKER_PROGRAM = """
import sys
from multiprocessing.connection import Connection
pipe = Connection({})
try:
    sys.path[:] = pipe.recv()
except (EOFError, OSError):
    sys.exit(1)
from {} import main
main(pipe)
"""


class WorkerProcess:
    """A worker process and the pipe to it.

    Args:
        name: name in messages.
        environment: its environment variables.
        inherited_descriptors: file descriptors that it needs.
        main_module: module whose `main` it calls with its end of the pipe.
    """

    def __init__(
        self,
        name: str,
        environment: dict[str, str],
        inherited_descriptors: list[int],
        main_module: str = "xtk.teachers.cache_shard_worker",
    ) -> None:
        self.name = name
        self.pipe, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", WORKER_PROGRAM.format(theirs.fileno(), main_module)],
                stdin=subprocess.DEVNULL,
                stdout=2,  # only the parent prints results
                env=environment,
                pass_fds=[theirs.fileno(), *inherited_descriptors],
            )

    def send(self, message: Any) -> None:
        """Send a message.

        Raises:
            XtkError: the process has ended.
        """
        try:
            self.pipe.send(message)
        except OSError:
            self.receive()  # raises an error that it sent before it ended
            raise self.exit_error() from None

    def receive(self) -> Any:
        """Return the next message.

        Raises:
            XtkError: an error in the process, or the process has ended.
        """
        try:
            message = self.pipe.recv()
        except (EOFError, OSError):
            raise self.exit_error() from None
        if isinstance(message, XtkError):
            raise message
        return message

    def exit_error(self) -> XtkError:
        """Return the error for a process that ended without sending an error."""
        try:
            code = self.process.wait(TERMINATE_SECONDS)
        except subprocess.TimeoutExpired:
            return XtkError(
                "the connection to a worker process of the teacher is closed; xtk stops this process",
                where=self.name,
                hint="run the same command again; finished parts are kept",
            )
        if code >= 0:
            return XtkError(
                f"a worker process of the teacher ended with exit code {code}",
                where=self.name,
                hint="see the messages of this process above",
            )
        hint = "run the same command again; finished parts are kept"
        if -code == signal.SIGKILL:
            hint = f"if memory ran out, use a smaller --num-processes or --batch-tokens; {hint}"
        return XtkError(
            f"a worker process of the teacher was killed by {signal.Signals(-code).name}",
            where=self.name,
            hint=hint,
        )


class WorkerPool:
    """Worker processes that each open the teacher and write some of the shards.

    Args:
        num_processes: number of processes.
        job: the cache.
        device_per_process: give each process a separate device, if this machine has devices.
        devices: devices that all processes see; (): all devices of this machine.

    Raises:
        XtkError: there are fewer devices, or the teacher cannot be opened.
    """

    def __init__(
        self, num_processes: int, job: CacheJob, *, device_per_process: bool, devices: Sequence[int] = ()
    ) -> None:
        self._job = job
        self._environments = _worker_environments(num_processes, device_per_process=device_per_process)
        if devices:
            for environment in self._environments:
                environment |= cuda_visible_devices(devices)
        self._workers: list[WorkerProcess] = []

    def __enter__(self) -> WorkerPool:
        try:
            inherited = self._job.corpus.inherited_descriptors()
            with block_sigint():
                for number, environment in enumerate(self._environments):
                    name = f"process {number} of {len(self._environments)}"
                    self._workers.append(WorkerProcess(name, environment, inherited))
                    self._workers[-1].send(sys.path)
            for worker in self._workers:
                worker.send(os.getpid())
                worker.send(self._job)
            for _ in self._messages(1):
                pass
        except BaseException:
            self._stop(0.0)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop(EXIT_SECONDS if kind is None else 0.0)

    def write_shards(self, shard_numbers: list[int]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Distribute shards over the processes; may be called once.

        Yields:
            The number and the manifest entry of each written shard.

        Raises:
            XtkError: an error in one of the processes.
        """
        for at, worker in enumerate(self._workers):
            worker.send(shard_numbers[at :: len(self._workers)])
        yield from self._messages(None)

    def _messages(self, count: int | None) -> Iterator[Any]:
        """Yield `count` messages of each worker; None: all, until each sends None."""
        left: dict[Any, int] = dict.fromkeys(range(len(self._workers)), count or 0)
        while left:
            pipes: list[Connection] = [self._workers[number].pipe for number in left]
            ready = wait(pipes)
            for number, pipe in zip(list(left), pipes, strict=True):
                if pipe not in ready:
                    continue
                message = self._workers[number].receive()
                left[number] -= 1
                if message is None or left[number] == 0:
                    del left[number]
                if message is not None:
                    yield message

    def _stop(self, seconds: float) -> None:
        """Wait `seconds` for the workers to end, then send SIGTERM, then SIGKILL."""
        deadline = time.monotonic() + seconds
        for stop in (lambda process: None, subprocess.Popen.terminate, subprocess.Popen.kill):
            for worker in self._workers:
                if worker.process.poll() is None:
                    stop(worker.process)
            for worker in self._workers:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.process.wait(max(0.0, deadline - time.monotonic()))
            deadline = time.monotonic() + TERMINATE_SECONDS
        for worker in self._workers:
            worker.pipe.close()


def _worker_environments(count: int, *, device_per_process: bool) -> list[dict[str, str]]:
    """Return the environment of each process, with its device or its number of CPU threads.

    Raises:
        XtkError: there are fewer devices than processes.
    """
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    common = environment_without_launcher_variables()
    common.setdefault("OMP_NUM_THREADS", str(max(1, cores // count)))
    if not device_per_process or not torch.cuda.is_available():
        return [dict(common) for _ in range(count)]
    devices = torch.cuda.device_count()
    if count > devices:
        raise XtkError(
            f"--num-processes is {count}; this machine has only {devices} devices",
            hint=f"use --num-processes {devices} or less",
        )
    named = [name.strip() for name in common.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    names = named[:devices] if len(named) >= devices else [str(number) for number in range(devices)]
    return [{**common, "CUDA_VISIBLE_DEVICES": names[number]} for number in range(count)]
