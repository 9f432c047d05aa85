"""A process that forges Arrow files, with checksums that match, and reads them.

`python forged_arrow_process.py shards CACHE COUNT SEED` forges shards of a finished cache, `... data FOLDER COUNT SEED`
files of user data. Printed as JSON: how many were refused with a sentence, how many were read, and what else happened.
It is a process so that one that ends itself is seen.
"""

from __future__ import annotations

import base64
import json
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import xxhash

from xtk.artifacts.cache_shard import CacheShard, frame_checksum
from xtk.artifacts.cache_writer import write_cache_manifest
from xtk.artifacts.corpus_reader import Corpus
from xtk.artifacts.shard_writing import CHECKSUM_PREFIX
from xtk.artifacts.storage_folders import LocalFolder
from xtk.artifacts.teacher_cache import TeacherCache
from xtk.errors import XtkError

ABSURD = (-1, -(1 << 31), (1 << 31) - 1, 1 << 30, 1 << 20, 7)
Content = bytearray


def buffers_of(column: pa.Array) -> list[pa.Buffer]:
    """Return the offsets and validity buffers of a column and of all in it."""
    return [held for held in column.buffers() if held is not None and held.size]


def places_of(path: Path) -> list[tuple[int, int]]:
    """Return where the buffers of a shard or a data file begin, and their sizes."""
    with pa.memory_map(str(path)) as source:
        buffer = source.read_buffer()
    batch = pa.ipc.open_file(pa.BufferReader(buffer)).get_batch(0)
    held = [part for column in batch.columns for part in buffers_of(column)]
    return [(part.address - buffer.address, part.size) for part in held]


