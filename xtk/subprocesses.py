"""Child processes: ended with their parent, separated from launchers, and forwarded signals."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

PR_SET_PDEATHSIG = 1
# Set by a distributed launcher for each worker; the worker's own child processes must not inherit them.
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_",
                 "MASTER_", "TORCHELASTIC_")  # fmt: skip
# Folder of a launcher in which its workers record the errors that one of them has printed.
REPORTED_ERRORS_VARIABLE = "XTK_REPORTED_ERRORS"


def die_with_parent(parent: int | None = None, signal_number: int = signal.SIGTERM) -> None:
    """Let Linux send this process a signal when its parent ends, at once if `parent` is not its parent any more."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal_number)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal_number)


def children_with_variable(variable: str) -> list[int]:
    """Return the ids of this process's children that have a variable in their environment (Linux only)."""
    children = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            _, _, after_the_name = (folder / "stat").read_text(errors="replace").rpartition(")")
            if int(after_the_name.split()[1]) == os.getpid():
                words = (folder / "environ").read_bytes().split(b"\0")
                if any(word.startswith(variable.encode() + b"=") for word in words):
                    children.append(int(folder.name))
    return children


def environment_without_launcher_variables() -> dict[str, str]:
    """Return the environment without the variables of a distributed launcher."""
    return {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}


@contextlib.contextmanager
def block_sigint() -> Iterator[None]:
    """Start processes inside of this context so that Ctrl-C does not reach them; their parent ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def cuda_visible_devices(devices: Sequence[int]) -> dict[str, str]:
    """Return the environment variable that limits a process to some of the CUDA devices visible to this one."""
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    names = [named[number] if number < len(named) else str(number) for number in devices]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names)}


def without_ignored(signals: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Return the signals that the caller of this process does not ignore, as `nohup` ignores SIGHUP and `&` SIGINT."""
    return [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]


class SignalForwarder:
    """Context manager that forwards stop signals of this process, unless they are ignored, to the running child."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

    def __init__(self) -> None:
        self.received_signal = 0  # number of the first signal received; 0: none
        self._child: subprocess.Popen[bytes] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> SignalForwarder:
        self._before = {number: signal.signal(number, self._forward) for number in without_ignored(self.SIGNALS)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self.received_signal = self.received_signal or number
        if self._child is not None:
            self._child.send_signal(number)

    def run_command(self, command: Sequence[str], log: Path) -> int:
        """Run a command and return its exit code, or minus the number of the signal that ended it.

        The command has a separate process group: Ctrl-C reaches it once, forwarded from here. If this process is
        killed, the command is killed, too.
        `log`: file to which its output is appended.
        """
        with log.open("ab") as stream:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env=environment_without_launcher_variables(),
                process_group=0,
                preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGKILL),
            )
        self._child = child
        try:
            if self.received_signal:  # received before the child was started
                child.send_signal(self.received_signal)
            return child.wait()
        finally:
            self._child = None
