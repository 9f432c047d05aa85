"""Mixtures of teachers, and teacher weights that are computed from the teachers' scores."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtk.batches.combine_teachers import (
    COMBINATION_METHODS,
    MIN_SCORE,
    TEACHER_SCORES,
    ScoreWeighting,
    mix_teacher_logprobs,
    parse_ensemble,
    score_tallies,
)
from xtk.cache.teacher_logprobs import StoredLogprobs, TeacherLogprobs
from xtk.errors import XtkError
from xtk.losses.interface import LossInputs

V = 9


def distributions(rng: np.random.Generator, size: int) -> np.ndarray:
    """Return random distributions, [size, V], without zeros."""
    logits = rng.normal(size=(size, V)) * 2
    return np.exp(logits) / np.exp(logits).sum(1, keepdims=True)


def stored_logprobs(probs: np.ndarray, observed: np.ndarray, top_k: int, num_samples: int, seed: int) -> StoredLogprobs:
    """Return what a cache stores: the top-k ids and the observed one, and samples of the other ids."""
    rng, size = np.random.default_rng(seed), len(probs)
    exact_ids = [
        sorted({int(token), *np.argsort(-row)[:top_k].tolist()}) for row, token in zip(probs, observed, strict=True)
    ]
    remainders = [row.copy() for row in probs]
    for remainder, ids in zip(remainders, exact_ids, strict=True):
        remainder[ids] = 0
    samples = [
        {int(at): int(n) for at, n in enumerate(rng.multinomial(num_samples, remainder / remainder.sum())) if n}
        if num_samples
        else {}
        for remainder in remainders
    ]
    floats, ids = np.float32, np.int32
    return StoredLogprobs(
        positions=np.arange(1, size + 1, dtype=ids),
        offsets=np.cumsum([0, *map(len, exact_ids)]),
        ids=np.array([one for row in exact_ids for one in row], ids),
        logprobs=np.log([row[one] for row, kept in zip(probs, exact_ids, strict=True) for one in kept]).astype(floats),
        sample_offsets=np.cumsum([0, *map(len, samples)]) if num_samples else np.zeros(1, np.int64),
        sample_ids=np.array([one for row in samples for one in sorted(row)], ids),
        sample_counts=np.array([row[one] for row in samples for one in sorted(row)], ids),
        remainder_mass=np.array([remainder.sum() for remainder in remainders], floats),
        observed_logprobs=np.log(probs[np.arange(size), observed]).astype(floats),
        entropy=-(probs * np.log(probs)).sum(1).astype(floats),
    )


def dense(teacher_logprobs: TeacherLogprobs) -> np.ndarray:
    """Return the teacher's probabilities, [P, V]; NaN where none is stored."""
    found = np.full((len(teacher_logprobs), V), np.nan)
    found[teacher_logprobs.remainder_mass == 0] = 0
    found[np.repeat(np.arange(len(teacher_logprobs)), np.diff(teacher_logprobs.offsets)), teacher_logprobs.ids] = (
        np.exp(teacher_logprobs.logprobs)
    )
    return found


