"""Starting the processes of a multi-process run from within `xtk distill`."""

from __future__ import annotations

import os
import signal
import sys

from xtk import terminal
from xtk.errors import XtkError


def is_worker() -> bool:
    """Say whether a launcher (xtk, torchrun, accelerate) has started this process."""
    return "LOCAL_RANK" in os.environ


def world_size() -> int:
    """Return how many processes the launcher has started, on all machines."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launch(processes: int, arguments: list[str]) -> None:
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
    command = ["--nproc-per-node", str(processes), "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
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
