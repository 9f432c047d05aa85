"""A shard: one Arrow file of a teacher cache, a row a document. docs/reference/artifacts.md describes it."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from xtk.artifacts.cache_manifest import RANKS
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
        ("ends", pa.bool_()),
        ("conversation", pa.string()),
        ("length", pa.int32()),
        ("positions", pa.int32()),
        ("entries", pa.int32()),
        ("entropy", pa.float32()),
        ("codec_kl", pa.float32()),
        ("trained", pa.list_(pa.int32())),
        ("pieces", pa.list_(pa.int32())),
        ("closers", pa.list_(pa.int32())),
        ("tokens", pa.binary()),
        ("signal", pa.binary()),
        ("checksum", pa.uint64()),
    ]
)
# Of the documents of caches that were asked for them: `header["data"]["asked"]`.
ASKED_COLUMNS = {"weight": pa.float64(), "route": pa.string(), "drawn": pa.binary()}
LISTS = ("trained", "pieces", "closers")
BLOBS = ("tokens", "signal")
BYTES = ("conversation", *BLOBS)
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


def write_shard(path: Path, header: dict[str, Any], rows: Sequence[Row], ranks: Ranks | None = None) -> None:
    """Write a shard.

    Args:
        path: a new file.
        header: identity of teacher, data and options; `header["codec"]` says how it is packed.
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
        "ends": pa.array([row.document.ends for row in rows], pa.bool_()),
        "conversation": pa.array([_json_of_conversation(row.document) for row in rows], pa.string()),
        "length": pa.array([len(row.tokens) for row in rows], pa.int32()),
        "positions": pa.array([len(row.scores) for row in rows], pa.int32()),
        "entries": pa.array([len(row.scores.ids) + len(row.scores.drawn_ids) for row in rows], pa.int32()),
        "entropy": pa.array([row.scores.entropy.sum(dtype=np.float64) for row in rows], pa.float32()),
        "codec_kl": pa.array(added, pa.float32()),
        "trained": _lists([_runs(row.scores.positions) for row in rows]),
        "pieces": _lists([row.tokens.pieces for row in rows]),
        "closers": _lists([row.tokens.closers for row in rows]),
        "tokens": _blobs(tokens),
        "signal": _blobs(signals),
        **{
            name: pa.array([_asked(row.document, name) for row in rows], ASKED_COLUMNS[name])
            for name in asked_of(header)
        },
    }
    unsigned = pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))
    plain = _Columns(unsigned)
    checksums = np.array([plain.checksum(number) for number in range(len(rows))], np.uint64)
    metadata = {"xtk": canonical_json(header), "tables": base64.b64encode(tables).decode()}
    *fields, last = SCHEMA
    asked = [pa.field(name, ASKED_COLUMNS[name]) for name in asked_of(header)]
    schema = pa.schema([*fields, *asked, last], metadata)
    batch = pa.RecordBatch.from_arrays([*columns.values(), pa.array(checksums, pa.uint64())], schema=schema)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(batch)


def _asked(document: Document, name: str) -> Any:
    """Return what one of `ASKED_COLUMNS` holds of a document."""
    if name == "drawn":
        return b"" if document.drawn is None else document.drawn.to_bytes()
    return getattr(document, name)


def asked_of(header: dict[str, Any]) -> list[str]:
    """Return which of `ASKED_COLUMNS` the shards of a header have."""
    return list(header.get("data", {}).get("asked", []))


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
        self.name = name or str(path)
        self._find_ranks = find_ranks or (lambda file: ranks_beside(path, file))
        try:
            with pa.memory_map(str(path)) as source:
                self._buffer = source.read_buffer()
            self._batch = pa.ipc.open_file(pa.BufferReader(self._buffer)).get_batch(0)
            metadata = self._batch.schema.metadata or {}
            self.header: dict[str, Any] = dict(json.loads(metadata[b"xtk"]))
            self._tables = base64.b64decode(metadata[b"tables"])
            self._columns = _Columns(self._batch)
            self._checksums = self._batch.column("checksum").to_numpy()
        except (pa.ArrowException, KeyError, ValueError, OSError, IndexError) as wrong:
            raise Damaged(f"a shard of this cache cannot be read: {wrong}", where=self.name) from None

    def __len__(self) -> int:
        return int(self._batch.num_rows)

    @property
    def size(self) -> int:
        """Its bytes."""
        return len(self._buffer)

    @cached_property
    def codec(self) -> Codec:
        """What unpacks its tokens and signals."""
        options = self.header["codec"]
        kind: type[Codec] = lookup(CODECS, options["name"], "codec")
        return kind(options, self._tables, self._find_ranks(options["ranks"]) if kind.needs_ranks else None)

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
        sums = {name: self._batch.column(name).to_numpy().sum(dtype=np.float64) for name in ("entropy", "codec_kl")}
        return {name: float(f"{found:.6g}") for name, found in sums.items()}

    def parts(self) -> dict[str, int]:
        """Return the bytes of text, tokens, signal and everything else."""
        text, tokens, signal = (stop - start for start, stop in self.payload())
        return {"text": text, "tokens": tokens, "signal": signal, "rest": len(self._buffer) - text - tokens - signal}

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
        """Return one document, once its checksum is seen to fit.

        Raises:
            Damaged: names shard and row.
        """
        if not self.is_whole(number):
            raise _altered(self.name, number)
        return StoredRow(self, number, draw)

    def is_whole(self, number: int) -> bool:
        """Say whether a row is what was written."""
        try:
            return self._columns.checksum(number) == int(self._checksums[number])
        except (ValueError, IndexError, OverflowError):  # offsets that lead nowhere
            return False

    def write_rows(self, path: Path, start: int, stop: int) -> None:
        """Write the rows `[start, stop)` as a shard of their own, with the bytes and checksums that they have.

        Raises:
            Damaged: names shard and row.
        """
        for number in range(start, stop):
            if not self.is_whole(number):
                raise _altered(self.name, number)
        batch = self._batch.slice(start, stop - start)
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, self._batch.schema) as writer:
            writer.write_batch(batch)

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
    return Damaged("a row of this cache was altered: its checksum does not fit", where=f"{name}, row {row}")