def test_exact_tokens_of_a_mixture_are_exact_in_all_teachers():
    rng = np.random.default_rng(3)
    probs, observed = [distributions(rng, 20) for _ in range(2)], rng.integers(0, V, 20)
    teachers = [
        StoredLogprobs.to_teacher_logprobs(stored_logprobs(one, observed, 3, 5, seed), 0)
        for seed, one in enumerate(probs)
    ]
    mixed = mix_teacher_logprobs(teachers, [0.4, 0.6])
    for at in range(20):
        exact_ids = [set(one.ids[one.offsets[at] :][: one.exact_counts[at]].tolist()) for one in teachers]
        mixed_exact_ids = mixed.ids[mixed.offsets[at] :][: mixed.exact_counts[at]].tolist()
        assert set(mixed_exact_ids) == exact_ids[0] & exact_ids[1] >= {int(observed[at])}
    probabilities = dense(mixed)
    assert np.allclose(probabilities, 0.4 * dense(teachers[0]) + 0.6 * dense(teachers[1]), atol=1e-6)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    supports=st.lists(st.tuples(st.integers(1, V), st.sampled_from([0, 0, 5])), min_size=1, max_size=3),
)
def test_mixture_is_exact_on_common_ids_and_on_the_remainder_as_one_cell(seed, supports):
    rng = np.random.default_rng(seed)
    observed = rng.integers(0, V, 4)
    weights = rng.dirichlet(np.ones(len(supports)))
    supports = [(top_k, num_samples if top_k < V - 2 else 0) for top_k, num_samples in supports]
    probs = [distributions(rng, 4) for _ in supports]
    teachers = [
        StoredLogprobs.to_teacher_logprobs(stored_logprobs(one, observed, top_k, num_samples, seed), 0)
        for one, (top_k, num_samples) in zip(probs, supports, strict=True)
    ]
    # A teacher's sampled estimates are used as its probabilities.
    dense_probs = np.array([dense(teacher) for teacher in teachers])
    # Where one teacher has a remainder, samples of the others are part of it.
    for position in np.flatnonzero(np.any([teacher.remainder_mass > 0 for teacher in teachers], axis=0)):
        for values, teacher in zip(dense_probs, teachers, strict=True):
            if teacher.exact_counts is not None:
                exact = teacher.ids[teacher.offsets[position] :][: teacher.exact_counts[position]]
                values[position, np.setdiff1d(np.arange(V), exact)] = np.nan
    mixture = mix_teacher_logprobs(teachers, weights)
    expected = np.einsum("k,knv->nv", weights, dense_probs)  # NaN where one teacher has no probability
    for position in range(4):
        low, high = mixture.offsets[position : position + 2]
        by_id = low + np.argsort(mixture.ids[low:high])
        ids, values = mixture.ids[by_id], np.exp(mixture.logprobs[by_id])
        known = np.flatnonzero(~np.isnan(expected[position]) & (expected[position] > 0))
        assert ids.tolist() == known.tolist()
        np.testing.assert_allclose(values, expected[position, known], rtol=1e-5)
        assert observed[position] in ids
        assert values.sum() + mixture.remainder_mass[position] == pytest.approx(1, abs=1e-5)
        if not any(num_samples for _, num_samples in supports):  # equal to the true mixture, with coarser cells
            truth = np.einsum("k,kv->v", weights, np.array([one[position] for one in probs]))
            np.testing.assert_allclose(values, truth[ids], rtol=1e-5)
            assert mixture.remainder_mass[position] == pytest.approx(truth.sum() - truth[ids].sum(), abs=1e-6)


@pytest.mark.slow
def test_mixture_of_sampled_supports_is_unbiased():
    rng = np.random.default_rng(2)
    observed, weights = rng.integers(0, V, 3), [0.3, 0.7]
    probs = [distributions(rng, 3) for _ in weights]
    sums, repetitions = np.zeros((3, V)), 4000
    for seed in range(repetitions):
        teachers = [
            StoredLogprobs.to_teacher_logprobs(stored_logprobs(one, observed, 2, 4, 2 * seed + k), 0)
            for k, one in enumerate(probs)
        ]
        sums += np.nan_to_num(dense(mix_teacher_logprobs(teachers, weights)))
    np.testing.assert_allclose(sums / repetitions, 0.3 * probs[0] + 0.7 * probs[1], atol=6e-3)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("exact", [1, 3])
def test_samples_are_part_of_the_remainder_where_another_teacher_has_one(exact, order):
    rng = np.random.default_rng(5)
    observed, probs = rng.integers(0, V, 6), [distributions(rng, 6) for _ in range(2)]
    supports = [(exact, 8), (4, 0)][::order]
    teachers = [
        StoredLogprobs.to_teacher_logprobs(stored_logprobs(one, observed, *support, 1), 0)
        for one, support in zip(probs, supports, strict=True)
    ]
    mixed = mix_teacher_logprobs(teachers, [0.3, 0.7])
    truth = 0.3 * probs[0] + 0.7 * probs[1]
    assert (
        mixed.exact_counts == np.diff(mixed.offsets)
    ).all()  # no cell is an estimate: the entropy of samples is not used
    for at in range(6):
        ids = mixed.ids[mixed.offsets[at] : mixed.offsets[at + 1]]
        assert observed[at] in ids
        np.testing.assert_allclose(np.exp(mixed.logprobs[mixed.offsets[at] :][: len(ids)]), truth[at, ids], rtol=1e-5)
        assert mixed.remainder_mass[at] == pytest.approx(1 - truth[at, ids].sum(), abs=1e-5)


@pytest.mark.parametrize("num_samples", [0, 4])
def test_mixture_of_a_teacher_with_itself_equals_the_teacher(num_samples):
    rng = np.random.default_rng(5)
    teacher = StoredLogprobs.to_teacher_logprobs(
        stored_logprobs(distributions(rng, 6), rng.integers(0, V, 6), 3, num_samples, 1), 0
    )
    mixture = mix_teacher_logprobs([teacher, teacher], [0.3, 0.7])
    assert (mixture.exact_counts is None) == (teacher.exact_counts is None) == (num_samples == 0)
    for field in dataclasses.fields(teacher):
        if field.name in ("precision", "token_logprobs"):
            continue
        one, other = getattr(mixture, field.name), getattr(teacher, field.name)
        if one is not None:
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


