"""Cells: the events on which the distributions of student and teacher are compared, and the value of the comparison.

A loss averages over items: tokens, boundaries or spans. An item has cells. A cell has the teacher's probability, and
*entries*: pairs of a row of the student's logits and a token, whose weighted probabilities add up to the student's
probability of the cell. The probability of each model outside of the cells is its remainder.

`LossCells` compares the cells as they are. A subclass is another mechanism: it adds fields, and overrides what a loss
reads of the softmax, and how its value follows.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xtk.cache.teacher_logprobs import MIN_REMAINDER
from xtk.losses.cells.sampled_cells import SampledCells
from xtk.losses.divergences import FORWARD_KL, Divergence
from xtk.losses.kernels.chunked_softmax import EntryGroups, SoftmaxReads
from xtk.parallel.host_to_device import to_device, to_device_together
from xtk.text.chat.conversation_tokens import REGIONS


def _no_region_sums(device: torch.device | None = None) -> Tensor:
    return torch.zeros(len(REGIONS) + 1, dtype=torch.float64, device=device)


@dataclass(frozen=True, kw_only=True)
class LossCells:
    """The cells of one loss over one or more documents: items, their cells, the cells' entries.

    Structure is on the CPU; the fields in `ON_DEVICE` are on the device of the logits.
    """

    cell_offsets: Tensor  # int64 [C+1], the cells of item c
    entry_offsets: Tensor  # int64 [cells+1], the entries of each cell
    entry_cells: Tensor  # int32 [entries], the cell of each entry
    teacher_probs: Tensor  # [cells], sum to at most 1 per item
    rows: Tensor  # int32 [entries], row of the student's logits
    tokens: Tensor  # int32 [entries], student token
    log_weights: Tensor | None  # float32 [entries], log of the factor of the entry's probability; None: 0
    rows_averaged: Tensor  # float32 [entries], number of rows over which the item of an entry is averaged
    first_rows: Tensor  # int64 [C], the first row of each item, sorted
    row_counts: Tensor  # int64 [C], number of rows with entries that are read for an item, from its first row on
    remainder_probs: Tensor  # float64 [C], the teacher's remainder; 0 where it is within rounding
    divergence: Divergence = FORWARD_KL  # between the teacher's and the student's cells
    factor: float = 1.0  # factor of the divergence
    ignores_remainder: bool = False  # whether the mass outside of the cells is dropped; then the value can be negative
    scale: float = 1.0  # factor of each item: the term's weight over the global number of items
    weights: Tensor | None = None  # float32 [C], weight of each item in the sum; None: 1
    counts: Tensor | None = None  # float64 [C], weight of each item in the denominator; None: 1
    # float64 [C], added to each item's value, not its gradient: values from sampled tokens estimate the divergence.
    corrections: Tensor | None = None
    # float32 [cells], the teacher's probability of a sampled cell, whose `teacher_probs` is the mass that it
    # represents. Of a cell with exact and sampled tokens, minus the exact mass. 0: exact, or unknown.
    sampled_probs: Tensor | None = None
    known_samples: Tensor | None = None  # bool [C], whether some cells of the item have `sampled_probs`; None: no
    # float32 [cells], of a shifted target, which is their softmax over an item's cells and remainder. None: the target
    # is the teacher. From `xtk.losses.teacher_shift`, like the two fields below.
    target_logits: Tensor | None = None
    target_remainder_logits: Tensor | None = None  # float32 [C], of the remainders
    reads_frozen_student: bool = False  # whether a pass adds log-probabilities to the two fields above
    regions: Tensor | None = None  # uint8 [C], the region of each item; None: they are not counted
    # float64 [regions + 1], weighted values of each region, the last for none, over all items with a computed gradient.
    region_sums: Tensor = field(default_factory=_no_region_sums)

    # The fields with a value per item, and those that `to` moves; subclasses add theirs.
    PER_ITEM: ClassVar[tuple[str, ...]] = (
        "first_rows", "row_counts", "remainder_probs", "weights", "counts", "corrections", "known_samples", "regions",
        "target_remainder_logits",
    )  # fmt: skip
    ON_DEVICE: ClassVar[tuple[str, ...]] = (
        "entry_cells", "teacher_probs", "rows", "tokens", "log_weights", "rows_averaged", "weights", "corrections",
        "sampled_probs", "regions", "target_logits", "target_remainder_logits",
    )  # fmt: skip
    # Number of rows before the first row of an item that its value needs too.
    ROWS_BEFORE: ClassVar[int] = 0

    @classmethod
    def from_numpy(
        cls,
        cell_offsets: NDArray[np.int64],
        entry_offsets: NDArray[np.int64],
        teacher_probs: NDArray[np.floating[Any]],
        rows: NDArray[np.int32],
        tokens: NDArray[np.int32],
        log_weights: NDArray[np.float32] | None = None,
        item_rows: NDArray[np.int32] | None = None,
        remainder_probs: NDArray[np.float64] | None = None,
        **others: Any,
    ) -> Self:
        """Return cells as tensors on the CPU, with scale 1, from fields of the class; items are sorted by rows.

        `item_rows`: int32 [C], the row of each item; None: that of its first entry. `remainder_probs`: float64 [C],
        where float32 `teacher_probs` are too coarse for it; None: 1 minus their sum. Without `row_counts`, an item has
        the rows from its first row to that of its last entry, and is averaged over them. `rows` and `tokens` are empty
        in subclasses that list entries on the device.
        """
        size = len(cell_offsets) - 1
        firsts, stops = entry_offsets[cell_offsets[:-1]], entry_offsets[cell_offsets[1:]]
        some_rows = rows if len(rows) else np.zeros(1, np.int32)
        if item_rows is None:  # an item without a cell (no support token can be reached) gets its neighbor's row
            item_rows = some_rows[np.minimum(firsts, len(some_rows) - 1)]
        first_rows = item_rows.astype(np.int64)
        averaged = np.ones(len(rows), np.float32)
        if "row_counts" not in others:
            others["row_counts"] = np.where(stops > firsts, some_rows[stops - 1] - first_rows + 1, 0)
            averaged = np.repeat(others["row_counts"].astype(np.float32), stops - firsts)
        if remainder_probs is None:
            items = np.repeat(np.arange(size), np.diff(cell_offsets))
            outside = 1 - np.bincount(items, teacher_probs.astype(np.float64), minlength=size)
            remainder_probs = np.where(outside > MIN_REMAINDER, outside, 0)
        fields: dict[str, Any] = {
            "cell_offsets": cell_offsets,
            "entry_offsets": entry_offsets,
            "entry_cells": np.repeat(np.arange(len(teacher_probs), dtype=np.int32), np.diff(entry_offsets))
            if len(rows)
            else rows,
            "teacher_probs": teacher_probs,
            "rows": rows,
            "tokens": tokens,
            "log_weights": log_weights,
            "rows_averaged": averaged,
            "first_rows": first_rows,
            "remainder_probs": remainder_probs,
            **others,
        }
        if (sampled := fields.get("sampled_probs")) is not None:
            firsts_of_items = np.append(0, np.cumsum(sampled != 0))
            fields["known_samples"] = np.diff(firsts_of_items[cell_offsets]) > 0
        arrays = {name: torch.from_numpy(one) for name, one in fields.items() if isinstance(one, np.ndarray)}
        return cls(**fields | arrays)

    @property
    def num_items(self) -> int:
        """Number of items, C."""
        return len(self.first_rows)

    @property
    def denominator(self) -> float:
        """Number of items, or sum of their documents' weights, over which the loss is averaged."""
        return self.num_items if self.counts is None else float(self.counts.sum())

    @property
    def correction(self) -> Tensor | float:
        """Sum of the corrections of all items: a scalar without a gradient."""
        if self.corrections is None:
            return 0.0
        return (self.corrections if self.weights is None else self.corrections * self.weights).sum()

    def add_to_region_sums(self, item_values: Tensor) -> None:
        """Add weighted values [C] of items, and their corrections, to `region_sums`."""
        if self.regions is None:
            return
        if self.corrections is not None:
            item_values = item_values + (self.corrections if self.weights is None else self.corrections * self.weights)
        regions = self.regions.long().clamp_max(len(REGIONS))
        self.region_sums.index_add_(0, regions, item_values.to(self.region_sums.dtype))

    def counts_by_region(self, of_items: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
        """Return float64 [regions], the weights in the denominator by region; those times `of_items` [C], if given."""
        if self.regions is None:
            return np.zeros(len(REGIONS))
        values = np.ones(self.num_items) if self.counts is None else self.counts.numpy()
        values = values if of_items is None else values * of_items
        counts = np.bincount(np.minimum(self.regions.numpy(), len(REGIONS)), values, len(REGIONS) + 1)
        return counts[: len(REGIONS)].astype(np.float64)

    @property
    def cell_items(self) -> Tensor:
        """int64 [cells], the item of each cell."""
        return torch.arange(self.num_items).repeat_interleave(torch.diff(self.cell_offsets))

    @property
    def has_remainder(self) -> Tensor:
        """Bool [C], whether the student's remainder is read."""
        if self.ignores_remainder:
            return torch.zeros(self.num_items, dtype=torch.bool)
        has_cells = torch.diff(self.cell_offsets) > 0
        if self.reads_all_remainders:
            return has_cells
        return has_cells & ((self.remainder_probs > 0) | self.has_known_samples)

    @property
    def reads_all_remainders(self) -> bool:
        """Whether remainders are read where the teacher's is empty, too."""
        return self.target_logits is not None or not self.divergence.is_linear_in_teacher

    @property
    def has_known_samples(self) -> Tensor:
        """Bool [C], on the CPU, whether some of an item's cells have `sampled_probs`."""
        if self.known_samples is None:
            return torch.zeros(self.num_items, dtype=torch.bool)
        return self.known_samples

    @property
    def is_token_start(self) -> Tensor:
        """Bool [C], whether a student token begins at the item."""
        return torch.ones(self.num_items, dtype=torch.bool)

    def weighted(self, factors: NDArray[np.float64]) -> Self:
        """Return a copy in which items' weights, in the sum and in the denominator, are multiplied by factors [C]."""
        weights, counts = torch.from_numpy(factors.astype(np.float32)), torch.from_numpy(factors)
        return dataclasses.replace(
            self,
            weights=weights if self.weights is None else self.weights * weights,
            counts=counts if self.counts is None else self.counts * counts,
        )

    def with_row_weights(self, counts: NDArray[np.float64] | None, factors: NDArray[np.float64] | None) -> Self:
        """Return a copy in which the weight of each item is multiplied by that of its first row.

        Args:
            counts: [N], weight of each row in the sum and in the denominator; None: 1.
            factors: [N], factor of each row in the sum only; None: 1.
        """
        given = [weights[self.first_rows.numpy()] for weights in (counts, factors) if weights is not None]
        if not given:
            return self
        weights = torch.from_numpy(np.prod(given, axis=0).astype(np.float32))
        of_items = None if counts is None else torch.from_numpy(given[0])
        if self.counts is not None:
            of_items = self.counts if of_items is None else self.counts * of_items
        return dataclasses.replace(
            self, weights=weights if self.weights is None else self.weights * weights, counts=of_items
        )

    def to(self, device: torch.device, scale: float) -> Self:
        """Return a copy on a device, with a scale."""
        there = {name: getattr(self, name) for name in self.ON_DEVICE if getattr(self, name) is not None}
        moved: dict[str, Any] = {name: to_device(tensor, device) for name, tensor in there.items()}
        return dataclasses.replace(self, **moved, scale=scale, region_sums=_no_region_sums(device))

    def pinned(self) -> Self:
        """Return a copy whose fields in `ON_DEVICE` are in pinned memory."""
        there = {name: getattr(self, name) for name in self.ON_DEVICE if getattr(self, name) is not None}
        moved: dict[str, Any] = {name: tensor.pin_memory() for name, tensor in there.items()}
        return dataclasses.replace(self, **moved)

    def select_rows(self, start: int, stop: int, first_row: int) -> Self:
        """Return the items whose first row is in `[start, stop)`, with rows relative to `first_row`."""
        low, high = torch.searchsorted(self.first_rows, torch.tensor([start, stop])).tolist()
        return self.select(slice(low, high), first_row)

    def select(self, items: slice, first_row: int) -> Self:
        """Return some items, with rows relative to `first_row`."""
        offsets = self.cell_offsets[items.start : items.stop + 1]
        cells = slice(int(offsets[0]), int(offsets[-1]))
        entry_offsets = self.entry_offsets[cells.start : cells.stop + 1]
        entries = slice(int(entry_offsets[0]), int(entry_offsets[-1]))
        given = {name: getattr(self, name) for name in self.PER_ITEM if getattr(self, name) is not None}
        of_items: dict[str, Any] = {name: tensor[items] for name, tensor in given.items()}
        of_items["first_rows"] = of_items["first_rows"] - first_row
        return dataclasses.replace(
            self,
            **of_items,
            cell_offsets=offsets - cells.start,
            entry_offsets=entry_offsets - entries.start,
            entry_cells=self.entry_cells[entries] - cells.start,
            teacher_probs=self.teacher_probs[cells],
            sampled_probs=None if self.sampled_probs is None else self.sampled_probs[cells],
            target_logits=None if self.target_logits is None else self.target_logits[cells],
            rows=self.rows[entries] - first_row,
            tokens=self.tokens[entries],
            log_weights=None if self.log_weights is None else self.log_weights[entries],
            rows_averaged=self.rows_averaged[entries],
        )

    def softmax_reads(self, dtype: torch.dtype) -> SoftmaxReads:
        """Return what the value needs of the softmax of the rows, for all items; `dtype` is that of the logits."""
        items, groups, within = self.remainder_rows()
        of_remainders = [self.first_rows[items] + within, groups, -self.row_counts[items].to(dtype).log()]
        rows, groups, log_weights, *runs = to_device_together(
            [*of_remainders, *self.entry_runs()], self.teacher_probs.device
        )
        cells, weights, alternatives = self.entries(dtype, *runs)
        return SoftmaxReads(
            cells=cells,
            weights=weights,
            remainder_rows=rows,
            remainder_groups=groups,
            num_remainders=int(self.has_remainder.sum()),
            remainder_log_weights=log_weights,
            alternatives=alternatives,
        )

    def entry_runs(self) -> list[Tensor]:
        """Return the tensors on the CPU that `entries` gets on the device; none here."""
        return []

    def entries(self, dtype: torch.dtype, *runs: Tensor) -> tuple[EntryGroups, Tensor | None, EntryGroups | None]:
        """Return the entries of all cells, their weights as in `SoftmaxReads`, and alternatives, if there are some."""
        log_weights, weights = None if self.log_weights is None else self.log_weights.to(dtype), None
        if bool(self.has_remainder.any()):
            averaged = self.rows_averaged.to(dtype)
            weights = averaged if log_weights is None else log_weights.exp().mul_(averaged)
        count, has_one_each = len(self.teacher_probs), bool((torch.diff(self.entry_offsets) == 1).all())
        cells = EntryGroups(self.rows.long(), self.tokens, self.entry_cells, count, log_weights, has_one_each)
        return cells, weights, None

    def remainder_rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows that remainders are read from: item of each, number of its remainder, index in its rows."""
        owners = self.has_remainder.nonzero()[:, 0]
        counts = self.row_counts[owners]
        groups = torch.arange(len(owners)).repeat_interleave(counts)
        return owners[groups], groups, torch.arange(len(groups)) - (counts.cumsum(0) - counts)[groups]

    def value(self, cells: Tensor, remainders: Tensor, *others: Tensor) -> Tensor:
        """Return the weighted sum of the loss over its items, a scalar, from the student's log-probabilities.

        They are those of cells [cells], of remainders [remainders], and of all else in `softmax_reads`; none here.
        """
        return self.divergence_sum(cells, remainders)

    def divergence_sum(self, log_probs: Tensor, log_remainders: Tensor, cells: Tensor | None = None) -> Tensor:
        """Return the weighted sum over items of the divergence, from log-probabilities [n] and [remainders].

        `cells`: [n], on the CPU, indices of the compared cells; None: all. The sum, a scalar, is not negative except
        for rounding if remainders are not ignored.
        """
        cell_items, cell_probs, sampled_probs = self.cell_items, self.teacher_probs, self.sampled_probs
        owners, remainder_probs = self.remainders_of_items(log_probs.dtype)
        chosen = [] if cells is None else [cells]
        cell_items = cell_items if cells is None else cell_items[cells]
        cell_items, owners, remainder_probs, *chosen = to_device_together(
            [cell_items, owners, remainder_probs, *chosen], log_probs.device
        )
        for on_device in chosen:
            cell_probs = cell_probs[on_device]
            sampled_probs = None if sampled_probs is None else sampled_probs[on_device]
        if self.reads_frozen_student:
            return self._add_to_target(owners, log_probs, log_remainders)
        if self.target_logits is not None:
            cell_probs, remainder_probs = self._shifted_target(cell_items, owners)
        if sampled_probs is None:
            return self.sum_divergence(cell_items, cell_probs, log_probs, owners, remainder_probs, log_remainders)
        sampled = SampledCells(cell_items, cell_probs, sampled_probs.to(log_probs.dtype), log_probs, self.num_items)
        values = sampled.item_values(self.divergence, owners, remainder_probs, log_remainders)
        return self.factor * (values if self.weights is None else values * self.weights).sum()

    def _add_to_target(self, owners: Tensor, log_probs: Tensor, log_remainders: Tensor) -> Tensor:
        """Add log-probabilities of all cells, and remainders of items `owners`, to the target's logits; return 0."""
        assert self.target_logits is not None
        assert self.target_remainder_logits is not None
        self.target_logits.add_(log_probs)  # of a chunk: a view of the fields of all items
        self.target_remainder_logits.index_add_(0, owners, log_remainders.to(self.target_remainder_logits.dtype))
        return log_probs.new_zeros(())

    def _shifted_target(self, cell_items: Tensor, owners: Tensor) -> tuple[Tensor, Tensor]:
        """Return the target's probabilities of all cells, and of the remainders of items `owners`."""
        assert self.target_logits is not None
        assert self.target_remainder_logits is not None
        groups = torch.cat([cell_items, owners])
        logits = torch.cat([self.target_logits, self.target_remainder_logits[owners]])
        probs = (logits - group_logsumexp(logits, groups, self.num_items)[groups]).exp()
        return probs[: len(cell_items)], probs[len(cell_items) :]

    def remainders_of_items(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return, on the CPU, the item of each remainder that is read, and the teacher's probabilities of these."""
        has_remainder = self.has_remainder
        return has_remainder.nonzero()[:, 0], self.remainder_probs[has_remainder].to(dtype).clamp_min_(0)

    def sum_divergence(
        self,
        cell_items: Tensor,
        cell_probs: Tensor,
        log_probs: Tensor,
        remainder_items: Tensor,
        remainder_probs: Tensor,
        log_remainders: Tensor,
    ) -> Tensor:
        """Return the weighted sum over items of the divergence between cells that are given; all on one device.

        `cell_items`: int64 [n], the item of each cell; `remainder_items`: int64 [r]. The probabilities are the
        teacher's, the log-probabilities the student's.
        """
        groups, cell_probs = cell_items, cell_probs.to(log_probs.dtype)
        if not len(remainder_items):
            return self.sum_joined_divergence(groups, cell_probs, log_probs, len(cell_probs))
        if self.divergence.temperature != 1 or self.weights is not None:  # else they are not needed
            groups = torch.cat([cell_items, remainder_items])
        probs = torch.cat([cell_probs, remainder_probs.to(log_probs.dtype)])
        return self.sum_joined_divergence(groups, probs, torch.cat([log_probs, log_remainders]), len(cell_probs))

    def sum_joined_divergence(self, groups: Tensor, probs: Tensor, log_probs: Tensor, num_cells: int) -> Tensor:
        """Return what `sum_divergence` returns, for [n + r] cells, followed by remainders; `groups` are their items."""
        items, power = self.num_items, 1 / self.divergence.temperature
        if power != 1:
            log_probs = power * log_probs
            log_probs = log_probs - group_logsumexp(log_probs, groups, items)[groups]
            highest = probs.new_zeros(items).scatter_reduce_(0, groups, probs, "amax")
            probs = (probs / highest[groups]).pow(power)  # powers of small probabilities alone may all be 0
            probs = probs / probs.new_zeros(items).scatter_add(0, groups, probs)[groups]
        if self.divergence.min_remainder and num_cells < len(probs):
            probs[num_cells:].clamp_min_(self.divergence.min_remainder)
        values = self.divergence.cell_values(probs, log_probs)
        if self.weights is not None:
            values = values * self.weights[groups]
        # Each operation is a launch on a GPU, also one that changes nothing.
        value = values.sum() if power == 1 else values.sum() / power**2
        return value if self.factor == 1 else self.factor * value


def group_logsumexp(values: Tensor, groups: Tensor, count: int) -> Tensor:
    """Return the log-sum-exp of each group, differentiable; each group needs at least one finite value."""
    highest = values.detach().new_full((count,), -torch.inf).scatter_reduce_(0, groups, values.detach(), "amax")
    sums = values.new_zeros(count).scatter_add(0, groups, (values - highest[groups]).exp())
    return sums.log() + highest
