"""Writing of teacher caches, shard by shard; see docs/reference/artifacts.md."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from xtk import terminal
from xtk.cache.manifest import (
    FORMAT,
    MANIFEST,
    VERSION,
    cache_version_error,
    header_identity,
    manifest_bytes,
    manifest_checksum,
    read_cache_manifest,
    repair_hint,
    shard_file_name,
)
from xtk.cache.output import (
    UNFINISHED_MARKER,
    other_request_error,
    refuse_foreign_cache_folder,
    remove_writer_files,
)
from xtk.cache.reader import PREFETCHED_SHARDS, open_verified_shard
from xtk.cache.shard import CacheShard
from xtk.cache.shard_writing import ShardPosition, write_shard
from xtk.cache.teacher_document import TeacherDocument
from xtk.cache.token_ids_by_frequency import VocabularyOrder
from xtk.errors import CorruptError
from xtk.files.atomic_files import canonical_json, parse_json_object, sha256
from xtk.files.storage_folders import StorageFolder
from xtk.progress import Progress


class ShardedCacheWriter:
    """Writes a cache shard by shard; an interrupted run continues with the missing shards.

    Without a manifest, only a shard itself states its content. Every existing shard is therefore read completely and
    compared with its checksum, the request and its position: those in `assigned_shards` here, the others in `finish`.
    A corrupt or misplaced one is removed, with a note, and counts as missing.
    """

    def __init__(
        self,
        folder: StorageFolder,
        header: dict[str, Any],  # identity of teacher, data and options; every shard contains it
        shard_sizes: Sequence[int],  # number of documents of each shard
        assigned_shards: Sequence[int] | None = None,  # shards that this run writes if they are missing; None: all
    ) -> None:
        self.folder, self.header, self.num_shards = folder, header, len(shard_sizes)
        self._rows, self._first_rows = shard_sizes, [0, *itertools.accumulate(shard_sizes)]
        self._identity = header_identity(header)
        start_cache(folder, header)
        self._existing_files = set(folder.file_sizes())
        self._entries: dict[int, dict[str, Any]] = {}
        self._files: dict[str, bytes] = {}
        unfinished = [
            number
            for number in (range(self.num_shards) if assigned_shards is None else assigned_shards)
            if shard_file_name(number) in self._existing_files
        ]
        for number, failure in self._check(unfinished):
            terminal.note(f"cache-teacher: {failure.where}: {failure.what}; writing this shard again")
            self.folder.remove(shard_file_name(number))
            self._existing_files.remove(shard_file_name(number))

    def missing_shards(self) -> list[int]:
        """Return the numbers of the shards that do not exist yet."""
        return [
            number
            for number in range(self.num_shards)
            if shard_file_name(number) not in self._existing_files and number not in self._entries
        ]

    def refresh_missing_shards(self) -> list[int]:
        """List the folder again and return the missing shards; other processes may have written some."""
        self._existing_files = set(self.folder.file_sizes())
        return self.missing_shards()

    def shard_position(self, number: int) -> ShardPosition:
        """Return the position of a shard in the cache."""
        return ShardPosition(number, self._first_rows[number], self._rows[number])

    def write_shard(self, number: int, documents: Sequence[TeacherDocument]) -> None:
        """Write one shard atomically."""
        self.add_manifest_entry(number, store_shard(self.folder, self.header, self.shard_position(number), documents))

    def add_manifest_entry(self, number: int, entry: dict[str, Any]) -> None:
        """Record the manifest entry, from `store_shard`, of a shard that this run wrote; it is not read again."""
        self._entries[number] = entry

    def write_shared_files(self, files: Mapping[str, bytes]) -> None:
        """Write the tokenizer and the vocabulary order, replacing existing files."""
        for name, content in files.items():
            write_file(self.folder, name, content)
            self._files[name] = content

    def finish(self) -> dict[str, Any]:
        """Write the manifest, the last file of a cache, and return it."""
        others = [number for number in range(self.num_shards) if number not in self._entries]
        for _, failure in self._check(others):
            raise CorruptError(
                failure.what,
                where=failure.where,
                hint="run the same xtk cache-teacher command again on the machine that wrote this shard",
            )
        for name, content in self._files.items():
            if self.folder.read(name) != content:
                terminal.note(f"cache-teacher: {self.folder.path_of(name)} was changed; writing it again")
                write_file(self.folder, name, content)
        files = {name: sha256(content) for name, content in self._files.items()}
        entries = [self._entries[number] for number in range(self.num_shards)]
        manifest = {"header": self.header, "files": files, "shards": entries}
        return write_cache_manifest(self.folder, manifest, exclusive=True)

    def _check(self, numbers: Sequence[int]) -> Iterator[tuple[int, CorruptError]]:
        """Read shards completely; keep the manifest entries of valid ones and yield the others."""
        if not numbers:
            return
        with Progress("cache-teacher: checking", len(numbers), "shards") as progress:
            for at, number in enumerate(numbers):
                if at % PREFETCHED_SHARDS == 0:
                    self.folder.prefetch([shard_file_name(other) for other in numbers[at : at + PREFETCHED_SHARDS]])
                try:
                    self._entries[number] = self._checked(number)
                except CorruptError as failure:
                    yield number, failure
                progress.advance(1)

    def _checked(self, number: int) -> dict[str, Any]:
        file = shard_file_name(number)
        shard = open_verified_shard(self.folder.local_path(file), self.folder.path_of(file))
        if header_identity(shard.header) != self._identity:
            raise other_request_error(self.folder, file, shard.header, self.header)
        if shard.position != self.shard_position(number) or len(shard) != shard.position.documents:
            raise CorruptError(
                f"this file contains documents {shard.position.first_document:,} to "
                f"{shard.position.first_document + len(shard) - 1:,} of shard {shard.position.shard}, not documents "
                f"{self._first_rows[number]:,} to {self._first_rows[number + 1] - 1:,} of shard {number}",
                where=self.folder.path_of(file),
                hint=repair_hint(self.folder, file),
            )
        return shard.manifest_entry(file)


def store_shard(
    folder: StorageFolder,
    header: dict[str, Any],
    position: ShardPosition,
    documents: Sequence[TeacherDocument],
    vocabulary_order: VocabularyOrder | None = None,
) -> dict[str, Any]:
    """Write one shard into the folder of a cache atomically, and return its manifest entry."""
    with folder.write(shard_file_name(position.shard), exclusive=True) as temporary:
        write_shard(temporary, header, position, documents, vocabulary_order)
        return CacheShard(temporary).manifest_entry(shard_file_name(position.shard))


def write_file(folder: StorageFolder, name: str, content: bytes, *, exclusive: bool = False) -> None:
    """Write a small file atomically; with `exclusive`, refuse to replace a file with other content."""
    with folder.write(name, exclusive=exclusive) as temporary:
        temporary.write_bytes(content)


def write_cache_manifest(folder: StorageFolder, content: dict[str, Any], *, exclusive: bool = False) -> dict[str, Any]:
    """Write and return the manifest of a cache, which marks it as finished; `content`: header, shards and files."""
    manifest = {"format": FORMAT, "version": VERSION, **content}
    manifest["checksum"] = manifest_checksum(manifest)
    # Written last, on purpose: a folder without a manifest is unfinished.
    write_file(folder, MANIFEST, manifest_bytes(manifest), exclusive=exclusive)
    remove_writer_files(folder)
    return manifest


def start_cache(folder: StorageFolder, header: dict[str, Any]) -> None:
    """Mark a folder as an unfinished cache, or check that it contains one of this request."""
    refuse_foreign_cache_folder(folder)
    folder.remove_stale_temporary_files()
    held = folder.file_sizes()
    if UNFINISHED_MARKER in held:
        where = folder.path_of(UNFINISHED_MARKER)
        marker = parse_json_object(folder.read(UNFINISHED_MARKER), where)
        if marker.get("version") != VERSION:
            raise cache_version_error(marker.get("version"), where)
        marked_header = marker.get("header")
        if isinstance(marked_header, dict) and header_identity(marked_header) != header_identity(header):
            raise other_request_error(folder, UNFINISHED_MARKER, marked_header, header)
    elif MANIFEST not in held:
        write_file(folder, UNFINISHED_MARKER, _unfinished_marker_content(header))


def _unfinished_marker_content(header: dict[str, Any]) -> bytes:
    return canonical_json({"format": FORMAT, "version": VERSION, "header": header}).encode() + b"\n"


def mark_cache_unfinished(folder: StorageFolder) -> None:
    """Mark a cache that lost some of its files as unfinished, so that they are written again."""
    held = folder.file_sizes()
    if MANIFEST not in held:
        return
    manifest = read_cache_manifest(folder)
    write_file(folder, UNFINISHED_MARKER, _unfinished_marker_content(manifest["header"]))
    for shard in manifest["shards"]:
        if held.get(shard["file"], shard["bytes"]) != shard["bytes"]:
            folder.remove(shard["file"])
    folder.remove(MANIFEST)
