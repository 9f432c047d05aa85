"""Reading and writing of teacher caches: folders of Arrow shards with a manifest, see docs/reference/artifacts.md.

A cache does not depend on a student: any student can train from it.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.cache.manifest import (
    MANIFEST,
    SHARD_NAME,
    TOKENIZER_FILES,
    header_identity,
    read_cache_manifest,
    repair_hint,
    shard_file_name,
    source_headers,
)
from xtk.cache.shard import (
    CachedDocument,
    CacheShard,
    corrupt_document_error,
    frame_checksum,
    read_vocabulary_order,
)
from xtk.cache.shard_writing import check_file_checksum
from xtk.cache.teacher_document import TeacherDocument
from xtk.cache.teacher_logprobs import TeacherLogprobs
from xtk.errors import CorruptError, XtkError
from xtk.files.atomic_files import sha256
from xtk.files.storage_folders import StorageFolder, open_folder
from xtk.text.start_tokens import START_ROLES
from xtk.text.tokenizer import Tokenizer
from xtk.text.vocabulary import ByteVocabulary

MAX_OPEN_SHARDS = 1024  # of 0.4 MB each, where they are packed
PREFETCHED_SHARDS = 64  # shards downloaded at once when all are read in order
_TOKENIZER_FILE_NAMES = re.compile(r".*\.(json|jinja|model|tiktoken)")  # names of files that a tokenizer may read
_vocabularies: dict[str, ByteVocabulary] = {}  # of teachers, by the fingerprint of the tokenizer


def open_verified_shard(path: Path, name: str) -> CacheShard:
    """Open a shard without a manifest, after comparing the whole file with its checksum."""
    check_file_checksum(path, name)
    return CacheShard(path, name)


def check_unfinished_cache(folder: StorageFolder) -> None:
    """Verify the shards of an unfinished cache completely; do nothing for a finished one."""
    held = folder.file_sizes()
    if MANIFEST in held:
        return
    again = "run the same xtk cache-teacher command again to rewrite this shard"
    for file in sorted(filter(SHARD_NAME.fullmatch, held)):
        where = folder.path_of(file)
        try:
            shard = open_verified_shard(folder.local_path(file), where)
        except CorruptError as failure:
            raise CorruptError(failure.what, where=where, hint=again) from None
        if shard_file_name(shard.position.shard) != file:
            raise CorruptError(
                f"this file contains shard {shard.position.shard}, not the shard in its name", where=where, hint=again
            )


class TeacherCache:
    """A finished cache, memory-mapped, with random access to documents; also a map-style dataset for DataLoaders.

    `len(cache)` is the number of documents, `cache[i]` document i, and iterating reads all in order.

    Opening a cache checks the sizes of all shards. The first access to a shard verifies everything except the
    documents; each document is verified when it is read.

    Args:
        location: path or URL of the output of `xtk cache-teacher`.

    Raises:
        XtkError: there is no finished cache, or a shard is missing or has a wrong size.
    """

    kind = "cache"

    def __init__(self, location: str | Path) -> None:
        self._location = location
        self.folder = open_folder(location)
        self.manifest = read_cache_manifest(self.folder)
        self.header: dict[str, Any] = self.manifest["header"]
        self._source_identities = [header_identity(header) for header in source_headers(self.manifest)]
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
        self._load_vocabulary_order = cache(
            lambda file: read_vocabulary_order(self.folder, file, self.folder.path_of(MANIFEST))
        )
        self._open = lru_cache(maxsize=MAX_OPEN_SHARDS)(self._open_shard)
        self._verified: set[int] = set()

    def __reduce__(self) -> tuple[type[TeacherCache], tuple[str | Path]]:
        """Pickle the location only; the other process opens the cache."""
        return TeacherCache, (self._location,)

    def __len__(self) -> int:
        return self._first_rows[-1]

    def __iter__(self) -> Iterator[CachedDocument]:
        return (self.read_document(number) for number in range(len(self)))

    def __getitem__(self, number: int) -> CachedDocument:
        """Return one document: `.document` (its text), `.tokens` (the teacher's) and `.teacher_logprobs`.

        Raises:
            IndexError: there is no such document.
            CorruptError: the document does not match its checksum.
        """
        return self.read_document(number)

    def logprobs(self, number: int, sample_set: int | None = 0) -> TeacherLogprobs:
        """Return the teacher's log-probabilities of a document, in nats, normalized over its whole vocabulary.

        Args:
            number: index of the document.
            sample_set: as in `read_document`.

        Returns:
            For P trained positions: the token ids and log-probabilities of each (`ids[offsets[p]:offsets[p + 1]]`), the
            probability of all others (`remainder_mass`), and of the observed token (`observed_logprobs`).

        Raises:
            IndexError: there is no such document.
            CorruptError: the document does not match its checksum.
        """
        return self.read_document(number, sample_set).teacher_logprobs

    def read_document(self, number: int, sample_set: int | None = 0) -> CachedDocument:
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
            stored = opened.read_document(at, sample_set)
        except CorruptError as failure:
            raise CorruptError(
                failure.what, where=failure.where, hint=repair_hint(self.folder, self._shard_file(shard))
            ) from None
        stored.index = int(number)
        return stored

    def outputs(self, documents: Sequence[int], sample_set: int | None = 0) -> list[TeacherDocument | None]:
        """Return the teacher's outputs for some documents, as a `TeacherSource`."""
        return [self.read_document(number, sample_set) for number in documents]

    @property
    def teacher_tokenizer(self) -> Tokenizer:
        """The teacher's tokenizer.

        Raises:
            CorruptError: it is missing, or not the tokenizer that the cache was built with.
        """
        identity = self.header["teacher"]
        self.verify_files(there_only=True)
        held = self.folder.file_sizes()
        # Files that the manifest does not list may be links, which are refused.
        self.folder.check_regular(filter(_TOKENIZER_FILE_NAMES.fullmatch, held))
        places = {self.folder.local_path(file).parent for file in TOKENIZER_FILES if file in held}
        try:
            place = places.pop() if places else Path(self.folder.name)
            tokenizer = Tokenizer(place, name=str(identity["name"]), embedding_rows=int(identity["embedding_rows"]))
            roles = tokenizer.special_token_ids  # older caches always have a start token: bos, else eos
            older = [roles[role] for role in START_ROLES if role in roles][:1]
            tokenizer = tokenizer.with_start_token(tuple(identity.get("start_ids", older)))
        except CorruptError:
            raise
        except XtkError as failure:
            raise CorruptError(
                f"the teacher's tokenizer cannot be loaded from the cache: {failure.what}",
                where=self.folder.name,
                hint="copy the tokenizer files of the teacher into this folder, or use --projection FILE",
            ) from None
        fingerprints = (tokenizer.fingerprint, tokenizer.template_fingerprint)
        if fingerprints != (identity["tokenizer"], identity["template"]):
            raise CorruptError(
                "the tokenizer in this cache is not the one that the cache was built with",
                where=self.folder.name,
                hint="copy the original tokenizer files of the teacher into this folder",
            )
        return tokenizer

    def _load_bytes_of(self) -> Callable[[int], bytes] | None:
        """Return the function that returns the bytes of the teacher's tokens; None without the teacher's tokenizer."""
        fingerprint = str(self.header["teacher"]["tokenizer"])
        if fingerprint not in _vocabularies:
            try:
                _vocabularies[fingerprint] = self.teacher_tokenizer.vocabulary
            except XtkError:  # reported where the tokenizer is needed
                return None
        return _vocabularies[fingerprint].bytes_of

    def text_sizes(self) -> NDArray[np.int64]:
        """Return int64 [documents], the UTF-8 bytes of each text; opens every shard."""
        return np.concatenate([shard.columns.text_sizes for shard in self.shards()])

    def is_conversation(self) -> NDArray[np.bool_]:
        """Return bool [documents], whether each is a conversation."""
        return np.concatenate([shard.is_conversation() for shard in self.shards()])

    def document_weights(self) -> NDArray[np.float64]:
        """Return float64 [documents], the loss weight of each."""
        return np.concatenate([shard.columns.weights for shard in self.shards()])

    def routes(self) -> list[str]:
        """Return [documents], the teacher name of each; "" if it has none."""
        return [shard.columns.route(row) for shard in self.shards() for row in range(len(shard))]

    def fingerprints(self) -> NDArray[np.uint64]:
        """Return uint64 [documents], hashes of the student's input, which do not depend on the teacher."""
        return np.array(
            [shard.columns.fingerprint(row) for shard in self.shards() for row in range(len(shard))], np.uint64
        )

    def shards(self) -> Iterator[CacheShard]:
        """Yield all shards in order."""
        return map(self._open, self._prefetched())

    def _prefetched(self) -> Iterator[int]:
        """Yield the numbers of all shards; remote ones are downloaded before."""
        files = [str(entry["file"]) for entry in self.manifest["shards"]]
        for number in range(len(files)):
            if number % PREFETCHED_SHARDS == 0:
                self.folder.prefetch(files[number : number + PREFETCHED_SHARDS])
            yield number

    def verify(self) -> None:
        """Read all files completely and compare them with their checksums.

        Raises:
            CorruptError: names the first file, and in a shard the row, that does not match.
        """
        self.verify_files()
        for number in self._prefetched():
            self._verified.discard(number)
            shard = self._open_shard(number)
            for row in shard.damaged_documents():
                failure = corrupt_document_error(shard.name, row)
                raise CorruptError(
                    failure.what, where=failure.where, hint=repair_hint(self.folder, self._shard_file(number))
                )
            entry = self.manifest["shards"][number]
            sums = {**shard.counts(), **shard.entropy_sums()}
            if any(entry[name] != value for name, value in sums.items()):
                raise self._damaged_error(
                    "the counts or sums of this shard differ from the manifest of the cache", entry["file"]
                )

    def verify_files(self, *, there_only: bool = False) -> None:
        """Compare the files that are not shards with their checksums; with `there_only`, those that are not missing."""
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

    def _shard_file(self, number: int) -> str:
        return str(self.manifest["shards"][number]["file"])

    def open_shard(self, entry: dict[str, Any]) -> CacheShard:
        """Open a shard of the manifest after verifying everything except its documents."""
        return self._open(self.manifest["shards"].index(entry))

    def _open_shard(self, number: int) -> CacheShard:
        entry = self.manifest["shards"][number]
        path = self.folder.local_path(entry["file"])
        if number not in self._verified and _file_frame_checksum(path, entry["payload_ranges"]) != entry["checksum"]:
            raise self._damaged_error(
                "this shard does not match its checksum in the manifest of the cache", entry["file"]
            )
        name = self.folder.path_of(entry["file"])
        identity = self._source_identities[int(entry.get("source_header", 0))]
        shard = CacheShard(path, name, self._load_vocabulary_order, self._load_bytes_of)
        if number not in self._verified and header_identity(shard.header) != identity:
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

    def _damaged_error(self, what: str, file: str) -> CorruptError:
        return CorruptError(what, where=self.folder.path_of(file), hint=repair_hint(self.folder, file))


def _file_frame_checksum(path: Path, payload: Sequence[tuple[int, int]]) -> str:
    """Return the checksum of a shard's bytes outside of the payload, without parsing the file."""
    import mmap

    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return frame_checksum(content, [(start, stop) for start, stop in payload])


def read_shard_counts(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the header of a shard, and its numbers of documents, positions, tokens, entries and bytes."""
    shard = open_verified_shard(path, str(path))
    return shard.header, {**shard.counts(), "bytes": shard.num_bytes}
