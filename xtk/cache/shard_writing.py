"""Writing of the shards of a teacher cache, and the checksum of the whole file; see docs/reference/artifacts.md."""

from __future__ import annotations

import base64
import json
import math
import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from xtk.cache.codec.shard_codec_registry import CODECS, Codec
from xtk.cache.columns import OPTIONAL_COLUMNS, SHARD_SCHEMA, ShardColumns, optional_columns, shard_schema
from xtk.cache.manifest import VERSION
from xtk.cache.teacher_document import TeacherDocument
from xtk.cache.teacher_logprobs import StoredLogprobs, kl_on_stored_ids
from xtk.cache.token_ids_by_frequency import VocabularyOrder
from xtk.errors import CorruptError, XtkError
from xtk.files.arrow_validation import RESTORE_HINT
from xtk.files.atomic_files import canonical_json
from xtk.name_registry import load_registered
from xtk.text.chat.parts import CONTENT, REASONING_KEY
from xtk.text.document import Document
from xtk.text.token_sequence import TokenSequence

# The custom metadata of the record batch, canonical JSON, begins with this. A JSON string cannot contain it unescaped,
# so that its first occurrence in a file is the checksum, whatever the header or the texts contain.
CHECKSUM_PREFIX = b'{"checksum":"xxh3_128:'
CHECKSUM_DIGITS = 32
TEXT_KEYS = ("text_bits", "text_bytes")


@dataclass(frozen=True)
class ShardPosition:
    """Position of a shard in the cache that it was written for."""

    shard: int  # number of the shard, from 0
    first_document: int  # number of documents in the shards before it
    documents: int  # number of documents in it


def write_shard(
    path: Path,
    header: dict[str, Any],  # identity of teacher, data and options; `header["codec"]` selects the codec
    position: ShardPosition,
    documents: Sequence[TeacherDocument],
    vocabulary_order: VocabularyOrder | None = None,  # of the cache, if the codec needs it
) -> None:
    """Write a shard, with its position in the cache and a checksum of the whole file."""
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
    plain = ShardColumns(unsigned)
    checksums = np.array([plain.checksum(number) for number in range(len(documents))], np.uint64)
    schema = shard_schema(header).with_metadata(
        {"xtk": canonical_json(header), "codec_tables": base64.b64encode(tables).decode()}
    )
    batch = pa.RecordBatch.from_arrays([*columns.values(), pa.array(checksums, pa.uint64())], schema=schema)
    write_sealed(path, batch, position, count_text_bits((row.tokens, row.stored_logprobs) for row in documents))


def count_text_bits(documents: Iterable[tuple[TokenSequence, StoredLogprobs]]) -> dict[str, Any]:
    """Return what the teacher's bits per byte of some documents follow from.

    Returns:
        `text_bits`: the sum of -log2 of the probabilities of the scored tokens with text; None if one of them is 0.
        `text_bytes`: the bytes of the text in these tokens.
    """
    nats, size = 0.0, 0
    for tokens, logprobs in documents:
        nats -= float(logprobs.observed_logprobs[tokens.text_mask[logprobs.positions]].sum(dtype=np.float64))
        size += int(tokens.text_sizes[logprobs.positions].sum())
    bits = float(f"{nats / math.log(2):.8g}") if math.isfinite(nats) else None
    return dict(zip(TEXT_KEYS, (bits, size), strict=True))


def write_sealed(path: Path, batch: pa.RecordBatch, place: ShardPosition, text: dict[str, Any]) -> None:
    """Write an Arrow file, then its checksum into the custom metadata; `text`: from `count_text_bits`."""
    position = {"version": VERSION, **asdict(place)}
    seal = canonical_json({"checksum": "xxh3_128:" + "0" * CHECKSUM_DIGITS, **position, **text})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch, custom_metadata={"xtk": seal})
    with path.open("r+b") as stream:
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            at = content.find(CHECKSUM_PREFIX) + len(CHECKSUM_PREFIX)
            checksum = _checksum_around(content, at)
        stream.seek(at)  # not through the map, where a full disk raises SIGBUS instead of an error
        stream.write(checksum.encode())


def _checksum_around(content: mmap.mmap, at: int) -> str:
    """Return the checksum of a file without the bytes of the stored checksum, which begins at `at`."""
    with memoryview(content) as view:
        hashed = xxhash.xxh3_128(view[:at])
        hashed.update(view[at + CHECKSUM_DIGITS :])
    return hashed.hexdigest()


def has_shard_checksum(path: Path) -> bool:
    """Return whether a file contains the place of a shard's checksum; other Arrow files do not."""
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(CHECKSUM_PREFIX) >= 0


def check_file_checksum(path: Path, where: str) -> None:
    """Check every byte of a shard against the checksum in the file, before anything in it is parsed.

    Finished caches do not need this: their manifest has checksums without the documents, and each document has its
    own, so that reading one document does not read the others.
    """
    with path.open("rb") as stream:
        if not os.fstat(stream.fileno()).st_size:  # cannot be mapped
            raise CorruptError("this shard of a teacher cache is empty (0 bytes)", where=where, hint=RESTORE_HINT)
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            at = content.find(CHECKSUM_PREFIX)
            digits = content[at + len(CHECKSUM_PREFIX) :][:CHECKSUM_DIGITS] if at >= 0 else b""
            if at >= 0 and _checksum_around(content, at + len(CHECKSUM_PREFIX)).encode() == digits:
                return
    raise CorruptError("this shard of a teacher cache does not match its checksum", where=where, hint=RESTORE_HINT)


def _optional_value(document: Document, name: str) -> Any:
    """Return the value of one of `OPTIONAL_COLUMNS` for a document."""
    if name == "sampled_tokens":
        return b"" if document.sampled_tokens is None else document.sampled_tokens.to_bytes()
    return document.teacher_name if name == "route" else document.weight


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
    """Return the messages and tools of a conversation as JSON, without contents and reasoning, which are segments."""
    conversation = document.conversation
    if conversation is None:
        return None
    bare = [
        {key: "" if key == REASONING_KEY else value for key, value in message.items() if key != CONTENT}
        for message in conversation.messages
    ]
    # Keys keep the order of the data: templates print tools and calls in this order.
    return json.dumps({"messages": bare, "tools": conversation.tools}, ensure_ascii=False)
