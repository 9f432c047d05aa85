"""Shifted targets: the frozen student's probabilities of cells, times the teacher's, divided by its reference's.

The target over the cells of an item and its remainder is

    p(c) = s0(c) T(c) / R(c) / (sum over c of the same)

`s0` is the student before the run, `T` the teacher and `R` a reference of its family. With `R = T` it is the frozen
student. Probabilities of `T` and `R` below `MIN_REMAINDER`, the resolution of fp32, count as that. After ShiftMOPD,
arXiv 2610.10460, which adds `ln T - ln R` to the logits of a student with the teacher's tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xtk.cache.teacher_logprobs import MIN_REMAINDER
from xtk.losses.cells.loss_cells import LossCells
from xtk.losses.head import fused_loss
from xtk.models.output_head import OutputHead


def shifted_by_reference(cells: LossCells, of_reference: LossCells) -> LossCells:
    """Return cells whose target's logits are `ln T(c) - ln R(c)`; those of the frozen student are added later.

    The cells of the reference, from a distribution over the same tokens, may lack some without probability, or have
    more.
    """
    reference_probs = of_reference.teacher_probs
    if not _have_equal_entries(cells, of_reference):
        reference_probs = _matched_probs(cells, of_reference)
    return replace(
        cells,
        target_logits=_log_ratios(cells.teacher_probs, reference_probs),
        target_remainder_logits=_log_ratios(cells.remainder_probs, of_reference.remainder_probs),
    )


@torch.no_grad()
def with_frozen_student(terms: Sequence[LossCells], states: Tensor, head: OutputHead) -> list[LossCells]:
    """Return terms in which the shifted targets are complete; terms without a shift stay as they are.

    `states`: [N, H], the frozen student's hidden states at the rows of the terms.
    """
    shifted = []
    complete = [*terms]
    for number, term in enumerate(terms):
        if term.target_logits is not None and term.target_remainder_logits is not None:
            logits, remainder_logits = term.target_logits.clone(), term.target_remainder_logits.clone()
            complete[number] = replace(term, target_logits=logits, target_remainder_logits=remainder_logits)
            shifted.append(replace(complete[number], reads_frozen_student=True))
    fused_loss(states, head, shifted)  # adds to the copies in place
    return complete


def _log_ratios(probs: Tensor, reference_probs: Tensor) -> Tensor:
    logarithms = [some.double().clamp_min(MIN_REMAINDER).log() for some in (probs, reference_probs)]
    return (logarithms[0] - logarithms[1]).float()


def _have_equal_entries(cells: LossCells, other: LossCells) -> bool:
    return torch.equal(cells.cell_offsets, other.cell_offsets) and torch.equal(_cell_keys(cells), _cell_keys(other))


def _matched_probs(cells: LossCells, other: LossCells) -> Tensor:
    """Return [cells], the other probabilities of the same cells of the same items; 0 where there is no such cell."""
    keys, others = (_cell_keys(some).numpy() for some in (cells, other))
    order = np.argsort(others, kind="stable")
    places = np.minimum(np.searchsorted(others[order], keys), max(len(others) - 1, 0))
    probs = np.zeros(len(keys), np.float32)
    if len(others):
        chosen: NDArray[np.int64] = order[places]
        probs = np.where(others[chosen] == keys, other.teacher_probs.numpy()[chosen], np.float32(0))
    return torch.from_numpy(probs)


def _cell_keys(cells: LossCells) -> Tensor:
    """int64 [cells], item and first token (or first member) of each cell."""
    firsts = getattr(cells, "first_members", None)
    if firsts is None:
        starts = cells.entry_offsets[:-1]
        has_entries = torch.diff(cells.entry_offsets) > 0
        firsts = torch.full((len(starts),), -1, dtype=torch.int64)
        firsts[has_entries] = cells.tokens[starts[has_entries]].long()
    return (cells.cell_items << 32) + firsts
