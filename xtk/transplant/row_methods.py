"""Methods of `xtk transplant --method`: which old rows a new token's row is combined from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from xtk.numba_kernel import numba_kernel
from xtk.progress import Progress
from xtk.projection.projection import SparseProjection
from xtk.projection.vocabulary_pair import SparseEntries
from xtk.transplant.token_sources import TokenSources

NUM_ATOMS = 64  # arXiv 2506.06607
# Chosen by us: atoms are selected among the shared tokens that are most similar to the target. All of them would take
# hours on a CPU for a real vocabulary.
NUM_CANDIDATES = 256
BATCH_TOKENS = 128
TOLERANCE = 1e-5  # of products with the residual, relative to the first: they are computed in float32


class RowMethod(Protocol):
    """A method. A dataclass; its fields are its options."""

    samples_rows: ClassVar[bool]  # sample rows without weights from the distribution of the old rows; else its mean

    def weights(self, sources: TokenSources) -> SparseEntries:
        """Return the weights of old tokens for the new tokens that are not copied."""


@dataclass(frozen=True)
class MeanOfSpelling:
    """fvt: the mean of the rows of the tokens that spell the new token (fast vocabulary transfer, arXiv 2402.09977)."""

    samples_rows: ClassVar[bool] = False

    def weights(self, sources: TokenSources) -> SparseEntries:
        """Return equal weights."""
        return _spelling_entries(sources, np.ones(len(sources.old)))


@dataclass(frozen=True)
class WeightedSpelling:
    """subword: the same, weighted by length in bytes."""

    samples_rows: ClassVar[bool] = False

    def weights(self, sources: TokenSources) -> SparseEntries:
        """Return weights by length."""
        return _spelling_entries(sources, sources.old.vocabulary.byte_lengths.astype(np.float64))


@dataclass(frozen=True)
class ProjectedRows:
    """projection: `W E` with a projection of the new tokenizer to the old one; rows of W are scaled to sum 1."""

    projection: SparseProjection = field(repr=False)

    samples_rows: ClassVar[bool] = False

    def weights(self, sources: TokenSources) -> SparseEntries:
        """Return the rows of the projection."""
        rows, masses = self.projection.entry_rows, self.projection.row_masses
        wanted = (rows < len(sources.new)) & (self.projection.teacher_ids < len(sources.old))
        wanted[wanted] = sources.copied[rows[wanted]] < 0
        wanted &= ~np.isin(rows, sources.unused_ids)
        kept = rows[wanted]
        return SparseEntries(kept, self.projection.teacher_ids[wanted], self.projection.weights[wanted] / masses[kept])


@dataclass(frozen=True)
class DonorCombination:
    """omp: a combination of shared tokens that reproduces the row in a donor with the new tokenizer.

    Orthogonal matching pursuit, arXiv 2506.06607.
    """

    donor: NDArray[np.float32] = field(repr=False)  # [at least V, G], the donor's input embedding

    samples_rows: ClassVar[bool] = False

    def weights(self, sources: TokenSources) -> SparseEntries:
        """Return at most 64 weights per token."""
        shared = np.setdiff1d(np.flatnonzero(sources.pair.equal_ids >= 0), sources.unused_ids)
        missing = np.flatnonzero((sources.copied < 0) & (sources.new.vocabulary.byte_lengths > 0))
        missing = np.setdiff1d(missing, sources.unused_ids)
        combined = combine_donor_rows(self.donor, missing, shared)
        return SparseEntries(combined.rows, sources.pair.equal_ids[combined.columns], combined.weights)


@dataclass(frozen=True)
class MeanRow:
    """mean: the mean of all old rows; a baseline."""

    samples_rows: ClassVar[bool] = False

    def weights(self, sources: TokenSources) -> SparseEntries:
        """Return no weights."""
        return no_entries()


@dataclass(frozen=True)
class RandomRow(MeanRow):
    """random: sampled from the normal distribution with mean and covariance of the old rows; a baseline."""

    samples_rows: ClassVar[bool] = True


METHODS: dict[str, str] = {
    "fvt": "xtk.transplant.row_methods:MeanOfSpelling",
    "subword": "xtk.transplant.row_methods:WeightedSpelling",
    "projection": "xtk.transplant.row_methods:ProjectedRows",
    "omp": "xtk.transplant.row_methods:DonorCombination",
    "mean": "xtk.transplant.row_methods:MeanRow",
    "random": "xtk.transplant.row_methods:RandomRow",
}


def _spelling_entries(sources: TokenSources, importance: NDArray[np.float64]) -> SparseEntries:
    """Return an entry for each token of each spelling; weights are `importance` [U], scaled to sum 1 in a spelling."""
    spelled = sources.pair.spellings  # without tokens that the old tokenizer cannot spell
    at = np.repeat(np.arange(len(spelled.token_ids)), spelled.lengths)
    weights = importance[spelled.spelling_ids]
    weights = weights / np.bincount(at, weights, minlength=1)[at]
    wanted = sources.copied[spelled.token_ids[at]] < 0
    return SparseEntries(spelled.token_ids[at][wanted], spelled.spelling_ids[wanted], weights[wanted])


def combine_donor_rows(
    donor: NDArray[np.float32],  # float32 [V, G]
    missing: NDArray[np.int64],  # [m], tokens to combine
    shared: NDArray[np.int64],  # [s], tokens whose rows are atoms
    *,
    num_atoms: int = NUM_ATOMS,  # largest number of entries per row; at most G
    # shared tokens among which atoms are selected: those most similar to the target
    num_candidates: int = NUM_CANDIDATES,
) -> SparseEntries:
    """Return weights of shared tokens whose combination is closest to the donor's row of each missing token.

    The first atom is the shared token whose normalized row has the largest product with the target; each next one has
    the largest product with the residual of the least-squares fit by the atoms before.

    Returns:
        Entries: missing token, shared token, weight.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    scales = np.maximum(np.linalg.norm(donor[shared], axis=1), 1e-12).astype(np.float32)
    atoms = torch.from_numpy(donor[shared] / scales[:, None]).to(device)
    count = min(num_candidates, len(shared))
    limit = min(num_atoms, count, donor.shape[1])
    parts: list[tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float64]]] = []
    with Progress("transplant", len(missing), "tokens") as progress:
        for batch in np.array_split(missing, range(BATCH_TOKENS, len(missing), BATCH_TOKENS)):
            targets = torch.from_numpy(donor[batch]).to(device)
            near = (targets @ atoms.T).abs().topk(count, dim=1).indices.sort(dim=1).values
            local = atoms[near]  # [b, count, G]
            products = torch.einsum("bcg,bg->bc", local, targets)
            gram = local @ local.transpose(1, 2)
            chosen, weights = pursue_batch(gram.cpu().numpy(), products.double().cpu().numpy(), limit, TOLERANCE)
            row, at = np.nonzero(weights)
            column = near.cpu().numpy()[row, chosen[row, at]]
            old, values = shared[column].astype(np.int32), weights[row, at] / scales[column]
            parts.append((batch[row].astype(np.int32), old, values))
            progress.advance(len(batch))
    return SparseEntries(*map(np.concatenate, zip(*parts, strict=True))) if parts else no_entries()