# --- weights


@settings(deadline=None)
@given(
    sums=st.lists(st.lists(st.floats(-200, 0) | st.just(-math.inf), min_size=3, max_size=3), min_size=1, max_size=4),
    score=st.sampled_from(list(TEACHER_SCORES)),
    alpha=st.sampled_from([0.0, 0.5, 20.0, math.inf]),
    without_spans=st.integers(0, 15),
)
def test_teacher_weights_sum_to_1_and_do_not_decrease_with_the_score(sums, score, alpha, without_spans):
    sizes = np.full((len(sums), 3), 7.0)
    spans = np.array([[0.0 if without_spans >> k & 1 else 2.0] * 3 for k in range(len(sums))])
    sums = np.where(spans > 0, np.array(sums), 0.0)
    weights = ScoreWeighting(score, alpha).teacher_weights(np.stack([sums, sizes * (spans > 0), spans], -1))
    np.testing.assert_allclose(weights.sum(0), 1)
    assert (weights >= 0).all()
    for part in range(3):
        scored = [k for k in range(len(sums)) if spans[k, part]]
        if scored:
            assert weights[scored, part].sum() == pytest.approx(1)
        values = np.maximum(sums[:, part], 7 * MIN_SCORE)
        for one in scored:
            for other in scored:
                if values[one] > values[other]:
                    assert weights[one, part] >= weights[other, part]
        if alpha == 0 and scored:
            np.testing.assert_allclose(weights[scored, part], 1 / len(scored))


def test_teacher_weights_equal_values_computed_by_hand():
    # 12 bytes at -18 nats, 10 bytes at -5: -1.5 and -0.5 nats per byte.
    tallies = np.array([[[-18.0, 12, 3]], [[-5.0, 10, 4]]])
    high = 1 / (1 + math.exp(-2))
    np.testing.assert_allclose(ScoreWeighting("ce", 2.0).teacher_weights(tallies)[:, 0], [1 - high, high])
    np.testing.assert_allclose(ScoreWeighting("ce", math.inf).teacher_weights(tallies)[:, 0], [0, 1])
    difference = math.exp(-0.5) - math.exp(-1.5)
    high = 1 / (1 + math.exp(-difference))
    np.testing.assert_allclose(ScoreWeighting("max-probability", 1.0).teacher_weights(tallies)[:, 0], [1 - high, high])


def random_boundaries(rng: np.random.Generator, size: int) -> list[int]:
    """Return random increasing numbers from 0 to size."""
    inner = np.flatnonzero(rng.random(size + 1) < 0.4)
    return sorted({0, *inner.tolist(), size})


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    score=st.sampled_from(list(TEACHER_SCORES)),
    per=st.sampled_from(["document", "span"]),
)
def test_score_tallies_sum_over_the_spans_that_all_tokenizers_share(seed, score, per):
    rng = np.random.default_rng(seed)
    tokens = int(rng.integers(1, 12))
    sizes = rng.integers(0, 5, tokens)
    examples, values, boundaries = [], [], []
    for _ in range(2):
        student_bounds = random_boundaries(rng, tokens)
        teacher_bounds = np.cumsum([0, *rng.integers(1, 3, len(student_bounds) - 1)])
        spans = np.array(
            [
                [a, b, c, d]
                for a, b, c, d in zip(
                    student_bounds[:-1], student_bounds[1:], teacher_bounds[:-1], teacher_bounds[1:], strict=True
                )
            ]
        )
        logprobs = StoredLogprobs.to_teacher_logprobs(
            stored_logprobs(
                distributions(rng, teacher_bounds[-1]), rng.integers(0, V, teacher_bounds[-1]), 2, seed % 2 * 4, seed
            ),
            0,
        )
        observed = np.where(rng.random(teacher_bounds[-1]) < 0.1, np.float32(-np.inf), logprobs.observed_logprobs)
        logprobs = dataclasses.replace(
            logprobs, positions=np.arange(teacher_bounds[-1], dtype=np.int32), observed_logprobs=observed
        )
        kept = rng.random(len(spans)) < 0.8  # the other spans are missing
        ids = np.zeros(teacher_bounds[-1], np.int32)
        examples.append(
            LossInputs(np.zeros(tokens, np.int32), np.arange(tokens), spans[kept].astype(np.int32), ids, logprobs)
        )
        exact = np.diff(logprobs.offsets) if logprobs.exact_counts is None else logprobs.exact_counts
        top_logprobs = [logprobs.logprobs[a : a + n].max() for a, n in zip(logprobs.offsets[:-1], exact, strict=True)]
        values.append(
            {"ce": logprobs.observed_logprobs, "entropy": -logprobs.entropy, "max-probability": top_logprobs}[score]
        )
        inside = {at for a, b, _, _ in spans[kept].tolist() for at in range(a + 1, b)}
        boundaries.append({at for at in range(tokens + 1) if at not in inside})
    shared_boundaries = sorted(boundaries[0] & boundaries[1]) if per == "span" else [0, tokens]
    tallies, parts = score_tallies(ScoreWeighting(score, scope=per), examples, sizes)
    assert parts.tolist() == [n for n, (a, b) in enumerate(itertools.pairwise(shared_boundaries)) for _ in range(a, b)]
    for k, example in enumerate(examples):
        for n, (a, b) in enumerate(itertools.pairwise(shared_boundaries)):
            within = [span for span in example.spans.tolist() if a <= span[0] < b]
            assert all(span[1] <= b for span in within)
            expected = [
                sum(values[k][at] for span in within for at in range(span[2], span[3])),
                sum(sizes[at] for span in within for at in range(span[0], span[1])),
                len(within),
            ]
            np.testing.assert_allclose(tallies[k, n], expected, rtol=1e-5, atol=1e-6)


