"""Losses from sampled and rounded probabilities: 0 for equal models, otherwise those of full distributions."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import torch
from small_vocabularies import make_byte_partition, partition_vocabularies, random_spellings

from xtk.batches.top1_agreement import ByProjection, TeacherTopTokens
from xtk.cache.codec.logprob_packing import pack_logprobs
from xtk.cache.codec.logprob_unpacking import LogprobDecoder
from xtk.cache.teacher_logprobs import StoredLogprobs, TeacherLogprobs
from xtk.losses import LOSSES, SURROGATE_LOSSES
from xtk.losses.cells.loss_cells import LossCells
from xtk.losses.head import fused_loss
from xtk.losses.interface import LossInputs
from xtk.losses.spec import LossSpec
from xtk.losses.term import LossTerm
from xtk.models.output_head import OutputHead
from xtk.name_registry import load_registered
from xtk.projection.projection import SparseProjection

V, P, SAMPLES = 97, 1500, 16
SUPPORTS = {"top-k": (8, 0), "sample": (0, SAMPLES), "top-k+sample": (8, SAMPLES), "none": (0, 0)}
# Largest error from rounding: of divergences; of sums of absolute differences, which have a kink at their minimum.
ROUNDING = {"float32": (1e-5, 1e-5), "fine": (1e-3, 0.01), "standard": (4e-3, 0.04), "coarse": (0.015, 0.08)}
DIFFERENCE_LOSSES = ("tvd", "uld", "gold", "h-kl")
LOSS_INSTANCES = {
    name: load_registered(LOSSES, name, "loss")() for name in LOSSES if name not in ("ce", *SURROGATE_LOSSES)
}


@functools.cache
def logits_of(seed: int) -> torch.Tensor:
    """Return log-probabilities [P, V]; seed 0 is the teacher, other seeds are similar to it."""
    logits = np.random.default_rng(0).normal(0, 2, (P, V))
    if seed:
        logits = 0.7 * logits + np.random.default_rng(seed).normal(0, 1, (P, V))
    return torch.log_softmax(torch.from_numpy(logits), 1)


@functools.cache
def observed_ids() -> np.ndarray:
    """Return token ids, int32 [P + 1], sampled from the teacher."""
    rng, logprobs = np.random.default_rng(1), logits_of(0).exp().numpy()
    return np.array([0, *(rng.choice(V, p=row / row.sum()) for row in logprobs)], np.int32)


def stored_logprobs_of(top_k: int, samples: int, seed: int = 2) -> StoredLogprobs:
    """Return what a cache stores of the teacher."""
    rng, logprobs, ids = np.random.default_rng(seed), logits_of(0).numpy(), observed_ids()[1:]
    kept, sampled, remainders = [], [], []
    for row, observed in zip(logprobs, ids, strict=True):
        kept.append(sorted({int(observed), *np.argsort(-row)[:top_k].tolist()}))
        unlisted = np.exp(row)
        unlisted[kept[-1]] = 0
        remainders.append(unlisted.sum())
        counts = rng.multinomial(samples, unlisted / max(unlisted.sum(), 1e-30))
        sampled.append([(int(index), int(counts[index])) for index in np.flatnonzero(counts)])
    return StoredLogprobs(
        positions=np.arange(1, P + 1, dtype=np.int32),
        offsets=np.cumsum([0, *map(len, kept)]),
        ids=np.array([token for row in kept for token in row], np.int32),
        logprobs=np.array([logprobs[index, token] for index, row in enumerate(kept) for token in row], np.float32),
        sample_offsets=np.cumsum([0, *map(len, sampled)]) if samples else np.zeros(1, np.int64),
        sample_ids=np.array([token for row in sampled for token, _ in row], np.int32),
        sample_counts=np.array([count for row in sampled for _, count in row], np.int32),
        remainder_mass=np.array(remainders, np.float32),
        observed_logprobs=logprobs[np.arange(P), ids].astype(np.float32),
        entropy=-(np.exp(logprobs) * logprobs).sum(1).astype(np.float32),
        sample_logprobs=np.array(
            [logprobs[index, token] for index, row in enumerate(sampled) for token, _ in row], np.float32
        ),
    )


@functools.cache
def cached_logprobs(support: str, precision: str, *, sampled: bool) -> TeacherLogprobs:
    """Return the teacher's log-probabilities, as a cache returns them."""
    top_k, samples = SUPPORTS[support]
    stored, sample_set = stored_logprobs_of(top_k, samples), 0 if sampled and samples else None
    if precision == "float32":
        return StoredLogprobs.to_teacher_logprobs(stored, sample_set)
    ids, order, sets = observed_ids()[1:], np.arange(V, dtype=np.int32), int(samples > 0)
    tables, (packed,) = pack_logprobs([(stored, ids)], order, precision, sets, samples, True)
    return LogprobDecoder(tables, order, precision, sets, samples, True).decode_teacher_logprobs(
        packed, ids, stored.positions, sample_set
    )


