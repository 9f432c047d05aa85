"""Orthogonal matching pursuit: a donor's rows of new tokens as sparse combinations of its rows of shared tokens."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from xtk import terminal
from xtk.projection.vocabulary_pair import SparseEntries
from xtk.transplant.matching_pursuit_numba import pursue_batch

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
    with terminal.Progress("omp", len(missing), "tokens") as progress:
        for batch in np.array_split(missing, range(BATCH_TOKENS, len(missing), BATCH_TOKENS)):
            targets = torch.from_numpy(donor[batch]).to(device)
            near = (targets @ atoms.T).abs().topk(count, dim=1).indices.sort(dim=1).values
            local = atoms[near]  # [b, count, G]
            products = torch.einsum("bcg,bg->bc", local, targets)
            gram = local @ local.transpose(1, 2)
            chosen, weights = pursue_batch(gram.cpu().numpy(), products.double().cpu().numpy(), limit, TOLERANCE)
            row, at = np.nonzero(weights)
            column = near.cpu().numpy()[row, chosen[row, at]]
            parts.append(
                (batch[row].astype(np.int32), shared[column].astype(np.int32), weights[row, at] / scales[column])
            )
            progress.advance(len(batch))
    if not parts:
        return SparseEntries(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float64))
    return SparseEntries(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
