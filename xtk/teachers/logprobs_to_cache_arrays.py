"""Conversion of model outputs, with one row per position, to the ragged arrays that a cache stores."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.cache.teacher_logprobs import StoredLogprobs, Support
from xtk.numba_kernel import numba_kernel
from xtk.text.token_sequence import TokenSequence as TokenSequence


@dataclass(frozen=True)
class LogprobArrays:
    """Log-probabilities of a model at N positions."""

    ids: NDArray[np.int32]  # int32 [N, K]; -1: padding
    logprobs: NDArray[np.float32]  # float32 [N, K]
    observed_logprobs: NDArray[np.float32]  # float32 [N], of the observed token
    entropy: NDArray[np.float32]  # float32 [N], nats
    sampled_ids: NDArray[np.int32]  # int32 [N, R, n], ids sampled from the remainder, with repetitions; -1: padding
    # float32 [N], the probability outside of `ids` and the observed token, from which ids are sampled. None without
    # samples: it is computed from the others.
    remainder_mass: NDArray[np.float32] | None = None
    sampled_logprobs: NDArray[np.float32] | None = None  # float32 [N, R, n], of the sampled ids


def trained_positions(document: TokenSequence) -> NDArray[np.int32]:
    """Return int32 [P], the indices of the trained tokens of a document."""
    return np.flatnonzero(document.train_mask).astype(np.int32)


def arrays_to_stored(documents: Sequence[TokenSequence], arrays: LogprobArrays) -> list[StoredLogprobs]:
    """Return the log-probabilities of each document, from arrays over the trained tokens of all documents."""
    positions = [trained_positions(document) for document in documents]
    observed_ids = np.concatenate(
        [np.zeros(0, np.int32), *(document.ids[at] for document, at in zip(documents, positions, strict=True))]
    )
    sets = arrays.sampled_ids.shape[1]
    offsets, ids, logprobs, remainder = _unique_entries(
        arrays.ids, arrays.logprobs, observed_ids, arrays.observed_logprobs
    )
    sample_logprobs = arrays.sampled_logprobs
    if sample_logprobs is None:
        sample_logprobs = np.full(arrays.sampled_ids.shape, np.nan, np.float32)
    sample_offsets, sample_ids, counts, sample_logprobs = _sampled_entries(arrays.sampled_ids, sample_logprobs)
    remainder_mass = remainder if arrays.remainder_mass is None else arrays.remainder_mass
    edges = np.cumsum([0, *map(len, positions)])
    stored = []
    for at, low, high in zip(positions, edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        first, stop = int(offsets[low]), int(offsets[high])
        sample_first, sample_stop = int(sample_offsets[low * sets]), int(sample_offsets[high * sets])
        stored.append(
            StoredLogprobs(
                positions=at,
                offsets=offsets[low : high + 1] - first,
                ids=ids[first:stop],
                logprobs=logprobs[first:stop],
                sample_offsets=sample_offsets[low * sets : high * sets + 1] - sample_first,
                sample_ids=sample_ids[sample_first:sample_stop],
                sample_counts=counts[sample_first:sample_stop],
                remainder_mass=remainder_mass[low:high],
                observed_logprobs=arrays.observed_logprobs[low:high],
                entropy=arrays.entropy[low:high],
                sample_logprobs=None if arrays.sampled_logprobs is None else sample_logprobs[sample_first:sample_stop],
            )
        )
    return stored


def sampling_uniforms(document: TokenSequence, support: Support) -> NDArray[np.float64]:
    """Return float64 [P, R] in [0, 1), one uniform number per sample set, from the document and the seed only.

    They do not depend on batches, processes or other documents. The generator is splitmix64 (Steele, Lea, Flood 2014),
    seeded with a hash of the document's tokens.
    """
    hashed = hashlib.blake2b(document.ids.tobytes(), digest_size=8, key=support.seed.to_bytes(8, "little", signed=True))
    start = np.uint64(int.from_bytes(hashed.digest(), "little"))
    positions = trained_positions(document).astype(np.uint64)
    counter = np.add.outer(
        positions * np.uint64(max(1, support.num_sample_sets)), np.arange(support.num_sample_sets, dtype=np.uint64)
    )
    with np.errstate(over="ignore"):
        mixed = start + (counter + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    numbers: NDArray[np.float64] = (mixed >> np.uint64(11)).astype(np.float64) / 2.0**53
    return numbers


@numba_kernel
def _unique_entries(
    ids: NDArray[np.int32],
    logprobs: NDArray[np.float32],
    observed_ids: NDArray[np.int32],
    observed_logprobs: NDArray[np.float32],
) -> tuple[Any, Any, Any, Any]:
    """Return offsets, sorted unique ids with the observed token and without padding, logprobs, and remainder mass."""
    rows, columns = ids.shape
    offsets = np.zeros(rows + 1, np.int64)
    kept_ids = np.empty(rows * (columns + 1), np.int32)
    kept_logprobs = np.empty(rows * (columns + 1), np.float32)
    remainder = np.empty(rows, np.float32)
    row_ids = np.empty(columns + 1, np.int32)
    entries = 0
    for row in range(rows):
        row_ids[:columns] = ids[row]
        row_ids[columns] = observed_ids[row]
        previous = -1
        mass = 0.0
        for slot in np.argsort(row_ids, kind="mergesort"):
            token = row_ids[slot]
            if token < 0 or token == previous:
                continue
            previous = token
            logprob = observed_logprobs[row] if token == observed_ids[row] else logprobs[row, slot]
            kept_ids[entries] = token
            kept_logprobs[entries] = logprob
            entries += 1
            mass += np.exp(np.float64(logprob))
        offsets[row + 1] = entries
        remainder[row] = max(0.0, 1.0 - mass)
    return offsets, kept_ids[:entries].copy(), kept_logprobs[:entries].copy(), remainder


@numba_kernel
def _sampled_entries(sampled: NDArray[np.int32], sampled_logprobs: NDArray[np.float32]) -> tuple[Any, Any, Any, Any]:
    """Return offsets, sorted unique ids, their counts and their log-probabilities for each sample set."""
    rows, sets, num_samples = sampled.shape
    offsets = np.zeros(rows * sets + 1, np.int64)
    ids = np.empty(rows * sets * num_samples, np.int32)
    logprobs = np.empty(rows * sets * num_samples, np.float32)
    counts = np.empty(rows * sets * num_samples, np.int32)
    entries = 0
    for row in range(rows):
        for number in range(sets):
            first = entries
            for slot in np.argsort(sampled[row, number]):
                token = sampled[row, number, slot]
                if token < 0:
                    continue
                if entries > first and ids[entries - 1] == token:
                    counts[entries - 1] += 1
                else:
                    ids[entries] = token
                    counts[entries] = 1
                    logprobs[entries] = sampled_logprobs[row, number, slot]
                    entries += 1
            offsets[row * sets + number + 1] = entries
    return offsets, ids[:entries].copy(), counts[:entries].copy(), logprobs[:entries].copy()
