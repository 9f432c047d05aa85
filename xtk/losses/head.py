"""From hidden states to losses and gradients, chunk by chunk.

All losses read the student at a few places of a row's logits: the log-probabilities of *entries* (row, token), and the
*rest* of a row, what its entries leave over. Each is the log of a part of the softmax, and the gradient of such a log
with respect to the row's logits is the softmax restricted to that part, minus the whole softmax. So of a chunk of rows
one matrix product gives the logits, a small autograd graph over cells gives the gradients `g` of entries and rests, and

    d loss / d logits[n, v] = sum over parts of row n of g * (softmax within the part - softmax)[n, v]

is multiplied into the gradients of the hidden states and of the head at once. Nothing of size `[N, V]` lives longer
than its chunk, and no product is computed twice. The rest is summed over what is left, never taken as one minus the
entries: a student that is sure, and wrong, has a rest of 1e-9, and fp32 does not know 1 - 1e-9.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xtk.losses import kernels
from xtk.losses.alternatives import PartOfRuns, RunsOfTerm, log_sums
from xtk.losses.cells import Cells
from xtk.losses.chains import ChainOfTerm, PartOfChain
from xtk.losses.divergences import Divergence
from xtk.losses.ranks import PartOfRanks, RanksOfTerm, scale
from xtk.models.head import Head, LogitsOfRows

# Probabilities from stored fp32 log-probabilities sum to 1 within this; a smaller rest of the teacher is none.
SMALLEST_REST = 1e-6
TINY = 1e-37
# What the student has of a cell at least, where p-kl is compared as published; X-Token.
LEAST_OF_PUBLISHED = 1e-10


@dataclass(frozen=True)
class Term:
    """One loss of the sum: the structure of its `Cells` on the CPU, their numbers on a device.

    Attributes:
        first_rows: [C], the first row of each item, rising.
        row_counts: [C], how many rows are averaged, or chained; 0 for an item without cells, or inside of a token.
        rest_probs: [C], the teacher's probability of the other cell; 0 where there is none to speak of.
        has_rest: bool [C], whether the other cell is looked at.
        averaged: float32 [entries], over how many rows the item of an entry is averaged.
        scale: what each item is multiplied with: the weight over the global count of items.
        divergence: between both sides of an item.
        runs: what the row before each item says, for losses that look back; None: nothing.
        chain: what the cells of each item are multiplied with; None: nothing.
        ranks: what is compared by rank beside the cells; None: nothing.
        outside: what becomes of the mass outside of the cells; a key of `OUTSIDES`.
        factor: of the divergence.
    """

    cell_offsets: Tensor
    entry_offsets: Tensor
    first_rows: Tensor
    row_counts: Tensor
    rest_probs: Tensor
    has_rest: Tensor
    entry_cells: Tensor
    teacher_probs: Tensor
    rows: Tensor
    tokens: Tensor
    log_weights: Tensor
    averaged: Tensor
    scale: float
    divergence: Divergence
    runs: RunsOfTerm | None = None
    chain: ChainOfTerm | None = None
    ranks: RanksOfTerm | None = None
    outside: str = "other"
    factor: float = 1.0

    @property
    def items(self) -> int:
        """C, what the loss is averaged over."""
        return len(self.first_rows)

    def to(self, device: torch.device, scale: float) -> Term:
        """Return the same on a device, with the scale that is known by then."""
        names = ("entry_cells", "teacher_probs", "rows", "tokens", "log_weights", "averaged")
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in names}
        runs = None if self.runs is None else self.runs.to(device)
        ranks = None if self.ranks is None else self.ranks.to(device)
        return dataclasses.replace(self, **moved, runs=runs, ranks=ranks, scale=scale)

    @classmethod
    def of(cls, cells: Cells) -> Term:
        """Work out the structure of cells, on the CPU."""
        firsts = cells.entry_offsets[cells.cell_offsets[:-1]]
        stops = cells.entry_offsets[cells.cell_offsets[1:]]
        has_cells, closed = np.diff(cells.cell_offsets) > 0, np.zeros(cells.items, np.bool_)
        if cells.item_rows is None:
            # An item without an entry (nothing of the support can be reached) has no row; it goes with its neighbour.
            rows = cells.rows if len(cells.rows) else np.zeros(1, np.int32)
            first_rows = rows[np.minimum(firsts, len(rows) - 1)].astype(np.int64)
            counts = np.where(stops > firsts, rows[stops - 1] - first_rows + 1, 0)
        else:
            first_rows = cells.item_rows.astype(np.int64)
            counts = has_cells.astype(np.int64)
        if cells.alternatives is not None:
            counts *= ~cells.alternatives.inside
            closed = cells.alternatives.closed(cells.cell_offsets)
        if cells.chain is not None:  # without a cell all of both sides is in the other one, which is looked at
            counts, has_cells = cells.chain.links + 1, np.ones(cells.items, np.bool_)
        rests = _rests_of(cells)
        has_rest = has_cells & (rests > 0 if cells.divergence.linear else ~closed) & (cells.outside == "other")
        averaged = np.repeat(counts.astype(np.float32), stops - firsts)
        return cls(
            cell_offsets=torch.from_numpy(cells.cell_offsets),
            entry_offsets=torch.from_numpy(cells.entry_offsets),
            first_rows=torch.from_numpy(first_rows),
            row_counts=torch.from_numpy(counts),
            rest_probs=torch.from_numpy(rests),
            has_rest=torch.from_numpy(has_rest),
            entry_cells=torch.from_numpy(
                np.repeat(np.arange(len(cells.teacher_probs), dtype=np.int32), np.diff(cells.entry_offsets))
            ),
            teacher_probs=torch.from_numpy(cells.teacher_probs),
            rows=torch.from_numpy(cells.rows),
            tokens=torch.from_numpy(cells.tokens),
            log_weights=torch.from_numpy(cells.log_weights),
            averaged=torch.from_numpy(averaged if cells.chain is None else np.ones_like(averaged)),
            scale=1.0,
            divergence=cells.divergence,
            runs=None if cells.alternatives is None else RunsOfTerm.of(cells.alternatives),
            chain=None if cells.chain is None else ChainOfTerm.of(cells.chain),
            ranks=None if cells.ranks is None else RanksOfTerm.of(cells.ranks),
            outside=cells.outside,
            factor=cells.factor,
        )


def _rests_of(cells: Cells) -> NDArray[np.float64]:
    """Return [C], the teacher's probability of the other cell."""
    if cells.rest_probs is not None:
        return cells.rest_probs
    items = np.repeat(np.arange(cells.items), np.diff(cells.cell_offsets))
    rests = 1 - np.bincount(items, cells.teacher_probs.astype(np.float64), minlength=cells.items)
    return np.where(rests > SMALLEST_REST, rests, 0)


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
        # Who looks back needs the last row of the chunk before: it is computed twice, and adds to its gradient twice.
        again = int(any(term.runs is not None for term in terms))
        starts = chunk_starts(len(states), max(1, chunk - again), terms)
        longest = again + max((stop - start for start, stop in itertools.pairwise(starts)), default=0)
        logits_of = LogitsOfRows(Head(matrix, bias), states, longest, compute)
        wide = torch.float64 if compute == torch.float64 else torch.float32
        d_states = torch.zeros_like(states, dtype=wide if matrix is None else compute) if with_gradient else None
        d_weight = torch.zeros_like(weight, dtype=wide) if with_gradient and weight is not None else None
        d_bias = torch.zeros_like(bias, dtype=wide) if with_gradient and bias is not None else None
        sums = torch.zeros(len(terms), dtype=wide, device=states.device)
        for start, stop in itertools.pairwise(starts):
            base = max(0, start - again)
            rows = states[base:stop].detach().to(compute)
            logits = logits_of(rows)
            parts = [_slice(term, start, stop, base, logits) for term in terms]
            values, d_logits = _chunk_loss(logits, parts, with_gradient)
            sums += values
            if d_states is None or d_logits is None:
                continue
            if matrix is None:
                d_states[base:stop] += d_logits
                continue
            small = d_logits.to(compute)
            d_states[base:stop].addmm_(small, matrix)
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
    (counted among these items), the log of the share of a row. `item_groups` are the items of all cells, then of all
    rests. In a chain, `cells` counts its links too, and each row of a rest is an item of its own.
    """

    items: int
    cells: int
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
    item_groups: Tensor
    scale: float
    divergence: Divergence
    runs: PartOfRuns | None
    chain: PartOfChain | None
    ranks: PartOfRanks | None
    outside: str
    factor: float

    @property
    def rests(self) -> int:
        """How many rests there are, each of one or more rows."""
        return len(self.rest_probs) if self.chain is None else len(self.rest_rows)


def _slice(term: Term, start: int, stop: int, base: int, logits: Tensor) -> _Part:
    """Cut out the items of rows `[start, stop)`, for logits whose first row is `base`."""
    low, high = torch.searchsorted(term.first_rows, torch.tensor([start, stop])).tolist()
    cell_offsets = term.cell_offsets[low : high + 1]
    cells = slice(int(cell_offsets[0]), int(cell_offsets[-1]))
    entry_offsets = term.entry_offsets[cells.start : cells.stop + 1]
    entries = slice(int(entry_offsets[0]), int(entry_offsets[-1]))
    has_rest = term.has_rest[low:high]
    counts = term.row_counts[low:high][has_rest]
    rest_items = torch.arange(len(counts)).repeat_interleave(counts)
    within = torch.arange(len(rest_items)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    items, owners = torch.arange(high - low), has_rest.nonzero()[:, 0]
    of_cells, real = items.repeat_interleave(torch.diff(cell_offsets)), torch.arange(cells.stop - cells.start)
    shares, chain = -counts[rest_items].to(logits.dtype).log(), None
    if term.chain is not None:
        chain = term.chain.part(slice(low, high), cell_offsets, owners[rest_items], within)
        real, shares = chain.real, torch.zeros_like(shares)
        chain = chain.to(term.rows.device)
    device, rows = term.rows.device, term.rows[entries].long() - base
    log_weights = term.log_weights[entries].to(logits.dtype)
    rest_rows = (term.first_rows[low:high][has_rest][rest_items] + within - base).to(device)
    return _Part(
        items=high - low,
        cells=cells.stop - cells.start,
        entry_cells=term.entry_cells[entries] - cells.start,
        teacher_probs=term.teacher_probs[cells][real.to(device)] if chain is not None else term.teacher_probs[cells],
        places=rows * logits.shape[1] + term.tokens[entries],
        rows=rows,
        log_weights=log_weights,
        weights=log_weights.exp().mul_(term.averaged[entries]),
        rest_probs=term.rest_probs[low:high][has_rest].to(device),
        rest_rows=rest_rows,
        rest_items=(rest_items if chain is None else torch.arange(len(rest_items))).to(device),
        rest_log_shares=shares.to(device),
        item_groups=torch.cat([of_cells[real], owners]).to(device),
        scale=term.scale,
        divergence=term.divergence,
        runs=None
        if term.runs is None
        else term.runs.part(slice(low, high), cell_offsets, base, logits.shape[1], owners),
        chain=chain,
        ranks=None if term.ranks is None else term.ranks.part(slice(low, high), base, logits),
        outside=term.outside,
        factor=term.factor,
    )


def _chunk_loss(logits: Tensor, parts: list[_Part], with_gradient: bool) -> tuple[Tensor, Tensor | None]:
    """Return each term's sum [terms] and, in the memory of the logits, the gradient of the scaled total."""
    flat = logits.view(-1)
    entries = [flat.take(part.places) for part in parts]
    before = [None if part.runs is None else flat.take(part.runs.places) for part in parts]
    highest = logits.amax(1, keepdim=True)
    exponentials = logits.sub_(highest).exp_()
    normaliser = exponentials.sum(1)
    log_normaliser = normaliser.log()
    log_total = log_normaliser + highest[:, 0]
    masses = [None if part.ranks is None else part.ranks.masses(exponentials, normaliser) for part in parts]
    with_rest = [part for part in parts if len(part.rest_rows)]
    removed = with_rest[-1] if with_rest else None  # its entries are taken out of the exponentials, to be spread
    covered = [flat.take(part.places).mul_(part.weights) if len(part.rest_rows) else None for part in parts]
    left = [_left_over(exponentials, part, own, part is not removed) for part, own in zip(parts, covered, strict=True)]
    values, d_entries, d_rests, d_more, d_masses = [], [], [], [], []
    for part, logits_of_entries, logits_before, own, mass in zip(parts, entries, before, left, masses, strict=True):
        log_probs = logits_of_entries - log_total[part.rows] + part.log_weights
        log_rests = own.log() - log_normaliser[part.rest_rows] + part.rest_log_shares
        sums = [_LogSums(log_probs, part.entry_cells, part.cells), _LogSums(log_rests, part.rest_items, part.rests)]
        if part.runs is not None and logits_before is not None:
            of_rows = logits_before - log_total[part.runs.rows]
            sums.append(_LogSums(of_rows, part.runs.groups, len(part.runs.group_items)))
        leaves = [side.log_sums for side in sums]
        if part.ranks is not None and mass is not None:
            leaves += [part.ranks.logits - log_total[part.ranks.held_rows], mass]
        with torch.enable_grad():
            value = _value(part, [leaf.requires_grad_(with_gradient) for leaf in leaves])
            scaled = value * part.scale
        values.append(value.detach().to(logits.dtype))
        if not with_gradient:
            continue
        gradients = torch.autograd.grad(scaled, leaves)
        one, other, *more = (side.gradient(gradient) for side, gradient in zip(sums, gradients, strict=False))
        d_entries.append(one)
        d_rests.append(other)
        d_more += [(part.runs.rows, part.runs.places, gradient) for gradient in more if part.runs is not None]
        if part.ranks is not None and mass is not None:
            d_more.append((part.ranks.held_rows, part.ranks.places, gradients[-2]))
            d_masses.append((part.ranks, mass.detach(), gradients[-1]))
    if not with_gradient:
        return torch.stack(values), None
    in_all = logits.new_zeros(len(logits))
    for part, one, other in zip(parts, d_entries, d_rests, strict=True):
        _add_at(in_all, part.rows, one)
        _add_at(in_all, part.rest_rows, other)
    for rows, _, gradient in d_more:
        _add_at(in_all, rows, gradient)
    bands = []
    for ranks, mass, gradient in d_masses:
        if ranks.mask is not None:  # else they are all of the row, whose mass is not moved
            _add_at(in_all, ranks.rows, mass * gradient)
            bands.append((torch.zeros_like(in_all).index_add_(0, ranks.rows, gradient) / normaliser, ranks.mask))
    _spread(exponentials, -in_all / normaliser, bands, parts, removed, covered, left, d_entries, d_rests)
    for _, places, gradient in d_more:
        _add_at(exponentials.view(-1), places, gradient)
    return torch.stack(values), exponentials


