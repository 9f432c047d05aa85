"""From hidden states to losses and gradients, chunk by chunk.

All losses read the student's log-probabilities at a few entries (row, token) a row. So of a chunk of rows
nothing is kept but those: one matrix product gives its logits, a small autograd graph over the gathered
log-probabilities gives each entry's gradient, and

    d loss / d logits[n, v] = sum of the gradients of the entries at (n, v) - softmax[n, v] * sum of row n's

is multiplied into the gradients of the hidden states and of the head at once. Nothing of size `[N, V]` lives
longer than its chunk, and no product is computed twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xtk.losses.cells import Cells

# 1 - q in fp32 is exact to about 6e-8; below this the other cell is called empty.
SMALLEST_REST = 1e-7


@dataclass(frozen=True)
class Term:
    """One loss of the sum: `Cells` as tensors, the structure on the CPU, the numbers on a device.

    Attributes:
        first_rows: [C], the first row of each item, rising.
        scale: what each item is multiplied with: the weight over the global count of items.
    """

    cell_offsets: Tensor
    entry_offsets: Tensor
    first_rows: Tensor
    teacher_probs: Tensor
    rows: Tensor
    tokens: Tensor
    log_weights: Tensor
    scale: float

    @classmethod
    def of(cls, cells: Cells, scale: float, device: torch.device) -> Term:
        """Move cells to a device."""
        entries = cells.entry_offsets[cells.cell_offsets[:-1]]
        # An item without a cell (nothing of the support can be reached) has no row; it goes with its neighbour.
        rows = np.append(cells.rows, cells.rows[-1] if len(cells.rows) else 0)
        return cls(
            cell_offsets=torch.from_numpy(cells.cell_offsets),
            entry_offsets=torch.from_numpy(cells.entry_offsets),
            first_rows=torch.from_numpy(rows[entries]),
            teacher_probs=torch.from_numpy(cells.teacher_probs).to(device),
            rows=torch.from_numpy(cells.rows).to(device),
            tokens=torch.from_numpy(cells.tokens).to(device),
            log_weights=torch.from_numpy(cells.log_weights).to(device),
            scale=scale,
        )


def chunk_starts(rows: int, size: int, terms: Sequence[Term]) -> list[int]:
    """Return where chunks of about `size` rows begin, so that no item straddles two of them."""
    if rows == 0:
        return [0]
    free = np.ones(rows + 1, np.bool_)
    for term in terms:
        last = _last_rows(term)
        first = term.first_rows.numpy()
        for start, stop in zip(first[last > first], last[last > first], strict=True):
            free[start + 1 : stop + 1] = False
    starts = [0]
    while starts[-1] < rows:
        stop = min(starts[-1] + size, rows)
        while not free[stop] and stop > starts[-1] + 1:
            stop -= 1
        if not free[stop]:  # one item is larger than a chunk
            stop = starts[-1] + size
            while stop < rows and not free[stop]:
                stop += 1
        starts.append(min(stop, rows))
    return starts


def _last_rows(term: Term) -> Any:
    ends = term.entry_offsets[term.cell_offsets[1:]].numpy()
    rows = term.rows.cpu().numpy()
    return np.where(ends > 0, np.append(rows, 0)[np.maximum(ends - 1, 0)], 0)


class FusedLoss(torch.autograd.Function):
    """The sum of all terms, with gradients computed on the way forward."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor | None, bias: Tensor | None, terms: Sequence[Term], chunk: int
    ) -> Tensor:
        """Return the unscaled sum of each term, [terms]; `backward` is of the scaled total."""
        with_gradient = any(ctx.needs_input_grad[:3])
        compute = _compute_dtype(states, weight)
        matrix = None if weight is None else weight.detach().to(compute)
        offset = None if bias is None else bias.detach().to(compute)
        wide = torch.float64 if compute == torch.float64 else torch.float32
        d_states = torch.zeros_like(states, dtype=wide if matrix is None else compute) if with_gradient else None
        d_weight = torch.zeros_like(weight, dtype=wide) if with_gradient and weight is not None else None
        d_bias = torch.zeros_like(bias, dtype=wide) if with_gradient and bias is not None else None
        sums = torch.zeros(len(terms), dtype=wide, device=states.device)
        starts = chunk_starts(len(states), chunk, terms)
        for start, stop in itertools.pairwise(starts):
            rows = states[start:stop].detach().to(compute)
            logits = rows if matrix is None else torch.nn.functional.linear(rows, matrix, offset)
            logits = _wide(logits) if logits is not rows else _wide(logits).clone()
            parts = [_slice(term, start, stop) for term in terms]
            values, d_logits = _chunk_loss(logits, parts, with_gradient)
            sums += values
            if d_states is None or d_logits is None:
                continue
            if matrix is None:
                d_states[start:stop] = d_logits
                continue
            small = d_logits.to(compute)
            torch.mm(small, matrix, out=d_states[start:stop])
            if d_weight is not None:
                if compute == wide:
                    d_weight.addmm_(small.T, rows)
                else:
                    d_weight += small.T @ rows
            if d_bias is not None:
                d_bias += d_logits.sum(0)
        if with_gradient:
            ctx.save_for_backward(d_states, d_weight, d_bias)
            ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (states, weight, bias)]
        return sums

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Any, ...]:
        """Hand out the gradients of the scaled total, times the gradient that comes in at the first term."""
        (factor,) = outputs
        gradients = [
            None if tensor is None else (tensor * factor[0]).to(dtype)
            for tensor, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*gradients, None, None)


