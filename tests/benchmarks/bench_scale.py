"""A cache of a trillion positions: what it costs, and that xtk handles as many writers and shards in seconds.

The first table is arithmetic from the constants below. The second is measured: 1,000 caches of 100 real shards each,
small ones, of which most are hard links, merged into one of 100,000; and requests to an S3 server on this machine.

    python tests/benchmarks/bench_scale.py [SHARDS A CACHE]
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from measurement import report

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "artifacts"))

from test_teacher_cache import HEADER, row_of

from xtk.artifacts.cache_manifest import read_cache_manifest, shard_file_name
from xtk.artifacts.cache_merging import merge_caches
from xtk.artifacts.cache_shard import CacheShard
from xtk.artifacts.cache_writer import ShardedCacheWriter, write_cache_manifest
from xtk.artifacts.shard_writing import ShardPosition, write_shard
from xtk.artifacts.storage_folders import LocalFolder, open_folder
from xtk.artifacts.teacher_cache import TeacherCache
from xtk.tokens.document import Document

POSITIONS = 1e12
# Bytes a position of the whole cache, text and tokens included: `bench_codec.py whole`, GSM8K, entropy 2.1 nats.
BYTES_A_POSITION = {
    "top-k+sample, 16 and 16 draws (the default)": 43.3,
    "top-k 64": 60.7,
    "top-p 0.99, 64 at most": 40.9,
    "sample of 16 draws": 16.6,
    "none": 6.3,
    "top-k 64, float32": 540.4,
}
# Tokens a second that one GPU of a teacher scores.
TOKENS_A_SECOND = {"a teacher of 8 billion parameters": 40_000.0, "70 billion, on 8 GPUs, each": 5_000.0}
SHARD_BYTES = 256e6  # of a shard at this scale: --shard-tokens so that an object is worth a request
WRITERS, SHARDS, ROWS = 1000, 100, 2
OBJECTS = 1000


def seconds(work: Callable[[], object]) -> tuple[float, Any]:
    """Return the time of a call, and what it gives."""
    started = time.perf_counter()
    given = work()
    return time.perf_counter() - started, given


def costs() -> list[tuple[str, str, str]]:
    """Return what a trillion positions cost, by arithmetic."""
    rows = []
    for support, size in BYTES_A_POSITION.items():
        objects = POSITIONS * size / SHARD_BYTES
        rows.append((f"{support}: {size:g} bytes a position", f"{POSITIONS * size / 1e12:,.0f} TB", f"{objects:,.0f}"))
    return rows


def make_caches(folder: Path, shards: int) -> list[str]:
    """Write `WRITERS` caches, each with one real shard and links to it."""
    draw = np.random.default_rng(0)
    rows = [row_of(Document.from_text(f"row {number}"), 4, draw) for number in range(ROWS)]
    places = []
    for number in range(WRITERS):
        place = folder / f"{number:04d}"
        place.mkdir(parents=True)
        header = {**HEADER, "data": {"fingerprint": f"sha256:{number}", "documents": ROWS * shards}}
        first = place / shard_file_name(0)
        write_shard(first, header, ShardPosition(0, 0, ROWS), rows)
        entry = CacheShard(first).manifest_entry(first.name)
        for other in range(1, shards):
            os.link(first, place / shard_file_name(other))
        entries = [{**entry, "file": shard_file_name(other)} for other in range(shards)]
        write_cache_manifest(LocalFolder(place), {"header": header, "files": {}, "shards": entries})
        places.append(str(place))
    return places


def local(folder: Path, shards: int) -> list[tuple[str, str, str]]:
    """Measure folders on this machine."""
    found: list[tuple[str, float]] = []

    def measure(what: str, work: Callable[[], object]) -> Any:
        took, given = seconds(work)
        found.append((what, took))
        sys.stderr.write(f"{what}: {took:.2f} s\n")
        return given

    total = WRITERS * shards
    places = make_caches(folder / "caches", shards)
    merged = folder / "merged"
    measure(f"merging {WRITERS:,} caches of {shards} shards", lambda: merge_caches(places, str(merged)))
    measure("the same again: found", lambda: merge_caches(places, str(merged)))
    measure("listing", lambda: LocalFolder(merged).file_sizes())
    measure("reading the manifest", lambda: read_cache_manifest(LocalFolder(merged)))
    cache = measure("opening the cache", lambda: TeacherCache(merged))
    numbers = np.random.default_rng(0).integers(0, len(cache), 10_000).tolist()
    measure("10,000 rows all over it", lambda: [cache.row(number).scores for number in numbers])
    measure("the length of every text, which opens every shard", cache.text_bytes)
    measure("a stretch of it", lambda: merge_caches([str(merged)], str(folder / "part"), rows=f"1:{len(cache) // 2}"))
    unfinished = folder / "unfinished"
    unfinished.mkdir()
    header = {**HEADER, "data": {"fingerprint": "sha256:0", "documents": ROWS * shards}}
    draw = np.random.default_rng(0)
    rows = [row_of(Document.from_text(f"row {number}"), 4, draw) for number in range(ROWS)]
    for number in range(total - 1):
        write_shard(unfinished / shard_file_name(number), header, ShardPosition(number, number * ROWS, ROWS), rows)
    sizes = [ROWS] * (total - 1) + [1]
    writer = measure(
        "resuming a writer, every shard read", lambda: ShardedCacheWriter(LocalFolder(unfinished), header, sizes)
    )
    writer.write(total - 1, [row_of(Document.from_text("the last row"), 4, draw)])
    measure("finishing it", writer.finish)
    return [(f"{what} ({total:,} shards)", f"{took:.1f} s", "30 s") for what, took in found]


def remote(folder: Path) -> list[tuple[str, str, str]]:
    """Count requests to an S3 server on this machine."""
    import s3fs
    from object_store import ObjectStore

    store = ObjectStore(folder / "store")
    os.environ |= {**store.env, "XTK_CACHE": str(folder / "copies")}
    try:
        s3fs.S3FileSystem().mkdir("bucket")
        draw = np.random.default_rng(0)
        rows = [row_of(Document.from_text("row"), 4, draw)]
        header = {**HEADER, "data": {"fingerprint": "sha256:0", "documents": OBJECTS}}
        found = []

        def count(what: str, work: Callable[[], object]) -> None:
            before = len(store.requests())
            took, _ = seconds(work)
            kinds = Counter(_kind(line) for line in store.requests()[before:])
            told = ", ".join(f"{number:,} {kind}" for kind, number in kinds.most_common())
            found.append((f"{what} ({OBJECTS:,} objects)", f"{told}; {took:.1f} s", "-"))
            sys.stderr.write(f"{what}: {told}; {took:.1f} s\n")

        def write() -> None:
            writer = ShardedCacheWriter(open_folder("s3://bucket/one"), header, [1] * OBJECTS)
            for number in range(OBJECTS):
                writer.write_shard(number, rows)
            writer.finish()

        count("writing", write)
        count(
            "resuming, nothing is missing",
            lambda: ShardedCacheWriter(open_folder("s3://bucket/one"), header, [1] * OBJECTS),
        )
        count("merging on the store", lambda: merge_caches(["s3://bucket/one"], "s3://bucket/two"))
        count("opening", lambda: TeacherCache("s3://bucket/two"))
        cache = TeacherCache("s3://bucket/two")
        count("the length of every text", cache.text_sizes)
        count("every row, from copies", lambda: [row.stored_logprobs for row in TeacherCache("s3://bucket/two")])
    finally:
        store.stop()
    return found


def _kind(line: str) -> str:
    method, _, path = line.partition(" ")
    return "LIST" if method == "GET" and "list-type" in path else method


def main() -> None:
    """Compute, measure, print."""
    shards = int(sys.argv[1]) if len(sys.argv) > 1 else SHARDS
    sys.stdout.write("| support | a trillion positions | objects |\n| --- | --- | --- |\n")
    sys.stdout.write("".join(f"| {' | '.join(row)} |\n" for row in costs()))
    sys.stdout.write("\n| teacher | GPU hours |\n| --- | --- |\n")
    for name, rate in TOKENS_A_SECOND.items():
        sys.stdout.write(f"| {name}: {rate:,.0f} tokens/s | {POSITIONS / rate / 3600:,.0f} |\n")
    with tempfile.TemporaryDirectory() as name:
        measured = local(Path(name) / "local", shards) + remote(Path(name) / "remote")
    report(__file__, measured)


if __name__ == "__main__":
    main()
