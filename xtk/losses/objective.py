"""A term of a sum of losses: what it compares, and how a document comes to it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from xtk.losses.cells import Example, Ground, Loss
from xtk.losses.divergences import Divergence
from xtk.losses.head import Term
from xtk.tokens.alignment import align_sequences
from xtk.tokens.document import Document
from xtk.tokens.sequence import Sequence as TokenSequence
from xtk.tokens.signal import Signal


@dataclass(frozen=True)
class Heard:
    """One teacher's word on a document: what it read, and what it said."""

    tokens: TokenSequence
    signal: Signal


@dataclass(frozen=True)
class Objective:
    """One term of the sum that a run makes small: a loss, and whose word it is about.

    Attributes:
        loss: makes the cells.
        divergence: between both sides of them.
        ground: what both sides stand on.
        name: how metrics call it.
        weight: its factor in the sum.
        teacher: which teacher's word, of a loss that is about one.
        share: of the teacher, in a sum of several.
        pool: terms of one pool have one denominator: what all of them are averaged over; "": none but its own.
    """

    loss: Loss
    divergence: Divergence
    ground: Ground
    name: str = ""
    weight: float = 1.0
    teacher: int = 0
    share: float = 1.0
    pool: str = ""

    @property
    def distils(self) -> bool:
        """Whether it is about a teacher's word."""
        return self.loss.ground != "text"

    @property
    def takes_draws(self) -> bool:
        """Whether it learns from estimates without bias; if not, from the teacher's exact ids, and a tail."""
        return self.loss.asks != "ranks" and self.divergence.linear

    def term(self, example: Example) -> Term:
        """Return the loss of an example, not yet scaled."""
        return Term.of(replace(self.loss.cells(example, self.ground), divergence=self.divergence))


def example_of(student: TokenSequence, document: Document, word: Heard | None) -> Example:
    """Bring a document, as a student reads it, together with what a teacher said of it.

    Args:
        student: its tokens.
        document: itself.
        word: what the teacher read and said; None: nothing.
    """
    rows = np.flatnonzero(student.trained).astype(np.int64) - 1
    own: dict[str, NDArray[np.float32]] = {}
    if (drawn := document.drawn) is not None and np.array_equal(student.ids, drawn.ids[: len(student)]):
        own["drawn_logprobs"] = np.where(drawn.drawn[rows + 1], drawn.logprobs[rows + 1], np.float32(np.nan))
        own["advantages"] = np.full(len(rows), drawn.advantage, np.float32)
    if word is None:
        return Example(student.ids, rows, np.zeros((0, 4), np.int32), np.zeros(0, np.int32), None, **own)
    spans = align_sequences(student, word.tokens)
    spans = spans[student.trained[spans[:, 1] - 1]]
    return Example(student.ids, rows, spans, word.tokens.ids, word.signal, **own)
