"""Rows of a cache at random, and what writing one holds in memory.

Rows: a cache of GSM8K as the benchmark's teacher scores it, top-k 64, four shards, read in random order: a row found
and verified by its checksum, and unpacked into a student's arrays besides. The files are in the system's cache.

Memory: what this process holds of its own (RssAnon) before and after it has read every row; and `xtk cache-teacher`, a
process of its own, over corpora of which one is 8 times the other, both of more shards than it holds at a time.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from calibrated_teacher import held_out, language_model
from measurement import report

from xtk.artifacts.cache_writer import ShardedCacheWriter, store_shard
from xtk.artifacts.shard_codec_registry import PRECISION_CODECS
from xtk.artifacts.shard_writing import ScoredDocument
from xtk.artifacts.storage_folders import LocalFolder
from xtk.artifacts.teacher_cache import TeacherCache
from xtk.artifacts.token_ids_by_frequency import VocabularyOrder
from xtk.models.causal_lm import silence_transformers
from xtk.teachers.backend_interface import TeacherConfig
from xtk.teachers.transformers import TransformersTeacher
from xtk.tokens.document import Document
from xtk.tokens.teacher_logprobs import Support
from xtk.tokens.tokenizer import Tokenizer

SHARDS, ROWS = 4, 200  # of a shard; documents repeat
TOKENS, ROUNDS = 2000, 5
SMALL, LARGE = 100, 800  # documents
SHARD_TOKENS = 2048
SUPPORT = Support("top-k", top_k=64)


def cache_at(folder: Path, precision: str, rows: list[ScoredDocument], ranks: VocabularyOrder) -> TeacherCache:
    """Write a cache."""
    codec = {"name": PRECISION_CODECS[precision], "precision": precision, "num_samples": 0, "num_sample_sets": 0}
    codec["vocabulary_order"] = ranks.file_name
    writer = ShardedCacheWriter(
        LocalFolder(folder), {"codec": codec, "data": {"documents": SHARDS * ROWS}}, [ROWS] * SHARDS
    )
    writer.write_shared_files({ranks.file_name: ranks.file_content})
    for number in range(SHARDS):
        some = [rows[(number * ROWS + at) % len(rows)] for at in range(ROWS)]
        writer.add_manifest_entry(
            number, store_shard(writer.folder, writer.header, writer.shard_position(number), some, ranks)
        )
    writer.finish()
    return TeacherCache(folder)


def best(work: Callable[[], object]) -> float:
    """Return the least seconds of some calls."""
    found = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return min(found)


def access(folder: Path) -> list[tuple[str, str, str]]:
    """Return what reading at random costs, with each codec."""
    model = language_model()
    tokenizer = Tokenizer(model)
    documents = held_out("gsm8k", TOKENS)
    teacher = TransformersTeacher(TeacherConfig(model, "teacher", tokenizer, "float32", 2048, support=SUPPORT))
    scores = teacher.score(documents)
    rows = [ScoredDocument(Document.from_text("x"), *pair) for pair in zip(documents, scores, strict=True)]
    counts = np.bincount(np.concatenate([document.ids for document in documents]), minlength=tokenizer.embedding_rows)
    ranks = VocabularyOrder.from_counts(counts, tokenizer.vocabulary.byte_lengths)
    found = []
    for precision in ("standard", "float32"):
        cache = cache_at(folder / precision, precision, rows, ranks)
        order = np.random.default_rng(0).permutation(len(cache)).tolist()
        size = cache.manifest["shards"][0]["bytes"] / ROWS
        positions = sum(len(cache.read_document(at).trained_positions) for at in order)
        found_in = best(lambda cache=cache, order=order: [cache.row(at) for at in order])  # type: ignore[misc]
        unpacked = best(lambda cache=cache, order=order: [cache.row(at).signal for at in order])  # type: ignore[misc]
        told = f"{len(order) / found_in:,.0f} rows/s of {size / 1000:.0f} kB"
        found.append((f"a row found and verified, {precision}", told, "50,000"))
        told = f"{len(order) / unpacked:,.0f} rows/s, {positions / unpacked / 1e6:.2f} M positions/s"
        found.append((f"and its signal unpacked, {precision}", told, ""))
        before = own_memory()
        for at in order:
            _ = cache.read_document(at).teacher_logprobs
        whole = sum(shard["bytes"] for shard in cache.manifest["shards"]) / 1e6
        told = f"{(own_memory() - before) / 1e6:+.1f} MB of {whole:,.0f} MB read"
        found.append((f"memory that reading all of it keeps, {precision}", told, "flat"))
    return found


def own_memory() -> int:
    """Return the bytes that this process holds, those of mapped files left out."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def peak(teacher: Path, corpus: Path, output: Path) -> float:
    """Return the most memory that `cache-teacher` held, in GiB."""
    command = [sys.executable, "-m", "xtk", "cache-teacher", str(teacher), str(corpus), "-o", str(output)]
    command += ["--shard-tokens", str(SHARD_TOKENS)]
    child = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    most = 0
    while child.poll() is None:
        # Its rusage would begin with what this process holds.
        for line in Path(f"/proc/{child.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                most = int(line.split()[1])
        time.sleep(0.02)
    if child.returncode:
        raise SystemExit(f"{command} ended with {child.returncode}")
    return most / 2**20


def memory(folder: Path) -> list[tuple[str, str, str]]:
    """Return what writing caches of two sizes holds."""
    teacher = language_model()
    found = []
    for documents in (SMALL, LARGE):
        corpus = folder / f"{documents}.jsonl"
        lines = (json.dumps({"text": f"{number} apples and {number + 1} pears. " * 8}) for number in range(documents))
        corpus.write_text("\n".join(lines) + "\n")
        cache = folder / f"cache-{documents}"
        most = peak(teacher, corpus, cache)
        found.append(f"{most:.2f} GiB of {documents:,} documents in {len(list(cache.glob('*.arrow')))} shards")
    return [("peak of `cache-teacher`", ", ".join(found), "independent of the corpus")]


def main() -> None:
    """Measure and print."""
    silence_transformers()
    with tempfile.TemporaryDirectory() as name:
        report(__file__, access(Path(name)) + memory(Path(name)))


if __name__ == "__main__":
    main()
