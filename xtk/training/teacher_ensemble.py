"""How several teachers teach one student: `--combine-teachers` and `--teacher-weights`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xtk.errors import XtkError
from xtk.losses.loss_cells import LossInputs
from xtk.registry import unknown_name_error
from xtk.tokens.teacher_logprobs import TeacherLogprobs

COMBINATION_METHODS = {
    "sum": "the losses of all, each with its weight",
    "mixture": "one loss, from the mixture of their probabilities; all have one tokenizer",
    "select": "the loss of the one who finds the text likeliest, a byte",
    "route": "each document has one teacher: the one whom its --route-column names, or the only one who read it",
}
TEACHER_SCORES = {
    "ce": "minus the cross-entropy of the text, nats a byte",
    "entropy": "minus the entropy, nats a byte",
    "max-probability": "the probability of the likeliest tokens, the geometric mean over bytes",
}
WEIGHT_SCOPES = ("batch", "document", "span")
MIN_SCORE = -1e9  # nats a byte, of a teacher to whom the text is impossible


@dataclass(frozen=True)
class ScoreWeighting:
    """Weights of teachers that come from what they say: `softmax(alpha * score)`, over the teachers.

    Scores are taken a byte, so that a finer tokenizer does not win by being finer.

    Attributes:
        score: a key of `SCORES`.
        alpha: how much scores matter; infinite: the best one has all.
        scope: what has weights of its own: the batch of a step, a document, or a span that all tokenizers share.
    """

    score: str
    alpha: float = 1.0
    scope: str = "document"

    def teacher_weights(self, score_tallies: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return [teachers, n], which sum to 1 over the teachers.

        Args:
            score_tallies: [teachers, n, 3], sums of scores and of bytes, and of how many spans. A teacher who says
                nothing
                has no weight, unless none says anything.
        """
        sums, sizes, spans = np.moveaxis(score_tallies, -1, 0)
        scores = np.maximum(sums / np.maximum(sizes, 1), MIN_SCORE)
        if self.score == "max-probability":
            scores = np.exp(scores)
        speaks = (spans > 0) | (spans == 0).all(axis=0)
        scores = np.where(speaks, scores, -np.inf)
        if self.alpha == math.inf:
            best: NDArray[np.float64] = (np.arange(len(scores))[:, None] == scores.argmax(axis=0)).astype(np.float64)
            return best
        differences = np.where(speaks, scores - scores.max(axis=0), 0.0)
        powers = np.where(speaks, np.exp(self.alpha * differences), 0.0)
        shares: NDArray[np.float64] = powers / powers.sum(axis=0)
        return shares


@dataclass(frozen=True)
class TeacherEnsemble:
    """How the teachers of a run teach together.

    Attributes:
        method: a key of `TEACHERS`.
        weights: of the teachers, of sum 1.
        score_weighting: weights that come from what they say, in the place of those; None: there are none.
    """

    method: str
    weights: tuple[float, ...]
    score_weighting: ScoreWeighting | None = None


def parse_ensemble(method: str, weights: str, num_teachers: int) -> TeacherEnsemble:
    """Read `--combine-teachers` and `--teacher-weights`: `0.7,0.3`, or `ce:alpha=5,per=span`.

    Args:
        method: a key of `TEACHERS`.
        weights: as it was written; "": equal weights, or what `select` takes.
        num_teachers: how many there are.

    Raises:
        XtkError: one of them makes no sense, alone or with the other.
    """
    if method not in COMBINATION_METHODS:
        raise unknown_name_error("way with several teachers", method, COMBINATION_METHODS)
    if num_teachers == 1 and (method, weights) != ("sum", ""):
        raise XtkError(
            "--combine-teachers and --teacher-weights are for several teachers; there is one", hint="more caches"
        )
    equal = (1 / num_teachers,) * num_teachers
    if method == "route" and weights:
        raise XtkError("--teacher-weights is for several teachers of one document; with route, each has one")
    if not weights:
        return TeacherEnsemble(method, equal, ScoreWeighting("ce", math.inf) if method == "select" else None)
    if weights[0] in "+-.0123456789":
        if method == "select":
            raise XtkError(
                "--combine-teachers select weighs by what teachers say", hint="--teacher-weights ce:per=span"
            )
        return TeacherEnsemble(method, _static(weights, num_teachers))
    weighing = _weighing(weights)
    if method == "mixture":
        raise XtkError(
            "the weights of a mixture are numbers: what it says must not depend on what it is weighed by",
            hint="--teacher-weights 0.7,0.3, or --combine-teachers sum",
        )
    if method == "select":
        weighing = ScoreWeighting(weighing.score, math.inf, weighing.scope)
    return TeacherEnsemble(method, equal, weighing)


