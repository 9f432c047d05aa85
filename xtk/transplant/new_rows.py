"""Rows of an embedding or an output head for new tokens, computed in chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xtk.projection.vocabulary_pair import SparseEntries
from xtk.transplant.token_sources import TokenSources

CHUNK_TOKENS = 1024
NORM_BINS = 64  # tokens of like frequency: a 64th of the vocabulary, by id, since ids follow frequency in training


def new_rows(
    table: Tensor,  # [at least U, H], the old rows
    sources: TokenSources,
    weights: SparseEntries,  # of old tokens for other new tokens
    num_rows: int,  # at least V; rows beyond the tokenizer, and those without weights, get the mean of the old rows
    *,
    # int32 [V], the old token of each new token that gets the old row unchanged, or -1; None: that of the sources
    copied: NDArray[np.int32] | None = None,
    # sample rows without weights from the distribution of the old rows instead, with this seed
    sampling_seed: int | None = None,
    match_norms: bool = False,  # scale combined rows to the median norm of old rows of like frequency
) -> Iterator[tuple[int, Tensor]]:
    """Yield (first token, rows) of a new table, in order."""
    old = table.detach()[: len(sources.old)].float()
    order = np.argsort(weights.rows, kind="stable")
    rows, columns, values = (part[order] for part in weights)
    mean = old[torch.from_numpy(np.flatnonzero(sources.old.vocabulary.byte_lengths > 0))].mean(0)
    factor, generator = None, torch.Generator()
    if sampling_seed is not None:
        factor = _covariance_factor(old, mean)
        generator.manual_seed(sampling_seed)
    norms = _typical_norms(old) if match_norms else None
    for start in range(0, num_rows, CHUNK_TOKENS):
        stop = min(start + CHUNK_TOKENS, num_rows)
        made = mean.repeat(stop - start, 1)
        if factor is not None:
            sampled = torch.randn(made.shape, generator=generator) @ factor
            count = max(0, min(stop, len(sources.new)) - start)
            made[:count] += sampled[:count]
        first, last = np.searchsorted(rows, [start, stop])
        if last > first:
            _combine(made, old, rows[first:last] - start, columns[first:last], values[first:last])
            if norms is not None:
                _scale(made, np.unique(rows[first:last]), start, norms, len(sources.new))
        old_ids = (sources.copied if copied is None else copied)[start:stop]
        at = np.flatnonzero(old_ids >= 0)
        made[torch.from_numpy(at)] = old[torch.from_numpy(old_ids[at].astype(np.int64))]
        yield start, made


def _combine(made: Tensor, old: Tensor, rows: NDArray[Any], columns: NDArray[Any], values: NDArray[Any]) -> None:
    """Replace rows by weighted sums of old rows."""
    at = torch.from_numpy(rows.astype(np.int64))
    made[at] = 0
    parts = old[torch.from_numpy(columns.astype(np.int64))]
    made.index_add_(0, at, parts * torch.from_numpy(values.astype(np.float32))[:, None])


def _scale(made: Tensor, tokens: NDArray[Any], start: int, norms: Tensor, num_tokens: int) -> None:
    """Scale rows to the typical norm of old rows at the same relative place in the vocabulary."""
    places = (np.arange(len(norms)) + 0.5) / len(norms)
    wanted = torch.from_numpy(np.interp(tokens / num_tokens, places, norms.numpy()).astype(np.float32))
    at = torch.from_numpy((tokens - start).astype(np.int64))
    made[at] *= (wanted / made[at].norm(dim=1).clamp_min(1e-12))[:, None]


def _typical_norms(old: Tensor) -> Tensor:
    """Return the median norm of each 64th of the vocabulary."""
    parts = np.array_split(old.norm(dim=1).numpy(), min(NORM_BINS, len(old)))
    return torch.tensor([float(np.median(part)) for part in parts])


def _covariance_factor(old: Tensor, mean: Tensor) -> Tensor:
    """Return [H, H]; standard normal rows times it have the covariance of the old rows."""
    product = torch.zeros(old.shape[1], old.shape[1], dtype=torch.float64)
    for start in range(0, len(old), 8192):
        centered = (old[start : start + 8192] - mean).double()
        product += centered.T @ centered
    values, vectors = torch.linalg.eigh(product / len(old))
    factor: Tensor = vectors * values.clamp_min(0).sqrt() @ vectors.T
    return factor.float()
