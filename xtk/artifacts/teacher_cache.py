"""The teacher cache: a folder of Arrow shards and a manifest, from which any student trains.

Nothing in it depends on a student. docs/reference/artifacts.md describes it.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from xtk import terminal
from xtk.artifacts.cache_manifest import (
    FILES_OF_A_CODEC,
    MANIFEST,
    MANIFEST_BYTES,
    SHARD,
    TOKENIZER,
    VOCABULARY_ORDER,
    check_manifest,
    file_of,
)
from xtk.artifacts.files import TEMPORARY, canonical_json, parse_object, sha256
from xtk.artifacts.folders import Folder, LocalFolder, folder_at
from xtk.artifacts.locks import LOCK
from xtk.artifacts.outputs import foreign_error
from xtk.artifacts.ranks import Ranks
from xtk.artifacts.shard import Place, Row, Shard, StoredRow, check_whole, frame_checksum, write_shard
from xtk.errors import Damaged, XtkError

if TYPE_CHECKING:
    from xtk.tokens.tokenizer import Tokenizer

FORMAT, VERSION = "xtk-teacher-cache", 5
# Written first and removed last: a folder with it is an unfinished cache of xtk's, also one without a shard.
UNFINISHED = ".xtk-unfinished"
OPEN_SHARDS = 1024  # of 0.4 MB each, where they are packed
FETCHED = 64  # shards at once, of those that are read one after the other
_OF_TOKENIZERS = re.compile(r".*\.(json|jinja|model|tiktoken)")  # names that a tokenizer may be read from
_OF_OLDER_VERSIONS = re.compile(r"ranks-[0-9a-f]+\.arrow")  # --force removes them
_LEFTOVER = re.compile(re.escape(TEMPORARY) + ".*" + SHARD.pattern)


class CacheWriter:
    """Writes a cache shard by shard; what is finished stays finished.

    Until the manifest is there, nothing but a shard itself says what is in it. So every shard that is found is read
    whole and compared with its checksum, with the request and with its place: those of `own` here, the others by
    `finish`. A damaged or misplaced one is removed, with a note, and counts as missing.

    Args:
        folder: where the cache is to be.
        header: identity of teacher, data and options; every shard carries it.
        rows: of each shard, how many rows it will have.
        own: the shards that this run writes if they are missing; None: all.

    Raises:
        XtkError: the folder holds something else, or a cache of another request or version.
    """

    def __init__(
        self, folder: Folder, header: dict[str, Any], rows: Sequence[int], own: Sequence[int] | None = None
    ) -> None:
        self.folder, self.header, self.shards = folder, header, len(rows)
        self._rows, self._firsts = rows, [0, *itertools.accumulate(rows)]
        self._identity = _identity(header)
        begin_cache(folder, header)
        self._there = set(folder.sizes())
        self._entries: dict[int, dict[str, Any]] = {}
        self._files: dict[str, bytes] = {}
        found = [number for number in (range(self.shards) if own is None else own) if file_of(number) in self._there]
        for number, wrong in self._check(found):
            terminal.note(f"cache-teacher: {wrong.where}: {wrong.what}; the shard is written again")
            self.folder.remove(file_of(number))
            self._there.remove(file_of(number))

    def missing(self) -> list[int]:
        """Return the shards that are still to be written."""
        return [
            number
            for number in range(self.shards)
            if file_of(number) not in self._there and number not in self._entries
        ]

    def look_again(self) -> list[int]:
        """Return the shards that are still to be written, now that others may have written some."""
        self._there = set(self.folder.sizes())
        return self.missing()

    def place(self, number: int) -> Place:
        """Return the place of a shard."""
        return Place(number, self._firsts[number], self._rows[number])

    def write(self, number: int, rows: Sequence[Row]) -> None:
        """Write one shard, whole.

        Args:
            number: which one.
            rows: its documents.
        """
        self.accept(number, put_shard(self.folder, self.header, self.place(number), rows))

    def accept(self, number: int, entry: dict[str, Any]) -> None:
        """Take over what `put_shard` returned for a shard that a process of this run has written.

        What this run wrote is not read again.
        """
        self._entries[number] = entry

    def write_files(self, files: Mapping[str, bytes]) -> None:
        """Write the tokenizer and the vocabulary order, whatever is there, so that the cache is all a student needs."""
        for name, content in files.items():
            write_file(self.folder, name, content)
            self._files[name] = content

    def finish(self) -> dict[str, Any]:
        """Write the manifest, last; return it.

        Raises:
            Damaged: a shard that another machine wrote is damaged.
        """
        others = [number for number in range(self.shards) if number not in self._entries]
        for _, wrong in self._check(others):
            raise Damaged(
                wrong.what,
                where=wrong.where,
                hint="run the same xtk cache-teacher command again on the machine that wrote it; it writes it again",
            )
        for name, content in self._files.items():
            if self.folder.read(name) != content:
                terminal.note(f"cache-teacher: {self.folder.path_of(name)} was changed; it is written again")
                write_file(self.folder, name, content)
        files = {name: sha256(content) for name, content in self._files.items()}
        entries = [self._entries[number] for number in range(self.shards)]
        return write_manifest(self.folder, {"header": self.header, "files": files, "shards": entries})

    def _check(self, numbers: Sequence[int]) -> Iterator[tuple[int, Damaged]]:
        """Read shards whole; keep what the manifest states of those that are good, yield the others.

        Raises:
            XtkError: one is of another request, or of an older version.
        """
        if not numbers:
            return
        with terminal.Progress("cache-teacher: checking", len(numbers), "shards") as progress:
            for at, number in enumerate(numbers):
                if at % FETCHED == 0:
                    self.folder.fetch([file_of(other) for other in numbers[at : at + FETCHED]])
                try:
                    self._entries[number] = self._checked(number)
                except Damaged as wrong:
                    yield number, wrong
                progress.advance(1)

    def _checked(self, number: int) -> dict[str, Any]:
        file = file_of(number)
        shard = whole_shard(self.folder.local(file), self.folder.path_of(file))
        if _identity(shard.header) != self._identity:
            raise _other_request(self.folder, file, shard.header, self.header)
        if shard.place != self.place(number) or len(shard) != shard.place.rows:
            raise Damaged(
                f"this file has the rows {shard.place.first_row:,} to {shard.place.first_row + len(shard):,} of shard "
                f"{shard.place.shard}, and its place is that of the rows {self._firsts[number]:,} to "
                f"{self._firsts[number + 1]:,} of shard {number}",
                where=self.folder.path_of(file),
            )
        return _entry(file, shard)


def whole_shard(path: Path, name: str) -> Shard:
    """Open a shard that no manifest describes: every byte is compared with its checksum before anything is parsed.

    Raises:
        Damaged: it does not match, or is not a shard.
        XtkError: it is of an older version.
    """
    check_whole(path, name)
    return Shard(path, name)


def check_unfinished(folder: Folder) -> None:
    """Read the shards of an unfinished cache whole; do nothing for a finished one.

    Raises:
        Damaged: names the first shard that does not match its checksum, or is not in its place.
        XtkError: one is of an older version.
    """
    held = folder.sizes()
    if MANIFEST in held:
        return
    again = "run the same xtk cache-teacher command again; it writes this shard again"
    for file in sorted(filter(SHARD.fullmatch, held)):
        where = folder.path_of(file)
        try:
            shard = whole_shard(folder.local(file), where)
        except Damaged as wrong:
            raise Damaged(wrong.what, where=where, hint=again) from None
        if file_of(shard.place.shard) != file:
            raise Damaged(f"this file has the rows of shard {shard.place.shard}", where=where, hint=again)


def put_shard(
    folder: Folder, header: dict[str, Any], place: Place, rows: Sequence[Row], ranks: Ranks | None = None
) -> dict[str, Any]:
    """Write one shard into the folder of a cache, whole.

    Args:
        folder: of the cache.
        header: that of the cache.
        place: which shard it is.
        rows: its documents.
        ranks: of the cache, for codecs that need them.

    Returns:
        What the manifest tells of it.
    """
    with folder.write(file_of(place.shard), new=True) as temporary:
        write_shard(temporary, header, place, rows, ranks)
        return _entry(file_of(place.shard), Shard(temporary))


def write_file(folder: Folder, name: str, content: bytes) -> None:
    """Write a small file, whole."""
    with folder.write(name) as temporary:
        temporary.write_bytes(content)


def write_manifest(folder: Folder, content: dict[str, Any]) -> dict[str, Any]:
    """Write the manifest of a cache: with it, the cache is finished.

    Args:
        folder: of the cache.
        content: "header", "shards", and "files": the sha256 of each file beside the shards.

    Returns:
        The manifest, with format, version and checksum.
    """
    manifest = {"format": FORMAT, "version": VERSION, **content}
    manifest["checksum"] = _checksum(manifest)
    # Written last, on purpose: a folder without a manifest is unfinished.
    write_file(folder, MANIFEST, _rendered(manifest))
    tidy_cache(folder)
    return manifest


def tidy_cache(folder: Folder) -> None:
    """Remove what writers leave in the folder of a finished cache: of this run, of other machines, of killed ones."""
    with contextlib.suppress(OSError):  # of a cache that may only be read
        # Of writers on other machines too: their shards are all there.
        folder.remove(*(file for file in folder.sizes() if file == UNFINISHED or _LEFTOVER.fullmatch(file)))
        folder.remove_stale_locks()


def begin_cache(folder: Folder, header: dict[str, Any]) -> None:
    """Make a folder one of an unfinished cache, or go on with one; nothing else is touched.

    Raises:
        XtkError: it holds other things, or the unfinished cache of another request.
    """
    refuse_foreign(folder)
    folder.remove_leftovers()
    held = folder.sizes()
    if UNFINISHED in held:
        found = parse_object(folder.read(UNFINISHED, MANIFEST_BYTES), folder.path_of(UNFINISHED)).get("header")
        if isinstance(found, dict) and _identity(found) != _identity(header):
            raise _other_request(folder, UNFINISHED, found, header)
    elif MANIFEST not in held:
        write_file(folder, UNFINISHED, _unfinished(header))


def _unfinished(header: dict[str, Any]) -> bytes:
    return canonical_json({"format": FORMAT, "header": header}).encode() + b"\n"


def _rendered(manifest: dict[str, Any]) -> bytes:
    """Return the bytes of a manifest, a shard a line."""
    shards = ",\n".join(canonical_json(shard) for shard in manifest["shards"])
    rest = canonical_json({key: value for key, value in manifest.items() if key != "shards"})
    return f'{rest[:-1]},"shards":[\n{shards}\n]}}\n'.encode()


def _entry(file: str, shard: Shard) -> dict[str, Any]:
    """Return what the manifest tells of a shard."""
    return {
        "file": file,
        **shard.figures(),
        **shard.information(),
        "bytes": shard.size,
        "payload": [list(stretch) for stretch in shard.payload()],
        "checksum": shard.frame_checksum(),
    }


def finished_cache(folder: Folder, header: dict[str, Any]) -> dict[str, Any] | None:
    """Return the manifest if the folder holds the finished cache of this very request; None if it is unfinished.

    Raises:
        XtkError: it holds the finished cache of another request.
    """
    held = folder.sizes()
    if MANIFEST not in held:
        refuse_foreign(folder)
        return None
    manifest = read_manifest(folder)
    if _identity(manifest["header"]) != _identity(header):
        raise _other_request(folder, MANIFEST, manifest["header"], header)
    whole = all(held.get(shard["file"]) == shard["bytes"] for shard in manifest["shards"])
    if not whole or not held.keys() >= manifest.get("files", {}).keys():
        return None
    tidy_cache(folder)
    terminal.note(
        "cache-teacher: this cache is finished; the sizes of its files were compared, checksums were not read "
        "(xtk inspect --verify)"
    )
    return manifest


def reopen_cache(folder: Folder) -> None:
    """Make a cache that lost some of its files unfinished, so that they are made again."""
    held = folder.sizes()
    if MANIFEST not in held:
        return
    manifest = read_manifest(folder)
    write_file(folder, UNFINISHED, _unfinished(manifest["header"]))
    for shard in manifest["shards"]:
        if held.get(shard["file"], shard["bytes"]) != shard["bytes"]:
            folder.remove(shard["file"])
    folder.remove(MANIFEST)


def remove_cache(folder: Folder) -> None:
    """Remove a cache, finished or not, for `--force`; the manifest goes first.

    Raises:
        XtkError: the folder holds other things too.
    """
    refuse_foreign(folder)
    folder.remove(MANIFEST)
    held = [file for file in folder.sizes() if not file.startswith(LOCK)]  # its holder removes it
    shards = [file for file in held if SHARD.fullmatch(file)]
    # Killed here, a later run knows by what is removed last that the rest is xtk's.
    folder.remove(*({*held} - {*shards, UNFINISHED}))
    folder.remove(*shards)
    folder.remove(UNFINISHED)


def is_cache(place: str | Path) -> bool:
    """Say whether a teacher cache, finished or not, lies in a folder."""
    try:
        held = folder_at(place).sizes()
    except XtkError:  # a file
        return False
    return MANIFEST in held or any(SHARD.fullmatch(file) for file in held)


def read_manifest(folder: Folder) -> dict[str, Any]:
    """Read and check the manifest of a cache.

    Raises:
        XtkError: there is no cache, an unfinished one, or one of another version.
    """
    where = folder.path_of(MANIFEST)
    try:
        content = folder.read(MANIFEST, MANIFEST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        if any(SHARD.fullmatch(file) for file in folder.sizes()):
            raise XtkError(
                "this teacher cache is unfinished",
                where=folder.name,
                hint="run the same xtk cache-teacher command again; it goes on",
            ) from None
        raise XtkError(
            "there is no teacher cache", where=folder.name, hint="xtk cache-teacher TEACHER DATA -o FOLDER"
        ) from None
    again = f"remove {where} and run the same xtk cache-teacher command again; finished parts are kept"
    manifest = parse_object(content, where, again)
    if manifest.get("format") != FORMAT or not {"shards", "header", "version"} <= manifest.keys():
        raise Damaged("this is no manifest of a teacher cache", where=where, hint=again)
    if manifest["version"] != VERSION:
        raise XtkError(
            f"this teacher cache has version {str(manifest['version'])[:20]}, and this xtk reads version {VERSION}",
            where=where,
            hint="make it again: xtk cache-teacher TEACHER DATA -o FOLDER --force",
        )
    # Byte by byte: JSON says the same in more than one way.
    try:
        whole = manifest.get("checksum") == _checksum(manifest) and _rendered(manifest) == content
    except (ValueError, TypeError, RecursionError):  # half of a character pair; shards that are no list
        whole = False
    if not whole:
        raise Damaged("the manifest of this cache does not match its checksum", where=where, hint=again)
    return check_manifest(manifest, where, again)


def totals(manifest: dict[str, Any]) -> dict[str, int]:
    """Return documents, positions, tokens and bytes of a cache."""
    names = {"documents": "rows", "positions": "positions", "tokens": "tokens", "bytes": "bytes"}
    return {total: sum(int(shard[name]) for shard in manifest["shards"]) for total, name in names.items()}


class TeacherCache:
    """A finished cache, read by row, memory-mapped.

    What lies around the rows of a shard is verified when it is first opened, a row when it is read; sizes of all
    shards when the cache is opened.

    Args:
        place: what `xtk cache-teacher` wrote: a folder, or a remote one.

    Raises:
        XtkError: no finished cache is there, or a shard is missing or cut short.
    """

    def __init__(self, place: str | Path) -> None:
        self._place = place
        self.folder = folder_at(place)
        self.manifest = read_manifest(self.folder)
        self.header: dict[str, Any] = self.manifest["header"]
        held = self.folder.sizes()
        for shard in self.manifest["shards"]:
            file = shard["file"]
            if file not in held:
                raise self._damaged("a shard of this cache is missing", file)
            if held[file] != shard["bytes"]:
                raise self._damaged(
                    f"a shard of this cache has {held[file]} bytes; {shard['bytes']} were written", file
                )
        self._first_rows: list[int] = [0, *itertools.accumulate(shard["rows"] for shard in self.manifest["shards"])]
        self._find_ranks = cache(self._ranks_of)
        self._open = lru_cache(maxsize=OPEN_SHARDS)(self._open_shard)
        self._verified: set[int] = set()

    def __reduce__(self) -> tuple[type[TeacherCache], tuple[str | Path]]:
        """Travel to another process as a place, and be opened there."""
        return TeacherCache, (self._place,)

    def __len__(self) -> int:
        return self._first_rows[-1]

    def __iter__(self) -> Iterator[StoredRow]:
        return (self.row(number) for number in range(len(self)))

    def row(self, number: int, draw: int | None = 0) -> StoredRow:
        """Read one document.

        Args:
            number: which one.
            draw: which set of draws its signal holds, of as many as there are; it counts round. None: what is
                exact alone, with the mass of all else in the tail.

        Raises:
            Damaged: it was altered.
        """
        if not 0 <= number < len(self):
            raise IndexError(number)
        shard = bisect_right(self._first_rows, number) - 1
        at = number - self._first_rows[shard]
        opened = self._open(shard)
        try:
            return opened.row(at, draw)
        except Damaged as wrong:
            raise Damaged(wrong.what, where=wrong.where, hint=_repair(self.folder, self._file(shard))) from None

    @property
    def teacher(self) -> Tokenizer:
        """The teacher's tokenizer.

        Raises:
            Damaged: it is missing, or not the one that the cache was made with.
        """
        from xtk.tokens.tokenizer import Tokenizer

        identity = self.header["teacher"]
        self._verify_files(there_only=True)
        held = self.folder.sizes()
        if isinstance(self.folder, LocalFolder):
            for file in held:  # what else the folder holds is not in the manifest, and no link there is followed
                if _OF_TOKENIZERS.fullmatch(file):
                    self.folder.local(file)
        places = {self.folder.local(file).parent for file in TOKENIZER if file in held}
        try:
            place = places.pop() if places else Path(self.folder.name)
            tokenizer = Tokenizer(place, name=str(identity["name"]), width=int(identity["width"]))
        except Damaged:
            raise
        except XtkError as wrong:
            raise Damaged(
                f"the teacher's tokenizer is not in its cache: {wrong.what}",
                where=self.folder.name,
                hint="copy it there from the teacher, or name a projection: --projection",
            ) from None
        found = (tokenizer.fingerprint, tokenizer.template_fingerprint)
        if found != (identity["tokenizer"], identity["template"]):
            raise Damaged("the tokenizer in this cache is not the one it was made with", where=self.folder.name)
        return tokenizer

    def text_bytes(self) -> NDArray[np.int64]:
        """Return int64 [documents], how many bytes each text has; opens every shard."""
        return np.concatenate([shard.text_bytes() for shard in self.shards()])

    def conversations(self) -> NDArray[np.bool_]:
        """Return bool [documents], which of them are conversations."""
        return np.concatenate([shard.conversations() for shard in self.shards()])

    def weights(self) -> NDArray[np.float64]:
        """Return float64 [documents], how much each counts."""
        return np.concatenate([shard.weights() for shard in self.shards()])

    def routes(self) -> list[str]:
        """Return [documents], the name of the teacher that each names; "" of those that name none."""
        return [route for shard in self.shards() for route in shard.routes()]

    def fingerprints(self) -> NDArray[np.uint64]:
        """Return uint64 [documents], hashes of what students read: equal for equal documents, whatever the teacher."""
        return np.concatenate([shard.fingerprints() for shard in self.shards()])

    def shards(self) -> Iterator[Shard]:
        """Yield all shards, opened."""
        files = [str(entry["file"]) for entry in self.manifest["shards"]]
        for number in range(len(files)):
            if number % FETCHED == 0:
                self.folder.fetch(files[number : number + FETCHED])
            yield self._open(number)

    def verify(self) -> None:
        """Read every file and compare all of it with its checksums.

        Raises:
            Damaged: names the first file, and the row of a shard, that was altered.
        """
        self._verify_files(there_only=False)
        files = [str(entry["file"]) for entry in self.manifest["shards"]]
        for number in range(len(files)):
            if number % FETCHED == 0:
                self.folder.fetch(files[number : number + FETCHED])
            self._verified.discard(number)
            shard = self._open_shard(number)
            for row in shard.damaged_rows():
                wrong = _corrupt_row(shard, row)
                raise Damaged(wrong.what, where=wrong.where, hint=_repair(self.folder, self._file(number)))
            entry = self.manifest["shards"][number]
            found = {**shard.figures(), **shard.information()}
            if any(entry[name] != value for name, value in found.items()):
                raise self._damaged("this shard does not match the manifest", entry["file"])

    def _verify_files(self, *, there_only: bool) -> None:
        """Compare the files beside the shards with the manifest.

        Raises:
            Damaged: names the one that was altered, or is missing and not `there_only`.
        """
        for file, checksum in self.manifest.get("files", {}).items():
            try:
                content = self.folder.read(file)
            except FileNotFoundError:
                if there_only:
                    continue
                raise self._damaged("a file of this cache is missing", file) from None
            if sha256(content) != checksum:
                raise self._damaged("a file of this cache is not the one it was made with", file)

    def _ranks_of(self, file: str) -> Ranks:
        where = self.folder.path_of(file)
        try:
            return Ranks.read(file, self.folder.read(file), where)
        except FileNotFoundError:
            raise Damaged(
                "the vocabulary order file of this cache is missing", where=where, hint="copy the whole cache"
            ) from None

    def _file(self, number: int) -> str:
        return str(self.manifest["shards"][number]["file"])

    def open_shard(self, entry: dict[str, Any]) -> Shard:
        """Open a shard of the manifest, once all that lies around its rows is seen to be what was written.

        Raises:
            Damaged: it was altered.
        """
        return self._open(self._numbers[entry["file"]])

    def _open_shard(self, number: int) -> Shard:
        entry = self.manifest["shards"][number]
        path = self.folder.local(entry["file"])
        if number not in self._verified and _frame_of_file(path, entry["payload"]) != entry["checksum"]:
            raise self._damaged("this shard does not match its checksum in the manifest", entry["file"])
        shard = Shard(path, self.folder.path_of(entry["file"]), self._find_ranks)
        if number not in self._verified and _identity(shard.header) != self._identity_of(entry):
            raise self._damaged("a shard is from another cache", entry["file"])
        if number not in self._verified:
            for name, count in shard.figures().items():
                if entry[name] != count:
                    what = f"the manifest states {entry[name]:,} {name} of a shard that has {count:,}"
                    raise self._damaged(what, entry["file"])
        self._verified.add(number)
        return shard

    def _identity_of(self, entry: dict[str, Any]) -> dict[str, Any]:
        return _identity(self._parts[int(entry.get("source_header", 0))])

    @cached_property
    def _parts(self) -> list[dict[str, Any]]:
        return parts_of(self.manifest)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {entry["file"]: number for number, entry in enumerate(self.manifest["shards"])}

    def _damaged(self, what: str, file: str) -> Damaged:
        return Damaged(what, where=self.folder.path_of(file), hint=_repair(self.folder, file))


def _frame_of_file(path: Path, payload: Sequence[tuple[int, int]]) -> str:
    """Return the checksum of a shard's frame before anything of it is believed."""
    import mmap

    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return frame_checksum(content, [(start, stop) for start, stop in payload])


