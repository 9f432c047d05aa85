"""alm, uld, gold and h-kl: what is true of them alone, and what was published."""

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
from reference_byte_kl import OF_A_CELL, Distance
from reference_losses import (
    Case,
    by_rank,
    case_of_one_model,
    draw_case,
    plain_alm,
    plain_merged,
    plain_pairs,
    plain_published_p_kl,
    predicted_spans,
    signal_of,
)
from small_vocabularies import partition_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from xtk.losses.chunked_softmax_numba import largest_columns
from xtk.losses.fused_head_and_loss import fused_loss
from xtk.losses.largest_tokens import largest_by_topk, scale_rows
from xtk.losses.loss_cells import LossCells
from xtk.losses.loss_interface import LossInputs
from xtk.losses.loss_spec import parse_losses
from xtk.losses.span_probability_products import log_tempered_remainder
from xtk.models.output_head import OutputHead
from xtk.projection.projection import SparseProjection

CPU = torch.device("cpu")


def cells_of(text: str, case: Case) -> LossCells:
    (loss,) = parse_losses([text])
    rule = loss.make_loss()
    ground = None if rule.comparison_space == "spans" else case.projection.columns
    return dataclasses.replace(rule.build_cells(case.example, ground), divergence=loss.make_divergence())


def fused(text: str, case: Case, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """The sum over items, and the gradients of states and head."""
    inputs = [tensor.detach().to(dtype).requires_grad_() for tensor in (case.states, case.weight)]
    total, _ = fused_loss(inputs[0], OutputHead(*inputs[1:]), [cells_of(text, case).to(CPU, 1.0)], 3)
    total.backward()
    return total.detach(), inputs[0].grad, inputs[1].grad


def plain(items: functools.partial, case: Case) -> tuple[Tensor, Tensor, Tensor]:
    inputs = [tensor.detach().requires_grad_() for tensor in (case.states, case.weight)]
    total = sum(items(case, torch.softmax(inputs[0] @ inputs[1].T, 1)), torch.zeros((), dtype=torch.float64))
    total.backward()
    return total.detach(), inputs[0].grad, inputs[1].grad


def assert_same(text: str, items: functools.partial, case: Case, tolerance: float = 2e-6) -> None:
    for one, other in zip(fused(text, case), plain(items, case), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * max(1e-3, float(other.abs().max())))


# --- options, against the readable ones

MERGED = {
    "gold:paired_weight=0.5,ranked_weight=2": functools.partial(plain_merged, weights=(0.5, 2.0)),
    "h-kl:divergence=jsd,beta=0.3": functools.partial(
        plain_merged, distance=Distance("jsd", 1.0, {"beta": 0.3}), weights=(1.0, 1.0)
    ),
    "h-kl:published=true": functools.partial(plain_merged, weights=(1.0, 1.0), published=True),
    "gold:published=true": functools.partial(plain_merged, published=True),
    "p-kl:published=true": plain_published_p_kl,
    "p-kl:published=true,divergence=reverse-kl": functools.partial(plain_published_p_kl, reverse=True),
    "alm:temperature=1": functools.partial(plain_alm, temperature=1.0),
    "alm:temperature=0.5": functools.partial(plain_alm, temperature=0.5),
    **{f"alm:divergence={name}": functools.partial(plain_alm, distance=Distance(name)) for name in OF_A_CELL},
}


@pytest.mark.parametrize("text", list(MERGED))
def test_options_and_published_forms_are_those_of_the_readable_ones(text):
    for seed, K in ((0, 4), (1, 99), (2, 1)):
        case = draw_case(seed, K=K, spans=8)
        assert_same(text, MERGED[text], case)


def test_a_cap_puts_what_it_cuts_behind_the_ranks():
    case = draw_case(3, K=99, spans=9)
    whole, *several = (
        float(fused(f"h-kl:paired_weight=0{cap}", case)[0])
        for cap in ("", ",max_ranks=3", ",max_ranks=1", ",max_ranks=0")
    )
    for more, fewer in itertools.pairwise([whole, *several]):
        assert fewer <= more + 1e-6
    assert whole > several[-1] + 1e-2


# --- pairs


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 10_000))
def test_pairs_are_the_heaviest_entries_one_for_one(seed):
    case = draw_case(seed, K=2, V=9, U=7)
    partners, students = case.projection.columns.pairs
    expected = plain_pairs(case.dense)
    assert {u: v for u, v in enumerate(partners.tolist()) if v >= 0} == expected
    assert students.tolist() == sorted(expected.values())


