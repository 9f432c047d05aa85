"""What every loss of the table must satisfy; a new loss is tested on arrival."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_byte_kl import OF_A_CELL, Distance, said_at
from reference_losses import (
    PLAIN,
    Case,
    case_of_one_model,
    draw_case,
    plain_sum_of_cells,
    predicted_spans,
    signal_of,
)
from small_vocabularies import partition_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from xtk.errors import XtkError
from xtk.losses import LOSSES, SURROGATE_LOSSES, TEACHER_REQUIREMENTS
from xtk.losses.fused_head_and_loss import chunk_starts, fused_loss
from xtk.losses.loss_cells import LossCells
from xtk.losses.loss_interface import ComparisonSpace, ItemRanges, LossInputs, join_inputs
from xtk.losses.loss_spec import LossSpec, parse_losses
from xtk.losses.projected_cells_numba import fill_cells
from xtk.losses.sampled_support_correction import TeacherArrays
from xtk.models.output_head import HeadAdapter, OutputHead
from xtk.name_registry import load_registered
from xtk.projection.projection import ProjectionColumns, SparseProjection
from xtk.projection.vocabulary_byte_partition import BytePartition, sort_vocabulary
from xtk.tokens.teacher_logprobs import TeacherLogprobs

CPU = torch.device("cpu")
RULES = {name: load_registered(LOSSES, name, "loss")() for name in LOSSES}
DISTRIBUTIONS = [name for name, rule in RULES.items() if rule.comparison_space != "text"]

NOTHING = RULES["ce"].build_cells(join_inputs([]), None)

every_loss = pytest.mark.parametrize("name", list(LOSSES))
every_distribution_loss = pytest.mark.parametrize("name", DISTRIBUTIONS)
every_distance = pytest.mark.parametrize("name", [name for name in DISTRIBUTIONS if name not in SURROGATE_LOSSES])

# Sums of absolute differences have a kink where both sides are equal, and no gradient there.
KINKS = ("tvd", "uld", "gold", "h-kl")

# V = 23, U = 19. "one hot" gives log-probabilities of -100 and less.
KINDS = {
    "sparse support": {"K": 4},
    "K = 1": {"K": 1},
    "K = U": {"K": 99},
    "one-hot teacher": {"K": 4, "sharpness": 300.0},
    "one-hot teacher, K = U": {"K": 99, "sharpness": 300.0},
    "a head with a bias": {"K": 4, "bias": True},
}
every_kind = pytest.mark.parametrize("kind", list(KINDS))


def case_for(name: str, seed: int, **options: object) -> Case:
    return draw_case(seed, one_tokenizer=RULES[name].comparison_space == "tokens", **options)


def cells_of(name: str, case: Case, options: tuple[tuple[str, str], ...] = ()) -> LossCells:
    cells = RULES[name].build_cells(case.example, ground_of(name, case))
    return dataclasses.replace(cells, divergence=LossSpec(name, options=options).make_divergence())


def ground_of(name: str, case: Case) -> ComparisonSpace:
    grounds = {"text": lambda: None, "spans": lambda: None, "bytes": lambda: case.next_bytes}
    return grounds.get(RULES[name].comparison_space, lambda: case.projection.columns)()


def leaves(*tensors: Tensor | None, dtype: torch.dtype = torch.float64) -> list[Tensor | None]:
    return [None if tensor is None else tensor.detach().to(dtype).requires_grad_() for tensor in tensors]


def fused(
    case: Case, cells: list[LossCells], scales: list[float], *, chunk: int = 64, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The total, each term's sum, and the gradients of states, head and bias."""
    inputs = leaves(case.states, case.weight, case.bias, dtype=dtype)
    terms = [part.to(CPU, scale) for part, scale in zip(cells, scales, strict=True)]
    total, sums = fused_loss(inputs[0], OutputHead(*inputs[1:]), terms, chunk)
    total.backward()
    return total.detach(), sums, [tensor.grad for tensor in inputs if tensor is not None]


def plain(case: Case, items: object) -> tuple[Tensor, list[Tensor]]:
    """The same of a readable loss, a function of the student's probabilities [N, V]."""
    inputs = leaves(case.states, case.weight, case.bias)
    total = items(torch.softmax(torch.nn.functional.linear(*inputs), 1))
    gradients = [torch.zeros_like(tensor) for tensor in inputs if tensor is not None]
    if total.requires_grad:
        total.backward()
        gradients = [tensor.grad for tensor in inputs if tensor is not None]
    return total.detach(), gradients


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float, least: float = 1e-3) -> None:
    for one, other in zip(found, expected, strict=True):
        scale = max(float(other.abs().max()) if other.numel() else 0.0, least)
        torch.testing.assert_close(one.double(), other.double(), rtol=tolerance, atol=tolerance * scale)


def test_every_loss_says_what_it_asks_of_a_teacher():
    assert {rule.requires for rule in RULES.values()} == set(TEACHER_REQUIREMENTS)


def test_every_loss_has_a_readable_reference():
    assert set(PLAIN) == set(LOSSES)


@every_kind
@every_loss
def test_a_loss_and_its_gradient_are_those_of_dense_matrices_and_full_probabilities(name, kind):
    for seed in range(4):
        case = case_for(name, seed, **KINDS[kind])

        def items(probs: Tensor, case: Case = case) -> Tensor:
            return sum(PLAIN[name](case, probs), torch.zeros((), dtype=torch.float64))

        total, gradients = plain(case, items)
        cells = cells_of(name, case)
        # Cells are kept in fp32, and that bounds the agreement.
        found, sums, exact = fused(case, [cells], [1.0])
        assert_close([found, *exact], [total, *gradients], 1e-6)
        assert_close([sums[0]], [total], 1e-6)
        found, _, narrow = fused(case, [cells], [1.0], dtype=torch.float32)
        # Of a probability near 1 fp32 knows the logarithm to 1e-7, and some items are added.
        assert_close([found, *narrow], [total, *gradients], 1e-5, least=0.1)


def tolerance_of(name: str) -> float:
    """Of sums over entries with fp32 weights: what these leave of a token, although their sum is 1, is left out."""
    return 1e-7 if name in ("p-kl", "boundary-kl") else 1e-10


