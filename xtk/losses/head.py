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
from xtk.losses.alternatives import RunsOfTerm, log_sums
from xtk.losses.cells import Cells
from xtk.losses.chains import ChainOfTerm
from xtk.losses.divergences import Divergence
from xtk.losses.ranks import Largest, PartOfRanks, RanksOfTerm
from xtk.losses.softmax import OfParts, OfRanks, Part, Reading, Spoken, Window, add_up, gradient_of_logits, read
from xtk.losses.surrogates import SurrogateOfTerm
from xtk.models.head import Head, LogitsOfRows

# Probabilities from stored fp32 log-probabilities sum to 1 within this; a smaller rest of the teacher is none.
SMALLEST_REST = 1e-6
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
        surrogate: what stands in the place of the divergence; None: nothing.
        weights: float32 [C], how much each item counts; None: 1.
        counts: float64 [C], how much each counts in what the loss is averaged over; None: 1.
        corrections: float64 [C], added to the value of each item, not to its gradient; None: nothing.
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
    surrogate: SurrogateOfTerm | None = None
    weights: Tensor | None = None
    counts: Tensor | None = None
    corrections: Tensor | None = None

    @property
    def items(self) -> int:
        """C."""
        return len(self.first_rows)

    @property
    def count(self) -> float:
        """What the loss is averaged over: the items, or the weights of their documents."""
        return self.items if self.counts is None else float(self.counts.sum())

    def weighted(self, counts: NDArray[np.float64] | None, factors: NDArray[np.float64] | None) -> Term:
        """Return the same with items that count as the rows in which they begin do.

        Args:
            counts: [N], how often each row counts, in the sum and in what the loss is averaged over; None: once.
            factors: [N], what each row is multiplied with in the sum alone; None: 1.
        """
        given = [weights[self.first_rows.numpy()] for weights in (counts, factors) if weights is not None]
        if not given:
            return self
        return dataclasses.replace(
            self,
            weights=torch.from_numpy(np.prod(given, axis=0).astype(np.float32)),
            counts=None if counts is None else torch.from_numpy(given[0]),
        )

    def to(self, device: torch.device, scale: float) -> Term:
        """Return the same on a device, with the scale that is known by then."""
        names = ("entry_cells", "teacher_probs", "rows", "tokens", "log_weights", "averaged", "weights", "corrections")
        there = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        moved = {name: tensor.to(device, non_blocking=True) for name, tensor in there.items()}
        runs = None if self.runs is None else self.runs.to(device)
        ranks = None if self.ranks is None else self.ranks.to(device)
        surrogate = None if self.surrogate is None else self.surrogate.to(device)
        return dataclasses.replace(self, **moved, runs=runs, ranks=ranks, surrogate=surrogate, scale=scale)

    def between(self, start: int, stop: int, base: int) -> Term:
        """Return the items whose first row is in `[start, stop)`, for states whose first row is `base`."""
        low, high = torch.searchsorted(self.first_rows, torch.tensor([start, stop])).tolist()
        offsets = self.cell_offsets[low : high + 1]
        cells = slice(int(offsets[0]), int(offsets[-1]))
        entry_offsets = self.entry_offsets[cells.start : cells.stop + 1]
        entries = slice(int(entry_offsets[0]), int(entry_offsets[-1]))
        return dataclasses.replace(
            self,
            cell_offsets=offsets - cells.start,
            entry_offsets=entry_offsets - entries.start,
            first_rows=self.first_rows[low:high] - base,
            row_counts=self.row_counts[low:high],
            rest_probs=self.rest_probs[low:high],
            has_rest=self.has_rest[low:high],
            entry_cells=self.entry_cells[entries] - cells.start,
            teacher_probs=self.teacher_probs[cells],
            rows=self.rows[entries] - base,
            tokens=self.tokens[entries],
            log_weights=self.log_weights[entries],
            averaged=self.averaged[entries],
            runs=None if self.runs is None else self.runs.between(slice(low, high), offsets, base),
            chain=None if self.chain is None else dataclasses.replace(self.chain, links=self.chain.links[low:high]),
            ranks=None if self.ranks is None else self.ranks.between(slice(low, high), base),
            surrogate=None if self.surrogate is None else self.surrogate.part(slice(low, high)),
            weights=None if self.weights is None else self.weights[low:high],
            counts=None if self.counts is None else self.counts[low:high],
            corrections=None if self.corrections is None else self.corrections[low:high],
        )

    @classmethod
    def of(cls, cells: Cells) -> Term:
        """Work out the structure of cells, on the CPU."""
        firsts = cells.entry_offsets[cells.cell_offsets[:-1]]
        stops = cells.entry_offsets[cells.cell_offsets[1:]]
        has_cells, closed = np.diff(cells.cell_offsets) > 0, np.zeros(cells.items, np.bool_)
        first_rows = cells.first_rows
        if cells.alternatives is None:
            rows = cells.rows if len(cells.rows) else np.zeros(1, np.int32)
            counts = np.where(stops > firsts, rows[stops - 1] - first_rows + 1, 0)
        else:
            counts = (has_cells & ~cells.alternatives.inside).astype(np.int64)
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
            surrogate=None if cells.surrogate is None else SurrogateOfTerm.of(cells.surrogate),
            corrections=None if cells.corrections is None else torch.from_numpy(cells.corrections),
        )

    @property
    def correction(self) -> Tensor | float:
        """What the values of all items are corrected by together: a scalar, without a gradient."""
        if self.corrections is None:
            return 0.0
        return (self.corrections if self.weights is None else self.corrections * self.weights).sum()


