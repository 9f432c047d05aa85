"""Reading and writing of teacher caches: folders of Arrow shards with a manifest, see docs/reference/artifacts.md.

A cache does not depend on a student: any student can train from it.
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
from xtk.artifacts.arrow_validation import RESTORE_HINT
from xtk.artifacts.atomic_files import TEMPORARY_PREFIX, canonical_json, parse_json_object, sha256
from xtk.artifacts.cache_manifest import (
    CODEC_FILE_KEYS,
    FORMAT,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    SHARD_NAME,
    TOKENIZER_FILES,
    VERSION,
    VOCABULARY_ORDER_NAME,
    check_cache_manifest,
    shard_file_name,
)
from xtk.artifacts.cache_shard import (
    UNNUMBERED_VERSION,
    CacheShard,
    ScoredDocument,
    ShardPosition,
    StoredDocument,
    check_file_checksum,
    frame_checksum,
    write_shard,
)
from xtk.artifacts.local_and_remote_folders import LocalFolder, StorageFolder, open_folder
from xtk.artifacts.output_path_checks import foreign_files_error
from xtk.artifacts.token_ids_by_frequency import VocabularyOrder
from xtk.artifacts.write_locks import LOCK_PREFIX
from xtk.errors import CorruptError, XtkError

if TYPE_CHECKING:
    from xtk.tokens.tokenizer import Tokenizer

# Written first and removed last: marks a folder as an unfinished cache of xtk, even without shards.
UNFINISHED_MARKER = ".xtk-unfinished"
MAX_OPEN_SHARDS = 1024  # of 0.4 MB each, where they are packed
PREFETCHED_SHARDS = 64  # shards downloaded at once when all are read in order
_TOKENIZER_FILE_NAMES = re.compile(r".*\.(json|jinja|model|tiktoken)")  # names of files that a tokenizer may read
_OLD_VERSION_FILE_NAMES = re.compile(r"ranks-[0-9a-f]+\.arrow")  # --force removes them
_TEMPORARY_SHARD_NAME = re.compile(re.escape(TEMPORARY_PREFIX) + ".*" + SHARD_NAME.pattern)


class CacheWriter:
    """Writes a cache shard by shard; an interrupted run continues with the missing shards.

    Without a manifest, only a shard itself states its content. Every existing shard is therefore read completely and
    compared with its checksum, the request and its position: those in `assigned_shards` here, the others in `finish`.
    A corrupt or misplaced one is removed, with a note, and counts as missing.

    Args:
        folder: of the cache.
        header: identity of teacher, data and options; every shard contains it.
        shard_sizes: number of documents of each shard.
        assigned_shards: shards that this run writes if they are missing; None: all.

    Raises:
        XtkError: the folder contains other files, or a cache of another request or version.
    """

    def __init__(
        self,
        folder: StorageFolder,
        header: dict[str, Any],
        shard_sizes: Sequence[int],
        assigned_shards: Sequence[int] | None = None,
    ) -> None:
        self.folder, self.header, self.num_shards = folder, header, len(shard_sizes)
        self._rows, self._first_rows = shard_sizes, [0, *itertools.accumulate(shard_sizes)]
        self._identity = _header_identity(header)
        start_cache(folder, header)
        self._existing_files = set(folder.file_sizes())
        self._entries: dict[int, dict[str, Any]] = {}
        self._files: dict[str, bytes] = {}
        found = [
            number
            for number in (range(self.num_shards) if assigned_shards is None else assigned_shards)
            if shard_file_name(number) in self._existing_files
        ]
        for number, wrong in self._check(found):
            terminal.note(f"cache-teacher: {wrong.where}: {wrong.what}; writing this shard again")
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

    def write_shard(self, number: int, documents: Sequence[ScoredDocument]) -> None:
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
        """Write the manifest, the last file of a cache, and return it.

        Raises:
            CorruptError: a shard that another machine wrote is corrupt.
        """
        others = [number for number in range(self.num_shards) if number not in self._entries]
        for _, wrong in self._check(others):
            raise CorruptError(
                wrong.what,
                where=wrong.where,
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
        """Read shards completely; keep the manifest entries of valid ones and yield the others.

        Raises:
            XtkError: a shard is from another request, or of an older version.
        """
        if not numbers:
            return
        with terminal.Progress("cache-teacher: checking", len(numbers), "shards") as progress:
            for at, number in enumerate(numbers):
                if at % PREFETCHED_SHARDS == 0:
                    self.folder.prefetch([shard_file_name(other) for other in numbers[at : at + PREFETCHED_SHARDS]])
                try:
                    self._entries[number] = self._checked(number)
                except CorruptError as wrong:
                    yield number, wrong
                progress.advance(1)

    def _checked(self, number: int) -> dict[str, Any]:
        file = shard_file_name(number)
        shard = open_verified_shard(self.folder.local_path(file), self.folder.path_of(file))
        if _header_identity(shard.header) != self._identity:
            raise _other_request_error(self.folder, file, shard.header, self.header)
        if shard.position != self.shard_position(number) or len(shard) != shard.position.documents:
            raise CorruptError(
                f"this file contains documents {shard.position.first_document:,} to "
                f"{shard.position.first_document + len(shard) - 1:,} of shard {shard.position.shard}, not documents "
                f"{self._first_rows[number]:,} to {self._first_rows[number + 1] - 1:,} of shard {number}",
                where=self.folder.path_of(file),
                hint=_repair_hint(self.folder, file),
            )
        return _manifest_entry(file, shard)


def open_verified_shard(path: Path, name: str) -> CacheShard:
    """Open a shard without a manifest, after comparing the whole file with its checksum.

    Raises:
        CorruptError: the checksum does not match, or it is not a shard.
        XtkError: an older version of the format.
    """
    check_file_checksum(path, name)
    return CacheShard(path, name)


def check_unfinished_cache(folder: StorageFolder) -> None:
    """Verify the shards of an unfinished cache completely; do nothing for a finished one.

    Raises:
        CorruptError: names the first shard that does not match its checksum or its file name.
        XtkError: a shard is of an older version.
    """
    held = folder.file_sizes()
    if MANIFEST in held:
        return
    again = "run the same xtk cache-teacher command again to rewrite this shard"
    for file in sorted(filter(SHARD_NAME.fullmatch, held)):
        where = folder.path_of(file)
        try:
            shard = open_verified_shard(folder.local_path(file), where)
        except CorruptError as wrong:
            raise CorruptError(wrong.what, where=where, hint=again) from None
        if shard_file_name(shard.position.shard) != file:
            raise CorruptError(
                f"this file contains shard {shard.position.shard}, not the shard in its name", where=where, hint=again
            )


def store_shard(
    folder: StorageFolder,
    header: dict[str, Any],
    position: ShardPosition,
    documents: Sequence[ScoredDocument],
    vocabulary_order: VocabularyOrder | None = None,
) -> dict[str, Any]:
    """Write one shard into the folder of a cache atomically, and return its manifest entry.

    Args:
        folder: of the cache.
        header: of the cache.
        position: of the shard.
        documents: its documents.
        vocabulary_order: of the cache, if the codec needs it.
    """
    with folder.write(shard_file_name(position.shard), exclusive=True) as temporary:
        write_shard(temporary, header, position, documents, vocabulary_order)
        return _manifest_entry(shard_file_name(position.shard), CacheShard(temporary))


def write_file(folder: StorageFolder, name: str, content: bytes, *, exclusive: bool = False) -> None:
    """Write a small file atomically; with `exclusive`, refuse to replace a file with other content."""
    with folder.write(name, exclusive=exclusive) as temporary:
        temporary.write_bytes(content)


def write_cache_manifest(folder: StorageFolder, content: dict[str, Any], *, exclusive: bool = False) -> dict[str, Any]:
    """Write the manifest of a cache, which marks it as finished.

    Args:
        folder: of the cache.
        content: "header", "shards", and "files": the sha256 of each file that is not a shard.
        exclusive: refuse to replace another file of this name.

    Returns:
        The manifest, with format, version and checksum.
    """
    manifest = {"format": FORMAT, "version": VERSION, **content}
    manifest["checksum"] = _checksum(manifest)
    # Written last, on purpose: a folder without a manifest is unfinished.
    write_file(folder, MANIFEST, _manifest_bytes(manifest), exclusive=exclusive)
    remove_writer_files(folder)
    return manifest


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


def start_cache(folder: StorageFolder, header: dict[str, Any]) -> None:
    """Mark a folder as an unfinished cache, or check that it contains one of this request.

    Raises:
        XtkError: the folder contains other files, or an unfinished cache of another request.
    """
    refuse_foreign_cache_folder(folder)
    folder.remove_stale_temporary_files()
    held = folder.file_sizes()
    if UNFINISHED_MARKER in held:
        where = folder.path_of(UNFINISHED_MARKER)
        marker = parse_json_object(folder.read(UNFINISHED_MARKER, MAX_MANIFEST_BYTES), where)
        if marker.get("version", UNNUMBERED_VERSION) != VERSION:
            raise _version_error(marker.get("version", UNNUMBERED_VERSION), where)
        found = marker.get("header")
        if isinstance(found, dict) and _header_identity(found) != _header_identity(header):
            raise _other_request_error(folder, UNFINISHED_MARKER, found, header)
    elif MANIFEST not in held:
        write_file(folder, UNFINISHED_MARKER, _unfinished_marker_content(header))


def _unfinished_marker_content(header: dict[str, Any]) -> bytes:
    return canonical_json({"format": FORMAT, "version": VERSION, "header": header}).encode() + b"\n"


def _manifest_bytes(manifest: dict[str, Any]) -> bytes:
    """Return the bytes of a manifest, with one line per shard."""
    shards = ",\n".join(canonical_json(shard) for shard in manifest["shards"])
    rest = canonical_json({key: value for key, value in manifest.items() if key != "shards"})
    return f'{rest[:-1]},"shards":[\n{shards}\n]}}\n'.encode()


def _manifest_entry(file: str, shard: CacheShard) -> dict[str, Any]:
    """Return the manifest entry of a shard."""
    return {
        "file": file,
        **shard.counts(),
        **shard.entropy_sums(),
        "bytes": shard.num_bytes,
        "payload_ranges": [list(stretch) for stretch in shard.payload_ranges()],
        "checksum": shard.frame_checksum(),
    }


def read_finished_cache(folder: StorageFolder, header: dict[str, Any]) -> dict[str, Any] | None:
    """Return the manifest if the folder contains the finished cache of this request; None if it is unfinished.

    Raises:
        XtkError: the folder contains the finished cache of another request.
    """
    held = folder.file_sizes()
    if MANIFEST not in held:
        refuse_foreign_cache_folder(folder)
        return None
    manifest = read_cache_manifest(folder)
    if _header_identity(manifest["header"]) != _header_identity(header):
        raise _other_request_error(folder, MANIFEST, manifest["header"], header)
    whole = all(held.get(shard["file"]) == shard["bytes"] for shard in manifest["shards"])
    if not whole or not held.keys() >= manifest.get("files", {}).keys():
        return None
    remove_writer_files(folder)
    terminal.note(
        "cache-teacher: this cache is already finished; checked file sizes, not checksums "
        "(xtk inspect --verify checks them)"
    )
    return manifest


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


def remove_cache(folder: StorageFolder) -> None:
    """Remove a cache, finished or not, for `--force`; the manifest goes first.

    Raises:
        XtkError: the folder contains other files too.
    """
    refuse_foreign_cache_folder(folder)
    folder.remove(MANIFEST)
    held = [file for file in folder.file_sizes() if not file.startswith(LOCK_PREFIX)]  # its holder removes it
    shards = [file for file in held if SHARD_NAME.fullmatch(file)]
    # If killed here, a later run recognizes the rest as xtk's by the files that are removed last.
    folder.remove(*({*held} - {*shards, UNFINISHED_MARKER}))
    folder.remove(*shards)
    folder.remove(UNFINISHED_MARKER)


def is_cache(location: str | Path) -> bool:
    """Return whether a folder contains a teacher cache, finished or not."""
    try:
        held = open_folder(location).file_sizes()
    except XtkError:  # a file
        return False
    return MANIFEST in held or any(SHARD_NAME.fullmatch(file) for file in held)


def read_cache_manifest(folder: StorageFolder) -> dict[str, Any]:
    """Return the manifest of a cache after checking it.

    Raises:
        XtkError: there is no cache, it is unfinished, or it has another version.
    """
    where = folder.path_of(MANIFEST)
    try:
        content = folder.read(MANIFEST, MAX_MANIFEST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        if any(SHARD_NAME.fullmatch(file) for file in folder.file_sizes()):
            raise XtkError(
                "this teacher cache is unfinished",
                where=folder.name,
                hint="run the same xtk cache-teacher command again to continue it",
            ) from None
        raise XtkError(
            "this folder contains no teacher cache",
            where=folder.name,
            hint="check the path, or create one: xtk cache-teacher TEACHER DATA -o FOLDER",
        ) from None
    again = f"remove {where} and run the same xtk cache-teacher command again; finished parts are kept"
    manifest = parse_json_object(content, where, again)
    if manifest.get("format") != FORMAT or not {"shards", "header", "version"} <= manifest.keys():
        raise CorruptError("this file is not the manifest of a teacher cache", where=where, hint=again)
    if manifest["version"] != VERSION:
        raise _version_error(manifest["version"], where)
    # Byte by byte: JSON says the same in more than one way.
    try:
        whole = manifest.get("checksum") == _checksum(manifest) and _manifest_bytes(manifest) == content
    except (ValueError, TypeError, RecursionError):  # lone surrogates; "shards" is not a list
        whole = False
    if not whole:
        raise CorruptError("the manifest of this teacher cache does not match its checksum", where=where, hint=again)
    return check_cache_manifest(manifest, where, again)


def _version_error(version: object, where: str) -> XtkError:
    return XtkError(
        f"this teacher cache has version {str(version)[:20]}; this xtk reads version {VERSION}",
        where=where,
        hint="make it again: xtk cache-teacher TEACHER DATA -o FOLDER --force",
    )


def cache_totals(manifest: dict[str, Any]) -> dict[str, int]:
    """Return documents, positions, tokens and bytes of a cache."""
    names = ("documents", "positions", "tokens", "bytes")
    return {name: sum(int(shard[name]) for shard in manifest["shards"]) for name in names}


class TeacherCache:
    """A finished cache, memory-mapped, with random access to documents.

    Opening a cache checks the sizes of all shards. The first access to a shard verifies everything except the
    documents; each document is verified when it is read.

    Args:
        location: path or URL of the output of `xtk cache-teacher`.

    Raises:
        XtkError: there is no finished cache, or a shard is missing or has a wrong size.
    """

    def __init__(self, location: str | Path) -> None:
        self._location = location
        self.folder = open_folder(location)
        self.manifest = read_cache_manifest(self.folder)
        self.header: dict[str, Any] = self.manifest["header"]
        held = self.folder.file_sizes()
        for shard in self.manifest["shards"]:
            file = shard["file"]
            if file not in held:
                raise self._damaged_error("a shard of this cache is missing", file)
            if held[file] != shard["bytes"]:
                raise self._damaged_error(
                    f"a shard of this cache has {held[file]} bytes, but must have {shard['bytes']}", file
                )
        self._first_rows: list[int] = [
            0,
            *itertools.accumulate(shard["documents"] for shard in self.manifest["shards"]),
        ]
        self._load_vocabulary_order = cache(self._read_vocabulary_order)
        self._open = lru_cache(maxsize=MAX_OPEN_SHARDS)(self._open_shard)
        self._verified: set[int] = set()

    def __reduce__(self) -> tuple[type[TeacherCache], tuple[str | Path]]:
        """Pickle the location only; the other process opens the cache."""
        return TeacherCache, (self._location,)

    def __len__(self) -> int:
        return self._first_rows[-1]

    def __iter__(self) -> Iterator[StoredDocument]:
        return (self.read_document(number) for number in range(len(self)))

    def read_document(self, number: int, sample_set: int | None = 0) -> StoredDocument:
        """Return one document.

        Args:
            number: index of the document.
            sample_set: sample set of its log-probabilities, modulo the number of sets. None: only exact entries, with
                the mass of all other tokens in the remainder.

        Raises:
            CorruptError: the document does not match its checksum.
        """
        if not 0 <= number < len(self):
            raise IndexError(f"document {number} does not exist; the cache has the documents 0 to {len(self) - 1:,}")
        shard = bisect_right(self._first_rows, number) - 1
        at = number - self._first_rows[shard]
        opened = self._open(shard)
        try:
            return opened.read_document(at, sample_set)
        except CorruptError as wrong:
            raise CorruptError(
                wrong.what, where=wrong.where, hint=_repair_hint(self.folder, self._shard_file(shard))
            ) from None

    @property
    def teacher_tokenizer(self) -> Tokenizer:
        """The teacher's tokenizer.

        Raises:
            CorruptError: it is missing, or not the tokenizer that the cache was built with.
        """
        from xtk.tokens.tokenizer import Tokenizer

        identity = self.header["teacher"]
        self.verify_files(there_only=True)
        held = self.folder.file_sizes()
        if isinstance(self.folder, LocalFolder):
            for file in held:  # files that the manifest does not list may be links, which are refused
                if _TOKENIZER_FILE_NAMES.fullmatch(file):
                    self.folder.local_path(file)
        places = {self.folder.local_path(file).parent for file in TOKENIZER_FILES if file in held}
        try:
            place = places.pop() if places else Path(self.folder.name)
            tokenizer = Tokenizer(place, name=str(identity["name"]), embedding_rows=int(identity["embedding_rows"]))
        except CorruptError:
            raise
        except XtkError as wrong:
            raise CorruptError(
                f"the teacher's tokenizer cannot be loaded from the cache: {wrong.what}",
                where=self.folder.name,
                hint="copy the tokenizer files of the teacher into this folder, or use --projection FILE",
            ) from None
        found = (tokenizer.fingerprint, tokenizer.template_fingerprint)
        if found != (identity["tokenizer"], identity["template"]):
            raise CorruptError(
                "the tokenizer in this cache is not the one that the cache was built with",
                where=self.folder.name,
                hint="copy the original tokenizer files of the teacher into this folder",
            )
        return tokenizer

    def text_sizes(self) -> NDArray[np.int64]:
        """Return int64 [documents], the UTF-8 bytes of each text; opens every shard."""
        return np.concatenate([shard.text_sizes() for shard in self.shards()])

    def is_conversation(self) -> NDArray[np.bool_]:
        """Return bool [documents], whether each is a conversation."""
        return np.concatenate([shard.is_conversation() for shard in self.shards()])

    def document_weights(self) -> NDArray[np.float64]:
        """Return float64 [documents], the loss weight of each."""
        return np.concatenate([shard.document_weights() for shard in self.shards()])

    def routes(self) -> list[str]:
        """Return [documents], the teacher name of each; "" if it has none."""
        return [route for shard in self.shards() for route in shard.routes()]

    def fingerprints(self) -> NDArray[np.uint64]:
        """Return uint64 [documents], hashes of the student's input, which do not depend on the teacher."""
        return np.concatenate([shard.fingerprints() for shard in self.shards()])

    def shards(self) -> Iterator[CacheShard]:
        """Yield all shards in order."""
        files = [str(entry["file"]) for entry in self.manifest["shards"]]
        for number in range(len(files)):
            if number % PREFETCHED_SHARDS == 0:
                self.folder.prefetch(files[number : number + PREFETCHED_SHARDS])
            yield self._open(number)

    def verify(self) -> None:
        """Read all files completely and compare them with their checksums.

        Raises:
            CorruptError: names the first file, and in a shard the row, that does not match.
        """
        self.verify_files()
        files = [str(entry["file"]) for entry in self.manifest["shards"]]
        for number in range(len(files)):
            if number % PREFETCHED_SHARDS == 0:
                self.folder.prefetch(files[number : number + PREFETCHED_SHARDS])
            self._verified.discard(number)
            shard = self._open_shard(number)
            for row in shard.damaged_documents():
                wrong = _corrupt_document_error(shard, row)
                raise CorruptError(
                    wrong.what, where=wrong.where, hint=_repair_hint(self.folder, self._shard_file(number))
                )
            entry = self.manifest["shards"][number]
            found = {**shard.counts(), **shard.entropy_sums()}
            if any(entry[name] != value for name, value in found.items()):
                raise self._damaged_error(
                    "the counts or sums of this shard differ from the manifest of the cache", entry["file"]
                )

    def verify_files(self, *, there_only: bool = False) -> None:
        """Compare the files that are not shards with the checksums in the manifest.

        Raises:
            CorruptError: a file does not match, or is missing and `there_only` is false.
        """
        for file, checksum in self.manifest.get("files", {}).items():
            try:
                content = self.folder.read(file)
            except FileNotFoundError:
                if there_only:
                    continue
                raise self._damaged_error("this file of the teacher cache is missing", file) from None
            if sha256(content) != checksum:
                raise self._damaged_error(
                    "this file of the teacher cache does not match its checksum in the manifest", file
                )

    def _read_vocabulary_order(self, file: str) -> VocabularyOrder:
        where = self.folder.path_of(file)
        try:
            return VocabularyOrder.from_file_content(file, self.folder.read(file), where)
        except FileNotFoundError:
            raise CorruptError(
                "the teacher cache lacks its file of token ids by frequency",
                where=where,
                hint="copy the whole cache folder again",
            ) from None

    def _shard_file(self, number: int) -> str:
        return str(self.manifest["shards"][number]["file"])

    def open_shard(self, entry: dict[str, Any]) -> CacheShard:
        """Open a shard of the manifest after verifying everything except its documents.

        Raises:
            CorruptError: the shard does not match the manifest.
        """
        return self._open(self._shard_numbers[entry["file"]])

    def _open_shard(self, number: int) -> CacheShard:
        entry = self.manifest["shards"][number]
        path = self.folder.local_path(entry["file"])
        if number not in self._verified and _file_frame_checksum(path, entry["payload_ranges"]) != entry["checksum"]:
            raise self._damaged_error(
                "this shard does not match its checksum in the manifest of the cache", entry["file"]
            )
        shard = CacheShard(path, self.folder.path_of(entry["file"]), self._load_vocabulary_order)
        if number not in self._verified and _header_identity(shard.header) != self._identity_of(entry):
            raise self._damaged_error(
                "this shard is from another cache: its header differs from that in the manifest", entry["file"]
            )
        if number not in self._verified:
            for name, count in shard.counts().items():
                if entry[name] != count:
                    what = f"this shard has {count:,} {name}, but the manifest of the cache states {entry[name]:,}"
                    raise self._damaged_error(what, entry["file"])
        self._verified.add(number)
        return shard

    def _identity_of(self, entry: dict[str, Any]) -> dict[str, Any]:
        return _header_identity(self._source_headers[int(entry.get("source_header", 0))])

    @cached_property
    def _source_headers(self) -> list[dict[str, Any]]:
        return source_headers(self.manifest)

    @cached_property
    def _shard_numbers(self) -> dict[str, int]:
        return {entry["file"]: number for number, entry in enumerate(self.manifest["shards"])}

    def _damaged_error(self, what: str, file: str) -> CorruptError:
        return CorruptError(what, where=self.folder.path_of(file), hint=_repair_hint(self.folder, file))


