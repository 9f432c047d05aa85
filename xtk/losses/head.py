"""From hidden states to losses and gradients, chunk by chunk.

All losses read the student at a few places of a row's logits: the log-probabilities of *entries* (row, token), and the
*rest* of a row, what its entries leave over. Each is the log of a part of the softmax, and the gradient of such a log
with respect to the row's logits is the softmax restricted to that part, minus the whole softmax. So of a chunk of rows
one matrix product gives the logits, a small autograd graph over entries and rests gives their gradients `g`, and

    d loss / d logits[n, v] = sum over parts of row n of g * (softmax within the part - softmax)[n, v]

is multiplied into the gradients of the hidden states and of the head at once. Nothing of size `[N, V]` lives longer
than its chunk, and no product is computed twice. The rest is summed over what is left, never taken as one minus the
entries: a student that is sure, and wrong, has a rest of 1e-9, and fp32 does not know 1 - 1e-9.
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
from xtk.models.head import Head, LogitsOfRows

# Probabilities from stored fp32 log-probabilities sum to 1 within this; a smaller rest of the teacher is none.
SMALLEST_REST = 1e-6
TINY = 1e-37


@dataclass(frozen=True)
class Term:
    """One loss of the sum: the structure of its `Cells` on the CPU, their numbers on a device.

    Attributes:
        first_rows: [C], the first row of each item, rising.
        row_counts: [C], how many rows are averaged; 0 for an item without cells.
        rest_probs: [C], the teacher's probability of the other cell; 0 where there is none to speak of.
        scale: what each item is multiplied with: the weight over the global count of items.
    """

    cell_offsets: Tensor
    entry_offsets: Tensor
    first_rows: Tensor
    row_counts: Tensor
    rest_probs: Tensor
    teacher_probs: Tensor
    rows: Tensor
    tokens: Tensor
    log_weights: Tensor
    scale: float

    @classmethod
    def of(cls, cells: Cells, scale: float, device: torch.device) -> Term:
        """Move cells to a device."""
        firsts = cells.entry_offsets[cells.cell_offsets[:-1]]
        stops = cells.entry_offsets[cells.cell_offsets[1:]]
        # An item without a cell (nothing of the support can be reached) has no row; it goes with its neighbour.
        rows = np.append(cells.rows, cells.rows[-1] if len(cells.rows) else 0)
        counts = np.where(stops > firsts, rows[stops - 1] - rows[firsts] + 1, 0)
        items = np.repeat(np.arange(cells.items), np.diff(cells.cell_offsets))
        rests = 1 - np.bincount(items, cells.teacher_probs.astype(np.float64), minlength=cells.items)
        rests = np.where((rests > SMALLEST_REST) & (counts > 0), rests, 0)
        return cls(
            cell_offsets=torch.from_numpy(cells.cell_offsets),
            entry_offsets=torch.from_numpy(cells.entry_offsets),
            first_rows=torch.from_numpy(rows[firsts]),
            row_counts=torch.from_numpy(counts),
            rest_probs=torch.from_numpy(rests),
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
        several = term.row_counts > 1
        for start, count in zip(term.first_rows[several].tolist(), term.row_counts[several].tolist(), strict=True):
            free[start + 1 : start + count] = False
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
        starts = chunk_starts(len(states), chunk, terms)
        longest = max((stop - start for start, stop in itertools.pairwise(starts)), default=0)
        logits_of = LogitsOfRows(Head(matrix, bias), states, longest, compute)
        wide = torch.float64 if compute == torch.float64 else torch.float32
        d_states = torch.zeros_like(states, dtype=wide if matrix is None else compute) if with_gradient else None
        d_weight = torch.zeros_like(weight, dtype=wide) if with_gradient and weight is not None else None
        d_bias = torch.zeros_like(bias, dtype=wide) if with_gradient and bias is not None else None
        sums = torch.zeros(len(terms), dtype=wide, device=states.device)
        for start, stop in itertools.pairwise(starts):
            rows = states[start:stop].detach().to(compute)
            logits = logits_of(rows)
            parts = [_slice(term, start, stop, logits) for term in terms]
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


def _compute_dtype(states: Tensor, weight: Tensor | None) -> torch.dtype:
    if weight is None:
        return states.dtype
    if torch.is_autocast_enabled(states.device.type):
        return torch.get_autocast_dtype(states.device.type)
    return weight.dtype


@dataclass
class _Part:
    """The items of one term whose rows lie in one chunk; offsets and rows begin at 0.

    `places` are flat indices into the chunk's logits. `weights` are those of the entries within their own row, without
    the averaging over an item's rows. Rests are listed for items whose teacher has one: their rows, the item of each
    (counted among these items), the log of the share of a row.
    """

    entry_cells: Tensor
    teacher_probs: Tensor
    places: Tensor
    rows: Tensor
    log_weights: Tensor
    weights: Tensor
    rest_probs: Tensor
    rest_rows: Tensor
    rest_items: Tensor
    rest_log_shares: Tensor
    scale: float


def _slice(term: Term, start: int, stop: int, logits: Tensor) -> _Part:
    low, high = torch.searchsorted(term.first_rows, torch.tensor([start, stop])).tolist()
    cell_offsets = term.cell_offsets[low : high + 1]
    cells = slice(int(cell_offsets[0]), int(cell_offsets[-1]))
    entry_offsets = term.entry_offsets[cells.start : cells.stop + 1]
    entries = slice(int(entry_offsets[0]), int(entry_offsets[-1]))
    counts = term.row_counts[low:high]
    entries_of_items = term.entry_offsets[cell_offsets].diff()
    has_rest = term.rest_probs[low:high] > 0
    rest_counts = counts[has_rest]
    rest_items = torch.arange(len(rest_counts)).repeat_interleave(rest_counts)
    within = torch.arange(len(rest_items)) - (rest_counts.cumsum(0) - rest_counts).repeat_interleave(rest_counts)
    device, rows = term.rows.device, term.rows[entries] - start
    log_weights = term.log_weights[entries].to(logits.dtype)
    row_counts = counts.repeat_interleave(entries_of_items).to(device)
    return _Part(
        entry_cells=torch.arange(len(entry_offsets) - 1).repeat_interleave(entry_offsets.diff()).to(device),
        teacher_probs=term.teacher_probs[cells],
        places=rows * logits.shape[1] + term.tokens[entries],
        rows=rows,
        log_weights=log_weights,
        weights=log_weights.exp() * row_counts,
        rest_probs=term.rest_probs[low:high][has_rest].to(device),
        rest_rows=(term.first_rows[low:high][has_rest][rest_items] + within - start).to(device),
        rest_items=rest_items.to(device),
        rest_log_shares=-rest_counts[rest_items].double().log().to(device),
        scale=term.scale,
    )


def _chunk_loss(logits: Tensor, parts: list[_Part], with_gradient: bool) -> tuple[Tensor, Tensor | None]:
    """Return each term's sum [terms] and, in the memory of the logits, the gradient of the scaled total."""
    gathered = logits.view(-1).index_select(0, torch.cat([part.places for part in parts]))
    highest = logits.amax(1, keepdim=True)
    exponentials = logits.sub_(highest).exp_()
    normaliser = exponentials.sum(1)
    log_normaliser = normaliser.log()
    rows = torch.cat([part.rows for part in parts])
    logprobs = gathered - (highest[:, 0] + log_normaliser)[rows]
    entries = torch.split(logprobs, [len(part.rows) for part in parts])
    covered = [_covered(exponentials, part) for part in parts]
    left = [_left_over(exponentials, part, own) for part, own in zip(parts, covered, strict=True)]
    rests = [own.log() - log_normaliser[part.rest_rows] for part, own in zip(parts, left, strict=True)]
    leaves = [tensor.detach().requires_grad_(with_gradient) for tensor in (*entries, *rests)]
    with torch.enable_grad():
        pairs = zip(leaves[: len(parts)], leaves[len(parts) :], parts, strict=True)
        sums = [divergence(one, other, part) for one, other, part in pairs]
        values = torch.stack(sums)
        if not with_gradient:
            return values.detach(), None
        scales = values.new_tensor([part.scale for part in parts])
        gradients = torch.autograd.grad((values * scales).sum(), leaves, allow_unused=True, materialize_grads=True)
    d_entries, d_rests = gradients[: len(parts)], gradients[len(parts) :]
    of_rows = logits.new_zeros(len(logits))
    for part, one, other in zip(parts, d_entries, d_rests, strict=True):
        of_rows.index_add_(0, part.rows, one).index_add_(0, part.rest_rows, other)
    d_logits = _spread(exponentials, -of_rows / normaliser, parts, covered, left, d_rests)
    for part, one in zip(parts, d_entries, strict=True):
        d_logits.view(-1).index_add_(0, part.places, one)
    return values.detach(), d_logits


