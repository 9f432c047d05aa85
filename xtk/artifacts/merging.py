"""Many caches of one teacher as one cache, and stretches of them: manifests are read, shards are linked or copied.

docs/reference/artifacts.md describes what comes out.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xtk import terminal
from xtk.artifacts.cache_manifest import FILES_OF_A_CODEC, SHARD, TOKENIZER, file_of
from xtk.artifacts.files import canonical_json
from xtk.artifacts.folders import Folder, folder_at, is_remote
from xtk.artifacts.outputs import check_folder
from xtk.artifacts.shard import Shard
from xtk.artifacts.teacher_cache import (
    TeacherCache,
    _entry,
    _identity,
    begin_cache,
    finished_cache,
    other_files,
    parts_of,
    refuse_foreign,
    remove_cache,
    totals,
    whole_shard,
    write_file,
    write_manifest,
)
from xtk.errors import Damaged, Mismatch, XtkError

# They choose which text is read, and in which batches and files: a row's signal is the same.
FREE = frozenset({"shard_tokens", "batch_tokens", "long_documents", "max_length"})
MANIFESTS_AT_ONCE = 16
_ROWS = re.compile(r"(\d*):(\d*)")


@dataclass(frozen=True)
class Taken:
    """Rows `[start, stop)` of a shard of an input, which become a shard of the output.

    Attributes:
        source: the input.
        entry: what its manifest tells of the shard.
        start, stop: among the shard's rows.
        part: which of the output's headers is the shard's.
    """

    source: TeacherCache
    entry: dict[str, Any]
    start: int
    stop: int
    part: int

    @property
    def is_whole(self) -> bool:
        """Whether the file can be taken as it is."""
        return self.stop - self.start == int(self.entry["rows"])


def merge_caches(places: Sequence[str], output: str, *, rows: str = "", force: bool = False) -> dict[str, int]:
    """Make one cache of several, in their order, or of a stretch of their rows. No row is packed anew.

    Args:
        places: finished caches.
        output: where the cache goes.
        rows: "START:STOP" of the rows of all of them, one after the other; either may be left out. "": all.
        force: replace whatever cache is there.

    Returns:
        `documents`, `positions`, `tokens`, `bytes`.

    Raises:
        Mismatch: the caches are of different teachers, or hold different signals.
        XtkError: one is unfinished, there are no such rows, or another cache is at the output.
    """
    _refuse_output_among(places, output)
    if not is_remote(output):
        check_folder(Path(output), "a cache", [place for place in places if not is_remote(place)])
    sources = _open(places)
    _refuse_unlike(sources)
    start, stop = _range_of(rows, sum(map(len, sources)))
    parts, taken = _plan(sources, start, stop)
    header = _header(sources, parts, start, stop)
    folder = folder_at(output)
    if force:
        remove_cache(folder)
    if finished := finished_cache(folder, header):
        return totals(finished)
    _refuse_others(folder, taken, parts)
    begin_cache(folder, header)
    _tell_twice(header["data"]["sources"])
    entries = _fill(folder, taken)
    files = _take_other_files(folder, sources, parts)
    return totals(
        write_manifest(folder, {"header": header, "source_headers": parts, "files": files, "shards": entries})
    )


def _open(places: Sequence[str]) -> list[TeacherCache]:
    if not any(map(is_remote, places)):
        return [TeacherCache(place) for place in places]
    with ThreadPoolExecutor(MANIFESTS_AT_ONCE) as threads:
        return list(threads.map(TeacherCache, places))


def _plan(sources: Sequence[TeacherCache], start: int, stop: int) -> tuple[list[dict[str, Any]], list[Taken]]:
    """Return the headers that shards of the output have, and where each shard is from."""
    parts: list[dict[str, Any]] = []
    known: dict[str, int] = {}
    taken = []
    at = 0
    for source in sources:
        theirs = parts_of(source.manifest)
        keys = [canonical_json(_identity(part)) for part in theirs]
        for entry in source.manifest["shards"]:
            size = int(entry["rows"])
            first, last = max(start, at), min(stop, at + size)
            if first < last:
                number = int(entry.get("source_header", 0))
                if keys[number] not in known:
                    known[keys[number]] = len(parts)
                    parts.append(theirs[number])
                taken.append(Taken(source, entry, first - at, last - at, known[keys[number]]))
            at += size
    return parts, taken


def _fill(folder: Folder, taken: Sequence[Taken]) -> list[dict[str, Any]]:
    """Link, copy or cut the shards; return what the manifest tells of them."""
    entries: list[dict[str, Any]] = [{}] * len(taken)
    whole: dict[int, dict[str, str]] = {}
    with terminal.Progress("cache-teacher", len(taken), "shards") as progress:
        for number, piece in enumerate(taken):
            file = file_of(number)
            if piece.is_whole:
                whole.setdefault(id(piece.source), {})[piece.entry["file"]] = file
                entries[number] = {**piece.entry, "file": file, "source_header": piece.part}
            else:
                entries[number] = {**_cut(folder, piece, file), "source_header": piece.part}
                progress.advance(1)
        for source in {id(piece.source): piece.source for piece in taken}.values():
            files = whole.get(id(source), {})
            folder.take(source.folder, files)
            progress.advance(len(files))
    return entries


def _cut(folder: Folder, piece: Taken, file: str) -> dict[str, Any]:
    shard = piece.source.open_shard(piece.entry)
    with folder.write(file) as temporary:
        shard.write_rows(temporary, piece.start, piece.stop)
        return _entry(file, Shard(temporary))


def _take_other_files(
    folder: Folder, sources: Sequence[TeacherCache], parts: Sequence[dict[str, Any]]
) -> dict[str, str]:
    """Bring the tokenizer, and what the headers name; return the checksum of each file."""
    checksums = {file: sources[0].manifest["files"][file] for file in TOKENIZER if file in sources[0].manifest["files"]}
    for file in checksums:
        write_file(folder, file, sources[0].folder.read(file))
    wanted = {file for part in parts for file in other_files(part)}
    for source in sources:
        here = wanted & {file for part in parts_of(source.manifest) for file in other_files(part)}
        if here:
            folder.take(source.folder, {file: file for file in sorted(here)})
            checksums |= {file: source.manifest["files"][file] for file in here}
        wanted -= here
    return checksums


def _header(sources: Sequence[TeacherCache], parts: Sequence[dict[str, Any]], start: int, stop: int) -> dict[str, Any]:
    """Return the header of the output: what all parts say alike, and the stretches of data, one after the other."""
    first = parts[0]
    stretches = []
    at = 0
    for source in sources:
        for stretch in _stretches(source):
            size = stretch["stop"] - stretch["first"]
            low, high = max(start, at) - at, min(stop, at + size) - at
            if low < high:
                stretches.append({**stretch, "first": stretch["first"] + low, "stop": stretch["first"] + high})
            at += size
    return {
        **first,
        "codec": _shared([part["codec"] for part in parts]),
        "options": _shared([part["options"] for part in parts]),
        "data": {"rows": stop - start, "sources": stretches},
    }


def _stretches(source: TeacherCache) -> list[dict[str, Any]]:
    """Return the data of a cache: one stretch, or those that it was merged of."""
    header = source.header
    if "sources" in header["data"]:
        return list(header["data"]["sources"])
    own = {key: value for key, value in header["options"].items() if key in FREE}
    return [{**header["data"], "rows": len(source), "first": 0, "stop": len(source), "options": own}]


def _shared(sections: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        key: value
        for key, value in sections[0].items()
        if all(section.get(key) == value and key in section for section in sections)
    }


def _refuse_unlike(sources: Sequence[TeacherCache]) -> None:
    """Refuse caches that cannot be one: of other teachers, other supports, other codecs."""
    first = _signal_of(parts_of(sources[0].manifest)[0])
    for source in sources:
        for part in parts_of(source.manifest):
            other = _signal_of(part)
            if other != first:
                names = sorted(key for key in {*first, *other} if first.get(key) != other.get(key))
                differences = "; ".join(f"{key} is {first.get(key)} and {other.get(key)}" for key in names[:3])
                raise Mismatch(
                    "these caches cannot be one: they do not hold the same teacher's word in the same form",
                    where=f"{sources[0].folder.name} and {source.folder.name}: {differences}",
                    hint="caches of one teacher, support, dtype and codec; the data may differ",
                )


def _signal_of(header: dict[str, Any]) -> dict[str, Any]:
    """Return all of a header on which the signal of a row depends, flat: `options.top_k` and so on."""
    leave = {"data": None, "teacher": {"name"}, "options": FREE, "codec": frozenset(FILES_OF_A_CODEC)}
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


def _range_of(rows: str, total: int) -> tuple[int, int]:
    match = _ROWS.fullmatch(rows) if rows else None
    if rows and match is None:
        raise XtkError(f"--rows is {rows!r}; it is START:STOP", hint="--rows 100:200, --rows :200, --rows 100:")
    start = int(match[1] or 0) if match else 0
    stop = int(match[2] or total) if match else total
    if not 0 <= start < stop <= total:
        raise XtkError(f"--rows is {rows or ':'}; there are {total:,} rows, and at least one is to be taken")
    return start, stop


def _refuse_output_among(places: Sequence[str], output: str) -> None:
    def key(place: str) -> str:
        return place.rstrip("/") if is_remote(place) else str(Path(place).resolve())

    if key(output) in map(key, places):
        raise XtkError("the output is one of the inputs", where=output, hint="another -o")


def _refuse_others(folder: Folder, taken: Sequence[Taken], parts: Sequence[dict[str, Any]]) -> None:
    """Refuse a folder with the unfinished cache of another request; what an earlier run brought is brought again."""
    refuse_foreign(folder)
    folder.remove_leftovers()
    held = {file: size for file, size in folder.sizes().items() if SHARD.fullmatch(file)}
    wanted = {
        file_of(number): int(piece.entry["bytes"]) if piece.is_whole else None for number, piece in enumerate(taken)
    }
    strange = [file for file, size in held.items() if file not in wanted or wanted[file] not in (None, size)]
    if not strange and held:
        first = min(held)
        number = list(wanted).index(first)
        with contextlib.suppress(Damaged):  # it is brought again, whatever it is
            found = whole_shard(folder.local(first), folder.path_of(first)).header
            if _identity(found) != _identity(parts[taken[number].part]):
                strange = [first]
    if strange:
        raise XtkError(
            "there is an unfinished cache of another request",
            where=folder.path_of(min(strange)),
            hint="another -o, or --force to replace it",
        )


def _tell_twice(stretches: Sequence[dict[str, Any]]) -> None:
    """Tell which documents come twice: stretches of the same data that overlap."""
    by_data: dict[str, list[tuple[int, int, int]]] = {}
    for number, stretch in enumerate(stretches, start=1):
        by_data.setdefault(stretch["fingerprint"], []).append((stretch["first"], stretch["stop"], number))
    for same in by_data.values():
        same.sort()
        for (_, stop, one), (first, _, other) in itertools.pairwise(same):
            if first < stop:
                terminal.note(
                    f"cache-teacher: part {max(one, other)} and part {min(one, other)} of what is merged are of the "
                    f"same data: {min(stop, same[-1][1]) - first:,} or more of its documents come twice"
                )
                break
