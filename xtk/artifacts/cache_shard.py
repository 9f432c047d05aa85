"""Shards of a teacher cache: Arrow files with one row per document; see docs/reference/artifacts.md."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from xtk.artifacts.arrow_validation import RESTORE_HINT, check_columns, read_single_batch
from xtk.artifacts.atomic_files import canonical_json
from xtk.artifacts.cache_manifest import VERSION, VOCABULARY_ORDER_NAME
from xtk.artifacts.local_and_remote_folders import MAX_FILE_BYTES
from xtk.artifacts.safe_artifact_files import check_file_name, read_regular_file
from xtk.artifacts.shard_codec_registry import CODECS, Codec
from xtk.artifacts.token_ids_by_frequency import VocabularyOrder, VocabularyOrderLoader
from xtk.errors import CorruptError, XtkError
from xtk.name_registry import load_registered
from xtk.tokens.document import Conversation, Document, Segment
from xtk.tokens.document_token_ids import SampledTokens
from xtk.tokens.teacher_logprobs import StoredLogprobs, TeacherLogprobs, kl_on_stored_ids
from xtk.tokens.token_sequence import TokenSequence as TokenSequence

SHARD_SCHEMA = pa.schema(
    [
        ("segments", pa.list_(pa.struct([("role", pa.string()), ("text", pa.string()), ("train", pa.bool_())]))),
        ("complete", pa.bool_()),
        ("conversation", pa.string()),
        ("num_tokens", pa.int32()),
        ("num_positions", pa.int32()),
        ("num_entries", pa.int32()),
        ("entropy", pa.float32()),
        ("quantization_kl", pa.float32()),
        ("trained_ranges", pa.list_(pa.int32())),
        ("byte_ranges", pa.list_(pa.int32())),
        ("segment_end_tokens", pa.list_(pa.int32())),
        ("tokens", pa.binary()),
        ("teacher_logprobs", pa.binary()),
        ("checksum", pa.uint64()),
    ]
)
# Present only if `header["data"]["optional_columns"]` lists them.
OPTIONAL_COLUMNS = {"weight": pa.float64(), "route": pa.string(), "sampled_tokens": pa.binary()}
LIST_COLUMNS = ("trained_ranges", "byte_ranges", "segment_end_tokens")
BLOB_COLUMNS = ("tokens", "teacher_logprobs")
BYTE_COLUMNS = ("conversation", *BLOB_COLUMNS)
PAYLOAD_PARTS = ("text", *BLOB_COLUMNS)  # in this order in `payload_ranges`
# The custom metadata of the record batch, canonical JSON, begins with this. A JSON string cannot contain it unescaped,
# so that its first occurrence in a file is the checksum, whatever the header or the texts contain.
CHECKSUM_PREFIX = b'{"checksum":"xxh3_128:'
CHECKSUM_DIGITS = 32
MAX_DOCUMENT_TOKENS = 1 << 24  # a larger number means a corrupt shard, and would allocate gigabytes
OLD_KL_COLUMN, NEW_KL_COLUMN = b"codec_kl", b"quantization_kl"  # of versions up to 4, and of later ones
UNNUMBERED_VERSION = 5  # the last version whose shards do not contain their version
NUM_SEGMENT_PARTS = 5  # train flags, sizes of roles, roles, sizes of texts, texts: the first parts of a checksum


@dataclass(frozen=True)
class ScoredDocument:
    """One document with the teacher's tokens and log-probabilities, to be written into a cache.

    Attributes:
        document: text, and which parts are trained.
        tokens: the teacher's tokens.
        stored_logprobs: the teacher's log-probabilities at the trained tokens.
    """

    document: Document
    tokens: TokenSequence
    stored_logprobs: StoredLogprobs


@dataclass(frozen=True)
class ShardPosition:
    """Position of a shard in the cache that it was written for.

    Attributes:
        shard: number of the shard, from 0.
        first_document: number of documents in the shards before it.
        documents: number of documents in it.
    """

    shard: int
    first_document: int
    documents: int


def write_shard(
    path: Path,
    header: dict[str, Any],
    position: ShardPosition,
    documents: Sequence[ScoredDocument],
    vocabulary_order: VocabularyOrder | None = None,
) -> None:
    """Write a shard, with its position in the cache and a checksum of the whole file.

    Args:
        path: a new file.
        header: identity of teacher, data and options; `header["codec"]` selects the codec.
        position: in the cache.
        documents: its documents.
        vocabulary_order: of the cache, if the codec needs it.
    """
    codec: type[Codec] = load_registered(CODECS, header["codec"]["name"], "codec")
    tables, tokens, signals = codec.pack(
        [(row.tokens, row.stored_logprobs) for row in documents], header["codec"], vocabulary_order
    )
    back = codec(header["codec"], tables, vocabulary_order)
    added = [
        kl_on_stored_ids(
            row.stored_logprobs,
            back.unpack_stored_logprobs(memoryview(packed), row.tokens.ids, row.stored_logprobs.positions),
        ).sum()
        for row, packed in zip(documents, signals, strict=True)
    ]
    columns = {
        "segments": pa.array(
            [
                [{"role": part.role, "text": part.text, "train": part.train} for part in row.document.segments]
                for row in documents
            ],
            SHARD_SCHEMA.field("segments").type,
        ),
        "complete": pa.array([row.document.is_complete for row in documents], pa.bool_()),
        "conversation": pa.array([_conversation_to_json(row.document) for row in documents], pa.string()),
        "num_tokens": pa.array([len(row.tokens) for row in documents], pa.int32()),
        "num_positions": pa.array([len(row.stored_logprobs) for row in documents], pa.int32()),
        "num_entries": pa.array(
            [len(row.stored_logprobs.ids) + len(row.stored_logprobs.sample_ids) for row in documents], pa.int32()
        ),
        "entropy": pa.array([row.stored_logprobs.entropy.sum(dtype=np.float64) for row in documents], pa.float32()),
        "quantization_kl": pa.array(added, pa.float32()),
        "trained_ranges": _list_array([_to_ranges(row.stored_logprobs.positions) for row in documents]),
        "byte_ranges": _list_array([row.tokens.text_runs for row in documents]),
        "segment_end_tokens": _list_array([row.tokens.segment_end_tokens for row in documents]),
        "tokens": _binary_array(tokens),
        "teacher_logprobs": _binary_array(signals),
        **{
            name: pa.array([_optional_value(row.document, name) for row in documents], OPTIONAL_COLUMNS[name])
            for name in optional_columns(header)
        },
    }
    unsigned = pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))
    plain = _ShardColumns(unsigned)
    checksums = np.array([plain.checksum(number) for number in range(len(documents))], np.uint64)
    schema = shard_schema(header).with_metadata(
        {"xtk": canonical_json(header), "codec_tables": base64.b64encode(tables).decode()}
    )
    batch = pa.RecordBatch.from_arrays([*columns.values(), pa.array(checksums, pa.uint64())], schema=schema)
    _write_sealed(path, batch, position)


def _write_sealed(path: Path, batch: pa.RecordBatch, place: ShardPosition) -> None:
    """Write an Arrow file, then its checksum into the custom metadata of its record batch."""
    seal = canonical_json({"checksum": "xxh3_128:" + "0" * CHECKSUM_DIGITS, "version": VERSION, **asdict(place)})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch, custom_metadata={"xtk": seal})
    with path.open("r+b") as stream:
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            at = content.find(CHECKSUM_PREFIX) + len(CHECKSUM_PREFIX)
            found = _checksum_around(content, at)
        stream.seek(at)  # not through the map, where a full disk raises SIGBUS instead of an error
        stream.write(found.encode())


def _checksum_around(content: mmap.mmap, at: int) -> str:
    """Return the checksum of a file without the bytes of the stored checksum, which begins at `at`."""
    with memoryview(content) as view:
        hashed = xxhash.xxh3_128(view[:at])
        hashed.update(view[at + CHECKSUM_DIGITS :])
    return hashed.hexdigest()


def check_file_checksum(path: Path, where: str) -> None:
    """Check every byte of a shard against the checksum in the file, before anything in it is parsed.

    Finished caches do not need this: their manifest has checksums without the documents, and each document has its
    own, so that reading one document does not read the others.

    Args:
        path: local path of the shard.
        where: its name, for the error.

    Raises:
        CorruptError: the checksum does not match.
        XtkError: an older version of the format.
    """
    with path.open("rb") as stream:
        if not os.fstat(stream.fileno()).st_size:  # cannot be mapped
            raise CorruptError("this shard of a teacher cache is empty (0 bytes)", where=where, hint=RESTORE_HINT)
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            at = content.find(CHECKSUM_PREFIX)
            digits = content[at + len(CHECKSUM_PREFIX) :][:CHECKSUM_DIGITS] if at >= 0 else b""
            if at >= 0 and _checksum_around(content, at + len(CHECKSUM_PREFIX)).encode() == digits:
                return
            old = at < 0 and content.find(OLD_KL_COLUMN) >= 0 and content.find(NEW_KL_COLUMN) < 0
    if old:
        raise _version_error("4 or older", where)
    raise CorruptError("this shard of a teacher cache does not match its checksum", where=where, hint=RESTORE_HINT)


def _version_error(version: object, where: str) -> XtkError:
    return XtkError(
        f"this shard has version {str(version)[:20]} of the teacher cache format; this xtk reads version {VERSION}",
        where=where,
        hint="make the cache again: xtk cache-teacher TEACHER DATA -o FOLDER --force",
    )


def shard_schema(header: dict[str, Any]) -> pa.Schema:
    """Return the schema of shards with this header, without metadata."""
    *fields, last = SHARD_SCHEMA
    return pa.schema([*fields, *(pa.field(name, OPTIONAL_COLUMNS[name]) for name in optional_columns(header)), last])


def _optional_value(document: Document, name: str) -> Any:
    """Return the value of one of `OPTIONAL_COLUMNS` for a document."""
    if name == "sampled_tokens":
        return b"" if document.sampled_tokens is None else document.sampled_tokens.to_bytes()
    return document.teacher_name if name == "route" else document.weight


def optional_columns(header: dict[str, Any]) -> list[str]:
    """Return the `OPTIONAL_COLUMNS` of shards with this header."""
    return list(header.get("data", {}).get("optional_columns", []))


class CacheShard:
    """An open, memory-mapped shard.

    Args:
        path: local path.
        name: name in error messages; default: the path.
        load_order: loads the vocabulary order that the header names; default: from the folder of the shard.

    Raises:
        CorruptError: not a shard, or truncated.
    """

    def __init__(self, path: Path, name: str = "", load_order: VocabularyOrderLoader | None = None) -> None:
        self.name, self._path = name or str(path), path
        self._load_vocabulary_order = load_order or (lambda file: read_vocabulary_order(path, file))
        try:
            with pa.memory_map(str(path)) as source:
                self._buffer = source.read_buffer()
        except (pa.ArrowException, ValueError, OSError) as wrong:
            raise CorruptError(
                f"this shard of a teacher cache cannot be read: {wrong}", where=self.name, hint=RESTORE_HINT
            ) from None
        self._batch, seal = read_single_batch(self._buffer, self.name, full=False)
        with self._corruption_as_error("its header is invalid"):
            metadata = self._batch.schema.metadata or {}
            self.header: dict[str, Any] = dict(json.loads(metadata[b"xtk"]))
            self._options = dict(self.header["codec"])
            self._tables = base64.b64decode(metadata[b"codec_tables"], validate=True)
            stated = dict(json.loads(seal[b"xtk"]))
            version = stated.get("version", UNNUMBERED_VERSION)
            if version != VERSION:
                raise _version_error(version, self.name)
            self.position = ShardPosition(*(int(stated[name]) for name in ("shard", "first_document", "documents")))
            schema = shard_schema(self.header)
        check_columns(self._batch, schema, self.name, frozenset({"conversation"}))
        with self._corruption_as_error("the offsets of a column are invalid"):
            self._columns = _ShardColumns(self._batch)
        self._checksums = self._batch.column("checksum").to_numpy()

    def __len__(self) -> int:
        return int(self._batch.num_rows)

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return len(self._buffer)

    @cached_property
    def codec(self) -> Codec:
        """The codec that decodes its tokens and log-probabilities."""
        with self._corruption_as_error("its compression tables are invalid"):
            options = self._options
            kind: type[Codec] = load_registered(CODECS, options["name"], "codec")
            ranks = self._load_vocabulary_order(options["vocabulary_order"]) if kind.needs_vocabulary_order else None
            return kind(options, self._tables, ranks)

    @cached_property
    def vocab_size(self) -> int:
        """Size of the teacher's vocabulary; all token ids are smaller."""
        with self._corruption_as_error("its header has no valid vocabulary size of the teacher"):
            return int(self.header.get("teacher", {}).get("embedding_rows", np.iinfo(np.int32).max))

    @contextlib.contextmanager
    def _corruption_as_error(self, what: str, row: int | None = None) -> Iterator[None]:
        """Convert exceptions from corrupt content into a CorruptError that names the shard and the row."""
        where = self.name if row is None else f"{self.name}, row {row}"
        try:
            yield
        except CorruptError as wrong:
            raise (
                wrong if wrong.where else CorruptError(wrong.what, where=where, hint=wrong.hint or RESTORE_HINT)
            ) from None
        except XtkError:
            raise
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
            raise CorruptError(
                f"this shard of a teacher cache is corrupt: {what}", where=where, hint=RESTORE_HINT
            ) from None

    def counts(self) -> dict[str, int]:
        """Return the total numbers of documents, trained positions, tokens and entries."""
        columns = self._columns
        return {
            "documents": len(self),
            "positions": int(columns.num_positions.sum()),
            "tokens": int(columns.num_tokens.sum()),
            "entries": int(columns.num_entries.sum()),
        }

    def entropy_sums(self) -> dict[str, float]:
        """Return the sums over all positions, in nats, of the entropy and of the KL divergence of the quantization."""
        sums = {
            name: self._batch.column(name).to_numpy().sum(dtype=np.float64) for name in ("entropy", "quantization_kl")
        }
        return {name: float(f"{found:.6g}") for name, found in sums.items()}

    def bytes_by_section(self) -> dict[str, int]:
        """Return the bytes of each of PAYLOAD_PARTS, and of everything else."""
        sizes = [stop - start for start, stop in self.payload_ranges()]
        return {**dict(zip(PAYLOAD_PARTS, sizes, strict=True)), "other": len(self._buffer) - sum(sizes)}

    def payload_ranges(self) -> list[tuple[int, int]]:
        """Return the byte ranges `[start, stop)` of texts, tokens and log-probabilities in the file."""
        texts = self._batch.column("segments").values.field("text").buffers()[2]
        buffers = [texts, *(self._batch.column(name).buffers()[2] for name in BLOB_COLUMNS)]
        base = self._buffer.address
        return [(0, 0) if not held or not held.size else (held.address - base, held.address - base + held.size)
                for held in buffers]  # fmt: skip

    def frame_checksum(self) -> str:
        """Return "sha256:..." of all bytes outside of the payload; these include the checksums of the documents."""
        return frame_checksum(self._buffer, self.payload_ranges())

    def read_document(self, number: int, sample_set: int | None = 0) -> StoredDocument:
        """Return one document after comparing its checksum.

        Raises:
            CorruptError: the checksum does not match; names shard and row.
        """
        self._check_size()
        if not self.is_intact(number):
            raise _checksum_error(self.name, number)
        return StoredDocument(self, number, sample_set)

    def _check_size(self) -> None:
        """Refuse a file that was truncated after it was mapped.

        Reading a mapped page that the file no longer has kills the process with SIGBUS, which Python cannot catch; a
        file that shrinks between this check and the read still does so. A removed or replaced file is safe: the map
        keeps the old one.

        Raises:
            CorruptError: names the shard.
        """
        try:
            size = os.stat(self._path).st_size  # noqa: PTH116 (called for every row)
        except OSError:
            return
        if size < len(self._buffer):
            raise CorruptError(
                f"another program truncated this shard while it was read, from {len(self._buffer):,} to {size:,} bytes",
                where=self.name,
                hint=RESTORE_HINT,
            )

    def is_intact(self, number: int) -> bool:
        """Return whether a document matches its checksum."""
        try:
            return self._columns.checksum(number) == int(self._checksums[number])
        except (ValueError, IndexError, OverflowError):  # corrupt offsets
            return False

    def write_slice(self, path: Path, start: int, stop: int) -> None:
        """Write the documents `[start, stop)` as a separate shard; their bytes and checksums do not change.

        The new shard states the position of the documents in the original cache, so that its bytes do not depend on
        its position in the output.

        Raises:
            CorruptError: a checksum does not match; names shard and row.
        """
        for number in range(start, stop):
            if not self.is_intact(number):
                raise _checksum_error(self.name, number)
        place = ShardPosition(self.position.shard, self.position.first_document + start, stop - start)
        _write_sealed(path, self._batch.slice(start, stop - start), place)

    def damaged_documents(self) -> Iterator[int]:
        """Yield the numbers of the documents that do not match their checksums."""
        return (number for number in range(len(self)) if not self.is_intact(number))

    def text_sizes(self) -> NDArray[np.int64]:
        """Return int64 [documents], the UTF-8 bytes of each text."""
        return self._columns.text_sizes()

    def is_conversation(self) -> NDArray[np.bool_]:
        """Return bool [documents], whether each is a conversation."""
        found: NDArray[np.bool_] = self._batch.column("conversation").is_valid().to_numpy(zero_copy_only=False)
        return found

    def document_weights(self) -> NDArray[np.float64]:
        """Return float64 [documents], the loss weight of each."""
        return self._columns.weights

    def routes(self) -> list[str]:
        """Return [documents], the teacher name of each; "" if it has none."""
        return [self._columns.route(number) for number in range(len(self))]

    def fingerprints(self) -> NDArray[np.uint64]:
        """Return uint64 [documents], hashes of the student's input, which do not depend on the teacher."""
        return np.array([self._columns.fingerprint(number) for number in range(len(self))], np.uint64)


