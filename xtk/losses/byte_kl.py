"""byte-kl: what each side says about the next bytes, wherever one of them ends a token."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xtk.errors import CorruptError
from xtk.losses.loss_cells import ComparisonSpace, LossCells, LossInputs, PrefixAlternatives
from xtk.projection.byte_partition import BytePartition


class ByteKL:
    """byte-kl: `KL(t(next bytes) | s(next bytes))` at each token boundary of either side, averaged over them.

    What comes next, given the bytes so far: with `E` the probability, at a side's last boundary, of the token that
    ends here and `M` that of the tokens that begin like it and go on, it is `(E D + F) / (E + M)`; `D` is what the
    side predicts here, `F` what those longer tokens leave when they are cut. Inside of a token, `E / (E + M)` is
    mass of which nothing is known. Both sides are mapped to cells: a token and the first token with which the other
    side spells it are in one. Mass that is not known, or that the other side does not name, is in the other cell.
    """

    comparison_space = "bytes"
    averaged_over = "token boundaries of either side"
    unit = "nats"
    requires = "distribution"

    def build_cells(self, example: LossInputs, comparison_space: ComparisonSpace) -> LossCells:
        """Return one item a boundary of the text that both sides spell, in its order."""
        from xtk.losses.byte_kl_kernels import (
            NEXT_DISTRIBUTION,
            PREVIOUS_DISTRIBUTION,
            STUDENT_COLUMNS,
            TeacherArrays,
            TokenPath,
            fill_byte_cells,
            find_boundaries,
        )
        from xtk.losses.sampling_correction import exact_entry_stops, mean_surprisals

        signal = example.teacher_logprobs
        assert isinstance(comparison_space, BytePartition)
        assert signal is not None
        student = TokenPath(example.student_ids, _inverse_index(len(example.student_ids), example.positions + 1))
        teacher = TokenPath(example.teacher_ids, _inverse_index(len(example.teacher_ids), signal.positions))
        items = find_boundaries(comparison_space.student, comparison_space.teacher, student, teacher, example.spans)
        stops = exact_entry_stops(signal)
        surprisals = mean_surprisals(signal.offsets, stops, signal.logprobs, signal.entropy)
        said = TeacherArrays(signal.offsets, stops, signal.ids, signal.logprobs, signal.remainder_mass, surprisals)
        try:
            cell_offsets, entry_offsets, probs, rows, tokens, *runs, corrections = fill_byte_cells(
                comparison_space.student,
                comparison_space.teacher,
                comparison_space.continuations,
                comparison_space.cell_token_offsets,
                comparison_space.cell_tokens,
                said,
                items,
            )
        except ZeroDivisionError:
            raise CorruptError(
                "the stored teacher tokens of a document do not spell its text",
                hint="this cache was changed after it was written; run its cache-teacher command again with --force",
            ) from None
        here, past = items[:, STUDENT_COLUMNS + NEXT_DISTRIBUTION], items[:, STUDENT_COLUMNS + PREVIOUS_DISTRIBUTION]
        return LossCells(
            cell_offsets=cell_offsets,
            entry_offsets=entry_offsets,
            teacher_probs=probs,
            rows=rows,
            tokens=tokens,
            log_weights=np.zeros(len(tokens), np.float32),
            item_rows=np.maximum(here, past).astype(np.int32),
            alternatives=PrefixAlternatives(past.astype(np.int32), here < 0, comparison_space.student.token_ids, *runs),
            corrections=None if signal.exact_counts is None else corrections,
        )


def _inverse_index(length: int, positions: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return int64 [length], where in `positions` each number below `length` stands; -1: nowhere."""
    found = np.full(length, -1, np.int64)
    found[positions] = np.arange(len(positions))
    return found
