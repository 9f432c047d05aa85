"""bpm: the teacher's distribution over the student's next tokens, by byte prefixes, at every token of the student."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.losses.byte_kl import find_all_boundaries, mismatched_tokens_error, teacher_path
from xtk.losses.cells.loss_cells import LossCells
from xtk.losses.interface import ComparisonSpace, Loss, LossInputs
from xtk.losses.kernels.longest_prefix_cells_numba import fill_longest_prefix_cells
from xtk.losses.kernels.sampled_support_correction import TeacherArrays
from xtk.losses.kernels.token_boundaries_numba import (
    NEXT_DISTRIBUTION,
    NONE,
    PREVIOUS_DISTRIBUTION,
    STUDENT_COLUMNS,
    TEACHER_COLUMNS,
)
from xtk.projection.vocabulary_byte_partition import BytePartition


class BPM(Loss):
    """bpm: `KL((t(u), t_rem) | (s(u), s_rem))` at each student token that has a teacher, averaged over these tokens.

    `t(u)` is the teacher's probability that its next token begins with the bytes of the student token `u` and with
    those of no longer student token. Inside of a teacher token, after `c` bytes of it, it is the same for what is left
    of the teacher tokens that begin with these bytes, divided by their mass. If the student's own token goes on after
    the end of the teacher's, its `t(u)` includes the product of the probabilities of the teacher's observed tokens,
    the last one with the mass of all tokens that begin with the bytes left in it; this is subtracted from the cell that
    held it. All other mass is in the remainders. Options: `divergence` and its options. Byte-Prefix Marginalization,
    arXiv 2607.22334, from the teacher's full distribution and with forward KL; here the mass that a support does not
    list is in the remainder.
    """

    comparison_space = "bytes"
    averaged_over = "student tokens with a teacher"
    compares_cells = True

    def build_cells(self, example: LossInputs, comparison_space: ComparisonSpace) -> LossCells:
        """Return one item per student token, in text order."""
        assert isinstance(comparison_space, BytePartition)
        items = find_student_boundaries(example, comparison_space)
        return LossCells.from_numpy(**longest_prefix_cells(example, comparison_space, items, with_inside=True))


def find_student_boundaries(example: LossInputs, partition: BytePartition) -> NDArray[np.int64]:
    """Return the boundaries of `find_boundaries` where a student token begins."""
    items = find_all_boundaries(example, partition)
    kept: NDArray[np.int64] = items[items[:, STUDENT_COLUMNS + NEXT_DISTRIBUTION] != NONE]
    return kept


def longest_prefix_cells(
    example: LossInputs, partition: BytePartition, items: NDArray[np.int64], *, with_inside: bool
) -> dict[str, Any]:
    """Return fields of `LossCells`; `with_inside`: whether items inside of a teacher token have cells."""
    stored = example.teacher_logprobs
    assert stored is not None
    rows, theirs = items[:, STUDENT_COLUMNS + NEXT_DISTRIBUTION], items[:, TEACHER_COLUMNS:]
    positions = np.where(theirs[:, NEXT_DISTRIBUTION] != NONE, theirs[:, NEXT_DISTRIBUTION],
                         theirs[:, PREVIOUS_DISTRIBUTION])  # fmt: skip
    try:
        cell_offsets, entry_offsets, probs, entry_rows, tokens, corrections = fill_longest_prefix_cells(
            partition.student,
            partition.longest_prefixes,
            TeacherArrays.from_logprobs(stored),
            stored.observed_logprobs,
            teacher_path(example),
            items,
            example.student_ids[example.positions[rows] + 1],
            stored.positions[positions].astype(np.int64),
            with_inside,
        )
    except ZeroDivisionError:
        raise mismatched_tokens_error() from None
    return {
        "cell_offsets": cell_offsets,
        "entry_offsets": entry_offsets,
        "teacher_probs": probs,
        "rows": entry_rows,
        "tokens": tokens,
        "item_rows": rows.astype(np.int32),
        "corrections": None if stored.exact_counts is None else corrections,
    }
