"""Projections and byte partitions of tokenizer pairs, cached in the user's cache folder."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from xtk.errors import XtkError
from xtk.files.atomic_files import atomic_write, canonical_json, sha256
from xtk.projection.build import build_projection, projection_header, tokenizer_identity
from xtk.projection.file import VERSION, read_projection, write_projection
from xtk.projection.projection import SparseProjection
from xtk.projection.prune import prune_projection
from xtk.projection.special_tokens import MATCH_BY_ROLE, SpecialTokenMatching
from xtk.projection.vocabulary_byte_partition import (
    ALGORITHM_VERSION,
    BytePartition,
    PrefixContinuations,
    SortedVocabulary,
    build_byte_partition,
)
from xtk.text.tokenizer import Tokenizer
from xtk.writable_cache_folders import user_cache_folder

NEXT_BYTES_PARTS: dict[str, Any] = {
    "student": SortedVocabulary,
    "teacher": SortedVocabulary,
    "continuations": PrefixContinuations,
}


def cached_projection(
    student: Tokenizer,
    teacher: Tokenizer,
    method: str = "multitoken",
    *,
    top_k: int | None = None,
    special_tokens: SpecialTokenMatching = MATCH_BY_ROLE,
    **options: Any,
) -> SparseProjection:
    """Return the projection of a tokenizer pair, built once and cached, for a method that needs only the tokenizers.

    The files are in `projections` of `user_cache_folder`, named by a hash of everything that the
    projection depends on; a corrupt file is built again. Several processes may write at the same time: each writes the
    same bytes to a separate temporary file and renames it. If the folder cannot be used, nothing is cached. `top_k`:
    prune to this many entries per row.
    """
    path = cached_projection_path(student, teacher, method, top_k=top_k, special_tokens=special_tokens, **options)
    projection = None if path is None else _read_valid_projection(path)
    if projection is None:
        projection = build_projection(student, teacher, method, special_tokens=special_tokens, **options)
        if top_k is not None:
            projection = prune_projection(projection, top_k=top_k)
        if path is not None:
            with contextlib.suppress(OSError, XtkError):
                write_projection(projection, path, keep_old=False)
    return projection


def cached_projection_path(
    student: Tokenizer,
    teacher: Tokenizer,
    method: str,
    *,
    top_k: int | None = None,
    special_tokens: SpecialTokenMatching = MATCH_BY_ROLE,
    **options: Any,
) -> Path | None:
    """Return the path in the cache for these arguments; None without a cache folder."""
    header = projection_header(student, teacher, method, special_tokens, **options)
    with contextlib.suppress(RuntimeError):  # this user has no home folder
        return user_cache_folder() / "projections" / f"{_cache_key(header, top_k)}.safetensors"
    return None


def cached_next_bytes(
    student: Tokenizer, teacher: Tokenizer, special_tokens: SpecialTokenMatching = MATCH_BY_ROLE
) -> BytePartition:
    """Return the byte partition of a tokenizer pair (`build_byte_partition`), built once and cached in `next-bytes`.

    Building it takes seconds for real vocabularies, and every process of a run needs it. A corrupt file is built again.
    """
    matching = special_tokens if isinstance(special_tokens, str) else dict(special_tokens)
    key = sha256(
        canonical_json([ALGORITHM_VERSION, matching, tokenizer_identity(student), tokenizer_identity(teacher)])
    ).removeprefix("sha256:")
    path = None
    with contextlib.suppress(RuntimeError):  # this user has no home folder
        path = user_cache_folder() / "next-bytes" / f"{key}.safetensors"
    cached = None if path is None else _read_next_bytes(path)
    if cached is not None:
        return cached
    made = build_byte_partition(student, teacher, special_tokens)
    if path is not None:
        with contextlib.suppress(OSError, XtkError):
            _write_next_bytes(made, path)
    return made


def _write_next_bytes(made: BytePartition, path: Path) -> None:
    tensors: dict[str, NDArray[Any]] = {"member_offsets": made.cell_token_offsets, "members": made.cell_tokens}
    for name in NEXT_BYTES_PARTS:
        tensors |= {f"{name}.{field}": array for field, array in getattr(made, name)._asdict().items()}
    with atomic_write(path) as temporary:
        temporary.write_bytes(safetensors.numpy.save(tensors, metadata={"checksum": _checksum(tensors)}))


def _read_next_bytes(path: Path) -> BytePartition | None:
    try:
        with safetensors.safe_open(path, "numpy") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a mapping
            checksum = (file.metadata() or {}).get("checksum")
        if checksum != _checksum(tensors):
            return None
        parts = {
            name: kind(*(tensors[f"{name}.{field}"] for field in kind._fields))
            for name, kind in NEXT_BYTES_PARTS.items()
        }
        return BytePartition(**parts, cell_token_offsets=tensors["member_offsets"], cell_tokens=tensors["members"])
    except Exception:  # safetensors raises a private exception class; a corrupt file is built again
        return None


def _checksum(tensors: dict[str, NDArray[Any]]) -> str:
    named = [(name.encode(), np.ascontiguousarray(tensors[name]).tobytes()) for name in sorted(tensors)]
    return sha256(b"".join(part for pair in named for part in pair))


def _cache_key(header: dict[str, Any], top_k: int | None) -> str:
    return sha256(canonical_json([VERSION, header, top_k])).removeprefix("sha256:")


def _read_valid_projection(path: Path) -> SparseProjection | None:
    try:
        return read_projection(path) if path.is_file() else None
    except (XtkError, OSError):
        return None