def ranks_beside(path: Path, file: str) -> Ranks:
    """Return the ranks that lie beside a shard.

    Raises:
        Damaged: they do not, or were altered.
    """
    place = path.parent / file
    try:
        return Ranks.read(
            file, read_member(path.parent, member(file, (RANKS,), where=str(path)), FILE_BYTES), str(place)
        )
    except FileNotFoundError:
        raise Damaged("the ranks that this shard needs do not lie beside it", where=str(place)) from None


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
    def positions(self) -> NDArray[np.int32]:
        """int32 [P], the trained tokens."""
        edges = self._columns.list("trained", self._number).tolist()
        runs = [np.arange(start, stop, dtype=np.int32) for start, stop in zip(edges[::2], edges[1::2], strict=True)]
        return runs[0] if len(runs) == 1 else np.concatenate([np.zeros(0, np.int32), *runs])

    @cached_property
    def tokens(self) -> TokenSequence:
        """What the teacher read."""
        length = int(self._columns.length[self._number])
        ids, ends = self._shard.codec.tokens(self._columns.blob("tokens", self._number), length)
        trained = np.zeros(length, np.bool_)
        trained[self.positions] = True
        return TokenSequence(
            ids,
            ends,
            trained,
            self._columns.list("pieces", self._number).reshape(-1, 3),
            self._columns.list("closers", self._number),
        )

    @cached_property
    def signal(self) -> Signal:
        """What the teacher said, with one set of draws or none."""
        packed = self._columns.blob("signal", self._number)
        return self._shard.codec.signal(packed, self.tokens.ids, self.positions, self._draw)

    @cached_property
    def scores(self) -> Scores:
        """Everything that was kept of what the teacher said."""
        return self._shard.codec.scores(self._columns.blob("signal", self._number), self.tokens.ids, self.positions)


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
        self.ends = batch.column("ends").to_numpy(zero_copy_only=False)
        self.length, self.positions, self.entries = (
            batch.column(name).to_numpy() for name in ("length", "positions", "entries")
        )
        edges = [first, role_ends[first], text_ends[first], *(column.offsets.to_numpy() for column in lists)]
        # [rows, 2 x 9]: where each part of a row begins and ends.
        self._bounds = np.column_stack(
            [part for at in [*edges, *(at for at, _ in blobs)] for part in (at[:-1], at[1:])]
        )
        sizes = np.diff(self._bounds.reshape(-1, 9, 2), axis=2)[:, :, 0]
        numbers = [self.length, self.positions, self.entries, self.ends, sizes[:, 0], *sizes[:, 3:].T]
        self._numbers = _bytes_of(np.column_stack(numbers).astype("<i4"))
        self._size_of_numbers = 4 * len(numbers)
        # What a checksum is of, in its order, and in bytes [rows, 2 x 11] which of it a row has.
        counted, lists = self._bounds.astype(np.int64), [_bytes_of(values) for values in self._lists.values()]
        flags, roles, texts, *rest = np.split(counted, 9, axis=1)
        self._hashed = [self._trains, role_sizes, self._roles, text_sizes, self._texts, *lists, *self._blobs.values()]
        rest = [4 * part for part in rest[: len(lists)]] + rest[len(lists) :]
        self._hashed_bounds = np.column_stack([flags, 4 * flags, roles, 4 * flags, texts, *rest])
        asked = set(batch.schema.names)
        self._asked = [name for name in ASKED_COLUMNS if name in asked]
        self.weights = batch.column("weight").to_numpy() if "weight" in asked else np.ones(batch.num_rows)
        names = [name for name in ("route", "drawn") if name in asked]
        self._beside = {name: _string_column(batch.column(name)) for name in names}

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
        content = self._of("drawn", number)
        return DrawnTokens.of_bytes(bytes(content)) if len(content) else None

    def _of(self, name: str, number: int) -> memoryview:
        if name not in self._beside:
            return memoryview(b"")
        ends, values = self._beside[name]
        return values[ends[number] : ends[number + 1]]

    def text_bytes(self) -> NDArray[np.int64]:
        sizes: NDArray[np.int64] = (self._bounds[:, 5] - self._bounds[:, 4]).astype(np.int64)
        return sizes

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
        if "weight" in self._asked:
            hashed.update(self.weights[number].tobytes())
        for name in self._beside:
            hashed.update(self._of(name, number))
        return int(hashed.intdigest())

    def fingerprint(self, number: int) -> int:
        """Return xxh3_64 of the segments, of whether the text ends, and of the conversation."""
        hashed = xxhash.xxh3_64(b"\1" if self.ends[number] else b"\0")
        self._hash_parts(hashed, number, SEGMENT_PARTS)
        hashed.update(self.blob("conversation", number))
        hashed.update(self._of("drawn", number))
        return int(hashed.intdigest())

    def _hash_parts(self, hashed: Any, number: int, count: int) -> None:
        """Hash the first parts of a row."""
        bounds = self._hashed_bounds[number].tolist()
        for part, start, stop in zip(self._hashed[:count], bounds[::2], bounds[1::2], strict=False):
            if start < stop:
                hashed.update(part[start:stop])


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))  # type: ignore[arg-type]


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
