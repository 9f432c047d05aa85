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
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xtk.losses.cells.loss_cells import LossCells
from xtk.losses.kernels.chunked_softmax import (
    ChunkGradients,
    ChunkStatistics,
    EntryGroups,
    LogitsWindow,
    RankGradients,
    SoftmaxReads,
    WindowStatistics,
    combine_windows,
    logits_gradient,
    read_window,
)
from xtk.losses.kernels.chunked_softmax_numba import group_logsumexp_
from xtk.models.output_head import ChunkedLogits, OutputHead, add_product_, chunk_rows_of, compute_dtype
from xtk.parallel.host_to_device import to_device


def allowed_splits(num_rows: int, terms: Sequence[LossCells]) -> NDArray[np.bool_]:
    """Return bool [rows + 1], the rows before which a chunk may begin without splitting an item."""
    free = np.ones(num_rows + 1, np.bool_)
    for term in terms:
        several = term.row_counts > 1
        for start, count in zip(term.first_rows[several].tolist(), term.row_counts[several].tolist(), strict=True):
            free[start + 1 : start + count] = False
    return free


def chunk_starts(num_rows: int, size: int, terms: Sequence[LossCells]) -> list[int]:
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
        ctx: Any,
        head: OutputHead,
        terms: Sequence[LossCells],
        chunk: int,
        with_gradient: bool,
        has_unit_gradient: bool,
        bias: Tensor | None,
        *pairs: Tensor,
    ) -> Tensor:
        """Return the unscaled sum of each term, [terms]; `backward` returns gradients of the scaled total.

        `pairs` are the inputs of the head's matrices, followed by the matrices. Whether gradients are enabled is an
        argument, since they are never enabled here, and `requires_grad` of the inputs does not depend on it.
        """
        ctx.head, ctx.terms, ctx.chunk, ctx.has_unit_gradient = head, terms, chunk, has_unit_gradient
        ctx.save_for_backward(bias, *pairs)
        ctx.needed = tuple(with_gradient and is_needed for is_needed in ctx.needs_input_grad[5:])
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
        if factor[0] != 1 if factor.device.type == "cpu" else not ctx.has_unit_gradient:
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(factor[0])
        return (None, None, None, None, None, *gradients)