def forge_offset(content: Content, places: list[tuple[int, int]], draw: np.random.Generator) -> None:
    """Overwrite one number of one buffer."""
    start, size = places[int(draw.integers(len(places)))]
    at = start + 4 * int(draw.integers(max(size // 4, 1)))
    content[at : at + 4] = struct.pack("<i", ABSURD[int(draw.integers(len(ABSURD)))])


def forge_frame(content: Content, payload: list[tuple[int, int]], draw: np.random.Generator) -> None:
    """Overwrite a few bytes outside of the payload: messages, schema, footer."""
    inside = [(start, stop) for start, stop in payload if stop > start]
    for _ in range(int(draw.integers(1, 4))):
        at = int(draw.integers(len(content)))
        while any(start <= at < stop for start, stop in inside):
            at = int(draw.integers(len(content)))
        content[at] = int(draw.integers(256))


def forge_payload(content: Content, payload: list[tuple[int, int]], draw: np.random.Generator) -> None:
    """Overwrite a few packed bytes."""
    start, stop = payload[int(draw.integers(1, 3))]
    for _ in range(int(draw.integers(1, 4))):
        content[int(draw.integers(start, stop))] = int(draw.integers(256))


def forge_tables(content: Content, tables: bytes, draw: np.random.Generator) -> None:
    """Overwrite a few bytes of the codec tables, in the schema of the footer."""
    if not tables:
        return
    forged = bytearray(tables)
    for _ in range(int(draw.integers(1, 4))):
        forged[int(draw.integers(len(forged)))] = int(draw.integers(256))
    at = content.rfind(base64.b64encode(tables))
    content[at : at + len(base64.b64encode(tables))] = base64.b64encode(forged)


def sign(path: Path, content: Content) -> None:
    """Write a forged shard with checksums of rows and of the file that match, as far as it can be parsed."""
    path.write_bytes(content)
    try:
        shard = CacheShard(path)
        column = shard._batch.column("checksum").buffers()[1]
        at = column.address - shard._buffer.address
        sums = [shard.columns.checksum(number) for number in range(len(shard))]
        content[at : at + 8 * len(sums)] = struct.pack(f"<{len(sums)}Q", *sums)
    except (XtkError, ValueError, LookupError, OverflowError, pa.ArrowException, struct.error):
        pass
    at = content.find(CHECKSUM_PREFIX) + len(CHECKSUM_PREFIX)
    digits = xxhash.xxh3_128(bytes(content[:at] + content[at + 32 :])).hexdigest()
    content[at : at + 32] = digits.encode()
    path.write_bytes(content)


def tried(work: Callable[[], Any], found: dict[str, int], where: str) -> None:
    """Count how a call ends."""
    sys.stderr.write(f"{where}\n")  # the last line before a crash
    try:
        work()
        found["read"] += 1
    except XtkError as wrong:
        found["refused" if wrong.where else "tracebacks"] += 1
    except Exception as wrong:
        sys.stderr.write(f"TRACEBACK {where}: {wrong!r}\n")
        found["tracebacks"] += 1


def read_all(folder: Path) -> None:
    """Use everything that a cache has."""
    cache = TeacherCache(folder)
    for row in cache:
        _ = row.document, row.tokens, row.teacher_logprobs, row.stored_logprobs
    cache.text_sizes(), cache.is_conversation(), cache.document_weights(), cache.routes(), cache.fingerprints()


def shards(cache: Path, count: int, draw: np.random.Generator) -> dict[str, int]:
    """Forge shards of a cache."""
    found = {"read": 0, "refused": 0, "tracebacks": 0}
    with tempfile.TemporaryDirectory() as name:
        copy = Path(shutil.copytree(cache, Path(name) / "cache"))
        path = copy / "shard-00000.arrow"
        whole = path.read_bytes()
        shard = CacheShard(path)
        places, payload, tables = places_of(path), shard.payload_ranges(), shard._tables
        del shard
        manifest = TeacherCache(copy).manifest
        forgeries = [
            lambda content: forge_offset(content, places, draw),
            lambda content: forge_frame(content, payload, draw),
            lambda content: forge_payload(content, payload, draw),
            lambda content: forge_tables(content, tables, draw),
        ]
        for number in range(count):
            content = bytearray(whole)
            forgeries[number % len(forgeries)](content)
            path.unlink()
            sign(path, content)
            entry = {**manifest["shards"][0], "checksum": frame_checksum(bytes(content), payload)}
            forged = {**manifest, "shards": [entry, *manifest["shards"][1:]]}
            write_cache_manifest(LocalFolder(copy), {key: forged[key] for key in ("header", "files", "shards")})
            tried(lambda: read_all(copy), found, f"forgery {number}, kind {number % len(forgeries)}")
    return found


def data(folder: Path, count: int, draw: np.random.Generator) -> dict[str, int]:
    """Forge Arrow and Parquet files of texts and conversations."""
    found = {"read": 0, "refused": 0, "tracebacks": 0}
    messages = [[{"role": "user", "content": "12 + 5?"}, {"role": "assistant", "content": "17"}]] * 4
    batches = [
        pa.record_batch({"text": [f"text {number}" * 9 for number in range(4)]}),
        pa.record_batch({"messages": pa.array(messages)}),
        pa.record_batch({"input_ids": pa.array([[1, 2, 3]] * 4), "labels": pa.array([[-100, 2, 3]] * 4)}),
        pa.record_batch({"text": pa.array(["a", "b", "a", "a"]).dictionary_encode()}),
    ]
    for number in range(count):
        batch, kind = batches[number % len(batches)], ("file", "stream", "parquet")[number % 3]
        path = folder / f"{number}.{'parquet' if kind == 'parquet' else 'arrow'}"
        if kind == "parquet":
            pyarrow.parquet.write_table(pa.table(batch), path)
        else:
            new = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
            with pa.OSFile(str(path), "wb") as sink, new(sink, batch.schema) as writer:
                writer.write_batch(batch)
        content = bytearray(path.read_bytes())
        if kind == "file" and number % 2:
            forge_offset(content, places_of(path), draw)
        else:
            for _ in range(int(draw.integers(1, 4))):
                content[int(draw.integers(len(content)))] = int(draw.integers(256))
        path.unlink()
        path.write_bytes(content)
        tried(lambda path=path: list(Corpus([str(path)])), found, f"{path.name}, {kind}")
        path.unlink()
    return found


if __name__ == "__main__":
    work = {"shards": shards, "data": data}[sys.argv[1]]
    print(json.dumps(work(Path(sys.argv[2]), int(sys.argv[3]), np.random.default_rng(int(sys.argv[4])))))
