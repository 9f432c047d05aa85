"""Method `partition`: first-token entries, and the partition of both vocabularies into cells."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xtk.projection.vocabulary_pair import SparseEntries, VocabularyPair


@dataclass(frozen=True)
class PartitionMethod:
    """First-token projection with the partition of both vocabularies into cells.

    Graph: every student token is connected to the first token of its teacher tokenization, every teacher token to the
    first token of its student tokenization, special tokens to their counterparts. The cells are the connected
    components. The next token of one tokenizer determines the cell of the other's next token, but not the token within
    the cell. Used by the byte-kl loss, which needs no weights.
    """

    stores_cells = True

    def build_entries(self, pair: VocabularyPair) -> SparseEntries:
        """Return the first-token entries."""
        return pair.first_token_entries


def partition_vocabularies(
    pair: VocabularyPair, student_special_ids: NDArray[np.int32], teacher_special_ids: NDArray[np.int32]
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the cells of both vocabularies.

    Args:
        student_special_ids: int32 [n], the student's special tokens that have a counterpart.
        teacher_special_ids: int32 [n], their counterparts.

    Returns:
        int32 [V] and int32 [U], the cell of each token. Cells are numbered by their lowest student token, then cells
        without one by their lowest teacher token. A token with bytes that the other side cannot tokenize is a separate
        cell. -1: ids without bytes and without a match.
    """
    width, size = pair.shape[0], sum(pair.shape)
    forth, back = pair.first_token_entries, pair.swapped.first_token_entries
    one = np.concatenate([forth.rows, back.columns, student_special_ids]).astype(np.int64)
    other = np.concatenate([forth.columns, back.rows, teacher_special_ids]).astype(np.int64) + width
    lowest = connected_components(one, other, size)
    joined = np.zeros(size, np.bool_)
    joined[one] = joined[other] = True
    joined[np.flatnonzero(pair.student.vocabulary.byte_lengths > 0)] = True
    joined[width + np.flatnonzero(pair.teacher.vocabulary.byte_lengths > 0)] = True
    cells = np.full(size, -1, np.int32)
    cells[joined] = np.unique(lowest[joined], return_inverse=True)[1]
    return cells[:width], cells[width:]


def connected_components(sources: NDArray[np.int64], targets: NDArray[np.int64], num_nodes: int) -> NDArray[np.int64]:
    """Return the connected components of a graph.

    Args:
        sources: int64 [n], one end of each edge.
        targets: int64 [n], the other end.

    Returns:
        int64 [num_nodes], the lowest node of each node's component.
    """
    lowest = np.arange(num_nodes)
    while True:
        left, right = lowest[sources], lowest[targets]
        if (left == right).all():
            return lowest
        # The higher of two roots is attached to the lower one, then paths are compressed.
        np.minimum.at(lowest, np.maximum(left, right), np.minimum(left, right))
        while (lowest[lowest] != lowest).any():
            lowest = lowest[lowest]
