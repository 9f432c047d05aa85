"""Properties that every registered loss must satisfy; a new loss is tested as soon as it is registered."""

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
from reference_byte_kl import CELL_DIVERGENCES, ReferenceDivergence, support_at
from reference_losses import (
    REFERENCE_LOSSES,
    Case,
    equal_models_case,
    make_teacher_logprobs,
    predicted_spans,
    random_case,
    reference_cells_loss,
)
from small_vocabularies import partition_vocabularies
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from xtk.cache.teacher_logprobs import TeacherLogprobs
from xtk.errors import XtkError
from xtk.losses import LOSSES, SURROGATE_LOSSES, TEACHER_REQUIREMENTS
from xtk.losses.cells.loss_cells import LossCells
from xtk.losses.head import chunk_starts, fused_loss
from xtk.losses.interface import ComparisonSpace, ItemRanges, LossInputs, join_inputs
from xtk.losses.kernels.projected_cells_numba import fill_cells
from xtk.losses.kernels.sampled_support_correction import TeacherArrays
from xtk.losses.spec import LossSpec, parse_losses
from xtk.models.output_head import HeadAdapter, OutputHead
from xtk.name_registry import load_registered
from xtk.projection.projection import ProjectionColumns, SparseProjection
from xtk.projection.vocabulary_byte_partition import BytePartition, sort_vocabulary

CPU = torch.device("cpu")
LOSS_INSTANCES = {name: load_registered(LOSSES, name, "loss")() for name in LOSSES}
DISTRIBUTIONS = [name for name, loss in LOSS_INSTANCES.items() if loss.comparison_space != "text"]

EMPTY_CELLS = LOSS_INSTANCES["ce"].build_cells(join_inputs([]), None)

every_loss = pytest.mark.parametrize("name", list(LOSSES))
every_distribution_loss = pytest.mark.parametrize("name", DISTRIBUTIONS)
every_divergence_loss = pytest.mark.parametrize(
    "name", [name for name in DISTRIBUTIONS if name not in SURROGATE_LOSSES]
)

# Sums of absolute differences have a kink where both sides are equal, and no gradient there.
KINKS = ("tvd", "uld", "gold", "h-kl")

# V = 23, U = 19. "one hot" gives log-probabilities of -100 and less.
CASE_KINDS = {
    "sparse support": {"K": 4},
    "K = 1": {"K": 1},
    "K = U": {"K": 99},
    "one-hot teacher": {"K": 4, "sharpness": 300.0},
    "one-hot teacher, K = U": {"K": 99, "sharpness": 300.0},
    "a head with a bias": {"K": 4, "bias": True},
}
every_kind = pytest.mark.parametrize("kind", list(CASE_KINDS))


def case_for_loss(name: str, seed: int, **options: object) -> Case:
    return random_case(seed, one_tokenizer=LOSS_INSTANCES[name].comparison_space == "tokens", **options)


def cells_of(name: str, case: Case, options: tuple[tuple[str, str], ...] = ()) -> LossCells:
    cells = LOSS_INSTANCES[name].build_cells(case.example, comparison_space_of(name, case))
    return dataclasses.replace(cells, divergence=LossSpec(name, options=options).make_divergence())


def comparison_space_of(name: str, case: Case) -> ComparisonSpace:
    spaces = {"text": lambda: None, "spans": lambda: None, "bytes": lambda: case.next_bytes}
    return spaces.get(LOSS_INSTANCES[name].comparison_space, lambda: case.projection.columns)()


def leaves(*tensors: Tensor | None, dtype: torch.dtype = torch.float64) -> list[Tensor | None]:
    return [None if tensor is None else tensor.detach().to(dtype).requires_grad_() for tensor in tensors]


def fused(
    case: Case, cells: list[LossCells], scales: list[float], *, chunk: int = 64, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return the total, each term's sum, and the gradients of states, head and bias."""
    inputs = leaves(case.states, case.weight, case.bias, dtype=dtype)
    terms = [term_cells.to(CPU, scale) for term_cells, scale in zip(cells, scales, strict=True)]
    total, sums = fused_loss(inputs[0], OutputHead(*inputs[1:]), terms, chunk)
    total.backward()
    return total.detach(), sums, [tensor.grad for tensor in inputs if tensor is not None]


def reference(case: Case, loss_of_probs: object) -> tuple[Tensor, list[Tensor]]:
    """Return total and gradients of a reference loss, a function of the student's probabilities [N, V]."""
    inputs = leaves(case.states, case.weight, case.bias)
    total = loss_of_probs(torch.softmax(torch.nn.functional.linear(*inputs), 1))
    gradients = [torch.zeros_like(tensor) for tensor in inputs if tensor is not None]
    if total.requires_grad:
        total.backward()
        gradients = [tensor.grad for tensor in inputs if tensor is not None]
    return total.detach(), gradients


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float, min_scale: float = 1e-3) -> None:
    for found_tensor, expected_tensor in zip(found, expected, strict=True):
        scale = max(float(expected_tensor.abs().max()) if expected_tensor.numel() else 0.0, min_scale)
        torch.testing.assert_close(
            found_tensor.double(), expected_tensor.double(), rtol=tolerance, atol=tolerance * scale
        )


def test_every_teacher_requirement_is_used_by_a_loss():
    assert {loss.requires for loss in LOSS_INSTANCES.values()} == set(TEACHER_REQUIREMENTS)


def test_every_loss_has_a_reference_implementation():
    assert set(REFERENCE_LOSSES) == set(LOSSES)


