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

from xtk.children import environment_without_launcher, visible, without_interrupts
from xtk.errors import XtkError

if TYPE_CHECKING:
    from xtk.teachers.caching import Work

SECONDS_TO_END = 3.0  # of a worker that is told to
SECONDS_TO_LEAVE = 30.0  # of one that is done
# A parent that ends while its processes start is no mistake of theirs.
PROGRAM = """
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


class Worker:
    """A process that writes shards, and the pipe to it.

    Args:
        name: how messages call it.
        environment: its environment variables.
        inherited: file descriptors that it needs.
        program: the module whose `main` it runs, with its end of the pipe.
    """

    def __init__(
        self, name: str, environment: dict[str, str], inherited: list[int], program: str = "xtk.teachers.worker"
    ) -> None:
        self.name = name
        self.pipe, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM.format(theirs.fileno(), program)],
                stdin=subprocess.DEVNULL,
                stdout=2,  # results are the parent's alone
                env=environment,
                pass_fds=[theirs.fileno(), *inherited],
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
            raise self.ended() from None

    def receive(self) -> Any:
        """Return what it tells next.

        Raises:
            XtkError: what went wrong in it, or that it has ended.
        """
        try:
            message = self.pipe.recv()
        except (EOFError, OSError):
            raise self.ended() from None
        if isinstance(message, XtkError):
            raise message
        return message

    def ended(self) -> XtkError:
        """Return what is to be told of a worker that ended and did not say why."""
        try:
            code = self.process.wait(SECONDS_TO_END)
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


class Workers:
    """Processes that each open the teacher and write their part of the shards.

    Args:
        count: how many.
        work: what they write.
        on_devices: each takes a device of its own, where this machine has any.
        devices: that all of them see; none: all of this machine.

    Raises:
        XtkError: there are fewer devices, or the teacher cannot be opened.
    """

    def __init__(self, count: int, work: Work, *, on_devices: bool, devices: Sequence[int] = ()) -> None:
        self._work = work
        self._environments = _environments(count, on_devices=on_devices)
        if devices:
            for environment in self._environments:
                environment |= visible(devices)
        self._workers: list[Worker] = []

    def __enter__(self) -> Workers:
        try:
            inherited = self._work.corpus.descriptors()
            with without_interrupts():
                for number, environment in enumerate(self._environments):
                    name = f"process {number} of {len(self._environments)}"
                    self._workers.append(Worker(name, environment, inherited))
                    self._workers[-1].send(sys.path)
            for worker in self._workers:
                worker.send(os.getpid())
                worker.send(self._work)
            for _ in self._messages(1):
                pass
        except BaseException:
            self._end(0.0)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(SECONDS_TO_LEAVE if kind is None else 0.0)

    def fill(self, numbers: list[int]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Have shards written, dealt by index; once.

        Yields:
            The number of a shard that is written, and what the manifest is to tell of it.

        Raises:
            XtkError: what went wrong in one of the processes.
        """
        for at, worker in enumerate(self._workers):
            worker.send(numbers[at :: len(self._workers)])
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

    def _end(self, seconds: float) -> None:
        """End all: those that are still there after some seconds are told to, then killed."""
        deadline = time.monotonic() + seconds
        for stop in (lambda process: None, subprocess.Popen.terminate, subprocess.Popen.kill):
            for worker in self._workers:
                if worker.process.poll() is None:
                    stop(worker.process)
            for worker in self._workers:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.process.wait(max(0.0, deadline - time.monotonic()))
            deadline = time.monotonic() + SECONDS_TO_END
        for worker in self._workers:
            worker.pipe.close()


def _environments(count: int, *, on_devices: bool) -> list[dict[str, str]]:
    """Return the environment of each process: its device, or its share of the processors.

    Raises:
        XtkError: there are fewer devices than processes.
    """
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    common = environment_without_launcher()
    common.setdefault("OMP_NUM_THREADS", str(max(1, cores // count)))
    if not on_devices or not torch.cuda.is_available():
        return [dict(common) for _ in range(count)]
    devices = torch.cuda.device_count()
    if count > devices:
        raise XtkError(f"--num-processes is {count}; this machine has {devices} devices")
    named = [name.strip() for name in common.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    names = named[:devices] if len(named) >= devices else [str(number) for number in range(devices)]
    return [{**common, "CUDA_VISIBLE_DEVICES": names[number]} for number in range(count)]
