"""Cross-entropy on the student's own tokens."""

from __future__ import annotations

import numpy as np

from xtk.losses.cells.loss_cells import LossCells
from xtk.losses.interface import ComparisonSpace, Loss, LossInputs


class CrossEntropy(Loss):
    """ce: `-ln s(x_i)`, averaged over the trained student tokens `x_i`.

    One cell per token, of probability 1 in the data.
    """

    comparison_space = "text"
    averaged_over = "student tokens"
    requires = "nothing"
    takes_divergence = False

    def build_cells(self, example: LossInputs, comparison_space: ComparisonSpace) -> LossCells:
        """Return one item per trained token."""
        size = len(example.positions)
        return LossCells.from_numpy(
            cell_offsets=np.arange(size + 1, dtype=np.int64),
            entry_offsets=np.arange(size + 1, dtype=np.int64),
            teacher_probs=np.ones(size, np.float32),
            rows=np.arange(size, dtype=np.int32),
            tokens=example.student_ids[example.positions + 1],
        )
