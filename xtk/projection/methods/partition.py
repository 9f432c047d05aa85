"""cells: the partition of both vocabularies into what the sides can tell apart at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xtk.projection.vocabulary_pair import SparseEntries, VocabularyPair


@dataclass(frozen=True)
class PartitionMethod:
    """W as `first` fills it, and the partition beside it.

    Every student token is joined with the first token of its spelling by the teacher's tokenizer, every
    teacher token with the first of its spelling by the student's, special tokens with their counterparts. The
    connected components are the cells. What comes next cannot tell two tokens of one cell apart at once; tokens
    of two cells it can. For xtk's byte-level loss, which needs no weights.
    """

    stores_cells = True

    def build_entries(self, pair: VocabularyPair) -> SparseEntries:
        """Return the entries of `first`."""
        return pair.first_token_entries


def partition_vocabularies(
    pair: VocabularyPair, student_special_ids: NDArray[np.int32], teacher_special_ids: NDArray[np.int32]
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Cut both vocabularies into cells.

    Args:
        pair: the vocabularies.
        student_special_ids: int32 [n], the student's special tokens that have a counterpart.
        teacher_special_ids: int32 [n], their counterparts.

    Returns:
        int32 [V] and int32 [U], the cell of each token. Cells are numbered in the order of their lowest student
        token, then, where they have none, of their lowest teacher token. A token that spells something and
        that the other side cannot spell is a cell of its own. -1: ids that spell nothing and match nothing.
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
    """Find the connected components of a graph.

    Args:
        sources: int64 [n], an end of each edge.
        targets: int64 [n], its other end.
        num_nodes: the number of nodes.

    Returns:
        int64 [size], the lowest node of each node's component.
    """
    lowest = np.arange(num_nodes)
    while True:
        left, right = lowest[sources], lowest[targets]
        if (left == right).all():
            return lowest
        # The higher of two roots is hooked under the lower one, then every path is cut to its root.
        np.minimum.at(lowest, np.maximum(left, right), np.minimum(left, right))
        while (lowest[lowest] != lowest).any():
            lowest = lowest[lowest]
