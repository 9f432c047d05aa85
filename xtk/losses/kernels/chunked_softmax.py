"""Log-probabilities of selected entries and remainders in a chunk of logits, and the gradient of its logits.

A chunk's logits may be split into windows: with tensor parallelism each process has some columns, and an item with more
rows than a chunk is computed in several windows. Sums are accumulated over windows; gradients are written per window.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from xtk.errors import XtkError
from xtk.losses.kernels import chunked_softmax_numba
from xtk.losses.kernels.largest_tokens import LargestLogits, LargestTokens, scale_rows
from xtk.models.output_head import HeadShard
from xtk.parallel.host_to_device import to_device

MIN_SUM = 1e-37
# What the weights of a token leave of its probability, relative to it, is rounding of fp32 weights up to this.
MAX_WEIGHT_ROUNDING = 1e-6


def _load_triton_kernels() -> Any:
    """Return the module of kernels that no GPU has tested yet; None without XTK_TRITON=1 (docs/explanation/gpu.md)."""
    if os.environ.get("XTK_TRITON") != "1":
        return None
    try:
        return importlib.import_module("xtk.losses.kernels.chunked_softmax_triton")
    except ImportError:
        raise XtkError(
            "XTK_TRITON=1 needs the package triton, which is not installed",
            hint="unset XTK_TRITON, or install torch for CUDA, which brings triton",
        ) from None


TRITON = _load_triton_kernels()


@dataclass(frozen=True)
class EntryGroups:
    """Entries (row, token) of a chunk's softmax, in groups whose log-sum-exp a loss needs."""

    rows: Tensor  # [entries]
    tokens: Tensor  # [entries]
    groups: Tensor  # [entries], sorted; a group may be empty
    num_groups: int  # number of groups
    log_weights: Tensor | None = None  # [entries], log of the factor of each probability; None: 0
    has_one_each: bool = False  # whether each group is known to have one entry


@dataclass(frozen=True)
class SoftmaxReads:
    """What one loss reads of the softmax of a chunk of rows; rows are relative to the chunk."""

    cells: EntryGroups  # the entries of the cells
    # [entries of cells], weights within their own row, without the averaging over an item's rows, also for remainders.
    # None: all are 1, and no (row, token) is listed twice; or there are no remainders.
    weights: Tensor | None
    remainder_rows: Tensor  # [n], the rows of the remainders
    remainder_groups: Tensor  # [n], sorted, the remainder that each is part of
    num_remainders: int  # number of remainders
    remainder_log_weights: Tensor  # [n], the log of each row's weight in its remainder
    alternatives: EntryGroups | None = None  # further entries, which remainders do not leave out; None: none
    largest: LargestTokens | None = None  # which of the largest tokens of rows to find; None: none


@dataclass(frozen=True)
class LogitsWindow:
    """The rows and columns of a chunk's logits that are in memory at one time."""

    first_row: int  # its first row within the chunk
    stop_row: int  # one past its last
    first_token: int  # token id of its first column
    num_tokens: int  # number of columns
    is_whole_chunk: bool  # whether it covers the chunk

    @property
    def rows(self) -> slice:
        """Its rows within the chunk."""
        return slice(self.first_row, self.stop_row)

    def entry_indices(self, rows: Tensor, tokens: Tensor) -> WindowIndices:
        """Return the flat index of each entry (row, token)."""
        if self.is_whole_chunk:
            return WindowIndices(torch.add(tokens, rows, alpha=self.num_tokens), None)
        columns = tokens - self.first_token
        inside = (rows >= self.first_row) & (rows < self.stop_row) & (columns >= 0) & (columns < self.num_tokens)
        local = (rows - self.first_row) * self.num_tokens + columns
        return WindowIndices(local.masked_fill(~inside, 0), inside)

    def row_indices(self, rows: Tensor) -> WindowIndices:
        """Return the window's row index of each row."""
        if self.is_whole_chunk:
            return WindowIndices(rows, None)
        inside = (rows >= self.first_row) & (rows < self.stop_row)
        return WindowIndices((rows - self.first_row).masked_fill(~inside, 0), inside)


@dataclass(frozen=True)
class WindowIndices:
    """Indices into a window of the requested elements.

    Elements outside of the window stay in the arrays, with index 0: a selection would wait for the device.
    """

    local: Tensor  # the indices
    inside: Tensor | None  # bool, whether each element is in the window; None: all are

    def select(self, values: Tensor) -> Tensor:
        """Return the values, with -0.0 outside of the window: adding it changes nothing."""
        return values if self.inside is None else values.masked_fill(~self.inside, -0.0)

    def select_indices(self, indices: Tensor, first: int) -> Tensor:
        """Return indices relative to `first`, with 0 outside of the window."""
        indices = indices - first if first else indices
        return indices if self.inside is None else indices.masked_fill(~self.inside, 0)

    def scatter_into(self, values: Tensor, total: Tensor) -> None:
        """Write the values of the elements in this window into those of all."""
        total.copy_(values if self.inside is None else torch.where(self.inside, values, total))


