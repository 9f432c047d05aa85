"""A projection as a file: safetensors, with the header in one metadata key.

One key, because several come out in varying order and the bytes would differ between two saves.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from xtk.artifacts.files import canonical_json, sha256, written_whole
from xtk.errors import Damaged, XtkError
from xtk.projection.projection import Projection

FORMAT, VERSION = "xtk-projection", 1
TENSORS = {
    "row_offsets": np.int64,
    "teacher_ids": np.int32,
    "weights": np.float32,
    "student_cells": np.int32,
    "teacher_cells": np.int32,
}
# How safetensors begins a file of one metadata key, after 8 bytes of length.
BEGINNING = b'{"__metadata__":{"xtk":'
SIDE_TYPES = {"tokenizer": str, "roles": dict, "tokens": int, "width": int}


def write_projection(projection: Projection, path: Path) -> None:
    """Write a projection; the same projection gives the same bytes.

    Raises:
        XtkError: it is none, as a method that gives weights of no meaning makes.
    """
    projection.check()
    tensors = {name: np.ascontiguousarray(getattr(projection, name)) for name in TENSORS}
    header = {**projection.header, "format": FORMAT, "version": VERSION}
    header["checksum"] = _checksum(header, tensors)
    raw = safetensors.numpy.save(tensors, metadata={"xtk": canonical_json(header)})
    with written_whole(path) as temporary:
        temporary.write_bytes(raw)


def begins_like_a_projection(path: Path) -> bool:
    """Say whether a file is xtk's to replace: a projection, whole or damaged, or empty."""
    with path.open("rb") as stream:
        start = stream.read(8 + len(BEGINNING))
    return not start or start[8:] == BEGINNING


def read_projection_header(path: Path) -> dict[str, Any]:
    """Read the header alone, with the standard library.

    Raises:
        XtkError: the file is no projection of xtk.
    """
    try:
        with path.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if size > 100_000_000:
                raise ValueError("not a safetensors file")
            metadata = json.loads(stream.read(size)).get("__metadata__", {})
        header = dict(json.loads(metadata["xtk"]))
    except FileNotFoundError:
        raise XtkError(
            "there is no such projection", where=str(path), hint="xtk build-projection STUDENT TEACHER -o FILE"
        ) from None
    except IsADirectoryError:
        raise XtkError(
            "a projection is a file, and this is a folder",
            where=str(path),
            hint="the FILE of xtk build-projection STUDENT TEACHER -o FILE",
        ) from None
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise Damaged("this file is no projection of xtk, or it is cut short", where=str(path)) from None
    if header.get("format") != FORMAT:
        raise Damaged(f"this file is no projection of xtk (format {header.get('format')!r})", where=str(path))
    if header.get("version") != VERSION:
        raise XtkError(
            f"this projection has version {header.get('version')}; this xtk reads version {VERSION}",
            where=str(path),
            hint="build it again, or use the xtk that wrote it",
        )
    for side in ("student", "teacher"):
        told = header.get(side)
        if not isinstance(told, dict) or not all(isinstance(told.get(key), kind) for key, kind in SIDE_TYPES.items()):
            raise Damaged(f"this projection does not tell its {side}", where=str(path), hint="build it again")
    return header


def read_projection(path: Path) -> Projection:
    """Read a projection and check every number of it.

    Raises:
        XtkError: the file is no projection, cut short, altered, or of another version.
    """
    header = read_projection_header(path)
    try:
        tensors = safetensors.numpy.load(path.read_bytes())
    except Exception as wrong:  # safetensors has an exception of its own that is no public name
        raise Damaged(f"this projection cannot be read: {wrong}", where=str(path), hint="build it again") from None
    for name, dtype in TENSORS.items():
        if name not in tensors or tensors[name].dtype != dtype or tensors[name].ndim != 1:
            raise Damaged(f"this projection has no {name} of type {np.dtype(dtype)}", where=str(path))
    if _checksum(header, tensors) != header.get("checksum"):
        raise Damaged("this projection was altered: its checksum does not fit", where=str(path), hint="build it again")
    header = {key: value for key, value in header.items() if key not in ("format", "version", "checksum")}
    projection = Projection(**{name: tensors[name] for name in TENSORS}, header=header)
    try:
        projection.check()
    except XtkError as wrong:
        raise Damaged(wrong.what, where=str(path)) from None
    return projection


def _checksum(header: dict[str, Any], tensors: dict[str, Any]) -> str:
    told = canonical_json({key: value for key, value in header.items() if key != "checksum"})
    return sha256(told.encode() + b"".join(np.ascontiguousarray(tensors[name]).tobytes() for name in TENSORS))
