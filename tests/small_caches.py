"""Small caches of all codecs and supports, finished and unfinished, for tests that corrupt them."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import numpy as np
import small_inputs

from xtk.cache.reader import TeacherCache
from xtk.cache.writer import ShardedCacheWriter
from xtk.files.storage_folders import LocalFolder

KINDS = {
    "packed": ("--num-samples", 4),
    "sample": ("--support", "sample", "--num-samples", 3),
    "top-k": ("--top-k", 4),
    "raw": ("--precision", "float32", "--num-samples", 4),
    "raw-top-k": ("--precision", "float32", "--top-k", 3),
}
NUM_DOCUMENTS = 12


def make_cache(run, pair, folder: Path, kind: str) -> Path:
    """Write a cache of a few documents in several shards."""
    data = folder / "data.jsonl"
    if not data.exists():
        small_inputs.write_jsonl(data, small_inputs.sentences(NUM_DOCUMENTS, seed=5))
    run("cache-teacher", pair.teacher, data, *KINDS[kind], "--shard-tokens", 100, "-o", folder / kind)
    return folder / kind


def copy_without_manifest(cache: Path, folder: Path) -> Path:
    """Copy a cache without its manifest."""
    shutil.copytree(cache, folder)
    (folder / "manifest.json").unlink()
    return folder


def resume_writer(cache: TeacherCache, folder: Path) -> ShardedCacheWriter:
    """Return a writer that resumes an unfinished copy of a cache, as a writer of the same request does."""
    return ShardedCacheWriter(
        LocalFolder(folder), cache.header, [entry["documents"] for entry in cache.manifest["shards"]]
    )


def stored_values(cache: TeacherCache) -> list[bytes]:
    """Return the bytes of all stored values of a cache, one entry per document."""
    return [
        repr(row.document).encode()
        + b"".join(
            np.asarray(value).tobytes()
            for value in itertools.chain(vars(row.stored_logprobs).values(), vars(row.tokens).values())
        )
        for row in cache
    ]