# --- options


@pytest.mark.parametrize("method", list(COMBINATION_METHODS))
def test_default_teacher_weights_are_equal(method):
    assert parse_ensemble(method, "", 4).weights == (0.25,) * 4


def test_numeric_weights_are_normalized_and_scores_have_options():
    assert parse_ensemble("sum", "3,1", 2).weights == (0.75, 0.25)
    assert parse_ensemble("mixture", "1,0", 2).weights == (1, 0)
    assert parse_ensemble("sum", "ce:alpha=5,per=span", 2).score_weighting == ScoreWeighting("ce", 5.0, "span")
    assert parse_ensemble("select", "entropy:per=span", 2).score_weighting == ScoreWeighting(
        "entropy", math.inf, "span"
    )
    assert parse_ensemble("select", "", 2).score_weighting == ScoreWeighting("ce", math.inf, "document")


@pytest.mark.parametrize(
    ("method", "weights", "teachers", "message"),
    [
        ("mix", "", 2, "no value of --combine-teachers called 'mix'; did you mean mixture?"),
        ("sum", "", 1, None),
        ("route", "", 1, "--combine-teachers needs several teachers, but this run has one"),
        ("sum", "1", 1, "--teacher-weights needs several teachers, but this run has one"),
        ("sum", "1,2,3", 2, "--teacher-weights '1,2,3' is not a list of 2 weights"),
        ("sum", "-1,2", 2, "--teacher-weights '-1,2' is not a list of 2 weights"),
        ("sum", "0,0", 2, "--teacher-weights '0,0' is not a list of 2 weights"),
        ("sum", "1e308,1e308", 2, "--teacher-weights '1e308,1e308' is not a list of 2 weights"),
        ("sum", "ce:alpha=5,alpha=6", 2, "--teacher-weights ce:alpha=5,alpha=6: alpha is given twice"),
        ("sum", "1,x", 2, "--teacher-weights '1,x' is not a list of 2 weights"),
        ("sum", "enropy", 2, "no score in --teacher-weights called 'enropy'; did you mean entropy?"),
        ("sum", "ce:beta=1", 2, "no option of --teacher-weights called 'beta'"),
        ("sum", "ce:per=word", 2, "no value of per of --teacher-weights ce:per=word called 'word'"),
        ("sum", "ce:alpha=nan", 2, "alpha of --teacher-weights ce:alpha=nan is 'nan'"),
        ("select", "1,2", 2, "--combine-teachers select needs a score in --teacher-weights"),
        ("route", "1,2", 2, "--teacher-weights does not apply to --combine-teachers route"),
        ("mixture", "ce", 2, "--combine-teachers mixture needs fixed --teacher-weights"),
    ],
)  # fmt: skip
def test_invalid_teacher_weights_are_refused(method, weights, teachers, message):
    if message is None:
        assert parse_ensemble(method, weights, teachers).weights == (1,)
        return
    with pytest.raises(XtkError) as raised:
        parse_ensemble(method, weights, teachers)
    assert raised.value.what.startswith(message)