@every_kind
@every_loss
def test_the_kernel_agrees_with_loops_over_items_cells_and_entries(name, kind):
    distance = Distance(name if name in OF_A_CELL else RULES[name].default_divergence)
    for seed in range(4):
        case = case_for(name, seed, **KINDS[kind])
        cells = cells_of(name, case)
        total, gradients = plain(case, lambda probs, cells=cells: plain_sum_of_cells(cells, probs, distance))
        found, _, exact = fused(case, [cells], [1.0], chunk=3)
        assert_close([found, *exact], [total, *gradients], tolerance_of(name))


def test_the_cases_have_what_is_asked_of_them():
    cases = [draw_case(seed, K=4) for seed in range(4)]
    masses = np.concatenate([case.projection.row_masses for case in cases])
    assert (masses == 0).any()
    assert ((masses > 0) & (masses < 0.9)).any()
    assert (masses > 0.99).any()
    for case in cases:
        signal = case.example.teacher_logprobs
        assert (np.diff(signal.offsets) > 4).any()  # the realised token is not among the likeliest
        assert not np.isin(signal.ids, case.projection.teacher_ids).all()
        # Positions of which one side knows nothing, tokens in which the other side ends one.
        assert len(predicted_spans(case.example)) < len(case.example.spans)
    assert sum(cells_of("byte-kl", case).is_inside_token.sum() for case in cases) > 10
    assert draw_case(0, K=99, sharpness=300.0).example.teacher_logprobs.logprobs.min() < -100


@every_kind
@every_distance
def test_a_loss_between_distributions_is_not_negative(name, kind):
    for seed in range(10):
        case = case_for(name, seed, **KINDS[kind])
        cells = cells_of(name, case)
        for scale in (0.0, 1.0, 4.0):
            case = dataclasses.replace(case, states=case.states * scale)
            _, sums, _ = fused(case, [cells], [1.0], dtype=torch.float32)
            assert sums[0] >= -1e-6


@pytest.mark.parametrize("K", [1, 3, 23])
@every_distribution_loss
def test_a_model_is_at_distance_0_from_itself_and_is_not_moved(name, K):
    # Means over a span of supports that are cut at different tokens are no means of the distributions: K = U there.
    one_to_one = K < 23 or RULES[name].comparison_space == "tokens" or name == "strict"  # which has no other items
    for seed in range(5):
        case = case_of_one_model(seed, K=K, one_to_one=one_to_one)
        cells = cells_of(name, case)
        assert cells.num_items >= 6
        for dtype in (torch.float64, torch.float32):
            total, _, gradients = fused(case, [cells], [1.0], dtype=dtype)
            assert abs(float(total)) < 3e-6
            if name not in KINKS:
                assert max(float(gradient.abs().max()) for gradient in gradients) < 1e-5


@every_distance
def test_equal_models_are_at_distance_0_through_a_span_of_two_tokens(name):
    """P-KL as published gives -0.31 nats forward and +0.51 reverse here."""
    probs = np.array([[0.9, 0.1], [0.1, 0.9]])
    ids = np.array([0, 0, 1], np.int32)
    signal = signal_of(np.log(probs), np.array([1, 2]), ids[1:], 2)
    span = np.array([[1, 3, 1, 3]], np.int32)
    example = LossInputs(ids, np.array([0, 1]), span, ids, signal)
    words = partition_of([b"a", b"b"], [b"a", b"b"], 2, 2)
    logits, matrix = torch.from_numpy(np.log(probs)), torch.eye(2, dtype=torch.float64)
    case = Case(example, SparseProjection.identity(2), words, logits, matrix)
    total, _, gradients = fused(case, [cells_of(name, case)], [1.0])
    assert abs(float(total)) < 1e-6
    if name not in KINKS:
        assert max(float(gradient.abs().max()) for gradient in gradients) < 1e-6


def test_a_full_support_gives_the_full_divergence():
    case = case_for("forward-kl", 3, K=99)
    shuffled = dataclasses.replace(case, states=case.states.flip(0))
    signal = case.example.teacher_logprobs
    logprobs = np.full((len(signal), 23), -np.inf)
    logprobs[np.repeat(np.arange(len(signal)), np.diff(signal.offsets)), signal.ids] = signal.logprobs
    places = {int(row) + 1: n for n, row in enumerate(case.example.positions)}
    both = [(n, places[int(at)]) for n, at in enumerate(signal.positions) if int(at) in places]
    student = torch.log_softmax(shuffled.states @ shuffled.weight.T, 1)
    expected = sum(
        float((torch.from_numpy(logprobs[t]).exp() * (torch.from_numpy(logprobs[t]) - student[s])).sum())
        for t, s in both
    )
    total, _, _ = fused(shuffled, [cells_of("forward-kl", shuffled)], [1.0])
    assert float(total) == pytest.approx(expected, rel=1e-6)


@every_loss
def test_the_size_of_a_chunk_changes_nothing(name):
    case = case_for(name, 7, K=5, spans=40, bias=True)
    cells = cells_of(name, case)
    total, _, gradients = fused(case, [cells], [1.0], chunk=len(case.states))
    for chunk in (1, 3, 64):
        found, _, others = fused(case, [cells], [1.0], chunk=chunk)
        assert_close([found, *others], [total, *gradients], 1e-12)


@every_loss
def test_the_order_of_documents_changes_nothing(name):
    cases = [case_for(name, 5, K=4), *(case_for(name, seed, K=4) for seed in (6, 7))]
    cases = [dataclasses.replace(case, weight=cases[0].weight, projection=cases[0].projection) for case in cases]
    results = []
    for order in itertools.permutations(range(3)):
        chosen = [cases[at] for at in order]
        example = join_inputs([case.example for case in chosen])
        joined = cells_of(name, dataclasses.replace(cases[0], example=example))
        batch = dataclasses.replace(cases[0], states=torch.cat([case.states for case in chosen]))
        total, _, (d_states, d_weight) = fused(batch, [joined], [1 / joined.num_items], chunk=4)
        parts = d_states.split([len(case.states) for case in chosen])
        results.append([total, d_weight, *(parts[order.index(at)] for at in range(3))])
    for result in results[1:]:
        assert_close(result, results[0], 1e-12)


