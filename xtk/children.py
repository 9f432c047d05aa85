"""Child processes that do not outlive the one that started them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1


def die_with(parent: int | None = None, number: int = signal.SIGTERM) -> None:
    """Ask Linux to send this process a signal when the one that started it ends, killed or not.

    Args:
        parent: the process that started this one, if it is known: where it has ended already, the signal comes now.
        number: which signal.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), number)


def children_with(variable: str) -> list[int]:
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