@functools.cache
def comparison_spaces() -> dict[str, object]:
    spellings = random_spellings(np.random.default_rng(3), V)
    columns = SparseProjection.identity(V).columns
    byte_partition = make_byte_partition(*partition_vocabularies(spellings, spellings, V, V))
    return {"tokens": columns, "projection": columns, "pairs": columns, "spans": None, "bytes": byte_partition}


def example_of(teacher_logprobs: TeacherLogprobs) -> LossInputs:
    positions = np.arange(1, P + 1, dtype=np.int32)
    spans = np.column_stack([positions, positions + 1, positions, positions + 1])
    return LossInputs(observed_ids(), np.arange(P, dtype=np.int64), spans, observed_ids(), teacher_logprobs)


def make_loss_term(name: str) -> LossTerm:
    return LossTerm(
        LOSS_INSTANCES[name],
        LossSpec(name).make_divergence(),
        comparison_spaces()[LOSS_INSTANCES[name].comparison_space],
        has_sample_logprobs=True,
    )


def cells_of(name: str, support: str, precision: str) -> LossCells:
    loss_term = make_loss_term(name)
    return loss_term.build_cells(example_of(cached_logprobs(support, precision, sampled=loss_term.accepts_samples)))


def mean_value(cells: LossCells, student: int, chunk: int = 512) -> float:
    _, sums = fused_loss(logits_of(student), OutputHead(None), [cells], chunk)
    return float(sums[0]) / cells.num_items


def standard_error(support: str, student: int) -> float:
    """Return sqrt(mean of `m^2 Var(ln s) / n`) / sqrt(positions), the formula in the metrics reference."""
    top_k, samples = SUPPORTS[support]
    if not samples:
        return 0.0
    teacher_logprobs, student_logprobs = logits_of(0).numpy(), logits_of(student).numpy()
    variances = []
    for index, (row, observed) in enumerate(zip(teacher_logprobs, observed_ids()[1:], strict=True)):
        unlisted = np.exp(row)
        unlisted[[observed, *np.argsort(-row)[:top_k]]] = 0
        mass = unlisted.sum()
        mean = (unlisted * student_logprobs[index]).sum() / mass
        variances.append(mass**2 * ((unlisted * (student_logprobs[index] - mean) ** 2).sum() / mass) / samples)
    return float(np.sqrt(np.mean(variances) / P))


def accepts_support(name: str, support: str) -> bool:
    """Return whether a loss accepts a support, by the same rules as in training."""
    loss = LOSS_INSTANCES[name]
    if loss.requires == "observed":
        return True
    if support == "none" or (loss.requires == "ranks" and support == "sample"):
        return False
    return support != "sample" or make_loss_term(name).accepts_samples


@pytest.mark.slow
@pytest.mark.parametrize("precision", list(ROUNDING))
@pytest.mark.parametrize("support", list(SUPPORTS))
@pytest.mark.parametrize("name", list(LOSS_INSTANCES))
def test_equal_models_have_loss_0_for_every_support_and_precision(name, support, precision):
    if not accepts_support(name, support):
        return
    cells = cells_of(name, support, precision)
    found = mean_value(cells, 0)
    allowed = ROUNDING[precision][name in DIFFERENCE_LOSSES]
    if make_loss_term(name).accepts_samples:
        allowed += 4 * standard_error(support, 0)
    if name == "byte-kl" and cells.corrections is not None:
        # With four letters nearly every token is a prefix of others. The probability of a sampled token in one cell
        # with their suffixes is not known: 3 % of the correction.
        allowed += 0.03 * float(cells.corrections.abs().mean())
    assert abs(found) < allowed


