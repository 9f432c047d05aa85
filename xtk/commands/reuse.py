"""Run again, a command finds its finished projection; another request for the same path is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from xtk.artifacts.projection_file import read_projection, read_projection_header
from xtk.errors import XtkError
from xtk.projection.projection import Projection


def reuse_projection(path: Path, request: dict[str, Any], *, force: bool) -> Projection | None:
    """Return the projection at a path if it is the one that is asked for, None if there is nothing to keep.

    Raises:
        XtkError: there is something else at the path.
    """
    if not path.exists() or (force and path.is_file()):
        return None
    if path.is_dir():
        raise XtkError("this is to be a file, and there is a folder of this name", where=str(path))
    header = read_projection_header(path)
    different = [key for key, value in request.items() if header.get(key) != value]
    if different:
        raise XtkError(
            "there is a projection of another request",
            where=f"{path} (another {', '.join(different)})",
            hint="another -o, or --force to replace it",
        )
    return read_projection(path)