@dataclass(frozen=True)
class ChunkStatistics:
    """Softmax statistics of a chunk, or of a window of it; sums over windows add up to those of the chunk."""

    row_max: Tensor  # [n], the largest logit of each row
    exp_sums: Tensor  # [n], the sum of `exp(logit - row_max)`
    remainder_sums: list[Tensor]  # for each part, [remainder rows], this sum without the part's entries
    entry_logits: list[Tensor]  # for each part, [entries], their logits
    alternative_logits: list[Tensor]  # for each part with prefix alternatives, [alternatives], their logits
    largest: list[LargestLogits]  # for each part that reads them, the student's largest logits
    included_sums: list[Tensor]  # for each such part, [items], the sums over the included tokens


@dataclass(frozen=True)
class WindowStatistics:
    """Statistics of a window, and its exponentials, without the entries of part `removed_read`.

    `entry_exponentials` are the exponentials of the entries, for each part with remainders; `removed_shares` what part
    `removed_read` has of them.
    """

    window: LogitsWindow
    exponentials: Tensor
    removed_read: int
    entry_indices: list[WindowIndices]
    alternative_indices: list[WindowIndices]
    remainder_indices: list[WindowIndices]
    entry_exponentials: list[Tensor | None]
    removed_shares: Tensor | None
    statistics: ChunkStatistics


def read_window(
    logits: Tensor, window: LogitsWindow, reads: list[SoftmaxReads], shard: HeadShard | None
) -> WindowStatistics:
    """Return the statistics of a window; its logits are overwritten by exponentials."""
    # The last part with remainders: its entries stay removed from the exponentials, as its gradient needs them.
    removed = max((number for number, part in enumerate(reads) if len(part.remainder_rows)), default=-1)
    entries = [window.entry_indices(part.cells.rows, part.cells.tokens) for part in reads]
    alternatives = [part.alternatives for part in reads if part.alternatives is not None]
    before = [window.entry_indices(some.rows, some.tokens) for some in alternatives]
    remainders = [window.row_indices(part.remainder_rows) for part in reads]
    flat = logits.view(-1)
    taken, taken_before = ([flat.take(places.local) for places in some] for some in (entries, before))
    of_ranks = [part.largest for part in reads if part.largest is not None]
    largest = [ranks.find(logits, window.first_row, window.first_token) for ranks in of_ranks]
    highest = logits.amax(1)
    if shard is not None:
        shard.all_reduce_max(highest)
    exponentials, normalizer = _exponentials_and_sums(logits, highest)
    masses = [ranks.included_sums(exponentials, window.first_row, window.first_token) for ranks in of_ranks]
    covered: list[Tensor | None] = []
    shares = None
    left = []
    # The entries of part `removed` are processed last, and are not added back.
    for part, places, remainder in zip(reads, entries, remainders, strict=True):
        if not len(part.remainder_rows):
            covered.append(None)
            left.append(normalizer[:0])
            continue
        whole = flat.take(places.local)
        shares = _remove_entries_of_(flat, places, whole, part.weights)
        left.append(exponentials.sum(1)[remainder.local])
        if part is not reads[removed]:
            restore_entries_(flat, places.local, whole)
        covered.append(whole)
    statistics = ChunkStatistics(highest, normalizer, left, taken, taken_before, largest, masses)
    return WindowStatistics(window, exponentials, removed, entries, before, remainders, covered, shares, statistics)


def _exponentials_and_sums(logits: Tensor, row_max: Tensor) -> tuple[Tensor, Tensor]:
    """Return `exp(logit - row_max)`, which overwrites the logits, and its sum for each row."""
    if TRITON is not None and TRITON.can_run(logits):
        return logits, TRITON.subtract_exp_and_sum_(logits, row_max)
    exponentials = logits.sub_(row_max[:, None]).exp_()
    return exponentials, exponentials.sum(1)