def _checksum_error(name: str, row: int) -> CorruptError:
    return CorruptError(
        "a document of this teacher cache does not match its checksum", where=f"{name}, row {row}", hint=RESTORE_HINT
    )


def read_vocabulary_order(path: Path, file: str) -> VocabularyOrder:
    """Return the vocabulary order in a file in the folder of a shard.

    Raises:
        CorruptError: the file is missing or corrupt.
    """
    place = path.parent / file
    try:
        return VocabularyOrder.from_file_content(
            file,
            read_regular_file(
                path.parent, check_file_name(file, (VOCABULARY_ORDER_NAME,), where=str(path)), MAX_FILE_BYTES
            ),
            str(place),
        )
    except FileNotFoundError:
        raise CorruptError(
            "the teacher cache lacks its file of token ids by frequency",
            where=str(place),
            hint="copy the whole cache folder again",
        ) from None


def frame_checksum(content: Any, payload: Sequence[tuple[int, int]]) -> str:
    """Return "sha256:..." of the bytes of a shard outside of the payload ranges."""
    view, hashed, at = memoryview(content), hashlib.sha256(), 0
    for start, stop in sorted((start, stop) for start, stop in payload if stop > start):
        hashed.update(view[at:start])
        at = stop
    hashed.update(view[at:])
    return "sha256:" + hashed.hexdigest()


