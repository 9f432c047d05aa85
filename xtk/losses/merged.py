"""What uld, gold and h-kl share: tokens of one side in pairs with the other's, and the rest of both by rank."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xtk.losses.cells import Cells, Chain, Example, Ranges, Ranks


def merged_cells(
    example: Example, ranges: Ranges, partners: NDArray[np.int32], cap: int, weight: float
) -> tuple[Cells, NDArray[np.float32]]:
    """Return one item a range: cells of the pairs and ranks of what has no partner, both of its last row.

    Both sides are multiplied with the probabilities of their own tokens before the last.

    Args:
        example: both sides.
        ranges: whose rows and positions are merged.
        partners: int32 [U], the student's token for each of the teacher's; -1: none.
        cap: ranks of an item at most.
        weight: of the ranks.

    Returns:
        The cells, with ranks of which nothing is known behind the last but what the teacher named, and [C], the
        teacher's mass of which nothing is known.
    """
    from xtk.losses.rank_kernels import fill_merged_cells

    signal = example.signal
    assert signal is not None
    cell_offsets, probs, rows, tokens, links, rank_offsets, rank_probs, behind, tails = fill_merged_cells(
        ranges.row_start,
        ranges.row_stop,
        ranges.position_start,
        ranges.position_stop,
        example.student_ids[example.rows + 1],
        signal.offsets,
        signal.ids,
        signal.logprobs,
        example.teacher_ids[signal.positions],
        signal.realised_logprobs,
        partners,
        cap,
    )
    ranks = Ranks(
        rows=(ranges.row_stop - 1).astype(np.int32),
        offsets=rank_offsets,
        probs=rank_probs,
        least=behind,
        most=behind,
        unranked=None,
        weight=weight,
    )
    cells = Cells(
        cell_offsets=cell_offsets,
        entry_offsets=np.arange(len(rows) + 1, dtype=np.int64),
        teacher_probs=probs,
        rows=rows,
        tokens=tokens,
        log_weights=np.zeros(len(rows), np.float32),
        item_rows=ranges.row_start.astype(np.int32),
        chain=Chain(links),
        ranks=ranks,
    )
    return cells, tails