def _rests_of(cells: Cells) -> NDArray[np.float64]:
    """Return [C], the teacher's probability of the other cell."""
    if cells.rest_probs is not None:
        return cells.rest_probs
    items = np.repeat(np.arange(cells.items), np.diff(cells.cell_offsets))
    rests = 1 - np.bincount(items, cells.teacher_probs.astype(np.float64), minlength=cells.items)
    return np.where(rests > SMALLEST_REST, rests, 0)


def free_cuts(rows: int, terms: Sequence[Term]) -> NDArray[np.bool_]:
    """Return [rows + 1], before which rows no item is cut in two."""
    free = np.ones(rows + 1, np.bool_)
    for term in terms:
        several = term.row_counts > 1
        for start, count in zip(term.first_rows[several].tolist(), term.row_counts[several].tolist(), strict=True):
            free[start + 1 : start + count] = False
    return free


def chunk_starts(rows: int, size: int, terms: Sequence[Term]) -> list[int]:
    """Return where chunks of about `size` rows begin, so that no item straddles two of them."""
    if rows == 0:
        return [0]
    free = free_cuts(rows, terms)
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
    def forward(ctx: Any, head: Head, terms: Sequence[Term], chunk: int, bias: Tensor | None, *pairs: Tensor) -> Tensor:
        """Return the unscaled sum of each term, [terms]; `backward` is of the scaled total.

        `pairs` are what the matrices of the head are multiplied with, then the matrices.
        """
        ctx.head, ctx.terms, ctx.chunk = head, terms, chunk
        ctx.save_for_backward(bias, *pairs)
        ctx.needed = ctx.needs_input_grad[3:]
        sums, ctx.gradients = _run(head, terms, chunk, bias, pairs, ctx.needed)
        return sums

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Any, ...]:
        """Hand out the gradients of the scaled total, times the gradient that comes in at the first term."""
        (factor,) = outputs
        # They are given away and not kept, so that nothing has to be copied; who asks twice waits twice.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            bias, *pairs = ctx.saved_tensors
            _, gradients = _run(ctx.head, ctx.terms, ctx.chunk, bias, pairs, ctx.needed)
        # A head's gradient takes a while to read; on a CPU it can be seen that it stays as it is.
        if factor.device.type != "cpu" or factor[0] != 1:
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(factor[0])
        return (None, None, None, *gradients)


def fused_loss(states: Tensor, head: Head, terms: Sequence[Term], chunk: int) -> tuple[Tensor, Tensor]:
    """Compute the scaled total and each term's sum over items.

    Of a head in shards every process of the group gives the same states, terms and chunk. All get the same total, the
    gradient of the states is the whole one, and that of the head is of the process's own rows.

    Args:
        states: [N, H], rows of hidden states (or of logits [N, V], if the head has no weight).
        head: makes logits of them.
        terms: the losses.
        chunk: rows whose logits exist at one time.

    Returns:
        total: a scalar, `sum over terms of scale * sum over items`, with a gradient.
        sums: [terms], detached, each term's unscaled sum over its items.
    """
    tensors = [*(head.inputs(states) if head.matrices else [states]), *head.matrices]
    sums = FusedLoss.apply(head, terms, chunk, head.bias, *tensors)  # type: ignore[no-untyped-call]
    scales = torch.tensor([term.scale for term in terms], device=states.device, dtype=sums.dtype)
    detached = sums.detach()
    values = detached.clone()
    for number, term in enumerate(terms):
        if term.corrections is not None:
            values[number] += term.correction
    # The value is the scaled total. The gradient comes in through the first element alone, where
    # FusedLoss expects it: its gradients are already those of the total.
    total = (values * scales).sum() + (sums[0] - detached[0])
    return total, values


