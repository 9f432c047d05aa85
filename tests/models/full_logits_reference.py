"""The slow twin of a model that is cut before its head: losses on its whole logits, from the definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from xtk.losses.divergences import ForwardKLDivergence, ReverseKLDivergence
from xtk.losses.loss_cells import LossCells
from xtk.models.backbone_with_head import BackboneWithHead
from xtk.training.student_with_losses import StudentWithLoss

LENGTH = 12


def cells_of(rows: int, width: int, *, reverse: bool = False) -> LossCells:
    """Of each row three tokens and what is left."""
    draw = np.random.default_rng(0)
    return LossCells.from_numpy(
        cell_offsets=np.arange(0, 3 * rows + 1, 3),
        entry_offsets=np.arange(3 * rows + 1),
        teacher_probs=draw.dirichlet(np.ones(4), rows)[:, :3].astype(np.float32).reshape(-1),
        rows=np.repeat(np.arange(rows, dtype=np.int32), 3),
        tokens=np.concatenate([draw.choice(width, 3, replace=False) for _ in range(rows)]).astype(np.int32),
        log_weights=np.zeros(3 * rows, np.float32),
        divergence=ReverseKLDivergence() if reverse else ForwardKLDivergence(),
    )


def plain(cells: LossCells, logits: Tensor) -> Tensor:
    """The sum of the losses of all rows."""
    probs = torch.softmax(logits, 1)[cells.rows.reshape(-1, 3), cells.tokens.reshape(-1, 3)]
    said = cells.teacher_probs.to(probs.dtype).reshape(-1, 3)
    s, t = (torch.cat([some, 1 - some.sum(1, keepdim=True)], 1) for some in (probs, said))
    if isinstance(cells.divergence, ReverseKLDivergence):
        return (s * (s / t).log()).sum()
    return (t * (t / s).log()).sum()


def gradients_of(model: Any, loss: Tensor) -> dict[str, Tensor]:
    """The gradients of all parameters that have one, by their names."""
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def material_of(width: int, length: int) -> tuple[Tensor, Tensor, list[LossCells]]:
    """Token ids [2, length], places of their hidden states, and two losses of them."""
    ids = torch.randint(3, width, (2, length), generator=torch.Generator().manual_seed(1))
    places = torch.arange(2 * length)[torch.arange(2 * length) % length != length - 1]
    return ids, places, [cells_of(len(places), width, reverse=reverse) for reverse in (False, True)]


def gradients_of_cut(cut: BackboneWithHead, length: int = LENGTH) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradients that training gives."""
    ids, places, cells = material_of(cut.model.get_output_embeddings().weight.shape[0], length)
    terms = [one.to(torch.device("cpu"), scale) for one, scale in zip(cells, (0.5, 0.25), strict=True)]
    found, _ = StudentWithLoss(cut)(ids, places.numpy(), terms)
    return found.detach(), gradients_of(cut.model, found)


def gradients_of_whole(model: Any, length: int = LENGTH) -> tuple[Tensor, dict[str, Tensor]]:
    """The same from the whole model's logits."""
    ids, places, cells = material_of(model.get_output_embeddings().weight.shape[0], length)
    logits = model(input_ids=ids).logits.flatten(0, 1)[places]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    expected = 0.5 * plain(cells[0], logits) + 0.25 * plain(cells[1], logits)
    return expected.detach(), gradients_of(model, expected)


def assert_as_the_whole_model(model: Any, tolerance: float, length: int = LENGTH) -> dict[str, Tensor]:
    """Cut, a model has the loss and the gradients that its whole logits give; returns the gradients."""
    found, ours = gradients_of_cut(BackboneWithHead(model), length)
    expected, theirs = gradients_of_whole(model, length)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert theirs
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        scale = max(float(gradient.abs().max()), 1e-3)
        torch.testing.assert_close(ours[name], gradient, rtol=tolerance, atol=tolerance * scale, msg=name)
    return ours
