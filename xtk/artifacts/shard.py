"""A shard: one Arrow file of a teacher cache, one row per document. docs/reference/artifacts.md describes it."""

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

from xtk.artifacts.arrow_files import check_columns, only_batch
from xtk.artifacts.cache_manifest import VOCABULARY_ORDER
from xtk.artifacts.codecs import CODECS, Codec
from xtk.artifacts.files import canonical_json
from xtk.artifacts.folders import FILE_BYTES
from xtk.artifacts.members import member, read_member
from xtk.artifacts.ranks import FindRanks, Ranks
from xtk.errors import Damaged, XtkError
from xtk.lookup import lookup
from xtk.tokens.document import Conversation, Document, Segment
from xtk.tokens.ids import DrawnTokens
from xtk.tokens.sequence import Sequence as TokenSequence
from xtk.tokens.signal import Scores, Signal, divergence

SCHEMA = pa.schema(
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
# Only in caches whose header lists them: `header["data"]["optional_columns"]`.
OPTIONAL_COLUMNS = {"weight": pa.float64(), "route": pa.string(), "sampled_tokens": pa.binary()}
LISTS = ("trained_ranges", "byte_ranges", "segment_end_tokens")
BLOBS = ("tokens", "teacher_logprobs")
BYTES = ("conversation", *BLOBS)
PAYLOAD = ("text", *BLOBS)  # in this order in `payload`
# The custom metadata of the record batch, canonical JSON, begins so. In JSON a string cannot contain it unescaped, so
# its first occurrence in a file is the checksum, whatever the header or the texts contain.
CHECKSUM = b'{"checksum":"xxh3_128:'
CHECKSUM_DIGITS = 32
MAX_DOCUMENT_TOKENS = 1 << 24  # a larger number in a shard is damage, and would allocate gigabytes
OLD_COLUMN, NEW_COLUMN = b"codec_kl", b"quantization_kl"  # of versions up to 4, and of this one
SEGMENT_PARTS = 5  # flags, sizes of roles, roles, sizes of texts, texts: what a checksum begins with


@dataclass(frozen=True)
class Row:
    """One document on its way into a cache.

    Attributes:
        document: its text and which of it is trained.
        tokens: what the teacher read.
        scores: what the teacher said at the trained tokens.
    """

    document: Document
    tokens: TokenSequence
    scores: Scores


@dataclass(frozen=True)
class Place:
    """Where a shard belongs in the cache that it was written for.

    Attributes:
        shard: its number, from 0.
        first_row: how many rows the shards before it have.
        rows: how many rows it has.
    """

    shard: int
    first_row: int
    rows: int


def write_shard(
    path: Path, header: dict[str, Any], place: Place, rows: Sequence[Row], ranks: Ranks | None = None
) -> None:
    """Write a shard, with a checksum over the whole file and its place in the cache.

    Args:
        path: a new file.
        header: identity of teacher, data and options; `header["codec"]` says how it is packed.
        place: in the cache.
        rows: its documents.
        ranks: of the cache, for codecs that need them.
    """
    codec: type[Codec] = lookup(CODECS, header["codec"]["name"], "codec")
    tables, tokens, signals = codec.pack([(row.tokens, row.scores) for row in rows], header["codec"], ranks)
    back = codec(header["codec"], tables, ranks)
    added = [
        divergence(row.scores, back.scores(memoryview(packed), row.tokens.ids, row.scores.positions)).sum()
        for row, packed in zip(rows, signals, strict=True)
    ]
    columns = {
        "segments": pa.array(
            [
                [{"role": part.role, "text": part.text, "train": part.train} for part in row.document.segments]
                for row in rows
            ],
            SCHEMA.field("segments").type,
        ),
        "complete": pa.array([row.document.ends for row in rows], pa.bool_()),
        "conversation": pa.array([_json_of_conversation(row.document) for row in rows], pa.string()),
        "num_tokens": pa.array([len(row.tokens) for row in rows], pa.int32()),
        "num_positions": pa.array([len(row.scores) for row in rows], pa.int32()),
        "num_entries": pa.array([len(row.scores.ids) + len(row.scores.drawn_ids) for row in rows], pa.int32()),
        "entropy": pa.array([row.scores.entropy.sum(dtype=np.float64) for row in rows], pa.float32()),
        "quantization_kl": pa.array(added, pa.float32()),
        "trained_ranges": _lists([_runs(row.scores.positions) for row in rows]),
        "byte_ranges": _lists([row.tokens.pieces for row in rows]),
        "segment_end_tokens": _lists([row.tokens.closers for row in rows]),
        "tokens": _blobs(tokens),
        "teacher_logprobs": _blobs(signals),
        **{
            name: pa.array([_optional(row.document, name) for row in rows], OPTIONAL_COLUMNS[name])
            for name in optional_columns(header)
        },
    }
    unsigned = pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))
    plain = _Columns(unsigned)
    checksums = np.array([plain.checksum(number) for number in range(len(rows))], np.uint64)
    schema = schema_of(header).with_metadata(
        {"xtk": canonical_json(header), "codec_tables": base64.b64encode(tables).decode()}
    )
    batch = pa.RecordBatch.from_arrays([*columns.values(), pa.array(checksums, pa.uint64())], schema=schema)
    _write_sealed(path, batch, place)