def fused_loss(
    states: Tensor, weight: Tensor | None, bias: Tensor | None, terms: Sequence[Term], chunk: int
) -> tuple[Tensor, Tensor]:
    """Compute the scaled total and each term's sum over items.

    Args:
        states: [N, H], rows of hidden states (or of logits [N, V], if `weight` is None).
        weight: [V, H], the head.
        bias: [V] or None.
        terms: the losses.
        chunk: rows whose logits exist at one time.

    Returns:
        total: a scalar, `sum over terms of scale * sum over items`, with a gradient.
        sums: [terms], detached, each term's unscaled sum over its items.
    """
    sums = FusedLoss.apply(states, weight, bias, terms, chunk)  # type: ignore[no-untyped-call]
    scales = torch.tensor([term.scale for term in terms], device=states.device, dtype=sums.dtype)
    detached = sums.detach()
    # The value is the scaled total. The gradient comes in through the first element alone, where
    # FusedLoss expects it: its saved gradients are already those of the total.
    total = (detached * scales).sum() + (sums[0] - detached[0])
    return total, detached


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _compute_dtype(states: Tensor, weight: Tensor | None) -> torch.dtype:
    if weight is None:
        return states.dtype
    if torch.is_autocast_enabled(states.device.type):
        return torch.get_autocast_dtype(states.device.type)
    return weight.dtype


@dataclass
class _Part:
    """The items of one term whose rows lie in one chunk; offsets and rows begin at 0."""

    entry_cells: Tensor
    cell_items: Tensor
    teacher_probs: Tensor
    rows: Tensor
    tokens: Tensor
    log_weights: Tensor
    items: int
    scale: float


def _slice(term: Term, start: int, stop: int) -> _Part:
    low, high = torch.searchsorted(term.first_rows, torch.tensor([start, stop])).tolist()
    cell_offsets = term.cell_offsets[low : high + 1]
    cells = slice(int(cell_offsets[0]), int(cell_offsets[-1]))
    entry_offsets = term.entry_offsets[cells.start : cells.stop + 1]
    entries = slice(int(entry_offsets[0]), int(entry_offsets[-1]))
    device = term.rows.device
    return _Part(
        entry_cells=torch.arange(len(entry_offsets) - 1).repeat_interleave(entry_offsets.diff()).to(device),
        cell_items=torch.arange(high - low).repeat_interleave(cell_offsets.diff()).to(device),
        teacher_probs=term.teacher_probs[cells],
        rows=term.rows[entries] - start,
        tokens=term.tokens[entries],
        log_weights=term.log_weights[entries],
        items=high - low,
        scale=term.scale,
    )


def _chunk_loss(logits: Tensor, parts: list[_Part], with_gradient: bool) -> tuple[Tensor, Tensor | None]:
    """Return each term's sum [terms] and, in the memory of the logits, the gradient of the scaled total."""
    width = logits.shape[1]
    rows = torch.cat([part.rows for part in parts])
    places = rows * width + torch.cat([part.tokens for part in parts])
    gathered = logits.view(-1).index_select(0, places)
    highest = logits.amax(1, keepdim=True)
    exponentials = logits.sub_(highest).exp_()
    normaliser = exponentials.sum(1)
    logprobs = gathered - (highest[:, 0] + normaliser.log())[rows]
    with torch.enable_grad():
        leaf = logprobs.detach().requires_grad_(with_gradient)
        sums, first = [], 0
        for part in parts:
            sums.append(divergence(leaf[first : first + len(part.tokens)], part))
            first += len(part.tokens)
        values = torch.stack(sums)
        if not with_gradient:
            return values.detach(), None
        total = sum((value * part.scale for value, part in zip(sums, parts, strict=True)), logits.new_zeros(()))
        gradient = torch.autograd.grad(total, leaf)[0] if len(leaf) else leaf.detach()
    of_rows = logits.new_zeros(len(logits)).index_add_(0, rows, gradient)
    d_logits = exponentials.mul_((-of_rows / normaliser)[:, None])
    d_logits.view(-1).index_add_(0, places, gradient)
    return values.detach(), d_logits


def divergence(logprobs: Tensor, part: _Part) -> Tensor:
    """Return the sum over items of `KL(teacher's cells and rest | student's cells and rest)`.

    Args:
        logprobs: [entries], the student's log-probabilities.
        part: the items they belong to.

    Returns:
        A scalar, not negative but for rounding.
    """
    probs = part.teacher_probs.to(logprobs.dtype)
    cells, items = len(probs), part.items
    student = _log_sum(logprobs + part.log_weights, part.entry_cells, cells)
    known_teacher = probs.new_zeros(items).index_add_(0, part.cell_items, probs)
    known_student = probs.new_zeros(items).index_add(0, part.cell_items, student.exp())
    rest_teacher = (1 - known_teacher).clamp_min(0)
    rest_student = (1 - known_student).clamp_min(SMALLEST_REST)
    inside = torch.xlogy(probs, probs) - probs * student
    # A rest below the rounding of fp32 is no rest: cross-entropy has none.
    outside = torch.where(
        rest_teacher > SMALLEST_REST, torch.xlogy(rest_teacher, rest_teacher) - rest_teacher * rest_student.log(), 0
    )
    return inside.sum() + outside.sum()


def _log_sum(values: Tensor, groups: Tensor, count: int) -> Tensor:
    """Return log-sum-exp [count] of values in groups, none of which is empty."""
    highest = values.new_full((count,), -torch.inf)
    highest = highest.scatter_reduce(0, groups, values.detach(), "amax").detach()
    sums = values.new_zeros(count).index_add(0, groups, (values - highest[groups]).exp())
    return sums.log() + highest