# --- equal models, through spans of several tokens


def half_paired(case: Case) -> Case:
    """The same with a projection that pairs every second token."""
    whole = case.projection
    kept = np.arange(whole.student_width) % 2 == 0
    offsets = np.concatenate([[0], np.cumsum(kept)]).astype(np.int64)
    half = SparseProjection(
        offsets, whole.teacher_ids[kept], whole.weights[kept], whole.student_cells, whole.teacher_cells
    )
    return dataclasses.replace(case, projection=half)


@pytest.mark.parametrize("K", [1, 3, 23])
@pytest.mark.parametrize("text", ["alm", "alm:temperature=1", "uld", "gold", "h-kl", "gold:max_ranks=2"])
def test_a_model_is_at_distance_0_from_itself_through_spans_of_several_tokens(text, K):
    for seed in range(4):
        case = half_paired(case_of_one_model(seed, K=K, spans=9))
        assert max(len(s) for s, _ in predicted_spans(case.example)) > 1
        for dtype in (torch.float64, torch.float32):
            assert abs(float(fused(text, case, dtype)[0])) < 1e-5


# --- uld


def one_position(teacher: Sequence[float], student: Sequence[float], K: int, written: int = 0) -> Case:
    """One token on each side, of a student that says what is given."""
    ids = np.array([0, written], np.int32)
    signal = signal_of(np.log(np.array([teacher])), np.array([1]), ids[1:], K)
    example = LossInputs(ids, np.array([0]), np.array([[1, 2, 1, 2]], np.int32), ids, signal)
    logits = torch.log(torch.tensor(np.array([student]), dtype=torch.float64))
    words = partition_of([b"a", b"b"], [b"a", b"b"], len(student), len(teacher))
    return Case(
        example, SparseProjection.identity(len(student)), words, logits, torch.eye(len(student), dtype=torch.float64)
    )


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10_000))
def test_uld_from_part_of_a_distribution_is_never_more_than_from_all_of_it(seed):
    draw = np.random.default_rng(seed)
    U, V = (int(size) for size in draw.integers(5, 12, 2))
    t, s = (draw.dirichlet(np.full(size, 0.6)) + 1e-6 for size in (U, V))
    t, s = (t / t.sum()).tolist(), (s / s.sum()).tolist()
    written = int(draw.integers(min(U, V)))
    whole = float(by_rank(sorted(t, reverse=True), sorted(map(torch.tensor, s), reverse=True)))
    found = [float(fused("uld", one_position(t, s, K, written))[0]) for K in (1, 2, 4, U)]
    assert found[-1] == pytest.approx(whole, rel=1e-5, abs=1e-6)
    assert max(found) <= whole + 1e-5
    assert min(found) >= 0
    assert whole <= 2


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10_000))
def test_neither_part_of_h_kl_is_more_from_part_of_a_distribution(seed):
    draw = np.random.default_rng(seed)
    t, s = (draw.dirichlet(np.full(9, 0.6)) + 1e-6 for _ in range(2))
    cases = [half_paired(one_position(t / t.sum(), s / s.sum(), K, int(draw.integers(9)))) for K in (1, 2, 4, 9)]
    left = [token for token in range(9) if token % 2]
    ranks = float(by_rank(*(sorted((x / x.sum())[left].tolist(), reverse=True) for x in (t, s))))
    for text in ("h-kl:ranked_weight=0", "h-kl:paired_weight=0"):
        found = [float(fused(text, case)[0]) for case in cases]
        assert max(found) <= found[-1] + 1e-5
        assert min(found) >= -1e-6
        if text == "h-kl:paired_weight=0":
            assert found[-1] == pytest.approx(ranks, rel=1e-5, abs=1e-6)


