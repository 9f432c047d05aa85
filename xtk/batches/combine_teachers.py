"""Combination of several teachers: `--combine-teachers` and `--teacher-weights`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from xtk.cache.teacher_logprobs import TeacherLogprobs, entry_keys
from xtk.errors import XtkError
from xtk.losses.interface import LossInputs, range_sums
from xtk.name_registry import unknown_name_error
from xtk.options.declaration import option
from xtk.options.spec_parsing import MAX_WEIGHT, from_pairs, option_names, parse_pairs

COMBINATION_METHODS = {
    "sum": "sum of the losses on each teacher, with the teachers' weights",
    "mixture": "one loss on the weighted mean of their probabilities; all teachers have the same tokenizer",
    "select": "loss on the teacher with the best score, by default the lowest cross-entropy per byte",
    "route": "one teacher per document: the one in its --route-column, or the only one whose cache has it",
}
TEACHER_SCORES = {
    "ce": "negative cross-entropy of the text, nats per byte",
    "entropy": "negative entropy, nats per byte",
    "max-probability": "probability of the top-1 tokens, geometric mean over bytes",
}
WEIGHT_SCOPES = ("batch", "document", "span")
MIN_SCORE = -1e9  # nats per byte, for a teacher that assigns probability 0


@dataclass(frozen=True)
class ScoreWeighting:
    """Teacher weights computed from their log-probabilities: `softmax(alpha * score)` over the teachers.

    Scores are per byte, so that they do not depend on the number of tokens.
    """

    score: str  # a key of `TEACHER_SCORES`
    alpha: float = 1.0  # inverse temperature of the softmax; infinite: the best teacher has weight 1
    # Weights are computed per step ("batch"), per document, or per span that all tokenizers share.
    scope: str = "document"

    def teacher_weights(self, score_tallies: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return weights [teachers, n], which sum to 1 over the teachers.

        Args:
            score_tallies: [teachers, n, 3], sums of scores, bytes and spans. A teacher without spans gets weight 0,
                unless no teacher has any.
        """
        sums, sizes, spans = np.moveaxis(score_tallies, -1, 0)
        scores = np.maximum(sums / np.maximum(sizes, 1), MIN_SCORE)
        if self.score == "max-probability":
            scores = np.exp(scores)
        has_score = (spans > 0) | (spans == 0).all(axis=0)
        scores = np.where(has_score, scores, -np.inf)
        if self.alpha == math.inf:
            best: NDArray[np.float64] = (np.arange(len(scores))[:, None] == scores.argmax(axis=0)).astype(np.float64)
            return best
        differences = np.where(has_score, scores - scores.max(axis=0), 0.0)
        powers = np.where(has_score, np.exp(self.alpha * differences), 0.0)
        shares: NDArray[np.float64] = powers / powers.sum(axis=0)
        return shares


@dataclass(frozen=True)
class TeacherEnsemble:
    """How the teachers of a run are combined."""

    method: str  # a key of `COMBINATION_METHODS`
    weights: tuple[float, ...]  # fixed weights of the teachers, which sum to 1
    # Computes weights from log-probabilities instead; None: `weights` are used.
    score_weighting: ScoreWeighting | None = None


def parse_ensemble(method: str, weights: str, num_teachers: int) -> TeacherEnsemble:
    """Return the combination of `--combine-teachers` and `--teacher-weights` (`0.7,0.3` or `ce:alpha=5,per=span`).

    Args:
        method: a key of `COMBINATION_METHODS`.
        weights: value of --teacher-weights; "": equal weights, or the default score of `select`.
    """
    if method not in COMBINATION_METHODS:
        raise unknown_name_error("value of --combine-teachers", method, COMBINATION_METHODS)
    if num_teachers == 1 and (method, weights) != ("sum", ""):
        option = "--teacher-weights" if weights else "--combine-teachers"
        raise XtkError(
            f"{option} needs several teachers, but this run has one", hint=f"remove {option}, or add a teacher"
        )
    equal = (1 / num_teachers,) * num_teachers
    if method == "route" and weights:
        raise XtkError(
            "--teacher-weights does not apply to --combine-teachers route, where each document has one teacher",
            hint="remove --teacher-weights",
        )
    if not weights:
        return TeacherEnsemble(method, equal, ScoreWeighting("ce", math.inf) if method == "select" else None)
    if weights[0] in "+-.0123456789":
        if method == "select":
            raise XtkError(
                "--combine-teachers select needs a score in --teacher-weights, not fixed weights",
                hint="use for example --teacher-weights ce:per=span",
            )
        return TeacherEnsemble(method, _parse_fixed_weights(weights, num_teachers))
    weighting = _parse_score_weighting(weights)
    if method == "mixture":
        raise XtkError(
            "--combine-teachers mixture needs fixed --teacher-weights, not a score",
            hint="use for example --teacher-weights 0.7,0.3, or --combine-teachers sum",
        )
    if method == "select":
        weighting = ScoreWeighting(weighting.score, math.inf, weighting.scope)
    return TeacherEnsemble(method, equal, weighting)


