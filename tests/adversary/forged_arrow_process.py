"""Script that forges Arrow files with matching checksums and reads them.

`python forged_arrow_process.py shards CACHE COUNT SEED` forges shards of a finished cache, `... data FOLDER COUNT SEED`
forges files of user data. The script prints JSON: how many files were refused with an XtkError, how many were read, and
how many raised another exception. It is a separate process so that a crash is detected.
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

from xtk.cache.reader import TeacherCache
from xtk.cache.shard import CacheShard, frame_checksum
from xtk.cache.shard_writing import CHECKSUM_PREFIX
from xtk.cache.writer import write_cache_manifest
from xtk.data.corpus_reader import Corpus
from xtk.errors import XtkError
from xtk.files.storage_folders import LocalFolder

FORGED_INTEGERS = (-1, -(1 << 31), (1 << 31) - 1, 1 << 30, 1 << 20, 7)
Content = bytearray


def buffers_of(column: pa.Array) -> list[pa.Buffer]:
    """Return the nonempty buffers (validity, offsets, data) of a column and its children."""
    return [buffer for buffer in column.buffers() if buffer is not None and buffer.size]


def buffer_ranges_of(path: Path) -> list[tuple[int, int]]:
    """Return the start and the size in bytes of each buffer in a shard or a data file."""
    with pa.memory_map(str(path)) as source:
        file_buffer = source.read_buffer()
    batch = pa.ipc.open_file(pa.BufferReader(file_buffer)).get_batch(0)
    buffers = [buffer for column in batch.columns for buffer in buffers_of(column)]
    return [(buffer.address - file_buffer.address, buffer.size) for buffer in buffers]


def forge_offset(content: Content, buffer_ranges: list[tuple[int, int]], rng: np.random.Generator) -> None:
    """Overwrite one 32-bit integer of one buffer."""
    start, size = buffer_ranges[int(rng.integers(len(buffer_ranges)))]
    position = start + 4 * int(rng.integers(max(size // 4, 1)))
    content[position : position + 4] = struct.pack("<i", FORGED_INTEGERS[int(rng.integers(len(FORGED_INTEGERS)))])


def forge_frame(content: Content, payload: list[tuple[int, int]], rng: np.random.Generator) -> None:
    """Overwrite a few bytes outside of the payload: Arrow messages, schema, footer."""
    ranges = [(start, stop) for start, stop in payload if stop > start]
    for _ in range(int(rng.integers(1, 4))):
        position = int(rng.integers(len(content)))
        while any(start <= position < stop for start, stop in ranges):
            position = int(rng.integers(len(content)))
        content[position] = int(rng.integers(256))


def forge_payload(content: Content, payload: list[tuple[int, int]], rng: np.random.Generator) -> None:
    """Overwrite a few bytes of the packed payload."""
    start, stop = payload[int(rng.integers(1, 3))]
    for _ in range(int(rng.integers(1, 4))):
        content[int(rng.integers(start, stop))] = int(rng.integers(256))


def forge_tables(content: Content, tables: bytes, rng: np.random.Generator) -> None:
    """Overwrite a few bytes of the codec tables, in the schema of the footer."""
    if not tables:
        return
    forged = bytearray(tables)
    for _ in range(int(rng.integers(1, 4))):
        forged[int(rng.integers(len(forged)))] = int(rng.integers(256))
    position = content.rfind(base64.b64encode(tables))
    content[position : position + len(base64.b64encode(tables))] = base64.b64encode(forged)


def sign(path: Path, content: Content) -> None:
    """Write a forged shard with matching checksums of the rows (if it can be parsed) and of the file."""
    path.write_bytes(content)
    try:
        shard = CacheShard(path)
        column = shard._batch.column("checksum").buffers()[1]
        position = column.address - shard._buffer.address
        checksums = [shard.columns.checksum(number) for number in range(len(shard))]
        content[position : position + 8 * len(checksums)] = struct.pack(f"<{len(checksums)}Q", *checksums)
    except (XtkError, ValueError, LookupError, OverflowError, pa.ArrowException, struct.error):
        pass
    position = content.find(CHECKSUM_PREFIX) + len(CHECKSUM_PREFIX)
    digits = xxhash.xxh3_128(bytes(content[:position] + content[position + 32 :])).hexdigest()
    content[position : position + 32] = digits.encode()
    path.write_bytes(content)


def call_and_count(function: Callable[[], Any], counts: dict[str, int], location: str) -> None:
    """Call a function and count the outcome."""
    sys.stderr.write(f"{location}\n")  # the last line before a crash
    try:
        function()
        counts["read"] += 1
    except XtkError as error:
        counts["refused" if error.where else "tracebacks"] += 1
    except Exception as error:
        sys.stderr.write(f"TRACEBACK {location}: {error!r}\n")
        counts["tracebacks"] += 1


def read_all(folder: Path) -> None:
    """Read everything that a cache contains."""
    cache = TeacherCache(folder)
    for row in cache:
        _ = row.document, row.tokens, row.teacher_logprobs, row.stored_logprobs
    cache.text_sizes(), cache.is_conversation(), cache.document_weights(), cache.routes(), cache.fingerprints()


def forge_shards(cache: Path, count: int, rng: np.random.Generator) -> dict[str, int]:
    """Forge shards of a cache, read them, and return counts of the outcomes."""
    counts = {"read": 0, "refused": 0, "tracebacks": 0}
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(shutil.copytree(cache, Path(temporary) / "cache"))
        path = copy / "shard-00000.arrow"
        original = path.read_bytes()
        shard = CacheShard(path)
        buffer_ranges, payload, tables = buffer_ranges_of(path), shard.payload_ranges(), shard._tables
        del shard
        manifest = TeacherCache(copy).manifest
        forgeries = [
            lambda content: forge_offset(content, buffer_ranges, rng),
            lambda content: forge_frame(content, payload, rng),
            lambda content: forge_payload(content, payload, rng),
            lambda content: forge_tables(content, tables, rng),
        ]
        for number in range(count):
            content = bytearray(original)
            forgeries[number % len(forgeries)](content)
            path.unlink()
            sign(path, content)
            entry = {**manifest["shards"][0], "checksum": frame_checksum(bytes(content), payload)}
            forged_manifest = {**manifest, "shards": [entry, *manifest["shards"][1:]]}
            write_cache_manifest(
                LocalFolder(copy), {key: forged_manifest[key] for key in ("header", "files", "shards")}
            )
            call_and_count(lambda: read_all(copy), counts, f"forgery {number}, kind {number % len(forgeries)}")
    return counts


def forge_data_files(folder: Path, count: int, rng: np.random.Generator) -> dict[str, int]:
    """Forge Arrow and Parquet files of texts and conversations, read them, and return counts of the outcomes."""
    counts = {"read": 0, "refused": 0, "tracebacks": 0}
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
            open_writer = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
            with pa.OSFile(str(path), "wb") as sink, open_writer(sink, batch.schema) as writer:
                writer.write_batch(batch)
        content = bytearray(path.read_bytes())
        if kind == "file" and number % 2:
            forge_offset(content, buffer_ranges_of(path), rng)
        else:
            for _ in range(int(rng.integers(1, 4))):
                content[int(rng.integers(len(content)))] = int(rng.integers(256))
        path.unlink()
        path.write_bytes(content)
        call_and_count(lambda path=path: list(Corpus([str(path)])), counts, f"{path.name}, {kind}")
        path.unlink()
    return counts


if __name__ == "__main__":
    forge_files = {"shards": forge_shards, "data": forge_data_files}[sys.argv[1]]
    print(json.dumps(forge_files(Path(sys.argv[2]), int(sys.argv[3]), np.random.default_rng(int(sys.argv[4])))))
