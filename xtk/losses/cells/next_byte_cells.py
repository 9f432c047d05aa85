"""Bayes' rule over alternative tokens for the same bytes: the student's distribution over the next bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from xtk.losses.cells.loss_cells import LossCells
from xtk.losses.kernels.chunked_softmax import EntryGroups, scatter_add_
from xtk.parallel.host_to_device import to_device_together, vocabulary_tensor
from xtk.projection.vocabulary_array import VocabularyArray


@dataclass(frozen=True, kw_only=True)
class NextByteCells(LossCells):
    """Cells conditioned on the bytes since the student's previous token boundary.

    A cell's entries are the student's tokens of a cell of the partition, in the item's first row. An item of a large
    vocabulary has about a thousand of them: they are listed on the device, chunk by chunk, and the fields with a value
    per entry (`rows`, `tokens`, ...) are empty.

    An item's alternatives are the student tokens that begin with these bytes, in groups: tokens that end at the item,
    tokens that continue into none of its cells, then tokens that continue into each of its cells. The groups of all
    items are concatenated; a group is a list of runs of the vocabulary in byte order, and may be empty.
    """

    previous_rows: Tensor  # int32 [C], row of the student's logits that predicts the alternatives; -1: there are none
    is_inside_token: Tensor  # bool [C], whether it is inside of a student token, where no row predicts the next bytes
    cell_tokens: VocabularyArray  # int32, `cell_tokens` of `BytePartition`
    first_members: Tensor  # int64 [cells], the index in `cell_tokens` of each cell's first entry
    sorted_token_ids: VocabularyArray  # int32 [n], the student's tokens in byte order
    run_offsets: Tensor  # int64 [2 C + cells + 1], the runs of each group
    firsts: Tensor  # int32 [runs], first index of each run in `sorted_token_ids`
    stops: Tensor  # int32 [runs], one past its last index
    # int64 [runs + 1], cumulative sums of `stops - firsts`, on the CPU, so that nothing waits for the device.
    alternative_offsets: Tensor

    PER_ITEM: ClassVar[tuple[str, ...]] = (*LossCells.PER_ITEM, "previous_rows", "is_inside_token")
    ON_DEVICE: ClassVar[tuple[str, ...]] = (
        "teacher_probs", "weights", "corrections", "sampled_probs", "regions", "target_logits",
        "target_remainder_logits", "firsts", "stops",
    )  # fmt: skip
    ROWS_BEFORE: ClassVar[int] = 1

    @property
    def has_remainder(self) -> Tensor:
        """Bool [C], whether the student's remainder is read; inside of a token it may always be 0."""
        is_stored = super().has_remainder
        if not self.reads_all_remainders:
            return is_stored
        ending = self._ending_groups
        return is_stored & ~(self.is_inside_token & (self.run_offsets[ending + 2] == self.run_offsets[ending]))

    @property
    def is_token_start(self) -> Tensor:
        """Bool [C], whether a student token begins at the item."""
        return ~self.is_inside_token

    def select(self, items: slice, first_row: int) -> Self:
        """Return some items, with rows relative to `first_row`."""
        first, stop = (int(self.cell_offsets[at]) + 2 * at for at in (items.start, items.stop))
        offsets = self.run_offsets[first : stop + 1]
        runs, chosen = slice(int(offsets[0]), int(offsets[-1])), super().select(items, first_row)
        rows = chosen.previous_rows
        return replace(
            chosen,
            previous_rows=torch.where(rows < 0, rows, rows - first_row),
            first_members=self.first_members[first - 2 * items.start : stop - 2 * items.stop],
            run_offsets=offsets - runs.start,
            firsts=self.firsts[runs],
            stops=self.stops[runs],
            alternative_offsets=self.alternative_offsets[runs.start : runs.stop + 1],
        )

    def entry_runs(self) -> list[Tensor]:
        """Return [3, cells], each cell's size, shift and row; the group of each run; and the row of each group."""
        shifts = self.first_members - self.entry_offsets[:-1]
        per_cell = torch.stack([torch.diff(self.entry_offsets), shifts, self.first_rows[self.cell_items]])
        items = self._group_items
        run_groups = torch.arange(len(items)).repeat_interleave(torch.diff(self.run_offsets))
        return [per_cell, run_groups, self.previous_rows.long()[items]]

    def entries(self, dtype: torch.dtype, *runs: Tensor) -> tuple[EntryGroups, Tensor | None, EntryGroups | None]:
        """Return the cells in the next-token rows, all of weight 1, and the alternatives in the previous rows."""
        (per_cell, run_groups, group_rows), device = runs, self.teacher_probs.device
        count = int(self.entry_offsets[-1] - self.entry_offsets[0])
        cells = torch.repeat_interleave(per_cell[0], output_size=count)
        shifts, rows = per_cell[1:, cells]
        tokens = vocabulary_tensor(self.cell_tokens, device)[shifts.add_(torch.arange(count, device=device))]
        sizes = self.stops - self.firsts
        count = int(self.alternative_offsets[-1] - self.alternative_offsets[0])
        of_alternatives = torch.repeat_interleave(sizes, output_size=count)
        groups, shifts = run_groups[of_alternatives], (self.stops - sizes.cumsum(0))[of_alternatives]
        alternatives = EntryGroups(
            rows=group_rows[groups],
            tokens=vocabulary_tensor(self.sorted_token_ids, device)[shifts.add_(torch.arange(count, device=device))],
            groups=groups,
            num_groups=len(group_rows),
        )
        return EntryGroups(rows, tokens, cells, per_cell.shape[1]), None, alternatives

    def value(self, cells: Tensor, remainders: Tensor, *others: Tensor) -> Tensor:
        """Return the weighted sum of the divergence between cells, conditioned on the bytes of the alternatives.

        Log-probabilities of cells, -inf where there is none, and of remainders are those in the next-token rows;
        `others`: [groups], those of the alternatives.
        """
        (groups,), ending, num_cells = others, self._ending_groups, len(cells)
        owners, remainder_probs = self.remainders_of_items(cells.dtype)
        is_cell = torch.ones(len(groups), dtype=torch.bool)
        is_cell[ending] = is_cell[ending + 1] = False
        items = torch.cat([self.cell_items, owners])
        further = torch.cat([is_cell.nonzero()[:, 0], ending[owners] + 1])
        remainder_probs, *indices = to_device_together(
            [
                remainder_probs,
                items,
                torch.stack([ending[items], further]),
                self._group_items,
                ending[self.previous_rows < 0],
                num_cells + self.is_inside_token[owners].nonzero()[:, 0],
            ],
            cells.device,
        )
        of_cells = _OfCells(*indices)
        log_probs: Tensor = _ConditionedLogProbs.apply(cells, remainders, groups, of_cells, self.num_items)  # type: ignore[no-untyped-call]
        if self.sampled_probs is not None or self.target_logits is not None:
            return self.divergence_sum(log_probs[:num_cells], log_probs[num_cells:])
        probs = torch.cat([self.teacher_probs.to(cells.dtype), remainder_probs])
        return self.sum_joined_divergence(of_cells.items, probs, log_probs, num_cells)

    @property
    def _group_items(self) -> Tensor:
        """int64 [groups], the item of each group."""
        return torch.arange(self.num_items).repeat_interleave(torch.diff(self.cell_offsets) + 2)

    @property
    def _ending_groups(self) -> Tensor:
        """int64 [C], the group of the tokens that end at the item, which is followed by its other groups."""
        return self.cell_offsets[:-1] + 2 * torch.arange(self.num_items)


