"""Errors with a cause, a place and a next step, and the translation of operating system errors."""

from __future__ import annotations

import errno
import importlib.util
import os
from pathlib import Path


class XtkError(Exception):
    """An error that the user can fix. It ends a command with its exit code and without a traceback.

    Args:
        what: the cause, as one sentence in lower case without a full stop.
        where: the file, option or row.
        hint: the next step, ideally a command to paste.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(what)
        self.what, self.where, self.hint = what, where, hint

    def __str__(self) -> str:
        where = f"\n  where: {self.where}" if self.where else ""
        return self.what + where + (f"\n  try:   {self.hint}" if self.hint else "")


class NonFiniteModelError(XtkError):
    """A model gives log-probabilities that are not finite."""


class MismatchError(XtkError):
    """Two artifacts do not match; the message names both."""


class CorruptError(XtkError):
    """A file is corrupt: its bytes differ from those that were written."""


class Terminated(SystemExit):
    """SIGTERM ended the process."""


class ResumableStop(XtkError):
    """A run was stopped early by a signal or a time limit; the same command resumes it."""

    exit_code = os.EX_TEMPFAIL


def path_exists(text: str) -> bool:
    """Return whether a text is the path of an existing file or folder; False for any other text, and for ""."""
    try:
        return bool(text) and Path(text).exists()
    except (OSError, ValueError):  # too long, or not a valid path
        return False


# Messages of the system, Arrow, safetensors and fsspec for failed writes, and the error that xtk prints instead.
_CANNOT_WRITE = {
    ("No space left on device", "os error 28", "Disk quota exceeded", "os error 122"): (
        "the disk is full",
        "free some space and run the same command again; finished parts are kept",
    ),
    ("Read-only file system", "os error 30"): (
        "this file system is read-only",
        "use another -o; for caches in the home folder, set XTK_CACHE=FOLDER and HF_HOME=FOLDER",
    ),
    ("File too large", "os error 27"): (
        "the file exceeds the size limit of this shell or file system (ulimit -f)",
        "raise the limit and run the same command again; finished parts are kept",
    ),
    ("Too many open files", "os error 24"): (
        "the limit of open files of this shell is reached (ulimit -n)",
        "raise the limit and run the same command again; finished parts are kept",
    ),
}


def from_os_error(error: BaseException) -> XtkError | None:
    """Return an error of the operating system as an XtkError; None if the user cannot fix it."""
    text = str(error)
    path = getattr(error, "filename", None)
    where = str(path) if path else None
    for words, (what, hint) in _CANNOT_WRITE.items():
        if any(word in text for word in words):
            return XtkError(what, where=where or text, hint=hint)
    if type(error).__name__ == "OutOfMemoryError":  # of torch, which is not imported here
        hint = (
            "distill: a smaller --max-batch-tokens (16,384 by default on a GPU), --gradient-checkpointing, "
            "--lora-r, or --parallel fsdp=N on several GPUs; other commands: --dtype bfloat16, a smaller --batch-tokens"
        )
        return XtkError("the GPU has not enough memory", where=text.split(". GPU ")[0] or None, hint=hint)
    if isinstance(error, MemoryError) or "Cannot allocate memory" in text or "not enough memory" in text:
        hint = "use a smaller batch (--batch-tokens, --per-device-train-batch-size) or a machine with more memory"
        return XtkError("there is not enough memory", where=text or None, hint=hint)
    if isinstance(error, UnicodeEncodeError) and any("\udc80" <= letter <= "\udcff" for letter in str(error.object)):
        what = "the path is not valid UTF-8, which a library requires"
        return XtkError(what, where=ascii(error.object)[:200], hint="rename the file or folder")
    if isinstance(error, FileNotFoundError):
        return XtkError("no such file or folder", where=where or text, hint="check the path")
    if isinstance(error, PermissionError):
        hint = "use another path, or change the permissions of this one"
        return XtkError("permission denied", where=where or text, hint=hint)
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return XtkError("the file name is too long", where=where or text, hint="use a shorter path")
    if isinstance(error, OSError) and error.errno is not None and where is not None:
        return XtkError(str(error.strerror or text).lower(), where=where)
    return None


def require_package(package: str, purpose: str, *, where: str | None = None, extra: str = "") -> None:
    """Refuse a missing optional package, with the command that installs it; `purpose` ends in "needs" or "need"."""
    if importlib.util.find_spec(package) is None:
        raise XtkError(
            f"{purpose} the package {package}, which is not installed",
            where=where,
            hint=f"run pip install '.[{extra or package}]' in xtk's repository",
        )
