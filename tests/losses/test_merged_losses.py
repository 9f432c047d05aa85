"""Properties of alm, uld, gold and h-kl only, and published forms of losses."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_byte_kl import CELL_DIVERGENCES, ReferenceDivergence
from reference_losses import (
    Case,
    equal_models_case,
    make_teacher_logprobs,
    predicted_spans,
    random_case,
    reference_alm,
    reference_gold,
    reference_pairs,
    reference_published_p_kl,
    sorted_l1,
)
from small_vocabularies import partition_vocabularies
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from xtk.losses.cells.loss_cells import LossCells
from xtk.losses.cells.span_probability_products import log_tempered_remainder
from xtk.losses.head import fused_loss
from xtk.losses.interface import LossInputs
from xtk.losses.kernels.chunked_softmax_numba import largest_columns
from xtk.losses.kernels.largest_tokens import largest_by_topk, scale_rows
from xtk.losses.spec import parse_losses
from xtk.models.output_head import OutputHead
from xtk.projection.projection import SparseProjection

CPU = torch.device("cpu")


def cells_of(text: str, case: Case) -> LossCells:
    (spec,) = parse_losses([text])
    loss = spec.make_loss()
    space = None if loss.comparison_space == "spans" else case.projection.columns
    return dataclasses.replace(loss.build_cells(case.example, space), divergence=spec.make_divergence())


def fused(text: str, case: Case, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum over items, and the gradients of states and head."""
    inputs = [tensor.detach().to(dtype).requires_grad_() for tensor in (case.states, case.weight)]
    total, _ = fused_loss(inputs[0], OutputHead(*inputs[1:]), [cells_of(text, case).to(CPU, 1.0)], 3)
    total.backward()
    return total.detach(), inputs[0].grad, inputs[1].grad


def reference(reference_loss: functools.partial, case: Case) -> tuple[Tensor, Tensor, Tensor]:
    inputs = [tensor.detach().requires_grad_() for tensor in (case.states, case.weight)]
    total = sum(reference_loss(case, torch.softmax(inputs[0] @ inputs[1].T, 1)), torch.zeros((), dtype=torch.float64))
    total.backward()
    return total.detach(), inputs[0].grad, inputs[1].grad


def assert_matches_reference(text: str, reference_loss: functools.partial, case: Case, tolerance: float = 2e-6) -> None:
    for found, expected in zip(fused(text, case), reference(reference_loss, case), strict=True):
        torch.testing.assert_close(
            found, expected, rtol=tolerance, atol=tolerance * max(1e-3, float(expected.abs().max()))
        )


# --- options, against the reference implementations

REFERENCES = {
    "gold:paired_weight=0.5,ranked_weight=2": functools.partial(reference_gold, weights=(0.5, 2.0)),
    "h-kl:divergence=jsd,beta=0.3": functools.partial(
        reference_gold, divergence=ReferenceDivergence("jsd", 1.0, {"beta": 0.3}), weights=(1.0, 1.0)
    ),
    "h-kl:published=true": functools.partial(reference_gold, weights=(1.0, 1.0), published=True),
    "gold:published=true": functools.partial(reference_gold, published=True),
    "p-kl:published=true": reference_published_p_kl,
    "p-kl:published=true,divergence=reverse-kl": functools.partial(reference_published_p_kl, reverse=True),
    "alm:temperature=1": functools.partial(reference_alm, temperature=1.0),
    "alm:temperature=0.5": functools.partial(reference_alm, temperature=0.5),
    **{
        f"alm:divergence={name}": functools.partial(reference_alm, divergence=ReferenceDivergence(name))
        for name in CELL_DIVERGENCES
    },
}


@pytest.mark.parametrize("text", list(REFERENCES))
def test_options_and_published_forms_match_the_reference(text):
    for seed, K in ((0, 4), (1, 99), (2, 1)):
        case = random_case(seed, K=K, spans=8)
        assert_matches_reference(text, REFERENCES[text], case)


def test_a_smaller_max_ranks_never_increases_the_loss():
    case = random_case(3, K=99, spans=9)
    uncapped, *capped = (
        float(fused(f"h-kl:paired_weight=0{cap}", case)[0])
        for cap in ("", ",max_ranks=3", ",max_ranks=1", ",max_ranks=0")
    )
    for more, fewer in itertools.pairwise([uncapped, *capped]):
        assert fewer <= more + 1e-6
    assert uncapped > capped[-1] + 1e-2