def _write_sealed(path: Path, batch: pa.RecordBatch, place: Place) -> None:
    """Write an Arrow file, then its checksum into the custom metadata of its record batch."""
    seal = canonical_json({"checksum": "xxh3_128:" + "0" * CHECKSUM_DIGITS, **asdict(place)})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch, custom_metadata={"xtk": seal})
    with path.open("r+b") as stream:
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            at = content.find(CHECKSUM) + len(CHECKSUM)
            found = _checksum_around(content, at)
        stream.seek(at)  # not through the map: a full disk is an error there, and a signal here
        stream.write(found.encode())


def _checksum_around(content: mmap.mmap, at: int) -> str:
    """Return the digits of the checksum of a file, which stand at `at` and are not part of what it covers."""
    with memoryview(content) as view:
        hashed = xxhash.xxh3_128(view[:at])
        hashed.update(view[at + CHECKSUM_DIGITS :])
    return hashed.hexdigest()


def check_whole(path: Path, where: str) -> None:
    """Compare every byte of a shard with the checksum that it carries, before anything in it is parsed.

    A finished cache does not need this: its manifest has checksums that leave out the rows, so that reading one row
    reads no other.

    Args:
        path: of the shard, on this machine.
        where: its name, for the error.

    Raises:
        Damaged: a byte is not the one that was written, or is missing, or there are more.
        XtkError: it is a shard of an older version.
    """
    with path.open("rb") as stream:
        if not os.fstat(stream.fileno()).st_size:  # cannot be mapped
            raise Damaged("this shard is empty", where=where)
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            at = content.find(CHECKSUM)
            digits = content[at + len(CHECKSUM) :][:CHECKSUM_DIGITS] if at >= 0 else b""
            if at >= 0 and _checksum_around(content, at + len(CHECKSUM)).encode() == digits:
                return
            old = at < 0 and content.find(OLD_COLUMN) >= 0 and content.find(NEW_COLUMN) < 0
    if old:
        raise XtkError(
            "this shard is of version 4 or older of the teacher cache, and this xtk reads version 5",
            where=where,
            hint="make the cache again: xtk cache-teacher TEACHER DATA -o FOLDER --force",
        )
    raise Damaged("this shard does not match its checksum", where=where)


def schema_of(header: dict[str, Any]) -> pa.Schema:
    """Return the columns of the shards of a header, without metadata."""
    *fields, last = SCHEMA
    return pa.schema([*fields, *(pa.field(name, OPTIONAL_COLUMNS[name]) for name in optional_columns(header)), last])


def _optional(document: Document, name: str) -> Any:
    """Return the value of one of `OPTIONAL_COLUMNS` for a document."""
    if name == "sampled_tokens":
        return b"" if document.drawn is None else document.drawn.to_bytes()
    return getattr(document, name)


def optional_columns(header: dict[str, Any]) -> list[str]:
    """Return which of `OPTIONAL_COLUMNS` the shards of a header have."""
    return list(header.get("data", {}).get("optional_columns", []))