def _add_at(values: Tensor, places: Tensor, more: Tensor) -> None:
    """Add to values [n], in place, at places that may come twice."""
    if values.device.type == "cpu":  # three times as fast as torch's, which is written for all shapes
        kernels.add_at(values.numpy(), places.numpy(), more.numpy())
    else:
        values.scatter_add_(0, places, more)


def _left_over(exponentials: Tensor, part: _Part, covered: Tensor | None, restore: bool) -> Tensor:
    """Return [rest rows], the sum of the exponentials of a row that its entries leave over."""
    if covered is None:
        return exponentials.new_zeros(0)
    flat = exponentials.view(-1)
    _add_at(flat, part.places, -covered)
    left = exponentials.sum(1)[part.rest_rows].clamp_min(TINY)
    if restore:
        _add_at(flat, part.places, covered)
    return left


def _spread(
    exponentials: Tensor,
    factors: Tensor,
    bands: list[tuple[Tensor, Tensor]],
    parts: list[_Part],
    removed: _Part | None,
    covered: list[Tensor | None],
    left: list[Tensor],
    d_entries: list[Tensor],
    d_rests: list[Tensor],
) -> None:
    """Turn the exponentials of a chunk, without the entries of `removed`, into the gradient of its logits, in place.

    The gradient is `exponentials * factors`, with more factors for the tokens of bands, that of each entry at its
    place, and that of each rest spread over what is left of its rows. Nothing is added to be taken away again: where a
    rest is tiny, its factor is huge.
    """
    more: list[Tensor] = []
    sparse = [(part.places, gradient) for part, gradient in zip(parts, d_entries, strict=True)]
    last = [(part, own) for part, own in zip(parts, covered, strict=True) if part is removed and own is not None]
    in_place = factors
    for part, own, rest, d_rest in zip(parts, covered, left, d_rests, strict=True):
        if own is None:
            continue
        of_left = torch.zeros_like(factors).scatter_add_(0, part.rest_rows, d_rest / rest)
        if part is removed:
            in_place = factors + of_left
            of_places = factors[part.rows]
            for of_band, mask in bands:
                of_places = of_places + of_band[part.rows] * mask[part.places % len(mask)]
            sparse.append((part.places, own * of_places))
        else:
            copy = exponentials.clone()
            for one, taken in last:
                _add_at(copy.view(-1), one.places, taken)
            _add_at(copy.view(-1), part.places, -own)
            more.append(copy.mul_(of_left[:, None]))
    scale(exponentials, in_place, bands)
    for tensor in more:
        exponentials.add_(tensor)
    for places, gradient in sparse:
        _add_at(exponentials.view(-1), places, gradient)


