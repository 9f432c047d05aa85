"""Child processes that do not outlive the one that started them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

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