def test_a_token_that_is_named_for_being_written_has_no_rank():
    # .2 is named for being written; .25 twice is not. Ranks: .3 alone; behind it .7.
    case = one_position([0.3, 0.25, 0.25, 0.2], [0.3, 0.25, 0.25, 0.2], K=1, written=3)
    assert cells_of("uld", case).rank_probs.tolist() == pytest.approx([0.3])
    assert float(fused("uld", case)[0]) == pytest.approx(0, abs=1e-6)


# --- alm


def test_alm_by_hand():
    """The teacher gives its token 1/2, the student 1/4; at tau = 1 that is a coin, at tau = 2 the roots of it."""
    case = one_position([0.5, 0.25, 0.25], [0.25, 0.5, 0.25], K=1)
    expected = 0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75)
    assert float(fused("alm:temperature=1", case)[0]) == pytest.approx(expected, rel=1e-6)
    p, q = math.sqrt(0.5), math.sqrt(0.25)
    expected = 2 * (p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)))
    assert float(fused("alm:temperature=2", case)[0]) == pytest.approx(expected, rel=1e-6)


def test_alm_goes_over_into_its_limit():
    case = one_position([0.5, 0.25, 0.25], [0.25, 0.5, 0.25], K=1)
    a, b = math.log(2), math.log(4)
    assert float(fused("alm:temperature=1e6", case)[0]) == pytest.approx(a * math.log(a / b) + b - a, rel=1e-5)


@pytest.mark.parametrize("tau", [0.5, 1.0, 100.0, 1e6])
@pytest.mark.parametrize("gap", [-400.0, -30.0, 0.0, 15.0, 40.0, 80.0])
def test_alm_is_finite_with_the_right_gradient_at_both_ends(gap, tau):
    """A student that gives its token e^-400, or all but e^-80; fp32."""
    case = one_position([0.6, 0.4], [0.5, 0.5], K=1)
    logits = torch.tensor([[gap, 0.0]], requires_grad=True)
    term = cells_of(f"alm:temperature={tau}", case).to(CPU, 1.0)
    total, _ = fused_loss(logits, OutputHead(None), [term], 4)
    total.backward()
    log_p = math.log(0.6) / tau
    log_s = -math.log1p(math.exp(-gap)) if gap > 0 else gap - math.log1p(math.exp(gap))
    left = -math.expm1(log_s / tau)
    # d/dL of tau KL is (q - p) / (1 - q), and L moves by what the token does not have.
    expected = (math.exp(log_s / tau) - math.exp(log_p)) / left * -math.expm1(log_s)
    assert torch.isfinite(total)
    assert logits.grad[0, 0].item() == pytest.approx(expected, rel=2e-4, abs=1e-30)
    assert logits.grad[0, 1].item() == pytest.approx(-expected, rel=2e-4, abs=1e-30)


@pytest.mark.parametrize("root", [0.5, 1.0, 3.0, 100.0])
def test_what_a_root_leaves_over(root):
    p = torch.tensor([1e-9, 0.2, 0.49, 0.51, 0.9, 1 - 1e-9], dtype=torch.float64)
    found = log_tempered_remainder(p.log(), torch.log1p(-p), root)
    torch.testing.assert_close(found, torch.log(-torch.expm1(p.log() / root)), rtol=1e-7, atol=1e-12)


def test_alm_needs_only_the_tokens_that_stand_there():
    case = draw_case(4, K=5, spans=9)
    signal = case.example.teacher_logprobs
    size = len(signal)
    alone = dataclasses.replace(
        signal,
        offsets=np.arange(size + 1),
        ids=case.example.teacher_ids[signal.positions],
        logprobs=signal.observed_logprobs,
        remainder_mass=-np.expm1(signal.observed_logprobs),
    )
    bare = dataclasses.replace(case, example=dataclasses.replace(case.example, teacher_logprobs=alone))
    for one, other in zip(fused("alm", case), fused("alm", bare), strict=True):
        assert torch.equal(one, other)


# --- merging, and what was published