@every_loss
def test_micro_batches_over_one_denominator_add_up_to_the_batch(name):
    cases = [case_for(name, seed, K=4, spans=spans) for seed, spans in ((5, 6), (6, 1), (7, 15))]
    cases = [dataclasses.replace(case, weight=cases[0].weight, projection=cases[0].projection) for case in cases]
    cells = [cells_of(name, case) for case in cases]
    items = sum(part.num_items for part in cells)
    joined = cells_of(name, dataclasses.replace(cases[0], example=join_inputs([case.example for case in cases])))
    batch = dataclasses.replace(cases[0], states=torch.cat([case.states for case in cases]))
    total, _, (d_states, d_weight) = fused(batch, [joined], [1 / items])
    parts = [fused(case, [part], [1 / items]) for case, part in zip(cases, cells, strict=True)]
    assert_close([sum(part[0] for part in parts)], [total], 1e-12)
    assert_close(
        [torch.cat([part[2][0] for part in parts]), sum(part[2][1] for part in parts)], [d_states, d_weight], 1e-12
    )


@every_loss
@pytest.mark.parametrize("weights", [(1, 2, 0), (3, 1, 2)])
def test_a_document_of_weight_2_is_that_document_twice(name, weights):
    """Value, gradient and denominator; of weight 0, that document not at all."""
    cases = [case_for(name, seed, K=2, spans=spans) for seed, spans in ((5, 6), (6, 9), (7, 3))]
    cases = [dataclasses.replace(case, weight=cases[0].weight, projection=cases[0].projection) for case in cases]
    once, often = range(3), np.repeat(range(3), weights)
    terms, states = [], []
    for numbers in (once, often):
        example = join_inputs([cases[at].example for at in numbers])
        terms.append(cells_of(name, dataclasses.replace(cases[0], example=example)))
        states.append(torch.cat([cases[at].states for at in numbers]))
    counts = np.repeat(np.array(weights, float), [len(cases[at].example.positions) for at in once])
    weighted = terms[0].with_row_weights(counts, None)
    assert weighted.denominator == terms[1].denominator == terms[1].num_items
    results = []
    for term, rows in zip((weighted, terms[1]), states, strict=True):
        inputs = leaves(rows, cases[0].weight, None)
        total, sums = fused_loss(inputs[0], OutputHead(*inputs[1:]), [term.to(CPU, 1 / term.denominator)], 4)
        total.backward()
        results.append([total.detach(), sums[0], inputs[1].grad, inputs[0].grad])
    (*found, d_found), (*expected, d_expected) = results
    assert_close(found, expected, 1e-7)
    sizes = [len(cases[at].states) for at in often]
    d_once = [torch.zeros_like(case.states) for case in cases]
    for at, part in zip(often, d_expected.split(sizes), strict=True):
        d_once[at] += part
    assert_close([d_found], [torch.cat(d_once)], 1e-7)


@every_loss
def test_factors_of_rows_multiply_items_and_not_what_they_are_averaged_over(name):
    case = case_for(name, 3, K=3, spans=9)
    term = cells_of(name, case)
    factors = np.full(len(case.example.positions), 0.25)
    for counts, count in ((None, term.num_items), (np.full(len(factors), 3.0), 3 * term.num_items)):
        weighted = term.with_row_weights(counts, factors)
        assert weighted.denominator == count
        inputs, others = leaves(case.states, case.weight, None), leaves(case.states, case.weight, None)
        total, _ = fused_loss(inputs[0], OutputHead(*inputs[1:]), [weighted.to(CPU, 1 / weighted.denominator)], 4)
        total.backward()
        whole, _ = fused_loss(others[0], OutputHead(*others[1:]), [term.to(CPU, 1 / term.num_items)], 4)
        whole.backward()
        assert_close([total.detach()], [whole.detach() / 4], 1e-10)
        assert_close([inputs[0].grad, inputs[1].grad], [others[0].grad / 4, others[1].grad / 4], 1e-10)


def test_terms_of_a_sum_have_their_own_scales():
    case = draw_case(11, K=4, spans=12)
    cells = [cells_of(name, case) for name in ("ce", "p-kl", "boundary-kl")]
    alone = [fused(case, [part], [1.0]) for part in cells]
    total, sums, gradients = fused(case, cells, [0.5, 2.0, 0.25], chunk=5)
    torch.testing.assert_close(sums, torch.stack([one[0] for one in alone]))
    assert_close([total], [0.5 * alone[0][0] + 2 * alone[1][0] + 0.25 * alone[2][0]], 1e-12)
    for at, gradient in enumerate(gradients):
        expected = 0.5 * alone[0][2][at] + 2 * alone[1][2][at] + 0.25 * alone[2][2][at]
        assert_close([gradient], [expected], 1e-12)


@every_loss
def test_a_gradient_that_comes_in_is_multiplied_through(name):
    case = case_for(name, 2, K=4)
    cells = cells_of(name, case)
    _, _, once = fused(case, [cells], [1.0])
    inputs = leaves(case.states, case.weight, None)
    total, _ = fused_loss(inputs[0], OutputHead(*inputs[1:]), [cells.to(CPU, 1.0)], 3)
    (-2.5 * total).backward()
    assert_close([inputs[0].grad, inputs[1].grad], [-2.5 * gradient for gradient in once], 1e-12)


@every_loss
def test_gradients_agree_with_finite_differences(name):
    case = case_for(name, 1, K=3, spans=3, V=7, U=6, H=3, bias=True)
    term = cells_of(name, case).to(CPU, 0.7)
    inputs = tuple(leaves(case.states, case.weight, case.bias))
    assert torch.autograd.gradcheck(lambda states, *head: fused_loss(states, OutputHead(*head), [term], 2)[0], inputs)


@every_loss
def test_gradients_of_a_head_with_all_that_heads_have_agree_with_finite_differences(name):
    case = case_for(name, 1, K=3, spans=3, V=7, U=6, H=3, bias=True)
    term = cells_of(name, case).to(CPU, 0.7)
    adapter = torch.randn(2, 3, dtype=torch.float64), torch.randn(7, 2, dtype=torch.float64)

    def total(states: Tensor, weight: Tensor, bias: Tensor, down: Tensor, up: Tensor) -> Tensor:
        head = OutputHead(weight, bias, scale=1.5, softcap=2.0, adapters=[HeadAdapter(down, up, 0.7)])
        return fused_loss(states, head, [term], 4)[0]

    assert torch.autograd.gradcheck(total, tuple(leaves(case.states, case.weight, case.bias, *adapter)))


