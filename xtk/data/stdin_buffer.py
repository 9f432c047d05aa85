"""Content of stdin in a temporary file, so that it can be read repeatedly and by child processes."""

from __future__ import annotations

import os
import sys
import tempfile
import weakref
from pathlib import Path
from typing import BinaryIO

from xtk.errors import XtkError

READ_BYTES = 1 << 20


class StdinSpool:
    """Bytes in an unlinked temporary file, which exists until the last process that has it open ends."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._closing = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def read_stdin(cls) -> StdinSpool:
        """Return the content of stdin, read to its end."""
        descriptor, path = tempfile.mkstemp(prefix="xtk-stdin-")
        Path(path).unlink()
        spool = cls(descriptor)
        blank = True
        with open(descriptor, "wb", closefd=False) as file:
            while part := _read_chunk():
                file.write(part)
                blank = blank and not part.strip()
        if blank:
            raise XtkError(
                "standard input is empty: the command before the | probably failed",
                where="standard input",
                hint="check the messages of that command above, or run it alone",
            )
        return spool

    def open(self) -> BinaryIO:
        """Return a stream of the bytes, at their beginning."""
        again: str | int = f"/proc/self/fd/{self.descriptor}"
        if not Path(str(again)).exists():
            again = os.dup(self.descriptor)
        stream = open(again, "rb")  # noqa: SIM115 (the caller closes it)
        stream.seek(0)
        return stream

    def __reduce__(self) -> tuple[type[StdinSpool], tuple[int]]:
        # For child processes that inherit the descriptor.
        return StdinSpool, (self.descriptor,)


def _read_chunk() -> bytes:
    return sys.stdin.buffer.read(READ_BYTES) if sys.stdin is not None and not sys.stdin.isatty() else b""
