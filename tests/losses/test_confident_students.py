"""Values and gradients at the ends: confident students, flat teachers at low temperatures, no gradient at all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from xtk.losses import fused_head_and_loss
from xtk.losses.divergences import DIVERGENCES, ForwardKLDivergence, ReverseKLDivergence
from xtk.losses.fused_head_and_loss import fused_loss
from xtk.losses.loss_cells import LossCells
from xtk.models.output_head import OutputHead
from xtk.name_registry import load_registered

WEIGHTS = ((0.3, 0.7), (0.1, 0.2, 0.7), (1 / 3, 1 / 3, 1 / 3), (0.15, 0.25, 0.6), (1.0,))
TOKENS, CONFIDENT = 50, 7


def cells_of(weights, rows, divergence):
    """Return one item: a confident token shared by the cells, averaged over some rows, and a remainder of 0.05."""
    size = len(weights)
    probs = np.linspace(1, 2, size)
    found = LossCells.from_numpy(
        cell_offsets=np.array([0, size]),
        entry_offsets=np.arange(size + 1) * rows,
        teacher_probs=(probs / probs.sum() * 0.95).astype(np.float32),
        rows=np.tile(np.arange(rows), size).astype(np.int32),
        tokens=np.full(size * rows, CONFIDENT, np.int32),
        log_weights=np.repeat(np.log(np.array(weights)) - np.log(rows), rows).astype(np.float32),
        remainder_probs=np.array([0.05], np.float32),
    )
    return replace(found, divergence=load_registered(DIVERGENCES, divergence, "divergence")()).to(
        torch.device("cpu"), 1.0
    )


def expected(logits, weights, divergence):
    """Return loss and gradient in float64, where the remainder is the sum over the other tokens."""
    own = logits.detach().double().requires_grad_()
    logprobs = own.log_softmax(1)
    others = [token for token in range(TOKENS) if token != CONFIDENT]
    rows = np.log(len(logits))
    shares = torch.tensor(weights, dtype=torch.float64)
    of_token = logprobs[:, CONFIDENT].logsumexp(0) - rows
    cells = (shares / shares.sum()).log() + of_token
    remainder = logprobs[:, others].logsumexp((0, 1)) - rows
    probs = torch.linspace(1, 2, len(weights), dtype=torch.float64)
    teacher = torch.cat([probs / probs.sum() * 0.95, probs.new_tensor([0.05])])
    found = load_registered(DIVERGENCES, divergence, "divergence")().cell_values(
        teacher, torch.cat([cells, remainder[None]])
    )
    found.sum().backward()
    return float(found.sum().detach()), own.grad


@pytest.mark.parametrize("divergence", ["forward-kl", "reverse-kl", "jsd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_remainder_is_not_lost_in_the_rounding_of_a_confident_token(weights, rows, dtype, divergence):
    """With fp32 weights, the mass that their sum lacks or exceeds would be larger than a remainder of 1e-9."""
    cells = cells_of(weights, rows, divergence)
    for gap in (12, 18, 24):
        logits = torch.randn(rows, TOKENS, generator=torch.Generator().manual_seed(0))
        logits[:, CONFIDENT] = gap
        value, gradient = expected(logits, weights, divergence)
        # Another loss with a remainder and the same entries, before or after it, must change nothing.
        other = cells_of((1.0,), rows, divergence)
        of_other = expected(logits, (1.0,), divergence)[1]
        for terms, whole in (
            ([cells], gradient),
            ([cells, other], gradient + of_other),
            ([other, cells], gradient + of_other),
        ):
            own = logits.to(dtype, copy=True).requires_grad_()
            total, sums = fused_loss(own, OutputHead(None), terms, 8)
            assert float(sums[next(at for at, one in enumerate(terms) if one is cells)]) == pytest.approx(
                value, rel=1e-4
            )
            total.backward()
            # The confident token: terms of the other divergences cancel there.
            atol = 1e-8 if divergence == "forward-kl" else 1e-6
            torch.testing.assert_close(own.grad.double(), whole, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("divergence", [ForwardKLDivergence, ReverseKLDivergence])
def test_a_low_temperature_of_a_flat_teacher_is_finite(divergence):
    """Powers of 20 of probabilities of 1/2000 are less than the smallest float32."""
    size = 2000
    found = LossCells.from_numpy(
        cell_offsets=np.array([0, size]),
        entry_offsets=np.arange(size + 1),
        teacher_probs=np.full(size, 1 / size, np.float32),
        rows=np.zeros(size, np.int32),
        tokens=np.arange(size, dtype=np.int32),
        log_weights=np.zeros(size, np.float32),
    )
    cells = replace(found, divergence=divergence(temperature=0.05)).to(torch.device("cpu"), 1.0)
    logits = (torch.randn(1, size, generator=torch.Generator().manual_seed(0)) * 0.1).requires_grad_()
    total, _ = fused_loss(logits, OutputHead(None), [cells], 8)
    total.backward()
    own = logits.detach().double() / 0.05
    flat = torch.full_like(own, 1 / size)
    pair = (flat, own.softmax(1)) if divergence is ForwardKLDivergence else (own.softmax(1), flat)
    value = 0.05**2 * (pair[0] * (pair[0].log() - pair[1].log())).sum()
    assert float(total.detach()) == pytest.approx(float(value), rel=1e-4)
    assert logits.grad.isfinite().all()


def test_no_gradient_is_computed_where_none_is_asked_for(monkeypatch):
    """Held-out evaluations have trainable heads: two more products, and memory as large as the head."""
    counted = []
    real = fused_head_and_loss.logits_gradient
    monkeypatch.setattr(fused_head_and_loss, "logits_gradient", lambda *given: counted.append(1) or real(*given))
    head, states = torch.randn(TOKENS, 4, requires_grad=True), torch.randn(1, 4, requires_grad=True)
    cells = cells_of((1.0,), 1, "forward-kl")
    with torch.no_grad():
        without, _ = fused_loss(states, OutputHead(head), [cells], 8)
    assert not counted
    total, _ = fused_loss(states, OutputHead(head), [cells], 8)
    total.backward()
    assert counted
    assert float(without) == float(total.detach())
    assert head.grad.abs().sum() > 0
    assert states.grad.abs().sum() > 0
