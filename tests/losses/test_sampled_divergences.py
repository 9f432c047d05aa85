"""Divergences from sampled tokens that know their log-probability: unbiased, and without noise for equal models."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import torch
from reference_losses import random_case
from simulated_cuda import CUDA, SimulatedCuda, to_host

from xtk.cache.codec.logprob_packing import pack_logprobs
from xtk.cache.codec.logprob_unpacking import LogprobDecoder
from xtk.cache.teacher_logprobs import StoredLogprobs, TeacherLogprobs
from xtk.losses import LOSSES
from xtk.losses.cells.loss_cells import LossCells
from xtk.losses.head import fused_loss
from xtk.losses.interface import LossInputs
from xtk.losses.spec import parse_losses
from xtk.losses.term import LossTerm
from xtk.models.output_head import OutputHead
from xtk.name_registry import load_registered
from xtk.parallel.host_to_device import to_device
from xtk.projection.projection import SparseProjection

V, P, SETS, SAMPLES = 60, 40, 150, 6
NAMES = [name for name in LOSSES if load_registered(LOSSES, name, "loss").compares_single_tokens]
LOSS_TEXTS = [*NAMES, "jsd:beta=0.1", "skew-reverse-kl:skew=0.5"]
SUPPORTS = {"sample": 0, "top-k+sample": 4}


def logits_of(distance: float) -> torch.Tensor:
    """Return log-probabilities [P, V] of a model; at distance 0, those of the teacher."""
    rng = np.random.default_rng(0)
    logits, noise = rng.normal(0, 2, (P, V)), rng.normal(0, 1, (P, V))
    return torch.log_softmax(torch.from_numpy(logits + distance * noise), 1)


@functools.cache
def stored_logprobs_of(top_k: int, samples: int, sets: int = SETS) -> StoredLogprobs:
    """Return what a cache stores of the teacher."""
    rng, logprobs, observed = np.random.default_rng(1), logits_of(0).numpy(), observed_ids()[1:]
    exact = [np.union1d(np.argsort(-row)[:top_k], token) for row, token in zip(logprobs, observed, strict=True)]
    tails = np.exp(logprobs)
    for row, ids in zip(tails, exact, strict=True):
        row[ids] = 0
    counts = [rng.multinomial(samples, row / row.sum(), sets) for row in tails] if samples else []
    sampled = [(at, np.flatnonzero(one)) for at, of_position in enumerate(counts) for one in of_position]
    return StoredLogprobs(
        positions=np.arange(1, P + 1, dtype=np.int32),
        offsets=np.cumsum([0, *map(len, exact)]),
        ids=np.concatenate(exact).astype(np.int32),
        logprobs=np.concatenate([row[ids] for row, ids in zip(logprobs, exact, strict=True)]).astype(np.float32),
        sample_offsets=np.cumsum([0, *(len(ids) for _, ids in sampled)]),
        sample_ids=np.concatenate([np.zeros(0), *(ids for _, ids in sampled)]).astype(np.int32),
        sample_counts=np.concatenate([np.zeros(0), *(one[one > 0] for row in counts for one in row)]).astype(np.int32),
        remainder_mass=tails.sum(1).astype(np.float32),
        observed_logprobs=logprobs[np.arange(P), observed].astype(np.float32),
        entropy=-(np.exp(logprobs) * logprobs).sum(1).astype(np.float32),
        sample_logprobs=np.concatenate([np.zeros(0), *(logprobs[at, ids] for at, ids in sampled)]).astype(np.float32),
    )


def observed_ids() -> np.ndarray:
    return (np.arange(P + 1) % V).astype(np.int32)


def cells_of(text: str, teacher: TeacherLogprobs) -> LossCells:
    (spec,) = parse_losses([text])
    positions = np.arange(1, P + 1, dtype=np.int32)
    spans, ids = np.column_stack([positions, positions + 1] * 2), observed_ids()
    term = LossTerm(
        spec.make_loss(), spec.make_divergence(), SparseProjection.identity(V).columns, has_sample_logprobs=True
    )
    assert term.accepts_samples
    return term.build_cells(LossInputs(ids, np.arange(P, dtype=np.int64), spans, ids, teacher))


def values_of_positions(text: str, teacher: TeacherLogprobs, distance: float = 0.0) -> list[float]:
    cells, logits = cells_of(text, teacher), logits_of(distance)
    parts = [(logits[at : at + 1], cells.select_rows(at, at + 1, at)) for at in range(P)]
    return [float(fused_loss(row, OutputHead(None), [part])[1][0]) for row, part in parts]


def value_and_gradient(text: str, teacher: TeacherLogprobs, distance: float) -> tuple[float, torch.Tensor]:
    """Return the mean over positions of a loss, and its gradient, [P, V]."""
    cells = cells_of(text, teacher)
    logits = logits_of(distance).requires_grad_()
    total, _ = fused_loss(logits, OutputHead(None), [cells.to(torch.device("cpu"), 1 / P)], 17)
    total.backward()
    assert logits.grad is not None
    return float(total.detach()), logits.grad


def full_logprobs() -> TeacherLogprobs:
    return stored_logprobs_of(V, 0, 0).to_teacher_logprobs(None)


@pytest.mark.slow
@pytest.mark.parametrize("distance", [0.2, 1.0])
@pytest.mark.parametrize("support", list(SUPPORTS))
@pytest.mark.parametrize("text", LOSS_TEXTS)
def test_averages_over_sample_sets_are_those_of_all_probabilities(text, support, distance):
    stored = stored_logprobs_of(SUPPORTS[support], SAMPLES)
    expected, expected_gradient = value_and_gradient(text, full_logprobs(), distance)
    found = [value_and_gradient(text, stored.to_teacher_logprobs(number), distance) for number in range(SETS)]
    values = np.array([value for value, _ in found]) - expected
    assert abs(values.mean()) < 4 * values.std() / np.sqrt(SETS)
    directions = torch.randn(P * V, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    directions[:, 0] = expected_gradient.flatten()
    errors = (torch.stack([gradient for _, gradient in found]) - expected_gradient).flatten(1) @ directions
    scores = errors.mean(0) / errors.std(0) * SETS**0.5
    assert float(scores.abs().max()) < 4.5


@pytest.mark.parametrize("support", list(SUPPORTS))
@pytest.mark.parametrize("text", LOSS_TEXTS)
def test_equal_models_have_value_and_gradient_0_in_every_sample_set(text, support):
    stored = stored_logprobs_of(SUPPORTS[support], SAMPLES)
    for number in range(3):
        value, gradient = value_and_gradient(text, stored.to_teacher_logprobs(number), 0.0)
        assert abs(value) < 1e-6
        if not text.startswith("tvd"):  # it has a kink there
            assert float(gradient.abs().max()) < 1e-4 / P


@pytest.mark.parametrize("top_k", list(SUPPORTS.values()))
def test_at_equal_models_a_cache_has_a_hundredth_of_the_error_without_the_column(top_k):
    """Errors of single positions: the remaining one is that of the quantization."""
    stored, order, ids = stored_logprobs_of(top_k, 16, 4), np.arange(V, dtype=np.int32), observed_ids()[1:]
    errors = []
    for with_column in (False, True):
        tables, (packed,) = pack_logprobs([(stored, ids)], order, "standard", 4, 16, with_column)
        decoder = LogprobDecoder(tables, order, "standard", 4, 16, with_column)
        exact, *sets = (
            values_of_positions("forward-kl", decoder.decode_teacher_logprobs(packed, ids, stored.positions, number))
            for number in (None, 0, 1, 2, 3)
        )
        errors.append(np.sqrt(np.mean(np.square(np.array(sets) - exact))))
    assert errors[1] < errors[0] / 100


@pytest.mark.parametrize("text", LOSS_TEXTS)
def test_values_and_gradients_do_not_depend_on_chunks_or_on_other_documents(text):
    cells = cells_of(text, stored_logprobs_of(4, SAMPLES).to_teacher_logprobs(0))
    found = []
    for parts, chunk in (([cells], 64), ([cells], 3), ([cells.select_rows(0, 13, 0), cells.select_rows(13, P, 0)], 7)):
        logits = logits_of(1.0).requires_grad_()
        total = sum(
            fused_loss(logits, OutputHead(None), [part.to(torch.device("cpu"), 1.0)], chunk)[0] for part in parts
        )
        total.backward()
        found.append((float(total.detach()), logits.grad))
    for value, gradient in found[1:]:
        assert value == pytest.approx(found[0][0], rel=1e-9)
        assert torch.allclose(gradient, found[0][1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("text", LOSS_TEXTS)
def test_a_confident_wrong_student_has_a_finite_value_and_gradient(text):
    cells = cells_of(text, stored_logprobs_of(4, SAMPLES).to_teacher_logprobs(0))
    logits = (60 * logits_of(1.0)).float().requires_grad_()
    total, _ = fused_loss(logits, OutputHead(None), [cells.to(torch.device("cpu"), 1.0)], 8)
    total.backward()
    assert torch.isfinite(total)
    assert torch.isfinite(logits.grad).all()


def sampled_supports(full: TeacherLogprobs, width: int, num_exact: int) -> StoredLogprobs:
    """Return what a cache stores of full distributions: the most probable ids, the observed one, and samples."""
    rng, exact, sampled = np.random.default_rng(5), [], []
    logprobs = full.logprobs.reshape(-1, width).astype(np.float64)
    for row, observed in zip(logprobs, full.observed_logprobs, strict=True):
        exact.append(np.union1d(np.argsort(-row)[:num_exact], np.flatnonzero(row.astype(np.float32) == observed)[:1]))
        tail = np.exp(row)
        tail[exact[-1]] = 0
        sampled += [*rng.multinomial(SAMPLES, tail / tail.sum(), SETS)]
    found = [np.flatnonzero(row) for row in sampled]
    owners = np.repeat(np.arange(len(logprobs)), SETS)
    return StoredLogprobs(
        positions=full.positions,
        offsets=np.cumsum([0, *map(len, exact)]),
        ids=np.concatenate(exact).astype(np.int32),
        logprobs=np.concatenate([row[ids] for row, ids in zip(logprobs, exact, strict=True)]).astype(np.float32),
        sample_offsets=np.cumsum([0, *map(len, found)]),
        sample_ids=np.concatenate(found).astype(np.int32),
        sample_counts=np.concatenate([row[ids] for row, ids in zip(sampled, found, strict=True)]).astype(np.int32),
        remainder_mass=np.array(
            [1 - np.exp(row[ids]).sum() for row, ids in zip(logprobs, exact, strict=True)], np.float32
        ),
        observed_logprobs=full.observed_logprobs,
        entropy=full.entropy,
        sample_logprobs=np.concatenate([logprobs[at, ids] for at, ids in zip(owners, found, strict=True)]).astype(
            np.float32
        ),
    )


def test_the_control_variate_of_byte_kl_has_mean_0_over_sample_sets():
    """Cells of several tokens, tokens that span boundaries, spans of different lengths."""
    U = 19
    case = random_case(3, K=99, spans=12, U=U)
    stored = sampled_supports(case.example.teacher_logprobs, U, 3)
    loss, partition = load_registered(LOSSES, "byte-kl", "loss")(), case.next_bytes
    student_cells = partition.student.token_cells
    has_counterpart = (student_cells >= 0) & (partition.num_teacher_tokens[student_cells] > 0)
    gradients: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for number in range(SETS):
        teacher = stored.to_teacher_logprobs(number)
        for with_column, of_sets in gradients.items():
            one = teacher if with_column else dataclasses.replace(teacher, token_logprobs=None)
            cells = loss.build_cells(dataclasses.replace(case.example, teacher_logprobs=one), partition)
            logits = case.states @ case.weight.T
            # The student's mass on tokens without a counterpart counts to its tail: here it is 0.
            logits = logits.masked_fill(~torch.from_numpy(has_counterpart), -30.0).requires_grad_()
            total, _ = fused_loss(logits, OutputHead(None), [cells.to(torch.device("cpu"), 1.0)], 64)
            total.backward()
            of_sets.append(logits.grad.flatten())
            assert (cells.sampled_probs is not None) == with_column
    directions = torch.randn(logits.numel(), 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    differences = (torch.stack(gradients[True]) - torch.stack(gradients[False])) @ directions
    assert float(differences.abs().max()) > 1e-3
    scores = differences.mean(0) / differences.std(0) * SETS**0.5
    assert float(scores.abs().max()) < 4.5


@pytest.mark.slow
@pytest.mark.parametrize("text", ["byte-kl", *LOSS_TEXTS])
def test_on_a_device_sampled_tokens_give_the_values_and_gradients_of_the_cpu(text):
    if text == "byte-kl":
        case = random_case(3, K=99, spans=12, U=19)
        teacher = sampled_supports(case.example.teacher_logprobs, 19, 3).to_teacher_logprobs(0)
        example = dataclasses.replace(case.example, teacher_logprobs=teacher)
        cells = load_registered(LOSSES, "byte-kl", "loss")().build_cells(example, case.next_bytes)
        logits = case.states @ case.weight.T
    else:
        cells, logits = cells_of(text, stored_logprobs_of(4, SAMPLES).to_teacher_logprobs(0)), logits_of(0.3)
    assert cells.sampled_probs is not None

    def value_and_gradients(device: torch.device) -> list[torch.Tensor]:
        leaf = to_device(logits, device).detach().requires_grad_()
        total, _ = fused_loss(leaf, OutputHead(None), [cells.to(device, 0.5)], 7)
        total.backward()
        return [to_host(total.detach()), to_host(leaf.grad)]

    expected = value_and_gradients(torch.device("cpu"))
    with SimulatedCuda() as cuda:
        found = value_and_gradients(CUDA)
    assert not cuda.waits, cuda.wait_locations
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