# --- pairs


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 10_000))
def test_token_pairs_are_the_largest_entries_one_to_one(seed):
    case = random_case(seed, K=2, V=9, U=7)
    pairs = case.projection.columns.pairs
    partners, students = pairs.student_of_teacher, pairs.paired_students.values
    expected = reference_pairs(case.dense)
    assert {u: v for u, v in enumerate(partners.tolist()) if v >= 0} == expected
    assert students.tolist() == sorted(expected.values())


# --- equal models, through spans of several tokens


def half_paired(case: Case) -> Case:
    """Return the case with a projection that pairs every second token."""
    projection = case.projection
    kept = np.arange(projection.student_width) % 2 == 0
    offsets = np.concatenate([[0], np.cumsum(kept)]).astype(np.int64)
    half = SparseProjection(
        offsets,
        projection.teacher_ids[kept],
        projection.weights[kept],
        projection.student_cells,
        projection.teacher_cells,
    )
    return dataclasses.replace(case, projection=half)


@pytest.mark.parametrize("K", [1, 3, 23])
@pytest.mark.parametrize("text", ["alm", "alm:temperature=1", "uld", "gold", "h-kl", "gold:max_ranks=2"])
def test_equal_models_have_loss_0_on_spans_of_several_tokens(text, K):
    for seed in range(4):
        case = half_paired(equal_models_case(seed, K=K, spans=9))
        assert max(len(s) for s, _ in predicted_spans(case.example)) > 1
        for dtype in (torch.float64, torch.float32):
            assert abs(float(fused(text, case, dtype)[0])) < 1e-5


# --- uld


def one_position(teacher: Sequence[float], student: Sequence[float], K: int, observed: int = 0) -> Case:
    """Return a case with one token on each side, and the given teacher and student probabilities."""
    ids = np.array([0, observed], np.int32)
    teacher_logprobs = make_teacher_logprobs(np.log(np.array([teacher])), np.array([1]), ids[1:], K)
    example = LossInputs(ids, np.array([0]), np.array([[1, 2, 1, 2]], np.int32), ids, teacher_logprobs)
    logits = torch.log(torch.tensor(np.array([student]), dtype=torch.float64))
    vocabularies = partition_vocabularies([b"a", b"b"], [b"a", b"b"], len(student), len(teacher))
    return Case(
        example,
        SparseProjection.identity(len(student)),
        vocabularies,
        logits,
        torch.eye(len(student), dtype=torch.float64),
    )


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10_000))
def test_uld_of_a_partial_support_is_at_most_that_of_the_full_support(seed):
    rng = np.random.default_rng(seed)
    U, V = (int(size) for size in rng.integers(5, 12, 2))
    t, s = (rng.dirichlet(np.full(size, 0.6)) + 1e-6 for size in (U, V))
    t, s = (t / t.sum()).tolist(), (s / s.sum()).tolist()
    observed = int(rng.integers(min(U, V)))
    full = float(sorted_l1(sorted(t, reverse=True), sorted(map(torch.tensor, s), reverse=True)))
    found = [float(fused("uld", one_position(t, s, K, observed))[0]) for K in (1, 2, 4, U)]
    assert found[-1] == pytest.approx(full, rel=1e-5, abs=1e-6)
    assert max(found) <= full + 1e-5
    assert min(found) >= 0
    assert full <= 2


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10_000))
def test_both_terms_of_h_kl_are_at_most_those_of_the_full_support(seed):
    rng = np.random.default_rng(seed)
    t, s = (rng.dirichlet(np.full(9, 0.6)) + 1e-6 for _ in range(2))
    cases = [half_paired(one_position(t / t.sum(), s / s.sum(), K, int(rng.integers(9)))) for K in (1, 2, 4, 9)]
    unpaired = [token for token in range(9) if token % 2]
    ranked_term = float(sorted_l1(*(sorted((x / x.sum())[unpaired].tolist(), reverse=True) for x in (t, s))))
    for text in ("h-kl:ranked_weight=0", "h-kl:paired_weight=0"):
        found = [float(fused(text, case)[0]) for case in cases]
        assert max(found) <= found[-1] + 1e-5
        assert min(found) >= -1e-6
        if text == "h-kl:paired_weight=0":
            assert found[-1] == pytest.approx(ranked_term, rel=1e-5, abs=1e-6)