@every_loss
def test_gradients_can_be_asked_for_twice(name):
    case = case_for(name, 2, K=4)
    inputs = leaves(case.states, case.weight, None)
    total, _ = fused_loss(inputs[0], OutputHead(inputs[1]), [cells_of(name, case).to(CPU, 1.0)], 3)
    once = torch.autograd.grad(total, inputs[:2], retain_graph=True)
    twice = torch.autograd.grad(-2 * total, inputs[:2])
    assert_close(list(twice), [-2 * gradient for gradient in once], 1e-12)


@every_loss
def test_a_head_with_more_rows_than_tokens_gives_the_loss_over_all_its_rows(name):
    case = case_for(name, 3, K=4)
    padding = torch.randn(6, case.weight.shape[1], dtype=torch.float64) / 3
    padded = dataclasses.replace(case, weight=torch.cat([case.weight, padding]))
    cells = cells_of(name, case)
    distance = Distance(name if name in OF_A_CELL else RULES[name].default_divergence)
    total, gradients = plain(padded, lambda probs: plain_sum_of_cells(cells, probs, distance))
    found, _, exact = fused(padded, [cells], [1.0], chunk=3)
    assert_close([found, *exact], [total, *gradients], tolerance_of(name))


@every_loss
def test_logits_can_be_given_instead_of_states_and_a_head(name):
    case = case_for(name, 4, K=4)
    cells = cells_of(name, case)
    logits = (case.states @ case.weight.T).requires_grad_()
    before = logits.detach().clone()
    found, _ = fused_loss(logits, OutputHead(None), [cells.to(CPU, 1.0)], 3)
    found.backward()
    assert torch.equal(logits, before)
    total, _, (d_states, d_weight) = fused(case, [cells], [1.0])
    assert_close([found.detach()], [total], 1e-12)
    assert_close([logits.grad @ case.weight, logits.grad.T @ case.states], [d_states, d_weight], 1e-12)


@every_loss
def test_bf16_is_finite_and_near_fp32(name):
    case = case_for(name, 9, K=6, spans=30, H=16, V=60, U=50, bias=True)
    cells = cells_of(name, case)
    rounded = dataclasses.replace(
        case, states=case.states.bfloat16(), weight=case.weight.bfloat16(), bias=case.bias.bfloat16()
    )
    scale = 1 / cells.num_items
    wide, _, expected = fused(rounded, [cells], [scale], dtype=torch.float32)
    found, _, gradients = fused(rounded, [cells], [scale], dtype=torch.bfloat16)
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(float(wide), rel=2e-2)
    for one, other in zip(gradients, expected, strict=True):
        assert one.dtype == torch.bfloat16
        assert torch.isfinite(one).all()
        assert float((one.float() - other).norm() / other.norm()) < 2e-2


@every_loss
def test_bf16_logits_can_be_given_too(name):
    case = case_for(name, 9, K=6)
    logits = (case.states @ case.weight.T).bfloat16().requires_grad_()
    total, _ = fused_loss(logits, OutputHead(None), [cells_of(name, case).to(CPU, 1.0)], 4)
    total.backward()
    assert torch.isfinite(total)
    assert logits.grad.dtype == torch.bfloat16
    assert torch.isfinite(logits.grad).all()


@every_loss
def test_an_empty_batch_gives_0_with_a_zero_gradient(name):
    empty = dataclasses.replace(case_for(name, 1, K=4), states=torch.zeros(0, 5, dtype=torch.float64))
    total, sums, (d_states, d_weight) = fused(empty, [NOTHING], [1.0])
    assert float(total) == 0
    assert sums.tolist() == [0]
    assert d_states.shape == (0, 5)
    assert torch.equal(d_weight, torch.zeros_like(empty.weight))


@every_distribution_loss
def test_rows_that_no_span_covers_have_no_gradient(name):
    case = case_for(name, 1, K=4)
    example = dataclasses.replace(case.example, spans=np.zeros((0, 4), np.int32))
    cells = RULES[name].build_cells(example, ground_of(name, case))
    assert cells.num_items == 0
    total, _, gradients = fused(case, [cells], [1.0])
    assert float(total) == 0
    assert not any(gradient.any() for gradient in gradients)


@every_distribution_loss
def test_a_teacher_that_is_very_sure_stays_finite(name):
    case = case_for(name, 3, K=23)
    said = case.example.teacher_logprobs
    logprobs = np.full_like(said.logprobs, -100)
    logprobs[said.offsets[:-1]] = 0
    signal = dataclasses.replace(said, logprobs=logprobs)
    sure = dataclasses.replace(case, example=dataclasses.replace(case.example, teacher_logprobs=signal))
    for states in (case.states, case.states * 100):
        total, _, gradients = fused(
            dataclasses.replace(sure, states=states), [cells_of(name, sure)], [1.0], dtype=torch.float32
        )
        assert torch.isfinite(total)
        assert all(torch.isfinite(gradient).all() for gradient in gradients)


def saying(signal: TeacherLogprobs, at: np.ndarray, ids: list[int]) -> TeacherLogprobs:
    """The same signal with other ids, of the same probabilities in all, at some positions."""
    kept = [ids if hidden else signal.ids[low:high].tolist() for hidden, low, high in
            zip(at.tolist(), signal.offsets[:-1], signal.offsets[1:], strict=True)]  # fmt: skip
    said = [signal.logprobs[low : low + len(row)].tolist() for low, row in zip(signal.offsets, kept, strict=False)]
    return dataclasses.replace(
        signal,
        offsets=np.cumsum([0, *map(len, kept)]),
        ids=np.array([token for row in kept for token in row], np.int32),
        logprobs=np.array([logprob for row in said for logprob in row], np.float32),
    )


