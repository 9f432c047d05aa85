"""Output folders of teacher caches: files that xtk did not write, the request of a cache, removal for `--force`."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from xtk import terminal
from xtk.cache.manifest import (
    FORMAT,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    SHARD_NAME,
    TOKENIZER_FILES,
    VOCABULARY_ORDER_NAME,
    header_identity,
    header_section,
    read_cache_manifest,
)
from xtk.errors import CorruptError, XtkError
from xtk.files.atomic_files import TEMPORARY_PREFIX, parse_json_object
from xtk.files.output_claims import foreign_files_error
from xtk.files.storage_folders import StorageFolder, open_folder
from xtk.files.write_locks import LOCK_PREFIX

# Written first and removed last: marks a folder as an unfinished cache of xtk, even without shards.
UNFINISHED_MARKER = ".xtk-unfinished"
_TEMPORARY_SHARD_NAME = re.compile(re.escape(TEMPORARY_PREFIX) + ".*" + SHARD_NAME.pattern)


def is_cache(location: str | Path) -> bool:
    """Return whether a folder contains a teacher cache, finished or not."""
    try:
        held = open_folder(location).file_sizes()
    except XtkError:  # a file
        return False
    return MANIFEST in held or any(SHARD_NAME.fullmatch(file) for file in held)


def is_cache_file(name: str) -> bool:
    """Return whether a file of this name can be part of a teacher cache."""
    return (
        name in (MANIFEST, UNFINISHED_MARKER, *TOKENIZER_FILES)
        or name.startswith((TEMPORARY_PREFIX, LOCK_PREFIX))
        or bool(SHARD_NAME.fullmatch(name))
        or bool(VOCABULARY_ORDER_NAME.fullmatch(name))
    )


def refuse_foreign_cache_folder(folder: StorageFolder) -> None:
    """Refuse a folder that contains anything but a cache that xtk wrote.

    A tokenizer alone is the user's: files with the names of a cache belong to xtk only if there is a manifest, a
    shard, or the marker of an unfinished cache.
    """
    held = folder.file_sizes()
    foreign = sorted({*(file for file in held if not is_cache_file(file)), *_unlisted(folder, held)})
    there = sorted(file for file in held if not file.startswith((TEMPORARY_PREFIX, LOCK_PREFIX)))
    if there and not foreign and not _contains_cache(folder, held):
        foreign = there
    if foreign:
        raise foreign_files_error(foreign, folder.name)


def _unlisted(folder: StorageFolder, held: Mapping[str, int]) -> list[str]:
    """Return files with names of cache files that the manifest does not list and that xtk did not write."""
    if MANIFEST not in held:
        return []
    try:
        content = parse_json_object(folder.read(MANIFEST, MAX_MANIFEST_BYTES), folder.path_of(MANIFEST))
        listed = {*content["files"], *(shard["file"] for shard in content["shards"])}
    except (CorruptError, KeyError, TypeError):
        return []
    named = [file for file in held if SHARD_NAME.fullmatch(file) or VOCABULARY_ORDER_NAME.fullmatch(file)]
    return [file for file in named if file not in listed and not _is_arrow_of_xtk(folder.local_path(file))]


def _contains_cache(folder: StorageFolder, held: Mapping[str, int]) -> bool:
    """Return whether a folder contains files that only `cache-teacher` writes, intact or corrupt."""
    if MANIFEST in held and f'"format":"{FORMAT}"'.encode() in folder.read(MANIFEST, MAX_MANIFEST_BYTES):
        return True
    if UNFINISHED_MARKER in held:
        with contextlib.suppress(CorruptError):
            content = parse_json_object(
                folder.read(UNFINISHED_MARKER, MAX_MANIFEST_BYTES), folder.path_of(UNFINISHED_MARKER)
            )
            if content.get("format") == FORMAT:
                return True
    return any(_is_arrow_of_xtk(folder.local_path(file)) for file in held if SHARD_NAME.fullmatch(file))


def _is_arrow_of_xtk(path: Path) -> bool:
    """Return whether a file begins like a shard of any version, or like a vocabulary order."""
    with path.open("rb") as stream:
        start = stream.read(1 << 20)
    return start.startswith(b"ARROW1") and (b'"codec":' in start or b"num_bytes" in start)


class CacheKind:
    """The kind of output of `cache-teacher`; a request is the header of a cache."""

    def check_place(self, place: StorageFolder, inputs: Iterable[str | Path]) -> None:
        """Refuse a path that cannot be created, a home folder, and a folder that is or contains an input."""
        place.check_as_output("a cache", inputs)

    def find_finished(self, place: StorageFolder, request: Any, *, force: bool = False) -> dict[str, Any] | None:
        """Return the manifest if the folder contains the finished cache of a header; None if it is unfinished."""
        if force:
            refuse_foreign_cache_folder(place)
        if force or request is None:
            return None
        held = place.file_sizes()
        if MANIFEST not in held:
            refuse_foreign_cache_folder(place)
            return None
        manifest = read_cache_manifest(place)
        if header_identity(manifest["header"]) != header_identity(request):
            raise other_request_error(place, MANIFEST, manifest["header"], request)
        whole = all(held.get(shard["file"]) == shard["bytes"] for shard in manifest["shards"])
        if not whole or not held.keys() >= manifest.get("files", {}).keys():
            return None
        remove_writer_files(place)
        terminal.note(
            "this cache is already finished; checked file sizes, not checksums (xtk inspect --verify checks them)"
        )
        return manifest


CACHE = CacheKind()


def remove_cache(folder: StorageFolder) -> None:
    """Remove a cache, finished or not, for `--force`; the manifest goes first."""
    refuse_foreign_cache_folder(folder)
    folder.remove(MANIFEST)
    held = [file for file in folder.file_sizes() if not file.startswith(LOCK_PREFIX)]  # its holder removes it
    shards = [file for file in held if SHARD_NAME.fullmatch(file)]
    # If killed here, a later run recognizes the rest as xtk's by the files that are removed last.
    folder.remove(*({*held} - {*shards, UNFINISHED_MARKER}))
    folder.remove(*shards)
    folder.remove(UNFINISHED_MARKER)


def remove_writer_files(folder: StorageFolder) -> None:
    """Remove the unfinished marker, temporary shards and locks from the folder of a finished cache."""
    with contextlib.suppress(OSError):  # a read-only cache
        # Temporary files of other machines too: all shards exist.
        folder.remove(
            *(
                file
                for file in folder.file_sizes()
                if file == UNFINISHED_MARKER or _TEMPORARY_SHARD_NAME.fullmatch(file)
            )
        )
        folder.remove_stale_locks()


def other_request_error(folder: StorageFolder, file: str, header: dict[str, Any], wanted: dict[str, Any]) -> XtkError:
    """Return the error for an output folder with a cache of another header."""
    differences = [
        f"{section}.{key}: {_shorten(header, section, key)} there, {_shorten(wanted, section, key)} in this command"
        for section in ("teacher", "data", "options", "codec")
        for key in sorted({*header_section(header, section), *header_section(wanted, section)})
        if header_section(header, section).get(key) != header_section(wanted, section).get(key)
    ]
    return XtkError(
        "the output folder contains a cache with different inputs or options",
        where=f"{folder.path_of(file)} ({'; '.join(differences[:3])})",
        hint="use another output path (-o), or add --force to replace this cache",
    )


def _shorten(header: dict[str, Any], section: str, key: str) -> str:
    text = str(header_section(header, section).get(key))
    return text if len(text) <= 80 else text[:77] + "..."
