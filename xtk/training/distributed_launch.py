"""Starting the processes of a multi-process run from within `xtk distill`."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xtk import terminal
from xtk.errors import XtkError
from xtk.subprocesses import REPORTED_ERRORS_VARIABLE, children_with_variable

# Those that are left when one has failed. Asked to stop by a user or a scheduler, they have all the time they need.
SHUTDOWN_SECONDS = 10


def is_worker() -> bool:
    """Say whether a launcher (xtk, torchrun, accelerate) has started this process."""
    return "LOCAL_RANK" in os.environ


def world_size() -> int:
    """Return how many processes the launcher has started, on all machines."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@dataclass(frozen=True)
class Machines:
    """The machines of a run, each with as many processes.

    Attributes:
        count: how many.
        rank: which of them this one is.
        address: of the first, as all reach it.
        port: on which it listens; 0: any, for one machine.
    """

    count: int = 1
    rank: int = 0
    address: str = ""
    port: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.count:
            raise XtkError(
                f"--machine-rank is {self.rank} of --num-machines {self.count}",
                hint="ranks count from 0: 0 and 1 of two machines",
            )
        if self.count > 1 and not (self.address and self.port):
            raise XtkError(
                f"--num-machines is {self.count}, and nothing says where the first one is",
                hint="--main-process-ip ADDRESS --main-process-port 29500, the same on all",
            )

    def arguments(self) -> list[str]:
        """Return what torch's launcher has to know."""
        if self.count == 1:
            return ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
        return ["--nnodes", str(self.count), "--node-rank", str(self.rank), "--master-addr", self.address,
                "--master-port", str(self.port)]  # fmt: skip


def launch(processes: int, arguments: list[str], machines: Machines) -> None:
    """Run `xtk` with the same arguments in several processes on this machine, and end as they end.

    In-process, because torch's agent hands the workers' exit codes and signals through only to its caller.

    Raises:
        XtkError: more processes than this machine has devices.
        SystemExit: a worker's exit code, when it is not 0.
    """
    import torch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, run

    if torch.cuda.is_available() and processes > torch.cuda.device_count():
        raise XtkError(f"--num-processes is {processes}; this machine has {torch.cuda.device_count()} devices")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    # Without it a second start on one machine meets keys of the first (docs/explanation/decisions.md).
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    command = ["--nproc-per-node", str(processes), *machines.arguments()]
    command += ["--shutdown-timeout", str(SHUTDOWN_SECONDS)]
    if sys.platform == "linux":
        command += ["--signals-to-handle", "SIGINT,SIGHUP,SIGQUIT"]
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, _hand_on)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # what it tells is told here
    terminal.restore_stdout()  # the first worker owns it
    try:
        with tempfile.TemporaryDirectory(prefix="xtk-told-") as os.environ[REPORTED_ERRORS_VARIABLE]:
            run(get_args_parser().parse_args([*command, "-m", "xtk", *arguments]))  # type: ignore[no-untyped-call]
    except ChildFailedError as failed:
        rank, code = _cause(failed.failures)
        if code > 0:  # it has told why itself
            sys.exit(code)
        name = signal.Signals(-code).name
        terminal.error(
            XtkError(
                f"process {rank} was ended by {name}",
                hint="run the same command again: it goes on from the last checkpoint"
                + ("; `dmesg` tells whether memory ran out" if name == "SIGKILL" else ""),
            )
        )
        sys.exit(128 - code)
    except SignalException as stopped:
        if stopped.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        sys.exit(128 + stopped.sigval)


def _hand_on(number: int, frame: object) -> None:
    """Let the workers heed a signal, which they do together, after a step; this process ends as they do."""
    workers = children_with_variable("LOCAL_RANK")
    for worker in workers:
        os.kill(worker, number)
    if not workers:
        sys.exit(os.EX_TEMPFAIL)


def _cause(failures: Mapping[int, Any]) -> tuple[int, int]:
    """Return the rank and the exit code of the process whose end made the others end.

    They end within the same second. What has ended by a signal has not done so because another one is gone; what was
    asked to end has, if not all were asked.
    """
    asked = (-signal.SIGTERM, os.EX_TEMPFAIL)
    first = min(failure.timestamp for failure in failures.values())
    rank, failure = min(
        failures.items(),
        key=lambda one: (one[1].timestamp > first + 1, one[1].exitcode in asked, one[1].exitcode == 1, one[0]),
    )
    return rank, failure.exitcode
