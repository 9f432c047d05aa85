"""Cost of a shard's checksum when it is written, when an unfinished cache is resumed, and when a shard is opened.

Shards of 64 documents of 512 tokens over 151,936 ids, 16 exact ids and 16 samples per position, with each codec, of
random numbers (their packed size is not that of a language model). Best of 5.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from measurement import report

from xtk.cache import shard_writing as shards
from xtk.cache.shard import CacheShard
from xtk.cache.shard_writing import ShardPosition, check_file_checksum, write_shard
from xtk.cache.teacher_document import TeacherDocument
from xtk.cache.teacher_logprobs import StoredLogprobs
from xtk.cache.token_ids_by_frequency import VocabularyOrder
from xtk.text.document import Document
from xtk.text.token_sequence import TokenSequence

DOCUMENTS, TOKENS, VOCAB_SIZE, TOP_K, SAMPLES, REPEATS = 64, 512, 151_936, 16, 16, 5


def random_document(rng: np.random.Generator) -> TeacherDocument:
    """Return a document of random tokens with random scores."""
    text = "abcd" * TOKENS
    byte_ends = np.arange(4, 4 * TOKENS + 1, 4, dtype=np.int32)
    ids = np.minimum(rng.zipf(1.2, TOKENS), VOCAB_SIZE // 2).astype(np.int32)
    trained = np.ones(TOKENS, np.bool_)
    trained[0] = False
    tokens = TokenSequence(ids, byte_ends, trained, np.array([[0, TOKENS, 0]], np.int32), np.array([-1], np.int32))
    positions = np.arange(1, TOKENS, dtype=np.int32)
    exact = [np.unique([*np.minimum(rng.zipf(1.2, TOP_K), VOCAB_SIZE // 2 - 1), ids[at]]) for at in positions]
    sampled = [
        np.unique(rng.integers(VOCAB_SIZE // 2 + 1, VOCAB_SIZE, SAMPLES) // 64 * 64 % VOCAB_SIZE, return_counts=True)
        for _ in positions
    ]
    probs = [rng.dirichlet(np.ones(len(part) + 1)) for part in exact]
    logprobs = [np.log(part[:-1]) for part in probs]
    scores = StoredLogprobs(
        positions=positions,
        offsets=np.cumsum([0, *map(len, exact)]),
        ids=np.concatenate(exact).astype(np.int32),
        logprobs=np.concatenate(logprobs).astype(np.float32),
        sample_offsets=np.cumsum([0, *(len(part) for part, _ in sampled)]),
        sample_ids=np.concatenate([part for part, _ in sampled]).astype(np.int32),
        sample_counts=np.concatenate([counts for _, counts in sampled]).astype(np.int32),
        remainder_mass=np.array([part[-1] for part in probs], np.float32),
        observed_logprobs=np.array(
            [row[part == ids[at]][0] for at, part, row in zip(positions, exact, logprobs, strict=True)], np.float32
        ),
        entropy=rng.exponential(size=len(positions)).astype(np.float32),
    )
    return TeacherDocument(Document.from_text(text), tokens, scores)


def best_seconds(function: Callable[[], object]) -> float:
    """Return the least seconds of several calls."""
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def main() -> None:
    """Measure and print."""
    rng = np.random.default_rng(0)
    rows = [random_document(rng) for _ in range(DOCUMENTS)]
    counts = np.bincount(np.concatenate([row.tokens.ids for row in rows]), minlength=VOCAB_SIZE)
    order = VocabularyOrder.from_counts(counts, np.full(VOCAB_SIZE, 4, np.int32))
    table = []
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "shard.arrow"
        for codec, precision in (("packed", "standard"), ("raw", "float32")):
            options = {"name": codec, "precision": precision, "num_samples": SAMPLES, "num_sample_sets": 1}
            header = {"codec": {**options, "vocabulary_order": order.file_name}}
            position = ShardPosition(0, 0, len(rows))
            write_seconds = best_seconds(
                lambda header=header, position=position: write_shard(path, header, position, rows, order)
            )
            size = path.stat().st_size
            with (
                path.open("rb") as stream,
                shards.mmap.mmap(stream.fileno(), 0, access=shards.mmap.ACCESS_READ) as content,
            ):
                offset = content.find(shards.CHECKSUM_PREFIX) + len(shards.CHECKSUM_PREFIX)
                checksum_seconds = best_seconds(
                    lambda content=content, offset=offset: shards._checksum_around(content, offset)
                )
            verify_seconds, open_seconds = (
                best_seconds(lambda: check_file_checksum(path, "shard")),
                best_seconds(lambda: CacheShard(path)),
            )
            table += [
                (f"{codec}: writing a shard of {size / 1e6:.1f} MB", f"{write_seconds * 1e3:.1f} ms", "-"),
                (f"{codec}: its checksum, of writing", f"{checksum_seconds / write_seconds:.2%}", "1 %"),
                (f"{codec}: comparing it when a run goes on", f"{verify_seconds * 1e3:.2f} ms", "-"),
                (f"{codec}: opening it, columns and offsets checked", f"{open_seconds * 1e3:.2f} ms", "-"),
            ]
    report(__file__, table)


if __name__ == "__main__":
    main()
