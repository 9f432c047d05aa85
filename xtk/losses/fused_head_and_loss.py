"""Fused output head and losses: values and gradients from hidden states, chunk by chunk, without [N, V] logits.

All losses depend on few parts of a row's softmax: *entries* (row, token), and the *remainder* of a row, the tokens that
are not entries. The gradient of the log of a part with respect to the row's logits is the softmax within that part
minus the full softmax. So for a chunk of rows one matrix product gives the logits, a small autograd graph over cells
gives the gradients `g` of the parts' log-probabilities, and

    d loss / d logits[n, v] = sum over parts of row n of g * (softmax within the part - softmax)[n, v]

is multiplied into the gradients of the hidden states and of the output head. No tensor of size `[N, V]` outlives
its chunk, and no product is computed twice. The remainder is summed over its tokens, never computed as one minus the
entries: a confident, wrong student has a remainder of 1e-9, and fp32 cannot represent 1 - 1e-9.
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

from xtk.losses import projected_kl_numba
from xtk.losses.chunked_softmax import (
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
from xtk.losses.loss_interface import LossCells
from xtk.losses.sorted_probs import ChunkSortedProbs, LargestLogits, TermSortedProbs
from xtk.losses.span_probability_products import TermPrefixProduct
from xtk.losses.tokenization_marginalization import TermAlternatives, group_logsumexp
from xtk.models.output_head import ChunkedLogits, OutputHead

# Probabilities from stored fp32 log-probabilities sum to 1 within this; a smaller remainder counts as 0.
MIN_REMAINDER = 1e-6
# Smallest probability of the student in a cell for p-kl with published=true, as in X-Token.
PUBLISHED_EPSILON = 1e-10


@dataclass(frozen=True)
class LossTensors:
    """One loss term: the structure of its `LossCells` on the CPU, their values on a device.

    Attributes:
        first_rows: [C], the first row of each item, sorted.
        row_counts: [C], number of rows that are averaged, or multiplied; 0 for an item without cells or inside of a
            token.
        remainder_probs: [C], the teacher's remainder; 0 where it is within rounding.
        has_remainder: bool [C], whether the student's remainder is computed.
        rows_averaged: float32 [entries], number of rows over which the item of an entry is averaged.
        scale: factor of each item: the term's weight over the global number of items.
        divergence: between the teacher's and the student's cells.
        alternatives: alternative tokens in the previous row, for losses that need them; None: none.
        prefix_product: prefix tokens whose probabilities multiply the cells; None: none.
        sorted_probs: probabilities that are compared by rank, in addition to the cells; None: none.
        outside_mode: treatment of the mass outside of the cells; a key of `OUTSIDE_MODES`.
        factor: factor of the divergence.
        surrogate: a clipped surrogate that replaces the divergence; None: none.
        weights: float32 [C], weight of each item in the sum; None: 1.
        counts: float64 [C], weight of each item in the denominator; None: 1.
        corrections: float64 [C], added to the value of each item, not to its gradient; None: none.
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
        """Number of items, C."""
        return len(self.first_rows)

    @property
    def denominator(self) -> float:
        """Number of items, or sum of their documents' weights, over which the loss is averaged."""
        return self.num_items if self.counts is None else float(self.counts.sum())

    def with_row_weights(self, counts: NDArray[np.float64] | None, factors: NDArray[np.float64] | None) -> LossTensors:
        """Return a copy in which each item has the weight of its first row.

        Args:
            counts: [N], weight of each row in the sum and in the denominator; None: 1.
            factors: [N], factor of each row in the sum only; None: 1.
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
        """Return a copy on a device, with a scale."""
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
        """Return the items whose first row is in `[start, stop)`, with rows relative to `first_row`."""
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
        """Return cells as tensors on the CPU, with scale 1."""
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
        if cells.prefix_product is not None:  # even an item without cells has a remainder, of probability 1
            counts, has_cells = cells.prefix_product.num_prefix_tokens + 1, np.ones(cells.num_items, np.bool_)
        remainder_probs = _remainder_probs(cells)
        has_remainder = (
            has_cells
            & (remainder_probs > 0 if cells.divergence.is_linear_in_teacher else ~closed)
            & (cells.outside_mode == "other")
        )
        averaged = np.repeat(counts.astype(np.float32), stops - firsts)
        return cls(
            cell_offsets=torch.from_numpy(cells.cell_offsets),
            entry_offsets=torch.from_numpy(cells.entry_offsets),
            first_rows=torch.from_numpy(first_rows),
            row_counts=torch.from_numpy(counts),
            remainder_probs=torch.from_numpy(remainder_probs),
            has_remainder=torch.from_numpy(has_remainder),
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
        """Sum of the corrections of all items: a scalar without a gradient."""
        if self.corrections is None:
            return 0.0
        return (self.corrections if self.weights is None else self.corrections * self.weights).sum()


def _remainder_probs(cells: LossCells) -> NDArray[np.float64]:
    """Return [C], the teacher's remainder."""
    if cells.remainder_probs is not None:
        return cells.remainder_probs
    items = np.repeat(np.arange(cells.num_items), np.diff(cells.cell_offsets))
    remainder_probs = 1 - np.bincount(items, cells.teacher_probs.astype(np.float64), minlength=cells.num_items)
    return np.where(remainder_probs > MIN_REMAINDER, remainder_probs, 0)