def test_items_that_nothing_reaches_cost_nothing_wherever_they_stand():
    """All of both sides is in the other cell then: two equal distributions of one cell."""
    case = draw_case(21, K=2, spans=9)
    spans = predicted_spans(case.example)
    rule, columns = RULES["p-kl"], case.projection.columns
    for hidden in [*([at] for at in range(len(spans))), [0, 1], [len(spans) - 2, len(spans) - 1], range(len(spans))]:
        positions = [position for at in hidden for position in spans[at][1]]
        signal = saying(
            case.example.teacher_logprobs, np.isin(case.example.teacher_logprobs.positions, positions), [2, 5]
        )
        cells = rule.build_cells(dataclasses.replace(case.example, teacher_logprobs=signal), columns)
        assert cells.num_items == len(spans)
        assert not torch.diff(cells.cell_offsets)[list(hidden)].any()
        total, gradients = plain(case, lambda probs, cells=cells: plain_sum_of_cells(cells, probs))
        for chunk in (1, 2, 64):
            found, _, exact = fused(case, [cells], [1.0], chunk=chunk)
            assert_close([found, *exact], [total, *gradients], 1e-7)


# --- cells, chunks, memory


def plain_fill(
    items: list[tuple[list[int], list[int]]],
    support: list[list[tuple[int, float]]],
    columns: ProjectionColumns,
) -> list[list[tuple[float, list[tuple[int, int, float]]]]]:
    """The cells of each item, `(probability, entries)`, in the order in which the teacher names them."""
    result = []
    for rows, positions in items:
        probs: dict[int, float] = {}
        for position in positions:
            for token, logprob in support[position]:
                probs[token] = probs.get(token, 0.0) + math.exp(logprob) / len(positions)
        cells = []
        for token, probability in probs.items():
            column = range(columns.offsets[token], columns.offsets[token + 1])
            if len(column):
                cells.append(
                    (
                        probability,
                        [
                            (row, int(columns.student_ids[at]), float(columns.log_weights[at]) - math.log(len(rows)))
                            for row in rows
                            for at in column
                        ],
                    )
                )
        result.append(cells)
    return result


@st.composite
def problems(draw):
    seed = draw(st.integers(0, 2**32 - 1))
    return draw_case(
        seed,
        K=draw(st.sampled_from([1, 2, 5, 19])),
        spans=draw(st.integers(1, 12)),
        sharpness=draw(st.sampled_from([0.5, 3.0, 60.0])),
    )


@settings(deadline=None, max_examples=60)
@given(case=problems())
def test_fill_cells_agrees_with_its_readable_twin_however_often_it_is_called(case):
    example, columns = case.example, case.projection.columns
    signal = example.teacher_logprobs
    draw = np.random.default_rng(len(example.student_ids))
    rows = np.sort(draw.integers(0, 30, 8))
    row_start, row_stop = rows[::2], rows[1::2] + 1
    position_start = np.sort(draw.integers(0, max(1, len(signal)), 4))
    position_stop = np.minimum(position_start + draw.integers(0, 4, 4), len(signal))
    position_stop = np.maximum(position_start, position_stop)
    expected = plain_fill(
        [
            (list(range(r0, r1)), list(range(p0, p1)))
            for r0, r1, p0, p1 in zip(row_start, row_stop, position_start, position_stop, strict=True)
        ],
        [said_at(signal, at) for at in range(len(signal))],
        columns,
    )
    for _ in range(2):
        *arrays, corrections = fill_cells(
            ItemRanges(row_start, row_stop, position_start, position_stop), TeacherArrays.from_logprobs(signal),
            columns.offsets, columns.student_ids, columns.log_weights,
        )  # fmt: skip
        cells = LossCells.from_numpy(*arrays)
        assert not corrections.any()
        assert torch.diff(cells.cell_offsets).tolist() == [len(item) for item in expected]
        flat = [cell for item in expected for cell in item]
        assert torch.diff(cells.entry_offsets).tolist() == [len(entries) for _, entries in flat]
        np.testing.assert_allclose(cells.teacher_probs.numpy(), [prob for prob, _ in flat], rtol=1e-6, atol=1e-30)
        entries = [entry for _, entries in flat for entry in entries]
        assert cells.rows.tolist() == [row for row, _, _ in entries]
        assert cells.tokens.tolist() == [token for _, token, _ in entries]
        np.testing.assert_allclose(
            cells.log_weights.numpy(), [weight for _, _, weight in entries], rtol=1e-6, atol=1e-6
        )


@settings(deadline=None, max_examples=60)
@given(case=problems(), size=st.integers(1, 20), both=st.booleans())
def test_chunks_cover_all_rows_once_and_no_item_straddles_two(case, size, both):
    cells = [cells_of("p-kl", case), *([cells_of("ce", case)] if both else [])]
    terms = [part.to(CPU, 1.0) for part in cells]
    starts = chunk_starts(len(case.states), size, terms)
    assert starts[0] == 0
    assert starts[-1] == len(case.states)
    assert all(start < stop for start, stop in itertools.pairwise(starts))
    of_row = np.searchsorted(starts, np.arange(len(case.states)), side="right")
    longest = 1
    for part in cells:
        for item in range(part.num_items):
            first, last = part.entry_offsets[part.cell_offsets[item : item + 2]]
            rows = set(part.rows[first:last].tolist())
            assert len({of_row[row] for row in rows}) <= 1
            longest = max(longest, len(rows))
    assert max(np.diff(starts), default=0) <= max(size, longest)


@pytest.mark.parametrize("name", ["p-kl", "boundary-kl"])
def test_unmapped_tokens_of_a_whole_vocabulary_have_finite_gradients(name):
    case = case_for(name, 3, K=99)
    whole = case.dense.clone()
    whole[whole.sum(1) == 0, 0] = 1  # the student cannot leave the mapped tokens
    whole /= whole.sum(1, keepdim=True)
    rows, columns = (whole > 0).nonzero(as_tuple=True)
    projection = dataclasses.replace(
        case.projection,
        row_offsets=np.append(0, (whole > 0).sum(1).cumsum(0).numpy()),
        teacher_ids=columns.numpy().astype(np.int32),
        weights=whole[rows, columns].numpy().astype(np.float32),
    )
    cells = RULES[name].build_cells(case.example, projection.columns)
    total, _, gradients = fused(case, [cells], [1 / cells.num_items], dtype=torch.float32)
    assert 0 <= float(total) < 5
    assert all(torch.isfinite(gradient).all() and gradient.abs().max() < 5 for gradient in gradients)


