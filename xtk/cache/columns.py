"""Columns of the shards of a teacher cache: schema, and access without copies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from xtk.text.document import Segment
from xtk.text.document_token_ids import SampledTokens

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
NUM_SEGMENT_PARTS = 5  # train flags, sizes of roles, roles, sizes of texts, texts: the first parts of a checksum


def shard_schema(header: dict[str, Any]) -> pa.Schema:
    """Return the schema of shards with this header, without metadata."""
    *fields, last = SHARD_SCHEMA
    return pa.schema([*fields, *(pa.field(name, OPTIONAL_COLUMNS[name]) for name in optional_columns(header)), last])


def optional_columns(header: dict[str, Any]) -> list[str]:
    """Return the `OPTIONAL_COLUMNS` of shards with this header; for a merged cache, those of any of its shards."""
    data = header.get("data", {})
    if "sources" not in data:
        return list(data.get("optional_columns", []))
    columns = {name for source in data["sources"] for name in source.get("optional_columns", [])}
    return [name for name in OPTIONAL_COLUMNS if name in columns]


class ShardColumns:
    """The columns of a shard as flat arrays without copies. ValueError: offsets of a column are invalid."""

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
        # [rows], whether the text of a row ends with the end of the document.
        self.complete = batch.column("complete").to_numpy(zero_copy_only=False)
        # int32 [rows].
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
        self.text_sizes: NDArray[np.int64] = sizes[:, 2].astype(np.int64)  # [rows], UTF-8 bytes of each text
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
        # float64 [rows], loss weights.
        self.weights = batch.column("weight").to_numpy() if self._has_weights else np.ones(batch.num_rows)
        names = [name for name in ("route", "sampled_tokens") if name in there]
        self._optional_values = {name: _string_column(batch.column(name)) for name in names}
        for at, values in self._optional_values.values():
            _check_offsets(at, len(values))

    def segments(self, number: int) -> tuple[Segment, ...]:
        """Return the segments of a row."""
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
        """Return the teacher name of a row; "" if it has none."""
        return str(self._optional_bytes("route", number), "utf-8")

    def sampled_tokens(self, number: int) -> SampledTokens | None:
        """Return the sampled tokens of a row, if it has them."""
        content = self._optional_bytes("sampled_tokens", number)
        return SampledTokens.from_bytes(bytes(content)) if len(content) else None

    def _optional_bytes(self, name: str, number: int) -> memoryview:
        if name not in self._optional_values:
            return memoryview(b"")
        ends, values = self._optional_values[name]
        return values[ends[number] : ends[number + 1]]

    def list_values(self, name: str, number: int) -> NDArray[np.int32]:
        """Return the values of a row in one of LIST_COLUMNS."""
        at = 6 + 2 * LIST_COLUMNS.index(name)
        piece: NDArray[np.int32] = self._lists[name][self._bounds[number, at] : self._bounds[number, at + 1]]
        return piece

    def blob(self, name: str, number: int) -> memoryview:
        """Return the bytes of a row in one of BYTE_COLUMNS."""
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
    """Raise ValueError for offsets that decrease, or point outside of `size` values."""
    if offsets[0] < 0 or offsets[-1] > size or (offsets[1:] < offsets[:-1]).any():
        raise ValueError("the offsets of a column decrease, or point outside of its values")


def _string_column(array: pa.Array) -> tuple[NDArray[np.int32], memoryview]:
    """Return offsets int32 [n + 1] and bytes of a column of strings or blobs."""
    _, offsets, values = array.buffers()
    if offsets is None or not len(array):
        return np.zeros(1, np.int32), memoryview(b"")
    ends = np.frombuffer(offsets, np.int32, len(array) + 1, array.offset * 4)
    return ends, memoryview(b"") if values is None else memoryview(values)
