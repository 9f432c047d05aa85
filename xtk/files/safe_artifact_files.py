"""Safe access to files named in artifacts: only regular files with known names, inside the artifact's folder."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path

from xtk.errors import CorruptError

# Characters without a special meaning in file systems and shells; no separator, no leading dot.
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+=-]{0,199}")


def check_file_name(name: object, allowed: Sequence[str | re.Pattern[str]], *, where: str) -> str:
    """Return a file name from an artifact after checking that it is plain and allowed.

    Every name from a manifest, header, recipe, checkpoint or remote listing is checked here before it becomes part
    of a path.

    Args:
        allowed: allowed names; a pattern has to match the whole name.
        where: the file that contains the name, for the error.

    Raises:
        CorruptError: the name is not a string, contains a path, or is not allowed.
    """
    if isinstance(name, str) and _PLAIN_NAME.fullmatch(name) and ".." not in name:
        for kind in allowed:
            if name == kind if isinstance(kind, str) else kind.fullmatch(name):
                return name
    shown = repr(name)
    raise CorruptError(
        f"this file refers to {shown if len(shown) <= 80 else shown[:77] + '...'}, which is not a file of an xtk "
        "artifact in the same folder",
        where=where,
        hint="copy the artifact again from a source that you trust, or create it again",
    )


def open_regular_file(folder: Path, name: str) -> int:
    """Return a descriptor, open for reading, of a regular file directly inside a folder.

    Links, devices, pipes and folders are refused before anything is read; nothing blocks.

    Raises:
        FileNotFoundError: the file does not exist.
        CorruptError: not a regular file.
    """
    path = folder / name
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as failure:
        if failure.errno in (errno.ELOOP, errno.ENXIO):
            raise _not_regular_error(path) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_regular_error(path)
    return descriptor


def read_regular_file(folder: Path, name: str, max_bytes: int) -> bytes:
    """Return the content of a regular file directly inside a folder; a larger file is refused before it is read.

    Raises:
        FileNotFoundError: the file does not exist.
        CorruptError: not a regular file, or larger than `max_bytes`.
    """
    with os.fdopen(open_regular_file(folder, name), "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > max_bytes:
            raise CorruptError(
                f"this file has {size:,} bytes; files of this kind have at most {max_bytes:,}",
                where=str(folder / name),
                hint="copy the file again, or create it again with the command that wrote it",
            )
        return stream.read(max_bytes)


def _not_regular_error(path: Path) -> CorruptError:
    return CorruptError(
        "this is not a regular file, but a link, a device, a pipe or a folder",
        where=str(path),
        hint="replace it with a copy of the file",
    )
