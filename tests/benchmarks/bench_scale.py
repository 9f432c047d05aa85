"""Estimated cost of a cache of a trillion positions, and measured times with as many writers and shards.

The first table is arithmetic from the constants below. The second is measured: 1,000 caches of 100 real shards each,
small ones, most of which are hard links, merged into one of 100,000; and requests to an S3 server on this machine.

    python tests/benchmarks/bench_scale.py [SHARDS PER CACHE]
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
sys.path.insert(0, str(Path(__file__).parent.parent / "cache"))

from test_teacher_cache import HEADER, random_row

from xtk.cache.manifest import read_cache_manifest, shard_file_name
from xtk.cache.merging import merge_caches
from xtk.cache.reader import TeacherCache
from xtk.cache.shard import CacheShard
from xtk.cache.shard_writing import ShardPosition, write_shard
from xtk.cache.writer import ShardedCacheWriter, write_cache_manifest
from xtk.files.storage_folders import LocalFolder, open_folder
from xtk.text.document import Document

POSITIONS = 1e12
# Bytes per position of the whole cache, including text and tokens: `bench_codec.py whole`, GSM8K, entropy 2.1 nats.
BYTES_A_POSITION = {
    "top-k+sample, 16 and 16 samples (the default), SmolLM2 on 40 problems of GSM8K": 58.2,
    "top-k 64": 60.7,
    "top-p 0.99, 64 at most": 40.9,
    "16 samples": 16.6,
    "none": 6.3,
    "top-k 64, float32": 540.4,
}
# Tokens per second that one GPU of a teacher scores: 2 operations per weight, as in bench_gpu_estimates.py.
RATE = 400e12
TOKENS_A_SECOND = {"a teacher of 8 billion parameters": RATE / 16e9, "70 billion, on 8 GPUs, each": RATE / 140e9}
SHARD_BYTES = 256e6  # of a shard at this scale: --shard-tokens is large enough that an object is worth a request
WRITERS, SHARDS, ROWS = 1000, 100, 2
OBJECTS = 1000


def seconds(function: Callable[[], object]) -> tuple[float, Any]:
    """Return the time of a call, and its result."""
    started = time.perf_counter()
    result = function()
    return time.perf_counter() - started, result


def costs() -> list[tuple[str, str, str]]:
    """Return rows with the calculated bytes and objects of a trillion positions."""
    rows = []
    for support, size in BYTES_A_POSITION.items():
        objects = POSITIONS * size / SHARD_BYTES
        rows.append((f"{support}: {size:g} bytes a position", f"{POSITIONS * size / 1e12:,.0f} TB", f"{objects:,.0f}"))
    return rows


def make_caches(folder: Path, shards: int) -> list[str]:
    """Write `WRITERS` caches, each with one real shard and hard links to it; return their paths."""
    rng = np.random.default_rng(0)
    rows = [random_row(Document.from_text(f"row {number}"), 4, rng) for number in range(ROWS)]
    paths = []
    for number in range(WRITERS):
        cache_folder = folder / f"{number:04d}"
        cache_folder.mkdir(parents=True)
        header = {**HEADER, "data": {"fingerprint": f"sha256:{number}", "documents": ROWS * shards}}
        first = cache_folder / shard_file_name(0)
        write_shard(first, header, ShardPosition(0, 0, ROWS), rows)
        entry = CacheShard(first).manifest_entry(first.name)
        for shard in range(1, shards):
            os.link(first, cache_folder / shard_file_name(shard))
        entries = [{**entry, "file": shard_file_name(shard)} for shard in range(shards)]
        write_cache_manifest(LocalFolder(cache_folder), {"header": header, "files": {}, "shards": entries})
        paths.append(str(cache_folder))
    return paths


def local(folder: Path, shards: int) -> list[tuple[str, str, str]]:
    """Measure caches in local folders."""
    measured: list[tuple[str, float]] = []

    def measure(label: str, function: Callable[[], object]) -> Any:
        elapsed, result = seconds(function)
        measured.append((label, elapsed))
        sys.stderr.write(f"{label}: {elapsed:.2f} s\n")
        return result

    total = WRITERS * shards
    cache_paths = make_caches(folder / "caches", shards)
    merged = folder / "merged"
    measure(f"merging {WRITERS:,} caches of {shards} shards", lambda: merge_caches(cache_paths, str(merged)))
    measure("the same command again", lambda: merge_caches(cache_paths, str(merged)))
    measure("listing", lambda: LocalFolder(merged).file_sizes())
    measure("reading the manifest", lambda: read_cache_manifest(LocalFolder(merged)))
    cache = measure("opening the cache", lambda: TeacherCache(merged))
    numbers = np.random.default_rng(0).integers(0, len(cache), 10_000).tolist()
    measure(
        "10,000 documents at random positions",
        lambda: [cache.read_document(number).stored_logprobs for number in numbers],
    )
    measure("the lengths of all texts, which opens every shard", cache.text_sizes)
    measure(
        "merging half of its documents",
        lambda: merge_caches([str(merged)], str(folder / "part"), rows=f"1:{len(cache) // 2}"),
    )
    unfinished = folder / "unfinished"
    unfinished.mkdir()
    header = {**HEADER, "data": {"fingerprint": "sha256:0", "documents": ROWS * shards}}
    rng = np.random.default_rng(0)
    rows = [random_row(Document.from_text(f"row {number}"), 4, rng) for number in range(ROWS)]
    for number in range(total - 1):
        write_shard(unfinished / shard_file_name(number), header, ShardPosition(number, number * ROWS, ROWS), rows)
    sizes = [ROWS] * (total - 1) + [1]
    writer = measure(
        "resuming a writer, every shard read", lambda: ShardedCacheWriter(LocalFolder(unfinished), header, sizes)
    )
    writer.write_shard(total - 1, [random_row(Document.from_text("the last row"), 4, rng)])
    measure("finishing it", writer.finish)
    return [(f"{label} ({total:,} shards)", f"{elapsed:.1f} s", "30 s") for label, elapsed in measured]


def remote(folder: Path) -> list[tuple[str, str, str]]:
    """Count requests to an S3 server on this machine."""
    import s3fs
    from object_store import ObjectStore

    store = ObjectStore(folder / "store")
    os.environ |= {**store.env, "XTK_CACHE": str(folder / "copies")}
    try:
        s3fs.S3FileSystem().mkdir("bucket")
        rng = np.random.default_rng(0)
        rows = [random_row(Document.from_text("row"), 4, rng)]
        header = {**HEADER, "data": {"fingerprint": "sha256:0", "documents": OBJECTS}}
        found = []

        def count(label: str, function: Callable[[], object]) -> None:
            before = len(store.requests())
            elapsed, _ = seconds(function)
            kinds = Counter(_request_kind(line) for line in store.requests()[before:])
            summary = ", ".join(f"{number:,} {kind}" for kind, number in kinds.most_common())
            found.append((f"{label} ({OBJECTS:,} objects)", f"{summary}; {elapsed:.1f} s", "-"))
            sys.stderr.write(f"{label}: {summary}; {elapsed:.1f} s\n")

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
        count("the lengths of all texts", cache.text_sizes)
        count(
            "every document, from local copies",
            lambda: [row.stored_logprobs for row in TeacherCache("s3://bucket/two")],
        )
    finally:
        store.stop()
    return found


def _request_kind(line: str) -> str:
    method, _, path = line.partition(" ")
    return "LIST" if method == "GET" and "list-type" in path else method


def main() -> None:
    """Compute, measure and print."""
    shards = int(sys.argv[1]) if len(sys.argv) > 1 else SHARDS
    sys.stdout.write("| support | a trillion positions | objects |\n| --- | --- | --- |\n")
    sys.stdout.write("".join(f"| {' | '.join(row)} |\n" for row in costs()))
    sys.stdout.write("\n| teacher | GPU hours |\n| --- | --- |\n")
    for name, rate in TOKENS_A_SECOND.items():
        sys.stdout.write(f"| {name}: {rate:,.0f} tokens/s | {POSITIONS / rate / 3600:,.0f} |\n")
    with tempfile.TemporaryDirectory() as name:
        rows = local(Path(name) / "local", shards) + remote(Path(name) / "remote")
    report(__file__, rows)


if __name__ == "__main__":
    main()