def no_entries() -> SparseEntries:
    """Return weights of no tokens."""
    return SparseEntries(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float64))


@numba_kernel
def pursue_batch(
    gram: NDArray[np.floating[Any]],  # [b, c, c], products of normalized atoms with each other
    products: NDArray[np.float64],  # [b, c], products of the atoms with the target
    num_atoms: int,  # largest number of atoms per target
    tolerance: float,  # stop if no remaining atom has a larger product with the residual, relative to the first one
) -> Any:
    """Return atoms int64 and weights float64 [b, num_atoms] of each target; unused places have weight 0."""
    targets, count = products.shape
    chosen = np.zeros((targets, num_atoms), np.int64)
    weights = np.zeros((targets, num_atoms))
    # Lower triangular: factor @ factor.T is the chosen part of the Gram matrix.
    factor = np.zeros((num_atoms, num_atoms))
    solved = np.zeros(num_atoms)
    for target in range(targets):
        residual = products[target].copy()
        used = np.zeros(count, np.bool_)
        first = np.abs(residual).max() if count else 0.0
        size = 0
        while size < num_atoms:
            best, largest = -1, tolerance * first
            for atom in range(count):
                if not used[atom] and abs(residual[atom]) > largest:
                    best, largest = atom, abs(residual[atom])
            if best < 0:
                break
            used[best] = True
            rest = gram[target, best, best]
            for row in range(size):  # a row of the Cholesky factor
                value = gram[target, best, chosen[target, row]]
                for column in range(row):
                    value -= factor[size, column] * factor[row, column]
                factor[size, row] = value / factor[row, row]
                rest -= factor[size, row] ** 2
            if rest <= 1e-10:  # a combination of the atoms before
                continue
            factor[size, size] = np.sqrt(rest)
            chosen[target, size] = best
            value = products[target, best]
            for column in range(size):
                value -= factor[size, column] * solved[column]
            solved[size] = value / factor[size, size]
            size += 1
            for row in range(size - 1, -1, -1):  # weights: factor.T @ weights = solved
                value = solved[row]
                for below in range(row + 1, size):
                    value -= factor[below, row] * weights[target, below]
                weights[target, row] = value / factor[row, row]
            residual[:] = products[target]
            for row in range(size):
                residual -= gram[target, chosen[target, row]] * weights[target, row]  # a row: contiguous in memory
    return chosen, weights