def _static(text: str, teachers: int) -> tuple[float, ...]:
    try:
        values = [float(value) for value in text.split(",")]
    except ValueError:
        values = []
    if len(values) != teachers or not all(0 <= value < math.inf for value in values) or not sum(values):
        raise XtkError(
            f"--teacher-weights is {text!r}",
            hint=f"{teachers} numbers from 0 on, one a cache, not all 0; or {', '.join(TEACHER_SCORES)}",
        )
    return tuple(value / sum(values) for value in values)


def _weighing(text: str) -> ScoreWeighting:
    score, _, told = text.partition(":")
    if score not in TEACHER_SCORES:
        raise unknown_name_error("score of teachers", score, TEACHER_SCORES)
    options = dict(option.partition("=")[::2] for option in filter(None, told.split(",")))
    for key in options:
        if key not in ("alpha", "per"):
            raise unknown_name_error("option of --teacher-weights", key, ("alpha", "per"))
    per = options.get("per", "document")
    if per not in WEIGHT_SCOPES:
        raise unknown_name_error("part with weights of its own", per, WEIGHT_SCOPES)
    try:
        alpha = float(options.get("alpha", "1"))
    except ValueError:
        alpha = math.nan
    if not 0 <= alpha < math.inf:
        raise XtkError(
            f"alpha of --teacher-weights is {options['alpha']!r}", hint="a number from 0 on; 0: equal weights"
        )
    return ScoreWeighting(score, alpha, per)


# What is weighed.


def score_tallies(
    weighting: ScoreWeighting, examples: Sequence[LossInputs | None], token_bytes: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Count what the teachers of one document score.

    Args:
        weighting: how.
        examples: the document as the student and each teacher read it; None of a teacher that did not.
        token_bytes: [T], the bytes of each token of the student.

    Returns:
        float64 [teachers, parts, 3]: in each part of the document, the sum of a teacher's scores, the bytes that they
        are about, and its spans. int64 [T]: the part of each token of the student: spans that all share, or the whole.
    """
    tokens = len(token_bytes)
    parts = np.zeros(tokens, np.int64)
    if weighting.scope == "span":
        begins = np.ones(tokens, np.bool_)
        for example in examples:
            begins &= example is None or _begins(example, tokens)
        parts = np.maximum(np.cumsum(begins) - 1, 0)
    tallies = np.zeros((len(examples), int(parts.max(initial=0)) + 1, 3))
    for number, example in enumerate(examples):
        if example is not None and example.teacher_logprobs is not None:
            starts, sums, bytes_of_spans = _of_spans(
                example, _position_scores(weighting.score, example.teacher_logprobs), token_bytes
            )
            np.add.at(tallies[number], parts[starts], np.column_stack([sums, bytes_of_spans, np.ones(len(sums))]))
    return tallies, parts


def _begins(example: LossInputs, tokens: int) -> NDArray[np.bool_]:
    """Return [T], the tokens with which a span begins, or which are in none."""
    begins = np.ones(tokens, np.bool_)
    for start, stop in example.spans[:, :2].tolist():
        begins[start + 1 : stop] = False
    return begins


def _position_scores(score: str, signal: TeacherLogprobs) -> NDArray[np.float64]:
    """Return [P], what adds up to the score of each position."""
    if score == "ce":
        return signal.observed_logprobs.astype(np.float64)
    if score == "entropy":
        return -signal.entropy.astype(np.float64)
    highest: NDArray[np.float64] = np.maximum.reduceat(signal.logprobs, signal.offsets[:-1]).astype(np.float64)
    return highest


def _of_spans(
    example: LossInputs, values: NDArray[np.float64], sizes: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """Return the first student token, the sum of the values and the bytes of each span that the teacher predicts."""
    signal = example.teacher_logprobs
    assert signal is not None
    spans = example.spans.astype(np.int64)
    predicted = np.zeros(len(example.teacher_ids) + 1, np.int64)
    summed = np.zeros(len(example.teacher_ids) + 1)
    predicted[signal.positions + 1], summed[signal.positions + 1] = 1, values
    predicted, summed = predicted.cumsum(), summed.cumsum()
    bytes_before = np.concatenate([np.zeros(1, np.int64), sizes.cumsum()])
    whole = predicted[spans[:, 3]] - predicted[spans[:, 2]] == spans[:, 3] - spans[:, 2]
    spans = spans[whole]
    sums = summed[spans[:, 3]] - summed[spans[:, 2]]
    return spans[:, 0], sums, (bytes_before[spans[:, 1]] - bytes_before[spans[:, 0]]).astype(np.float64)