@every_kind
@every_loss
def test_loss_and_gradient_match_the_dense_reference(name, kind):
    for seed in range(4):
        case = case_for_loss(name, seed, **CASE_KINDS[kind])

        def loss_of_probs(probs: Tensor, case: Case = case) -> Tensor:
            return sum(REFERENCE_LOSSES[name](case, probs), torch.zeros((), dtype=torch.float64))

        total, gradients = reference(case, loss_of_probs)
        cells = cells_of(name, case)
        # Cells are stored in fp32, which limits the agreement.
        found, sums, found_gradients = fused(case, [cells], [1.0])
        assert_close([found, *found_gradients], [total, *gradients], 1e-6)
        assert_close([sums[0]], [total], 1e-6)
        found, _, fp32_gradients = fused(case, [cells], [1.0], dtype=torch.float32)
        # fp32 has the logarithm of a probability near 1 to within 1e-7, and some items are summed.
        assert_close([found, *fp32_gradients], [total, *gradients], 1e-5, min_scale=0.1)


def tolerance_of(name: str) -> float:
    """Return the tolerance; losses with fp32 entry weights ignore the rounding error of sums of weights that are 1."""
    return 1e-7 if name in ("p-kl", "boundary-kl") else 1e-10


@pytest.mark.slow
@every_kind
@every_loss
def test_fused_loss_matches_loops_over_items_cells_and_entries(name, kind):
    divergence = ReferenceDivergence(name if name in CELL_DIVERGENCES else LOSS_INSTANCES[name].default_divergence)
    for seed in range(4):
        case = case_for_loss(name, seed, **CASE_KINDS[kind])
        cells = cells_of(name, case)
        total, gradients = reference(case, lambda probs, cells=cells: reference_cells_loss(cells, probs, divergence))
        found, _, found_gradients = fused(case, [cells], [1.0], chunk=3)
        assert_close([found, *found_gradients], [total, *gradients], tolerance_of(name))


def test_random_cases_cover_all_special_cases():
    cases = [random_case(seed, K=4) for seed in range(4)]
    masses = np.concatenate([case.projection.row_masses for case in cases])
    assert (masses == 0).any()
    assert ((masses > 0) & (masses < 0.9)).any()
    assert (masses > 0.99).any()
    for case in cases:
        teacher_logprobs = case.example.teacher_logprobs
        assert (np.diff(teacher_logprobs.offsets) > 4).any()  # the observed token is not among the K most likely
        assert not np.isin(teacher_logprobs.ids, case.projection.teacher_ids).all()
        # Positions that one model does not predict; tokens of one model inside of which a token of the other ends.
        assert len(predicted_spans(case.example)) < len(case.example.spans)
    assert sum(cells_of("byte-kl", case).is_inside_token.sum() for case in cases) > 10
    assert random_case(0, K=99, sharpness=300.0).example.teacher_logprobs.logprobs.min() < -100


@pytest.mark.slow
@every_kind
@every_divergence_loss
def test_distribution_losses_are_not_negative(name, kind):
    for seed in range(10):
        case = case_for_loss(name, seed, **CASE_KINDS[kind])
        cells = cells_of(name, case)
        for scale in (0.0, 1.0, 4.0):
            scaled = dataclasses.replace(case, states=case.states * scale)
            _, sums, _ = fused(scaled, [cells], [1.0], dtype=torch.float32)
            assert sums[0] >= -1e-6


@pytest.mark.slow
@pytest.mark.parametrize("K", [1, 3, 23])
@every_distribution_loss
def test_equal_models_have_loss_0_and_gradient_0(name, K):
    # Means over a span of truncated supports are not means of the distributions: several tokens need K = U.
    # strict has only items of one token.
    one_to_one = K < 23 or LOSS_INSTANCES[name].comparison_space == "tokens" or name == "strict"
    for seed in range(5):
        case = equal_models_case(seed, K=K, one_to_one=one_to_one)
        cells = cells_of(name, case)
        assert cells.num_items >= 6
        for dtype in (torch.float64, torch.float32):
            total, _, gradients = fused(case, [cells], [1.0], dtype=dtype)
            assert abs(float(total)) < 3e-6
            if name not in KINKS:
                assert max(float(gradient.abs().max()) for gradient in gradients) < 1e-5


@every_divergence_loss
def test_equal_models_have_loss_0_on_a_span_of_two_tokens(name):
    """P-KL as published gives -0.31 nats forward and +0.51 reverse here."""
    probs = np.array([[0.9, 0.1], [0.1, 0.9]])
    ids = np.array([0, 0, 1], np.int32)
    teacher_logprobs = make_teacher_logprobs(np.log(probs), np.array([1, 2]), ids[1:], 2)
    span = np.array([[1, 3, 1, 3]], np.int32)
    example = LossInputs(ids, np.array([0, 1]), span, ids, teacher_logprobs)
    vocabularies = partition_vocabularies([b"a", b"b"], [b"a", b"b"], 2, 2)
    logits, matrix = torch.from_numpy(np.log(probs)), torch.eye(2, dtype=torch.float64)
    case = Case(example, SparseProjection.identity(2), vocabularies, logits, matrix)
    total, _, gradients = fused(case, [cells_of(name, case)], [1.0])
    assert abs(float(total)) < 1e-6
    if name not in KINKS:
        assert max(float(gradient.abs().max()) for gradient in gradients) < 1e-6


def test_forward_kl_of_a_full_support_is_the_full_divergence():
    case = case_for_loss("forward-kl", 3, K=99)
    shuffled = dataclasses.replace(case, states=case.states.flip(0))
    teacher_logprobs = case.example.teacher_logprobs
    logprobs = np.full((len(teacher_logprobs), 23), -np.inf)
    logprobs[np.repeat(np.arange(len(teacher_logprobs)), np.diff(teacher_logprobs.offsets)), teacher_logprobs.ids] = (
        teacher_logprobs.logprobs
    )
    row_of = {int(row) + 1: n for n, row in enumerate(case.example.positions)}
    pairs = [
        (n, row_of[int(position)]) for n, position in enumerate(teacher_logprobs.positions) if int(position) in row_of
    ]
    student = torch.log_softmax(shuffled.states @ shuffled.weight.T, 1)
    expected = sum(
        float((torch.from_numpy(logprobs[t]).exp() * (torch.from_numpy(logprobs[t]) - student[s])).sum())
        for t, s in pairs
    )
    total, _, _ = fused(shuffled, [cells_of("forward-kl", shuffled)], [1.0])
    assert float(total) == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
