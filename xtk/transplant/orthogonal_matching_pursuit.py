"""Orthogonal matching pursuit: a donor's rows of new tokens as sparse combinations of its rows of shared tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from xtk.numba_kernel import numba_kernel
from xtk.progress import Progress
from xtk.projection.vocabulary_pair import SparseEntries

NUM_ATOMS = 64  # arXiv 2506.06607
# Chosen by us: atoms are selected among the shared tokens that are most similar to the target. All of them would take
# hours on a CPU for a real vocabulary.
NUM_CANDIDATES = 256
BATCH_TOKENS = 128
TOLERANCE = 1e-5  # of products with the residual, relative to the first: they are computed in float32


def combine_donor_rows(
    donor: NDArray[np.float32],
    missing: NDArray[np.int64],
    shared: NDArray[np.int64],
    *,
    num_atoms: int = NUM_ATOMS,
    num_candidates: int = NUM_CANDIDATES,
) -> SparseEntries:
    """Return weights of shared tokens whose combination is closest to the donor's row of each missing token.

    The first atom is the shared token whose normalized row has the largest product with the target; each next one has
    the largest product with the residual of the least-squares fit by the atoms before.

    Args:
        donor: float32 [V, G].
        missing: [m], tokens to combine.
        shared: [s], tokens whose rows are atoms.
        num_atoms: largest number of entries per row; at most G.
        num_candidates: shared tokens among which atoms are selected: those most similar to the target.

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
    gram: NDArray[np.floating[Any]], products: NDArray[np.float64], num_atoms: int, tolerance: float
) -> Any:
    """Return the atoms of each target, each with its own Gram matrix, and their weights.

    Args:
        gram: [b, c, c], products of normalized atoms with each other.
        products: [b, c], products of the atoms with the target.
        num_atoms: largest number of atoms per target.
        tolerance: stop if no remaining atom has a larger product with the residual, relative to the first one.

    Returns:
        int64 [b, num_atoms] and float64 [b, num_atoms]; unused places have weight 0.
    """
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
