"""Properties of every registered loss that uses sampled tokens with known log-probabilities; new ones on arrival."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import torch
from reference_losses import Case, equal_models_case, random_case
from test_sampled_divergences import SETS, sampled_supports

from xtk.cache.teacher_logprobs import TeacherLogprobs
from xtk.losses import LOSSES
from xtk.losses.cells.loss_cells import LossCells
from xtk.losses.head import fused_loss
from xtk.losses.interface import ComparisonSpace
from xtk.losses.spec import parse_losses
from xtk.losses.term import LossTerm
from xtk.models.output_head import OutputHead

V, U, NUM_EXACT = 23, 19, 5


def make_term(name: str, case: Case | None = None) -> LossTerm:
    (spec,) = parse_losses([name])
    loss = spec.make_loss()
    space: ComparisonSpace = None
    if case is not None:
        space = case.next_bytes if loss.comparison_space == "bytes" else case.projection.columns
    return LossTerm(loss, spec.make_divergence(), space, has_sample_logprobs=True)


def accepts_samples(name: str) -> bool:
    term = make_term(name)
    return term.uses_teacher and term.accepts_samples and term.loss.requires == "distribution"


def cells_of(name: str, case: Case, teacher: TeacherLogprobs) -> LossCells:
    return make_term(name, case).build_cells(dataclasses.replace(case.example, teacher_logprobs=teacher))


def value_and_gradient(
    name: str, case: Case, teacher: TeacherLogprobs, distance: float = 0.0, chunk: int = 64
) -> tuple[float, torch.Tensor]:
    cells = cells_of(name, case, teacher)
    noise = torch.randn(len(case.states), len(case.weight), generator=torch.Generator().manual_seed(1)).double()
    logits = (case.states @ case.weight.T + distance * noise).requires_grad_()
    total, _ = fused_loss(logits, OutputHead(None), [cells.to(torch.device("cpu"), 1.0)], chunk)
    total.backward()
    assert logits.grad is not None
    return float(total.detach()), logits.grad


def different_vocabularies(name: str, seed: int) -> Case:
    """Return a case with tokens without a counterpart, partial rows of W, tokens that span boundaries."""
    return random_case(seed, K=99, spans=12, U=U, one_tokenizer=make_term(name).loss.comparison_space == "tokens")


def halves_of_the_tail(full: TeacherLogprobs) -> list[TeacherLogprobs]:
    """Return two sample sets: each has half of the tokens that are not exact, all of which are equally likely."""
    width = int(np.diff(full.offsets)[0])
    num_exact = NUM_EXACT + (width - NUM_EXACT) % 2
    ids, logprobs = (one.reshape(-1, width) for one in (full.ids, full.logprobs))
    is_observed = logprobs == full.observed_logprobs[:, None]
    order = np.argsort(np.where(is_observed, -np.inf, -logprobs), axis=1, kind="stable")
    ids, logprobs = np.take_along_axis(ids, order, 1), np.take_along_axis(logprobs, order, 1).astype(np.float64)
    mass = 1 - np.exp(logprobs[:, :num_exact]).sum(1, keepdims=True)
    logprobs[:, num_exact:] = np.log(mass / (width - num_exact))
    sets = []
    for first in (0, 1):
        columns = [*range(num_exact), *range(num_exact + first, width, 2)]
        own = logprobs[:, columns].astype(np.float32)
        doubled = own + np.where(np.array(columns) < num_exact, np.float32(0), np.log(np.float32(2)))
        sets.append(
            dataclasses.replace(
                full,
                offsets=np.arange(len(ids) + 1) * len(columns),
                ids=np.ascontiguousarray(ids[:, columns]).ravel(),
                logprobs=doubled.ravel(),
                token_logprobs=own.ravel(),
                exact_counts=np.full(len(ids), num_exact),
                remainder_mass=np.zeros(len(ids), np.float32),
            )
        )
    return sets


@functools.cache
def one_vocabulary() -> tuple[Case, TeacherLogprobs, tuple[TeacherLogprobs, ...]]:
    """Return a document of two equal models, all probabilities, and sample sets."""
    case = equal_models_case(2, K=V, spans=12, one_to_one=True)
    full = case.example.teacher_logprobs
    assert full is not None
    stored = sampled_supports(full, V, 3)
    return case, full, tuple(stored.to_teacher_logprobs(number) for number in range(SETS))


USERS = [
    name
    for name in filter(accepts_samples, LOSSES)
    if cells_of(name, one_vocabulary()[0], one_vocabulary()[2][0]).sampled_probs is not None
]
every_user = pytest.mark.parametrize("name", USERS)
LINEAR = [name for name in USERS if make_term(name).divergence.is_linear_in_teacher]
# In byte-kl, sampled tokens may share a cell with exact ones, and alternatives are only exact tokens.
GRADIENT_LIMITS = {"byte-kl": 1 / 4}


def test_losses_of_one_tokenizer_and_byte_kl_use_known_probabilities():
    single = {name for name in LOSSES if make_term(name).loss.compares_single_tokens}
    assert set(USERS) == {*single, "byte-kl"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in USERS if name != "byte-kl"])
def test_the_average_over_sample_sets_is_the_result_of_all_probabilities(name):
    """Value and gradient, to the standard error."""
    case, full, sets = one_vocabulary()
    expected, expected_gradient = value_and_gradient(name, case, full, 0.7)
    found = [value_and_gradient(name, case, one, 0.7) for one in sets]
    values = np.array([value for value, _ in found]) - expected
    assert abs(values.mean()) < 4 * values.std() / np.sqrt(SETS)
    directions = torch.randn(
        expected_gradient.numel(), 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    errors = (torch.stack([gradient for _, gradient in found]) - expected_gradient).flatten(1) @ directions
    scores = errors.mean(0) / errors.std(0) * SETS**0.5
    assert float(scores.abs().max()) < 4.5


@every_user
def test_equal_models_have_a_hundredth_of_the_gradient_without_known_probabilities(name):
    case, _, sets = one_vocabulary()
    for one in sets[:3]:
        value, gradient = value_and_gradient(name, case, one)
        unknown = dataclasses.replace(one, token_logprobs=None)
        _, noise = value_and_gradient("forward-kl" if name not in LINEAR else name, case, unknown)
        if name != "byte-kl":
            assert abs(value) < 1e-4
        if name != "tvd":  # it has a kink there
            assert float(gradient.norm()) < GRADIENT_LIMITS.get(name, 1 / 100) * float(noise.norm())


@pytest.mark.parametrize("name", [name for name in LINEAR if name != "byte-kl"])  # it has a test of its own
def test_known_probabilities_do_not_change_the_average_gradient(name):
    """Without known probabilities, the gradient of the forward KL is unbiased too."""
    for seed in range(3):
        case = different_vocabularies(name, seed)
        assert case.example.teacher_logprobs is not None
        halves = halves_of_the_tail(case.example.teacher_logprobs)
        without = [dataclasses.replace(one, token_logprobs=None) for one in halves]
        known, unknown = ([value_and_gradient(name, case, one)[1] for one in some] for some in (halves, without))
        assert float((known[0] - unknown[0]).abs().max()) > 1e-3
        torch.testing.assert_close(sum(known), sum(unknown), rtol=0, atol=1e-7)


@every_user
def test_results_from_samples_do_not_depend_on_the_chunk_size(name):
    case = different_vocabularies(name, 3)
    assert case.example.teacher_logprobs is not None
    (one, _) = halves_of_the_tail(case.example.teacher_logprobs)
    value, gradient = value_and_gradient(name, case, one)
    for chunk in (1, 3):
        found, of_chunks = value_and_gradient(name, case, one, chunk=chunk)
        assert found == pytest.approx(value, rel=1e-9)
        torch.testing.assert_close(of_chunks, gradient, rtol=1e-9, atol=1e-11)
