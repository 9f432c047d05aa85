"""Positions that `cache-teacher` packs a second with one and with two threads, for shards of 65,536 tokens.

Synthetic distributions at a vocabulary of 151,936 with the default support, ids by Zipf's law. Packing is what the
writing threads of `cache-teacher` do most of the time; a shard is packed by one thread.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from measurement import report

from xtk.cache.codec.packed_shard_codec import PackedCodec
from xtk.cache.codec.shard_codec_registry import CodecInput
from xtk.cache.token_ids_by_frequency import VocabularyOrder
from xtk.teachers.logprobs_to_cache_arrays import LogprobArrays, arrays_to_stored
from xtk.text.token_sequence import TokenSequence

VOCABULARY, DOCUMENTS, LENGTH, TOP_K, NUM_SAMPLES = 151_936, 64, 1024, 16, 16
SHARDS, ROUNDS = 4, 3


def random_shard(seed: int) -> CodecInput:
    """Return documents of a shard with random scores; sharp and flat distributions take turns at random."""
    rng = np.random.default_rng(seed)
    rows = DOCUMENTS * LENGTH
    zipf = lambda *shape: np.minimum(rng.zipf(1.3, shape), VOCABULARY) - 1  # noqa: E731
    ids = zipf(rows, TOP_K).astype(np.int32)
    decay = rng.gamma(1.0, 1.0, (rows, 1)) + 0.05
    probs = np.exp(-decay * np.arange(TOP_K)) * rng.uniform(0.9, 1.1, (rows, TOP_K))
    tail = np.exp(-decay[:, 0] * TOP_K) / -np.expm1(-decay[:, 0])
    total = probs.sum(1) + tail + 1e-3
    logprobs = np.log(probs / total[:, None]).astype(np.float32)
    observed = ids[:, 0].reshape(DOCUMENTS, LENGTH)
    sequences = [
        TokenSequence(tokens, np.arange(1, LENGTH + 1, dtype=np.int32), np.ones(LENGTH, np.bool_),
                      np.array([[0, LENGTH, 0]], np.int32), np.full(1, -1, np.int32))
        for tokens in observed
    ]  # fmt: skip
    entropy = (-logprobs * np.exp(logprobs)).sum(1).astype(np.float32)
    arrays = LogprobArrays(ids, logprobs, logprobs[:, 0], entropy, zipf(rows, 1, NUM_SAMPLES).astype(np.int32))
    return list(zip(sequences, arrays_to_stored(sequences, arrays), strict=True))


def main() -> None:
    """Measure and print."""
    shards = [random_shard(seed) for seed in range(SHARDS)]
    counts = np.bincount(np.concatenate([row.ids for row, _ in shards[0]]), minlength=VOCABULARY)
    order = VocabularyOrder.from_counts(counts, np.ones(VOCABULARY, np.int32))
    options = {"precision": "standard", "num_sample_sets": 1, "num_samples": NUM_SAMPLES}

    def positions_a_second(threads: int) -> float:
        began = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda shard: PackedCodec.pack(shard, options, order), shards))
        return SHARDS * DOCUMENTS * LENGTH / (time.perf_counter() - began)

    PackedCodec.pack(shards[0][:2], options, order)  # compiles
    rates = {threads: [positions_a_second(threads) for _ in range(ROUNDS)] for threads in (1, 2)}
    one, two = (float(np.median(rates[threads])) for threads in (1, 2))
    rows = [("packing, one thread", f"{one:,.0f} positions/s", ""),
            ("packing, two threads", f"{two:,.0f} positions/s, {two / one:.2f} times", "")]  # fmt: skip
    report(__file__, rows)


if __name__ == "__main__":
    main()
