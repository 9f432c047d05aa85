"""Numba kernel for cells (outcomes) that are tokens of both vocabularies; tested against a slow reference."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.cache.teacher_logprobs import MIN_REMAINDER
from xtk.losses.kernels.sampled_support_correction import TeacherArrays
from xtk.numba_kernel import numba_kernel


@numba_kernel
def fill_shared_cells(
    positions: NDArray[np.int64],
    unit_probs: NDArray[np.float64],
    support: TeacherArrays,
    student_of_teacher: NDArray[np.int32],
) -> tuple[Any, Any, Any, Any]:
    """Return the cells of shared tokens in the teacher's support, divided by its mass on shared tokens and units.

    They are cell_offsets and teacher_probs as in `LossCells`; int32 [cells], the student's token of each; and
    remainder_probs. Only exact entries count. `positions`: int64 [C], of the teacher's distributions. `unit_probs`:
    float64 [C], the weight of the item's unit, 0 without one; divided, too, in place.
    """
    most = 0
    for position in positions:
        most += support.exact_stops[position] - support.offsets[position]
    cell_offsets, remainders = np.zeros(len(positions) + 1, np.int64), np.empty(len(positions), np.float64)
    probs, tokens = np.empty(most, np.float64), np.empty(most, np.int32)
    # Arrays of a tuple are read once: in a loop, each access would count references, which costs more than the rest.
    ids, logprobs, offsets, stops = support.ids, support.logprobs, support.offsets, support.exact_stops
    cells = 0
    for item in range(len(positions)):
        position, first = positions[item], cells
        rest = np.float64(support.remainder_mass[position])
        if rest <= MIN_REMAINDER:
            rest = np.float64(0)
        total = rest + unit_probs[item]
        for slot in range(offsets[position], stops[position]):
            token = student_of_teacher[ids[slot]] if ids[slot] < len(student_of_teacher) else -1
            if token >= 0:
                probs[cells], tokens[cells] = math.exp(np.float64(logprobs[slot])), token
                total += probs[cells]
                cells += 1
        if total > 0:
            probs[first:cells] /= total
            unit_probs[item] /= total
            remainders[item] = rest / total
        else:
            remainders[item] = 1.0  # all mass is on tokens that the student does not have
        cell_offsets[item + 1] = cells
    return cell_offsets, probs[:cells].astype(np.float32), tokens[:cells], remainders
