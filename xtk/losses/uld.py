"""uld: L1 distance between the sorted probabilities of both models."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from xtk.losses.cells.loss_cells import LossCells
from xtk.losses.cells.sorted_probs import SortedProbCells
from xtk.losses.interface import NO_STOP_CLASS, ComparisonSpace, Loss, LossInputs, span_ranges


class ULD(Loss):
    """uld: `sum_r |t_(r) - s_(r)|` at each shared boundary, averaged over boundaries.

    A shared boundary is a byte offset where both models begin a token; `x_(r)` is the r-th largest probability; the
    smaller vocabulary is padded with zeros. With a support of K tokens, the teacher's K tokens are compared with the
    student's K largest, and the remainders as one more rank: a lower bound of the full sum, equal to it if K is the
    vocabulary. Between 0 and 2; it ignores which token is which. An observed token that may be listed only because it
    was observed is not ranked. No options except `where` and `whitespace`. Universal Logit Distillation, Boizard et
    al., arXiv 2402.12030, which compares the n-th token of one model with the n-th of the other.
    """

    comparison_space = "spans"
    averaged_over = "shared boundaries"
    unit = "probability"
    requires = "ranks"
    takes_divergence = False
    stop_class = NO_STOP_CLASS

    def build_cells(self, example: LossInputs, comparison_space: ComparisonSpace) -> LossCells:
        """Return one item per span: the sorted probabilities at its first token, and no cells."""
        first, unpaired = span_ranges(example).first_only(), np.zeros(0, np.int32)
        cells = SortedProbCells.from_teacher(example, first, unpaired, np.iinfo(np.int64).max // 2, 1.0)
        return replace(cells, min_remainder=cells.max_remainder, ignores_remainder=True)
