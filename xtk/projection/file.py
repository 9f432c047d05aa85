"""Reading and writing of projection files: safetensors with the header as JSON in one metadata key.

Only one key, because safetensors writes several keys in varying order, and equal projections must have equal bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import numpy as np
import safetensors.numpy

from xtk.errors import CorruptError, XtkError
from xtk.files.atomic_files import atomic_write, canonical_json, sha256
from xtk.files.json_validation import check_json
from xtk.files.output import OutputKind, write_output
from xtk.projection.projection import SparseProjection

FORMAT, VERSION = "xtk-projection", 2
TENSOR_DTYPES = {
    "row_offsets": np.int64,
    "teacher_ids": np.int32,
    "weights": np.float32,
    "student_cells": np.int32,
    "teacher_cells": np.int32,
}
MAX_HEADER_BYTES = 1 << 27
_REBUILD_HINT = "build it again: xtk build-projection STUDENT TEACHER -o FILE"
# The first bytes of a safetensors file with this one metadata key, after 8 bytes of length.
HEADER_PREFIX = b'{"__metadata__":{"xtk":'
MAX_TOKEN_ID = 2**31 - 1
Count = Annotated[int, 0, MAX_TOKEN_ID]
Fraction = Annotated[float, 0, 1]


class TokenizerHeader(TypedDict):
    """One of the two tokenizers."""

    tokenizer: str
    special_tokens: dict[str, Count]
    tokens: Count
    embedding_rows: Annotated[int, 1, MAX_TOKEN_ID]


class CategoryAudit(TypedDict):
    """Tokens of a category; the last three are not known after pruning."""

    student_tokens: int
    unmatched_student_tokens: int
    teacher_tokens: int
    unmatched_teacher_tokens: int
    unmapped: NotRequired[int]
    unmapped_mass: NotRequired[Fraction]
    unreachable_teacher_tokens: NotRequired[int]


class ProjectionAudit(TypedDict):
    """What a projection covers; differences of a pruned one may be negative."""

    rows: dict[str, Annotated[int, -MAX_TOKEN_ID, MAX_TOKEN_ID]]
    unmapped_mass: Fraction
    unreachable_teacher_tokens: Annotated[int, -MAX_TOKEN_ID, MAX_TOKEN_ID]
    categories: NotRequired[dict[str, CategoryAudit]]
    poorly_matched_categories: NotRequired[list[str]]


class ProjectionHeader(TypedDict):
    """The header of a projection file."""

    student: TokenizerHeader
    teacher: TokenizerHeader
    kind: NotRequired[str]
    method: NotRequired[str]
    options: NotRequired[dict[str, Any]]
    audit: NotRequired[ProjectionAudit]
    prunings: NotRequired[list[dict[str, Any]]]
    merges: NotRequired[list[Any]]


def write_projection(projection: SparseProjection, path: Path, *, keep_old: bool = True) -> None:
    """Write a projection; equal projections give equal bytes. Another file there is moved aside, or replaced."""
    projection.validate()
    tensors = {name: np.ascontiguousarray(getattr(projection, name)) for name in TENSOR_DTYPES}
    header = {**projection.header, "format": FORMAT, "version": VERSION}
    header["checksum"] = _checksum(header, tensors)
    raw = safetensors.numpy.save(tensors, metadata={"xtk": canonical_json(header)})
    with write_output(path) if keep_old else atomic_write(path) as temporary:
        temporary.write_bytes(raw)


def _looks_like_projection(path: Path) -> bool:
    """Return whether a file may be replaced: a projection of xtk, intact or corrupt, or an empty file."""
    with path.open("rb") as stream:
        start = stream.read(8 + len(HEADER_PREFIX))
    return not start or start[8:] == HEADER_PREFIX


def has_projection_metadata(path: Path) -> bool:
    """Return whether a file is a safetensors file with xtk's metadata, in any order and perhaps corrupt."""
    with path.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = stream.read(min(size, 1 << 20))
    return header.startswith(b"{") and b'"__metadata__"' in header and b'"xtk"' in header