def allowed_splits(num_rows: int, terms: Sequence[LossTensors]) -> NDArray[np.bool_]:
    """Return bool [rows + 1], the rows before which a chunk may begin without splitting an item."""
    free = np.ones(num_rows + 1, np.bool_)
    for term in terms:
        several = term.row_counts > 1
        for start, count in zip(term.first_rows[several].tolist(), term.row_counts[several].tolist(), strict=True):
            free[start + 1 : start + count] = False
    return free


def chunk_starts(num_rows: int, size: int, terms: Sequence[LossTensors]) -> list[int]:
    """Return the first rows of chunks of about `size` rows, and the number of rows; no item is in two chunks."""
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
    """Autograd function of the total loss, whose gradients are computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, head: OutputHead, terms: Sequence[LossTensors], chunk: int, bias: Tensor | None, *pairs: Tensor
    ) -> Tensor:
        """Return the unscaled sum of each term, [terms]; `backward` returns gradients of the scaled total.

        `pairs` are the inputs of the head's matrices, followed by the matrices.
        """
        ctx.head, ctx.terms, ctx.chunk = head, terms, chunk
        ctx.save_for_backward(bias, *pairs)
        ctx.needed = ctx.needs_input_grad[3:]
        sums, ctx.gradients = _forward_backward(head, terms, chunk, bias, pairs, ctx.needed)
        return sums

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Any, ...]:
        """Return the gradients of the scaled total, times the incoming gradient of the first term."""
        (factor,) = outputs
        # They are returned without a copy and not kept; a second backward pass computes them again.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            bias, *pairs = ctx.saved_tensors
            _, gradients = _forward_backward(ctx.head, ctx.terms, ctx.chunk, bias, pairs, ctx.needed)
        # Multiplying a head's gradient takes time; on a CPU a factor of 1 is seen without synchronization.
        if factor.device.type != "cpu" or factor[0] != 1:
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(factor[0])
        return (None, None, None, *gradients)


def fused_loss(
    states: Tensor, head: OutputHead, terms: Sequence[LossTensors], chunk_rows: int
) -> tuple[Tensor, Tensor]:
    """Return the scaled total loss, and each term's sum over items.

    With a sharded head all processes of the group pass the same states, terms and chunk size. All get the same total
    and the full gradient of the states; the gradient of the head is that of the process's own rows.

    Args:
        states: [N, H], rows of hidden states (or of logits [N, V], if the head has no weight).
        head: the output head.
        terms: the loss terms.
        chunk_rows: number of rows whose logits are in memory at one time.

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
    # FusedLossFunction expects it: its gradients are already those of the total.
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
    """Return the sums of all terms, and the gradients of the bias and the pairs where they are needed."""
    count = max(1, len(pairs) // 2)
    inputs, states, shard = pairs[:count], pairs[0], head.shard
    compute = _compute_dtype(states, head.weight)
    gradients = _GradientAccumulator(head, [bias, *pairs], needed, compute)
    # A soft cap, and remainders of several terms, each need another buffer as large as the logits.
    several = sum(bool(term.has_remainder.any()) for term in terms) > 1
    size = max(1, chunk // (1 + several + (head.softcap is not None)))
    if shard is not None:
        size = shard.all_reduce_min(size, states.device)
    # Losses with alternatives need the last row of the previous chunk: it is computed twice, and both gradients add up.
    overlap = int(any(term.alternatives is not None for term in terms))
    starts = chunk_starts(len(states), max(1, size - overlap), terms)
    logits_of = ChunkedLogits(head, states, size, compute, with_softcap_gradient=any(needed))
    first_token, width = 0 if shard is None else shard.first_token, head.num_logits(states)
    sums = torch.zeros(len(terms), dtype=accumulation_dtype(compute), device=states.device)
    for start, stop in itertools.pairwise(starts):
        base = max(0, start - overlap)
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
    """Return each term's sum [terms] over the items of a chunk with first row `base`, and add their gradients."""
    shard = gradients.shard

    def compute_window(window: LogitsWindow) -> WindowStatistics:
        return read_window(logits_of.from_matrix_inputs([some[window.rows] for some in inputs]), window, parts, shard)

    by_window = [compute_window(window) for window in windows]
    statistics = combine_windows(by_window, parts, shard)
    values, of_parts = _loss_and_gradients(parts, statistics, gradients.wanted)
    if of_parts is None:
        return values
    for window, first in zip(windows, by_window, strict=True):
        current = first if len(windows) == 1 else compute_window(window)  # the logits buffer was reused
        d_logits = logits_gradient(current, statistics, of_parts, parts)
        gradients.add(slice(base + window.first_row, base + window.stop_row), d_logits, inputs, window.rows, logits_of)
    return values


def accumulation_dtype(compute: torch.dtype) -> torch.dtype:
    """Return the dtype in which losses are computed: fp32, or fp64 for fp64 inputs."""
    return torch.float64 if compute == torch.float64 else torch.float32


def _compute_dtype(states: Tensor, weight: Tensor | None) -> torch.dtype:
    if weight is None:
        return states.dtype
    if torch.is_autocast_enabled(states.device.type):
        return torch.get_autocast_dtype(states.device.type)
    return weight.dtype


class _GradientAccumulator:
    """Sums of the gradients of a head's matrices, bias and inputs, in the tensors that `backward` returns."""

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
        """Add the gradients that follow from the gradient [n, V] of some rows' logits, which is overwritten.

        Args:
            rows: the rows within the gradients.
            d_logits: gradient of their logits.
            inputs: inputs of the matrices for the chunk.
            among: the rows within `inputs`.
            logits_of: computed the logits.
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
        """Return all gradients after the last row; those of inputs are summed over the head's shards."""
        for gradient in self._inputs:
            if gradient is not None and self.shard is not None:
                self.shard.all_reduce_sum(gradient)
        if self._bias is not None and self._all[0] is not None:
            self._all[0].copy_(self._bias)
        return self._all


# Rows at a time of a product that is added to a tensor of another dtype.
PRODUCT_ROWS = 8192


def _add_product(total: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right, alpha=scale)
        return
    for start in range(0, len(total), PRODUCT_ROWS):
        some = slice(start, start + PRODUCT_ROWS)
        total[some].add_(left[some] @ right, alpha=scale)


def _chunk_of_term(term: LossTensors, start: int, stop: int, base: int, wide: torch.dtype) -> LossChunk:
    """Return the items whose first row is in `[start, stop)`, for a chunk of logits with first row `base`."""
    low, high = torch.searchsorted(term.first_rows, torch.tensor([start, stop])).tolist()
    cell_offsets = term.cell_offsets[low : high + 1]
    cells = slice(int(cell_offsets[0]), int(cell_offsets[-1]))
    entry_offsets = term.entry_offsets[cells.start : cells.stop + 1]
    entries = slice(int(entry_offsets[0]), int(entry_offsets[-1]))
    has_remainder = term.has_remainder[low:high]
    counts = term.row_counts[low:high][has_remainder]
    remainder_items = torch.arange(len(counts)).repeat_interleave(counts)
    within = torch.arange(len(remainder_items)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    items, owners = torch.arange(high - low), has_remainder.nonzero()[:, 0]
    of_cells, real = items.repeat_interleave(torch.diff(cell_offsets)), torch.arange(cells.stop - cells.start)
    device, row_log_weights, prefix = term.rows.device, -counts[remainder_items].to(wide).log(), None
    teacher_probs = term.teacher_probs[cells]
    if term.prefix_product is not None:
        prefix = term.prefix_product.for_chunk(slice(low, high), cell_offsets, owners[remainder_items], within)
        real, row_log_weights = prefix.final_cells, torch.zeros_like(row_log_weights)
        prefix, teacher_probs = prefix.to(device), teacher_probs[real.to(device)]
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
        remainder_probs=term.remainder_probs[low:high][has_remainder].to(device),
        remainder_rows=(term.first_rows[low:high][has_remainder][remainder_items] + within - base).to(device),
        remainder_items=(remainder_items if prefix is None else torch.arange(len(remainder_items))).to(device),
        remainder_log_weights=row_log_weights.to(device),
        item_groups=torch.cat([of_cells[real], owners]).to(device),
        scale=term.scale,
        divergence=term.divergence,
        alternatives=None
        if term.alternatives is None
        else term.alternatives.for_chunk(slice(low, high), cell_offsets, base, owners),
        prefix_product=prefix,
        sorted_probs=None if term.sorted_probs is None else term.sorted_probs.for_chunk(slice(low, high), base, wide),
        outside_mode=term.outside_mode,
        factor=term.factor,
        surrogate=None if term.surrogate is None else term.surrogate.select(slice(low, high)),
        item_weights=None if term.weights is None else term.weights[low:high],
    )


def _loss_and_gradients(
    parts: list[LossChunk], statistics: ChunkStatistics, with_gradient: bool
) -> tuple[Tensor, ChunkGradients | None]:
    """Return each term's sum [terms], and the gradients of the scaled total; None without gradients."""
    log_totals, log_normaliser, before = (
        statistics.row_logsumexp,
        statistics.exp_sums.log(),
        iter(statistics.alternative_logits),
    )
    by_rank = iter(zip(statistics.largest, statistics.included_sums, strict=True))
    values, gradients = [], ChunkGradients([], [], [], [])
    for part, logits, left in zip(parts, statistics.entry_logits, statistics.remainder_sums, strict=True):
        log_probs = logits - log_totals[part.rows] + part.log_weights
        log_remainders = left.log() - log_normaliser[part.remainder_rows] + part.remainder_log_weights
        sums = [
            _GroupLogSumExp(log_probs, part.entry_cells, part.num_cells),
            _GroupLogSumExp(log_remainders, part.remainder_items, part.num_remainders),
        ]
        if part.alternatives is not None:
            of_rows = next(before) - log_totals[part.alternatives.rows]
            sums.append(_GroupLogSumExp(of_rows, part.alternatives.groups, len(part.alternatives.group_items)))
        leaves, ranked = [side.log_sums for side in sums], None
        if part.sorted_probs is not None:
            ranked = _LargestLogprobs.from_chunk(part.sorted_probs, *next(by_rank), statistics)
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
    """Log-probabilities of the student's largest tokens for the items of one part."""

    ranks: ChunkSortedProbs
    ranks_with_token: Tensor
    rows: Tensor
    tokens: Tensor
    log_probs: Tensor
    item_rows: Tensor
    masses: Tensor

    @classmethod
    def from_chunk(
        cls, ranks: ChunkSortedProbs, largest: LargestLogits, sums: Tensor, statistics: ChunkStatistics
    ) -> _LargestLogprobs:
        """Return them from the statistics of a chunk."""
        held = (largest.tokens >= 0).nonzero()[:, 0]
        item_rows = ranks.rows.to(held.device)
        rows = item_rows[ranks.rank_items[held]]
        log_probs = largest.logits[held] - statistics.row_logsumexp[rows]
        masses = torch.ones_like(sums) if ranks.excluded_tokens is None else sums / statistics.exp_sums[item_rows]
        return cls(ranks, held, rows, largest.tokens[held], log_probs, item_rows, masses)

    def gradient(self, of_logprobs: Tensor, of_masses: Tensor) -> RankGradients:
        """Return their gradients with rows and tokens."""
        return RankGradients(
            self.rows, self.tokens, of_logprobs, self.item_rows, of_masses, self.masses.detach(), self.ranks
        )


def _weighted_loss(part: LossChunk, leaves: list[Tensor], ranked: _LargestLogprobs | None) -> Tensor:
    """Return the weighted sum of a loss over its items.

    Args:
        part: the items.
        leaves: log-probabilities of cells and of remainders; then, with alternatives, those of their groups; then, with
            sorted probabilities, those of the largest tokens, and the probabilities of all included tokens.
        ranked: the largest tokens; None: no sorted probabilities.
    """
    if part.alternatives is not None:
        log_probs = part.alternatives.condition_cells(*leaves[:3])
    elif part.prefix_product is not None:
        log_probs = part.prefix_product.apply_prefix(*leaves[:2])
    else:
        log_probs = (leaves[0], leaves[1])
    if part.surrogate is not None:
        values = part.surrogate.item_losses(torch.cat(log_probs))  # there are no remainders
        return (values if part.item_weights is None else values * part.item_weights).sum()
    value = part.factor * _weighted_divergence(part, torch.cat(log_probs))
    if ranked is None:
        return value
    before = None if part.prefix_product is None else part.prefix_product.prefix_logprobs(leaves[0])
    by_rank, after_last_rank = ranked.ranks.rank_distances(ranked.ranks_with_token, leaves[-2], leaves[-1], before)
    if part.item_weights is not None:
        by_rank, after_last_rank = (
            by_rank * part.item_weights[ranked.ranks.rank_items],
            after_last_rank * part.item_weights,
        )
    return value + by_rank.sum() + after_last_rank.sum()


def _weighted_divergence(part: LossChunk, log_probs: Tensor) -> Tensor:
    """Return the weighted sum over items of the divergence between the teacher's and the student's cells.

    Args:
        part: the items.
        log_probs: [cells + remainders], the student's.

    Returns:
        A scalar, not negative except for rounding.
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
        log_sums: [groups]; -inf for an empty one.
    """

    def __init__(self, values: Tensor, groups: Tensor, count: int) -> None:
        self._groups = groups
        if values.device.type == "cpu":
            self.log_sums = torch.from_numpy(projected_kl_numba.group_logsumexp_(values.numpy(), groups.numpy(), count))
            self._softmax = values
            return
        groups = groups.long()
        highest = values.new_full((count,), -torch.inf).scatter_reduce_(0, groups, values, "amax")
        exponentials = values.sub_(highest[groups]).exp_()
        sums = values.new_zeros(count).scatter_add_(0, groups, exponentials)
        self.log_sums = sums.log() + highest
        self._softmax = exponentials.div_(sums[groups])

    def gradient(self, of_log_sums: Tensor) -> Tensor:
        """Return the gradient of the values [n], given that of the log-sums [groups]."""
        return self._softmax.mul_(of_log_sums[self._groups])