@pytest.mark.parametrize("name", ["forward-kl", "boundary-kl", "p-kl", "byte-kl", "bpm", "escd"])
@pytest.mark.parametrize("support", ["sample", "top-k+sample"])
def test_values_of_sampled_supports_match_full_distributions(name, support):
    full = dataclasses.replace(stored_logprobs_of(V, 0), remainder_mass=np.zeros(P, np.float32))
    loss_term = make_loss_term(name)
    for student in (5, 6):
        expected = mean_value(
            loss_term.build_cells(example_of(StoredLogprobs.to_teacher_logprobs(full, None))), student
        )
        if name == "byte-kl":  # alternatives are computed from exact tokens only
            expected = pytest.approx(expected, rel=0.1)
        else:
            expected = pytest.approx(expected, abs=4 * standard_error(support, student))
        assert mean_value(cells_of(name, support, "float32"), student) == expected


@pytest.mark.parametrize("name", ["p-kl", "byte-kl", "bpm", "escd"])
def test_corrections_do_not_change_gradients(name):
    """The correction is a constant: gradients with and without it are bitwise equal."""
    cells = cells_of(name, "top-k+sample", "standard")
    gradients = []
    for variant in (cells, dataclasses.replace(cells, corrections=None)):
        logits = logits_of(5).clone().requires_grad_()
        total, _ = fused_loss(logits, OutputHead(None), [variant.to(torch.device("cpu"), 0.25)], 512)
        total.backward()
        gradients.append(logits.grad)
    assert float(cells.corrections.abs().max()) > 0.1
    assert torch.equal(*gradients)


@pytest.mark.parametrize("name", ["forward-kl", "p-kl", "byte-kl", "bpm", "escd"])
def test_values_do_not_depend_on_chunks_micro_batches_or_weights(name):
    cells = cells_of(name, "top-k+sample", "standard")
    expected = mean_value(cells, 5)
    assert mean_value(cells, 5, chunk=7) == pytest.approx(expected, rel=1e-9)
    parts = [cells.select_rows(start, start + 500, start) for start in range(0, P, 500)]
    sums = [
        float(fused_loss(logits_of(5)[first_row : first_row + 500], OutputHead(None), [part], 64)[1][0])
        for first_row, part in zip(range(0, P, 500), parts, strict=True)
    ]
    assert sum(sums) / cells.num_items == pytest.approx(expected, rel=1e-9)
    assert mean_value(cells.with_row_weights(np.full(P, 2.0), np.full(P, 0.5)), 5) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("precision", list(ROUNDING))
@pytest.mark.parametrize("support", ["top-k", "top-k+sample"])
def test_equal_models_agree_on_all_top_tokens_at_every_precision(support, precision):
    teacher_top = TeacherTopTokens.from_example(example_of(cached_logprobs(support, precision, sampled=True)))
    student_top = logits_of(0).argmax(1).numpy()
    same, count = teacher_top.count_agreements(
        student_top[teacher_top.student_rows], ByProjection(np.arange(V, dtype=np.int32))
    )
    assert same == count == P
    if precision == "float32":
        assert len(teacher_top.tokens) == P


def test_tokens_with_different_stored_logprobs_are_not_tied():
    """Tokens are tied if they are equal at the stored precision, not if they are close."""
    teacher_top = TeacherTopTokens.from_example(example_of(cached_logprobs("top-k", "fine", sampled=False)))
    logprobs = logits_of(0)
    rows = np.repeat(teacher_top.student_rows, np.diff(teacher_top.offsets))
    gaps = logprobs.max(1).values[rows] - logprobs[rows, teacher_top.tokens.astype(np.int64)]
    assert float(gaps.max()) < 0.1
    assert len(teacher_top.tokens) < 1.1 * P