def _parse_fixed_weights(text: str, teachers: int) -> tuple[float, ...]:
    try:
        values = [float(value) for value in text.split(",")]
    except ValueError:
        values = []
    if len(values) != teachers or not all(0 <= value <= MAX_WEIGHT for value in values) or not sum(values):
        raise XtkError(
            f"--teacher-weights {text!r} is not a list of {teachers} weights",
            hint=f"give {teachers} numbers from 0 to {MAX_WEIGHT:g}, not all 0; or a score: "
            f"{', '.join(TEACHER_SCORES)}",
        )
    return tuple(value / sum(values) for value in values)


def _parse_score_weighting(text: str) -> ScoreWeighting:
    score, _, options = text.partition(":")
    if score not in TEACHER_SCORES:
        raise unknown_name_error("score in --teacher-weights", score, TEACHER_SCORES)
    known = option_names(_ScoreOptions)
    pairs = parse_pairs(options, f"--teacher-weights {text}", known, noun="option of --teacher-weights")
    parsed = from_pairs(_ScoreOptions, pairs, f"--teacher-weights {text}")
    return ScoreWeighting(score, parsed.alpha, parsed.per)


@dataclass(frozen=True)
class _ScoreOptions:
    """Options of a score in --teacher-weights."""

    alpha: float = option(1.0, "Inverse temperature; 0 gives equal weights.", min=0)
    per: str = option("document", "Scope of the weights.", choices=WEIGHT_SCOPES)


# Scores of a document.


