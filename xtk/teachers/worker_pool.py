"""Several processes on this machine that write shards of one cache: the side that starts and watches them.

They are fresh processes, not forks: CUDA does not work in a fork, and each wants its own environment. They are
started as programs rather than by `multiprocessing`, which would run the caller's main module again in each.
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

TERMINATE_SECONDS = 3.0  # of a worker that is told to
EXIT_SECONDS = 30.0  # of one that is done
# A parent that ends while its processes start is no mistake of theirs.
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
    """A process that writes shards, and the pipe to it.

    Args:
        name: how messages call it.
        environment: its environment variables.
        inherited: file descriptors that it needs.
        program: the module whose `main` it runs, with its end of the pipe.
    """

    def __init__(
        self,
        name: str,
        environment: dict[str, str],
        inherited_descriptors: list[int],
        main_module: str = "xtk.teachers.shard_worker",
    ) -> None:
        self.name = name
        self.pipe, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", WORKER_PROGRAM.format(theirs.fileno(), main_module)],
                stdin=subprocess.DEVNULL,
                stdout=2,  # results are the parent's alone
                env=environment,
                pass_fds=[theirs.fileno(), *inherited_descriptors],
            )

    def send(self, message: Any) -> None:
        """Hand something over.

        Raises:
            XtkError: it has ended.
        """
        try:
            self.pipe.send(message)
        except OSError:
            self.receive()  # what it said before it ended
            raise self.exit_error() from None

    def receive(self) -> Any:
        """Return what it tells next.

        Raises:
            XtkError: what went wrong in it, or that it has ended.
        """
        try:
            message = self.pipe.recv()
        except (EOFError, OSError):
            raise self.exit_error() from None
        if isinstance(message, XtkError):
            raise message
        return message

    def exit_error(self) -> XtkError:
        """Return what is to be told of a worker that ended and did not say why."""
        try:
            code = self.process.wait(TERMINATE_SECONDS)
        except subprocess.TimeoutExpired:
            return XtkError("a process that scores for this cache stopped answering", where=self.name)
        if code >= 0:
            return XtkError(
                f"a process that scores for this cache ended with exit code {code}",
                where=self.name,
                hint="what it said stands above",
            )
        hint = "run the same command again; finished parts are kept"
        if -code == signal.SIGKILL:
            hint = f"memory may have run out: fewer --num-processes or --batch-tokens; then {hint}"
        return XtkError(
            f"a process that scores for this cache was killed by {signal.Signals(-code).name}",
            where=self.name,
            hint=hint,
        )


class WorkerPool:
    """Processes that each open the teacher and write their part of the shards.

    Args:
        count: how many.
        work: what they write.
        on_devices: each takes a device of its own, where this machine has any.
        devices: that all of them see; none: all of this machine.

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
        """Have shards written, dealt by index; once.

        Yields:
            The number of a shard that is written, and what the manifest is to tell of it.

        Raises:
            XtkError: what went wrong in one of the processes.
        """
        for at, worker in enumerate(self._workers):
            worker.send(shard_numbers[at :: len(self._workers)])
        yield from self._messages(None)

    def _messages(self, count: int | None) -> Iterator[Any]:
        """Yield `count` messages of each worker; None: all, until each says that there are no more."""
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
        """End all: those that are still there after some seconds are told to, then killed."""
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
    """Return the environment of each process: its device, or its share of the processors.

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
        raise XtkError(f"--num-processes is {count}; this machine has {devices} devices")
    named = [name.strip() for name in common.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    names = named[:devices] if len(named) >= devices else [str(number) for number in range(devices)]
    return [{**common, "CUDA_VISIBLE_DEVICES": names[number]} for number in range(count)]