def combine_windows(
    windows: list[WindowStatistics], reads: list[SoftmaxReads], shard: HeadShard | None
) -> ChunkStatistics:
    """Return the statistics of a chunk from those of its windows, summed over the processes with other columns."""
    if shard is None and len(windows) == 1:
        statistics = windows[0].statistics
        for remainder in statistics.remainder_sums:
            if len(remainder):
                remainder.clamp_min_(MIN_SUM)
        return statistics
    like = windows[0].statistics.exp_sums
    highest = torch.cat([window.statistics.row_max for window in windows])
    normalizer = torch.cat([window.statistics.exp_sums for window in windows])
    left = [like.new_zeros(len(part.remainder_rows)) for part in reads]
    entries = [like.new_zeros(len(part.cells.rows)) for part in reads]
    before = [like.new_zeros(len(part.alternatives.rows)) for part in reads if part.alternatives is not None]
    for window in windows:
        statistics = window.statistics
        for places, values, total in zip(
            [*window.remainder_indices, *window.entry_indices, *window.alternative_indices],
            [*statistics.remainder_sums, *statistics.entry_logits, *statistics.alternative_logits],
            [*left, *entries, *before],
            strict=True,
        ):
            places.scatter_into(values, total)
    of_ranks = [part.largest for part in reads if part.largest is not None]
    masses = [
        sum(of_windows, like.new_zeros(()))
        for of_windows in zip(*(window.statistics.included_sums for window in windows), strict=True)
    ]
    largest_of_windows = zip(*(window.statistics.largest for window in windows), strict=True)
    largest = [ranks.merge(list(some)) for ranks, some in zip(of_ranks, largest_of_windows, strict=True)]
    if shard is not None:
        largest = [ranks.merge(_gather_largest(some, shard)) for ranks, some in zip(of_ranks, largest, strict=True)]
        sums = [normalizer, *left, *entries, *before, *masses]
        together = shard.all_reduce_sum(torch.cat(sums))
        for values, total in zip(torch.split(together, [len(values) for values in sums]), sums, strict=True):
            total.copy_(values)
    left = [sums.clamp_min_(MIN_SUM) for sums in left]
    return ChunkStatistics(highest, normalizer, left, entries, before, largest, masses)


def _gather_largest(own: LargestLogits, shard: HeadShard) -> list[LargestLogits]:
    """Return the largest logits that each process of the group found in its columns."""
    tokens, logits = shard.all_gather(own.tokens), shard.all_gather(own.logits)
    return [LargestLogits(*one) for one in zip(tokens, logits, strict=True)]


@dataclass(frozen=True)
class RankGradients:
    """Gradients for the student's largest tokens of one part."""

    rows: Tensor  # [H], their rows
    tokens: Tensor  # [H], their token ids
    logprob_gradients: Tensor  # [H], of their log-probabilities
    mass_gradients: Tensor  # [items], of the total probability of the included tokens
    masses: Tensor  # [items], these probabilities
    largest: LargestTokens  # the rows of items, and the included tokens


@dataclass(frozen=True)
class ChunkGradients:
    """Gradients of log-probabilities, per part: entries, remainder rows, alternatives, and largest tokens."""

    entries: list[Tensor]
    remainders: list[Tensor]
    alternatives: list[Tensor]
    ranks: list[RankGradients]