class Shard:
    """An open shard, memory-mapped.

    Args:
        path: where it lies on this machine.
        name: how messages call it.
        find_ranks: gives the ranks that its header names; left out, they are read from beside it.

    Raises:
        Damaged: it is no shard, or cut short.
    """

    def __init__(self, path: Path, name: str = "", find_ranks: FindRanks | None = None) -> None:
        self.name, self._path = name or str(path), path
        self._find_ranks = find_ranks or (lambda file: ranks_beside(path, file))
        try:
            with pa.memory_map(str(path)) as source:
                self._buffer = source.read_buffer()
        except (pa.ArrowException, ValueError, OSError) as wrong:
            raise Damaged(f"a shard of this cache cannot be read: {wrong}", where=self.name) from None
        self._batch, seal = only_batch(self._buffer, self.name, full=False)
        with self._refusing("its header is not that of a shard"):
            metadata = self._batch.schema.metadata or {}
            self.header: dict[str, Any] = dict(json.loads(metadata[b"xtk"]))
            self._options = dict(self.header["codec"])
            self._tables = base64.b64decode(metadata[b"codec_tables"], validate=True)
            stated = dict(json.loads(seal[b"xtk"]))
            self.place = Place(*(int(stated[name]) for name in ("shard", "first_row", "rows")))
            schema = schema_of(self.header)
        check_columns(self._batch, schema, self.name, frozenset({"conversation"}))
        with self._refusing("offsets lead out of its columns"):
            self._columns = _Columns(self._batch)
        self._checksums = self._batch.column("checksum").to_numpy()

    def __len__(self) -> int:
        return int(self._batch.num_rows)

    @property
    def size(self) -> int:
        """Its bytes."""
        return len(self._buffer)

    @cached_property
    def codec(self) -> Codec:
        """What unpacks its tokens and signals."""
        with self._refusing("its codec tables cannot be read"):
            options = self._options
            kind: type[Codec] = lookup(CODECS, options["name"], "codec")
            ranks = self._find_ranks(options["vocabulary_order"]) if kind.needs_ranks else None
            return kind(options, self._tables, ranks)

    @cached_property
    def width(self) -> int:
        """The size of the teacher's vocabulary: all token ids are below."""
        with self._refusing("its header does not state the width of the teacher's vocabulary"):
            return int(self.header.get("teacher", {}).get("width", np.iinfo(np.int32).max))

    @contextlib.contextmanager
    def _refusing(self, what: str, row: int | None = None) -> Iterator[None]:
        """Turn whatever damaged content leads to into one sentence that names the shard."""
        where = self.name if row is None else f"{self.name}, row {row}"
        try:
            yield
        except Damaged as wrong:
            raise wrong if wrong.where else Damaged(wrong.what, where=where, hint=wrong.hint) from None
        except XtkError:
            raise
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as wrong:
            raise Damaged(f"this shard is corrupt: {what} ({type(wrong).__name__})", where=where) from None

    def figures(self) -> dict[str, int]:
        """Return rows, positions, tokens and entries."""
        columns = self._columns
        return {
            "rows": len(self),
            "positions": int(columns.positions.sum()),
            "tokens": int(columns.length.sum()),
            "entries": int(columns.entries.sum()),
        }

    def information(self) -> dict[str, float]:
        """Return sums over its positions, nats: of the entropies, and of the divergence that its codec adds."""
        sums = {
            name: self._batch.column(name).to_numpy().sum(dtype=np.float64) for name in ("entropy", "quantization_kl")
        }
        return {name: float(f"{found:.6g}") for name, found in sums.items()}

    def parts(self) -> dict[str, int]:
        """Return the bytes of each part of PAYLOAD, and of everything else under "rest"."""
        sizes = [stop - start for start, stop in self.payload()]
        return {**dict(zip(PAYLOAD, sizes, strict=True)), "rest": len(self._buffer) - sum(sizes)}

    def payload(self) -> list[tuple[int, int]]:
        """Return the byte ranges `[start, stop)` of texts, tokens and signals in the file."""
        texts = self._batch.column("segments").values.field("text").buffers()[2]
        buffers = [texts, *(self._batch.column(name).buffers()[2] for name in BLOBS)]
        base = self._buffer.address
        return [(0, 0) if not held or not held.size else (held.address - base, held.address - base + held.size)
                for held in buffers]  # fmt: skip

    def frame_checksum(self) -> str:
        """Return "sha256:..." of all bytes outside of the payload, the checksums of rows among them."""
        return frame_checksum(self._buffer, self.payload())

    def row(self, number: int, draw: int | None = 0) -> StoredRow:
        """Return one document whose checksum matches.

        Raises:
            Damaged: names shard and row.
        """
        self._check_size()
        if not self.is_whole(number):
            raise _altered(self.name, number)
        return StoredRow(self, number, draw)

    def _check_size(self) -> None:
        """Refuse a file that was cut short after it was mapped.

        Touching a page of the map that the file no longer has ends the process with SIGBUS, which Python cannot
        catch: a file that shrinks between this check and the read still ends it. A file that was removed or replaced
        is no danger, since the map keeps the old one.

        Raises:
            Damaged: names the shard.
        """
        try:
            size = os.stat(self._path).st_size  # noqa: PTH116 (called for every row)
        except OSError:
            return
        if size < len(self._buffer):
            raise Damaged(
                f"this shard has {size} bytes now and had {len(self._buffer)} when it was opened: "
                "another program truncated it",
                where=self.name,
            )

    def is_whole(self, number: int) -> bool:
        """Say whether a row is what was written."""
        try:
            return self._columns.checksum(number) == int(self._checksums[number])
        except (ValueError, IndexError, OverflowError):  # offsets that lead nowhere
            return False

    def write_rows(self, path: Path, start: int, stop: int) -> None:
        """Write the rows `[start, stop)` as a separate shard: their bytes and checksums stay as they are.

        Its place is that of the rows in the cache that they were written for, so that the bytes do not depend on
        where the new shard goes.

        Raises:
            Damaged: names shard and row.
        """
        for number in range(start, stop):
            if not self.is_whole(number):
                raise _altered(self.name, number)
        place = Place(self.place.shard, self.place.first_row + start, stop - start)
        _write_sealed(path, self._batch.slice(start, stop - start), place)

    def damaged_rows(self) -> Iterator[int]:
        """Yield the rows that are not what was written."""
        return (number for number in range(len(self)) if not self.is_whole(number))

    def text_bytes(self) -> NDArray[np.int64]:
        """Return int64 [rows], how many bytes each text has."""
        return self._columns.text_bytes()

    def conversations(self) -> NDArray[np.bool_]:
        """Return bool [rows], which of them are conversations."""
        found: NDArray[np.bool_] = self._batch.column("conversation").is_valid().to_numpy(zero_copy_only=False)
        return found

    def weights(self) -> NDArray[np.float64]:
        """Return float64 [rows], how much each document counts."""
        return self._columns.weights

    def routes(self) -> list[str]:
        """Return [rows], the name of the teacher that each document names."""
        return [self._columns.route(number) for number in range(len(self))]

    def fingerprints(self) -> NDArray[np.uint64]:
        """Return uint64 [rows], hashes of what students read: equal for equal documents, whatever the teacher."""
        return np.array([self._columns.fingerprint(number) for number in range(len(self))], np.uint64)