def _covered(exponentials: Tensor, part: _Part) -> Tensor:
    """Return [entries], what each entry takes of its row's exponentials."""
    if not len(part.rest_rows):
        return exponentials.new_zeros(0)
    return exponentials.view(-1).index_select(0, part.places) * part.weights


def _left_over(exponentials: Tensor, part: _Part, covered: Tensor) -> Tensor:
    """Return [rest rows], the sum of the exponentials of a row that its entries leave over."""
    if not len(part.rest_rows):
        return exponentials.new_zeros(0)
    flat = exponentials.view(-1)
    flat.index_add_(0, part.places, -covered)
    left = exponentials.sum(1)[part.rest_rows].clamp_min(TINY)
    flat.index_add_(0, part.places, covered)
    return left


def _spread(
    exponentials: Tensor,
    factors: Tensor,
    parts: list[_Part],
    covered: list[Tensor],
    left: list[Tensor],
    d_rests: Sequence[Tensor],
) -> Tensor:
    """Return `exponentials * factors`, and of each rest its gradient spread over what is left of its rows.

    Works in the memory of the exponentials. Nothing is added to be taken away again: where a rest is tiny, its factor
    is huge.
    """
    with_rest = [number for number, part in enumerate(parts) if len(part.rest_rows)]
    flat = exponentials.view(-1)
    more: list[Tensor] = []
    for number in with_rest[1:]:
        part = parts[number]
        of_left = factors.new_zeros(len(factors)).index_add_(0, part.rest_rows, d_rests[number] / left[number])
        flat.index_add_(0, part.places, -covered[number])
        more.append(exponentials * of_left[:, None])
        flat.index_add_(0, part.places, covered[number])
    for number in with_rest[:1]:
        part = parts[number]
        of_left = factors.new_zeros(len(factors)).index_add_(0, part.rest_rows, d_rests[number] / left[number])
        flat.index_add_(0, part.places, -covered[number])
        exponentials.mul_((factors + of_left)[:, None])
        flat.index_add_(0, part.places, covered[number] * factors[part.rows])
    if not with_rest:
        exponentials.mul_(factors[:, None])
    for tensor in more:
        exponentials.add_(tensor)
    return exponentials


def divergence(entries: Tensor, rests: Tensor, part: _Part) -> Tensor:
    """Return the sum over items of `KL(teacher's cells and rest | student's cells and rest)`.

    Args:
        entries: [entries], the student's log-probabilities.
        rests: [rest rows], the log of what a row's entries leave over.
        part: the items they belong to.

    Returns:
        A scalar, not negative but for rounding.
    """
    probs = part.teacher_probs.to(entries.dtype)
    student = _log_sum(entries + part.log_weights, part.entry_cells, len(probs))
    inside = torch.xlogy(probs, probs) - probs * student
    rest = part.rest_probs.to(entries.dtype)
    student_rest = _log_sum(rests + part.rest_log_shares.to(rests.dtype), part.rest_items, len(rest))
    outside = rest * (rest.log() - student_rest)
    return inside.sum() + outside.sum()


def _log_sum(values: Tensor, groups: Tensor, count: int) -> Tensor:
    """Return log-sum-exp [count] of values in groups, none of which is empty."""
    highest = values.new_full((count,), -torch.inf)
    highest = highest.scatter_reduce(0, groups, values.detach(), "amax").detach()
    sums = values.new_zeros(count).index_add(0, groups, (values - highest[groups]).exp())
    return sums.log() + highest