def logits_gradient(
    window_statistics: WindowStatistics,
    statistics: ChunkStatistics,
    gradients: ChunkGradients,
    reads: list[SoftmaxReads],
    out: Tensor | None = None,
) -> Tensor:
    """Turn the exponentials of a window into the gradient of its logits, in place, or in `out` where that is faster.

    The gradient is `exponentials * factors`, plus the gradient of each entry at its index, plus that of each remainder
    distributed over the tokens outside of the entries; included tokens of sorted probabilities have more factors.
    Nothing is added and subtracted again: where a remainder is tiny, its factor is huge. `out`: [n, V] of the dtype in
    which the gradient is used next; None: it must not be rounded.
    """
    window, exponentials = window_statistics.window, window_statistics.exponentials
    flat = exponentials.view(-1)
    in_all = torch.zeros_like(statistics.exp_sums)
    runs = [part.alternatives for part in reads if part.alternatives is not None]
    for part, of_entries, of_remainders in zip(reads, gradients.entries, gradients.remainders, strict=True):
        scatter_add_(in_all, part.cells.rows, of_entries)
        scatter_add_(in_all, part.remainder_rows, of_remainders)
    for run, of_before in zip(runs, gradients.alternatives, strict=True):
        scatter_add_(in_all, run.rows, of_before)
    bands = []
    for some in gradients.ranks:
        scatter_add_(in_all, some.rows, some.logprob_gradients)
        mask = some.largest.included_mask(window.first_token, window.num_tokens, exponentials.dtype)
        if mask is not None:  # else all tokens are included, and their mass is constant 1
            item_rows = to_device(some.largest.rows, in_all.device)
            scatter_add_(in_all, item_rows, some.masses * some.mass_gradients)
            of_band = torch.zeros_like(in_all).index_add_(0, item_rows, some.mass_gradients) / statistics.exp_sums
            bands.append((of_band[window.rows], mask))
    factors = (-in_all / statistics.exp_sums)[window.rows]
    sparse = [
        (places.local, places.select(gradient))
        for places, gradient in zip(
            [*window_statistics.entry_indices, *window_statistics.alternative_indices],
            [*gradients.entries, *gradients.alternatives],
            strict=True,
        )
    ]
    for some in gradients.ranks:
        places = window.entry_indices(some.rows, some.tokens)
        sparse.append((places.local, places.select(some.logprob_gradients)))
    in_place, more = factors, list[Tensor]()
    for number, (part, whole, remainders) in enumerate(
        zip(reads, window_statistics.entry_exponentials, window_statistics.remainder_indices, strict=True)
    ):
        if whole is None:
            continue
        places, of_left = window_statistics.entry_indices[number], torch.zeros_like(factors)
        scatter_add_(
            of_left,
            remainders.local,
            remainders.select(gradients.remainders[number] / statistics.remainder_sums[number]),
        )
        if number == window_statistics.removed_read:
            in_place = factors + of_left
            rows = places.select_indices(part.cells.rows, window.first_row)
            of_places = factors[rows]
            for of_band, mask in bands:
                of_places = (
                    of_places + of_band[rows] * mask[places.select_indices(part.cells.tokens, window.first_token)]
                )
            assert window_statistics.removed_shares is not None
            sparse.append((places.local, window_statistics.removed_shares * of_places))
        else:
            copy = exponentials.clone()
            last = window_statistics.entry_exponentials[window_statistics.removed_read]
            assert last is not None
            restore_entries_(copy.view(-1), window_statistics.entry_indices[window_statistics.removed_read].local, last)
            _remove_entries_of_(copy.view(-1), places, whole, part.weights)
            more.append(copy.mul_(of_left[:, None]))
    if TRITON is not None and out is not None and not bands and not more and TRITON.can_run(exponentials):
        indices, increments = (torch.cat(some) for some in zip(*sparse, strict=True))
        rounded: Tensor = TRITON.scale_add_and_cast(exponentials, in_place, indices, increments, out)
        return rounded
    scale_rows(exponentials, in_place, bands)
    for tensor in more:
        exponentials.add_(tensor)
    for places_of_some, gradient in sparse:
        scatter_add_(flat, places_of_some, gradient)
    return exponentials


def _remove_entries_of_(values: Tensor, places: WindowIndices, whole: Tensor, weights: Tensor | None) -> Tensor:
    """As `remove_entries_`, for the entries of a window; weights of None are those of `SoftmaxReads`."""
    if weights is None and places.inside is None:  # what `remove_entries_` would leave
        if values.device.type == "cpu":
            restore_entries_(values, places.local, torch.zeros_like(whole))
        else:
            values.scatter_(0, places.local, 0.0)
        return whole
    weights = torch.ones_like(whole) if weights is None else weights
    return remove_entries_(values, places.local, whole, places.select(weights))


def remove_entries_(values: Tensor, indices: Tensor, whole: Tensor, weights: Tensor) -> Tensor:
    """Subtract `weights * whole` from values [n], in place, at indices that may repeat; return what was subtracted.

    The fp32 weights of a token's entries have the sum 1 only up to rounding. The difference would be left of its
    probability, and is more than the remainder of a student that gives all other tokens less than 1e-7. So 0 is left.
    `whole`: [entries], the values at the indices before. `weights`: -0.0 for entries outside of the values, whose index
    is 0.
    """
    if values.device.type == "cpu":
        return torch.from_numpy(
            chunked_softmax_numba.remove_entries_(
                values.numpy(), indices.numpy(), whole.numpy(), weights.numpy(), MAX_WEIGHT_ROUNDING
            )
        )
    shares = whole * weights
    values.scatter_add_(0, indices, -shares)
    left = values.take(indices)
    rounding = torch.where(left.abs() <= MAX_WEIGHT_ROUNDING * whole, left, 0.0)
    values.scatter_(0, indices, left - rounding)
    return shares.addcmul_(rounding, weights)


def restore_entries_(values: Tensor, indices: Tensor, whole: Tensor) -> None:
    """Undo `remove_entries_`, exactly."""
    if values.device.type == "cpu":
        chunked_softmax_numba.restore_entries_(values.numpy(), indices.numpy(), whole.numpy())
    else:
        values.scatter_(0, indices, whole)


def scatter_add_(values: Tensor, indices: Tensor, increments: Tensor) -> None:
    """Add increments to values [n], in place, at indices that may repeat."""
    if values.device.type == "cpu":  # three times as fast as torch's general scatter
        chunked_softmax_numba.scatter_add_(values.numpy(), indices.numpy(), increments.numpy())
    elif len(indices):
        values.scatter_add_(0, indices, increments)
