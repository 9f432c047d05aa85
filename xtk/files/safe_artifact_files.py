"""Safe access to files named in artifacts: only regular files with known names, inside the artifact's folder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from xtk.errors import CorruptError
from xtk.files.json_validation import shorten

# Characters without a special meaning in file systems and shells; no separator, no leading dot.
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+=-]{0,199}")


def check_file_name(name: object, allowed: Sequence[str | re.Pattern[str]], *, where: str) -> str:
    """Return a file name from an artifact after checking that it is plain and allowed.

    Every name from a manifest, header, recipe, checkpoint or remote listing is checked here before it becomes part
    of a path.

    Args:
        allowed: allowed names; a pattern has to match the whole name.
        where: the file that contains the name, for the error.
    """
    if isinstance(name, str) and _PLAIN_NAME.fullmatch(name) and ".." not in name:
        for kind in allowed:
            if name == kind if isinstance(kind, str) else kind.fullmatch(name):
                return name
    raise CorruptError(
        f"this file refers to {shorten(repr(name))}, which is not a file of an xtk artifact in the same folder",
        where=where,
        hint="copy the artifact again from a source that you trust, or create it again",
    )


def regular_file(folder: Path, name: str) -> Path:
    """Return the path of a file directly inside a folder; it may be missing, but a link, device or pipe is refused."""
    path = folder / name
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise CorruptError(
            "this is not a regular file, but a link, a device, a pipe or a folder",
            where=str(path),
            hint="replace it with a copy of the file",
        )
    return path
