"""A projection as a file: safetensors, with the header in one metadata key.

One key, because several come out in varying order and the bytes would differ between two saves.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from xtk.artifacts.atomic_files import atomic_write, canonical_json, sha256
from xtk.artifacts.json_schema import any_json, check_schema, integer, json_object, list_of, map_of, number, text
from xtk.errors import CorruptError, XtkError
from xtk.projection.coverage_audit import VOCABULARY_KEYS
from xtk.projection.projection import Projection

FORMAT, VERSION = "xtk-projection", 2
TENSOR_DTYPES = {
    "row_offsets": np.int64,
    "teacher_ids": np.int32,
    "weights": np.float32,
    "student_cells": np.int32,
    "teacher_cells": np.int32,
}
MAX_HEADER_BYTES = 1 << 27
# How safetensors begins a file of one metadata key, after 8 bytes of length.
HEADER_PREFIX = b'{"__metadata__":{"xtk":'
MAX_TOKEN_ID = 2**31 - 1
_TOKENIZER_SCHEMA = json_object(
    {
        "tokenizer": text(),
        "special_tokens": map_of(integer(0, MAX_TOKEN_ID)),
        "tokens": integer(0, MAX_TOKEN_ID),
        "embedding_rows": integer(1, MAX_TOKEN_ID),
    }
)
_CATEGORY_SCHEMA = json_object(
    {name: integer() for name in VOCABULARY_KEYS},
    {"unmapped": integer(), "unmapped_mass": number(0, 1), "unreachable_teacher_tokens": integer()},
)
_AUDIT_SCHEMA = json_object(
    {
        "rows": map_of(integer(-MAX_TOKEN_ID, MAX_TOKEN_ID)),
        "unmapped_mass": number(0, 1),
        "unreachable_teacher_tokens": integer(-MAX_TOKEN_ID, MAX_TOKEN_ID),
    },
    {"categories": map_of(_CATEGORY_SCHEMA), "poorly_matched_categories": list_of(text())},
)
_HEADER_SCHEMA = json_object(
    {"student": _TOKENIZER_SCHEMA, "teacher": _TOKENIZER_SCHEMA},
    {
        "kind": text(),
        "method": text(),
        "options": map_of(any_json()),
        "audit": _AUDIT_SCHEMA,
        "prunings": list_of(map_of(any_json())),
        "merges": list_of(any_json()),
    },
)


def write_projection(projection: Projection, path: Path, *, keep_others: bool = True) -> None:
    """Write a projection; the same projection gives the same bytes.

    Raises:
        XtkError: it is none, as a method that gives weights of no meaning makes.
    """
    projection.validate()
    tensors = {name: np.ascontiguousarray(getattr(projection, name)) for name in TENSOR_DTYPES}
    header = {**projection.header, "format": FORMAT, "version": VERSION}
    header["checksum"] = _checksum(header, tensors)
    raw = safetensors.numpy.save(tensors, metadata={"xtk": canonical_json(header)})
    with atomic_write(path, keep_others=keep_others) as temporary:
        temporary.write_bytes(raw)


def looks_like_projection(path: Path) -> bool:
    """Say whether a file is xtk's to replace: a projection, whole or damaged, or empty."""
    with path.open("rb") as stream:
        start = stream.read(8 + len(HEADER_PREFIX))
    return not start or start[8:] == HEADER_PREFIX


def read_projection_header(path: Path) -> dict[str, Any]:
    """Read the header alone, with the standard library.

    Raises:
        XtkError: the file is no projection of xtk.
    """
    try:
        if not path.is_dir() and path.exists() and not path.is_file():
            raise CorruptError("this is a device or a pipe, not a file", where=str(path))
        with path.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if size > MAX_HEADER_BYTES:
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
        raise CorruptError("this file is no projection of xtk, or it is cut short", where=str(path)) from None
    if header.get("format") != FORMAT:
        raise CorruptError(f"this file is no projection of xtk (format {header.get('format')!r})", where=str(path))
    if header.get("version") != VERSION:
        raise XtkError(
            f"this projection has version {str(header.get('version'))[:20]}; this xtk reads version {VERSION}",
            where=str(path),
            hint="build it again: xtk build-projection STUDENT TEACHER -o FILE",
        )
    check_schema(header, _HEADER_SCHEMA, str(path), "build it again")
    audited = header.get("audit", {})
    if strange := [
        name for name in audited.get("poorly_matched_categories", []) if name not in audited.get("categories", {})
    ]:
        raise CorruptError(f"the audit of this projection has no category {strange[0]!r:.60}", where=str(path))
    if any(
        ("unmapped_mass" in one) != ("unreachable_teacher_tokens" in one)
        for one in audited.get("categories", {}).values()
    ):
        raise CorruptError("the audit of this projection states a part of what a category loses", where=str(path))
    if ("categories" in audited) != ("poorly_matched_categories" in audited):
        raise CorruptError(
            "the audit of this projection has categories without a list of poorly matched ones, or the reverse",
            where=str(path),
        )
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
        raise CorruptError(f"this projection cannot be read: {wrong}", where=str(path), hint="build it again") from None
    for name, dtype in TENSOR_DTYPES.items():
        if name not in tensors or tensors[name].dtype != dtype or tensors[name].ndim != 1:
            raise CorruptError(f"this projection has no {name} of type {np.dtype(dtype)}", where=str(path))
    try:
        whole_file = _checksum(header, tensors) == header.get("checksum")
    except ValueError:  # half of a character pair
        whole_file = False
    if not whole_file:
        raise CorruptError(
            "this projection was altered: its checksum does not fit", where=str(path), hint="build it again"
        )
    header = {key: value for key, value in header.items() if key not in ("format", "version", "checksum")}
    projection = Projection(**{name: tensors[name] for name in TENSOR_DTYPES}, header=header)
    try:
        projection.validate()
    except XtkError as wrong:
        raise CorruptError(wrong.what, where=str(path)) from None
    return projection


def _checksum(header: dict[str, Any], tensors: dict[str, Any]) -> str:
    told = canonical_json({key: value for key, value in header.items() if key != "checksum"})
    return sha256(told.encode() + b"".join(np.ascontiguousarray(tensors[name]).tobytes() for name in TENSOR_DTYPES))
