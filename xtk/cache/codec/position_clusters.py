"""Clusters of positions with similar likely tokens, and the frequent ids of each cluster.

After a digit, other ids are likely than after "the". Each cluster lists its frequent ids, the most frequent first, so
that an id is encoded as its short rank in this list.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xtk.cache.codec.symbol_probability_contexts import NUM_LEVEL_CONTEXTS
from xtk.numba_kernel import numba_kernel

MAX_CLUSTERS = 64
ENTRIES_PER_CLUSTER = 8192  # a list of frequent ids is worth its bytes only if it is used often
KMEANS_ITERATIONS = 8
COST_SCALE = 64  # costs are integers, so that their sums are the same on every machine
SMOOTHING = 50.0
MIN_COUNT = 4  # rarer ids of a cluster are not listed as frequent


def choose_num_clusters(entries: int) -> int:
    """Return the number of clusters for a shard with this many entries."""
    return max(1, min(MAX_CLUSTERS, entries // ENTRIES_PER_CLUSTER))


def cluster_positions(
    offsets: NDArray[np.int64], ids: NDArray[np.int32], num_clusters: int, vocab_size: int
) -> NDArray[np.int64]:
    """Return the cluster of each position, so that ids take few bits under the id frequencies of their cluster.

    K-means with this cost, seeded with evenly spaced positions, for KMEANS_ITERATIONS iterations.

    Args:
        offsets: [P + 1]: the ids of position p are `[offsets[p], offsets[p + 1])`.
        ids: [E].

    Returns:
        int64 [P], cluster numbers from 0 without gaps.
    """
    positions = len(offsets) - 1
    clusters = np.zeros(positions, np.int64)
    if num_clusters < 2 or not len(ids):
        return clusters
    totals = np.bincount(ids, minlength=vocab_size)
    used = np.flatnonzero(totals)
    numbers = np.zeros(vocab_size, np.int32)
    numbers[used] = np.arange(len(used))
    dense, mean = numbers[ids], totals[used] / len(ids)
    seeds = np.arange(num_clusters) * positions // num_clusters
    counts = np.zeros((len(used), num_clusters), np.int64)
    for cluster, seed in enumerate(seeds.tolist()):
        counts[dense[offsets[seed] : offsets[seed + 1]], cluster] = 1
    sizes = np.ones(num_clusters, np.int64)
    for _ in range(KMEANS_ITERATIONS):
        shares = (counts + SMOOTHING * mean[:, None]) / (counts.sum(0) + SMOOTHING)
        costs = np.rint(-COST_SCALE * np.log2(shares)).astype(np.int32)
        own = np.rint(-COST_SCALE * np.log2((sizes + 1) / (positions + num_clusters))).astype(np.int32)
        counts[:] = 0
        assign_clusters(offsets, dense, costs, own, clusters, counts)
        sizes = np.bincount(clusters, minlength=num_clusters)
    names = np.cumsum(sizes > 0) - 1
    return names[clusters]


@numba_kernel
def assign_clusters(
    offsets: NDArray[np.int64],  # [P + 1]
    ids: NDArray[np.int32],  # [E]
    costs: NDArray[np.int32],  # [ids, C], of each id in each cluster
    own: NDArray[np.int32],  # [C], cost of encoding the cluster itself
    assigned: NDArray[np.int64],  # [P], filled with clusters
    counts: NDArray[np.int64],  # [ids, C], added to
) -> None:
    """Assign each position to the cheapest cluster, and count the ids of each cluster."""
    clusters = np.uint64(len(own))
    flat, total = costs.ravel(), np.empty(len(own), np.int32)
    for position in range(len(assigned)):
        total[:] = own
        for entry in range(offsets[position], offsets[position + 1]):
            row = np.uint64(ids[entry]) * clusters
            # Unsigned, so that the loop is vectorized.
            for cluster in range(clusters):
                total[cluster] += flat[row + cluster]
        best = total.argmin()
        assigned[position] = best
        for entry in range(offsets[position], offsets[position + 1]):
            counts[ids[entry], best] += 1


@dataclass(frozen=True)
class FrequentIds:
    """The most frequent ids of each position cluster."""

    cluster_starts: NDArray[np.int64]  # [C + 1]: the ids of cluster c are `[starts[c], starts[c + 1])`
    ids: NDArray[np.int32]  # [F], in each cluster roughly the most frequent first
    # [F], context of each id's levels, by its usual probability; below NUM_LEVEL_CONTEXTS - 1.
    level_contexts: NDArray[np.int64]
    runs: NDArray[np.int64]  # [C], number of runs of each cluster; frequency ranks increase within a run
    run_lengths: NDArray[np.int64]  # [total runs]

    @property
    def num_clusters(self) -> int:
        """C, the number of clusters."""
        return len(self.cluster_starts) - 1


def find_frequent_ids(
    clusters: NDArray[np.int64],  # [E], cluster of each entry's position
    ids: NDArray[np.int32],  # [E]
    heights: NDArray[np.int64],  # [E], number of levels of each entry above the lowest finite level of its position
    ranks: NDArray[np.int32],  # [U], frequency ranks in the cache, for the order of about equally frequent ids
) -> FrequentIds:
    """Return the most frequent ids of each cluster."""
    count = int(clusters.max()) + 1 if len(clusters) else 1
    width = len(ranks)
    pairs = clusters * width + ids
    times = np.bincount(pairs, minlength=count * width)
    chosen = np.flatnonzero(times >= MIN_COUNT)
    times, owners, ids = times[chosen], chosen // width, (chosen % width).astype(np.int32)
    sums = np.bincount(pairs, heights, minlength=count * width)[chosen].astype(np.int64)
    means = 16 * sums // times
    # Level contexts with about the same number of entries each.
    order = np.argsort(means, kind="stable")
    before = np.cumsum(times[order]) - times[order]
    levels = np.empty(len(chosen), np.int64)
    levels[order] = before * (NUM_LEVEL_CONTEXTS - 1) // max(int(times.sum()), 1)
    # About equally frequent ids are sorted by rank, which takes few bits to encode.
    runs = owners * 64 + 63 - half_octaves(times)
    order = np.lexsort((ranks[ids], runs))
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(owners, minlength=count))])
    lengths = np.unique(runs, return_counts=True)
    return FrequentIds(
        starts, ids[order], levels[order], np.bincount(lengths[0] // 64, minlength=count), lengths[1].astype(np.int64)
    )


def half_octaves(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return 0 for 1, 2 for 2, 3 for 3, 4 for 4 and 5, 5 for 6 and 7, 6 for 8 to 11, 7 for 12 to 15, and so on."""
    mantissas, exponents = np.frexp(numbers.astype(np.float64))
    return 2 * (exponents.astype(np.int64) - 1) + (mantissas >= 0.75)