@every_loss
def test_loss_does_not_depend_on_the_chunk_size(name):
    case = case_for_loss(name, 7, K=5, spans=40, bias=True)
    cells = cells_of(name, case)
    total, _, gradients = fused(case, [cells], [1.0], chunk=len(case.states))
    for chunk in (1, 3, 64):
        found, _, found_gradients = fused(case, [cells], [1.0], chunk=chunk)
        assert_close([found, *found_gradients], [total, *gradients], 1e-12)


@pytest.mark.slow
@every_loss
def test_loss_does_not_depend_on_the_order_of_documents(name):
    cases = [case_for_loss(name, 5, K=4), *(case_for_loss(name, seed, K=4) for seed in (6, 7))]
    cases = [dataclasses.replace(case, weight=cases[0].weight, projection=cases[0].projection) for case in cases]
    results = []
    for order in itertools.permutations(range(3)):
        ordered_cases = [cases[index] for index in order]
        example = join_inputs([case.example for case in ordered_cases])
        joined = cells_of(name, dataclasses.replace(cases[0], example=example))
        batch = dataclasses.replace(cases[0], states=torch.cat([case.states for case in ordered_cases]))
        total, _, (d_states, d_weight) = fused(batch, [joined], [1 / joined.num_items], chunk=4)
        parts = d_states.split([len(case.states) for case in ordered_cases])
        results.append([total, d_weight, *(parts[order.index(index)] for index in range(3))])
    for result in results[1:]:
        assert_close(result, results[0], 1e-12)


@every_loss
def test_micro_batches_with_one_denominator_sum_to_the_batch(name):
    cases = [case_for_loss(name, seed, K=4, spans=spans) for seed, spans in ((5, 6), (6, 1), (7, 15))]
    cases = [dataclasses.replace(case, weight=cases[0].weight, projection=cases[0].projection) for case in cases]
    cells = [cells_of(name, case) for case in cases]
    num_items = sum(part.num_items for part in cells)
    joined = cells_of(name, dataclasses.replace(cases[0], example=join_inputs([case.example for case in cases])))
    batch = dataclasses.replace(cases[0], states=torch.cat([case.states for case in cases]))
    total, _, (d_states, d_weight) = fused(batch, [joined], [1 / num_items])
    parts = [fused(case, [part], [1 / num_items]) for case, part in zip(cases, cells, strict=True)]
    assert_close([sum(part[0] for part in parts)], [total], 1e-12)
    assert_close(
        [torch.cat([part[2][0] for part in parts]), sum(part[2][1] for part in parts)], [d_states, d_weight], 1e-12
    )


@pytest.mark.slow
@every_loss
@pytest.mark.parametrize("weights", [(1, 2, 0), (3, 1, 2)])
def test_a_document_of_weight_2_counts_as_two_copies(name, weights):
    """Value, gradient and denominator are equal; a document of weight 0 does not count."""
    cases = [case_for_loss(name, seed, K=2, spans=spans) for seed, spans in ((5, 6), (6, 9), (7, 3))]
    cases = [dataclasses.replace(case, weight=cases[0].weight, projection=cases[0].projection) for case in cases]
    single, repeated = range(3), np.repeat(range(3), weights)
    terms, states = [], []
    for indices in (single, repeated):
        example = join_inputs([cases[index].example for index in indices])
        terms.append(cells_of(name, dataclasses.replace(cases[0], example=example)))
        states.append(torch.cat([cases[index].states for index in indices]))
    counts = np.repeat(np.array(weights, float), [len(cases[index].example.positions) for index in single])
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
    sizes = [len(cases[index].states) for index in repeated]
    d_single = [torch.zeros_like(case.states) for case in cases]
    for index, part in zip(repeated, d_expected.split(sizes), strict=True):
        d_single[index] += part
    assert_close([d_found], [torch.cat(d_single)], 1e-7)


@every_loss
def test_row_factors_scale_items_but_not_the_denominator(name):
    case = case_for_loss(name, 3, K=3, spans=9)
    term = cells_of(name, case)
    factors = np.full(len(case.example.positions), 0.25)
    for counts, denominator in ((None, term.num_items), (np.full(len(factors), 3.0), 3 * term.num_items)):
        weighted = term.with_row_weights(counts, factors)
        assert weighted.denominator == denominator
        inputs, unweighted_inputs = leaves(case.states, case.weight, None), leaves(case.states, case.weight, None)
        total, _ = fused_loss(inputs[0], OutputHead(*inputs[1:]), [weighted.to(CPU, 1 / weighted.denominator)], 4)
        total.backward()
        unweighted_total, _ = fused_loss(
            unweighted_inputs[0], OutputHead(*unweighted_inputs[1:]), [term.to(CPU, 1 / term.num_items)], 4
        )
        unweighted_total.backward()
        assert_close([total.detach()], [unweighted_total.detach() / 4], 1e-10)
        assert_close(
            [inputs[0].grad, inputs[1].grad], [unweighted_inputs[0].grad / 4, unweighted_inputs[1].grad / 4], 1e-10
        )


def test_each_term_of_a_sum_has_its_own_scale():
    case = random_case(11, K=4, spans=12)
    cells = [cells_of(name, case) for name in ("ce", "p-kl", "boundary-kl")]
    single_results = [fused(case, [part], [1.0]) for part in cells]
    total, sums, gradients = fused(case, cells, [0.5, 2.0, 0.25], chunk=5)
    torch.testing.assert_close(sums, torch.stack([result[0] for result in single_results]))
    assert_close([total], [0.5 * single_results[0][0] + 2 * single_results[1][0] + 0.25 * single_results[2][0]], 1e-12)
    for index, gradient in enumerate(gradients):
        expected = (
            0.5 * single_results[0][2][index] + 2 * single_results[1][2][index] + 0.25 * single_results[2][2][index]
        )
        assert_close([gradient], [expected], 1e-12)


