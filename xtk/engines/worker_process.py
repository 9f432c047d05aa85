"""Worker processes of teachers and of generation: start, messages, errors as text, and their end.

Workers are new processes, not forks: CUDA does not work after a fork, and each has separate environment variables. They
are not started by `multiprocessing`, which would import the caller's main module in each of them.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from xtk import errors, terminal
from xtk.errors import XtkError, from_os_error
from xtk.subprocesses import block_sigint, die_with_parent

TERMINATE_SECONDS = 3.0  # wait after SIGTERM, and for the exit code of a worker that closed its pipe
WORKER_PROGRAM = f"import sys; from {__name__} import run_worker; run_worker(*sys.argv[1:])"


@dataclass(frozen=True)
class WorkerError:
    """An error in a worker as text, since exceptions of libraries cannot always be sent."""

    kind: str  # name of a class of `xtk.errors`; any other name means `XtkError`
    what: str
    where: str | None
    hint: str | None

    @classmethod
    def from_exception(cls, failure: Exception, process: str) -> WorkerError:
        """Return the error of a process, such as "the generation process"; an unexpected one prints a traceback."""
        error = failure if isinstance(failure, XtkError) else from_os_error(failure)
        if error is None:
            traceback.print_exception(failure)
            what = f"{process} failed: {type(failure).__name__}: {failure}"
            return cls("XtkError", what, None, "see the traceback of the process above")
        return cls(type(error).__name__, error.what, error.where, error.hint)

    def to_exception(self) -> XtkError:
        """Return the error as an exception."""
        kind = getattr(errors, self.kind, None)
        kind = kind if isinstance(kind, type) and issubclass(kind, XtkError) else XtkError
        return kind(self.what, where=self.where, hint=self.hint)


@dataclass(frozen=True)
class WorkerKind:
    """A kind of worker, and what errors about a worker that ended contain."""

    main: str  # `module:function` that a worker calls with its pipe
    process: str  # the process in messages, such as "the generation process"
    exit_hint: str  # next step after an exit code
    signal_hint: str  # next step after a signal
    memory_hint: str  # next step after SIGKILL, which a lack of memory causes


class WorkerProcess:
    """A worker and the pipe to it. It ends with the thread that started it, and Ctrl-C does not reach it.

    Args:
        name: this worker, in errors.
        environment: its environment variables; `PYTHONPATH` is replaced by this process's module path.
    """

    def __init__(
        self, kind: WorkerKind, name: str, environment: Mapping[str, str], inherited_descriptors: Sequence[int] = ()
    ) -> None:
        self._kind, self._name = kind, name
        self.pipe, theirs = Pipe()
        paths = os.pathsep.join(str(Path(path).absolute()) for path in sys.path)
        arguments = [str(theirs.fileno()), str(os.getpid()), kind.process, kind.main]
        with theirs, block_sigint():
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", WORKER_PROGRAM, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=2,  # only the parent prints results
                env={**environment, "PYTHONPATH": paths},
                pass_fds=[theirs.fileno(), *inherited_descriptors],
            )

    def send(self, message: Any) -> None:
        """Send a message."""
        try:
            self.pipe.send(message)
        except OSError:
            raise self.exit_error() from None

    def receive(self) -> Any:
        """Return the next message."""
        try:
            message = self.pipe.recv()
        except (EOFError, OSError):
            raise self.exit_error() from None
        if isinstance(message, WorkerError):
            raise message.to_exception()
        return message

    def exit_error(self) -> XtkError:
        """Return the error for a process that closed its pipe: the one that it sent before, or how it ended."""
        with contextlib.suppress(EOFError, OSError):
            while self.pipe.poll():
                message = self.pipe.recv()
                if isinstance(message, WorkerError):
                    return message.to_exception()
        kind = self._kind
        try:
            code = self.process.wait(TERMINATE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            what, hint = f"the connection to {kind.process} is closed; xtk stops this process", kind.signal_hint
        else:
            if code >= 0:
                what, hint = f"{kind.process} ended with exit code {code}", kind.exit_hint
            else:
                what = f"{kind.process} was killed by {signal.Signals(-code).name}"
                hint = kind.memory_hint if -code == signal.SIGKILL else kind.signal_hint
        return XtkError(what, where=self._name, hint=hint)


def stop_workers(workers: Sequence[WorkerProcess], seconds: float) -> None:
    """Close the pipes and wait `seconds` for the workers to end, then send SIGTERM, then SIGKILL."""
    for worker in workers:
        worker.pipe.close()
    deadline = time.monotonic() + seconds
    for stop in (lambda process: None, subprocess.Popen.terminate, subprocess.Popen.kill):
        for worker in workers:
            if worker.process.poll() is None:
                stop(worker.process)
        for worker in workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, deadline - time.monotonic()))
        deadline = time.monotonic() + TERMINATE_SECONDS


def run_worker(descriptor: str, parent: str, process: str, function: str) -> None:
    """Call `module:function`; an exception is sent to the parent. This process ends when the parent does."""
    die_with_parent(int(parent), signal.SIGKILL)
    os.set_inheritable(int(descriptor), False)  # subprocesses must not keep the pipe open
    terminal.set_quiet(True)
    pipe = Connection(int(descriptor))
    # Slurm signals all processes of a step. The parent, which saves its state first, may still wait for this one.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number) if _is_closed(pipe) else None)
    module, _, name = function.partition(":")
    try:
        getattr(importlib.import_module(module), name)(pipe)
    except (EOFError, BrokenPipeError):  # the parent has closed the pipe
        sys.exit(1)
    except Exception as failure:
        with contextlib.suppress(OSError):
            pipe.send(WorkerError.from_exception(failure, process))
        sys.exit(1)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # do not interrupt cleanup of libraries


def _is_closed(pipe: Connection) -> bool:
    """Return whether the parent has closed its end of a pipe."""
    poll = select.poll()
    poll.register(pipe.fileno(), 0)  # reports the end only
    return bool(poll.poll(0))
