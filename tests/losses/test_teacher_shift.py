"""Targets of `--teacher-shift`: the frozen student's cells, times the teacher's, divided by those of its reference."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from reference_byte_kl import CELL_DIVERGENCES, ReferenceDivergence
from reference_losses import REFERENCE_LOSSES, Case, log_softmax, make_teacher_logprobs
from test_loss_contract import (
    CPU,
    LOSS_INSTANCES,
    assert_close,
    case_for_loss,
    comparison_space_of,
    leaves,
    reference,
)

from xtk.cache.teacher_logprobs import MIN_REMAINDER, TeacherLogprobs
from xtk.losses.cells.loss_cells import LossCells
from xtk.losses.head import fused_loss
from xtk.losses.interface import join_inputs
from xtk.losses.spec import LossSpec
from xtk.losses.teacher_shift import shifted_by_reference, with_frozen_student
from xtk.losses.term import LossTerm
from xtk.models.output_head import OutputHead

SHIFTED = [name for name, loss in LOSS_INSTANCES.items() if loss.compares_only_cells]
OWN = [(name, name) for name in SHIFTED if name in CELL_DIVERGENCES]
OTHERS = [
    (name, divergence)
    for name in SHIFTED
    if name not in CELL_DIVERGENCES
    for divergence in ("forward-kl", "reverse-kl", "jsd")
]
# Not sharper, so that no remainder is near 1e-6, where it has few digits in fp32.
KINDS = {"sparse support, a bias": {"K": 4, "bias": True, "sharpness": 1.0}, "K = U": {"K": 99, "sharpness": 1.0}}


def at_the_same_ids(teacher: TeacherLogprobs, teacher_ids: np.ndarray, width: int, seed: int) -> TeacherLogprobs:
    """Return the log-probabilities of another model at the entries of a teacher."""
    logprobs = log_softmax(np.random.default_rng([seed, 7]).normal(0, 1.0, (len(teacher), width)))
    owners = np.repeat(np.arange(len(teacher)), np.diff(teacher.offsets))
    entries = logprobs[owners, teacher.ids]
    outside = 1 - np.bincount(owners, np.exp(entries), len(teacher))
    observed = logprobs[np.arange(len(teacher)), teacher_ids[teacher.positions]]
    return dataclasses.replace(
        teacher,
        logprobs=entries.astype(np.float32),
        remainder_mass=np.where(outside > MIN_REMAINDER, outside, 0).astype(np.float32),
        observed_logprobs=observed.astype(np.float32),
    )


def shifted_case(name: str, seed: int, **options: object) -> Case:
    case = case_for_loss(name, seed, **options)
    example, width = case.example, case.projection.teacher_width
    other = at_the_same_ids(example.teacher_logprobs, example.teacher_ids, width, seed)
    return dataclasses.replace(case, example=dataclasses.replace(example, shift_reference=other))


def frozen_head(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return tuple(torch.randn(one.shape, generator=generator, dtype=torch.float64) for one in (case.states, case.weight))


def term_of(name: str, case: Case, divergence: str = "") -> LossTerm:
    is_own = divergence in ("", name)
    spec = LossSpec(name, options=() if is_own else (("divergence", divergence),))
    return LossTerm(LOSS_INSTANCES[name], spec.make_divergence(), comparison_space_of(name, case))


def complete_cells(name: str, case: Case, divergence: str = "", frozen: tuple = ()) -> LossCells:
    states, weight = frozen or frozen_head(case)
    cells = term_of(name, case, divergence).build_cells(case.example)
    (complete,) = with_frozen_student([cells], states, OutputHead(weight))
    return complete


def value_and_gradients(case: Case, cells: LossCells, chunk: int = 64) -> list[torch.Tensor]:
    inputs = leaves(case.states, case.weight, case.bias)
    total, _ = fused_loss(inputs[0], OutputHead(*inputs[1:]), [cells.to(CPU, 1.0)], chunk)
    total.backward()
    return [total.detach(), *(tensor.grad for tensor in inputs if tensor is not None)]


def slow_shifted_loss(name: str, case: Case, probs_NV: torch.Tensor, divergence: ReferenceDivergence) -> torch.Tensor:
    """Return the loss from dense distributions: the cells of teacher, reference and frozen student, item by item."""
    of_reference = dataclasses.replace(case.example, teacher_logprobs=case.example.shift_reference)
    states, weight = frozen_head(case)
    frozen = torch.softmax(states @ weight.T, 1)

    def recorded(example: object, probs: torch.Tensor) -> list[tuple[list, list, float]]:
        items: list[tuple[list, list, float]] = []

        def record(teacher: list, student: list, remainder: float | None = None) -> torch.Tensor:
            left = 1 - sum(teacher) if remainder is None else remainder
            items.append((teacher, student, left if left > MIN_REMAINDER else 0.0))
            return torch.zeros((), dtype=torch.float64)

        kind = "p-kl" if LOSS_INSTANCES[name].comparison_space == "tokens" else name
        REFERENCE_LOSSES[kind](dataclasses.replace(case, example=example), probs, record)
        return items

    total = torch.zeros((), dtype=torch.float64)
    of_teachers, of_references = (recorded(example, frozen) for example in (case.example, of_reference))
    of_student = recorded(case.example, probs_NV)
    for (ours, start, left), (theirs, _, other_left), (_, student, _) in zip(
        of_teachers, of_references, of_student, strict=True
    ):
        if not ours:
            continue
        own = [*ours, left], [*theirs, other_left], [float(one) for one in start]
        start_probs = [*own[2], max(1 - sum(own[2]), 1e-12)]
        masses = [
            s0 * max(t, MIN_REMAINDER) / max(r, MIN_REMAINDER) for s0, t, r in zip(start_probs, *own[:2], strict=True)
        ]
        target = [mass / sum(masses) for mass in masses]
        total = total + divergence(target[:-1], student, target[-1])
    return total


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize(("name", "divergence"), OWN + OTHERS)
def test_shifted_values_and_gradients_match_dense_distributions(name, kind, divergence):
    for seed in range(2):
        case = shifted_case(name, seed, **KINDS[kind])
        expected, gradients = reference(
            case,
            lambda probs, case=case: slow_shifted_loss(name, case, probs, ReferenceDivergence(divergence)),
        )
        found = value_and_gradients(case, complete_cells(name, case, divergence), chunk=3)
        assert_close(found, [expected, *gradients], 2e-4)


@pytest.mark.parametrize("name", SHIFTED)
def test_with_a_reference_that_equals_the_teacher_the_target_is_the_frozen_student(name):
    """Also where the teacher's remainder is empty or its probabilities are below fp32's resolution."""
    for options in ({"K": 4}, {"K": 99}, {"K": 4, "sharpness": 300.0}):
        case = shifted_case(name, 3, **options)
        example = dataclasses.replace(case.example, shift_reference=case.example.teacher_logprobs)
        case = dataclasses.replace(case, example=example)
        cells = complete_cells(name, case, "", (case.states, case.weight))
        value, *gradients = value_and_gradients(case, cells)
        assert abs(float(value)) < 1e-5
        if name != "tvd":  # it has a kink there
            assert max(float(gradient.abs().max()) for gradient in gradients) < 1e-5
        other = value_and_gradients(case, complete_cells(name, case))
        assert float(other[0]) > 1e-2 < float(other[1].abs().max())


def test_the_target_is_renormalized_over_cells_and_remainder():
    """By hand: T/R is 2 for the first token, 1/2 for the second, and 1 for the rest."""
    case = shifted_case("forward-kl", 0, K=2)
    example = case.example
    width, count = case.projection.teacher_width, len(example.teacher_logprobs)
    observed = example.teacher_ids[example.teacher_logprobs.positions]
    teacher, other = (np.full((count, width), np.log(0.4 / (width - 2))) for _ in range(2))
    for position, token in enumerate(observed.tolist()):
        second = (token + 1) % width
        teacher[position, [token, second]] = np.log([0.4, 0.2])
        other[position, [token, second]] = np.log([0.2, 0.4])
    logprobs, of_reference = (
        make_teacher_logprobs(one, example.teacher_logprobs.positions, observed, 2) for one in (teacher, other)
    )
    example = dataclasses.replace(example, teacher_logprobs=logprobs, shift_reference=of_reference)
    uniform = torch.zeros(case.states.shape, dtype=torch.float64), torch.zeros(case.weight.shape, dtype=torch.float64)
    cells = complete_cells("forward-kl", dataclasses.replace(case, example=example), "", uniform)
    target = cells.target_logits.double().exp()
    first = int(cells.cell_offsets[0])
    masses = np.array([*target[first : first + 2], float(cells.target_remainder_logits[0].double().exp())])
    expected = np.array([2 / width, 0.5 / width, (width - 2) / width])
    assert sorted(masses[:2].tolist()) == pytest.approx(sorted(expected[:2].tolist()), rel=1e-5)
    assert masses[2] == pytest.approx(expected[2], rel=1e-5)


@pytest.mark.parametrize("name", ["forward-kl", "byte-kl", "bpm"])
def test_targets_do_not_depend_on_chunks_passes_or_other_terms(name):
    case = shifted_case(name, 1, K=4)
    cells = term_of(name, case).build_cells(case.example)
    ce = LOSS_INSTANCES["ce"].build_cells(case.example, None)
    states, weight = frozen_head(case)
    first = with_frozen_student([cells], states, OutputHead(weight))[0]
    unshifted, second = with_frozen_student([ce, cells], states, OutputHead(weight))
    assert unshifted is ce
    assert torch.equal(first.target_logits, second.target_logits)
    assert torch.equal(first.target_remainder_logits, second.target_remainder_logits)
    joined = join_inputs([case.example, case.example])
    (twice,) = with_frozen_student(
        [term_of(name, case).build_cells(joined)], torch.cat([states, states]), OutputHead(weight)
    )
    torch.testing.assert_close(twice.target_logits, first.target_logits.repeat(2))


def test_cells_that_only_one_of_them_has_are_matched_by_their_tokens():
    case = shifted_case("bpm", 1, K=4)
    cells = term_of("bpm", case).build_cells(case.example)
    own, theirs = cells.teacher_probs, dataclasses.replace(cells, target_logits=None, target_remainder_logits=None)
    kept = torch.ones(len(own), dtype=torch.bool)
    kept[int(cells.cell_offsets[1]) - 1] = False  # the last cell of the first item
    items, entries = cells.cell_items[kept], kept[cells.entry_cells.long()]
    fewer = dataclasses.replace(
        theirs,
        cell_offsets=torch.cat([torch.zeros(1, dtype=torch.long), items.bincount(minlength=cells.num_items).cumsum(0)]),
        entry_offsets=torch.cat([torch.zeros(1, dtype=torch.long), torch.diff(cells.entry_offsets)[kept].cumsum(0)]),
        teacher_probs=own[kept],
        rows=cells.rows[entries],
        tokens=cells.tokens[entries],
    )
    expected = torch.where(kept, 0.0, (own.double() / MIN_REMAINDER).log())
    shifted = shifted_by_reference(theirs, fewer)
    torch.testing.assert_close(shifted.target_logits.double(), expected, rtol=1e-5, atol=1e-5)
    assert len(shifted_by_reference(fewer, theirs).target_logits) == int(kept.sum())
    assert float(shifted_by_reference(fewer, theirs).target_logits.abs().max()) < 1e-6