@every_loss
def test_an_upstream_gradient_scales_the_gradients(name):
    case = case_for_loss(name, 2, K=4)
    cells = cells_of(name, case)
    _, _, unscaled = fused(case, [cells], [1.0])
    inputs = leaves(case.states, case.weight, None)
    total, _ = fused_loss(inputs[0], OutputHead(*inputs[1:]), [cells.to(CPU, 1.0)], 3)
    (-2.5 * total).backward()
    assert_close([inputs[0].grad, inputs[1].grad], [-2.5 * gradient for gradient in unscaled], 1e-12)


@pytest.mark.slow
@every_loss
def test_gradients_agree_with_finite_differences(name):
    case = case_for_loss(name, 1, K=3, spans=3, V=7, U=6, H=3, bias=True)
    term = cells_of(name, case).to(CPU, 0.7)
    inputs = tuple(leaves(case.states, case.weight, case.bias))
    assert torch.autograd.gradcheck(lambda states, *head: fused_loss(states, OutputHead(*head), [term], 2)[0], inputs)


@every_loss
def test_gradients_with_bias_scale_softcap_and_lora_agree_with_finite_differences(name):
    case = case_for_loss(name, 1, K=3, spans=3, V=7, U=6, H=3, bias=True)
    term = cells_of(name, case).to(CPU, 0.7)
    adapter = torch.randn(2, 3, dtype=torch.float64), torch.randn(7, 2, dtype=torch.float64)

    def total(states: Tensor, weight: Tensor, bias: Tensor, down: Tensor, up: Tensor) -> Tensor:
        head = OutputHead(weight, bias, scale=1.5, softcap=2.0, adapters=[HeadAdapter(down, up, 0.7)])
        return fused_loss(states, head, [term], 4)[0]

    assert torch.autograd.gradcheck(total, tuple(leaves(case.states, case.weight, case.bias, *adapter)))


@every_loss
def test_gradients_can_be_computed_twice(name):
    case = case_for_loss(name, 2, K=4)
    inputs = leaves(case.states, case.weight, None)
    total, _ = fused_loss(inputs[0], OutputHead(inputs[1]), [cells_of(name, case).to(CPU, 1.0)], 3)
    first = torch.autograd.grad(total, inputs[:2], retain_graph=True)
    second = torch.autograd.grad(-2 * total, inputs[:2])
    assert_close(list(second), [-2 * gradient for gradient in first], 1e-12)


@every_loss
def test_padding_rows_of_the_head_take_part_in_the_softmax(name):
    case = case_for_loss(name, 3, K=4)
    padding = torch.randn(6, case.weight.shape[1], dtype=torch.float64) / 3
    padded = dataclasses.replace(case, weight=torch.cat([case.weight, padding]))
    cells = cells_of(name, case)
    divergence = ReferenceDivergence(name if name in CELL_DIVERGENCES else LOSS_INSTANCES[name].default_divergence)
    total, gradients = reference(padded, lambda probs: reference_cells_loss(cells, probs, divergence))
    found, _, found_gradients = fused(padded, [cells], [1.0], chunk=3)
    assert_close([found, *found_gradients], [total, *gradients], tolerance_of(name))


@every_loss
def test_logits_are_accepted_instead_of_states_and_a_head(name):
    case = case_for_loss(name, 4, K=4)
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
def test_bf16_is_finite_and_close_to_fp32(name):
    case = case_for_loss(name, 9, K=6, spans=30, H=16, V=60, U=50, bias=True)
    cells = cells_of(name, case)
    rounded = dataclasses.replace(
        case, states=case.states.bfloat16(), weight=case.weight.bfloat16(), bias=case.bias.bfloat16()
    )
    scale = 1 / cells.num_items
    fp32_loss, _, expected_gradients = fused(rounded, [cells], [scale], dtype=torch.float32)
    found, _, gradients = fused(rounded, [cells], [scale], dtype=torch.bfloat16)
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(float(fp32_loss), rel=2e-2)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert gradient.dtype == torch.bfloat16
        assert torch.isfinite(gradient).all()
        assert float((gradient.float() - expected_gradient).norm() / expected_gradient.norm()) < 2e-2


@every_loss
def test_bf16_logits_are_accepted(name):
    case = case_for_loss(name, 9, K=6)
    logits = (case.states @ case.weight.T).bfloat16().requires_grad_()
    total, _ = fused_loss(logits, OutputHead(None), [cells_of(name, case).to(CPU, 1.0)], 4)
    total.backward()
    assert torch.isfinite(total)
    assert logits.grad.dtype == torch.bfloat16
    assert torch.isfinite(logits.grad).all()


@every_loss
def test_an_empty_batch_has_loss_0_and_gradient_0(name):
    empty = dataclasses.replace(case_for_loss(name, 1, K=4), states=torch.zeros(0, 5, dtype=torch.float64))
    total, sums, (d_states, d_weight) = fused(empty, [EMPTY_CELLS], [1.0])
    assert float(total) == 0
    assert sums.tolist() == [0]
    assert d_states.shape == (0, 5)
    assert torch.equal(d_weight, torch.zeros_like(empty.weight))


@every_distribution_loss
def test_rows_outside_of_spans_have_no_gradient(name):
    case = case_for_loss(name, 1, K=4)
    example = dataclasses.replace(case.example, spans=np.zeros((0, 4), np.int32))
    cells = LOSS_INSTANCES[name].build_cells(example, comparison_space_of(name, case))
    assert cells.num_items == 0
    total, _, gradients = fused(case, [cells], [1.0])
    assert float(total) == 0
    assert not any(gradient.any() for gradient in gradients)


