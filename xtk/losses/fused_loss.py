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

from xtk.losses import cell_kernels
from xtk.losses.chunk_softmax import (
    ChunkGradients,
    ChunkStatistics,
    LogitsWindow,
    LossChunk,
    RankGradients,
    WindowStatistics,
    combine_windows,
    logits_gradient,
    read_window,
)
from xtk.losses.clipped_surrogate import TermSurrogate
from xtk.losses.divergences import Divergence
from xtk.losses.loss_cells import LossCells
from xtk.losses.prefix_alternatives import TermAlternatives, group_logsumexp
from xtk.losses.prefix_products import TermPrefixProduct
from xtk.losses.sorted_probs import ChunkSortedProbs, LargestLogits, TermSortedProbs
from xtk.models.output_head import ChunkedLogits, OutputHead

# Probabilities from stored fp32 log-probabilities sum to 1 within this; a smaller rest of the teacher is none.
MIN_REMAINDER = 1e-6
# What the student has of a cell at least, where p-kl is compared as published; X-Token.
PUBLISHED_EPSILON = 1e-10


@dataclass(frozen=True)
class LossTensors:
    """One loss of the sum: the structure of its `Cells` on the CPU, their numbers on a device.

    Attributes:
        first_rows: [C], the first row of each item, rising.
        row_counts: [C], how many rows are averaged, or chained; 0 for an item without cells, or inside of a token.
        remainder_probs: [C], the teacher's probability of the other cell; 0 where there is none to speak of.
        has_remainder: bool [C], whether the other cell is looked at.
        rows_averaged: float32 [entries], over how many rows the item of an entry is averaged.
        scale: what each item is multiplied with: the weight over the global count of items.
        divergence: between both sides of an item.
        alternatives: what the row before each item says, for losses that look back; None: nothing.
        prefix_product: what the cells of each item are multiplied with; None: nothing.
        sorted_probs: what is compared by rank beside the cells; None: nothing.
        outside_mode: what becomes of the mass outside of the cells; a key of `OUTSIDES`.
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
    remainder_probs: Tensor
    has_remainder: Tensor
    entry_cells: Tensor
    teacher_probs: Tensor
    rows: Tensor
    tokens: Tensor
    log_weights: Tensor
    rows_averaged: Tensor
    scale: float
    divergence: Divergence
    alternatives: TermAlternatives | None = None
    prefix_product: TermPrefixProduct | None = None
    sorted_probs: TermSortedProbs | None = None
    outside_mode: str = "other"
    factor: float = 1.0
    surrogate: TermSurrogate | None = None
    weights: Tensor | None = None
    counts: Tensor | None = None
    corrections: Tensor | None = None

    @property
    def num_items(self) -> int:
        """C."""
        return len(self.first_rows)

    @property
    def denominator(self) -> float:
        """What the loss is averaged over: the items, or the weights of their documents."""
        return self.num_items if self.counts is None else float(self.counts.sum())

    def with_row_weights(self, counts: NDArray[np.float64] | None, factors: NDArray[np.float64] | None) -> LossTensors:
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

    def to(self, device: torch.device, scale: float) -> LossTensors:
        """Return the same on a device, with the scale that is known by then."""
        names = (
            "entry_cells", "teacher_probs", "rows", "tokens", "log_weights", "rows_averaged", "weights", "corrections",
        )  # fmt: skip
        there = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        moved = {name: tensor.to(device, non_blocking=True) for name, tensor in there.items()}
        runs = None if self.alternatives is None else self.alternatives.to(device)
        ranks = None if self.sorted_probs is None else self.sorted_probs.to(device)
        surrogate = None if self.surrogate is None else self.surrogate.to(device)
        return dataclasses.replace(
            self, **moved, alternatives=runs, sorted_probs=ranks, surrogate=surrogate, scale=scale
        )

    def select(self, start: int, stop: int, first_row: int) -> LossTensors:
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
            first_rows=self.first_rows[low:high] - first_row,
            row_counts=self.row_counts[low:high],
            remainder_probs=self.remainder_probs[low:high],
            has_remainder=self.has_remainder[low:high],
            entry_cells=self.entry_cells[entries] - cells.start,
            teacher_probs=self.teacher_probs[cells],
            rows=self.rows[entries] - first_row,
            tokens=self.tokens[entries],
            log_weights=self.log_weights[entries],
            rows_averaged=self.rows_averaged[entries],
            alternatives=None
            if self.alternatives is None
            else self.alternatives.select(slice(low, high), offsets, first_row),
            prefix_product=None
            if self.prefix_product is None
            else dataclasses.replace(
                self.prefix_product, num_prefix_tokens=self.prefix_product.num_prefix_tokens[low:high]
            ),
            sorted_probs=None if self.sorted_probs is None else self.sorted_probs.select(slice(low, high), first_row),
            surrogate=None if self.surrogate is None else self.surrogate.select(slice(low, high)),
            weights=None if self.weights is None else self.weights[low:high],
            counts=None if self.counts is None else self.counts[low:high],
            corrections=None if self.corrections is None else self.corrections[low:high],
        )

    @classmethod
    def from_cells(cls, cells: LossCells) -> LossTensors:
        """Work out the structure of cells, on the CPU."""
        firsts = cells.entry_offsets[cells.cell_offsets[:-1]]
        stops = cells.entry_offsets[cells.cell_offsets[1:]]
        has_cells, closed = np.diff(cells.cell_offsets) > 0, np.zeros(cells.num_items, np.bool_)
        first_rows = cells.first_rows
        if cells.alternatives is None:
            rows = cells.rows if len(cells.rows) else np.zeros(1, np.int32)
            counts = np.where(stops > firsts, rows[stops - 1] - first_rows + 1, 0)
        else:
            counts = (has_cells & ~cells.alternatives.is_inside_token).astype(np.int64)
            closed = cells.alternatives.has_no_remainder(cells.cell_offsets)
        if cells.prefix_product is not None:  # without a cell all of both sides is in the other one, which is looked at
            counts, has_cells = cells.prefix_product.num_prefix_tokens + 1, np.ones(cells.num_items, np.bool_)
        rests = _remainder_probs(cells)
        has_rest = (
            has_cells
            & (rests > 0 if cells.divergence.is_linear_in_teacher else ~closed)
            & (cells.outside_mode == "other")
        )
        averaged = np.repeat(counts.astype(np.float32), stops - firsts)
        return cls(
            cell_offsets=torch.from_numpy(cells.cell_offsets),
            entry_offsets=torch.from_numpy(cells.entry_offsets),
            first_rows=torch.from_numpy(first_rows),
            row_counts=torch.from_numpy(counts),
            remainder_probs=torch.from_numpy(rests),
            has_remainder=torch.from_numpy(has_rest),
            entry_cells=torch.from_numpy(
                np.repeat(np.arange(len(cells.teacher_probs), dtype=np.int32), np.diff(cells.entry_offsets))
            ),
            teacher_probs=torch.from_numpy(cells.teacher_probs),
            rows=torch.from_numpy(cells.rows),
            tokens=torch.from_numpy(cells.tokens),
            log_weights=torch.from_numpy(cells.log_weights),
            rows_averaged=torch.from_numpy(averaged if cells.prefix_product is None else np.ones_like(averaged)),
            scale=1.0,
            divergence=cells.divergence,
            alternatives=None if cells.alternatives is None else TermAlternatives.from_alternatives(cells.alternatives),
            prefix_product=None
            if cells.prefix_product is None
            else TermPrefixProduct.from_prefix_product(cells.prefix_product),
            sorted_probs=None if cells.sorted_probs is None else TermSortedProbs.from_sorted_probs(cells.sorted_probs),
            outside_mode=cells.outside_mode,
            factor=cells.factor,
            surrogate=None if cells.surrogate is None else TermSurrogate.from_surrogate(cells.surrogate),
            corrections=None if cells.corrections is None else torch.from_numpy(cells.corrections),
        )

    @property
    def correction(self) -> Tensor | float:
        """What the values of all items are corrected by together: a scalar, without a gradient."""
        if self.corrections is None:
            return 0.0
        return (self.corrections if self.weights is None else self.corrections * self.weights).sum()


def _remainder_probs(cells: LossCells) -> NDArray[np.float64]:
    """Return [C], the teacher's probability of the other cell."""
    if cells.remainder_probs is not None:
        return cells.remainder_probs
    items = np.repeat(np.arange(cells.num_items), np.diff(cells.cell_offsets))
    rests = 1 - np.bincount(items, cells.teacher_probs.astype(np.float64), minlength=cells.num_items)
    return np.where(rests > MIN_REMAINDER, rests, 0)