class Largest(TorchDispatchMode):
    """Remembers the most numbers that one tensor held."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        tensors = result if isinstance(result, tuple | list) else [result]
        self.numel = max([self.numel, *(tensor.numel() for tensor in tensors if isinstance(tensor, Tensor))])
        return result


def peak_bytes(action: object) -> int:
    """The most bytes that were allocated at one time, beyond those at the start."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        action()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = np.cumsum([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())])
    return int(held.max(initial=0))


def wide_case(name: str, N: int, V: int, H: int) -> Case:
    """N trained tokens, each a span, over V tokens on both sides, which nothing dense is made of."""
    draw = np.random.default_rng(N)
    ids, positions = draw.integers(0, V, N + 1).astype(np.int32), np.arange(1, N + 1, dtype=np.int32)
    spans = np.stack([positions, positions + 1, positions, positions + 1], 1)
    support = ((ids[1:, None] + np.arange(9)) % V).astype(np.int32).reshape(-1)
    said = np.full(9 * N, math.log(0.1), np.float32)
    signal = TeacherLogprobs(positions, np.arange(0, 9 * N + 1, 9), support, said, said[:N], said[:N], said[:N])
    example = LossInputs(ids, np.arange(N, dtype=np.int64), spans, ids, signal, said[:N], said[:N])
    words = partition_of([b"a"], [b"a"], 1, 1)  # stands in for what would take too long to make in this way
    case = Case(example, SparseProjection.identity(V), words, torch.randn(N, H), torch.randn(V, H))
    case.__dict__["next_bytes"] = next_bytes_of_numbers(V)
    return case


@functools.cache
def next_bytes_of_numbers(V: int) -> BytePartition:
    """A tokenizer whose token 123 spells "123"; of "0123" it makes "0" and "123"."""
    tokens = np.arange(V, dtype=np.int32)

    def first_tokens(pieces: list[bytes]) -> list[int]:
        return [int(piece) if piece[:1] != b"0" else 0 for piece in pieces]

    side = sort_vocabulary([b"%d" % token for token in range(V)], tokens, first_tokens)
    return BytePartition.from_vocabularies(side, side)


@every_loss
def test_memory_is_bounded_by_the_chunk_and_not_by_the_rows(name):
    V, H, chunk = 20_000, 8, 32
    peaks, largest = [], []
    for N in (256, 1024):
        case = wide_case(name, N, V, H)
        states, weight, _ = leaves(case.states, case.weight, None, dtype=torch.float32)
        terms = [cells_of(name, case).to(CPU, 1.0)]

        def step(states: Tensor = states, weight: Tensor = weight, terms: list[LossCells] = terms) -> None:
            fused_loss(states, OutputHead(weight), terms, chunk)[0].backward()

        with Largest() as watch:
            step()
        largest.append(watch.numel)
        states.grad = weight.grad = None
        peaks.append(peak_bytes(step))
    assert largest == [chunk * V, chunk * V]
    assert min(peaks) > chunk * V * 4  # the chunk itself is seen
    assert max(peaks) < 2.5 * chunk * V * 4 + 4 * V * H * 4
    # What grows is the states' gradient, and what autograd hands out of it.
    assert peaks[1] - peaks[0] <= 3 * (1024 - 256) * H * 4


def test_an_item_longer_than_a_chunk_is_read_in_pieces():
    V, chunk, draw = 2000, 8, np.random.default_rng(0)
    lengths = [3, 40, 1, 21, 8]
    rows = np.concatenate([np.tile(np.arange(a, b), 2) for a, b in itertools.pairwise(np.cumsum([0, *lengths]))])
    cells = LossCells.from_numpy(
        cell_offsets=np.arange(0, 11, 2),
        entry_offsets=np.concatenate([[0], np.cumsum(np.repeat(lengths, 2))]),
        teacher_probs=np.full(10, 0.3, np.float32),
        rows=rows.astype(np.int32),
        tokens=(np.arange(len(rows)) % 50).astype(np.int32),
        log_weights=np.repeat(-np.log(lengths), 2 * np.array(lengths)).astype(np.float32),
    )
    case = dataclasses.replace(
        case_for("ce", 1, K=4),
        states=torch.from_numpy(draw.normal(size=(sum(lengths), 4))),
        weight=torch.from_numpy(draw.normal(size=(V, 4))),
    )
    expected, _, gradients = fused(case, [cells], [1.0], chunk=sum(lengths))
    with Largest() as watch:
        found, _, others = fused(case, [cells], [1.0], chunk=chunk)
    assert watch.numel == chunk * V
    assert_close([found, *others], [expected, *gradients], 1e-10)


def test_memory_is_bounded_also_for_several_losses_and_a_soft_cap():
    V, H, chunk = 20_000, 8, 48
    case = wide_case("p-kl", 512, V, H)
    states, weight, _ = leaves(case.states, case.weight, None, dtype=torch.float32)
    terms = [cells_of(name, case).to(CPU, 1.0) for name in ("p-kl", "boundary-kl")]

    def step() -> None:
        fused_loss(states, OutputHead(weight, softcap=30.0), terms, chunk)[0].backward()

    step()
    states.grad = weight.grad = None
    assert peak_bytes(step) < 1.5 * chunk * V * 4 + 4 * V * H * 4


def test_memory_of_a_bf16_head_is_that_of_a_chunk_beyond_inputs_and_gradients():
    V, H, chunk = 20_000, 16, 32
    extra = []
    for N in (256, 1024):
        case = wide_case("forward-kl", N, V, H)
        states, weight, _ = leaves(case.states, case.weight, None, dtype=torch.bfloat16)
        terms = [cells_of("forward-kl", case).to(CPU, 1.0)]

        def step(states: Tensor = states, weight: Tensor = weight, terms: list[LossCells] = terms) -> None:
            fused_loss(states, OutputHead(weight), terms, chunk)[0].backward()

        step()
        states.grad = weight.grad = None
        extra.append(peak_bytes(step) - 2 * (states.numel() + weight.numel()))
    # fp32 logits, the product that they are made of, in bf16, and what torch itself takes for the gradient of a chunk's
    # inputs: on processors with AMX, a copy of an operand.
    small, total = torch.zeros(chunk, V, dtype=torch.bfloat16), torch.zeros(chunk, H, dtype=torch.bfloat16)
    copy = peak_bytes(lambda: total.addmm_(small, weight.detach()))
    assert copy < 1.1 * chunk * V * 2
    assert extra[0] < 1.1 * (chunk * V * 6 + copy)
    assert abs(extra[1] - extra[0]) < 0.02 * chunk * V * 6