def score_tallies(
    weighting: ScoreWeighting, examples: Sequence[LossInputs | None], token_bytes: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the sums of the teachers' scores in each part of one document.

    Args:
        examples: loss inputs of the document with each teacher; None: not scored by it.
        token_bytes: [T], bytes of each student token.

    Returns:
        float64 [teachers, parts, 3]: sums of scores, bytes and spans of each teacher in each part. int64 [T]: the part
        of each student token; parts are the spans that all tokenizers share, or the whole document.
    """
    tokens = len(token_bytes)
    parts = np.zeros(tokens, np.int64)
    if weighting.scope == "span":
        begins = np.ones(tokens, np.bool_)
        for example in examples:
            begins &= example is None or _span_starts(example, tokens)
        parts = np.maximum(np.cumsum(begins) - 1, 0)
    tallies = np.zeros((len(examples), int(parts.max(initial=0)) + 1, 3))
    for number, example in enumerate(examples):
        if example is not None and example.teacher_logprobs is not None:
            starts, sums, bytes_of_spans = _span_scores(
                example, _position_scores(weighting.score, example.teacher_logprobs), token_bytes
            )
            np.add.at(tallies[number], parts[starts], np.column_stack([sums, bytes_of_spans, np.ones(len(sums))]))
    return tallies, parts


def _span_starts(example: LossInputs, tokens: int) -> NDArray[np.bool_]:
    """Return [T], whether a span begins with the token, or the token is in no span."""
    begins = np.ones(tokens, np.bool_)
    for start, stop in example.spans[:, :2].tolist():
        begins[start + 1 : stop] = False
    return begins


def _position_scores(score: str, teacher_logprobs: TeacherLogprobs) -> NDArray[np.float64]:
    """Return the score of each position, [P]."""
    if score == "ce":
        return teacher_logprobs.observed_logprobs.astype(np.float64)
    if score == "entropy":
        return -teacher_logprobs.entropy.astype(np.float64)
    logprobs, firsts = teacher_logprobs.logprobs, teacher_logprobs.offsets[:-1]
    if teacher_logprobs.exact_counts is not None:  # an estimate from samples may exceed the exact top-1
        places = np.arange(len(logprobs)) - np.repeat(firsts, np.diff(teacher_logprobs.offsets))
        is_exact = places < np.repeat(teacher_logprobs.exact_counts, np.diff(teacher_logprobs.offsets))
        logprobs = np.where(is_exact, logprobs, -np.inf)
    top1_logprobs: NDArray[np.float64] = np.maximum.reduceat(logprobs, firsts).astype(np.float64)
    return top1_logprobs


def _span_scores(
    example: LossInputs, values: NDArray[np.float64], sizes: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """Return the first student token, the sum of the values and the bytes of each span that the teacher predicts."""
    logprobs = example.teacher_logprobs
    assert logprobs is not None
    spans = example.spans.astype(np.int64)
    predicted = np.zeros(len(example.teacher_ids) + 1, np.int64)
    of_tokens = np.zeros(len(example.teacher_ids))
    predicted[logprobs.positions + 1], of_tokens[logprobs.positions] = 1, values
    predicted = predicted.cumsum()
    bytes_before = np.concatenate([np.zeros(1, np.int64), sizes.cumsum()])
    complete = predicted[spans[:, 3]] - predicted[spans[:, 2]] == spans[:, 3] - spans[:, 2]
    spans = spans[complete]
    sums = range_sums(of_tokens, spans[:, 2], spans[:, 3])
    return spans[:, 0], sums, (bytes_before[spans[:, 1]] - bytes_before[spans[:, 0]]).astype(np.float64)


def mix_teacher_logprobs(teacher_logprobs: Sequence[TeacherLogprobs], weights: Sequence[float]) -> TeacherLogprobs:
    """Return the mixture `sum w_k t_k` of teachers with one tokenizer, at the positions of the first; weights sum to 1.

    An id is stored if every teacher gives it a probability: it is one of its entries, or the teacher has no remainder.
    All other mass goes to the remainder, which is exact too: all teachers are coarsened to the same cells. Where all
    teachers have samples instead of a remainder, an id that one teacher sampled is stored, and counts as 0 for a
    teacher that did not sample it: the mixture of unbiased estimates is an unbiased estimate of the mixture. Where one
    teacher has a remainder, the samples of the others are part of the remainder. Ids that are exact for all teachers
    come first, both groups ascending. `entropy` is the mean of the entropies, a lower bound.
    """
    size = len(teacher_logprobs[0])
    weight_per_teacher = np.asarray(weights, np.float64)
    has_remainder = np.any([teacher.remainder_mass > 0 for teacher in teacher_logprobs], axis=0)
    teacher_logprobs = [_without_samples(teacher, has_remainder) for teacher in teacher_logprobs]
    unique_keys, entries = np.unique(
        np.concatenate([entry_keys(teacher.offsets, teacher.ids) for teacher in teacher_logprobs]), return_inverse=True
    )
    by_teacher = np.repeat(np.arange(len(teacher_logprobs)), [len(teacher.ids) for teacher in teacher_logprobs])
    mass = (
        np.concatenate([np.exp(teacher.logprobs.astype(np.float64)) for teacher in teacher_logprobs])
        * weight_per_teacher[by_teacher]
    )
    remainders = np.array([teacher.remainder_mass for teacher in teacher_logprobs], np.float64)
    positions = unique_keys >> 32
    exact = np.bincount(
        entries, np.concatenate([_exact_entries(teacher) for teacher in teacher_logprobs]), minlength=len(unique_keys)
    )
    exact = exact == len(teacher_logprobs)
    # A teacher without a remainder gives every id that it does not list probability 0.
    gives_probability = (remainders == 0)[:, positions]
    gives_probability[by_teacher, entries] = True
    kept = gives_probability.all(axis=0)
    kept_ones = np.flatnonzero(kept)
    kept_ones = kept_ones[np.lexsort((kept_ones, ~exact[kept_ones], positions[kept_ones]))]
    probs = np.bincount(entries, mass, minlength=len(unique_keys))
    left = np.bincount(positions[~kept], probs[~kept], minlength=size)
    with np.errstate(divide="ignore"):
        logprobs = np.log(probs[kept_ones])
        observed = np.log(
            weight_per_teacher
            @ np.exp(np.array([teacher.observed_logprobs for teacher in teacher_logprobs], np.float64))
        )
    counts = np.bincount(positions[kept], minlength=size)
    return TeacherLogprobs(
        positions=teacher_logprobs[0].positions,
        offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]),
        ids=(unique_keys[kept_ones] & 0xFFFFFFFF).astype(np.int32),
        logprobs=logprobs.astype(np.float32),
        remainder_mass=(weight_per_teacher @ remainders + left).astype(np.float32),
        observed_logprobs=observed.astype(np.float32),
        entropy=(weight_per_teacher @ np.array([teacher.entropy for teacher in teacher_logprobs], np.float64)).astype(
            np.float32
        ),
        exact_counts=None
        if all(teacher.exact_counts is None for teacher in teacher_logprobs)
        else np.bincount(positions[kept & exact], minlength=size),
        precision=next((teacher.precision for teacher in teacher_logprobs if teacher.precision), ""),
    )


def _without_samples(logprobs: TeacherLogprobs, where: NDArray[np.bool_]) -> TeacherLogprobs:
    """Return a teacher's log-probabilities with the sampled entries at `where` [P] moved to the remainder."""
    owners = np.repeat(np.arange(len(logprobs)), np.diff(logprobs.offsets))
    dropped = ~_exact_entries(logprobs) & where[owners]
    if not dropped.any():
        return logprobs
    sampled = np.bincount(owners[dropped], np.exp(logprobs.logprobs[dropped].astype(np.float64)), minlength=len(where))
    counts = np.bincount(owners[~dropped], minlength=len(where))
    return replace(
        logprobs,
        offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]),
        ids=logprobs.ids[~dropped],
        logprobs=logprobs.logprobs[~dropped],
        remainder_mass=(logprobs.remainder_mass + sampled).astype(np.float32),
        token_logprobs=None,
    )


def _exact_entries(logprobs: TeacherLogprobs) -> NDArray[np.bool_]:
    """Return [E], which entries are exact (not sampled)."""
    sizes = np.diff(logprobs.offsets)
    if logprobs.exact_counts is None:
        return np.ones(len(logprobs.ids), np.bool_)
    within = np.arange(len(logprobs.ids)) - np.repeat(logprobs.offsets[:-1], sizes)
    flags: NDArray[np.bool_] = within < np.repeat(logprobs.exact_counts, sizes)
    return flags
