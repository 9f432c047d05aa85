"""What xtk says when something goes wrong: what, where, and what to do next."""

from __future__ import annotations

import errno
import os
from pathlib import Path


class XtkError(Exception):
    """A mistake that the user can mend. Ends a command with its exit code and no traceback.

    Args:
        what: one sentence, lower case, no full stop.
        where: the file, option or row that it is about.
        hint: the next step, best a command that can be pasted.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.hint:
            lines.append(f"  try:   {self.hint}")
        return "\n".join(lines)


class Mismatch(XtkError):
    """Two artifacts that do not belong together, both of them named."""


class Damaged(XtkError):
    """A file whose bytes are not those that were written."""


class Terminated(SystemExit):
    """SIGTERM ended the process; an exit that no code called for."""


class Stopped(XtkError):
    """No mistake: a run that ended early because it was asked to, and goes on when its command is run again."""

    exit_code = os.EX_TEMPFAIL


def exists(text: str) -> bool:
    """Say whether a text is the path of a file or folder that can be seen; any text may be asked about, "" is none."""
    try:
        return bool(text) and Path(text).exists()
    except (OSError, ValueError):  # too long for a path, or no path at all
        return False


DISK_IS_FULL = ("No space left on device", "os error 28", "Disk quota exceeded")


def from_os_error(error: BaseException) -> XtkError | None:
    """Tell an error of the operating system in xtk's form; None if it is not one that a user can mend."""
    text = str(error)
    path = getattr(error, "filename", None)
    where = str(path) if path else None
    if any(words in text for words in DISK_IS_FULL):
        return XtkError(
            "the disk is full",
            where=where or text,
            hint="free some space and run the same command again; finished parts are kept",
        )
    if isinstance(error, FileNotFoundError):
        return XtkError("no such file or folder", where=where or text)
    if isinstance(error, PermissionError):
        return XtkError("no permission", where=where or text)
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return XtkError("this is too long for the name of a file", where=where or text)
    if isinstance(error, IsADirectoryError | NotADirectoryError | FileExistsError):
        return XtkError(text, where=where)
    return None
