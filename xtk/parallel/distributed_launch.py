"""Launching the processes of a multi-GPU run from within `xtk distill`."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from xtk import terminal
from xtk.errors import XtkError
from xtk.subprocesses import REPORTED_ERRORS_VARIABLE, children_with_variable, without_ignored

# For the other workers after one has failed. After a stop signal from the user or a scheduler there is no limit.
SHUTDOWN_SECONDS = 10


def is_worker() -> bool:
    """Return whether a launcher (xtk, torchrun, accelerate) has started this process."""
    return "LOCAL_RANK" in os.environ


def world_size() -> int:
    """Return how many processes the launcher has started, on all machines."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launch(processes: int, arguments: list[str]) -> None:
    """Run `xtk` with the same arguments in several processes on this machine; exit with their exit code.

    torch's agent runs in this process, because only its caller gets the workers' exit codes and signals.
    """
    import torch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, run

    if torch.cuda.is_available() and processes > torch.cuda.device_count():
        gpus = torch.cuda.device_count()
        raise XtkError(
            f"--num-processes is {processes}, but this machine has {gpus} GPUs",
            hint=f"use --num-processes {gpus} or less",
        )
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    # Without it a second launch on one machine finds keys of the first (docs/explanation/decisions.md).
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    command = ["--nproc-per-node", str(processes), "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command += ["--shutdown-timeout", str(SHUTDOWN_SECONDS)]
    if sys.platform == "linux":
        handled = without_ignored((signal.SIGINT, signal.SIGHUP, signal.SIGQUIT))
        command += ["--signals-to-handle", ",".join(number.name for number in handled)]
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, _forward_signal)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # failures are reported here
    terminal.restore_stdout()  # the main worker prints to it
    try:
        with tempfile.TemporaryDirectory(prefix="xtk-errors-") as os.environ[REPORTED_ERRORS_VARIABLE]:
            run(get_args_parser().parse_args([*command, "-m", "xtk", *arguments]))  # type: ignore[no-untyped-call]
    except ChildFailedError as failed:
        rank, code = _first_failure(failed.failures)
        if code > 0:  # the worker has printed its error
            sys.exit(code)
        name = signal.Signals(-code).name
        terminal.error(
            XtkError(
                f"training process {rank} was killed by the signal {name}",
                hint="run the same command again to resume from the last checkpoint"
                + ("; run `dmesg` to see whether memory ran out" if name == "SIGKILL" else ""),
            )
        )
        sys.exit(128 - code)
    except SignalException as stopped:
        if stopped.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        sys.exit(128 + stopped.sigval)


def _forward_signal(number: int, frame: object) -> None:
    """Forward a signal to the workers, which stop together after a step; the launcher then exits with their code."""
    workers = children_with_variable("LOCAL_RANK")
    for worker in workers:
        os.kill(worker, number)
    if not workers:
        sys.exit(os.EX_TEMPFAIL)


def _first_failure(failures: Mapping[int, Any]) -> tuple[int, int]:
    """Return rank and exit code of the process that failed first and made the others end.

    All end within the same second. A process killed by a signal is a cause; one that was stopped by SIGTERM, or exited
    as resumable, is a consequence unless all were.
    """
    stopped = (-signal.SIGTERM, os.EX_TEMPFAIL)
    first = min(failure.timestamp for failure in failures.values())
    rank, failure = min(
        failures.items(),
        key=lambda one: (one[1].timestamp > first + 1, one[1].exitcode in stopped, one[1].exitcode == 1, one[0]),
    )
    return rank, failure.exitcode