def _value(part: _Part, leaves: list[Tensor]) -> Tensor:
    """Return the sum over items of what a loss says.

    Args:
        part: the items.
        leaves: log-probabilities of cells, and of rests; of the groups of the rows before, for losses that look back;
            of the largest tokens, and the mass of all of them, for losses that compare ranks.
    """
    if part.runs is not None:
        said = part.runs.next_cells(*leaves[:3])
    elif part.chain is not None:
        said = part.chain.multiplied(*leaves[:2])
    else:
        said = (leaves[0], leaves[1])
    value = part.factor * _divergence(part, torch.cat(said))
    if part.ranks is None:
        return value
    before = None if part.chain is None else part.chain.before(leaves[0])
    return value + part.ranks.distance(leaves[-2], leaves[-1], before)


def _divergence(part: _Part, log_probs: Tensor) -> Tensor:
    """Return the sum over items of the divergence between the teacher's and the student's cells.

    Args:
        part: the items.
        log_probs: [cells + rests], the student's.

    Returns:
        A scalar, not negative but for rounding.
    """
    probs = torch.cat([part.teacher_probs.to(log_probs.dtype), part.rest_probs.to(log_probs.dtype)])
    items, power = part.items, 1 / part.divergence.temperature
    if part.outside == "renormalised":
        ours = log_probs.exp()
        sums = ours.new_zeros(items).scatter_add(0, part.item_groups, ours) + LEAST_OF_PUBLISHED
        log_probs = (ours / sums[part.item_groups] + LEAST_OF_PUBLISHED).log()
    if power != 1:
        log_probs = power * log_probs
        log_probs = log_probs - log_sums(log_probs, part.item_groups, items)[part.item_groups]
        probs = probs.pow(power)
        probs = probs / probs.new_zeros(items).scatter_add(0, part.item_groups, probs)[part.item_groups]
    probs[len(part.teacher_probs) :].clamp_min_(part.divergence.least_rest)
    return part.divergence.of_cells(probs, log_probs).sum() / power**2


class _LogSums:
    """Log-sum-exp of values in groups, and its gradient.

    Attributes:
        log_sums: [groups]; -inf of an empty one.
    """

    def __init__(self, values: Tensor, groups: Tensor, count: int) -> None:
        self._groups = groups
        if values.device.type == "cpu":
            self.log_sums = torch.from_numpy(kernels.log_sums(values.numpy(), groups.numpy(), count))
            self._shares = values
            return
        groups = groups.long()
        highest = values.new_full((count,), -torch.inf).scatter_reduce_(0, groups, values, "amax")
        exponentials = values.sub_(highest[groups]).exp_()
        sums = values.new_zeros(count).scatter_add_(0, groups, exponentials)
        self.log_sums = sums.log() + highest
        self._shares = exponentials.div_(sums[groups])

    def gradient(self, of_log_sums: Tensor) -> Tensor:
        """Return the gradient of the values [n], given that of the log-sums [groups]."""
        return self._shares.mul_(of_log_sums[self._groups])