def test_a_token_listed_only_as_the_observed_one_has_no_rank():
    # .2 is listed only because it is the observed token; .25 (twice) is not listed. Ranked: .3; below it: .7.
    case = one_position([0.3, 0.25, 0.25, 0.2], [0.3, 0.25, 0.25, 0.2], K=1, observed=3)
    assert cells_of("uld", case).rank_probs.tolist() == pytest.approx([0.3])
    assert float(fused("uld", case)[0]) == pytest.approx(0, abs=1e-6)


# --- alm


def test_alm_matches_values_by_hand():
    """The teacher assigns 1/2 to the token, the student 1/4; tau = 2 compares their square roots."""
    case = one_position([0.5, 0.25, 0.25], [0.25, 0.5, 0.25], K=1)
    expected = 0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75)
    assert float(fused("alm:temperature=1", case)[0]) == pytest.approx(expected, rel=1e-6)
    p, q = math.sqrt(0.5), math.sqrt(0.25)
    expected = 2 * (p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)))
    assert float(fused("alm:temperature=2", case)[0]) == pytest.approx(expected, rel=1e-6)


def test_alm_converges_to_its_limit_at_high_temperature():
    case = one_position([0.5, 0.25, 0.25], [0.25, 0.5, 0.25], K=1)
    a, b = math.log(2), math.log(4)
    assert float(fused("alm:temperature=1e6", case)[0]) == pytest.approx(a * math.log(a / b) + b - a, rel=1e-5)


@pytest.mark.parametrize("tau", [0.5, 1.0, 100.0, 1e6])
@pytest.mark.parametrize("gap", [-400.0, -30.0, 0.0, 15.0, 40.0, 80.0])
def test_alm_has_finite_values_and_exact_gradients_at_extreme_probabilities(gap, tau):
    """The student assigns e^-400, or all but e^-80, to the token; fp32."""
    case = one_position([0.6, 0.4], [0.5, 0.5], K=1)
    logits = torch.tensor([[gap, 0.0]], requires_grad=True)
    term = cells_of(f"alm:temperature={tau}", case).to(CPU, 1.0)
    total, _ = fused_loss(logits, OutputHead(None), [term], 4)
    total.backward()
    log_p = math.log(0.6) / tau
    log_s = -math.log1p(math.exp(-gap)) if gap > 0 else gap - math.log1p(math.exp(gap))
    tempered_remainder = -math.expm1(log_s / tau)
    # d/dL of tau KL is (q - p) / (1 - q), and dL/dlogit is 1 minus the token's probability.
    expected = (math.exp(log_s / tau) - math.exp(log_p)) / tempered_remainder * -math.expm1(log_s)
    assert torch.isfinite(total)
    assert logits.grad[0, 0].item() == pytest.approx(expected, rel=2e-4, abs=1e-30)
    assert logits.grad[0, 1].item() == pytest.approx(-expected, rel=2e-4, abs=1e-30)


@pytest.mark.parametrize("root", [0.5, 1.0, 3.0, 100.0])
def test_log_tempered_remainder_is_accurate(root):
    p = torch.tensor([1e-9, 0.2, 0.49, 0.51, 0.9, 1 - 1e-9], dtype=torch.float64)
    found = log_tempered_remainder(p.log(), torch.log1p(-p), root)
    torch.testing.assert_close(found, torch.log(-torch.expm1(p.log() / root)), rtol=1e-7, atol=1e-12)


def test_alm_needs_only_the_observed_tokens():
    case = random_case(4, K=5, spans=9)
    teacher_logprobs = case.example.teacher_logprobs
    size = len(teacher_logprobs)
    observed_only = dataclasses.replace(
        teacher_logprobs,
        offsets=np.arange(size + 1),
        ids=case.example.teacher_ids[teacher_logprobs.positions],
        logprobs=teacher_logprobs.observed_logprobs,
        remainder_mass=-np.expm1(teacher_logprobs.observed_logprobs),
    )
    observed_case = dataclasses.replace(case, example=dataclasses.replace(case.example, teacher_logprobs=observed_only))
    for full_result, observed_result in zip(fused("alm", case), fused("alm", observed_case), strict=True):
        assert torch.equal(full_result, observed_result)


# --- pairs and ranks, and published forms