def shard_figures(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the header of a shard, and its rows, positions and tokens.

    Raises:
        Damaged: it does not match its checksum, or is not a shard of a cache.
        XtkError: it is of an older version.
    """
    shard = whole_shard(path, str(path))
    return shard.header, {**shard.figures(), "bytes": shard.size}


def _corrupt_row(shard: Shard, row: int) -> Damaged:
    return Damaged("a row of this cache does not match its checksum", where=f"{shard.name}, row {row}")


def _checksum(manifest: dict[str, Any]) -> str:
    return sha256(canonical_json({key: value for key, value in manifest.items() if key != "checksum"}))


def parts_of(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the headers that the shards of a cache have: its own, or those of the caches that were merged."""
    return list(manifest.get("source_headers") or [manifest["header"]])


def other_files(header: dict[str, Any]) -> list[str]:
    """Return the files that the shards of a header need beside them."""
    return [str(header["codec"][key]) for key in FILES_OF_A_CODEC if header["codec"].get(key)]


def _belongs(name: str) -> bool:
    return (
        name in (MANIFEST, UNFINISHED, *TOKENIZER)
        or name.startswith((TEMPORARY, LOCK))
        or bool(SHARD.fullmatch(name))
        or bool(VOCABULARY_ORDER.fullmatch(name) or _OF_OLDER_VERSIONS.fullmatch(name))
    )


def refuse_foreign(folder: Folder) -> None:
    """Refuse a folder that holds anything but a cache that xtk wrote.

    A tokenizer alone is the user's: files with the names of a cache's are xtk's where a manifest, a shard, or the file
    with which an unfinished cache begins says so.

    Raises:
        XtkError: names what is in it.
    """
    held = folder.sizes()
    foreign = sorted({*(file for file in held if not _belongs(file)), *_unlisted(folder, held)})
    there = sorted(file for file in held if not file.startswith((TEMPORARY, LOCK)))
    if there and not foreign and not _is_of_a_cache(folder, held):
        foreign = there
    if foreign:
        raise foreign_error(foreign, folder.name)


def _unlisted(folder: Folder, held: Mapping[str, int]) -> list[str]:
    """Return files with names of a cache's that its manifest does not list, and that do not begin as xtk's do."""
    if MANIFEST not in held:
        return []
    try:
        content = parse_object(folder.read(MANIFEST, MANIFEST_BYTES), folder.path_of(MANIFEST))
        listed = {*content["files"], *(shard["file"] for shard in content["shards"])}
    except (Damaged, KeyError, TypeError):
        return []
    named = [file for file in held if SHARD.fullmatch(file) or VOCABULARY_ORDER.fullmatch(file)]
    return [file for file in named if file not in listed and not _is_arrow_of_xtk(folder.local(file))]


def _is_of_a_cache(folder: Folder, held: Mapping[str, int]) -> bool:
    """Say whether a folder has what only the writer of a cache leaves, whole or damaged."""
    if MANIFEST in held and f'"format":"{FORMAT}"'.encode() in folder.read(MANIFEST, MANIFEST_BYTES):
        return True
    if UNFINISHED in held:
        with contextlib.suppress(Damaged):
            content = parse_object(folder.read(UNFINISHED, MANIFEST_BYTES), folder.path_of(UNFINISHED))
            if content.get("format") == FORMAT:
                return True
    return any(_is_arrow_of_xtk(folder.local(file)) for file in held if SHARD.fullmatch(file))


def _is_arrow_of_xtk(path: Path) -> bool:
    """Say whether a file begins as a shard of any version, or as a vocabulary order: with xtk's header."""
    with path.open("rb") as stream:
        start = stream.read(1 << 20)
    return start.startswith(b"ARROW1") and (b'"codec":' in start or b"num_bytes" in start)


def _identity(header: dict[str, Any]) -> dict[str, Any]:
    """Return a header without the teacher's name: a folder that was moved is the same teacher."""
    teacher = {key: value for key, value in _section(header, "teacher").items() if key != "name"}
    return {**header, "teacher": teacher}


def _section(header: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a section of a header; of one that is not checked yet, none."""
    found = header.get(name)
    return found if isinstance(found, dict) else {}


def _repair(folder: Folder, file: str) -> str:
    return f"remove {folder.path_of(file)}, and run the same xtk cache-teacher command again; it writes it again"


def _other_request(folder: Folder, file: str, found: dict[str, Any], wanted: dict[str, Any]) -> XtkError:
    differences = [
        f"{section}.{key}: {_short(found, section, key)} there, {_short(wanted, section, key)} asked for"
        for section in ("teacher", "data", "options", "codec")
        for key in sorted({*_section(found, section), *_section(wanted, section)})
        if _section(found, section).get(key) != _section(wanted, section).get(key)
    ]
    return XtkError(
        "there is a cache of another request",
        where=f"{folder.path_of(file)} ({'; '.join(differences[:3])})",
        hint="another -o, or --force to replace it",
    )


def _short(header: dict[str, Any], section: str, key: str) -> str:
    text = str(_section(header, section).get(key))
    return text if len(text) <= 80 else text[:77] + "..."
