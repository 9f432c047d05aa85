"""What uld, gold and h-kl share: tokens of one side in pairs with the other's, and the rest of both by rank."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xtk.losses.loss_cells import ItemRanges, LossCells, LossInputs, PrefixProduct, SortedProbs


def paired_and_ranked_cells(
    example: LossInputs, ranges: ItemRanges, student_of_teacher: NDArray[np.int32], max_ranks: int, rank_weight: float
) -> tuple[LossCells, NDArray[np.float32]]:
    """Return one item a range: cells of the pairs and ranks of what has no partner, both of its last row.

    Both sides are multiplied with the probabilities of their own tokens before the last.

    Args:
        example: both sides.
        ranges: whose rows and positions are merged.
        student_of_teacher: int32 [U], the student's token for each of the teacher's; -1: none.
        max_ranks: ranks of an item at most.
        rank_weight: of the ranks.

    Returns:
        The cells, with ranks of which nothing is known behind the last but what the teacher named, and [C], the
        teacher's mass of which nothing is known.
    """
    from xtk.losses.sorted_prob_kernels import fill_paired_cells

    signal = example.teacher_logprobs
    assert signal is not None
    cell_offsets, probs, rows, tokens, links, rank_offsets, rank_probs, behind, tails = fill_paired_cells(
        ranges.row_start,
        ranges.row_stop,
        ranges.position_start,
        ranges.position_stop,
        example.student_ids[example.positions + 1],
        signal.offsets,
        signal.ids,
        signal.logprobs,
        example.teacher_ids[signal.positions],
        signal.observed_logprobs,
        student_of_teacher,
        max_ranks,
    )
    ranks = SortedProbs(
        rows=(ranges.row_stop - 1).astype(np.int32),
        offsets=rank_offsets,
        probs=rank_probs,
        min_remainder=behind,
        max_remainder=behind,
        excluded_tokens=None,
        weight=rank_weight,
    )
    cells = LossCells(
        cell_offsets=cell_offsets,
        entry_offsets=np.arange(len(rows) + 1, dtype=np.int64),
        teacher_probs=probs,
        rows=rows,
        tokens=tokens,
        log_weights=np.zeros(len(rows), np.float32),
        item_rows=ranges.row_start.astype(np.int32),
        prefix_product=PrefixProduct(links),
        sorted_probs=ranks,
    )
    return cells, tails
