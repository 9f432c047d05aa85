"""Bayes' rule over alternative tokens for the same bytes: the student's distribution over the next bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from xtk.losses.cells.loss_cells import LossCells, group_logsumexp
from xtk.losses.kernels.chunked_softmax import EntryGroups, SoftmaxReads
from xtk.parallel.host_to_device import to_device, vocabulary_tensor
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

    Attributes:
        previous_rows: int32 [C], the row of the student's logits that predicts the alternatives; -1: the item has none.
        is_inside_token: bool [C], whether the item is inside of a student token, where no row predicts the next bytes.
        cell_tokens: int32, `cell_tokens` of `BytePartition`.
        first_members: int64 [cells], the index in `cell_tokens` of each cell's first entry.
        sorted_token_ids: int32 [n], the student's tokens in byte order.
        run_offsets: int64 [2 C + cells + 1], the runs of each group.
        firsts: int32 [runs], first index of each run in `sorted_token_ids`.
        stops: int32 [runs], one past its last index.
        alternative_offsets: int64 [runs + 1], cumulative sums of `stops - firsts`, on the CPU, so that the number of
            alternatives is known without reading the device.
    """

    previous_rows: Tensor
    is_inside_token: Tensor
    cell_tokens: VocabularyArray
    first_members: Tensor
    sorted_token_ids: VocabularyArray
    run_offsets: Tensor
    firsts: Tensor
    stops: Tensor
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

    def softmax_reads(self, dtype: torch.dtype) -> SoftmaxReads:
        """Return the cells and remainders in the next-token rows, and the alternatives in the previous rows."""
        device, items = self.teacher_probs.device, self._group_items
        firsts, sizes = self.firsts.long(), (self.stops - self.firsts).long()
        count = int(self.alternative_offsets[-1] - self.alternative_offsets[0])
        run_groups = to_device(torch.arange(len(items)).repeat_interleave(torch.diff(self.run_offsets)), device)
        groups = run_groups.repeat_interleave(sizes, output_size=count)
        alternatives = EntryGroups(
            rows=to_device(self.previous_rows.long()[items], device)[groups],
            tokens=vocabulary_tensor(self.sorted_token_ids, device)[concatenated_ranges(firsts, sizes, count)],
            groups=groups,
            num_groups=len(items),
        )
        return replace(super().softmax_reads(dtype), alternatives=alternatives)

    def cell_entries(self, dtype: torch.dtype) -> tuple[EntryGroups, Tensor]:
        """Return the entries of all cells, and their weights, 1."""
        device, count = self.teacher_probs.device, int(self.entry_offsets[-1] - self.entry_offsets[0])
        shifts = self.first_members - self.entry_offsets[:-1]
        per_cell = torch.stack([torch.diff(self.entry_offsets), shifts, self.first_rows[self.cell_items]])
        sizes, *others = to_device(per_cell, device)
        cells = torch.repeat_interleave(sizes, output_size=count)
        shifts, rows = (one[cells] for one in others)
        tokens = vocabulary_tensor(self.cell_tokens, device)[shifts.add_(torch.arange(count, device=device))]
        return EntryGroups(rows, tokens, cells, len(sizes)), torch.ones(count, dtype=dtype, device=device)

    def value(self, cells: Tensor, remainders: Tensor, *others: Tensor) -> Tensor:
        """Return the weighted sum of the divergence between cells, conditioned on the bytes of the alternatives.

        Args:
            cells: [cells], log-probabilities in the next-token rows; -inf where there is none.
            remainders: [remainders], log-probabilities of the remainders in these rows.
            others: [groups], log-probabilities of the alternatives.
        """
        (groups,), device = others, cells.device
        ending, is_cell = self._ending_groups, torch.ones(len(self._group_items), dtype=torch.bool)
        is_cell[ending] = is_cell[ending + 1] = False
        without = torch.zeros_like(is_cell)
        without[ending[self.previous_rows < 0]] = True
        owners = self.has_remainder.nonzero()[:, 0]
        inside = to_device(self.is_inside_token[owners], device)
        ending, owners = to_device(ending, device), to_device(owners, device)
        # The ending group of items without alternatives has probability 1.
        groups, items = groups.masked_fill(to_device(without, device), 0.0), to_device(self._group_items, device)
        cell_groups = to_device(is_cell.nonzero()[:, 0], device)
        total = group_logsumexp(groups, items, len(ending))
        ended, of_cells = groups[ending], items[cell_groups]
        cells = torch.logaddexp(ended[of_cells] + cells, groups[cell_groups]) - total[of_cells]
        # Inside of a token, the continuation of the ending group is unknown: all its mass is in the remainder.
        remainders = remainders.masked_fill(inside, 0.0)
        no_cell = groups[ending[owners] + 1]
        remainders = torch.logaddexp(ended[owners] + remainders, no_cell) - total[owners]
        return self.divergence_sum(cells, remainders)

    @property
    def _group_items(self) -> Tensor:
        """int64 [groups], the item of each group."""
        return torch.arange(self.num_items).repeat_interleave(torch.diff(self.cell_offsets) + 2)

    @property
    def _ending_groups(self) -> Tensor:
        """int64 [C], the group of the tokens that end at the item, which is followed by its other groups."""
        return self.cell_offsets[:-1] + 2 * torch.arange(self.num_items)


def concatenated_ranges(firsts: Tensor, sizes: Tensor, count: int) -> Tensor:
    """Return the concatenation of the ranges `[firsts[i], firsts[i] + sizes[i])`; `count` is the sum of the sizes."""
    before = sizes.cumsum(0) - sizes
    shifts = (firsts - before).repeat_interleave(sizes, output_size=count)
    return torch.arange(len(shifts), device=sizes.device) + shifts
