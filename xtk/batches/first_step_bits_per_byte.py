"""Bits per byte of the teachers and of the student on the same text of the first step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xtk import terminal
from xtk.losses.interface import ItemRanges, LossInputs, range_indices, range_sums, span_ranges
from xtk.models.output_head import OutputHead, compute_token_logprobs
from xtk.parallel.host_to_device import to_device
from xtk.runs.metrics_file import metric_name
from xtk.text.document import Document
from xtk.text.token_sequence import TokenSequence

TEACHER_METRIC, STUDENT_METRIC = "teacher_bits_per_byte", "student_bits_per_byte"
MIN_IMPROVEMENT = 0.05  # a teacher that is not better by this fraction is reported


@dataclass(frozen=True)
class ComparedText:
    """Trained text of a micro-batch whose tokens both the student and one teacher predict."""

    # float64 [N], the weight of each loss position; 0: its token is not part of the text.
    row_weights: NDArray[np.float64]
    teacher_nats: float  # minus the weighted sum of the teacher's log-probabilities of its tokens
    num_bytes: float  # weighted number of bytes in UTF-8

    @classmethod
    def of_documents(
        cls,
        examples: Sequence[LossInputs | None],
        students: Sequence[TokenSequence],
        documents: Sequence[Document],
        weights: NDArray[np.float64],
    ) -> ComparedText:
        """Return the text of some documents in the spans that both models predict.

        Sampled completions are left out: they are by nature likely under the student that sampled them, and less likely
        under every other model, however good it is. `examples`: with one teacher; None: not scored by it. `weights`:
        float64 [N].
        """
        row_weights, nats, num_bytes, first = np.zeros(len(weights)), 0.0, 0.0, 0
        for example, student, document in zip(examples, students, documents, strict=True):
            size = int(student.loss_mask.sum())
            if example is not None and document.sampled_tokens is None:
                own = slice(first, first + size)
                of_document = cls._of_document(example, student, weights[own])
                row_weights[own] = of_document.row_weights
                nats, num_bytes = nats + of_document.teacher_nats, num_bytes + of_document.num_bytes
            first += size
        return cls(row_weights, nats, num_bytes)

    @classmethod
    def _of_document(cls, example: LossInputs, student: TokenSequence, weights: NDArray[np.float64]) -> ComparedText:
        teacher, tokens = example.teacher_logprobs, example.positions + 1
        assert teacher is not None
        spans = span_ranges(example)
        others = range_sums((~student.text_mask[tokens]).astype(np.float64), spans.row_start, spans.row_stop)
        kept = (others == 0) & (weights[spans.row_start] > 0)  # spans of text only
        spans = ItemRanges(*(edges[kept] for edges in spans))
        span_weights = weights[spans.row_start]
        row_weights = np.zeros(len(weights))
        rows = range_indices(spans.row_start, spans.row_stop)
        row_weights[rows] = np.repeat(span_weights, spans.row_stop - spans.row_start)
        nats = range_sums(-teacher.observed_logprobs, spans.position_start, spans.position_stop)
        sizes = student.text_sizes[tokens].astype(np.float64)
        return cls(row_weights, float(span_weights @ nats), float(row_weights @ sizes))


class TextScorer:
    """Hook of a training pass that scores the compared text of a micro-batch with the student.

    `targets`: int64 [N], the token of each loss position. `num_copies`: number of processes with the same micro-batch.
    """

    def __init__(self, texts: Sequence[ComparedText], targets: NDArray[np.int64], num_copies: int) -> None:
        self._weights, self._targets = np.stack([text.row_weights for text in texts]), targets
        # float64 [teachers, 3], to be summed over all processes: the student's nats, the teacher's, and bytes.
        self.sums = torch.tensor([[0.0, text.teacher_nats, text.num_bytes] for text in texts], dtype=torch.float64)
        self.sums /= num_copies

    @torch.no_grad()
    def __call__(self, states: Tensor, here: NDArray[np.int64], head: OutputHead) -> None:
        """Complete `sums`; arguments as in `HiddenStateHook`."""
        rows = np.flatnonzero(self._weights[:, here].any(0))
        self.sums, weights, targets, indices = (
            to_device(one, states.device)
            for one in (
                self.sums,
                *map(torch.from_numpy, (self._weights[:, here[rows]], self._targets[here[rows]], rows)),
            )
        )
        logprobs, _ = compute_token_logprobs(states.detach().index_select(0, indices), head, targets)
        self.sums[:, 0] -= weights @ logprobs


def comparison_metrics(sums: Sequence[float], teachers: Sequence[str]) -> dict[str, float]:
    """Return bits per byte of each teacher and of the student, from [teachers * 3] sums of `TextScorer.sums`."""
    metrics: dict[str, float] = {}
    for name, (of_student, of_teacher, num_bytes) in zip(teachers, np.reshape(sums, (-1, 3)).tolist(), strict=True):
        if num_bytes:
            metrics[metric_name(TEACHER_METRIC, name, teachers)] = of_teacher / math.log(2) / num_bytes
            metrics[metric_name(STUDENT_METRIC, name, teachers)] = of_student / math.log(2) / num_bytes
    return metrics


def report_weak_teachers(metrics: Mapping[str, float], teachers: Sequence[str]) -> None:
    """Print a note for each teacher that predicts the first step's text hardly better than the student, or worse."""
    for name in teachers:
        own, theirs = (metrics.get(metric_name(one, name, teachers)) for one in (STUDENT_METRIC, TEACHER_METRIC))
        if own is not None and theirs is not None and theirs > (1 - MIN_IMPROVEMENT) * own:
            terminal.note(
                f"distill: warning: the teacher {name} has {theirs:.4f} bits per byte on the text of the first step, "
                f"the student {own:.4f}: the teacher is not better by {MIN_IMPROVEMENT:.0%}. Check that it is the "
                "right model, and its start token, chat template and dtype; xtk evaluate measures both on more text"
            )