def test_a_bf16_gradient_that_adds_up_over_many_chunks_stays_near_the_exact_one():
    N, V, H, chunk = 1024, 500, 32, 16
    case = wide_case("forward-kl", N, V, H)
    case = dataclasses.replace(case, states=case.states.bfloat16(), weight=(case.weight / 6).bfloat16())
    cells = cells_of("forward-kl", case)
    _, _, expected = fused(case, [cells], [1 / N])
    for rows, tolerance in ((N, 4e-3), (chunk, 2e-2)):
        _, _, found = fused(case, [cells], [1 / N], chunk=rows, dtype=torch.bfloat16)
        for one, other in zip(found, expected, strict=True):
            assert float((one.double() - other).norm() / other.norm()) < tolerance


# --- specifications


EXAMPLE = "use for example --loss ce:weight=0.5"


def test_a_specification_names_losses_and_weights():
    assert parse_losses(["p-kl", "ce:weight=0.5"]) == [LossSpec("p-kl"), LossSpec("ce", 0.5)]
    assert [str(loss) for loss in parse_losses(["p-kl:weight=1.0", "ce:weight=0.50"])] == ["p-kl", "ce:weight=0.5"]


@pytest.mark.parametrize(
    ("texts", "what", "hint"),
    [
        (
            ["forward_kl"],
            "no loss called 'forward_kl'; did you mean forward-kl?",
            "use one of: alm, boundary-kl, bpm, byte-kl, ",
        ),
        (["xxxx"], "no loss called 'xxxx'", "use one of: alm, boundary-kl, bpm, byte-kl, "),
        (["ce:temperature=2"], "no option of the loss ce called 'temperature'", "use one of: weight"),
        (["ce:wieght=2"], "no option of the loss ce called 'wieght'; did you mean weight?", "use one of: weight"),
        (
            ["ce:weight=0"],
            "the weight of the loss ce is '0', but must be a number above 0 and at most 1e+12",
            EXAMPLE,
        ),
        (
            ["ce:weight=-1"],
            "the weight of the loss ce is '-1', but must be a number above 0 and at most 1e+12",
            EXAMPLE,
        ),
        (
            ["ce:weight=nan"],
            "the weight of the loss ce is 'nan', but must be a number above 0 and at most 1e+12",
            EXAMPLE,
        ),
        (
            ["ce:weight=inf"],
            "the weight of the loss ce is 'inf', but must be a number above 0 and at most 1e+12",
            EXAMPLE,
        ),
        (
            ["ce:weight=half"],
            "the weight of the loss ce is 'half', but must be a number above 0 and at most 1e+12",
            EXAMPLE,
        ),
        (["ce:weight=1,weight=2"], "--loss ce:weight=1,weight=2: weight is given twice", "remove one weight="),
        (["ce:weight"], "--loss ce:weight: 'weight' is not NAME=VALUE", "use weight=VALUE"),
        (["ce", "p-kl", "ce:weight=2"], "--loss ce is given twice", "use it once, with a weight: --loss ce:weight=0.5"),
    ],
)
def test_a_bad_specification_is_told(texts, what, hint):
    with pytest.raises(XtkError, match=f"^{re.escape(what)}$|^{re.escape(what)}\n") as told:
        parse_losses(texts)
    assert told.value.what == what
    assert told.value.hint.startswith(hint)


@pytest.mark.parametrize("gap", [5.0, 15.0, 25.0, 40.0, 80.0])
def test_a_student_that_is_sure_and_wrong_is_pulled_back(gap):
    # One cell, which holds all of the student's probability but e^-gap; the teacher has 0.3 elsewhere. fp32.
    cells = LossCells.from_numpy(
        cell_offsets=np.array([0, 1]),
        entry_offsets=np.array([0, 1]),
        teacher_probs=np.array([0.7], np.float32),
        rows=np.array([0]),
        tokens=np.array([2]),
        log_weights=np.zeros(1, np.float32),
    )
    logits = torch.zeros(1, 50)
    logits[0, 2] = gap + math.log(49)
    logits.requires_grad_()
    total, _ = fused_loss(logits, OutputHead(None), [cells.to(CPU, 1.0)], 4)
    total.backward()
    rest = math.exp(-gap) / (1 + math.exp(-gap))
    assert logits.grad[0, 2].item() == pytest.approx(0.3 - rest, rel=1e-4)
    assert logits.grad[0, 7].item() == pytest.approx(-(0.3 - rest) / 49, rel=1e-4)
    expected = 0.7 * math.log(0.7 / (1 - rest)) + 0.3 * (math.log(0.3) - math.log(rest))
    assert total.item() == pytest.approx(expected, rel=1e-5)


# --- divergences

FORMS = {
    "reverse-kl": Distance("reverse-kl"),
    "jsd": Distance("jsd"),
    "jsd,beta=0.2": Distance("jsd", 1.0, {"beta": 0.2}),
    "jsd,beta=0": Distance("forward-kl"),
    "jsd,beta=1": Distance("reverse-kl"),
    "jsd,beta=0.25,rescale=true": Distance("jsd", 1.0, {"beta": 0.25, "scale": 16 / 3}),
    "skew-forward-kl,skew=0.3": Distance("skew-forward-kl", 1.0, {"skew": 0.3}),
    "skew-reverse-kl,skew=0.3": Distance("skew-reverse-kl", 1.0, {"skew": 0.3}),
    "tvd": Distance("tvd"),
    "forward-kl,temperature=2": Distance("forward-kl", 2.0),
    "reverse-kl,temperature=0.5": Distance("reverse-kl", 0.5),
    "jsd,temperature=3": Distance("jsd", 3.0),
}
every_form = pytest.mark.parametrize("form", list(FORMS))
every_choice = pytest.mark.parametrize(
    "name", ["boundary-kl", "p-kl", "byte-kl", "bpm", "escd", "simct", "strict", "gold", "h-kl"]
)