class _OfCells(NamedTuple):
    """Indices for [n] cells followed by remainders, and for groups of alternatives; on one device."""

    items: Tensor  # int64 [n], the item of each
    groups: Tensor  # int64 [2, n], the group that ends at the item, and the one of tokens that continue into the cell
    group_items: Tensor  # int64 [groups], the item of each group
    certain_groups: Tensor  # int64 [a], ending groups of items without alternatives: no entries, probability 1
    # int64 [b], remainders inside of a token, which have no entries: the continuation of the ending group is unknown,
    # and all its mass is in the remainder.
    certain_cells: Tensor


class _ConditionedLogProbs(torch.autograd.Function):
    """Autograd function of `ln((E D + F) / (E + M))` of `ByteKL`; autograd's own graph has twice the operations."""

    @staticmethod
    def forward(
        ctx: Any, cells: Tensor, remainders: Tensor, groups: Tensor, of_cells: _OfCells, num_items: int
    ) -> Tensor:
        """Return [cells + remainders], given their log-probabilities in their rows, and those of all groups."""
        log_probs = torch.cat([cells, remainders])
        if len(of_cells.certain_cells):
            log_probs.index_fill_(0, of_cells.certain_cells, 0.0)
        if len(of_cells.certain_groups):
            groups = groups.index_fill(0, of_cells.certain_groups, 0.0)
        items = of_cells.group_items
        highest = groups.new_full((num_items,), -torch.inf).scatter_reduce_(0, items, groups, "amax")
        of_groups = (groups - highest[items]).exp_()
        sums = groups.new_zeros(num_items).scatter_add_(0, items, of_groups)
        both = groups[of_cells.groups]
        both[0].add_(log_probs)
        joined = torch.logaddexp(both[0], both[1])
        shares = both.sub_(joined).exp_()
        ctx.of_cells, ctx.num_cells = of_cells, len(cells)
        ctx.save_for_backward(shares, of_groups, sums)
        return joined.sub_((sums.log() + highest)[of_cells.items])

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the three log-probabilities; those of certain ones are not used."""
        (of_log_probs,), of_cells = outputs, ctx.of_cells
        shares, exponentials, sums = ctx.saved_tensors
        by_share = shares * of_log_probs
        by_item = torch.zeros_like(sums)
        scatter_add_(by_item, of_cells.items, of_log_probs)
        of_groups = torch.zeros_like(exponentials)
        scatter_add_(of_groups, of_cells.groups.view(-1), by_share.view(-1))
        of_groups.addcmul_(exponentials, by_item.div_(sums)[of_cells.group_items], value=-1)
        return by_share[0, : ctx.num_cells], by_share[0, ctx.num_cells :], of_groups, None, None


def concatenated_ranges(firsts: Tensor, sizes: Tensor, count: int) -> Tensor:
    """Return the concatenation of the ranges `[firsts[i], firsts[i] + sizes[i])`; `count` is the sum of the sizes."""
    before = sizes.cumsum(0) - sizes
    shifts = (firsts - before).repeat_interleave(sizes, output_size=count)
    return torch.arange(len(shifts), device=sizes.device) + shifts
