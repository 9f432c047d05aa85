"""byte-kl: KL between both models' distributions over the next bytes, at every token boundary of either model."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xtk.errors import CorruptError
from xtk.losses.cells.loss_cells import LossCells
from xtk.losses.cells.next_byte_cells import NextByteCells
from xtk.losses.interface import ComparisonSpace, Loss, LossInputs
from xtk.losses.kernels.byte_kl_numba import fill_byte_cells
from xtk.losses.kernels.sampled_support_correction import TeacherArrays
from xtk.losses.kernels.token_boundaries_numba import (
    NEXT_DISTRIBUTION,
    PREVIOUS_DISTRIBUTION,
    STUDENT_COLUMNS,
    TokenPath,
    find_boundaries,
)
from xtk.projection.vocabulary_byte_partition import BytePartition


class ByteKL(Loss):
    """byte-kl: `KL(t(next bytes) | s(next bytes))` at each token boundary of either model, averaged over boundaries.

    The distribution over the next bytes, given the bytes so far, is `(E D + F) / (E + M)`. At a model's previous
    boundary, `E` is the probability of the token that ends here and `M` that of the longer tokens with the same first
    bytes. `D` is the model's distribution here; `F` is that of the longer tokens without these first bytes. Inside of
    a token `D` does not exist, and the continuation of the mass `E / (E + M)` is unknown. Both distributions are
    mapped to cells: a token is in one cell with the first token of its spelling by the other tokenizer. Mass with an
    unknown continuation, and mass that the other model does not list, is in the remainder.
    """

    comparison_space = "bytes"
    averaged_over = "token boundaries of either model"
    compares_cells = True

    def build_cells(self, example: LossInputs, comparison_space: ComparisonSpace) -> LossCells:
        """Return one item per token boundary of either model, in text order."""
        stored = example.teacher_logprobs
        assert isinstance(comparison_space, BytePartition)
        assert stored is not None
        items = find_all_boundaries(example, comparison_space)
        try:
            cell_offsets, entry_offsets, probs, first_members, *runs, corrections, sampled_probs = fill_byte_cells(
                comparison_space.student,
                comparison_space.teacher,
                comparison_space.continuations,
                comparison_space.cell_token_offsets,
                comparison_space.num_teacher_tokens,
                TeacherArrays.from_logprobs(stored),
                items,
            )
        except ZeroDivisionError:
            raise mismatched_tokens_error() from None
        run_offsets, firsts, stops = runs
        following, previous = (items[:, STUDENT_COLUMNS + one] for one in (NEXT_DISTRIBUTION, PREVIOUS_DISTRIBUTION))
        return NextByteCells.from_numpy(
            cell_offsets=cell_offsets,
            entry_offsets=entry_offsets,
            teacher_probs=probs,
            rows=np.zeros(0, np.int32),
            tokens=np.zeros(0, np.int32),
            item_rows=np.maximum(following, previous).astype(np.int32),
            row_counts=((np.diff(cell_offsets) > 0) & (following >= 0)).astype(np.int64),
            previous_rows=previous.astype(np.int32),
            is_inside_token=following < 0,
            cell_tokens=comparison_space.shared_cell_tokens,
            first_members=first_members,
            sorted_token_ids=comparison_space.shared_token_ids,
            run_offsets=run_offsets,
            firsts=firsts,
            stops=stops,
            alternative_offsets=np.append(0, np.cumsum(stops - firsts, dtype=np.int64)),
            corrections=None if stored.exact_counts is None else corrections,
            sampled_probs=sampled_probs if sampled_probs.any() else None,
        )


def find_all_boundaries(example: LossInputs, partition: BytePartition) -> NDArray[np.int64]:
    """Return the token boundaries of either model at which both are compared, as `find_boundaries` returns them."""
    student = TokenPath(example.student_ids, _inverse_index(len(example.student_ids), example.positions + 1))
    teacher = teacher_path(example)
    items: NDArray[np.int64] = find_boundaries(partition.student, partition.teacher, student, teacher, example.spans)
    return items


def teacher_path(example: LossInputs) -> TokenPath:
    """Return the teacher's tokens, and the indices of the distributions that predict them."""
    assert example.teacher_logprobs is not None
    positions = example.teacher_logprobs.positions
    return TokenPath(example.teacher_ids, _inverse_index(len(example.teacher_ids), positions))


def _inverse_index(length: int, positions: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return int64 [length], the index in `positions` of each number below `length`; -1 if it is not there."""
    indices = np.full(length, -1, np.int64)
    indices[positions] = np.arange(len(positions))
    return indices


def mismatched_tokens_error() -> CorruptError:
    """Return the error for a cache whose observed tokens are not those of its documents."""
    return CorruptError(
        "the teacher's tokens of a document do not match its text",
        hint="find the corrupt cache with xtk inspect --verify CACHE, and make it again",
    )