class StoredDocument:
    """One document of a cache; each part is decoded when it is first used."""

    def __init__(self, shard: CacheShard, number: int, sample_set: int | None) -> None:
        self._shard, self._columns, self._number, self._sample_set = shard, shard._columns, number, sample_set

    @cached_property
    def document(self) -> Document:
        """The text, and which parts are trained."""
        with self._shard._corruption_as_error("its document cannot be read", self._number):
            segments = self._columns.segments(self._number)
            written = str(self._columns.blob("conversation", self._number), "utf-8")
            return Document(
                segments,
                is_complete=bool(self._columns.complete[self._number]),
                conversation=_conversation_from_json(written, [segment.text for segment in segments]),
                weight=float(self._columns.weights[self._number]),
                teacher_name=self._columns.route(self._number),
                sampled_tokens=self._columns.sampled_tokens(self._number),
            )

    @cached_property
    def num_tokens(self) -> int:
        """T, the number of the teacher's tokens."""
        length = int(self._columns.num_tokens[self._number])
        if not 0 <= length <= MAX_DOCUMENT_TOKENS:
            raise self._corruption_error(f"a document has {length} tokens")
        return length

    @cached_property
    def trained_positions(self) -> NDArray[np.int32]:
        """int32 [P], indices of the trained tokens."""
        edges = self._columns.list_values("trained_ranges", self._number)
        starts, stops = edges[::2].astype(np.int64), edges[1::2].astype(np.int64)
        if len(starts) != len(stops) or (
            len(edges)
            and not (edges[0] >= 0 and stops[-1] <= self.num_tokens and (np.diff(edges.astype(np.int64)) > 0).all())
        ):
            raise self._corruption_error("positions of trained tokens lie outside of the document")
        if int((stops - starts).sum()) != int(self._columns.num_positions[self._number]):
            raise self._corruption_error("its number of trained tokens differs from the stored positions")
        runs = [
            np.arange(start, stop, dtype=np.int32) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)
        ]
        return runs[0] if len(runs) == 1 else np.concatenate([np.zeros(0, np.int32), *runs])

    @cached_property
    def tokens(self) -> TokenSequence:
        """The teacher's tokens."""
        length, number = self.num_tokens, self._number
        with self._shard._corruption_as_error("its tokens cannot be decoded", number):
            ids, ends = self._shard.codec.unpack_tokens(self._columns.blob("tokens", number), length)
            pieces = self._columns.list_values("byte_ranges", number).reshape(-1, 3)
            closers = self._columns.list_values("segment_end_tokens", number)
        self._check_ids(ids)
        size = int(self._columns.text_sizes()[number])
        if not (
            _all_between(ends, 0, size)
            and _all_between(pieces[:, :2], 0, length)
            and _all_between(pieces[:, 2], 0, size)
            and _all_between(closers, -1, length - 1)
        ):
            raise self._corruption_error("token or byte positions lie outside of the document")
        trained = np.zeros(length, np.bool_)
        trained[self.trained_positions] = True
        return TokenSequence(ids, ends, trained, pieces, closers)

    @cached_property
    def teacher_logprobs(self) -> TeacherLogprobs:
        """The teacher's log-probabilities, with one sample set or none."""
        ids, positions = self.tokens.ids, self.trained_positions
        with self._shard._corruption_as_error("its log-probabilities cannot be decoded", self._number):
            packed = self._columns.blob("teacher_logprobs", self._number)
            signal = self._shard.codec.unpack_teacher_logprobs(packed, ids, positions, self._sample_set)
        self._check_ids(signal.ids)
        return signal

    @cached_property
    def stored_logprobs(self) -> StoredLogprobs:
        """All stored log-probabilities of the teacher."""
        ids, positions = self.tokens.ids, self.trained_positions
        with self._shard._corruption_as_error("its log-probabilities cannot be decoded", self._number):
            packed = self._columns.blob("teacher_logprobs", self._number)
            scores = self._shard.codec.unpack_stored_logprobs(packed, ids, positions)
        self._check_ids(scores.ids)
        self._check_ids(scores.sample_ids)
        return scores

    def _check_ids(self, ids: NDArray[np.int32]) -> None:
        width = self._shard.vocab_size
        if not _all_between(ids, 0, width - 1):
            wrong = int(ids.min()) if ids.min() < 0 else int(ids.max())
            raise self._corruption_error(f"token id {wrong} is outside of the teacher's vocabulary of {width:,} ids")

    def _corruption_error(self, what: str) -> CorruptError:
        return CorruptError(
            f"this shard of a teacher cache is corrupt: {what}",
            where=f"{self._shard.name}, row {self._number}",
            hint=RESTORE_HINT,
        )


