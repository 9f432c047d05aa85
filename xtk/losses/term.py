"""One term of the total loss, and the inputs that it gets for a document."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.cache.teacher_document import StyleScores, TeacherDocument
from xtk.losses import EXACT_REQUIREMENTS
from xtk.losses.cells.loss_cells import LossCells
from xtk.losses.cells.paired_ends import with_paired_ends
from xtk.losses.cells.stop_classes import StopClasses
from xtk.losses.divergences import Divergence
from xtk.losses.interface import MASK, ComparisonSpace, Loss, LossInputs
from xtk.losses.teacher_shift import shifted_by_reference
from xtk.text.alignment import align_sequences, separate_added_spaces
from xtk.text.document import Document
from xtk.text.token_sequence import TokenSequence as TokenSequence


@dataclass(frozen=True)
class LossTerm:
    """One term of the total loss: a loss, its divergence, its weight and its teacher."""

    loss: Loss  # builds the cells
    divergence: Divergence  # compares the two distributions over the cells
    comparison_space: ComparisonSpace  # projection or byte partition that the loss needs; None: neither
    name: str = ""  # the name in metrics
    weight: float = 1.0  # its factor in the sum
    teacher_index: int = 0  # index of its teacher, if the loss uses one
    teacher_weight: float = 1.0  # the teacher's weight among several
    denominator_group: str = ""  # terms of a group are divided by their common number of items; "": by their own
    stop_classes: StopClasses | None = None  # stop tokens of both models, compared as one; None: each by itself
    has_sample_logprobs: bool = False  # whether the teacher's sampled tokens have log-probabilities

    @property
    def uses_teacher(self) -> bool:
        """Whether the loss compares with a teacher."""
        return self.loss.comparison_space != "text"

    @property
    def accepts_samples(self) -> bool:
        """Whether it can use sampled tokens (unbiased estimates); if not, it uses exact entries and a remainder."""
        if self.loss.requires in EXACT_REQUIREMENTS:
            return False
        return self.divergence.accepts_samples(self.loss.compares_single_tokens and self.has_sample_logprobs)

    def build_cells(self, inputs: LossInputs) -> LossCells:
        """Return the cells of an example on the CPU, with scale 1."""
        cells = self._build_cells(inputs)
        if inputs.shift_reference is None:
            return cells
        return shifted_by_reference(cells, self._build_cells(replace(inputs, teacher_logprobs=inputs.shift_reference)))

    def _build_cells(self, inputs: LossInputs) -> LossCells:
        stops = self.stop_classes
        merged = inputs if stops is None else stops.merge_inputs(inputs, self.loss)
        paired = with_paired_ends(merged, self.comparison_space)
        cells = self.loss.build_selected_cells(paired, self.comparison_space)
        return replace(cells if stops is None else stops.expand_cells(cells, self.loss), divergence=self.divergence)


def masks_whitespace(objectives: Iterable[LossTerm]) -> bool:
    """Return whether a loss leaves out tokens of white space, so that `make_loss_inputs` needs their mask."""
    return any(objective.loss.whitespace == MASK for objective in objectives)


def make_loss_inputs(
    student: TokenSequence,
    document: Document,
    teacher: TeacherDocument | None,
    whitespace_mask: NDArray[np.bool_] | None = None,
    regions: NDArray[np.uint8] | None = None,
    advantage_bounds: NDArray[np.float32] | None = None,
) -> LossInputs:
    """Return the inputs of losses for a document: student tokens, aligned spans and the teacher's log-probabilities.

    The document may contain sampled tokens with advantages. `whitespace_mask` and `regions`: [T], of the student's
    tokens; None: no loss needs them. `advantage_bounds`: float32 [regions], the largest size of the teacher's advantage
    in each.
    """
    rows = np.flatnonzero(student.loss_mask).astype(np.int64) - 1
    own: dict[str, Any] = {} if whitespace_mask is None else {"is_whitespace": whitespace_mask[rows + 1]}
    if regions is not None:
        own["regions"] = regions[rows + 1]
        if advantage_bounds is not None and np.isfinite(advantage_bounds).any():
            own["advantage_bounds"] = advantage_bounds[own["regions"]]
    if (sampled := document.sampled_tokens) is not None and np.array_equal(student.ids, sampled.ids[: len(student)]):
        logprobs = np.where(sampled.sampled_mask[rows + 1], sampled.logprobs[rows + 1], np.float32(np.nan))
        own["sampling_logprobs"] = logprobs
        own["advantages"] = np.full(len(rows), sampled.advantage, np.float32)
    if teacher is None:
        return LossInputs(student.ids, rows, np.zeros((0, 4), np.int32), np.zeros(0, np.int32), None, **own)
    spans = align_sequences(student, teacher.tokens)
    spans = separate_added_spaces(spans, student, teacher.tokens)
    spans = spans[student.train_mask[spans[:, 1] - 1]]
    own["is_end"] = np.isin(spans[:, 0], student.segment_end_tokens)
    if teacher.style_scores is not None:
        own |= _style_inputs(student, rows, spans, teacher.style_scores)
    own["shift_reference"] = teacher.shift_reference
    return LossInputs(student.ids, rows, spans, teacher.tokens.ids, teacher.teacher_logprobs, **own)


def _style_inputs(
    student: TokenSequence, rows: NDArray[np.int64], spans: NDArray[np.int32], scores: StyleScores
) -> dict[str, NDArray[np.float32]]:
    """Return the fields of `LossInputs` of a style reference: sums over spans, and the frozen student's rows."""
    row = np.full(len(student) + 1, -1, np.int64)
    row[rows + 1] = np.arange(len(rows))
    reference, frozen = (np.full(len(rows), np.nan, np.float32) for _ in range(2))
    known = row[spans[:, 0]] >= 0
    sums = [scores.reference[start:stop].sum() for start, stop in spans[known, 2:].tolist()]
    reference[row[spans[known, 0]]] = sums
    if np.array_equal(student.ids, scores.student_ids[: len(student)]):
        frozen[:] = scores.frozen_student[rows + 1]
    return {"reference_logprobs": reference, "frozen_logprobs": frozen}
