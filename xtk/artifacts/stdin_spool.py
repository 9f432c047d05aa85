"""What comes through a pipe, kept on disk: it can be read as often as wanted, and by child processes too."""

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
    """Bytes in a temporary file without a name: it is gone with the last process that has it open, however that ends.

    Args:
        descriptor: of the file, open in this process.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._closing = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def read_stdin(cls) -> StdinSpool:
        """Read stdin to its end.

        Raises:
            XtkError: nothing comes.
        """
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
                "nothing came through the pipe: the command before it seems to have failed",
                where="stdin",
                hint="look at its messages above, or run it alone",
            )
        return spool

    def open(self) -> BinaryIO:
        """Return the bytes from their beginning."""
        again: str | int = f"/proc/self/fd/{self.descriptor}"
        if not Path(str(again)).exists():
            again = os.dup(self.descriptor)
        stream = open(again, "rb")  # noqa: SIM115 (its reader closes)
        stream.seek(0)
        return stream

    def __reduce__(self) -> tuple[type[StdinSpool], tuple[int]]:
        # For a child process that has inherited the descriptor.
        return StdinSpool, (self.descriptor,)


def _read_chunk() -> bytes:
    return sys.stdin.buffer.read(READ_BYTES) if sys.stdin is not None and not sys.stdin.isatty() else b""
