"""Output folders of teacher caches: finished, unfinished, of another request, or not a cache."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xtk import terminal
from xtk.cache.manifest import (
    FORMAT,
    MANIFEST,
    SHARD_NAME,
    header_identity,
    header_section,
    read_cache_manifest,
)
from xtk.errors import XtkError
from xtk.files.atomic_files import TEMPORARY_PREFIX
from xtk.files.json_validation import shorten
from xtk.files.output import LOCK_PREFIX, foreign_files_error
from xtk.files.storage_folders import StorageFolder, open_folder

# Written first: marks a folder as an unfinished cache of xtk, even without shards.
UNFINISHED_MARKER = ".xtk-unfinished"
_TEMPORARY_SHARD_NAME = re.compile(re.escape(TEMPORARY_PREFIX) + ".*" + SHARD_NAME.pattern)


def is_cache(location: str | Path) -> bool:
    """Return whether a folder contains a teacher cache, finished or not."""
    try:
        held = open_folder(location).file_sizes()
    except XtkError:  # a file
        return False
    return MANIFEST in held or any(SHARD_NAME.fullmatch(file) for file in held)


def refuse_foreign_cache_folder(folder: StorageFolder) -> None:
    """Refuse a folder with files that is not a cache, finished or not.

    A tokenizer alone is the user's: a cache has a manifest, a shard, or the marker of an unfinished cache.
    """
    held = folder.file_sizes()
    there = sorted(file for file in held if not file.startswith((TEMPORARY_PREFIX, LOCK_PREFIX)))
    if there and not _contains_cache(folder, held):
        raise foreign_files_error(there, folder.name)


def _contains_cache(folder: StorageFolder, held: Mapping[str, int]) -> bool:
    """Return whether a folder contains files that only `cache-teacher` writes, intact or corrupt."""
    for file in (MANIFEST, UNFINISHED_MARKER):
        if file in held and FORMAT.encode() in folder.read(file):
            return True
    return any(_is_arrow_of_xtk(folder.local_path(file)) for file in held if SHARD_NAME.fullmatch(file))


def _is_arrow_of_xtk(path: Path) -> bool:
    """Return whether a file begins like a shard of any version."""
    with path.open("rb") as stream:
        start = stream.read(1 << 20)
    return start.startswith(b"ARROW1") and b'"codec":' in start


def find_finished_cache(folder: StorageFolder, header: dict[str, Any]) -> dict[str, Any] | None:
    """Return the manifest if a folder contains the finished cache of a header; None if it is unfinished."""
    held = folder.file_sizes()
    if MANIFEST not in held:
        refuse_foreign_cache_folder(folder)
        return None
    manifest = read_cache_manifest(folder)
    if header_identity(manifest["header"]) != header_identity(header):
        raise other_request_error(folder, MANIFEST, manifest["header"], header)
    whole = all(held.get(shard["file"]) == shard["bytes"] for shard in manifest["shards"])
    if not whole or not held.keys() >= manifest.get("files", {}).keys():
        return None
    remove_writer_files(folder)
    terminal.note(
        "this cache is already finished; checked file sizes, not checksums (xtk inspect --verify checks them)"
    )
    return manifest


def remove_writer_files(folder: StorageFolder) -> None:
    """Remove the unfinished marker and temporary shards from the folder of a finished cache."""
    with contextlib.suppress(OSError):  # a read-only cache
        # Temporary files of other machines too: all shards exist.
        folder.remove(
            *(
                file
                for file in folder.file_sizes()
                if file == UNFINISHED_MARKER or _TEMPORARY_SHARD_NAME.fullmatch(file)
            )
        )


def other_request_error(folder: StorageFolder, file: str, header: dict[str, Any], wanted: dict[str, Any]) -> XtkError:
    """Return the error for an output folder with a cache of another header."""
    differences = [
        f"{section}.{key}: {shorten(str(old.get(key)))} there, {shorten(str(new.get(key)))} in this command"
        for section in ("teacher", "data", "options", "codec")
        for old, new in [(header_section(header, section), header_section(wanted, section))]
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key)
    ]
    return XtkError(
        "the output folder contains a cache with different inputs or options",
        where=f"{folder.path_of(file)} ({'; '.join(differences[:3])})",
        hint="use another output path (-o), or add --force to replace this cache",
    )
