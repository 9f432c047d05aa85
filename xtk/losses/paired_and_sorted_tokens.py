"""Cells of paired tokens and sorted probabilities of all others, shared by the losses uld, gold and h-kl."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xtk.losses.loss_interface import ItemRanges, LossCells, LossInputs, PrefixProduct, SortedProbs


def paired_and_ranked_cells(
    example: LossInputs, ranges: ItemRanges, student_of_teacher: NDArray[np.int32], max_ranks: int, rank_weight: float
) -> tuple[LossCells, NDArray[np.float32]]:
    """Return one item per range: cells of paired tokens and ranks of unpaired tokens, both in its last row.

    Both distributions are multiplied by the probabilities of the model's own tokens before the last.

    Args:
        example: the inputs of the loss.
        ranges: rows and teacher positions of each item.
        student_of_teacher: int32 [U], the student token paired with each teacher token; -1: none.
        max_ranks: largest number of ranks per item.
        rank_weight: factor of the rank differences.

    Returns:
        The cells, whose ranks assume that after the last rank the teacher has only mass that it lists; and float32
        [C], the teacher's remainder, the mass that it does not list.
    """
    from xtk.losses.sorted_probs_numba import fill_paired_cells

    teacher = example.teacher_logprobs
    assert teacher is not None
    cell_offsets, probs, rows, tokens, num_prefix_tokens, rank_offsets, rank_probs, after_last_rank, remainders = (
        fill_paired_cells(
            ranges.row_start,
            ranges.row_stop,
            ranges.position_start,
            ranges.position_stop,
            example.student_ids[example.positions + 1],
            teacher.offsets,
            teacher.ids,
            teacher.logprobs,
            example.teacher_ids[teacher.positions],
            teacher.observed_logprobs,
            student_of_teacher,
            max_ranks,
        )
    )
    ranks = SortedProbs(
        rows=(ranges.row_stop - 1).astype(np.int32),
        offsets=rank_offsets,
        probs=rank_probs,
        min_remainder=after_last_rank,
        max_remainder=after_last_rank,
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
        prefix_product=PrefixProduct(num_prefix_tokens),
        sorted_probs=ranks,
    )
    return cells, remainders
