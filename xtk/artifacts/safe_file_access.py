"""Names of files that an artifact states: plain names of known kinds inside that artifact, and nothing else."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path

from xtk.errors import CorruptError

# Letters that no file system and no shell reads as anything else; no separator, no leading dot.
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+=-]{0,199}")


def check_file_name(name: object, allowed: Sequence[str | re.Pattern[str]], *, where: str) -> str:
    """Return a file name that an artifact states, once it is a plain name of a known kind.

    Every name that is read from a manifest, header, recipe, checkpoint or remote listing passes here before it
    becomes part of a path.

    Args:
        name: as it was read.
        allowed: the names that may stand there; a pattern has to match the whole name.
        where: the file that states it, for the error.

    Raises:
        Damaged: it is not a string, leads out of the artifact, or is of no known kind.
    """
    if isinstance(name, str) and _PLAIN_NAME.fullmatch(name) and ".." not in name:
        for kind in allowed:
            if name == kind if isinstance(kind, str) else kind.fullmatch(name):
                return name
    shown = repr(name)
    raise CorruptError(
        f"this file names {shown if len(shown) <= 80 else shown[:77] + '...'}, which cannot be a file of this artifact",
        where=where,
        hint="do not use this artifact unless its source is trusted; make it again, or copy it again",
    )


def open_regular_file(folder: Path, name: str) -> int:
    """Return a descriptor, open for reading, of a regular file directly inside a folder.

    Links, devices, pipes and folders are refused before anything is read; nothing blocks.

    Args:
        folder: of the artifact.
        name: returned by `member`.

    Raises:
        FileNotFoundError: there is no such file.
        Damaged: it is not a regular file.
    """
    path = folder / name
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as wrong:
        if wrong.errno in (errno.ELOOP, errno.ENXIO):
            raise _not_regular_error(path) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_regular_error(path)
    return descriptor


def read_regular_file(folder: Path, name: str, max_bytes: int) -> bytes:
    """Return the content of a regular file directly inside a folder.

    Args:
        folder: of the artifact.
        name: returned by `member`.
        max_bytes: the most bytes that it may hold; a larger file is refused before it is read.

    Raises:
        FileNotFoundError: there is no such file.
        Damaged: it is not a regular file, or larger than the limit.
    """
    with os.fdopen(open_regular_file(folder, name), "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > max_bytes:
            raise CorruptError(
                f"this file has {size:,} bytes; at most {max_bytes:,} are expected", where=str(folder / name)
            )
        return stream.read(max_bytes)


def _not_regular_error(path: Path) -> CorruptError:
    return CorruptError(
        "this is not a regular file", where=str(path), hint="copy the artifact again; links and devices are not read"
    )