def _file_frame_checksum(path: Path, payload: Sequence[tuple[int, int]]) -> str:
    """Return the checksum of a shard's bytes outside of the payload, without parsing the file."""
    import mmap

    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return frame_checksum(content, [(start, stop) for start, stop in payload])


def read_shard_counts(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the header of a shard, and its numbers of documents, positions, tokens, entries and bytes.

    Raises:
        CorruptError: the checksum does not match, or it is not a shard.
        XtkError: an older version of the format.
    """
    shard = open_verified_shard(path, str(path))
    return shard.header, {**shard.counts(), "bytes": shard.num_bytes}


def _corrupt_document_error(shard: CacheShard, row: int) -> CorruptError:
    return CorruptError(
        "a document of this teacher cache does not match its checksum",
        where=f"{shard.name}, row {row}",
        hint=RESTORE_HINT,
    )


def _checksum(manifest: dict[str, Any]) -> str:
    return sha256(canonical_json({key: value for key, value in manifest.items() if key != "checksum"}))


def source_headers(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the headers of a cache's shards: its own, or those of the caches that were merged into it."""
    return list(manifest.get("source_headers") or [manifest["header"]])


def codec_files(header: dict[str, Any]) -> list[str]:
    """Return the names of the other files that shards with this header need."""
    return [str(header["codec"][key]) for key in CODEC_FILE_KEYS if header["codec"].get(key)]


def is_cache_file(name: str) -> bool:
    """Return whether a file of this name can be part of a teacher cache."""
    return (
        name in (MANIFEST, UNFINISHED_MARKER, *TOKENIZER_FILES)
        or name.startswith((TEMPORARY_PREFIX, LOCK_PREFIX))
        or bool(SHARD_NAME.fullmatch(name))
        or bool(VOCABULARY_ORDER_NAME.fullmatch(name) or _OLD_VERSION_FILE_NAMES.fullmatch(name))
    )


def refuse_foreign_cache_folder(folder: StorageFolder) -> None:
    """Refuse a folder that contains anything but a cache that xtk wrote.

    A tokenizer alone is the user's: files with the names of a cache belong to xtk only if there is a manifest, a
    shard, or the marker of an unfinished cache.

    Raises:
        XtkError: names the other files.
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


def _header_identity(header: dict[str, Any]) -> dict[str, Any]:
    """Return a header without the teacher's name: a teacher folder that was moved is the same teacher."""
    teacher = {key: value for key, value in _header_section(header, "teacher").items() if key != "name"}
    return {**header, "teacher": teacher}


def _header_section(header: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a section of an unchecked header; {} if it is missing."""
    found = header.get(name)
    return found if isinstance(found, dict) else {}


def _repair_hint(folder: StorageFolder, file: str) -> str:
    return f"remove {folder.path_of(file)} and run the same xtk cache-teacher command again to rewrite it"


def _other_request_error(folder: StorageFolder, file: str, found: dict[str, Any], wanted: dict[str, Any]) -> XtkError:
    differences = [
        f"{section}.{key}: {_shorten(found, section, key)} there, {_shorten(wanted, section, key)} in this command"
        for section in ("teacher", "data", "options", "codec")
        for key in sorted({*_header_section(found, section), *_header_section(wanted, section)})
        if _header_section(found, section).get(key) != _header_section(wanted, section).get(key)
    ]
    return XtkError(
        "the output folder contains a cache with different inputs or options",
        where=f"{folder.path_of(file)} ({'; '.join(differences[:3])})",
        hint="use another output path (-o), or add --force to replace this cache",
    )


def _shorten(header: dict[str, Any], section: str, key: str) -> str:
    text = str(_header_section(header, section).get(key))
    return text if len(text) <= 80 else text[:77] + "..."
