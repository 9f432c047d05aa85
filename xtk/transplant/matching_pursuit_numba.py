"""Orthogonal matching pursuit of many targets, each with its own Gram matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.numba_kernel import numba_kernel


@numba_kernel
def pursue_batch(
    gram: NDArray[np.floating[Any]], products: NDArray[np.float64], num_atoms: int, tolerance: float
) -> Any:
    """Return the atoms of each target and their weights.

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
    factor = np.zeros(
        (num_atoms, num_atoms)
    )  # lower triangular: factor @ factor.T is the chosen part of the Gram matrix
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
