"""A term of a sum of losses: what it compares, and how a document comes to it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from xtk.losses.divergences import Divergence
from xtk.losses.fused_loss import LossTensors
from xtk.losses.loss_cells import ComparisonSpace, Loss, LossInputs
from xtk.tokens.alignment import align_sequences
from xtk.tokens.document import Document
from xtk.tokens.teacher_logprobs import TeacherLogprobs
from xtk.tokens.token_sequence import TokenSequence as TokenSequence


@dataclass(frozen=True)
class TeacherOutput:
    """One teacher's word on a document: what it read, and what it said."""

    tokens: TokenSequence
    logprobs: TeacherLogprobs


@dataclass(frozen=True)
class LossTerm:
    """One term of the sum that a run makes small: a loss, and whose word it is about.

    Attributes:
        loss: makes the cells.
        divergence: between both sides of them.
        comparison_space: what both sides stand on.
        name: how metrics call it.
        weight: its factor in the sum.
        teacher_index: which teacher's word, of a loss that is about one.
        teacher_weight: of the teacher, in a sum of several.
        denominator_group: terms of one pool have one denominator: what all of them are averaged over; "": none but its
            own.
    """

    loss: Loss
    divergence: Divergence
    comparison_space: ComparisonSpace
    name: str = ""
    weight: float = 1.0
    teacher_index: int = 0
    teacher_weight: float = 1.0
    denominator_group: str = ""

    @property
    def uses_teacher(self) -> bool:
        """Whether it is about a teacher's word."""
        return self.loss.comparison_space != "text"

    @property
    def accepts_samples(self) -> bool:
        """Whether it learns from estimates without bias; if not, from the teacher's exact ids, and a tail."""
        return self.loss.requires != "ranks" and self.divergence.is_linear_in_teacher

    def to_tensors(self, inputs: LossInputs) -> LossTensors:
        """Return the loss of an example, not yet scaled."""
        return LossTensors.from_cells(
            replace(self.loss.build_cells(inputs, self.comparison_space), divergence=self.divergence)
        )


def make_loss_inputs(student: TokenSequence, document: Document, teacher_output: TeacherOutput | None) -> LossInputs:
    """Bring a document, as a student reads it, together with what a teacher said of it.

    Args:
        student: its tokens.
        document: itself.
        teacher_output: what the teacher read and said; None: nothing.
    """
    rows = np.flatnonzero(student.train_mask).astype(np.int64) - 1
    own: dict[str, NDArray[np.float32]] = {}
    if (drawn := document.sampled_tokens) is not None and np.array_equal(student.ids, drawn.ids[: len(student)]):
        own["sampling_logprobs"] = np.where(drawn.sampled_mask[rows + 1], drawn.logprobs[rows + 1], np.float32(np.nan))
        own["advantages"] = np.full(len(rows), drawn.advantage, np.float32)
    if teacher_output is None:
        return LossInputs(student.ids, rows, np.zeros((0, 4), np.int32), np.zeros(0, np.int32), None, **own)
    spans = align_sequences(student, teacher_output.tokens)
    spans = spans[student.train_mask[spans[:, 1] - 1]]
    return LossInputs(student.ids, rows, spans, teacher_output.tokens.ids, teacher_output.logprobs, **own)
