"""Reuse of a finished projection when its command is run again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from xtk.artifacts.projection_file import read_projection, read_projection_header
from xtk.errors import CorruptError, XtkError
from xtk.projection.projection import Projection


def reuse_projection(path: Path, request: dict[str, Any], *, force: bool) -> Projection | None:
    """Return the projection at a path if it has the requested header; None if there is none, or with `force`.

    Raises:
        XtkError: the path has another projection or another file.
    """
    if force or not path.exists():
        return None
    try:
        header, found = read_projection_header(path), read_projection(path)
    except XtkError as wrong:
        kind = CorruptError if isinstance(wrong, CorruptError) else XtkError
        raise kind(wrong.what, where=wrong.where, hint="use another -o, or --force to replace it") from None
    different = [key for key, value in request.items() if header.get(key) != value]
    if different:
        raise XtkError(
            "the output file is a projection that was made from other inputs or options",
            where=f"{path} (different {', '.join(different)})",
            hint="use another -o, or --force to replace it",
        )
    return found