def read_projection_header(path: Path) -> dict[str, Any]:
    """Return the header of a projection file; needs only the standard library."""
    try:
        if not path.is_dir() and path.exists() and not path.is_file():
            raise CorruptError(
                "a projection must be a regular file, but this is a device or a pipe",
                where=str(path),
                hint=_REBUILD_HINT,
            )
        with path.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if size > MAX_HEADER_BYTES:
                raise ValueError("not a safetensors file")
            metadata = json.loads(stream.read(size)).get("__metadata__", {})
        header = dict(json.loads(metadata["xtk"]))
    except FileNotFoundError:
        raise XtkError(
            "this projection file does not exist",
            where=str(path),
            hint="check the path, or build it: xtk build-projection STUDENT TEACHER -o FILE",
        ) from None
    except IsADirectoryError:
        raise XtkError(
            "a projection must be a file, but this is a folder",
            where=str(path),
            hint="use the FILE of xtk build-projection STUDENT TEACHER -o FILE",
        ) from None
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise CorruptError(
            "this is not a complete projection file of xtk", where=str(path), hint=_REBUILD_HINT
        ) from None
    if header.get("format") != FORMAT:
        raise CorruptError(
            f"this is not a projection file of xtk (format {header.get('format')!r})",
            where=str(path),
            hint="use the FILE of xtk build-projection STUDENT TEACHER -o FILE",
        )
    if header.get("version") != VERSION:
        raise XtkError(
            f"this projection has version {str(header.get('version'))[:20]}; this xtk reads version {VERSION}",
            where=str(path),
            hint="build it again: xtk build-projection STUDENT TEACHER -o FILE",
        )
    check_json(header, ProjectionHeader, str(path), _REBUILD_HINT)
    audited = header.get("audit", {})
    if strange := [
        name for name in audited.get("poorly_matched_categories", []) if name not in audited.get("categories", {})
    ]:
        raise CorruptError(
            f"the audit in the header of this projection file has the unknown category {strange[0]!r:.60}",
            where=str(path),
            hint=_REBUILD_HINT,
        )
    if any(
        ("unmapped_mass" in one) != ("unreachable_teacher_tokens" in one)
        for one in audited.get("categories", {}).values()
    ):
        raise CorruptError(
            "a category in the audit of this projection file lacks a value", where=str(path), hint=_REBUILD_HINT
        )
    if ("categories" in audited) != ("poorly_matched_categories" in audited):
        raise CorruptError(
            "the audit of this projection file has only one of categories and poorly_matched_categories",
            where=str(path),
            hint=_REBUILD_HINT,
        )
    return header


def read_projection(path: Path) -> SparseProjection:
    """Return the projection in a file after checking its checksum and all values."""
    header = read_projection_header(path)
    try:
        tensors = safetensors.numpy.load(path.read_bytes())
    except Exception as failure:  # safetensors raises a private exception class
        raise CorruptError(
            f"this projection file cannot be read: {failure}", where=str(path), hint=_REBUILD_HINT
        ) from None
    for name, dtype in TENSOR_DTYPES.items():
        if name not in tensors or tensors[name].dtype != dtype or tensors[name].ndim != 1:
            raise CorruptError(
                f"this projection file lacks a 1-dimensional tensor {name} of dtype {np.dtype(dtype)}",
                where=str(path),
                hint=_REBUILD_HINT,
            )
    try:
        whole_file = _checksum(header, tensors) == header.get("checksum")
    except ValueError:  # lone surrogates
        whole_file = False
    if not whole_file:
        raise CorruptError("this projection file does not match its checksum", where=str(path), hint=_REBUILD_HINT)
    header = {key: value for key, value in header.items() if key not in ("format", "version", "checksum")}
    projection = SparseProjection(**{name: tensors[name] for name in TENSOR_DTYPES}, header=header)
    try:
        projection.validate()
    except XtkError as failure:
        raise CorruptError(failure.what, where=str(path), hint=_REBUILD_HINT) from None
    return projection


def _checksum(header: dict[str, Any], tensors: dict[str, Any]) -> str:
    stated = canonical_json({key: value for key, value in header.items() if key != "checksum"})
    return sha256(stated.encode() + b"".join(np.ascontiguousarray(tensors[name]).tobytes() for name in TENSOR_DTYPES))


def _read_requested_projection(path: Path, request: dict[str, Any]) -> SparseProjection:
    """Return the projection in a file after comparing its header."""
    try:
        header, projection = read_projection_header(path), read_projection(path)
    except XtkError as failure:
        kind = CorruptError if isinstance(failure, CorruptError) else XtkError
        raise kind(failure.what, where=failure.where, hint="use another -o, or --force to replace it") from None
    different = [key for key, value in request.items() if header.get(key) != value]
    if different:
        raise XtkError(
            "the output file is a projection that was made from other inputs or options",
            where=f"{path} (different {', '.join(different)})",
            hint="use another -o, or --force to replace it",
        )
    return projection


# A request is a header, without keys that do not matter.
PROJECTION = OutputKind("a projection", _looks_like_projection, _read_requested_projection)