@every_distribution_loss
def test_a_very_confident_teacher_gives_finite_losses_and_gradients(name):
    case = case_for_loss(name, 3, K=23)
    original = case.example.teacher_logprobs
    logprobs = np.full_like(original.logprobs, -100)
    logprobs[original.offsets[:-1]] = 0
    teacher_logprobs = dataclasses.replace(original, logprobs=logprobs)
    confident = dataclasses.replace(case, example=dataclasses.replace(case.example, teacher_logprobs=teacher_logprobs))
    for states in (case.states, case.states * 100):
        total, _, gradients = fused(
            dataclasses.replace(confident, states=states), [cells_of(name, confident)], [1.0], dtype=torch.float32
        )
        assert torch.isfinite(total)
        assert all(torch.isfinite(gradient).all() for gradient in gradients)


def with_support_ids(teacher_logprobs: TeacherLogprobs, is_replaced: np.ndarray, ids: list[int]) -> TeacherLogprobs:
    """Return the log-probabilities with other ids at some positions; each position keeps its first probabilities."""
    ids_per_position = [ids if replaced else teacher_logprobs.ids[low:high].tolist()
                        for replaced, low, high in zip(is_replaced.tolist(), teacher_logprobs.offsets[:-1],
                                                       teacher_logprobs.offsets[1:], strict=True)]  # fmt: skip
    logprobs_per_position = [
        teacher_logprobs.logprobs[low : low + len(row)].tolist()
        for low, row in zip(teacher_logprobs.offsets, ids_per_position, strict=False)
    ]
    return dataclasses.replace(
        teacher_logprobs,
        offsets=np.cumsum([0, *map(len, ids_per_position)]),
        ids=np.array([token for row in ids_per_position for token in row], np.int32),
        logprobs=np.array([logprob for row in logprobs_per_position for logprob in row], np.float32),
    )


def test_items_without_cells_have_loss_0_at_any_position():
    """All mass of both models is in the remainder: two equal distributions over one cell."""
    case = random_case(21, K=2, spans=9)
    spans = predicted_spans(case.example)
    loss, columns = LOSS_INSTANCES["p-kl"], case.projection.columns
    for unreached in [
        *([index] for index in range(len(spans))),
        [0, 1],
        [len(spans) - 2, len(spans) - 1],
        range(len(spans)),
    ]:
        positions = [position for index in unreached for position in spans[index][1]]
        teacher_logprobs = with_support_ids(
            case.example.teacher_logprobs, np.isin(case.example.teacher_logprobs.positions, positions), [2, 5]
        )
        cells = loss.build_cells(dataclasses.replace(case.example, teacher_logprobs=teacher_logprobs), columns)
        assert cells.num_items == len(spans)
        assert not torch.diff(cells.cell_offsets)[list(unreached)].any()
        total, gradients = reference(case, lambda probs, cells=cells: reference_cells_loss(cells, probs))
        for chunk in (1, 2, 64):
            found, _, found_gradients = fused(case, [cells], [1.0], chunk=chunk)
            assert_close([found, *found_gradients], [total, *gradients], 1e-7)


# --- cells, chunks, memory


def reference_fill_cells(
    items: list[tuple[list[int], list[int]]],
    support: list[list[tuple[int, float]]],
    columns: ProjectionColumns,
) -> list[list[tuple[float, list[tuple[int, int, float]]]]]:
    """Return the cells of each item, `(probability, entries)`, in the order of the teacher's support."""
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
                            (
                                row,
                                int(columns.student_ids[index]),
                                float(columns.log_weights[index]) - math.log(len(rows)),
                            )
                            for row in rows
                            for index in column
                        ],
                    )
                )
        result.append(cells)
    return result


