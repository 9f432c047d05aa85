"""Reference implementation of losses and gradients, from a model's full logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from xtk.losses.cells.loss_cells import LossCells
from xtk.losses.divergences import ForwardKLDivergence, ReverseKLDivergence
from xtk.models.backbone_with_head import BackboneWithHead
from xtk.training.student_with_losses import StudentWithLoss

LENGTH = 12


def make_cells(rows: int, width: int, *, reverse: bool = False) -> LossCells:
    """Return cells with three tokens and a remainder for each row."""
    rng = np.random.default_rng(0)
    return LossCells.from_numpy(
        cell_offsets=np.arange(0, 3 * rows + 1, 3),
        entry_offsets=np.arange(3 * rows + 1),
        teacher_probs=rng.dirichlet(np.ones(4), rows)[:, :3].astype(np.float32).reshape(-1),
        rows=np.repeat(np.arange(rows, dtype=np.int32), 3),
        tokens=np.concatenate([rng.choice(width, 3, replace=False) for _ in range(rows)]).astype(np.int32),
        log_weights=np.zeros(3 * rows, np.float32),
        divergence=ReverseKLDivergence() if reverse else ForwardKLDivergence(),
    )


def full_logits_loss(cells: LossCells, logits: Tensor) -> Tensor:
    """Return the sum of the losses of all rows, computed from full logits."""
    probs = torch.softmax(logits, 1)[cells.rows.reshape(-1, 3), cells.tokens.reshape(-1, 3)]
    teacher_probs = cells.teacher_probs.to(probs.dtype).reshape(-1, 3)
    student, teacher = (torch.cat([part, 1 - part.sum(1, keepdim=True)], 1) for part in (probs, teacher_probs))
    if isinstance(cells.divergence, ReverseKLDivergence):
        return (student * (student / teacher).log()).sum()
    return (teacher * (teacher / student).log()).sum()


def gradients_of(model: Any, loss: Tensor) -> dict[str, Tensor]:
    """Return the gradients of all parameters that have one, by parameter name."""
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def make_inputs(width: int, length: int) -> tuple[Tensor, Tensor, list[LossCells]]:
    """Return token ids [2, length], positions of their hidden states, and two losses."""
    ids = torch.randint(3, width, (2, length), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(2 * length)[torch.arange(2 * length) % length != length - 1]
    return ids, positions, [make_cells(len(positions), width, reverse=reverse) for reverse in (False, True)]


def fused_gradients(backbone: BackboneWithHead, length: int = LENGTH) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and the gradients of the training code, with fused head and loss."""
    ids, positions, cells = make_inputs(backbone.model.get_output_embeddings().weight.shape[0], length)
    terms = [cell.to(torch.device("cpu"), scale) for cell, scale in zip(cells, (0.5, 0.25), strict=True)]
    loss, _ = StudentWithLoss(backbone)(ids, positions.numpy(), terms)
    return loss.detach(), gradients_of(backbone.model, loss)


def full_logits_gradients(model: Any, length: int = LENGTH) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and the gradients of the reference, from full logits."""
    ids, positions, cells = make_inputs(model.get_output_embeddings().weight.shape[0], length)
    logits = model(input_ids=ids).logits.flatten(0, 1)[positions]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    loss = 0.5 * full_logits_loss(cells[0], logits) + 0.25 * full_logits_loss(cells[1], logits)
    return loss.detach(), gradients_of(model, loss)


def assert_equals_full_logits(model: Any, tolerance: float, length: int = LENGTH) -> dict[str, Tensor]:
    """Assert that loss and gradients equal those of the full logits; return the gradients."""
    loss, gradients = fused_gradients(BackboneWithHead(model), length)
    expected_loss, expected_gradients = full_logits_gradients(model, length)
    torch.testing.assert_close(loss, expected_loss, rtol=tolerance, atol=tolerance)
    assert expected_gradients
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        scale = max(float(gradient.abs().max()), 1e-3)
        torch.testing.assert_close(gradients[name], gradient, rtol=tolerance, atol=tolerance * scale, msg=name)
    return gradients