def _altered(name: str, row: int) -> Damaged:
    return Damaged("a row of this cache does not match its checksum", where=f"{name}, row {row}")


def ranks_beside(path: Path, file: str) -> Ranks:
    """Return the vocabulary order in the folder of a shard.

    Raises:
        Damaged: it is missing or corrupt.
    """
    place = path.parent / file
    try:
        return Ranks.read(
            file, read_member(path.parent, member(file, (VOCABULARY_ORDER,), where=str(path)), FILE_BYTES), str(place)
        )
    except FileNotFoundError:
        raise Damaged("the vocabulary order file of this shard is missing", where=str(place)) from None


def frame_checksum(content: Any, payload: Sequence[tuple[int, int]]) -> str:
    """Return "sha256:..." of the bytes of a shard that lie outside of some ranges."""
    view, hashed, at = memoryview(content), hashlib.sha256(), 0
    for start, stop in sorted((start, stop) for start, stop in payload if stop > start):
        hashed.update(view[at:start])
        at = stop
    hashed.update(view[at:])
    return "sha256:" + hashed.hexdigest()


class StoredRow:
    """One document of a cache; what is not asked for is not unpacked."""

    def __init__(self, shard: Shard, number: int, draw: int | None) -> None:
        self._shard, self._columns, self._number, self._draw = shard, shard._columns, number, draw

    @cached_property
    def document(self) -> Document:
        """Its text and which of it is trained."""
        with self._shard._refusing("its document cannot be read", self._number):
            segments = self._columns.segments(self._number)
            written = str(self._columns.blob("conversation", self._number), "utf-8")
            return Document(
                segments,
                ends=bool(self._columns.ends[self._number]),
                conversation=_conversation_of(written, [segment.text for segment in segments]),
                weight=float(self._columns.weights[self._number]),
                route=self._columns.route(self._number),
                drawn=self._columns.drawn(self._number),
            )

    @cached_property
    def length(self) -> int:
        """T, how many tokens the teacher read."""
        length = int(self._columns.length[self._number])
        if not 0 <= length <= MAX_DOCUMENT_TOKENS:
            raise self._corrupt(f"a document of {length} tokens")
        return length

    @cached_property
    def positions(self) -> NDArray[np.int32]:
        """int32 [P], the trained tokens."""
        edges = self._columns.list("trained_ranges", self._number)
        starts, stops = edges[::2].astype(np.int64), edges[1::2].astype(np.int64)
        if len(starts) != len(stops) or (
            len(edges)
            and not (edges[0] >= 0 and stops[-1] <= self.length and (np.diff(edges.astype(np.int64)) > 0).all())
        ):
            raise self._corrupt("ranges of trained tokens outside of the document")
        if int((stops - starts).sum()) != int(self._columns.positions[self._number]):
            raise self._corrupt("ranges of trained tokens that are not as many as stated")
        runs = [
            np.arange(start, stop, dtype=np.int32) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)
        ]
        return runs[0] if len(runs) == 1 else np.concatenate([np.zeros(0, np.int32), *runs])

    @cached_property
    def tokens(self) -> TokenSequence:
        """What the teacher read."""
        length, number = self.length, self._number
        with self._shard._refusing("its tokens cannot be read", number):
            ids, ends = self._shard.codec.tokens(self._columns.blob("tokens", number), length)
            pieces = self._columns.list("byte_ranges", number).reshape(-1, 3)
            closers = self._columns.list("segment_end_tokens", number)
        self._check_ids(ids)
        size = int(self._columns.text_bytes()[number])
        if not (
            _within(ends, 0, size)
            and _within(pieces[:, :2], 0, length)
            and _within(pieces[:, 2], 0, size)
            and _within(closers, -1, length - 1)
        ):
            raise self._corrupt("positions of tokens or bytes outside of the document")
        trained = np.zeros(length, np.bool_)
        trained[self.positions] = True
        return TokenSequence(ids, ends, trained, pieces, closers)

    @cached_property
    def signal(self) -> Signal:
        """What the teacher said, with one set of draws or none."""
        ids, positions = self.tokens.ids, self.positions
        with self._shard._refusing("its log-probabilities cannot be read", self._number):
            packed = self._columns.blob("teacher_logprobs", self._number)
            signal = self._shard.codec.signal(packed, ids, positions, self._draw)
        self._check_ids(signal.ids)
        return signal

    @cached_property
    def scores(self) -> Scores:
        """Everything that was kept of what the teacher said."""
        ids, positions = self.tokens.ids, self.positions
        with self._shard._refusing("its log-probabilities cannot be read", self._number):
            packed = self._columns.blob("teacher_logprobs", self._number)
            scores = self._shard.codec.scores(packed, ids, positions)
        self._check_ids(scores.ids)
        self._check_ids(scores.drawn_ids)
        return scores

    def _check_ids(self, ids: NDArray[np.int32]) -> None:
        width = self._shard.width
        if not _within(ids, 0, width - 1):
            wrong = int(ids.min()) if ids.min() < 0 else int(ids.max())
            raise self._corrupt(f"the token id {wrong}, and the teacher's vocabulary has {width:,} ids")

    def _corrupt(self, what: str) -> Damaged:
        return Damaged(f"this shard is corrupt: it states {what}", where=f"{self._shard.name}, row {self._number}")


