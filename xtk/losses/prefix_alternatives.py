"""Bayes' rule on the bytes that are spelled: what a student says comes next, given what else it could have meant."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from xtk.losses.loss_cells import PrefixAlternatives


@dataclass(frozen=True)
class TermAlternatives:
    """`PrefixAlternatives` of one term: their structure on the CPU, their numbers on a device."""

    rows: Tensor
    is_inside_token: Tensor
    run_offsets: Tensor
    sorted_token_ids: Tensor
    firsts: Tensor
    stops: Tensor

    @classmethod
    def from_alternatives(cls, alternatives: PrefixAlternatives) -> TermAlternatives:
        """Take the arrays as they are."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(*(torch.from_numpy(getattr(alternatives, name)) for name in names))

    def to(self, device: torch.device) -> TermAlternatives:
        """Return the same on a device."""
        moved = {
            name: getattr(self, name).to(device, non_blocking=True) for name in ("sorted_token_ids", "firsts", "stops")
        }
        return dataclasses.replace(self, **moved)

    def select(self, items: slice, cell_offsets: Tensor, first_row: int) -> TermAlternatives:
        """Return those of some items, whose cells are given, for states whose first row is `base`."""
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
        """Write out the runs of some items.

        Args:
            items: which.
            cell_offsets: [items + 1], their cells.
            first_row: the row of the logits that comes first in the chunk.
            remainder_items: [R], those of them that have an other cell, counted among them.
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
        assumed = torch.zeros_like(is_cell)
        assumed[ended[self.rows[items] < 0]] = True
        return ChunkAlternatives(
            rows=rows,
            tokens=tokens,
            groups=of_groups,
            group_items=group_items.to(device),
            ending_groups=ended.to(device),
            cell_groups=is_cell.nonzero()[:, 0].to(device),
            certain_groups=assumed.to(device),
            is_inside_token=self.is_inside_token[items][remainder_items].to(device),
            remainder_items=remainder_items.to(device),
        )


def _concatenated_ranges(firsts: Tensor, sizes: Tensor) -> Tensor:
    """Return `firsts[0], firsts[0] + 1, ...`, as many as its size, then those of the next."""
    before = sizes.cumsum(0) - sizes
    shifts = (firsts - before).repeat_interleave(sizes)
    return torch.arange(len(shifts), device=sizes.device) + shifts


@dataclass
class ChunkAlternatives:
    """The alternatives of the items of one chunk; items, groups, cells and rows are counted from 0.

    Attributes:
        rows: [E], of the chunk.
        tokens: [E].
        groups: [E], rising; a group may be empty.
        group_items: [G], the item of each group.
        ending_groups: [items], the group of the tokens that end where the item stands. The next one is of those that
            go on into
            no cell, then come those of the item's cells.
        cell_groups: [cells], the group of each cell.
        certain_groups: bool [G], groups that are certain: of what ended, where nobody looks back.
        remainder_items: [R], the items that have an other cell.
        is_inside_token: bool [R], whether they stand inside of a token of the student.
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

    def condition_cells(self, here: Tensor, rests: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
        """Weigh what is predicted here with what the alternatives leave.

        Args:
            here: [cells], log-probabilities in the rows that predict what comes next; -inf where there is none.
            rests: [R], the same of what is left over there.
            groups: [G], log-probabilities of the alternatives.

        Returns:
            [cells] and [R], log-probabilities of the cells and of the other cells.
        """
        groups = groups.masked_fill(self.certain_groups, 0.0)
        total = group_logsumexp(groups, self.group_items, len(self.ending_groups))
        ended, of_cells = groups[self.ending_groups], self.group_items[self.cell_groups]
        cells = torch.logaddexp(ended[of_cells] + here, groups[self.cell_groups]) - total[of_cells]
        # Of what ended inside of a token it is not known what comes next: all of it is in the other cell.
        rests = rests.masked_fill(self.is_inside_token, 0.0)
        further = groups[self.ending_groups[self.remainder_items] + 1]
        return cells, torch.logaddexp(ended[self.remainder_items] + rests, further) - total[self.remainder_items]


def group_logsumexp(values: Tensor, groups: Tensor, count: int) -> Tensor:
    """Return the log-sum-exp of values in groups, in each of which one value is finite, with a gradient."""
    highest = values.detach().new_full((count,), -torch.inf).scatter_reduce_(0, groups, values.detach(), "amax")
    sums = values.new_zeros(count).scatter_add(0, groups, (values - highest[groups]).exp())
    return sums.log() + highest
