"""simct: shared tokens and the observed span as candidates, each scored by its mean log-probability."""

from __future__ import annotations

import numpy as np

from xtk.losses.cells.loss_cells import LossCells
from xtk.losses.cells.shared_vocabulary_cells import CandidateUnitCells, shared_cell_fields
from xtk.losses.interface import ComparisonSpace, Loss, LossInputs, range_indices, range_sums, span_ranges
from xtk.projection.projection import ProjectionColumns


class SimCT(Loss):
    """simct: `KL((s_c, s_rem) | (t_c, t_rem))` over candidates at the start of each span, averaged over spans.

    Candidates are the shared tokens, and the span itself as one unit, unless it is a shared token. The score of a
    candidate is the mean of the log-probabilities of its tokens, in each model's own tokens; `s_c` and `t_c` are the
    softmax of the scores over the candidates. The remainders contain the shared tokens that the teacher's support does
    not list. A shared token has equal bytes in both vocabularies, or is a special token of the same role. Options:
    `divergence` (reverse-kl) and its options. SimCT, arXiv 2605.07711, from the teacher's full distribution.
    """

    comparison_space = "pairs"
    averaged_over = "spans"
    requires = "exact"
    default_divergence = "reverse-kl"

    def build_cells(self, example: LossInputs, comparison_space: ComparisonSpace) -> LossCells:
        """Return one item per span."""
        assert isinstance(comparison_space, ProjectionColumns)
        stored = example.teacher_logprobs
        assert stored is not None
        ranges, pairs = span_ranges(example), comparison_space.pairs
        sizes, lengths = ranges.row_stop - ranges.row_start, ranges.position_stop - ranges.position_start
        own = example.student_ids[example.positions[ranges.row_start] + 1]
        theirs = example.teacher_ids[stored.positions[ranges.position_start]]
        partners = np.append(pairs.student_of_teacher, -1)[np.minimum(theirs, len(pairs.student_of_teacher))]
        is_unit = (sizes > 1) | (lengths > 1) | (partners != own)
        sums = range_sums(stored.observed_logprobs, ranges.position_start, ranges.position_stop)
        unit_probs = np.where(is_unit, np.exp(sums / lengths), 0.0)
        shared = shared_cell_fields(ranges, unit_probs, stored, pairs)
        unit_rows = range_indices(ranges.row_start[is_unit], ranges.row_stop[is_unit])
        return CandidateUnitCells.from_numpy(
            **shared,
            unit_offsets=np.append(0, np.cumsum(is_unit)),
            unit_token_offsets=np.append(0, np.cumsum(sizes[is_unit])),
            unit_rows=unit_rows.astype(np.int32),
            unit_tokens=example.student_ids[example.positions[unit_rows] + 1],
            unit_probs=unit_probs[is_unit].astype(np.float32),
        )
