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


class MismatchError(XtkError):
    """Two artifacts that do not belong together, both of them named."""


class CorruptError(XtkError):
    """A file whose bytes are not those that were written."""


class Terminated(SystemExit):
    """SIGTERM ended the process; an exit that no code called for."""


class ResumableStop(XtkError):
    """No mistake: a run that ended early because it was asked to, and goes on when its command is run again."""

    exit_code = os.EX_TEMPFAIL


def path_exists(text: str) -> bool:
    """Say whether a text is the path of a file or folder that can be seen; any text may be asked about, "" is none."""
    try:
        return bool(text) and Path(text).exists()
    except (OSError, ValueError):  # too long for a path, or no path at all
        return False


# What the system, Arrow, safetensors and fsspec write when a file cannot be written, and what xtk prints.
_CANNOT_WRITE = {
    ("No space left on device", "os error 28", "Disk quota exceeded", "os error 122"): (
        "the disk is full",
        "free some space and run the same command again; finished parts are kept",
    ),
    ("Read-only file system", "os error 30"): (
        "this file system is read-only",
        "another -o; or XTK_CACHE=FOLDER, HF_HOME=FOLDER for what is kept in the home folder",
    ),
    ("File too large", "os error 27"): (
        "this file is larger than the limit of this shell or file system (ulimit -f)",
        "raise the limit and run the same command again; finished parts are kept",
    ),
    ("Too many open files", "os error 24"): (
        "too many files are open for the limit of this shell (ulimit -n)",
        "raise the limit and run the same command again; finished parts are kept",
    ),
}


def from_os_error(error: BaseException) -> XtkError | None:
    """Tell an error of the operating system in xtk's form; None if it is not one that a user can mend."""
    text = str(error)
    path = getattr(error, "filename", None)
    where = str(path) if path else None
    for words, (what, hint) in _CANNOT_WRITE.items():
        if any(one in text for one in words):
            return XtkError(what, where=where or text, hint=hint)
    if isinstance(error, MemoryError) or "Cannot allocate memory" in text or "not enough memory" in text:
        return XtkError(
            "there is not enough memory",
            where=text or None,
            hint="a smaller batch (--batch-tokens, --per-device-train-batch-size), or a machine with more memory",
        )
    if isinstance(error, UnicodeEncodeError) and any("\udc80" <= letter <= "\udcff" for letter in str(error.object)):
        return XtkError("this path is not UTF-8, and a library takes no other", where=ascii(error.object)[:200])
    if isinstance(error, FileNotFoundError):
        return XtkError("no such file or folder", where=where or text)
    if isinstance(error, PermissionError):
        return XtkError("no permission", where=where or text)
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return XtkError("this is too long for the name of a file", where=where or text)
    if isinstance(error, OSError) and error.errno is not None and where is not None:
        return XtkError(str(error.strerror or text).lower(), where=where)
    return None