def _within(numbers: NDArray[np.int32], lowest: int, highest: int) -> bool:
    return not numbers.size or (int(numbers.min()) >= lowest and int(numbers.max()) <= highest)


class _Columns:
    """The columns of a shard as flat arrays over its memory."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        segments = batch.column("segments")
        parts = segments.values
        first = segments.offsets.to_numpy()
        self._trains = _bytes_of(np.asarray(parts.field("train").to_numpy(zero_copy_only=False), np.bool_))
        role_ends, self._roles = _string_column(parts.field("role"))
        text_ends, self._texts = _string_column(parts.field("text"))
        role_sizes, text_sizes = (_bytes_of(np.diff(ends)) for ends in (role_ends, text_ends))
        self._role_ends, self._text_ends = role_ends, text_ends
        lists = [batch.column(name) for name in LISTS]
        blobs = [_string_column(batch.column(name)) for name in BYTES]
        self._lists = {name: column.values.to_numpy() for name, column in zip(LISTS, lists, strict=True)}
        self._blobs = {name: values for name, (_, values) in zip(BYTES, blobs, strict=True)}
        self.ends = batch.column("complete").to_numpy(zero_copy_only=False)
        self.length, self.positions, self.entries = (
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
        # [rows, 2 x 9]: where each part of a row begins and ends.
        self._bounds = np.column_stack(
            [part for at in [*edges, *(at for at, _ in blobs)] for part in (at[:-1], at[1:])]
        )
        sizes = np.diff(self._bounds.reshape(-1, 9, 2), axis=2)[:, :, 0]
        self._text_bytes: NDArray[np.int64] = sizes[:, 2].astype(np.int64)
        numbers = [self.length, self.positions, self.entries, self.ends, sizes[:, 0], *sizes[:, 3:].T]
        self._numbers = _bytes_of(np.column_stack(numbers).astype("<i4"))
        self._size_of_numbers = 4 * len(numbers)
        # What a checksum is of, in its order, and in bytes [rows, 2 x 11] which of it a row has.
        counted, lists = self._bounds.astype(np.int64), [_bytes_of(values) for values in self._lists.values()]
        flags, roles, texts, *rest = np.split(counted, 9, axis=1)
        self._hashed = [self._trains, role_sizes, self._roles, text_sizes, self._texts, *lists, *self._blobs.values()]
        rest = [4 * part for part in rest[: len(lists)]] + rest[len(lists) :]
        self._hashed_bounds = np.column_stack([flags, 4 * flags, roles, 4 * flags, texts, *rest])
        there = set(batch.schema.names)
        self._has_weights = "weight" in there
        self.weights = batch.column("weight").to_numpy() if self._has_weights else np.ones(batch.num_rows)
        names = [name for name in ("route", "sampled_tokens") if name in there]
        self._beside = {name: _string_column(batch.column(name)) for name in names}
        for at, values in self._beside.values():
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
        return str(self._of("route", number), "utf-8")

    def drawn(self, number: int) -> DrawnTokens | None:
        content = self._of("sampled_tokens", number)
        return DrawnTokens.of_bytes(bytes(content)) if len(content) else None

    def _of(self, name: str, number: int) -> memoryview:
        if name not in self._beside:
            return memoryview(b"")
        ends, values = self._beside[name]
        return values[ends[number] : ends[number + 1]]

    def text_bytes(self) -> NDArray[np.int64]:
        return self._text_bytes

    def list(self, name: str, number: int) -> NDArray[np.int32]:
        at = 6 + 2 * LISTS.index(name)
        piece: NDArray[np.int32] = self._lists[name][self._bounds[number, at] : self._bounds[number, at + 1]]
        return piece

    def blob(self, name: str, number: int) -> memoryview:
        at = 12 + 2 * BYTES.index(name)
        return self._blobs[name][self._bounds[number, at] : self._bounds[number, at + 1]]

    def checksum(self, number: int) -> int:
        """Return xxh3_64 of a row: its numbers, then its strings and lists, each with their lengths before."""
        hashed = xxhash.xxh3_64(self._numbers[number * self._size_of_numbers : (number + 1) * self._size_of_numbers])
        self._hash_parts(hashed, number, len(self._hashed))
        if self._has_weights:
            hashed.update(self.weights[number].tobytes())
        for name in self._beside:
            hashed.update(self._of(name, number))
        return int(hashed.intdigest())

    def fingerprint(self, number: int) -> int:
        """Return xxh3_64 of the segments, of whether the text ends, and of the conversation."""
        hashed = xxhash.xxh3_64(b"\1" if self.ends[number] else b"\0")
        self._hash_parts(hashed, number, SEGMENT_PARTS)
        hashed.update(self.blob("conversation", number))
        hashed.update(self._of("sampled_tokens", number))
        return int(hashed.intdigest())

    def _hash_parts(self, hashed: Any, number: int, count: int) -> None:
        """Hash the first parts of a row."""
        bounds = self._hashed_bounds[number].tolist()
        for part, start, stop in zip(self._hashed[:count], bounds[::2], bounds[1::2], strict=False):
            if start < stop:
                hashed.update(part[start:stop])


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def _check_offsets(offsets: NDArray[np.int32], size: int) -> None:
    """Refuse offsets that fall, or lead out of the `size` values that they are of.

    Raises:
        ValueError: they do.
    """
    if offsets[0] < 0 or offsets[-1] > size or (offsets[1:] < offsets[:-1]).any():
        raise ValueError("offsets")


def _string_column(array: pa.Array) -> tuple[NDArray[np.int32], memoryview]:
    """Return offsets int32 [n + 1] and bytes of a column of strings or blobs."""
    _, offsets, values = array.buffers()
    if offsets is None or not len(array):
        return np.zeros(1, np.int32), memoryview(b"")
    ends = np.frombuffer(offsets, np.int32, len(array) + 1, array.offset * 4)
    return ends, memoryview(b"") if values is None else memoryview(values)


def _lists(parts: list[NDArray[np.int32]]) -> pa.ListArray:
    offsets = np.cumsum([0] + [part.size for part in parts])
    flat = np.concatenate([np.zeros(0, np.int32), *(part.reshape(-1) for part in parts)])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(flat, pa.int32()))


def _blobs(parts: list[bytes]) -> pa.Array:
    if sum(map(len, parts)) > np.iinfo(np.int32).max:
        raise XtkError("a shard holds more than 2 GiB in one column", hint="a smaller --shard-tokens")
    return pa.array(parts, pa.binary())


def _runs(positions: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return rising numbers as ranges, `[start, stop)` one after the other."""
    if not len(positions):
        return np.zeros(0, np.int32)
    breaks = np.flatnonzero(np.diff(positions) != 1)
    starts = positions[np.concatenate([[0], breaks + 1])]
    stops = positions[np.concatenate([breaks, [len(positions) - 1]])] + 1
    return np.column_stack([starts, stops]).astype(np.int32)


def _json_of_conversation(document: Document) -> str | None:
    """Return the messages of a conversation without their contents, which are the document's segments."""
    conversation = document.conversation
    if conversation is None:
        return None
    bare = [{key: value for key, value in message.items() if key != "content"} for message in conversation.messages]
    # In the order of the data: templates print tools and calls as they come.
    return json.dumps({"messages": bare, "tools": conversation.tools}, ensure_ascii=False)


def _conversation_of(written: str, texts: Sequence[str]) -> Conversation | None:
    if not written:
        return None
    content = json.loads(written)
    messages = ({**bare, "content": text} for bare, text in zip(content["messages"], texts, strict=True))
    tools = content["tools"]
    return Conversation(tuple(messages), None if tools is None else tuple(tools))
