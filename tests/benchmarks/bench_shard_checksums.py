"""What the checksum of a shard costs: when it is written, when an unfinished cache is resumed, when a shard is opened.

Shards of 64 documents of 512 tokens over 151,936 ids, 16 exact ids and 16 samples a position, with each codec, made of
random numbers (their packed size is not that of a language model). Best of 5.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from measurement import report

from xtk.artifacts import shard_writing as shards
from xtk.artifacts.cache_shard import CacheShard
from xtk.artifacts.shard_writing import ScoredDocument, ShardPosition, check_file_checksum, write_shard
from xtk.artifacts.token_ids_by_frequency import VocabularyOrder
from xtk.tokens.document import Document
from xtk.tokens.teacher_logprobs import StoredLogprobs
from xtk.tokens.token_sequence import TokenSequence

DOCUMENTS, TOKENS, WIDTH, TOP_K, SAMPLES, ROUNDS = 64, 512, 151_936, 16, 16, 5


def row_of(draw: np.random.Generator) -> ScoredDocument:
    """Return a document of random words with random scores."""
    text = "abcd" * TOKENS
    ends = np.arange(4, 4 * TOKENS + 1, 4, dtype=np.int32)
    ids = np.minimum(draw.zipf(1.2, TOKENS), WIDTH // 2).astype(np.int32)
    trained = np.ones(TOKENS, np.bool_)
    trained[0] = False
    tokens = TokenSequence(ids, ends, trained, np.array([[0, TOKENS, 0]], np.int32), np.array([-1], np.int32))
    positions = np.arange(1, TOKENS, dtype=np.int32)
    exact = [np.unique([*np.minimum(draw.zipf(1.2, TOP_K), WIDTH // 2 - 1), ids[at]]) for at in positions]
    sampled = [
        np.unique(draw.integers(WIDTH // 2 + 1, WIDTH, SAMPLES) // 64 * 64 % WIDTH, return_counts=True)
        for _ in positions
    ]
    mass = [draw.dirichlet(np.ones(len(part) + 1)) for part in exact]
    logprobs = [np.log(part[:-1]) for part in mass]
    scores = StoredLogprobs(
        positions=positions,
        offsets=np.cumsum([0, *map(len, exact)]),
        ids=np.concatenate(exact).astype(np.int32),
        logprobs=np.concatenate(logprobs).astype(np.float32),
        sample_offsets=np.cumsum([0, *(len(part) for part, _ in sampled)]),
        sample_ids=np.concatenate([part for part, _ in sampled]).astype(np.int32),
        sample_counts=np.concatenate([times for _, times in sampled]).astype(np.int32),
        remainder_mass=np.array([part[-1] for part in mass], np.float32),
        observed_logprobs=np.array(
            [row[part == ids[at]][0] for at, part, row in zip(positions, exact, logprobs, strict=True)], np.float32
        ),
        entropy=draw.exponential(size=len(positions)).astype(np.float32),
    )
    return ScoredDocument(Document.from_text(text), tokens, scores)


def best(work: Callable[[], object]) -> float:
    """Return the least seconds of some calls."""
    found = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return min(found)


def main() -> None:
    """Measure and print."""
    draw = np.random.default_rng(0)
    rows = [row_of(draw) for _ in range(DOCUMENTS)]
    counts = np.bincount(np.concatenate([row.tokens.ids for row in rows]), minlength=WIDTH)
    ranks = VocabularyOrder.from_counts(counts, np.full(WIDTH, 4, np.int32))
    found = []
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "shard.arrow"
        for codec, precision in (("packed", "standard"), ("raw", "float32")):
            options = {"name": codec, "precision": precision, "num_samples": SAMPLES, "num_sample_sets": 1}
            header = {"codec": {**options, "vocabulary_order": ranks.file_name}}
            place = ShardPosition(0, 0, len(rows))
            whole = best(lambda header=header, place=place: write_shard(path, header, place, rows, ranks))
            size = path.stat().st_size
            with (
                path.open("rb") as stream,
                shards.mmap.mmap(stream.fileno(), 0, access=shards.mmap.ACCESS_READ) as held,
            ):
                at = held.find(shards.CHECKSUM_PREFIX) + len(shards.CHECKSUM_PREFIX)
                checksum = best(lambda held=held, at=at: shards._checksum_around(held, at))
            checked, opened = best(lambda: check_file_checksum(path, "shard")), best(lambda: CacheShard(path))
            found += [
                (f"{codec}: writing a shard of {size / 1e6:.1f} MB", f"{whole * 1e3:.1f} ms", "-"),
                (f"{codec}: its checksum, of writing", f"{checksum / whole:.2%}", "1 %"),
                (f"{codec}: comparing it when a run goes on", f"{checked * 1e3:.2f} ms", "-"),
                (f"{codec}: opening it, columns and offsets checked", f"{opened * 1e3:.2f} ms", "-"),
            ]
    report(__file__, found)


if __name__ == "__main__":
    main()
