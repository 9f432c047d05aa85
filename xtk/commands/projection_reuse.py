"""Run again, a command finds its finished projection; another request for the same path is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from xtk.artifacts.projection_file import read_projection, read_projection_header
from xtk.errors import CorruptError, XtkError
from xtk.projection.projection import Projection


def reuse_projection(path: Path, request: dict[str, Any], *, force: bool) -> Projection | None:
    """Return the projection at a path if it is the one that is asked for, None if there is nothing to keep.

    Raises:
        XtkError: there is something else at the path.
    """
    if force or not path.exists():
        return None
    try:
        header, found = read_projection_header(path), read_projection(path)
    except XtkError as wrong:
        kind = CorruptError if isinstance(wrong, CorruptError) else XtkError
        raise kind(wrong.what, where=wrong.where, hint="another -o, or --force to replace it") from None
    different = [key for key, value in request.items() if header.get(key) != value]
    if different:
        raise XtkError(
            "there is a projection of another request",
            where=f"{path} (another {', '.join(different)})",
            hint="another -o, or --force to replace it",
        )
    return found