@st.composite
def random_cases(draw):
    seed = draw(st.integers(0, 2**32 - 1))
    return random_case(
        seed,
        K=draw(st.sampled_from([1, 2, 5, 19])),
        spans=draw(st.integers(1, 12)),
        sharpness=draw(st.sampled_from([0.5, 3.0, 60.0])),
    )


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(case=random_cases())
def test_fill_cells_matches_the_reference_on_repeated_calls(case):
    example, columns = case.example, case.projection.columns
    teacher_logprobs = example.teacher_logprobs
    rng = np.random.default_rng(len(example.student_ids))
    rows = np.sort(rng.integers(0, 30, 8))
    row_start, row_stop = rows[::2], rows[1::2] + 1
    position_start = np.sort(rng.integers(0, max(1, len(teacher_logprobs)), 4))
    position_stop = np.minimum(position_start + rng.integers(0, 4, 4), len(teacher_logprobs))
    position_stop = np.maximum(position_start, position_stop)
    expected = reference_fill_cells(
        [
            (list(range(r0, r1)), list(range(p0, p1)))
            for r0, r1, p0, p1 in zip(row_start, row_stop, position_start, position_stop, strict=True)
        ],
        [support_at(teacher_logprobs, index) for index in range(len(teacher_logprobs))],
        columns,
    )
    for _ in range(2):
        *arrays, corrections = fill_cells(
            ItemRanges(row_start, row_stop, position_start, position_stop),
            TeacherArrays.from_logprobs(teacher_logprobs), columns.offsets, columns.student_ids, columns.log_weights,
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
@given(case=random_cases(), size=st.integers(1, 20), with_ce=st.booleans())
def test_chunks_cover_all_rows_once_and_split_no_item(case, size, with_ce):
    cells = [cells_of("p-kl", case), *([cells_of("ce", case)] if with_ce else [])]
    terms = [term_cells.to(CPU, 1.0) for term_cells in cells]
    starts = chunk_starts(len(case.states), size, terms)
    assert starts[0] == 0
    assert starts[-1] == len(case.states)
    assert all(start < stop for start, stop in itertools.pairwise(starts))
    chunk_of_row = np.searchsorted(starts, np.arange(len(case.states)), side="right")
    longest = 1
    for term_cells in cells:
        for item in range(term_cells.num_items):
            first, last = term_cells.entry_offsets[term_cells.cell_offsets[item : item + 2]]
            rows = set(term_cells.rows[first:last].tolist())
            assert len({chunk_of_row[row] for row in rows}) <= 1
            longest = max(longest, len(rows))
    assert max(np.diff(starts), default=0) <= max(size, longest)


@pytest.mark.parametrize("name", ["p-kl", "boundary-kl"])
def test_unmapped_tokens_of_a_whole_vocabulary_have_finite_gradients(name):
    case = case_for_loss(name, 3, K=99)
    mapped = case.dense.clone()
    mapped[mapped.sum(1) == 0, 0] = 1  # the student has all mass on mapped tokens
    mapped /= mapped.sum(1, keepdim=True)
    rows, columns = (mapped > 0).nonzero(as_tuple=True)
    projection = dataclasses.replace(
        case.projection,
        row_offsets=np.append(0, (mapped > 0).sum(1).cumsum(0).numpy()),
        teacher_ids=columns.numpy().astype(np.int32),
        weights=mapped[rows, columns].numpy().astype(np.float32),
    )
    cells = LOSS_INSTANCES[name].build_cells(case.example, projection.columns)
    total, _, gradients = fused(case, [cells], [1 / cells.num_items], dtype=torch.float32)
    assert 0 <= float(total) < 5
    assert all(torch.isfinite(gradient).all() and gradient.abs().max() < 5 for gradient in gradients)


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        tensors = result if isinstance(result, tuple | list) else [result]
        self.numel = max([self.numel, *(tensor.numel() for tensor in tensors if isinstance(tensor, Tensor))])
        return result


def peak_bytes(action: object) -> int:
    """Return the peak of allocated bytes, beyond those at the start."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        action()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    allocated = np.cumsum([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())])
    return int(allocated.max(initial=0))


def wide_case(name: str, N: int, V: int, H: int) -> Case:
    """Return N trained tokens, each a span, with vocabularies of V on both sides and without dense matrices."""
    rng = np.random.default_rng(N)
    ids, positions = rng.integers(0, V, N + 1).astype(np.int32), np.arange(1, N + 1, dtype=np.int32)
    spans = np.stack([positions, positions + 1, positions, positions + 1], 1)
    support = ((ids[1:, None] + np.arange(9)) % V).astype(np.int32).reshape(-1)
    logprobs = np.full(9 * N, math.log(0.1), np.float32)
    teacher_logprobs = TeacherLogprobs(
        positions, np.arange(0, 9 * N + 1, 9), support, logprobs, logprobs[:N], logprobs[:N], logprobs[:N]
    )
    example = LossInputs(ids, np.arange(N, dtype=np.int64), spans, ids, teacher_logprobs, logprobs[:N], logprobs[:N])
    # A placeholder: the reference partition of V tokens takes too long; `next_bytes` is set below.
    vocabularies = partition_vocabularies([b"a"], [b"a"], 1, 1)
    case = Case(example, SparseProjection.identity(V), vocabularies, torch.randn(N, H), torch.randn(V, H))
    case.__dict__["next_bytes"] = number_partition(V)
    return case


@functools.cache
def number_partition(V: int) -> BytePartition:
    """Return the partition of a tokenizer whose token 123 spells "123"; "0123" becomes "0" and "123"."""
    tokens = np.arange(V, dtype=np.int32)

    def first_tokens(pieces: list[bytes]) -> list[int]:
        return [int(piece) if piece[:1] != b"0" else 0 for piece in pieces]

    side = sort_vocabulary([b"%d" % token for token in range(V)], tokens, first_tokens)
    return BytePartition.from_vocabularies(side, side)


@pytest.mark.slow
@every_loss
def test_memory_depends_on_the_chunk_size_and_not_on_the_number_of_rows(name):
    V, H, chunk = 20_000, 8, 32
    peaks, largest = [], []
    for N in (256, 1024):
        case = wide_case(name, N, V, H)
        states, weight, _ = leaves(case.states, case.weight, None, dtype=torch.float32)
        terms = [cells_of(name, case).to(CPU, 1.0)]

        def step(states: Tensor = states, weight: Tensor = weight, terms: list[LossCells] = terms) -> None:
            fused_loss(states, OutputHead(weight), terms, chunk)[0].backward()

        with LargestTensor() as largest_tensor:
            step()
        largest.append(largest_tensor.numel)
        states.grad = weight.grad = None
        peaks.append(peak_bytes(step))
    assert largest == [chunk * V, chunk * V]
    assert min(peaks) > chunk * V * 4  # the measurement includes the chunk itself
    assert max(peaks) < 2.5 * chunk * V * 4 + 4 * V * H * 4
    # Only the gradient of the states grows, and autograd's copies of it.
    assert peaks[1] - peaks[0] <= 3 * (1024 - 256) * H * 4


def test_an_item_longer_than_a_chunk_is_processed_in_several_chunks():
    V, chunk, rng = 2000, 8, np.random.default_rng(0)
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
        case_for_loss("ce", 1, K=4),
        states=torch.from_numpy(rng.normal(size=(sum(lengths), 4))),
        weight=torch.from_numpy(rng.normal(size=(V, 4))),
    )
    expected, _, gradients = fused(case, [cells], [1.0], chunk=sum(lengths))
    with LargestTensor() as largest_tensor:
        found, _, found_gradients = fused(case, [cells], [1.0], chunk=chunk)
    assert largest_tensor.numel == chunk * V
    assert_close([found, *found_gradients], [expected, *gradients], 1e-10)


def test_memory_of_several_losses_with_a_softcap_is_bounded_by_the_chunk():
    V, H, chunk = 20_000, 8, 48
    case = wide_case("p-kl", 512, V, H)
    states, weight, _ = leaves(case.states, case.weight, None, dtype=torch.float32)
    terms = [cells_of(name, case).to(CPU, 1.0) for name in ("p-kl", "boundary-kl")]

    def step() -> None:
        fused_loss(states, OutputHead(weight, softcap=30.0), terms, chunk)[0].backward()

    step()
    states.grad = weight.grad = None
    assert peak_bytes(step) < 1.5 * chunk * V * 4 + 4 * V * H * 4


def bf16_product_bytes(chunk: int, weight: Tensor) -> list[int]:
    """Return the memory that torch allocates during each product of a bf16 head, in addition to its result.

    A processor with AMX copies an operand; one with AVX-512 but without bf16 instructions has the result in fp32, too.
    """
    states, logits = weight[:chunk].clone(), weight.new_zeros(chunk, len(weight))
    weight_gradient = torch.zeros_like(weight)
    products = (
        lambda: torch.mm(states, weight.T, out=logits),
        lambda: states.addmm_(logits, weight),
        lambda: weight_gradient.addmm_(logits.T, states),
    )
    return [peak_bytes(product) for product in products]


def test_memory_of_a_bf16_head_is_one_chunk_beyond_inputs_and_gradients():
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
    # fp32 logits, their matrix product in bf16, and torch's own memory for a product on this processor.
    of_products = max(bf16_product_bytes(chunk, weight.detach()))
    assert of_products < 1.1 * 4 * V * max(chunk, H)
    assert extra[0] < 1.1 * (chunk * V * 6 + of_products)
    assert abs(extra[1] - extra[0]) < 0.02 * chunk * V * 6


def test_a_bf16_gradient_summed_over_many_chunks_is_close_to_the_exact_one():
    N, V, H, chunk = 1024, 500, 32, 16
    case = wide_case("forward-kl", N, V, H)
    case = dataclasses.replace(case, states=case.states.bfloat16(), weight=(case.weight / 6).bfloat16())
    cells = cells_of("forward-kl", case)
    _, _, expected = fused(case, [cells], [1 / N])
    for rows, tolerance in ((N, 4e-3), (chunk, 2e-2)):
        _, _, found = fused(case, [cells], [1 / N], chunk=rows, dtype=torch.bfloat16)
        for found_gradient, expected_gradient in zip(found, expected, strict=True):
            assert float((found_gradient.double() - expected_gradient).norm() / expected_gradient.norm()) < tolerance


# --- specifications


EXAMPLE_HINT = "use for example --loss ce:weight=0.5"


def test_parse_losses_reads_names_and_weights():
    assert parse_losses(["p-kl", "ce:weight=0.5"]) == [LossSpec("p-kl"), LossSpec("ce", 0.5)]
    assert [str(loss) for loss in parse_losses(["p-kl:weight=1.0", "ce:weight=0.50"])] == ["p-kl", "ce:weight=0.5"]


@pytest.mark.parametrize(
    ("texts", "what", "hint"),
    [
        (
            ["forward_kl"],
            "no loss called 'forward_kl'; did you mean forward-kl?",
            "",
        ),
        (["xxxx"], "no loss called 'xxxx'", "use one of: alm, boundary-kl, bpm, byte-kl, "),
        (["ce:temperature=2"], "no option of the loss ce called 'temperature'", "use one of: weight"),
        (["ce:wieght=2"], "no option of the loss ce called 'wieght'; did you mean weight?", ""),
        (
            ["ce:weight=0"],
            "the weight of the loss ce is '0', but must be a number above 0 and at most 1,000,000,000,000",
            EXAMPLE_HINT,
        ),
        (
            ["ce:weight=-1"],
            "the weight of the loss ce is '-1', but must be a number above 0 and at most 1,000,000,000,000",
            EXAMPLE_HINT,
        ),
        (
            ["ce:weight=nan"],
            "the weight of the loss ce is 'nan', but must be a number above 0 and at most 1,000,000,000,000",
            EXAMPLE_HINT,
        ),
        (
            ["ce:weight=inf"],
            "the weight of the loss ce is 'inf', but must be a number above 0 and at most 1,000,000,000,000",
            EXAMPLE_HINT,
        ),
        (
            ["ce:weight=half"],
            "the weight of the loss ce is 'half', but must be a number above 0 and at most 1,000,000,000,000",
            EXAMPLE_HINT,
        ),
        (["ce:weight=1,weight=2"], "--loss ce:weight=1,weight=2: weight is given twice", "remove one weight="),
        (["ce:weight"], "--loss ce:weight: 'weight' is not NAME=VALUE", "use weight=VALUE"),
        (["ce", "p-kl", "ce:weight=2"], "--loss ce is given twice", "use it once, with a weight: --loss ce:weight=0.5"),
    ],
)
def test_invalid_loss_specs_are_refused(texts, what, hint):
    with pytest.raises(XtkError, match=f"^{re.escape(what)}$|^{re.escape(what)}\n") as raised:
        parse_losses(texts)
    assert raised.value.what == what
    assert (raised.value.hint or "").startswith(hint)


@pytest.mark.parametrize("gap", [5.0, 15.0, 25.0, 40.0, 80.0])
def test_a_confident_wrong_student_has_a_corrective_gradient(gap):
    # One cell, with all of the student's probability but e^-gap; the teacher has 0.3 in the remainder. fp32.
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
    remainder = math.exp(-gap) / (1 + math.exp(-gap))
    assert logits.grad[0, 2].item() == pytest.approx(0.3 - remainder, rel=1e-4)
    assert logits.grad[0, 7].item() == pytest.approx(-(0.3 - remainder) / 49, rel=1e-4)
    expected = 0.7 * math.log(0.7 / (1 - remainder)) + 0.3 * (math.log(0.3) - math.log(remainder))
    assert total.item() == pytest.approx(expected, rel=1e-5)


# --- divergences

DIVERGENCE_OPTIONS = {
    "reverse-kl": ReferenceDivergence("reverse-kl"),
    "jsd": ReferenceDivergence("jsd"),
    "jsd,beta=0.2": ReferenceDivergence("jsd", 1.0, {"beta": 0.2}),
    "jsd,beta=0": ReferenceDivergence("forward-kl"),
    "jsd,beta=1": ReferenceDivergence("reverse-kl"),
    "jsd,beta=0.25,rescale=true": ReferenceDivergence("jsd", 1.0, {"beta": 0.25, "scale": 16 / 3}),
    "skew-forward-kl,skew=0.3": ReferenceDivergence("skew-forward-kl", 1.0, {"skew": 0.3}),
    "skew-reverse-kl,skew=0.3": ReferenceDivergence("skew-reverse-kl", 1.0, {"skew": 0.3}),
    "tvd": ReferenceDivergence("tvd"),
    "forward-kl,temperature=2": ReferenceDivergence("forward-kl", 2.0),
    "reverse-kl,temperature=0.5": ReferenceDivergence("reverse-kl", 0.5),
    "jsd,temperature=3": ReferenceDivergence("jsd", 3.0),
}
every_divergence = pytest.mark.parametrize("divergence", list(DIVERGENCE_OPTIONS))
every_loss_with_divergence = pytest.mark.parametrize(
    "name", ["boundary-kl", "p-kl", "byte-kl", "bpm", "escd", "simct", "strict", "gold", "h-kl"]
)


def cells_with_divergence(name: str, case: Case, divergence: str) -> LossCells:
    (spec,) = parse_losses([f"{name}:divergence={divergence}"])
    return cells_of(name, case, spec.options)


@pytest.mark.slow
@every_divergence
@every_loss_with_divergence
def test_divergences_and_gradients_match_the_reference(name, divergence):
    for seed, kind in enumerate(CASE_KINDS):
        if "one-hot" in kind and "temperature" in divergence:
            continue  # the reference would need the root of e^-1000, which float64 cannot represent
        case = case_for_loss(name, seed, **CASE_KINDS[kind])
        total, gradients = reference(
            case,
            lambda probs, case=case: sum(
                REFERENCE_LOSSES[name](case, probs, DIVERGENCE_OPTIONS[divergence]),
                torch.zeros((), dtype=torch.float64),
            ),
        )
        found, _, found_gradients = fused(case, [cells_with_divergence(name, case, divergence)], [1.0], chunk=5)
        # Cells are stored in fp32, and the remainder is the logarithm of a difference.
        assert_close([found, *found_gradients], [total, *gradients], 2e-4)


@every_divergence
@every_loss_with_divergence
def test_divergences_are_not_negative_and_0_for_equal_models(name, divergence):
    for seed in range(10):
        case = case_for_loss(name, seed, K=4)
        for scale in (0.0, 1.0, 4.0):
            scaled = dataclasses.replace(case, states=case.states * scale)
            _, sums, _ = fused(scaled, [cells_with_divergence(name, case, divergence)], [1.0], dtype=torch.float32)
            assert sums[0] >= -1e-6
    for K in (3, 23):
        equal_models = equal_models_case(3, K=K, one_to_one=True)
        total, _, gradients = fused(equal_models, [cells_with_divergence(name, equal_models, divergence)], [1.0])
        assert abs(float(total)) < 2e-5
        if "tvd" not in divergence:  # tvd has a kink there
            assert max(float(gradient.abs().max()) for gradient in gradients) < 1e-4


def test_a_temperature_divides_both_logits():
    tau, rng = 2.5, np.random.default_rng(1)
    case = equal_models_case(1, K=23, one_to_one=True)
    student_logits, teacher_logits = (torch.from_numpy(rng.normal(size=(6, 23))) for _ in range(2))
    ids = case.example.teacher_ids
    teacher_logprobs = make_teacher_logprobs(torch.log_softmax(teacher_logits, 1).numpy(), np.arange(1, 7), ids[1:], 23)
    case = dataclasses.replace(case, example=dataclasses.replace(case.example, teacher_logprobs=teacher_logprobs))
    for name, (first_logits, second_logits) in {
        "forward-kl": (teacher_logits, student_logits),
        "reverse-kl": (student_logits, teacher_logits),
    }.items():
        cells = cells_of(name, case, (("temperature", str(tau)),))
        total, _ = fused_loss(student_logits, OutputHead(None), [cells.to(CPU, 1.0)], 4)
        p, q = torch.softmax(first_logits / tau, 1), torch.softmax(second_logits / tau, 1)
        assert float(total) == pytest.approx(tau**2 * float((p * (p / q).log()).sum()), rel=1e-5)


@pytest.mark.parametrize("end", ["0.0001", "0.9999"])
def test_a_rescaled_jsd_converges_to_forward_and_reverse_kl(end):
    case = case_for_loss("jsd", 4, K=6)
    near_limit = cells_of("jsd", case, (("beta", end), ("rescale", "true")))
    at_limit = cells_of("jsd", case, (("beta", end[0] if end < "0.5" else "1"),))
    found, _, gradients = fused(case, [near_limit], [1.0])
    expected, _, expected_gradients = fused(case, [at_limit], [1.0])
    assert_close([found, *gradients], [expected, *expected_gradients], 5e-3)


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
def test_invalid_divergence_options_are_refused(text, what):
    with pytest.raises(XtkError) as raised:
        parse_losses([text])
    assert raised.value.what == what


def test_several_losses_at_once_are_the_sum_of_single_losses():
    case = random_case(5, one_tokenizer=False, K=4)
    names = [name for name in LOSSES if LOSS_INSTANCES[name].comparison_space != "tokens"]
    scales = [0.5 + number for number in range(len(names))]
    cells = [cells_of(name, case) for name in names]
    total, sums, gradients = fused(case, cells, scales, chunk=3)
    single_results = [fused(case, [part], [scale], chunk=64) for part, scale in zip(cells, scales, strict=True)]
    assert_close([total], [sum(found for found, _, _ in single_results)], 1e-10)
    assert_close(list(sums), [found[0] for _, found, _ in single_results], 1e-10)
    for number, gradient in enumerate(gradients):
        assert_close([gradient], [sum(found[number] for _, _, found in single_results)], 1e-10)