def test_gold_and_h_kl_match_values_by_hand():
    """A span of two tokens: the teacher assigns .5 to the first; at the second, one token of three has a partner."""
    probs = np.array([[0.5, 0.25, 0.25], [0.2, 0.6, 0.2]])
    ids = np.array([0, 0, 0], np.int32)
    teacher_logprobs = make_teacher_logprobs(np.log(probs), np.array([1, 2]), ids[1:], 3)
    example = LossInputs(ids, np.array([0, 1]), np.array([[1, 3, 1, 3]], np.int32), ids, teacher_logprobs)
    projection = SparseProjection(
        np.array([0, 1, 1, 1]), np.zeros(1, np.int32), np.ones(1, np.float32), *[np.full(3, -1, np.int32)] * 2
    )
    student = torch.tensor([[0.8, 0.1, 0.1], [0.5, 0.3, 0.2]], dtype=torch.float64)
    vocabularies = partition_vocabularies([b"a", b"b"], [b"a", b"b"], 3, 3)
    case = Case(example, projection, vocabularies, student.log(), torch.eye(3, dtype=torch.float64))
    paired_term = 0.1 * math.log(0.1 / 0.4) + 0.9 * math.log(0.9 / 0.6)
    ranked_term = abs(0.5 * 0.6 - 0.8 * 0.3) + abs(0.5 * 0.2 - 0.8 * 0.2)
    assert float(fused("gold", case)[0]) == pytest.approx(paired_term / 3 + ranked_term * 2 / 3, rel=1e-6)
    assert float(fused("h-kl", case)[0]) == pytest.approx(paired_term + ranked_term, rel=1e-6)


def test_the_published_paired_kl_can_be_negative():
    """It is -0.32, and 0.18 with the ranked term."""
    case = one_position([0.2, 0.2, 0.6], [0.45, 0.45, 0.1], K=3)
    case = dataclasses.replace(case, projection=SparseProjection(
        np.array([0, 1, 2, 2]), np.arange(2, dtype=np.int32), np.ones(2, np.float32), *[np.full(3, -1, np.int32)] * 2
    ))  # fmt: skip
    assert float(fused("h-kl:published=true,ranked_weight=0", case)[0]) == pytest.approx(-0.3244, abs=1e-4)
    assert float(fused("h-kl:published=true", case)[0]) == pytest.approx(0.1756, abs=1e-4)
    assert float(fused("h-kl:ranked_weight=0", case)[0]) == pytest.approx(
        0.4 * math.log(0.2 / 0.45) + 0.6 * math.log(6)
    )


def test_published_p_kl_is_not_0_for_equal_models():
    """It is -0.31 nats forward and +0.51 reverse; xtk's p-kl is 0."""
    probs = np.array([[0.9, 0.1], [0.1, 0.9]])
    ids = np.array([0, 0, 1], np.int32)
    teacher_logprobs = make_teacher_logprobs(np.log(probs), np.array([1, 2]), ids[1:], 2)
    example = LossInputs(ids, np.array([0, 1]), np.array([[1, 3, 1, 3]], np.int32), ids, teacher_logprobs)
    vocabularies = partition_vocabularies([b"a", b"b"], [b"a", b"b"], 2, 2)
    case = Case(
        example, SparseProjection.identity(2), vocabularies, torch.log(torch.tensor(probs)), torch.eye(2).double()
    )
    assert float(fused("p-kl:published=true", case)[0]) == pytest.approx(-0.3065, abs=1e-4)
    assert float(fused("p-kl:published=true,divergence=reverse-kl", case)[0]) == pytest.approx(0.5108, abs=1e-4)
    assert float(fused("p-kl", case)[0]) == pytest.approx(0, abs=1e-6)


def test_published_p_kl_costs_4_nats_for_one_unreachable_token():
    """Both models predict (.5, .3, .2); the student's third token is mapped to the teacher's second."""
    case = one_position([0.5, 0.3, 0.2], [0.5, 0.3, 0.2], K=3)
    case = dataclasses.replace(case, projection=SparseProjection(
        np.arange(4), np.array([0, 1, 1], np.int32), np.ones(3, np.float32), *[np.full(3, -1, np.int32)] * 2
    ))  # fmt: skip
    assert float(fused("p-kl:published=true", case)[0]) == pytest.approx(4.13, abs=0.01)


# --- bad input


