"""Merging of teacher caches, and copying of ranges of documents, by linking or copying shards."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from xtk import terminal
from xtk.cache.manifest import (
    CODEC_FILE_KEYS,
    TOKENIZER_FILES,
    cache_figures,
    codec_files,
    header_identity,
    shard_file_name,
    source_headers,
)
from xtk.cache.output import find_finished_cache
from xtk.cache.reader import TeacherCache
from xtk.cache.shard import CacheShard
from xtk.cache.writer import start_cache, write_cache_manifest, write_file
from xtk.errors import MismatchError, XtkError
from xtk.files.atomic_files import canonical_json
from xtk.files.storage_folders import StorageFolder, absolute_location, open_folder
from xtk.progress import Progress

# These options select the text, batches and files; the log-probabilities of a document do not depend on them.
OPTIONS_THAT_MAY_DIFFER = frozenset({"shard_tokens", "batch_tokens", "long_documents", "max_length"})
MANIFEST_THREADS = 16
_ROW_RANGE = re.compile(r"(\d*):(\d*)")


@dataclass(frozen=True)
class ShardSlice:
    """Documents `[start, stop)` of a shard of an input cache; they become one shard of the output."""

    source: TeacherCache  # the input cache
    manifest_entry: dict[str, Any]  # the shard's entry in the manifest of the input
    start: int  # first document within the shard
    stop: int  # one past its last
    header_index: int  # index of the shard's header in the output's `source_headers`

    @property
    def is_full_shard(self) -> bool:
        """Whether the slice is the whole shard, so that the file can be linked or copied unchanged."""
        return self.stop - self.start == int(self.manifest_entry["documents"])


def merge_caches(locations: Sequence[str], output: str, *, rows: str = "", force: bool = False) -> dict[str, Any]:
    """Write the concatenation of several caches, or a range of its documents, as one cache; nothing is encoded again.

    Args:
        locations: finished caches, in order.
        output: path or URL of the new cache.
        rows: "START:STOP", document numbers in the concatenation of all inputs; either may be omitted. "": all.
        force: move aside what is at `output`.

    Returns:
        The totals `documents`, `positions`, `tokens`, `bytes`, and `teacher_bits_per_byte`.
    """
    if absolute_location(output) in map(absolute_location, locations):
        raise XtkError(
            "the output folder is one of the caches to merge", where=output, hint="use another output path (-o)"
        )
    folder = open_folder(output)
    folder.check_as_output("a cache", locations, force=force)
    with ThreadPoolExecutor(MANIFEST_THREADS) as threads:
        sources = list(threads.map(TeacherCache, locations))
    _refuse_incompatible(sources)
    start, stop = _parse_row_range(rows, sum(map(len, sources)))
    parts, taken = _plan_slices(sources, start, stop)
    header = _merged_header(sources, parts, start, stop)
    for source in sources:
        source.verify_files()
    if force:
        folder.move_aside()
    if finished := find_finished_cache(folder, header):
        return cache_figures(finished)
    start_cache(folder, header)
    _report_duplicates(header["data"]["sources"])
    entries = _write_slices(folder, taken)
    files = _copy_shared_files(folder, sources, parts)
    content = {"header": header, "source_headers": parts, "files": files, "shards": entries}
    return cache_figures(write_cache_manifest(folder, content, exclusive=True))


def _plan_slices(
    sources: Sequence[TeacherCache], start: int, stop: int
) -> tuple[list[dict[str, Any]], list[ShardSlice]]:
    """Return the distinct source headers of the output, and the slice that each output shard is made of."""
    parts: list[dict[str, Any]] = []
    known: dict[str, int] = {}
    taken = []
    at = 0
    for source in sources:
        theirs = source_headers(source.manifest)
        keys = [canonical_json(header_identity(part)) for part in theirs]
        for entry in source.manifest["shards"]:
            size = int(entry["documents"])
            first, last = max(start, at), min(stop, at + size)
            if first < last:
                number = int(entry.get("source_header", 0))
                if keys[number] not in known:
                    known[keys[number]] = len(parts)
                    parts.append(theirs[number])
                taken.append(ShardSlice(source, entry, first - at, last - at, known[keys[number]]))
            at += size
    return parts, taken


def _write_slices(folder: StorageFolder, taken: Sequence[ShardSlice]) -> list[dict[str, Any]]:
    """Link, copy or slice the shards; return their manifest entries."""
    entries: list[dict[str, Any]] = [{}] * len(taken)
    whole: dict[int, dict[str, str]] = {}
    with Progress("cache-teacher", len(taken), "shards") as progress:
        for number, piece in enumerate(taken):
            file = shard_file_name(number)
            if piece.is_full_shard:
                whole.setdefault(id(piece.source), {})[piece.manifest_entry["file"]] = file
                entries[number] = {**piece.manifest_entry, "file": file, "source_header": piece.header_index}
            else:
                entries[number] = {**_write_partial_shard(folder, piece, file), "source_header": piece.header_index}
                progress.advance(1)
        for source in {id(piece.source): piece.source for piece in taken}.values():
            files = whole.get(id(source), {})
            folder.copy_from(source.folder, files)
            progress.advance(len(files))
    return entries


def _write_partial_shard(folder: StorageFolder, piece: ShardSlice, file: str) -> dict[str, Any]:
    shard = piece.source.open_shard(piece.manifest_entry)
    with folder.write(file) as temporary:
        shard.write_slice(temporary, piece.start, piece.stop)
        return CacheShard(temporary).manifest_entry(file)


def _copy_shared_files(
    folder: StorageFolder, sources: Sequence[TeacherCache], parts: Sequence[dict[str, Any]]
) -> dict[str, str]:
    """Copy the tokenizer and the codec files of the headers; return the checksum of each file."""
    checksums = {
        file: sources[0].manifest["files"][file] for file in TOKENIZER_FILES if file in sources[0].manifest["files"]
    }
    for file in checksums:
        write_file(folder, file, sources[0].folder.read(file))
    wanted = {file for part in parts for file in codec_files(part)}
    for source in sources:
        here = wanted & {file for part in source_headers(source.manifest) for file in codec_files(part)}
        if here:
            folder.copy_from(source.folder, {file: file for file in sorted(here)})
            checksums |= {file: source.manifest["files"][file] for file in here}
        wanted -= here
    return checksums


def _merged_header(
    sources: Sequence[TeacherCache], parts: Sequence[dict[str, Any]], start: int, stop: int
) -> dict[str, Any]:
    """Return the header of the output: the options that all inputs share, and the list of data ranges."""
    first = parts[0]
    stretches = []
    at = 0
    for source in sources:
        for stretch in _data_ranges(source):
            size = stretch["stop"] - stretch["first"]
            low, high = max(start, at) - at, min(stop, at + size) - at
            if low < high:
                stretches.append({**stretch, "first": stretch["first"] + low, "stop": stretch["first"] + high})
            at += size
    return {
        **first,
        "codec": _common_entries([part["codec"] for part in parts]),
        "options": _common_entries([part["options"] for part in parts]),
        "data": {"documents": stop - start, "sources": stretches},
    }


def _data_ranges(source: TeacherCache) -> list[dict[str, Any]]:
    """Return the data ranges of a cache: one, or one for each merged range."""
    header = source.header
    if "sources" in header["data"]:
        return list(header["data"]["sources"])
    own = {key: value for key, value in header["options"].items() if key in OPTIONS_THAT_MAY_DIFFER}
    return [{**header["data"], "documents": len(source), "first": 0, "stop": len(source), "options": own}]


def _common_entries(sections: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        key: value
        for key, value in sections[0].items()
        if all(section.get(key) == value and key in section for section in sections)
    }


def _refuse_incompatible(sources: Sequence[TeacherCache]) -> None:
    """Refuse caches with different teachers, supports, dtypes or codecs."""
    first = _scoring_options(source_headers(sources[0].manifest)[0])
    for source in sources:
        for part in source_headers(source.manifest):
            other = _scoring_options(part)
            if other != first:
                names = sorted(key for key in {*first, *other} if first.get(key) != other.get(key))
                differences = "; ".join(f"{key}: {first.get(key)} and {other.get(key)}" for key in names[:3])
                raise MismatchError(
                    "these caches cannot be merged: they differ in teacher, support, dtype or codec",
                    where=f"{sources[0].folder.name} and {source.folder.name}: {differences}",
                    hint="merge only caches with the same teacher and the same options of cache-teacher; "
                    "the data may differ",
                )


def _scoring_options(header: dict[str, Any]) -> dict[str, Any]:
    """Return the header fields that determine a document's log-probabilities, flat: `options.top_k` and so on."""
    leave = {"data": None, "teacher": {"name"}, "options": OPTIONS_THAT_MAY_DIFFER, "codec": frozenset(CODEC_FILE_KEYS)}
    flat = {}
    for section, content in header.items():
        without = leave.get(section, set())
        if without is None:
            continue
        if not isinstance(content, dict):
            flat[section] = content
            continue
        flat |= {f"{section}.{key}": value for key, value in content.items() if key not in without}
    return flat


