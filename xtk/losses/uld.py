"""uld: both distributions sorted, rank against rank."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from xtk.losses.loss_cells import ComparisonSpace, ItemRanges, LossCells, LossInputs, span_ranges
from xtk.losses.pairs_and_ranks import paired_and_ranked_cells


class ULD:
    """uld: `sum_r |t_(r) - s_(r)|` at each common boundary, averaged over boundaries.

    `x_(r)` is the r-th largest probability; the shorter side is padded with zeros. From a support of K tokens: the
    teacher's K against the student's K largest, and what is behind them as one cell on each side, which is a lower
    bound of the whole sum, equal to it at K = U. Between 0 and 2, and blind to which token is which. A token that may
    be named only for standing there is behind the ranks. No options. Universal Logit Distillation, Boizard et al.,
    arXiv 2402.12030, which compares the n-th token of one side with the n-th of the other.
    """

    comparison_space = "spans"
    averaged_over = "common boundaries"
    unit = "probability"
    requires = "ranks"

    def build_cells(self, example: LossInputs, comparison_space: ComparisonSpace) -> LossCells:
        """Return one item a span: the ranks of its first distributions, and no cells."""
        spans = span_ranges(example)
        first = ItemRanges(spans.row_start, spans.row_start + 1, spans.position_start, spans.position_start + 1)
        cells, tails = paired_and_ranked_cells(example, first, np.zeros(0, np.int32), np.iinfo(np.int64).max // 2, 1.0)
        assert cells.sorted_probs is not None
        behind = cells.sorted_probs.min_remainder + tails
        return replace(
            cells,
            prefix_product=None,
            sorted_probs=replace(cells.sorted_probs, min_remainder=behind, max_remainder=behind),
        )