@pytest.mark.parametrize("text", ["p-kl", "boundary-kl", "p-kl:published=true", "uld", "gold", "h-kl"])
def test_ids_outside_of_the_vocabulary_are_in_the_remainder(text):
    case = random_case(6, K=4, spans=9)
    teacher_logprobs = case.example.teacher_logprobs
    # The first id of each position is replaced by one outside of the vocabulary.
    invalid_ids, unreachable_ids = teacher_logprobs.ids.copy(), teacher_logprobs.ids.copy()
    invalid_ids[teacher_logprobs.offsets[:-1]] = [1_000_000, -1] * (len(teacher_logprobs) // 2) + [1_000_000] * (
        len(teacher_logprobs) % 2
    )
    invalid_case = dataclasses.replace(case, example=dataclasses.replace(
        case.example, teacher_logprobs=dataclasses.replace(teacher_logprobs, ids=invalid_ids)
    ))  # fmt: skip
    for result in fused(text, invalid_case):
        assert torch.isfinite(result).all()
    # A third of the teacher's tokens is unreachable; 2 is one of them.
    unreachable_ids[teacher_logprobs.offsets[:-1]] = 2
    unreachable_case = dataclasses.replace(case, example=dataclasses.replace(
        case.example, teacher_logprobs=dataclasses.replace(teacher_logprobs, ids=unreachable_ids)
    ))  # fmt: skip
    if "published" not in text:
        assert float(fused(text, invalid_case)[0]) == pytest.approx(float(fused(text, unreachable_case)[0]), rel=1e-6)


# --- kernels


@settings(deadline=None, max_examples=80)
@given(seed=st.integers(0, 10_000))
def test_largest_columns_matches_a_sorted_row(seed):
    rng = np.random.default_rng(seed)
    V = int(rng.integers(1, 40))
    values = rng.choice([rng.normal(size=(6, V)), rng.integers(0, 4, (6, V)).astype(float)])
    ranked = rng.random(V) < rng.choice([0.2, 0.7, 1.0])
    rows = np.sort(rng.integers(0, 6, 4))
    counts = rng.integers(0, V + 3, 4)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    found = largest_columns(values, rows, offsets, ranked)
    for row, start, stop in zip(rows, offsets[:-1], offsets[1:], strict=True):
        descending = np.sort(values[row][ranked])[::-1][: stop - start]
        tokens = found[start:stop]
        assert (tokens[len(descending) :] == -1).all()
        assert values[row][tokens[: len(descending)]].tolist() == descending.tolist()
        assert len(set(tokens[: len(descending)].tolist())) == len(descending)
        assert ranked[tokens[: len(descending)]].all()


@pytest.mark.parametrize("masked", [False, True])
def test_topk_and_the_numba_kernel_find_the_same_tokens(masked):
    rng = np.random.default_rng(3)
    values, ranked = rng.normal(size=(50, 30)), rng.random(30) < (0.3 if masked else 2)
    rows, counts = np.sort(rng.permutation(50)[:40]), rng.integers(0, 34, 40)
    mask = torch.from_numpy(ranked.astype(float)) if masked else None
    found = largest_by_topk(torch.from_numpy(values), torch.from_numpy(rows), torch.from_numpy(counts), mask)
    assert found.tolist() == largest_columns(values, rows, np.concatenate([[0], np.cumsum(counts)]), ranked).tolist()


def test_rows_without_ranked_tokens_are_not_read():
    """simct and strict only need sums over the paired tokens."""

    class ReadRecorder(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(argument is values for argument in args):
                reads.append(args)
            return function(*args, **(kwargs or {}))

    reads: list[Any] = []
    values, rows = torch.randn(40, 7), torch.arange(40)
    for counts in (torch.zeros(40, dtype=torch.int64), torch.arange(40).eq(39).long()):
        with ReadRecorder():
            found = largest_by_topk(values, rows, counts, None)
        assert len(found) == len(reads) == int(counts.sum())


def test_scale_rows_adds_band_factors_to_masked_tokens():
    generator = torch.Generator().manual_seed(0)
    values, factors, band = (torch.randn(size, generator=generator) for size in ((70, 9), (70,), (70,)))
    mask = (torch.arange(9) % 2).float()
    expected = values * (factors[:, None] + band[:, None] * mask)
    scale_rows(values, factors, [(band, mask)])
    torch.testing.assert_close(values, expected)