def allowed_splits(num_rows: int, terms: Sequence[LossTensors]) -> NDArray[np.bool_]:
    """Return [rows + 1], before which rows no item is cut in two."""
    free = np.ones(num_rows + 1, np.bool_)
    for term in terms:
        several = term.row_counts > 1
        for start, count in zip(term.first_rows[several].tolist(), term.row_counts[several].tolist(), strict=True):
            free[start + 1 : start + count] = False
    return free


def chunk_starts(num_rows: int, size: int, terms: Sequence[LossTensors]) -> list[int]:
    """Return where chunks of about `size` rows begin, so that no item straddles two of them."""
    if num_rows == 0:
        return [0]
    free = allowed_splits(num_rows, terms)
    starts = [0]
    while starts[-1] < num_rows:
        stop = min(starts[-1] + size, num_rows)
        while not free[stop] and stop > starts[-1] + 1:
            stop -= 1
        if not free[stop]:  # one item is larger than a chunk
            stop = starts[-1] + size
            while stop < num_rows and not free[stop]:
                stop += 1
        starts.append(min(stop, num_rows))
    return starts


class FusedLossFunction(torch.autograd.Function):
    """The sum of all terms, with gradients computed on the way forward."""

    @staticmethod
    def forward(
        ctx: Any, head: OutputHead, terms: Sequence[LossTensors], chunk: int, bias: Tensor | None, *pairs: Tensor
    ) -> Tensor:
        """Return the unscaled sum of each term, [terms]; `backward` is of the scaled total.

        `pairs` are what the matrices of the head are multiplied with, then the matrices.
        """
        ctx.head, ctx.terms, ctx.chunk = head, terms, chunk
        ctx.save_for_backward(bias, *pairs)
        ctx.needed = ctx.needs_input_grad[3:]
        sums, ctx.gradients = _forward_backward(head, terms, chunk, bias, pairs, ctx.needed)
        return sums

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Any, ...]:
        """Hand out the gradients of the scaled total, times the gradient that comes in at the first term."""
        (factor,) = outputs
        # They are given away and not kept, so that nothing has to be copied; who asks twice waits twice.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            bias, *pairs = ctx.saved_tensors
            _, gradients = _forward_backward(ctx.head, ctx.terms, ctx.chunk, bias, pairs, ctx.needed)
        # A head's gradient takes a while to read; on a CPU it can be seen that it stays as it is.
        if factor.device.type != "cpu" or factor[0] != 1:
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(factor[0])
        return (None, None, None, *gradients)