def _parse_row_range(rows: str, total: int) -> tuple[int, int]:
    match = _ROW_RANGE.fullmatch(rows) if rows else None
    if rows and match is None:
        raise XtkError(
            f"--rows is {rows!r}, but must be START:STOP",
            hint="use, for example, --rows 100:200, --rows :200, --rows 100:",
        )
    start = int(match[1] or 0) if match else 0
    stop = int(match[2] or total) if match else total
    if not 0 <= start < stop <= total:
        raise XtkError(
            f"--rows is {rows or ':'}; must select a non-empty range of the {total:,} documents of the input caches",
            hint=f"use --rows START:STOP with 0 <= START < STOP <= {total}",
        )
    return start, stop


def _report_duplicates(stretches: Sequence[dict[str, Any]]) -> None:
    """Print a note for overlapping ranges of the same data: their documents occur twice."""
    by_data: dict[str, list[tuple[int, int, int]]] = {}
    for number, stretch in enumerate(stretches, start=1):
        by_data.setdefault(stretch["fingerprint"], []).append((stretch["first"], stretch["stop"], number))
    for same in by_data.values():
        same.sort()
        for (_, stop, one), (first, _, other) in itertools.pairwise(same):
            if first < stop:
                terminal.note(
                    f"cache-teacher: inputs {min(one, other)} and {max(one, other)} overlap: at least "
                    f"{min(stop, same[-1][1]) - first:,} documents of the same data occur twice"
                )
                break
