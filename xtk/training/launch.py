"""Starting the processes of a multi-process run from within `xtk distill`."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass

from xtk import terminal
from xtk.errors import XtkError


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
    terminal.release_stdout()  # the first worker owns it
    try:
        run(get_args_parser().parse_args([*command, "-m", "xtk", *arguments]))  # type: ignore[no-untyped-call]
    except ChildFailedError as failed:
        code = failed.get_first_failure()[1].exitcode
        sys.exit(code if code > 0 else 128 - code)
    except SignalException as stopped:
        if stopped.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        sys.exit(128 + stopped.sigval)