def fused_loss(
    states: Tensor,
    head: OutputHead,
    terms: Sequence[LossCells],
    chunk_rows: int | None = None,
    *,
    has_unit_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the scaled total loss, with a gradient, and [terms], each term's unscaled sum over items, detached.

    With a sharded head all processes of the group pass the same states, terms and chunk size. All get the same total
    and the full gradient of the states; the gradient of the head is that of the process's own rows.

    Args:
        states: [N, H], rows of hidden states (or of logits [N, V], if the head has no weight).
        chunk_rows: number of rows whose logits are in memory at one time; None: chosen by vocabulary and device.
        has_unit_gradient: the caller calls `total.backward()` on the total as it is. On a GPU the gradients are then
            not multiplied by a factor of 1, which the host cannot see there.
    """
    tensors = [*(head.matrix_inputs(states) if head.matrices else [states]), *head.matrices]
    options = chunk_rows or chunk_rows_of(head, states), torch.is_grad_enabled(), has_unit_gradient
    sums = FusedLossFunction.apply(head, terms, *options, head.bias, *tensors)  # type: ignore[no-untyped-call]
    scales = to_device(torch.tensor([term.scale for term in terms], dtype=sums.dtype), states.device)
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
    terms: Sequence[LossCells],
    chunk: int,
    bias: Tensor | None,
    pairs: Sequence[Tensor],
    needed: Sequence[bool],
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the sums of all terms, and the gradients of the bias and the pairs where they are needed."""
    count = max(1, len(pairs) // 2)
    inputs, states, shard = pairs[:count], pairs[0], head.shard
    compute = compute_dtype(states, head.weight)
    gradients = _GradientAccumulator(head, [bias, *pairs], needed, compute)
    # A soft cap, and remainders of several terms, each need another buffer as large as the logits.
    several = sum(bool(term.has_remainder.any()) for term in terms) > 1
    size = max(1, chunk // (1 + several + (head.softcap is not None)))
    # A row that a loss needs from the previous chunk is computed twice, and both gradients add up.
    overlap = max((term.ROWS_BEFORE for term in terms), default=0)
    starts = chunk_starts(len(states), max(1, size - overlap), terms)
    logits_of = ChunkedLogits(head, states, size, compute, with_softcap_gradient=any(needed))
    first_token, width = 0 if shard is None else shard.first_token, head.num_logits(states)
    sums = torch.zeros(len(terms), dtype=accumulation_dtype(compute), device=states.device)
    for start, stop in itertools.pairwise(starts):
        base = max(0, start - overlap)
        cells_of_terms = [term.select_rows(start, stop, base) for term in terms]
        edges = [*range(0, stop - base, size), stop - base]
        windows = [
            LogitsWindow(low, high, first_token, width, shard is None and len(edges) == 2)
            for low, high in itertools.pairwise(edges)
        ]
        of_chunk = [some[base:stop] for some in inputs]
        sums += _loss_of_chunk(of_chunk, base, logits_of, windows, cells_of_terms, gradients)
    return sums, gradients.finish()


def _loss_of_chunk(
    inputs: Sequence[Tensor],
    base: int,
    logits_of: ChunkedLogits,
    windows: Sequence[LogitsWindow],
    cells_of_terms: list[LossCells],
    gradients: _GradientAccumulator,
) -> Tensor:
    """Return each term's sum [terms] over the items of a chunk with first row `base`, and add their gradients."""
    shard, dtype = gradients.shard, accumulation_dtype(gradients.compute)
    if logits_of.matrices:
        inputs = [some.to(gradients.compute) for some in inputs]
    parts = [cells.softmax_reads(dtype) for cells in cells_of_terms]

    def compute_window(window: LogitsWindow) -> WindowStatistics:
        return read_window(logits_of.from_matrix_inputs([some[window.rows] for some in inputs]), window, parts, shard)

    by_window = [compute_window(window) for window in windows]
    statistics = combine_windows(by_window, parts, shard)
    values, of_parts = _loss_and_gradients(cells_of_terms, parts, statistics, gradients.wanted)
    if of_parts is None:
        return values
    for window, first in zip(windows, by_window, strict=True):
        current = first if len(windows) == 1 else compute_window(window)  # the logits buffer was reused
        d_logits = logits_gradient(current, statistics, of_parts, parts, gradients.buffer(logits_of))
        gradients.add(slice(base + window.first_row, base + window.stop_row), d_logits, inputs, window.rows, logits_of)
    return values


def accumulation_dtype(compute: torch.dtype) -> torch.dtype:
    """Return the dtype in which losses are computed: fp32, or fp64 for fp64 inputs."""
    return torch.float64 if compute == torch.float64 else torch.float32


class _GradientAccumulator:
    """Sums of the gradients of a head's matrices, bias and inputs, in the tensors that `backward` returns.

    With fp32 weights, also under autocast, they are summed in fp32. With bf16 weights they are summed in bf16: an fp32
    sum would be a copy of the head, more memory than a chunk (docs/explanation/decisions.md).
    """

    def __init__(
        self, head: OutputHead, tensors: Sequence[Tensor | None], needed: Sequence[bool], compute: torch.dtype
    ) -> None:
        self.wanted, self.shard = any(needed), head.shard
        self._scale, self.compute = head.scale, compute
        self._all = [
            torch.zeros_like(tensor) if tensor is not None and need else None
            for tensor, need in zip(tensors, needed, strict=True)
        ]
        count = max(1, len(tensors) // 2)
        self._inputs, self._matrices = self._all[1 : 1 + count], self._all[1 + count :]
        self._bias = None if self._all[0] is None else self._all[0].to(accumulation_dtype(compute))

    def buffer(self, logits_of: ChunkedLogits) -> Tensor | None:
        """Return where `logits_gradient` may write a rounded gradient; None if it is needed in full precision."""
        rounded = bool(self._matrices) and accumulation_dtype(self.compute) != self.compute
        exact = self._bias is not None or logits_of.softcap_gradient is not None
        return logits_of.scratch if rounded and not exact else None

    def add(
        self, rows: slice, d_logits: Tensor, inputs: Sequence[Tensor], among: slice, logits_of: ChunkedLogits
    ) -> None:
        """Add the gradients that follow from that of logits [n, V], which is overwritten, and from inputs."""
        if logits_of.softcap_gradient is not None:
            d_logits.mul_(logits_of.softcap_gradient)
        if not self._matrices:
            (of_logits,) = self._inputs
            if of_logits is not None:
                of_logits[rows] += d_logits
            return
        small = d_logits
        if logits_of.scratch is not None and d_logits.dtype != self.compute:
            small = logits_of.scratch.copy_(d_logits)
        parts = zip(self._inputs, self._matrices, inputs, logits_of.matrices, strict=True)
        for d_input, d_matrix, some, matrix in parts:
            if d_input is not None:
                add_product_(d_input[rows], small, matrix, self._scale)
            if d_matrix is not None:
                add_product_(d_matrix, small.T, some[among], self._scale)
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


def _loss_and_gradients(
    cells_of_terms: list[LossCells], parts: list[SoftmaxReads], statistics: ChunkStatistics, with_gradient: bool
) -> tuple[Tensor, ChunkGradients | None]:
    """Return each term's sum [terms], and the gradients of the scaled total; None without gradients."""
    log_normalizer = statistics.exp_sums.log()
    log_totals = log_normalizer + statistics.row_max
    sums = _GroupLogSumExp(parts, statistics, log_totals, log_normalizer)
    by_rank = iter(zip(statistics.largest, statistics.included_sums, strict=True))
    values, gradients, of_sums = [], ChunkGradients([], [], [], []), list[Tensor]()
    for cells, part, logits, log_sums in zip(
        cells_of_terms, parts, statistics.entry_logits, sums.of_parts, strict=True
    ):
        leaves = [*log_sums]
        if part.largest is not None:
            largest, included = next(by_rank)
            item_rows = to_device(part.largest.rows, included.device)
            rank_rows = item_rows[part.largest.rank_items]
            leaves.append(largest.logits - log_totals[rank_rows])
            has_all = part.largest.excluded_tokens is None
            leaves.append(torch.ones_like(included) if has_all else included / statistics.exp_sums[item_rows])
        weights = None
        if with_gradient and cells.regions is not None and cells.num_items:
            # A value is linear in the weights of its items, so that its gradient by them has the items' own values.
            weights = torch.ones(cells.num_items, dtype=logits.dtype, device=logits.device)
            weights = (weights if cells.weights is None else cells.weights.to(weights)).requires_grad_()
            cells = dataclasses.replace(cells, weights=weights)
        with torch.enable_grad():
            value = cells.value(*[leaf.requires_grad_(with_gradient) for leaf in leaves])
        values.append(value.detach().to(log_totals.dtype))
        if not with_gradient:
            continue
        used = leaves if weights is None else [*leaves, weights]
        of_used = torch.autograd.grad(value, used, torch.full_like(value, cells.scale), allow_unused=True)
        of_leaves = [leaf.detach() if part is None else part for leaf, part in zip(leaves, of_used, strict=False)]
        assert all(part is not None or not len(leaf) for leaf, part in zip(used, of_used, strict=True))
        if weights is not None:
            of_weights = of_used[-1]
            cells.add_to_region_sums(of_weights * weights.detach() / (cells.scale or 1.0))
        of_sums += of_leaves[: len(log_sums)]
        if part.largest is not None:
            # Where an item has no more tokens, -0.0 is added to any entry of its row, which changes nothing.
            tokens, of_logprobs = largest.tokens.clamp_min(0), of_leaves[-2].masked_fill(largest.tokens < 0, -0.0)
            masses = leaves[-1].detach()
            of_ranks = RankGradients(rank_rows, tokens, of_logprobs, of_leaves[-1], masses, part.largest)
            gradients.ranks.append(of_ranks)
    if not with_gradient:
        return torch.stack(values), None
    for of_entries, of_remainders, *of_alternatives in sums.gradients(of_sums):
        gradients.entries.append(of_entries)
        gradients.remainders.append(of_remainders)
        gradients.alternatives.extend(of_alternatives)
    return torch.stack(values), gradients


class _GroupLogSumExp:
    """Log-sum-exp in groups of the log-probabilities of all entries, remainders and alternatives; and its gradient.

    They are computed together: on a GPU each operation is a launch.
    """

    def __init__(
        self, parts: list[SoftmaxReads], statistics: ChunkStatistics, log_totals: Tensor, log_normalizer: Tensor
    ) -> None:
        alternatives = iter(statistics.alternative_logits)
        values, groups, self._counts = list[Tensor](), list[Tensor](), list[list[int]]()
        of_statistics = zip(parts, statistics.entry_logits, statistics.remainder_sums, strict=True)
        for part, logits, left in of_statistics:
            log_remainders = left
            if len(left):
                log_remainders = left.log() - log_normalizer[part.remainder_rows] + part.remainder_log_weights
            values += [_log_probs(part.cells, logits, log_totals), log_remainders]
            groups += [part.cells.groups, part.remainder_groups]
            self._counts.append([part.cells.num_groups, part.num_remainders])
            if part.alternatives is not None:
                values.append(_log_probs(part.alternatives, next(alternatives), log_totals))
                groups.append(part.alternatives.groups)
                self._counts[-1].append(part.alternatives.num_groups)
        self._sizes = [len(some) for some in values]
        # With one entry a group and nothing else, the sums are the values.
        self._is_identity = all(
            part.cells.has_one_each and not part.num_remainders and part.alternatives is None for part in parts
        )
        # For each part the sums [groups] of its cells, remainders, and alternatives, if any; -inf: an empty group.
        self.of_parts = self._by_part(values if self._is_identity else self._sums_of_groups(values, groups))

    def _by_part(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        each = iter(tensors)
        return [[next(each) for _ in counts] for counts in self._counts]

    def _sums_of_groups(self, values: list[Tensor], groups: list[Tensor]) -> Sequence[Tensor]:
        counts = list(itertools.chain.from_iterable(self._counts))
        firsts = [0, *itertools.accumulate(counts)]
        self._groups = torch.cat([
            some + first if first and len(some) else some for some, first in zip(groups, firsts, strict=False)
        ])  # fmt: skip
        return torch.split(self._log_sums(torch.cat(values), firsts[-1]), counts)

    def _log_sums(self, values: Tensor, count: int) -> Tensor:
        if values.device.type == "cpu":
            self._softmax = values
            return torch.from_numpy(group_logsumexp_(values.numpy(), self._groups.numpy(), count))
        groups = self._groups = self._groups.long()
        highest = values.new_full((count,), -torch.inf).scatter_reduce_(0, groups, values, "amax")
        exponentials = values.sub_(highest[groups]).exp_()
        sums = values.new_zeros(count).scatter_add_(0, groups, exponentials)
        self._softmax = exponentials.div_(sums[groups])
        return sums.log() + highest

    def gradients(self, of_log_sums: list[Tensor]) -> list[list[Tensor]]:
        """Return for each part the gradients of its log-probabilities, given those of all sums in `of_parts`."""
        if self._is_identity:
            return self._by_part(of_log_sums)
        together = self._softmax.mul_(torch.cat(of_log_sums)[self._groups])
        return self._by_part(torch.split(together, self._sizes))


def _log_probs(entries: EntryGroups, logits: Tensor, log_totals: Tensor) -> Tensor:
    log_probs = logits - log_totals[entries.rows]
    return log_probs if entries.log_weights is None else log_probs + entries.log_weights