def test_gold_by_hand():
    """A span of two tokens: .5 leads to the last, whose first token has a partner and whose other two have not."""
    probs = np.array([[0.5, 0.25, 0.25], [0.2, 0.6, 0.2]])
    ids = np.array([0, 0, 0], np.int32)
    signal = signal_of(np.log(probs), np.array([1, 2]), ids[1:], 3)
    example = LossInputs(ids, np.array([0, 1]), np.array([[1, 3, 1, 3]], np.int32), ids, signal)
    one = SparseProjection(
        np.array([0, 1, 1, 1]), np.zeros(1, np.int32), np.ones(1, np.float32), *[np.full(3, -1, np.int32)] * 2
    )
    student = torch.tensor([[0.8, 0.1, 0.1], [0.5, 0.3, 0.2]], dtype=torch.float64)
    words = partition_of([b"a", b"b"], [b"a", b"b"], 3, 3)
    case = Case(example, one, words, student.log(), torch.eye(3, dtype=torch.float64))
    pairs = 0.1 * math.log(0.1 / 0.4) + 0.9 * math.log(0.9 / 0.6)
    ranks = abs(0.5 * 0.6 - 0.8 * 0.3) + abs(0.5 * 0.2 - 0.8 * 0.2)
    assert float(fused("gold", case)[0]) == pytest.approx(pairs / 3 + ranks * 2 / 3, rel=1e-6)
    assert float(fused("h-kl", case)[0]) == pytest.approx(pairs + ranks, rel=1e-6)


def test_the_common_kl_as_published_is_negative():
    """-0.32, and 0.18 with the sorted part."""
    case = one_position([0.2, 0.2, 0.6], [0.45, 0.45, 0.1], K=3)
    case = dataclasses.replace(case, projection=SparseProjection(
        np.array([0, 1, 2, 2]), np.arange(2, dtype=np.int32), np.ones(2, np.float32), *[np.full(3, -1, np.int32)] * 2
    ))  # fmt: skip
    assert float(fused("h-kl:published=true,ranked_weight=0", case)[0]) == pytest.approx(-0.3244, abs=1e-4)
    assert float(fused("h-kl:published=true", case)[0]) == pytest.approx(0.1756, abs=1e-4)
    assert float(fused("h-kl:ranked_weight=0", case)[0]) == pytest.approx(
        0.4 * math.log(0.2 / 0.45) + 0.6 * math.log(6)
    )


def test_p_kl_as_published_is_not_0_for_equal_models():
    """-0.31 nats forward and +0.51 reverse; p-kl itself says 0."""
    probs = np.array([[0.9, 0.1], [0.1, 0.9]])
    ids = np.array([0, 0, 1], np.int32)
    signal = signal_of(np.log(probs), np.array([1, 2]), ids[1:], 2)
    example = LossInputs(ids, np.array([0, 1]), np.array([[1, 3, 1, 3]], np.int32), ids, signal)
    words = partition_of([b"a", b"b"], [b"a", b"b"], 2, 2)
    case = Case(example, SparseProjection.identity(2), words, torch.log(torch.tensor(probs)), torch.eye(2).double())
    assert float(fused("p-kl:published=true", case)[0]) == pytest.approx(-0.3065, abs=1e-4)
    assert float(fused("p-kl:published=true,divergence=reverse-kl", case)[0]) == pytest.approx(0.5108, abs=1e-4)
    assert float(fused("p-kl", case)[0]) == pytest.approx(0, abs=1e-6)


def test_p_kl_as_published_pays_4_nats_for_one_token_that_nothing_reaches():
    """Both say (.5, .3, .2); the student's third token lands on the second of the teacher's."""
    case = one_position([0.5, 0.3, 0.2], [0.5, 0.3, 0.2], K=3)
    case = dataclasses.replace(case, projection=SparseProjection(
        np.arange(4), np.array([0, 1, 1], np.int32), np.ones(3, np.float32), *[np.full(3, -1, np.int32)] * 2
    ))  # fmt: skip
    assert float(fused("p-kl:published=true", case)[0]) == pytest.approx(4.13, abs=0.01)


