"""Teachers that speak as one, and weights that come from what they say."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtk.artifacts.shard_codec_registry import to_teacher_logprobs
from xtk.errors import XtkError
from xtk.losses.loss_interface import LossInputs
from xtk.tokens.teacher_logprobs import StoredLogprobs, TeacherLogprobs
from xtk.training.combine_teachers import (
    COMBINATION_METHODS,
    MIN_SCORE,
    TEACHER_SCORES,
    ScoreWeighting,
    parse_ensemble,
    score_tallies,
)
from xtk.training.teacher_probability_mixture import mix_teacher_logprobs

V = 9


def distributions(draw: np.random.Generator, size: int) -> np.ndarray:
    """[size, V], of positive numbers."""
    logits = draw.normal(size=(size, V)) * 2
    return np.exp(logits) / np.exp(logits).sum(1, keepdims=True)


def scores_of(probs: np.ndarray, realised: np.ndarray, top_k: int, draws: int, seed: int) -> StoredLogprobs:
    """What a cache keeps: the likeliest ids and the realised one, and draws from the rest."""
    draw, size = np.random.default_rng(seed), len(probs)
    exact = [
        sorted({int(token), *np.argsort(-row)[:top_k].tolist()}) for row, token in zip(probs, realised, strict=True)
    ]
    rests = [row.copy() for row in probs]
    for rest, ids in zip(rests, exact, strict=True):
        rest[ids] = 0
    drawn = [
        {int(at): int(n) for at, n in enumerate(draw.multinomial(draws, rest / rest.sum())) if n} if draws else {}
        for rest in rests
    ]
    floats, ids = np.float32, np.int32
    return StoredLogprobs(
        positions=np.arange(1, size + 1, dtype=ids),
        offsets=np.cumsum([0, *map(len, exact)]),
        ids=np.array([one for row in exact for one in row], ids),
        logprobs=np.log([row[one] for row, kept in zip(probs, exact, strict=True) for one in kept]).astype(floats),
        sample_offsets=np.cumsum([0, *map(len, drawn)]) if draws else np.zeros(1, np.int64),
        sample_ids=np.array([one for row in drawn for one in sorted(row)], ids),
        sample_counts=np.array([row[one] for row in drawn for one in sorted(row)], ids),
        remainder_mass=np.array([rest.sum() for rest in rests], floats),
        observed_logprobs=np.log(probs[np.arange(size), realised]).astype(floats),
        entropy=-(probs * np.log(probs)).sum(1).astype(floats),
    )


def dense(signal: TeacherLogprobs) -> np.ndarray:
    """[P, V]; NaN where it does not tell."""
    found = np.full((len(signal), V), np.nan)
    found[signal.remainder_mass == 0] = 0
    found[np.repeat(np.arange(len(signal)), np.diff(signal.offsets)), signal.ids] = np.exp(signal.logprobs)
    return found


def test_exact_of_a_mixture_is_what_is_exact_of_all():
    draw = np.random.default_rng(3)
    probs, realised = [distributions(draw, 20) for _ in range(2)], draw.integers(0, V, 20)
    signals = [to_teacher_logprobs(scores_of(one, realised, 3, 5, seed), 0) for seed, one in enumerate(probs)]
    mixed = mix_teacher_logprobs(signals, [0.4, 0.6])
    for at in range(20):
        of_each = [set(one.ids[one.offsets[at] :][: one.exact_counts[at]].tolist()) for one in signals]
        first = mixed.ids[mixed.offsets[at] :][: mixed.exact_counts[at]].tolist()
        assert set(first) == of_each[0] & of_each[1] >= {int(realised[at])}
    probabilities = dense(mixed)
    assert np.allclose(probabilities, 0.4 * dense(signals[0]) + 0.6 * dense(signals[1]), atol=1e-6)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    kinds=st.lists(st.tuples(st.integers(1, V), st.sampled_from([0, 0, 5])), min_size=1, max_size=3),
)
def test_a_mixture_is_exact_on_the_ids_that_all_tell_and_on_all_the_rest_as_one(seed, kinds):
    draw = np.random.default_rng(seed)
    realised = draw.integers(0, V, 4)
    weights = draw.dirichlet(np.ones(len(kinds)))
    kinds = [(top_k, draws if top_k < V - 2 else 0) for top_k, draws in kinds]
    probs = [distributions(draw, 4) for _ in kinds]
    said = [
        to_teacher_logprobs(scores_of(one, realised, top_k, draws, seed), 0)
        for one, (top_k, draws) in zip(probs, kinds, strict=True)
    ]
    # What a teacher estimates stands for what it says.
    told = np.array([dense(signal) for signal in said])
    # Where one has a remainder, samples of the others are part of it.
    for position in np.flatnonzero(np.any([signal.remainder_mass > 0 for signal in said], axis=0)):
        for values, signal in zip(told, said, strict=True):
            if signal.exact_counts is not None:
                exact = signal.ids[signal.offsets[position] :][: signal.exact_counts[position]]
                values[position, np.setdiff1d(np.arange(V), exact)] = np.nan
    mixture = mix_teacher_logprobs(said, weights)
    expected = np.einsum("k,knv->nv", weights, told)  # NaN where one does not tell
    for position in range(4):
        low, high = mixture.offsets[position : position + 2]
        by_id = low + np.argsort(mixture.ids[low:high])
        ids, values = mixture.ids[by_id], np.exp(mixture.logprobs[by_id])
        known = np.flatnonzero(~np.isnan(expected[position]) & (expected[position] > 0))
        assert ids.tolist() == known.tolist()
        np.testing.assert_allclose(values, expected[position, known], rtol=1e-5)
        assert realised[position] in ids
        assert values.sum() + mixture.remainder_mass[position] == pytest.approx(1, abs=1e-5)
        if not any(draws for _, draws in kinds):  # the truth itself, coarsened
            truth = np.einsum("k,kv->v", weights, np.array([one[position] for one in probs]))
            np.testing.assert_allclose(values, truth[ids], rtol=1e-5)
            assert mixture.remainder_mass[position] == pytest.approx(truth.sum() - truth[ids].sum(), abs=1e-6)


def test_a_mixture_of_draws_has_no_bias():
    draw = np.random.default_rng(2)
    realised, weights = draw.integers(0, V, 3), [0.3, 0.7]
    probs = [distributions(draw, 3) for _ in weights]
    sums, times = np.zeros((3, V)), 4000
    for seed in range(times):
        said = [to_teacher_logprobs(scores_of(one, realised, 2, 4, 2 * seed + k), 0) for k, one in enumerate(probs)]
        sums += np.nan_to_num(dense(mix_teacher_logprobs(said, weights)))
    np.testing.assert_allclose(sums / times, 0.3 * probs[0] + 0.7 * probs[1], atol=6e-3)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("exact", [1, 3])
def test_samples_are_part_of_the_remainder_where_another_teacher_has_one(exact, order):
    draw = np.random.default_rng(5)
    realised, probs = draw.integers(0, V, 6), [distributions(draw, 6) for _ in range(2)]
    kinds = [(exact, 8), (4, 0)][::order]
    stored = [
        to_teacher_logprobs(scores_of(one, realised, *kind, 1), 0) for one, kind in zip(probs, kinds, strict=True)
    ]
    mixed = mix_teacher_logprobs(stored, [0.3, 0.7])
    truth = 0.3 * probs[0] + 0.7 * probs[1]
    assert (
        mixed.exact_counts == np.diff(mixed.offsets)
    ).all()  # no cell is an estimate: entropy of samples is not used
    for at in range(6):
        ids = mixed.ids[mixed.offsets[at] : mixed.offsets[at + 1]]
        assert realised[at] in ids
        np.testing.assert_allclose(np.exp(mixed.logprobs[mixed.offsets[at] :][: len(ids)]), truth[at, ids], rtol=1e-5)
        assert mixed.remainder_mass[at] == pytest.approx(1 - truth[at, ids].sum(), abs=1e-5)


@pytest.mark.parametrize("draws", [0, 4])
def test_a_mixture_of_one_teacher_with_itself_is_what_it_says(draws):
    draw = np.random.default_rng(5)
    signal = to_teacher_logprobs(scores_of(distributions(draw, 6), draw.integers(0, V, 6), 3, draws, 1), 0)
    mixture = mix_teacher_logprobs([signal, signal], [0.3, 0.7])
    assert (mixture.exact_counts is None) == (signal.exact_counts is None) == (draws == 0)
    for field in dataclasses.fields(signal)[:-1]:  # but for the precision
        one, other = getattr(mixture, field.name), getattr(signal, field.name)
        if one is not None:
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


# --- weights


@settings(deadline=None)
@given(
    sums=st.lists(st.lists(st.floats(-200, 0) | st.just(-math.inf), min_size=3, max_size=3), min_size=1, max_size=4),
    score=st.sampled_from(list(TEACHER_SCORES)),
    alpha=st.sampled_from([0.0, 0.5, 20.0, math.inf]),
    silent=st.integers(0, 15),
)
def test_weights_sum_to_1_and_a_higher_score_has_not_less(sums, score, alpha, silent):
    sizes = np.full((len(sums), 3), 7.0)
    spans = np.array([[0.0 if silent >> k & 1 else 2.0] * 3 for k in range(len(sums))])
    sums = np.where(spans > 0, np.array(sums), 0.0)
    shares = ScoreWeighting(score, alpha).teacher_weights(np.stack([sums, sizes * (spans > 0), spans], -1))
    np.testing.assert_allclose(shares.sum(0), 1)
    assert (shares >= 0).all()
    for part in range(3):
        speaking = [k for k in range(len(sums)) if spans[k, part]]
        if speaking:
            assert shares[speaking, part].sum() == pytest.approx(1)
        values = np.maximum(sums[:, part], 7 * MIN_SCORE)
        for one in speaking:
            for other in speaking:
                if values[one] > values[other]:
                    assert shares[one, part] >= shares[other, part]
        if alpha == 0 and speaking:
            np.testing.assert_allclose(shares[speaking, part], 1 / len(speaking))


def test_weights_by_hand():
    # 12 bytes at -18 nats, 10 bytes at -5: -1.5 and -0.5 nats a byte.
    tallies = np.array([[[-18.0, 12, 3]], [[-5.0, 10, 4]]])
    high = 1 / (1 + math.exp(-2))
    np.testing.assert_allclose(ScoreWeighting("ce", 2.0).teacher_weights(tallies)[:, 0], [1 - high, high])
    np.testing.assert_allclose(ScoreWeighting("ce", math.inf).teacher_weights(tallies)[:, 0], [0, 1])
    difference = math.exp(-0.5) - math.exp(-1.5)
    high = 1 / (1 + math.exp(-difference))
    np.testing.assert_allclose(ScoreWeighting("max-probability", 1.0).teacher_weights(tallies)[:, 0], [1 - high, high])


def cuts(draw: np.random.Generator, size: int) -> list[int]:
    """Rising numbers from 0 to size."""
    inner = np.flatnonzero(draw.random(size + 1) < 0.4)
    return sorted({0, *inner.tolist(), size})


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    score=st.sampled_from(list(TEACHER_SCORES)),
    per=st.sampled_from(["document", "span"]),
)
def test_tallies_are_those_of_spans_that_all_tokenizers_share(seed, score, per):
    draw = np.random.default_rng(seed)
    tokens = int(draw.integers(1, 12))
    sizes = draw.integers(0, 5, tokens)
    examples, values, edges = [], [], []
    for _ in range(2):
        mine = cuts(draw, tokens)
        theirs = np.cumsum([0, *draw.integers(1, 3, len(mine) - 1)])
        spans = np.array(
            [[a, b, c, d] for a, b, c, d in zip(mine[:-1], mine[1:], theirs[:-1], theirs[1:], strict=True)]
        )
        signal = to_teacher_logprobs(
            scores_of(distributions(draw, theirs[-1]), draw.integers(0, V, theirs[-1]), 2, seed % 2 * 4, seed), 0
        )
        observed = np.where(draw.random(theirs[-1]) < 0.1, np.float32(-np.inf), signal.observed_logprobs)
        signal = dataclasses.replace(
            signal, positions=np.arange(theirs[-1], dtype=np.int32), observed_logprobs=observed
        )
        kept = draw.random(len(spans)) < 0.8  # of the others nothing is known
        ids = np.zeros(theirs[-1], np.int32)
        examples.append(
            LossInputs(np.zeros(tokens, np.int32), np.arange(tokens), spans[kept].astype(np.int32), ids, signal)
        )
        exact = np.diff(signal.offsets) if signal.exact_counts is None else signal.exact_counts
        highest = [signal.logprobs[a : a + n].max() for a, n in zip(signal.offsets[:-1], exact, strict=True)]
        values.append({"ce": signal.observed_logprobs, "entropy": -signal.entropy, "max-probability": highest}[score])
        inside = {at for a, b, _, _ in spans[kept].tolist() for at in range(a + 1, b)}
        edges.append({at for at in range(tokens + 1) if at not in inside})
    shared = sorted(edges[0] & edges[1]) if per == "span" else [0, tokens]
    tallies, parts = score_tallies(ScoreWeighting(score, scope=per), examples, sizes)
    assert parts.tolist() == [n for n, (a, b) in enumerate(itertools.pairwise(shared)) for _ in range(a, b)]
    for k, example in enumerate(examples):
        for n, (a, b) in enumerate(itertools.pairwise(shared)):
            within = [span for span in example.spans.tolist() if a <= span[0] < b]
            assert all(span[1] <= b for span in within)
            expected = [
                sum(values[k][at] for span in within for at in range(span[2], span[3])),
                sum(sizes[at] for span in within for at in range(span[0], span[1])),
                len(within),
            ]
            np.testing.assert_allclose(tallies[k, n], expected, rtol=1e-5, atol=1e-6)


# --- options


@pytest.mark.parametrize("way", list(COMBINATION_METHODS))
def test_weights_that_nobody_gives_are_equal(way):
    assert parse_ensemble(way, "", 4).weights == (0.25,) * 4


def test_numbers_are_weights_of_sum_1_and_scores_have_options():
    assert parse_ensemble("sum", "3,1", 2).weights == (0.75, 0.25)
    assert parse_ensemble("mixture", "1,0", 2).weights == (1, 0)
    assert parse_ensemble("sum", "ce:alpha=5,per=span", 2).score_weighting == ScoreWeighting("ce", 5.0, "span")
    assert parse_ensemble("select", "entropy:per=span", 2).score_weighting == ScoreWeighting(
        "entropy", math.inf, "span"
    )
    assert parse_ensemble("select", "", 2).score_weighting == ScoreWeighting("ce", math.inf, "document")


@pytest.mark.parametrize(
    ("way", "weights", "teachers", "what"),
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
def test_what_makes_no_sense_is_told(way, weights, teachers, what):
    if what is None:
        assert parse_ensemble(way, weights, teachers).weights == (1,)
        return
    with pytest.raises(XtkError) as told:
        parse_ensemble(way, weights, teachers)
    assert told.value.what.startswith(what)