def _all_between(numbers: NDArray[np.int32], lowest: int, highest: int) -> bool:
    return not numbers.size or (int(numbers.min()) >= lowest and int(numbers.max()) <= highest)


class _ShardColumns:
    """The columns of a shard as flat arrays without copies."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        segments = batch.column("segments")
        parts = segments.values
        first = segments.offsets.to_numpy()
        self._trains = _byte_view(np.asarray(parts.field("train").to_numpy(zero_copy_only=False), np.bool_))
        role_ends, self._roles = _string_column(parts.field("role"))
        text_ends, self._texts = _string_column(parts.field("text"))
        role_sizes, text_sizes = (_byte_view(np.diff(ends)) for ends in (role_ends, text_ends))
        self._role_ends, self._text_ends = role_ends, text_ends
        lists = [batch.column(name) for name in LIST_COLUMNS]
        blobs = [_string_column(batch.column(name)) for name in BYTE_COLUMNS]
        self._lists = {name: column.values.to_numpy() for name, column in zip(LIST_COLUMNS, lists, strict=True)}
        self._blobs = {name: values for name, (_, values) in zip(BYTE_COLUMNS, blobs, strict=True)}
        self.complete = batch.column("complete").to_numpy(zero_copy_only=False)
        self.num_tokens, self.num_positions, self.num_entries = (
            batch.column(name).to_numpy() for name in ("num_tokens", "num_positions", "num_entries")
        )
        for at, size in [
            (first, len(parts)),
            (role_ends, len(self._roles)),
            (text_ends, len(self._texts)),
            *((column.offsets.to_numpy(), len(column.values)) for column in lists),
            *((at, len(values)) for at, values in blobs),
        ]:
            _check_offsets(at, size)
        edges = [first, role_ends[first], text_ends[first], *(column.offsets.to_numpy() for column in lists)]
        # [rows, 2 x 9]: start and end of each part of a row.
        self._bounds = np.column_stack(
            [part for at in [*edges, *(at for at, _ in blobs)] for part in (at[:-1], at[1:])]
        )
        sizes = np.diff(self._bounds.reshape(-1, 9, 2), axis=2)[:, :, 0]
        self._text_sizes: NDArray[np.int64] = sizes[:, 2].astype(np.int64)
        numbers = [self.num_tokens, self.num_positions, self.num_entries, self.complete, sizes[:, 0], *sizes[:, 3:].T]
        self._numbers = _byte_view(np.column_stack(numbers).astype("<i4"))
        self._size_of_numbers = 4 * len(numbers)
        # The parts that a checksum covers, in order, and the byte range of each row in them [rows, 2 x 11].
        counted, lists = self._bounds.astype(np.int64), [_byte_view(values) for values in self._lists.values()]
        flags, roles, texts, *rest = np.split(counted, 9, axis=1)
        self._hashed = [self._trains, role_sizes, self._roles, text_sizes, self._texts, *lists, *self._blobs.values()]
        rest = [4 * part for part in rest[: len(lists)]] + rest[len(lists) :]
        self._hashed_bounds = np.column_stack([flags, 4 * flags, roles, 4 * flags, texts, *rest])
        there = set(batch.schema.names)
        self._has_weights = "weight" in there
        self.weights = batch.column("weight").to_numpy() if self._has_weights else np.ones(batch.num_rows)
        names = [name for name in ("route", "sampled_tokens") if name in there]
        self._optional_values = {name: _string_column(batch.column(name)) for name in names}
        for at, values in self._optional_values.values():
            _check_offsets(at, len(values))

    def segments(self, number: int) -> tuple[Segment, ...]:
        first, stop = self._bounds[number, :2].tolist()
        roles, texts = self._role_ends[first : stop + 1].tolist(), self._text_ends[first : stop + 1].tolist()
        return tuple(
            Segment(
                str(self._roles[roles[at] : roles[at + 1]], "utf-8"),
                str(self._texts[texts[at] : texts[at + 1]], "utf-8"),
                bool(self._trains[first + at]),
            )
            for at in range(stop - first)
        )

    def route(self, number: int) -> str:
        return str(self._optional_bytes("route", number), "utf-8")

    def sampled_tokens(self, number: int) -> SampledTokens | None:
        content = self._optional_bytes("sampled_tokens", number)
        return SampledTokens.from_bytes(bytes(content)) if len(content) else None

    def _optional_bytes(self, name: str, number: int) -> memoryview:
        if name not in self._optional_values:
            return memoryview(b"")
        ends, values = self._optional_values[name]
        return values[ends[number] : ends[number + 1]]

    def text_sizes(self) -> NDArray[np.int64]:
        return self._text_sizes

    def list_values(self, name: str, number: int) -> NDArray[np.int32]:
        at = 6 + 2 * LIST_COLUMNS.index(name)
        piece: NDArray[np.int32] = self._lists[name][self._bounds[number, at] : self._bounds[number, at + 1]]
        return piece

    def blob(self, name: str, number: int) -> memoryview:
        at = 12 + 2 * BYTE_COLUMNS.index(name)
        return self._blobs[name][self._bounds[number, at] : self._bounds[number, at + 1]]

    def checksum(self, number: int) -> int:
        """Return xxh3_64 of a row: its numbers and sizes, then its strings and lists."""
        hashed = xxhash.xxh3_64(self._numbers[number * self._size_of_numbers : (number + 1) * self._size_of_numbers])
        self._hash_parts(hashed, number, len(self._hashed))
        if self._has_weights:
            hashed.update(self.weights[number].tobytes())
        for name in self._optional_values:
            hashed.update(self._optional_bytes(name, number))
        return int(hashed.intdigest())

    def fingerprint(self, number: int) -> int:
        """Return xxh3_64 of `complete`, segments, conversation and sampled tokens."""
        hashed = xxhash.xxh3_64(b"\1" if self.complete[number] else b"\0")
        self._hash_parts(hashed, number, NUM_SEGMENT_PARTS)
        hashed.update(self.blob("conversation", number))
        hashed.update(self._optional_bytes("sampled_tokens", number))
        return int(hashed.intdigest())

    def _hash_parts(self, hashed: Any, number: int, count: int) -> None:
        """Hash the first `count` parts of a row."""
        bounds = self._hashed_bounds[number].tolist()
        for part, start, stop in zip(self._hashed[:count], bounds[::2], bounds[1::2], strict=False):
            if start < stop:
                hashed.update(part[start:stop])


def _byte_view(array: NDArray[Any]) -> memoryview:
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def _check_offsets(offsets: NDArray[np.int32], size: int) -> None:
    """Check offsets into `size` values.

    Raises:
        ValueError: they decrease, or point outside of the values.
    """
    if offsets[0] < 0 or offsets[-1] > size or (offsets[1:] < offsets[:-1]).any():
        raise ValueError("the offsets of a column decrease, or point outside of its values")


def _string_column(array: pa.Array) -> tuple[NDArray[np.int32], memoryview]:
    """Return offsets int32 [n + 1] and bytes of a column of strings or blobs."""
    _, offsets, values = array.buffers()
    if offsets is None or not len(array):
        return np.zeros(1, np.int32), memoryview(b"")
    ends = np.frombuffer(offsets, np.int32, len(array) + 1, array.offset * 4)
    return ends, memoryview(b"") if values is None else memoryview(values)


def _list_array(parts: list[NDArray[np.int32]]) -> pa.ListArray:
    offsets = np.cumsum([0] + [part.size for part in parts])
    flat = np.concatenate([np.zeros(0, np.int32), *(part.reshape(-1) for part in parts)])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(flat, pa.int32()))


def _binary_array(parts: list[bytes]) -> pa.Array:
    if sum(map(len, parts)) > np.iinfo(np.int32).max:
        raise XtkError(
            "a shard needs more than 2 GiB in one column, which Arrow cannot store", hint="use a smaller --shard-tokens"
        )
    return pa.array(parts, pa.binary())


def _to_ranges(positions: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return int32 [ranges, 2], the ranges `[start, stop)` that cover some increasing numbers."""
    if not len(positions):
        return np.zeros(0, np.int32)
    breaks = np.flatnonzero(np.diff(positions) != 1)
    starts = positions[np.concatenate([[0], breaks + 1])]
    stops = positions[np.concatenate([breaks, [len(positions) - 1]])] + 1
    return np.column_stack([starts, stops]).astype(np.int32)


def _conversation_to_json(document: Document) -> str | None:
    """Return the messages and tools of a conversation as JSON, without the contents, which are the segments."""
    conversation = document.conversation
    if conversation is None:
        return None
    bare = [{key: value for key, value in message.items() if key != "content"} for message in conversation.messages]
    # Keys keep the order of the data: templates print tools and calls in this order.
    return json.dumps({"messages": bare, "tools": conversation.tools}, ensure_ascii=False)


def _conversation_from_json(written: str, texts: Sequence[str]) -> Conversation | None:
    if not written:
        return None
    content = json.loads(written)
    messages = ({**bare, "content": text} for bare, text in zip(content["messages"], texts, strict=True))
    tools = content["tools"]
    return Conversation(tuple(messages), None if tools is None else tuple(tools))