def in_form(name: str, case: Case, form: str) -> LossCells:
    (loss,) = parse_losses([f"{name}:divergence={form}"])
    return cells_of(name, case, loss.options)


@every_form
@every_choice
def test_a_divergence_and_its_gradient_are_those_of_the_readable_one(name, form):
    for seed, kind in enumerate(KINDS):
        if "one-hot" in kind and "temperature" in form:
            continue  # the twin's float64 has no e^-1000, whose root it would need
        case = case_for(name, seed, **KINDS[kind])
        total, gradients = plain(
            case,
            lambda probs, case=case: sum(PLAIN[name](case, probs, FORMS[form]), torch.zeros((), dtype=torch.float64)),
        )
        found, _, exact = fused(case, [in_form(name, case, form)], [1.0], chunk=5)
        # Cells are kept in fp32, and what they leave over has the logarithm of a difference.
        assert_close([found, *exact], [total, *gradients], 2e-4)


@every_form
@every_choice
def test_a_divergence_is_not_negative_and_0_between_equal_models(name, form):
    for seed in range(10):
        case = case_for(name, seed, K=4)
        for scale in (0.0, 1.0, 4.0):
            moved = dataclasses.replace(case, states=case.states * scale)
            _, sums, _ = fused(moved, [in_form(name, case, form)], [1.0], dtype=torch.float32)
            assert sums[0] >= -1e-6
    for K in (3, 23):
        same = case_of_one_model(3, K=K, one_to_one=True)
        total, _, gradients = fused(same, [in_form(name, same, form)], [1.0])
        assert abs(float(total)) < 2e-5
        if "tvd" not in form:  # which has a kink there
            assert max(float(gradient.abs().max()) for gradient in gradients) < 1e-4


def test_a_temperature_divides_both_logits():
    tau, draw = 2.5, np.random.default_rng(1)
    case = case_of_one_model(1, K=23, one_to_one=True)
    logits, other = (torch.from_numpy(draw.normal(size=(6, 23))) for _ in range(2))
    ids = case.example.teacher_ids
    signal = signal_of(torch.log_softmax(other, 1).numpy(), np.arange(1, 7), ids[1:], 23)
    case = dataclasses.replace(case, example=dataclasses.replace(case.example, teacher_logprobs=signal))
    for name, (one, two) in {"forward-kl": (other, logits), "reverse-kl": (logits, other)}.items():
        cells = cells_of(name, case, (("temperature", str(tau)),))
        total, _ = fused_loss(logits, OutputHead(None), [cells.to(CPU, 1.0)], 4)
        p, q = torch.softmax(one / tau, 1), torch.softmax(two / tau, 1)
        assert float(total) == pytest.approx(tau**2 * float((p * (p / q).log()).sum()), rel=1e-5)


@pytest.mark.parametrize("end", ["0.0001", "0.9999"])
def test_a_rescaled_jsd_goes_over_into_the_divergences_at_its_ends(end):
    case = case_for("jsd", 4, K=6)
    near = cells_of("jsd", case, (("beta", end), ("rescale", "true")))
    at = cells_of("jsd", case, (("beta", end[0] if end < "0.5" else "1"),))
    found, _, gradients = fused(case, [near], [1.0])
    expected, _, others = fused(case, [at], [1.0])
    assert_close([found, *gradients], [expected, *others], 5e-3)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("boundary-kl:divergence=jsf", "no divergence called 'jsf'; did you mean jsd?"),
        ("boundary-kl:divergence=tvd,beta=0.5", "no option of the loss boundary-kl called 'beta'"),
        ("jsd:divergence=tvd", "no option of the loss jsd called 'divergence'"),
        ("jsd:beta=2", "--loss jsd:beta=2: beta must be from 0 to 1, not 2.0"),
        ("jsd:beta=x", "beta of the loss jsd:beta=x is 'x', but must be a number"),
        ("jsd:beta=nan", "--loss jsd:beta=nan: beta must be from 0 to 1, not nan"),
        ("jsd:rescale=2", "rescale of the loss jsd:rescale=2 is '2', but must be true or false"),
        ("skew-reverse-kl:skew=1", "--loss skew-reverse-kl:skew=1: skew must be above 0 and below 1, not 1.0"),
        ("byte-kl:temperature=0", "--loss byte-kl:temperature=0: temperature must be above 0 and finite, not 0.0"),
        ("alm:temperature=0", "the temperature of the loss alm must be above 0 and finite, not 0.0"),
        ("alm:published=true", "no option of the loss alm called 'published'"),
        ("alm:divergence=jsd,skew=0.1", "no option of the loss alm called 'skew'"),
        ("uld:temperature=2", "no option of the loss uld called 'temperature'"),
        ("uld:divergence=jsd", "no option of the loss uld called 'divergence'"),
        ("gold:max_ranks=x", "max_ranks of the loss gold:max_ranks=x is 'x', but must be an integer"),
        ("gold:max_ranks=-1", "max_ranks of the losses gold and h-kl must be at least 0, not -1"),
        ("h-kl:ranked_weight=-1", "ranked_weight of the losses gold and h-kl must be at least 0 and finite, not -1.0"),
        ("h-kl:published=yes", "published of the loss h-kl:published=yes is 'yes', but must be true or false"),
        ("boundary-kl:published=true", "no option of the loss boundary-kl called 'published'"),
    ],
)
def test_a_bad_divergence_is_told(text, what):
    with pytest.raises(XtkError) as told:
        parse_losses([text])
    assert told.value.what == what


def test_losses_together_are_the_sum_of_the_losses():
    case = draw_case(5, one_tokenizer=False, K=4)
    names = [name for name in LOSSES if RULES[name].comparison_space != "tokens"]
    scales = [0.5 + number for number in range(len(names))]
    cells = [cells_of(name, case) for name in names]
    total, sums, gradients = fused(case, cells, scales, chunk=3)
    alone = [fused(case, [part], [scale], chunk=64) for part, scale in zip(cells, scales, strict=True)]
    assert_close([total], [sum(found for found, _, _ in alone)], 1e-10)
    assert_close(list(sums), [found[0] for _, found, _ in alone], 1e-10)
    for number, gradient in enumerate(gradients):
        assert_close([gradient], [sum(found[number] for _, _, found in alone)], 1e-10)
