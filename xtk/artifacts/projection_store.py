"""Projections that were built on the way, kept in the user's cache folder."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from xtk.artifacts.files import canonical_json, sha256
from xtk.artifacts.projection_file import VERSION, read_projection, write_projection
from xtk.errors import XtkError
from xtk.projection.build import build_projection, request
from xtk.projection.projection import Projection
from xtk.projection.prune import prune_projection
from xtk.projection.special import ROLE, SpecialTokens
from xtk.tokens.tokenizer import Tokenizer


def projection_for(
    student: Tokenizer,
    teacher: Tokenizer,
    method: str = "multitoken",
    *,
    top_k: int | None = None,
    special_tokens: SpecialTokens = ROLE,
    **options: Any,
) -> Projection:
    """Return the projection of a pair, built once and kept in the user's cache folder.

    The folder is `XTK_CACHE`, else `~/.cache/xtk`, and `projections` in it. A file there is named after all that the
    projection depends on; a damaged one is built again. Several processes may ask at once: each writes the same
    bytes under a name of its own and renames it. Where the folder cannot be
    named, read or written, nothing is kept.

    Args:
        student: its tokens are the rows.
        teacher: its tokens are the columns.
        method: one of METHODS that needs no more than the tokenizers: not `counts`, not `embedding`.
        top_k: pruned to so many entries a row. None: all.
        special_tokens: as in build_projection.
        options: the method's own.
    """
    header = request(student, teacher, method, special_tokens, **options)
    path = None
    with contextlib.suppress(RuntimeError):  # nobody knows a home
        path = cache_folder() / "projections" / f"{_key(header, top_k)}.safetensors"
    projection = None if path is None else _read(path)
    if projection is None:
        projection = build_projection(student, teacher, method, special_tokens=special_tokens, **options)
        if top_k is not None:
            projection = prune_projection(projection, top_k=top_k)
        if path is not None:
            with contextlib.suppress(OSError, XtkError):
                write_projection(projection, path)
    return projection


def cache_folder() -> Path:
    """Return the folder where xtk keeps what can be built again: `XTK_CACHE`, else `~/.cache/xtk`.

    Raises:
        RuntimeError: this user, or the one that `XTK_CACHE` names, has no home.
    """
    given = os.environ.get("XTK_CACHE")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "xtk"


def _key(header: dict[str, Any], top_k: int | None) -> str:
    return sha256(canonical_json([VERSION, header, top_k])).removeprefix("sha256:")


def _read(path: Path) -> Projection | None:
    try:
        return read_projection(path) if path.is_file() else None
    except (XtkError, OSError):
        return None