# --- bad input


@pytest.mark.parametrize("text", ["p-kl", "boundary-kl", "p-kl:published=true", "uld", "gold", "h-kl"])
def test_an_id_that_no_vocabulary_has_is_in_the_other_cell(text):
    case = draw_case(6, K=4, spans=9)
    signal = case.example.teacher_logprobs
    # Of each position the first id; what it had is nobody's now.
    foreign, unreached = signal.ids.copy(), signal.ids.copy()
    foreign[signal.offsets[:-1]] = [1_000_000, -1] * (len(signal) // 2) + [1_000_000] * (len(signal) % 2)
    wrong = dataclasses.replace(case, example=dataclasses.replace(
        case.example, teacher_logprobs=dataclasses.replace(signal, ids=foreign)
    ))  # fmt: skip
    for result in fused(text, wrong):
        assert torch.isfinite(result).all()
    unreached[signal.offsets[:-1]] = 2  # a third of the teacher's tokens is reached by nothing, 2 among them
    other = dataclasses.replace(case, example=dataclasses.replace(
        case.example, teacher_logprobs=dataclasses.replace(signal, ids=unreached)
    ))  # fmt: skip
    if "published" not in text:
        assert float(fused(text, wrong)[0]) == pytest.approx(float(fused(text, other)[0]), rel=1e-6)


# --- kernels


@settings(deadline=None, max_examples=80)
@given(seed=st.integers(0, 10_000))
def test_the_largest_values_are_those_of_a_sorted_row(seed):
    draw = np.random.default_rng(seed)
    V = int(draw.integers(1, 40))
    values = draw.choice([draw.normal(size=(6, V)), draw.integers(0, 4, (6, V)).astype(float)])
    ranked = draw.random(V) < draw.choice([0.2, 0.7, 1.0])
    rows = np.sort(draw.integers(0, 6, 4))
    counts = draw.integers(0, V + 3, 4)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    found = largest_columns(values, rows, offsets, ranked)
    for row, start, stop in zip(rows, offsets[:-1], offsets[1:], strict=True):
        falling = np.sort(values[row][ranked])[::-1][: stop - start]
        tokens = found[start:stop]
        assert (tokens[len(falling) :] == -1).all()
        assert values[row][tokens[: len(falling)]].tolist() == falling.tolist()
        assert len(set(tokens[: len(falling)].tolist())) == len(falling)
        assert ranked[tokens[: len(falling)]].all()


@pytest.mark.parametrize("masked", [False, True])
def test_topk_finds_what_the_kernel_finds(masked):
    draw = np.random.default_rng(3)
    values, ranked = draw.normal(size=(50, 30)), draw.random(30) < (0.3 if masked else 2)
    rows, counts = np.sort(draw.permutation(50)[:40]), draw.integers(0, 34, 40)
    mask = torch.from_numpy(ranked.astype(float)) if masked else None
    found = largest_by_topk(torch.from_numpy(values), torch.from_numpy(rows), torch.from_numpy(counts), mask)
    assert found.tolist() == largest_columns(values, rows, np.concatenate([[0], np.cumsum(counts)]), ranked).tolist()


def test_rows_without_ranks_are_not_read():
    """simct and strict only need sums over the paired tokens."""

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(one is values for one in args):
                read.append(args)
            return function(*args, **(kwargs or {}))

    read: list[Any] = []
    values, rows = torch.randn(40, 7), torch.arange(40)
    for counts in (torch.zeros(40, dtype=torch.int64), torch.arange(40).eq(39).long()):
        with Reads():
            found = largest_by_topk(values, rows, counts, None)
        assert len(found) == len(read) == int(counts.sum())


def test_rows_are_scaled_with_more_for_the_tokens_of_a_band():
    draw = torch.Generator().manual_seed(0)
    values, factors, band = (torch.randn(size, generator=draw) for size in ((70, 9), (70,), (70,)))
    mask = (torch.arange(9) % 2).float()
    expected = values * (factors[:, None] + band[:, None] * mask)
    scale_rows(values, factors, [(band, mask)])
    torch.testing.assert_close(values, expected)
