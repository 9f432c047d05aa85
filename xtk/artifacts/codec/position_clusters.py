"""Kinds of positions: where a model chooses among like tokens, the same ids are kept, and short numbers can name them.

After a digit other ids are likely than after "the". So the positions of a shard are divided into kinds, and each kind
lists its favourites, those ids that are kept most often first. It is told of an id which place it has there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from xtk.artifacts.codec.coding_contexts import NUM_LEVEL_CONTEXTS

MAX_CLUSTERS = 64
ENTRIES_PER_CLUSTER = 8192  # a list of favourites is worth its bytes where it is used often
KMEANS_ROUNDS = 8
COST_SCALE = 64  # costs are whole numbers, so that their sums are the same everywhere
SMOOTHING = 50.0
MIN_COUNT = 4  # an id that a kind keeps less often is not worth a place among its favourites


def choose_num_clusters(entries: int) -> int:
    """Return how many kinds of positions are worth their lists of favourites."""
    return max(1, min(MAX_CLUSTERS, entries // ENTRIES_PER_CLUSTER))


def cluster_positions(
    offsets: NDArray[np.int64], ids: NDArray[np.int32], num_clusters: int, vocab_size: int
) -> NDArray[np.int64]:
    """Divide positions into kinds so that their ids, as if drawn from the mean of their kind, take few bits.

    K-means with that cost, from seeds that lie evenly over the positions, for a fixed count of rounds.

    Args:
        offsets: [P + 1]: the ids of position p are `[offsets[p], offsets[p + 1])`.
        ids: [E].
        num_clusters: how many there may be.
        vocab_size: U, of the vocabulary.

    Returns:
        int64 [P], from 0 on, without a gap.
    """
    positions = len(offsets) - 1
    found = np.zeros(positions, np.int64)
    if num_clusters < 2 or not len(ids):
        return found
    totals = np.bincount(ids, minlength=vocab_size)
    used = np.flatnonzero(totals)
    numbers = np.zeros(vocab_size, np.int32)
    numbers[used] = np.arange(len(used))
    dense, mean = numbers[ids], totals[used] / len(ids)
    seeds = np.arange(num_clusters) * positions // num_clusters
    counts = np.zeros((len(used), num_clusters), np.int64)
    for kind, seed in enumerate(seeds.tolist()):
        counts[dense[offsets[seed] : offsets[seed + 1]], kind] = 1
    sizes = np.ones(num_clusters, np.int64)
    for _ in range(KMEANS_ROUNDS):
        shares = (counts + SMOOTHING * mean[:, None]) / (counts.sum(0) + SMOOTHING)
        costs = np.rint(-COST_SCALE * np.log2(shares)).astype(np.int32)
        own = np.rint(-COST_SCALE * np.log2((sizes + 1) / (positions + num_clusters))).astype(np.int32)
        counts[:] = 0
        assign_clusters(offsets, dense, costs, own, found, counts)
        sizes = np.bincount(found, minlength=num_clusters)
    names = np.cumsum(sizes > 0) - 1
    return names[found]


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def assign_clusters(
    offsets: NDArray[np.int64],
    ids: NDArray[np.int32],
    costs: NDArray[np.int32],
    own: NDArray[np.int32],
    found: NDArray[np.int64],
    counts: NDArray[np.int64],
) -> None:
    """Give each position the cheapest kind, and count the ids of each kind.

    Args:
        offsets: [P + 1].
        ids: [E].
        costs: [ids, kinds].
        own: [kinds], the cost of naming each.
        found: [P], filled.
        counts: [ids, kinds], added to.
    """
    kinds = np.uint64(len(own))
    flat, total = costs.ravel(), np.empty(len(own), np.int32)
    for position in range(len(found)):
        total[:] = own
        for entry in range(offsets[position], offsets[position + 1]):
            row = np.uint64(ids[entry]) * kinds
            # Unsigned, so that the processor can add many at once.
            for kind in range(kinds):
                total[kind] += flat[row + kind]
        best = total.argmin()
        found[position] = best
        for entry in range(offsets[position], offsets[position + 1]):
            counts[ids[entry], best] += 1


@dataclass(frozen=True)
class FrequentIds:
    """The ids that positions of each kind keep most often.

    Attributes:
        cluster_starts: int64 [C + 1]: those of kind c are `[starts[c], starts[c + 1])`.
        ids: int32 [F], most frequent first, about.
        level_contexts: int64 [F], below LEVELS - 1: how likely each mostly is, as a context of its levels.
        runs: int64 [C]: within a run of favourites, ranks rise; how many runs each kind has.
        run_lengths: int64 [runs of all kinds].
    """

    cluster_starts: NDArray[np.int64]
    ids: NDArray[np.int32]
    level_contexts: NDArray[np.int64]
    runs: NDArray[np.int64]
    run_lengths: NDArray[np.int64]

    @property
    def num_clusters(self) -> int:
        """C."""
        return len(self.cluster_starts) - 1


def find_frequent_ids(
    clusters: NDArray[np.int64], ids: NDArray[np.int32], heights: NDArray[np.int64], ranks: NDArray[np.int32]
) -> FrequentIds:
    """Return what each kind keeps most often.

    Args:
        clusters: [E], of the positions of the ids.
        ids: [E].
        heights: [E], by how many levels each is above the floor of its position.
        ranks: [U], of all ids, for the order of ids that are equally frequent.
    """
    count = int(clusters.max()) + 1 if len(clusters) else 1
    width = len(ranks)
    pairs = clusters * width + ids
    times = np.bincount(pairs, minlength=count * width)
    chosen = np.flatnonzero(times >= MIN_COUNT)
    times, owners, ids = times[chosen], chosen // width, (chosen % width).astype(np.int32)
    sums = np.bincount(pairs, heights, minlength=count * width)[chosen].astype(np.int64)
    means = 16 * sums // times
    # Classes that hold about as many entries each.
    order = np.argsort(means, kind="stable")
    before = np.cumsum(times[order]) - times[order]
    levels = np.empty(len(chosen), np.int64)
    levels[order] = before * (NUM_LEVEL_CONTEXTS - 1) // max(int(times.sum()), 1)
    # Of about equally frequent ids, the order of the ranks takes few bits to tell.
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
