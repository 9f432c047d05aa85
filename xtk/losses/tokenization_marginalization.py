"""Bayes' rule over alternative tokens for the same bytes: the student's distribution over the next bytes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from xtk.losses.loss_interface import PrefixAlternatives


@dataclass(frozen=True)
class TermAlternatives:
    """`PrefixAlternatives` of one loss term: structure on the CPU, token ids and runs on a device."""

    rows: Tensor
    is_inside_token: Tensor
    run_offsets: Tensor
    sorted_token_ids: Tensor
    firsts: Tensor
    stops: Tensor

    @classmethod
    def from_alternatives(cls, alternatives: PrefixAlternatives) -> TermAlternatives:
        """Return the alternatives with their arrays as CPU tensors."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(*(torch.from_numpy(getattr(alternatives, name)) for name in names))

    def to(self, device: torch.device) -> TermAlternatives:
        """Return a copy with token ids and runs on a device."""
        moved = {
            name: getattr(self, name).to(device, non_blocking=True) for name in ("sorted_token_ids", "firsts", "stops")
        }
        return dataclasses.replace(self, **moved)

    def select(self, items: slice, cell_offsets: Tensor, first_row: int) -> TermAlternatives:
        """Return those of some items with the given cell offsets, with rows relative to `first_row`."""
        offsets = self.run_offsets[cell_offsets[0] + 2 * items.start : cell_offsets[-1] + 2 * items.stop + 1]
        runs = slice(int(offsets[0]), int(offsets[-1]))
        rows = self.rows[items]
        return TermAlternatives(
            rows=torch.where(rows < 0, rows, rows - first_row),
            is_inside_token=self.is_inside_token[items],
            run_offsets=offsets - runs.start,
            sorted_token_ids=self.sorted_token_ids,
            firsts=self.firsts[runs],
            stops=self.stops[runs],
        )

    def for_chunk(
        self, items: slice, cell_offsets: Tensor, first_row: int, remainder_items: Tensor
    ) -> ChunkAlternatives:
        """Return the alternatives of some items, with their runs expanded to tokens.

        Args:
            items: range of items.
            cell_offsets: [items + 1], their cells.
            first_row: the chunk's first row.
            remainder_items: [R], indices of those items that have a remainder.
        """
        device, count = self.sorted_token_ids.device, items.stop - items.start
        cells = torch.diff(cell_offsets)
        first_group = cell_offsets[0] + 2 * items.start
        groups = self.run_offsets[first_group : cell_offsets[-1] + 2 * items.stop + 1]
        runs = slice(int(groups[0]), int(groups[-1]))
        firsts, sizes = self.firsts[runs].long(), (self.stops[runs] - self.firsts[runs]).long()
        group_items = torch.arange(count).repeat_interleave(cells + 2)
        ended = cell_offsets[:-1] - cell_offsets[0] + 2 * torch.arange(count)
        run_groups = torch.arange(len(groups) - 1).repeat_interleave(torch.diff(groups)).to(device)
        tokens = self.sorted_token_ids[_concatenated_ranges(firsts, sizes)]
        of_groups = run_groups.repeat_interleave(sizes)
        rows = (self.rows[items] - first_row).long()[group_items].to(device)[of_groups]
        is_cell = torch.ones(len(group_items), dtype=torch.bool)
        is_cell[ended] = is_cell[ended + 1] = False
        certain = torch.zeros_like(is_cell)
        certain[ended[self.rows[items] < 0]] = True
        return ChunkAlternatives(
            rows=rows,
            tokens=tokens,
            groups=of_groups,
            group_items=group_items.to(device),
            ending_groups=ended.to(device),
            cell_groups=is_cell.nonzero()[:, 0].to(device),
            certain_groups=certain.to(device),
            is_inside_token=self.is_inside_token[items][remainder_items].to(device),
            remainder_items=remainder_items.to(device),
        )


def _concatenated_ranges(firsts: Tensor, sizes: Tensor) -> Tensor:
    """Return the concatenation of the ranges `[firsts[i], firsts[i] + sizes[i])`."""
    before = sizes.cumsum(0) - sizes
    shifts = (firsts - before).repeat_interleave(sizes)
    return torch.arange(len(shifts), device=sizes.device) + shifts


@dataclass
class ChunkAlternatives:
    """The alternatives of the items of one chunk; items, groups, cells and rows are relative to the chunk.

    Attributes:
        rows: [E], row of each alternative.
        tokens: [E], its token.
        groups: [E], its group, sorted; a group may be empty.
        group_items: [G], the item of each group.
        ending_groups: [items], the group of the tokens that end at the item. The next group is that of tokens that
            continue into no cell, followed by those of the item's cells.
        cell_groups: [cells], the group of each cell.
        certain_groups: bool [G], groups of probability 1: the ending group of items without alternatives.
        remainder_items: [R], the items that have a remainder.
        is_inside_token: bool [R], whether these items are inside of a student token.
    """

    rows: Tensor
    tokens: Tensor
    groups: Tensor
    group_items: Tensor
    ending_groups: Tensor
    cell_groups: Tensor
    certain_groups: Tensor
    remainder_items: Tensor
    is_inside_token: Tensor

    def condition_cells(self, next_logprobs: Tensor, remainders: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of the cells, conditioned on the bytes since the previous token boundary.

        Args:
            next_logprobs: [cells], log-probabilities in the next-token rows; -inf where there is none.
            remainders: [R], log-probabilities of the remainders in these rows.
            groups: [G], log-probabilities of the alternatives.

        Returns:
            [cells] and [R], log-probabilities of the cells and of the remainders.
        """
        groups = groups.masked_fill(self.certain_groups, 0.0)
        total = group_logsumexp(groups, self.group_items, len(self.ending_groups))
        ended, of_cells = groups[self.ending_groups], self.group_items[self.cell_groups]
        cells = torch.logaddexp(ended[of_cells] + next_logprobs, groups[self.cell_groups]) - total[of_cells]
        # Inside of a token, the continuation of the ending group is unknown: all its mass is in the remainder.
        remainders = remainders.masked_fill(self.is_inside_token, 0.0)
        no_cell = groups[self.ending_groups[self.remainder_items] + 1]
        return cells, torch.logaddexp(ended[self.remainder_items] + remainders, no_cell) - total[self.remainder_items]


def group_logsumexp(values: Tensor, groups: Tensor, count: int) -> Tensor:
    """Return the log-sum-exp of each group, differentiable; each group needs at least one finite value."""
    highest = values.detach().new_full((count,), -torch.inf).scatter_reduce_(0, groups, values.detach(), "amax")
    sums = values.new_zeros(count).scatter_add(0, groups, (values - highest[groups]).exp())
    return sums.log() + highest
