"""Child processes that do not outlive the one that started them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

PR_SET_PDEATHSIG = 1
# What a launcher tells a process of a distributed run: it is about that process, not about those that it starts.
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_",
                 "MASTER_", "TORCHELASTIC_")  # fmt: skip
# The variable that names a launcher's folder, in which its workers note what one of them has told.
REPORTED_ERRORS_VARIABLE = "XTK_TOLD"


def die_with_parent(parent: int | None = None, signal_number: int = signal.SIGTERM) -> None:
    """Ask Linux to send this process a signal when the one that started it ends, killed or not.

    Args:
        parent: the process that started this one, if it is known: where it has ended already, the signal comes now.
        signal_number: which signal.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal_number)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal_number)


def children_with_variable(variable: str) -> list[int]:
    """Return the processes that this one started, in Linux, with a variable in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            _, _, after_the_name = (folder / "stat").read_text(errors="replace").rpartition(")")
            if int(after_the_name.split()[1]) == os.getpid():
                words = (folder / "environ").read_bytes().split(b"\0")
                if any(word.startswith(variable.encode() + b"=") for word in words):
                    found.append(int(folder.name))
    return found


def environment_without_launcher_variables() -> dict[str, str]:
    """Return the environment without what tells this process its place in a distributed run."""
    return {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}


@contextlib.contextmanager
def block_sigint() -> Iterator[None]:
    """Start processes that Ctrl-C does not reach: the one that watches them ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def cuda_visible_devices(devices: Sequence[int]) -> dict[str, str]:
    """Return the environment in which a process sees these devices alone.

    Args:
        devices: their numbers among those that this process sees.
    """
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    names = [named[number] if number < len(named) else str(number) for number in devices]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names)}


class SignalForwarder:
    """While it is open, signals that ask this process to stop are handed on to the child that runs.

    Attributes:
        received_signal: the first signal that came; 0: none did.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

    def __init__(self) -> None:
        self.received_signal = 0
        self._child: subprocess.Popen[bytes] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> SignalForwarder:
        self._before = {number: signal.signal(number, self._hand_on) for number in self.SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hand_on(self, number: int, frame: FrameType | None) -> None:
        self.received_signal = self.received_signal or number
        if self._child is not None:
            self._child.send_signal(number)

    def run_command(self, command: Sequence[str], log: Path) -> int:
        """Run a command to its end; return its exit code, or minus the number of the signal that ended it.

        It is in a process group of its own, so that Ctrl-C comes to it once, from here; killed, this process takes it
        along.

        Args:
            command: a program and its arguments.
            log: where it writes, behind what is there.
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
            if self.received_signal:  # before there was anybody to hand it on to
                child.send_signal(self.received_signal)
            return child.wait()
        finally:
            self._child = None
