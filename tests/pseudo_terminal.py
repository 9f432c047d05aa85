"""Commands in a pseudo terminal of a given width, and the lines that its screen shows."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Sequence
from pathlib import Path

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def run_in_terminal(command: Sequence[str], cwd: Path, *, columns: int = 80) -> tuple[int, str]:
    """Run a command whose three streams are a terminal; return its exit code and all that it wrote."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    fixed = {"TERM": "xterm-256color"}
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, cwd=cwd, env={**kept, **fixed})
    os.close(child)
    written = b""
    with contextlib.suppress(OSError):  # the terminal is closed
        while part := os.read(parent, 65536):
            written += part
    os.close(parent)
    return process.wait(), written.decode()


def frames(written: str) -> list[str]:
    """Return all lines that were ever shown, also those that were drawn over, without control sequences."""
    return [line.rstrip() for line in re.split(r"[\r\n]+", CONTROL.sub("", written)) if line.strip()]
