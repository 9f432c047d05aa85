"""Losses in extreme cases: confident students, flat teachers at low temperatures, and no gradient."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from xtk.losses import head as fused_head_and_loss
from xtk.losses.cells.loss_cells import LossCells
from xtk.losses.divergences import DIVERGENCES, ForwardKLDivergence, ReverseKLDivergence
from xtk.losses.head import fused_loss
from xtk.models.output_head import OutputHead
from xtk.name_registry import load_registered

WEIGHTS = ((0.3, 0.7), (0.1, 0.2, 0.7), (1 / 3, 1 / 3, 1 / 3), (0.15, 0.25, 0.6), (1.0,))
TOKENS, CONFIDENT = 50, 7


def cells_of(weights, rows, divergence):
    """Return one item: a confident token shared by the cells, averaged over some rows, and a remainder of 0.05."""
    size = len(weights)
    probs = np.linspace(1, 2, size)
    cells = LossCells.from_numpy(
        cell_offsets=np.array([0, size]),
        entry_offsets=np.arange(size + 1) * rows,
        teacher_probs=(probs / probs.sum() * 0.95).astype(np.float32),
        rows=np.tile(np.arange(rows), size).astype(np.int32),
        tokens=np.full(size * rows, CONFIDENT, np.int32),
        log_weights=np.repeat(np.log(np.array(weights)) - np.log(rows), rows).astype(np.float32),
        remainder_probs=np.array([0.05], np.float32),
    )
    return replace(cells, divergence=load_registered(DIVERGENCES, divergence, "divergence")()).to(
        torch.device("cpu"), 1.0
    )


def expected(logits, weights, divergence):
    """Return loss and gradient in float64, where the remainder is the sum over the other tokens."""
    leaf = logits.detach().double().requires_grad_()
    logprobs = leaf.log_softmax(1)
    others = [token for token in range(TOKENS) if token != CONFIDENT]
    rows = np.log(len(logits))
    shares = torch.tensor(weights, dtype=torch.float64)
    token_logprob = logprobs[:, CONFIDENT].logsumexp(0) - rows
    cells = (shares / shares.sum()).log() + token_logprob
    remainder = logprobs[:, others].logsumexp((0, 1)) - rows
    probs = torch.linspace(1, 2, len(weights), dtype=torch.float64)
    teacher = torch.cat([probs / probs.sum() * 0.95, probs.new_tensor([0.05])])
    cell_values = load_registered(DIVERGENCES, divergence, "divergence")().cell_values(
        teacher, torch.cat([cells, remainder[None]])
    )
    cell_values.sum().backward()
    return float(cell_values.sum().detach()), leaf.grad


@pytest.mark.slow
@pytest.mark.parametrize("divergence", ["forward-kl", "reverse-kl", "jsd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_remainder_of_a_confident_student_is_not_lost_to_rounding(weights, rows, dtype, divergence):
    """The rounding error of the sum of fp32 weights is larger than a remainder of 1e-9."""
    cells = cells_of(weights, rows, divergence)
    for gap in (12, 18, 24):
        logits = torch.randn(rows, TOKENS, generator=torch.Generator().manual_seed(0))
        logits[:, CONFIDENT] = gap
        value, gradient = expected(logits, weights, divergence)
        # Another loss with a remainder and the same entries, before or after it, must change nothing.
        other_cells = cells_of((1.0,), rows, divergence)
        other_gradient = expected(logits, (1.0,), divergence)[1]
        for terms, total_gradient in (
            ([cells], gradient),
            ([cells, other_cells], gradient + other_gradient),
            ([other_cells, cells], gradient + other_gradient),
        ):
            leaf = logits.to(dtype, copy=True).requires_grad_()
            total, sums = fused_loss(leaf, OutputHead(None), terms, 8)
            assert float(sums[next(index for index, term in enumerate(terms) if term is cells)]) == pytest.approx(
                value, rel=1e-4
            )
            total.backward()
            # At the confident token, terms of the other divergences cancel.
            atol = 1e-8 if divergence == "forward-kl" else 1e-6
            torch.testing.assert_close(leaf.grad.double(), total_gradient, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("divergence", [ForwardKLDivergence, ReverseKLDivergence])
def test_low_temperature_with_a_flat_teacher_is_finite(divergence):
    """(1/2000)^20 is below the smallest float32."""
    size = 2000
    one_item = LossCells.from_numpy(
        cell_offsets=np.array([0, size]),
        entry_offsets=np.arange(size + 1),
        teacher_probs=np.full(size, 1 / size, np.float32),
        rows=np.zeros(size, np.int32),
        tokens=np.arange(size, dtype=np.int32),
        log_weights=np.zeros(size, np.float32),
    )
    cells = replace(one_item, divergence=divergence(temperature=0.05)).to(torch.device("cpu"), 1.0)
    logits = (torch.randn(1, size, generator=torch.Generator().manual_seed(0)) * 0.1).requires_grad_()
    total, _ = fused_loss(logits, OutputHead(None), [cells], 8)
    total.backward()
    scaled = logits.detach().double() / 0.05
    flat = torch.full_like(scaled, 1 / size)
    pair = (flat, scaled.softmax(1)) if divergence is ForwardKLDivergence else (scaled.softmax(1), flat)
    value = 0.05**2 * (pair[0] * (pair[0].log() - pair[1].log())).sum()
    assert float(total.detach()) == pytest.approx(float(value), rel=1e-4)
    assert logits.grad.isfinite().all()


def test_no_gradient_is_computed_without_autograd(monkeypatch):
    """Evaluation has trainable heads too: a gradient would cost two matrix products, and memory of the head's size."""
    calls = []
    original = fused_head_and_loss.logits_gradient
    monkeypatch.setattr(
        fused_head_and_loss, "logits_gradient", lambda *arguments: calls.append(1) or original(*arguments)
    )
    head, states = torch.randn(TOKENS, 4, requires_grad=True), torch.randn(1, 4, requires_grad=True)
    cells = cells_of((1.0,), 1, "forward-kl")
    with torch.no_grad():
        without_gradient, _ = fused_loss(states, OutputHead(head), [cells], 8)
    assert not calls
    total, _ = fused_loss(states, OutputHead(head), [cells], 8)
    total.backward()
    assert calls
    assert float(without_gradient) == float(total.detach())
    assert head.grad.abs().sum() > 0
    assert states.grad.abs().sum() > 0