@torch.no_grad()
def _run(
    head: Head, terms: Sequence[Term], chunk: int, bias: Tensor | None, pairs: Sequence[Tensor], needed: Sequence[bool]
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the sums of all terms, and the gradients of the bias and the pairs, as far as they are needed."""
    count = max(1, len(pairs) // 2)
    inputs, states, shard = pairs[:count], pairs[0], head.shard
    compute = _compute_dtype(states, head.weight)
    gradients = _Gradients(head, [bias, *pairs], needed, compute)
    # A second memory as large as the logits is asked for by a soft cap, and by what several losses leave over.
    several = sum(bool(term.has_rest.any()) for term in terms) > 1
    size = max(1, chunk // (1 + several + (head.softcap is not None)))
    if shard is not None:
        size = shard.least(size, states.device)
    # Who looks back needs the last row of the chunk before: it is computed twice, and adds to its gradient twice.
    again = int(any(term.runs is not None for term in terms))
    starts = chunk_starts(len(states), max(1, size - again), terms)
    logits_of = LogitsOfRows(head, states, size, compute, slopes=any(needed))
    first_token, width = 0 if shard is None else shard.start, head.width_of(states)
    sums = torch.zeros(len(terms), dtype=wide_dtype(compute), device=states.device)
    for start, stop in itertools.pairwise(starts):
        base = max(0, start - again)
        parts = [_slice(term, start, stop, base, sums.dtype) for term in terms]
        edges = [*range(0, stop - base, size), stop - base]
        windows = [
            Window(low, high, first_token, width, shard is None and len(edges) == 2)
            for low, high in itertools.pairwise(edges)
        ]
        sums += _loss_of_chunk([some[base:stop] for some in inputs], base, logits_of, windows, parts, gradients)
    return sums, gradients.finish()


def _loss_of_chunk(
    inputs: Sequence[Tensor],
    base: int,
    logits_of: LogitsOfRows,
    windows: Sequence[Window],
    parts: list[Part],
    gradients: _Gradients,
) -> Tensor:
    """Return each term's sum [terms] over the items of a chunk, whose first row is `base`, and add their gradients."""
    shard = gradients.shard

    def reading(window: Window) -> Reading:
        return read(logits_of.of_inputs([some[window.rows] for some in inputs]), window, parts, shard)

    readings = [reading(window) for window in windows]
    said = add_up(readings, parts, shard)
    values, of_parts = _loss_of_cells(parts, said, gradients.wanted)
    if of_parts is None:
        return values
    for window, first in zip(windows, readings, strict=True):
        again = first if len(windows) == 1 else reading(window)
        d_logits = gradient_of_logits(again, said, of_parts, parts)
        gradients.add(slice(base + window.first, base + window.stop), d_logits, inputs, window.rows, logits_of)
    return values


def wide_dtype(compute: torch.dtype) -> torch.dtype:
    """Return in what losses are computed: fp32, or fp64 for fp64."""
    return torch.float64 if compute == torch.float64 else torch.float32


def _compute_dtype(states: Tensor, weight: Tensor | None) -> torch.dtype:
    if weight is None:
        return states.dtype
    if torch.is_autocast_enabled(states.device.type):
        return torch.get_autocast_dtype(states.device.type)
    return weight.dtype


class _Gradients:
    """Where the gradients of a head and of what goes into it add up: each in the memory in which it is handed out."""

    def __init__(
        self, head: Head, tensors: Sequence[Tensor | None], needed: Sequence[bool], compute: torch.dtype
    ) -> None:
        self.wanted, self.shard = any(needed), head.shard
        self._scale, self._compute = head.scale, compute
        self._all = [
            torch.zeros_like(tensor) if tensor is not None and need else None
            for tensor, need in zip(tensors, needed, strict=True)
        ]
        count = max(1, len(tensors) // 2)
        self._inputs, self._matrices = self._all[1 : 1 + count], self._all[1 + count :]
        self._bias = None if self._all[0] is None else self._all[0].to(wide_dtype(compute))

    def add(
        self, rows: slice, d_logits: Tensor, inputs: Sequence[Tensor], among: slice, logits_of: LogitsOfRows
    ) -> None:
        """Multiply the gradient [n, V] of some rows' logits, which is written over, into all others.

        Args:
            rows: which, of the gradients.
            d_logits: theirs.
            inputs: what the matrices were multiplied with.
            among: which rows of that.
            logits_of: made the logits.
        """
        if logits_of.slope is not None:
            d_logits.mul_(logits_of.slope)
        if not self._matrices:
            (of_logits,) = self._inputs
            if of_logits is not None:
                of_logits[rows] += d_logits
            return
        small = d_logits
        if logits_of.product is not None and d_logits.dtype != self._compute:
            small = logits_of.product.copy_(d_logits)
        for d_input, d_matrix, some, matrix in zip(
            self._inputs, self._matrices, inputs, logits_of.matrices, strict=True
        ):
            if d_input is not None:
                _add_product(d_input[rows], small, matrix, self._scale)
            if d_matrix is not None:
                _add_product(d_matrix, small.T, some[among].to(self._compute), self._scale)
        if self._bias is not None:
            self._bias.add_(d_logits.sum(0), alpha=self._scale)

    def finish(self) -> list[Tensor | None]:
        """Return all gradients, when all rows are added; those of what goes in, of all shards."""
        for gradient in self._inputs:
            if gradient is not None and self.shard is not None:
                self.shard.add(gradient)
        if self._bias is not None and self._all[0] is not None:
            self._all[0].copy_(self._bias)
        return self._all


# A product that is added to another dtype is made of so many rows at a time.
ROWS_OF_A_PRODUCT = 8192


def _add_product(total: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right, alpha=scale)
        return
    for start in range(0, len(total), ROWS_OF_A_PRODUCT):
        some = slice(start, start + ROWS_OF_A_PRODUCT)
        total[some].add_(left[some] @ right, alpha=scale)


def _slice(term: Term, start: int, stop: int, base: int, wide: torch.dtype) -> Part:
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
    device, shares, chain = term.rows.device, -counts[rest_items].to(wide).log(), None
    teacher_probs = term.teacher_probs[cells]
    if term.chain is not None:
        chain = term.chain.part(slice(low, high), cell_offsets, owners[rest_items], within)
        real, shares = chain.real, torch.zeros_like(shares)
        chain, teacher_probs = chain.to(device), teacher_probs[real.to(device)]
    log_weights = term.log_weights[entries].to(wide)
    return Part(
        items=high - low,
        cells=cells.stop - cells.start,
        entry_cells=term.entry_cells[entries] - cells.start,
        teacher_probs=teacher_probs,
        rows=term.rows[entries].long() - base,
        tokens=term.tokens[entries],
        log_weights=log_weights,
        weights=log_weights.exp().mul_(term.averaged[entries]),
        rest_probs=term.rest_probs[low:high][has_rest].to(device),
        rest_rows=(term.first_rows[low:high][has_rest][rest_items] + within - base).to(device),
        rest_items=(rest_items if chain is None else torch.arange(len(rest_items))).to(device),
        rest_log_shares=shares.to(device),
        item_groups=torch.cat([of_cells[real], owners]).to(device),
        scale=term.scale,
        divergence=term.divergence,
        runs=None if term.runs is None else term.runs.part(slice(low, high), cell_offsets, base, owners),
        chain=chain,
        ranks=None if term.ranks is None else term.ranks.part(slice(low, high), base, wide),
        outside=term.outside,
        factor=term.factor,
        surrogate=None if term.surrogate is None else term.surrogate.part(slice(low, high)),
        of_items=None if term.weights is None else term.weights[low:high],
    )


def _loss_of_cells(parts: list[Part], said: Spoken, with_gradient: bool) -> tuple[Tensor, OfParts | None]:
    """Return each term's sum [terms], and the gradients of the scaled total."""
    log_totals, log_normaliser, before = said.log_totals, said.normaliser.log(), iter(said.before)
    by_rank = iter(zip(said.largest, said.masses, strict=True))
    values, gradients = [], OfParts([], [], [], [])
    for part, logits, left in zip(parts, said.entries, said.left, strict=True):
        log_probs = logits - log_totals[part.rows] + part.log_weights
        log_rests = left.log() - log_normaliser[part.rest_rows] + part.rest_log_shares
        sums = [_LogSums(log_probs, part.entry_cells, part.cells), _LogSums(log_rests, part.rest_items, part.rests)]
        if part.runs is not None:
            of_rows = next(before) - log_totals[part.runs.rows]
            sums.append(_LogSums(of_rows, part.runs.groups, len(part.runs.group_items)))
        leaves, ranked = [side.log_sums for side in sums], None
        if part.ranks is not None:
            ranked = _Ranked.of(part.ranks, *next(by_rank), said)
            leaves += [ranked.log_probs, ranked.masses]
        with torch.enable_grad():
            value = _value(part, [leaf.requires_grad_(with_gradient) for leaf in leaves], ranked)
            scaled = value * part.scale
        values.append(value.detach().to(log_totals.dtype))
        if not with_gradient:
            continue
        found = torch.autograd.grad(scaled, leaves)
        one, other, *more = (side.gradient(gradient) for side, gradient in zip(sums, found, strict=False))
        gradients.entries.append(one)
        gradients.rests.append(other)
        gradients.before.extend(more)
        if ranked is not None:
            gradients.ranks.append(ranked.gradient(found[-2], found[-1]))
    return torch.stack(values), gradients if with_gradient else None


@dataclass(frozen=True)
class _Ranked:
    """The student's largest tokens of the items of one part: which ranks have one, and what they say."""

    ranks: PartOfRanks
    held: Tensor
    rows: Tensor
    tokens: Tensor
    log_probs: Tensor
    item_rows: Tensor
    masses: Tensor

    @classmethod
    def of(cls, ranks: PartOfRanks, largest: Largest, sums: Tensor, said: Spoken) -> _Ranked:
        """Read them off what a chunk says."""
        held = (largest.tokens >= 0).nonzero()[:, 0]
        item_rows = ranks.rows.to(held.device)
        rows = item_rows[ranks.of_ranks[held]]
        log_probs = largest.logits[held] - said.log_totals[rows]
        masses = torch.ones_like(sums) if ranks.unranked is None else sums / said.normaliser[item_rows]
        return cls(ranks, held, rows, largest.tokens[held], log_probs, item_rows, masses)

    def gradient(self, of_logprobs: Tensor, of_masses: Tensor) -> OfRanks:
        """Return their gradients, with where they belong."""
        return OfRanks(self.rows, self.tokens, of_logprobs, self.item_rows, of_masses, self.masses.detach(), self.ranks)


def _value(part: Part, leaves: list[Tensor], ranked: _Ranked | None) -> Tensor:
    """Return the weighted sum over items of what a loss says.

    Args:
        part: the items.
        leaves: log-probabilities of cells, and of rests; of the groups of the rows before, for losses that look back;
            of the largest tokens, and the mass of all of them, for losses that compare ranks.
        ranked: which tokens these are.
    """
    if part.runs is not None:
        said = part.runs.next_cells(*leaves[:3])
    elif part.chain is not None:
        said = part.chain.multiplied(*leaves[:2])
    else:
        said = (leaves[0], leaves[1])
    if part.surrogate is not None:
        values = part.surrogate.of_items(torch.cat(said))  # without any rests
        return (values if part.of_items is None else values * part.of_items).sum()
    value = part.factor * _divergence(part, torch.cat(said))
    if ranked is None:
        return value
    before = None if part.chain is None else part.chain.before(leaves[0])
    of_ranks, behind = ranked.ranks.distance(ranked.held, leaves[-2], leaves[-1], before)
    if part.of_items is not None:
        of_ranks, behind = of_ranks * part.of_items[ranked.ranks.of_ranks], behind * part.of_items
    return value + of_ranks.sum() + behind.sum()


def _divergence(part: Part, log_probs: Tensor) -> Tensor:
    """Return the weighted sum over items of the divergence between the teacher's and the student's cells.

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
    values = part.divergence.of_cells(probs, log_probs)
    if part.of_items is not None:
        values = values * part.of_items[part.item_groups]
    return values.sum() / power**2


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
