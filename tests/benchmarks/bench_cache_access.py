"""Time of random access to a cache, and memory of `cache-teacher`.

Access: a cache of GSM8K scored by the benchmark's teacher, top-k 64, four shards, read in random order: a document is
read and verified by its checksum, and also unpacked into a student's arrays. The files are in the page cache.

Memory: the private memory of this process (RssAnon) before and after it reads every document; and `xtk cache-teacher`
in a separate process, over two corpora, one 8 times larger than the other, both with more shards than it keeps in
memory at a time.
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

from xtk.cache.codec.shard_codec_registry import PRECISION_CODECS
from xtk.cache.reader import TeacherCache
from xtk.cache.teacher_document import TeacherDocument
from xtk.cache.teacher_logprobs import Support
from xtk.cache.token_ids_by_frequency import VocabularyOrder
from xtk.cache.writer import ShardedCacheWriter, store_shard
from xtk.files.storage_folders import LocalFolder
from xtk.models.causal_lm import silence_transformers
from xtk.models.resolver import ModelRef
from xtk.teachers.backend_interface import TeacherConfig
from xtk.teachers.transformers import TransformersTeacher
from xtk.text.document import Document
from xtk.text.tokenizer import Tokenizer

SHARDS, ROWS = 4, 200  # documents of a shard; they repeat
TOKENS, REPEATS = 2000, 5
SMALL, LARGE = 100, 800  # documents
SHARD_TOKENS = 2048
SUPPORT = Support("top-k", top_k=64)


def write_cache(folder: Path, precision: str, rows: list[TeacherDocument], order: VocabularyOrder) -> TeacherCache:
    """Write a cache and open it."""
    codec = {"name": PRECISION_CODECS[precision], "precision": precision, "num_samples": 0, "num_sample_sets": 0}
    codec["vocabulary_order"] = order.file_name
    teacher = {"name": "", "weights": "", "tokenizer": "", "template": None, "embedding_rows": 1_000_000}
    header = {
        "codec": codec,
        "teacher": {**teacher, "special_tokens": {}, "space_ids": [], "start_ids": []},
        "data": {"fingerprint": "", "documents": SHARDS * ROWS},
        "options": {"support": SUPPORT.kind, "dtype": "float32"},
    }
    writer = ShardedCacheWriter(LocalFolder(folder), header, [ROWS] * SHARDS)
    writer.write_shared_files({order.file_name: order.file_content})
    for number in range(SHARDS):
        documents = [rows[(number * ROWS + at) % len(rows)] for at in range(ROWS)]
        writer.add_manifest_entry(
            number, store_shard(writer.folder, writer.header, writer.shard_position(number), documents, order)
        )
    writer.finish()
    return TeacherCache(folder)


def best_seconds(function: Callable[[], object]) -> float:
    """Return the least seconds of several calls."""
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def access_rows(folder: Path) -> list[tuple[str, str, str]]:
    """Return rows with the cost of random access, with each codec."""
    model = language_model()
    tokenizer = Tokenizer(model)
    documents = held_out("gsm8k", TOKENS)
    teacher = TransformersTeacher(
        TeacherConfig(ModelRef(model, name="teacher"), tokenizer, batch_tokens=2048, support=SUPPORT)
    )
    scores = teacher.score(documents)
    rows = [TeacherDocument(Document.from_text("x"), *pair) for pair in zip(documents, scores, strict=True)]
    counts = np.bincount(np.concatenate([document.ids for document in documents]), minlength=tokenizer.embedding_rows)
    vocabulary_order = VocabularyOrder.from_counts(counts, tokenizer.vocabulary.byte_lengths)
    table = []
    for precision in ("standard", "float32"):
        cache = write_cache(folder / precision, precision, rows, vocabulary_order)
        order = np.random.default_rng(0).permutation(len(cache)).tolist()
        size = cache.manifest["shards"][0]["bytes"] / ROWS
        positions = sum(len(cache.read_document(at).trained_positions) for at in order)
        read_seconds = best_seconds(lambda cache=cache, order=order: [cache.read_document(at) for at in order])  # type: ignore[misc]
        unpack_seconds = best_seconds(
            lambda cache=cache, order=order: [cache.read_document(at).teacher_logprobs for at in order]
        )  # type: ignore[misc]
        result = f"{len(order) / read_seconds:,.0f} documents/s of {size / 1000:.0f} kB"
        table.append((f"a document read and verified, {precision}", result, "50,000"))
        result = f"{len(order) / unpack_seconds:,.0f} documents/s, {positions / unpack_seconds / 1e6:.2f} M positions/s"
        table.append((f"and its log-probabilities decoded, {precision}", result, ""))
        before = private_memory()
        for at in order:
            _ = cache.read_document(at).teacher_logprobs
        megabytes = sum(shard["bytes"] for shard in cache.manifest["shards"]) / 1e6
        result = f"{(private_memory() - before) / 1e6:+.1f} MB of {megabytes:,.0f} MB read"
        table.append((f"memory that stays allocated after reading all of it, {precision}", result, "flat"))
    return table


def private_memory() -> int:
    """Return the bytes of this process without mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def peak_memory(teacher: Path, corpus: Path, output: Path) -> float:
    """Return the peak memory of `cache-teacher` in GiB."""
    command = [sys.executable, "-m", "xtk", "cache-teacher", str(teacher), str(corpus), "-o", str(output)]
    command += ["--shard-tokens", str(SHARD_TOKENS)]
    child = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    peak_kib = 0
    while child.poll() is None:
        # Its rusage would start with the memory of this process.
        for line in Path(f"/proc/{child.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                peak_kib = int(line.split()[1])
        time.sleep(0.02)
    if child.returncode:
        raise SystemExit(f"{command} ended with {child.returncode}")
    return peak_kib / 2**20


def memory_rows(folder: Path) -> list[tuple[str, str, str]]:
    """Return the row with the peak memory of writing caches of two sizes."""
    teacher = language_model()
    peaks = []
    for documents in (SMALL, LARGE):
        corpus = folder / f"{documents}.jsonl"
        lines = (json.dumps({"text": f"{number} apples and {number + 1} pears. " * 8}) for number in range(documents))
        corpus.write_text("\n".join(lines) + "\n")
        cache = folder / f"cache-{documents}"
        peak = peak_memory(teacher, corpus, cache)
        peaks.append(f"{peak:.2f} GiB of {documents:,} documents in {len(list(cache.glob('*.arrow')))} shards")
    return [("peak of `cache-teacher`", ", ".join(peaks), "independent of the corpus")]


def main() -> None:
    """Measure and print."""
    silence_transformers()
    with tempfile.TemporaryDirectory() as name:
        report(__file__, access_rows(Path(name)) + memory_rows(Path(name)))


if __name__ == "__main__":
    main()