def fused_loss(
    states: Tensor, head: OutputHead, terms: Sequence[LossTensors], chunk_rows: int
) -> tuple[Tensor, Tensor]:
    """Compute the scaled total and each term's sum over items.

    Of a head in shards every process of the group gives the same states, terms and chunk. All get the same total, the
    gradient of the states is the whole one, and that of the head is of the process's own rows.

    Args:
        states: [N, H], rows of hidden states (or of logits [N, V], if the head has no weight).
        head: makes logits of them.
        terms: the losses.
        chunk_rows: rows whose logits exist at one time.

    Returns:
        total: a scalar, `sum over terms of scale * sum over items`, with a gradient.
        sums: [terms], detached, each term's unscaled sum over its items.
    """
    tensors = [*(head.matrix_inputs(states) if head.matrices else [states]), *head.matrices]
    sums = FusedLossFunction.apply(head, terms, chunk_rows, head.bias, *tensors)  # type: ignore[no-untyped-call]
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
def _forward_backward(
    head: OutputHead,
    terms: Sequence[LossTensors],
    chunk: int,
    bias: Tensor | None,
    pairs: Sequence[Tensor],
    needed: Sequence[bool],
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the sums of all terms, and the gradients of the bias and the pairs, as far as they are needed."""
    count = max(1, len(pairs) // 2)
    inputs, states, shard = pairs[:count], pairs[0], head.shard
    compute = _compute_dtype(states, head.weight)
    gradients = _GradientAccumulator(head, [bias, *pairs], needed, compute)
    # A second memory as large as the logits is asked for by a soft cap, and by what several losses leave over.
    several = sum(bool(term.has_remainder.any()) for term in terms) > 1
    size = max(1, chunk // (1 + several + (head.softcap is not None)))
    if shard is not None:
        size = shard.all_reduce_min(size, states.device)
    # Who looks back needs the last row of the chunk before: it is computed twice, and adds to its gradient twice.
    again = int(any(term.alternatives is not None for term in terms))
    starts = chunk_starts(len(states), max(1, size - again), terms)
    logits_of = ChunkedLogits(head, states, size, compute, with_softcap_gradient=any(needed))
    first_token, width = 0 if shard is None else shard.first_token, head.num_logits(states)
    sums = torch.zeros(len(terms), dtype=accumulation_dtype(compute), device=states.device)
    for start, stop in itertools.pairwise(starts):
        base = max(0, start - again)
        parts = [_chunk_of_term(term, start, stop, base, sums.dtype) for term in terms]
        edges = [*range(0, stop - base, size), stop - base]
        windows = [
            LogitsWindow(low, high, first_token, width, shard is None and len(edges) == 2)
            for low, high in itertools.pairwise(edges)
        ]
        sums += _loss_of_chunk([some[base:stop] for some in inputs], base, logits_of, windows, parts, gradients)
    return sums, gradients.finish()


def _loss_of_chunk(
    inputs: Sequence[Tensor],
    base: int,
    logits_of: ChunkedLogits,
    windows: Sequence[LogitsWindow],
    parts: list[LossChunk],
    gradients: _GradientAccumulator,
) -> Tensor:
    """Return each term's sum [terms] over the items of a chunk, whose first row is `base`, and add their gradients."""
    shard = gradients.shard

    def reading(window: LogitsWindow) -> WindowStatistics:
        return read_window(logits_of.from_matrix_inputs([some[window.rows] for some in inputs]), window, parts, shard)

    readings = [reading(window) for window in windows]
    said = combine_windows(readings, parts, shard)
    values, of_parts = _loss_and_gradients(parts, said, gradients.wanted)
    if of_parts is None:
        return values
    for window, first in zip(windows, readings, strict=True):
        again = first if len(windows) == 1 else reading(window)
        d_logits = logits_gradient(again, said, of_parts, parts)
        gradients.add(slice(base + window.first_row, base + window.stop_row), d_logits, inputs, window.rows, logits_of)
    return values


def accumulation_dtype(compute: torch.dtype) -> torch.dtype:
    """Return in what losses are computed: fp32, or fp64 for fp64."""
    return torch.float64 if compute == torch.float64 else torch.float32


def _compute_dtype(states: Tensor, weight: Tensor | None) -> torch.dtype:
    if weight is None:
        return states.dtype
    if torch.is_autocast_enabled(states.device.type):
        return torch.get_autocast_dtype(states.device.type)
    return weight.dtype


class _GradientAccumulator:
    """Where the gradients of a head and of what goes into it add up: each in the memory in which it is handed out."""

    def __init__(
        self, head: OutputHead, tensors: Sequence[Tensor | None], needed: Sequence[bool], compute: torch.dtype
    ) -> None:
        self.wanted, self.shard = any(needed), head.shard
        self._scale, self._compute = head.scale, compute
        self._all = [
            torch.zeros_like(tensor) if tensor is not None and need else None
            for tensor, need in zip(tensors, needed, strict=True)
        ]
        count = max(1, len(tensors) // 2)
        self._inputs, self._matrices = self._all[1 : 1 + count], self._all[1 + count :]
        self._bias = None if self._all[0] is None else self._all[0].to(accumulation_dtype(compute))

    def add(
        self, rows: slice, d_logits: Tensor, inputs: Sequence[Tensor], among: slice, logits_of: ChunkedLogits
    ) -> None:
        """Multiply the gradient [n, V] of some rows' logits, which is written over, into all others.

        Args:
            rows: which, of the gradients.
            d_logits: theirs.
            inputs: what the matrices were multiplied with.
            among: which rows of that.
            logits_of: made the logits.
        """
        if logits_of.softcap_gradient is not None:
            d_logits.mul_(logits_of.softcap_gradient)
        if not self._matrices:
            (of_logits,) = self._inputs
            if of_logits is not None:
                of_logits[rows] += d_logits
            return
        small = d_logits
        if logits_of.scratch is not None and d_logits.dtype != self._compute:
            small = logits_of.scratch.copy_(d_logits)
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
                self.shard.all_reduce_sum(gradient)
        if self._bias is not None and self._all[0] is not None:
            self._all[0].copy_(self._bias)
        return self._all


# A product that is added to another dtype is made of so many rows at a time.
PRODUCT_ROWS = 8192


def _add_product(total: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right, alpha=scale)
        return
    for start in range(0, len(total), PRODUCT_ROWS):
        some = slice(start, start + PRODUCT_ROWS)
        total[some].add_(left[some] @ right, alpha=scale)


def _chunk_of_term(term: LossTensors, start: int, stop: int, base: int, wide: torch.dtype) -> LossChunk:
    """Cut out the items of rows `[start, stop)`, for logits whose first row is `base`."""
    low, high = torch.searchsorted(term.first_rows, torch.tensor([start, stop])).tolist()
    cell_offsets = term.cell_offsets[low : high + 1]
    cells = slice(int(cell_offsets[0]), int(cell_offsets[-1]))
    entry_offsets = term.entry_offsets[cells.start : cells.stop + 1]
    entries = slice(int(entry_offsets[0]), int(entry_offsets[-1]))
    has_rest = term.has_remainder[low:high]
    counts = term.row_counts[low:high][has_rest]
    rest_items = torch.arange(len(counts)).repeat_interleave(counts)
    within = torch.arange(len(rest_items)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    items, owners = torch.arange(high - low), has_rest.nonzero()[:, 0]
    of_cells, real = items.repeat_interleave(torch.diff(cell_offsets)), torch.arange(cells.stop - cells.start)
    device, shares, chain = term.rows.device, -counts[rest_items].to(wide).log(), None
    teacher_probs = term.teacher_probs[cells]
    if term.prefix_product is not None:
        chain = term.prefix_product.for_chunk(slice(low, high), cell_offsets, owners[rest_items], within)
        real, shares = chain.final_cells, torch.zeros_like(shares)
        chain, teacher_probs = chain.to(device), teacher_probs[real.to(device)]
    log_weights = term.log_weights[entries].to(wide)
    return LossChunk(
        num_items=high - low,
        num_cells=cells.stop - cells.start,
        entry_cells=term.entry_cells[entries] - cells.start,
        teacher_probs=teacher_probs,
        rows=term.rows[entries].long() - base,
        tokens=term.tokens[entries],
        log_weights=log_weights,
        weights=log_weights.exp().mul_(term.rows_averaged[entries]),
        remainder_probs=term.remainder_probs[low:high][has_rest].to(device),
        remainder_rows=(term.first_rows[low:high][has_rest][rest_items] + within - base).to(device),
        remainder_items=(rest_items if chain is None else torch.arange(len(rest_items))).to(device),
        remainder_log_weights=shares.to(device),
        item_groups=torch.cat([of_cells[real], owners]).to(device),
        scale=term.scale,
        divergence=term.divergence,
        alternatives=None
        if term.alternatives is None
        else term.alternatives.for_chunk(slice(low, high), cell_offsets, base, owners),
        prefix_product=chain,
        sorted_probs=None if term.sorted_probs is None else term.sorted_probs.for_chunk(slice(low, high), base, wide),
        outside_mode=term.outside_mode,
        factor=term.factor,
        surrogate=None if term.surrogate is None else term.surrogate.select(slice(low, high)),
        item_weights=None if term.weights is None else term.weights[low:high],
    )


def _loss_and_gradients(
    parts: list[LossChunk], said: ChunkStatistics, with_gradient: bool
) -> tuple[Tensor, ChunkGradients | None]:
    """Return each term's sum [terms], and the gradients of the scaled total."""
    log_totals, log_normaliser, before = said.row_logsumexp, said.exp_sums.log(), iter(said.alternative_logits)
    by_rank = iter(zip(said.largest, said.included_sums, strict=True))
    values, gradients = [], ChunkGradients([], [], [], [])
    for part, logits, left in zip(parts, said.entry_logits, said.remainder_sums, strict=True):
        log_probs = logits - log_totals[part.rows] + part.log_weights
        log_rests = left.log() - log_normaliser[part.remainder_rows] + part.remainder_log_weights
        sums = [
            _GroupLogSumExp(log_probs, part.entry_cells, part.num_cells),
            _GroupLogSumExp(log_rests, part.remainder_items, part.num_remainders),
        ]
        if part.alternatives is not None:
            of_rows = next(before) - log_totals[part.alternatives.rows]
            sums.append(_GroupLogSumExp(of_rows, part.alternatives.groups, len(part.alternatives.group_items)))
        leaves, ranked = [side.log_sums for side in sums], None
        if part.sorted_probs is not None:
            ranked = _LargestLogprobs.from_chunk(part.sorted_probs, *next(by_rank), said)
            leaves += [ranked.log_probs, ranked.masses]
        with torch.enable_grad():
            value = _weighted_loss(part, [leaf.requires_grad_(with_gradient) for leaf in leaves], ranked)
            scaled = value * part.scale
        values.append(value.detach().to(log_totals.dtype))
        if not with_gradient:
            continue
        found = torch.autograd.grad(scaled, leaves)
        one, other, *more = (side.gradient(gradient) for side, gradient in zip(sums, found, strict=False))
        gradients.entries.append(one)
        gradients.remainders.append(other)
        gradients.alternatives.extend(more)
        if ranked is not None:
            gradients.ranks.append(ranked.gradient(found[-2], found[-1]))
    return torch.stack(values), gradients if with_gradient else None


@dataclass(frozen=True)
class _LargestLogprobs:
    """The student's largest tokens of the items of one part: which ranks have one, and what they say."""

    ranks: ChunkSortedProbs
    ranks_with_token: Tensor
    rows: Tensor
    tokens: Tensor
    log_probs: Tensor
    item_rows: Tensor
    masses: Tensor

    @classmethod
    def from_chunk(
        cls, ranks: ChunkSortedProbs, largest: LargestLogits, sums: Tensor, said: ChunkStatistics
    ) -> _LargestLogprobs:
        """Read them off what a chunk says."""
        held = (largest.tokens >= 0).nonzero()[:, 0]
        item_rows = ranks.rows.to(held.device)
        rows = item_rows[ranks.rank_items[held]]
        log_probs = largest.logits[held] - said.row_logsumexp[rows]
        masses = torch.ones_like(sums) if ranks.excluded_tokens is None else sums / said.exp_sums[item_rows]
        return cls(ranks, held, rows, largest.tokens[held], log_probs, item_rows, masses)

    def gradient(self, of_logprobs: Tensor, of_masses: Tensor) -> RankGradients:
        """Return their gradients, with where they belong."""
        return RankGradients(
            self.rows, self.tokens, of_logprobs, self.item_rows, of_masses, self.masses.detach(), self.ranks
        )


def _weighted_loss(part: LossChunk, leaves: list[Tensor], ranked: _LargestLogprobs | None) -> Tensor:
    """Return the weighted sum over items of what a loss says.

    Args:
        part: the items.
        leaves: log-probabilities of cells, and of rests; of the groups of the rows before, for losses that look back;
            of the largest tokens, and the mass of all of them, for losses that compare ranks.
        ranked: which tokens these are.
    """
    if part.alternatives is not None:
        said = part.alternatives.condition_cells(*leaves[:3])
    elif part.prefix_product is not None:
        said = part.prefix_product.apply_prefix(*leaves[:2])
    else:
        said = (leaves[0], leaves[1])
    if part.surrogate is not None:
        values = part.surrogate.item_losses(torch.cat(said))  # without any rests
        return (values if part.item_weights is None else values * part.item_weights).sum()
    value = part.factor * _weighted_divergence(part, torch.cat(said))
    if ranked is None:
        return value
    before = None if part.prefix_product is None else part.prefix_product.prefix_logprobs(leaves[0])
    of_ranks, behind = ranked.ranks.rank_distances(ranked.ranks_with_token, leaves[-2], leaves[-1], before)
    if part.item_weights is not None:
        of_ranks, behind = of_ranks * part.item_weights[ranked.ranks.rank_items], behind * part.item_weights
    return value + of_ranks.sum() + behind.sum()


def _weighted_divergence(part: LossChunk, log_probs: Tensor) -> Tensor:
    """Return the weighted sum over items of the divergence between the teacher's and the student's cells.

    Args:
        part: the items.
        log_probs: [cells + rests], the student's.

    Returns:
        A scalar, not negative but for rounding.
    """
    probs = torch.cat([part.teacher_probs.to(log_probs.dtype), part.remainder_probs.to(log_probs.dtype)])
    items, power = part.num_items, 1 / part.divergence.temperature
    if part.outside_mode == "renormalised":
        ours = log_probs.exp()
        sums = ours.new_zeros(items).scatter_add(0, part.item_groups, ours) + PUBLISHED_EPSILON
        log_probs = (ours / sums[part.item_groups] + PUBLISHED_EPSILON).log()
    if power != 1:
        log_probs = power * log_probs
        log_probs = log_probs - group_logsumexp(log_probs, part.item_groups, items)[part.item_groups]
        probs = probs.pow(power)
        probs = probs / probs.new_zeros(items).scatter_add(0, part.item_groups, probs)[part.item_groups]
    probs[len(part.teacher_probs) :].clamp_min_(part.divergence.min_remainder)
    values = part.divergence.cell_values(probs, log_probs)
    if part.item_weights is not None:
        values = values * part.item_weights[part.item_groups]
    return values.sum() / power**2


class _GroupLogSumExp:
    """Log-sum-exp of values in groups, and its gradient.

    Attributes:
        log_sums: [groups]; -inf of an empty one.
    """

    def __init__(self, values: Tensor, groups: Tensor, count: int) -> None:
        self._groups = groups
        if values.device.type == "cpu":
            self.log_sums = torch.from_numpy(cell_kernels.group_logsumexp_(values.numpy(), groups.numpy(), count))
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
