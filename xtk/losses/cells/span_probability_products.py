"""Spans whose probability is a product: the student's own tokens before the last multiply the cells of the last row."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xtk.losses.cells.loss_cells import LossCells, group_logsumexp
from xtk.losses.interface import ItemRanges, LossInputs, range_indices
from xtk.losses.kernels.chunked_softmax import SoftmaxReads
from xtk.parallel.host_to_device import to_device_together

# Lower bound of 1 - P in the formula near P = 1, to keep it and its gradient finite.
MIN_TEMPERED_REMAINDER = 1e-30


@dataclass(frozen=True, kw_only=True)
class SpanProductCells(LossCells):
    """Cells that are multiplied by the student's probabilities of its observed tokens before the last row of an item.

    The first cells of an item are its prefix cells: one per row from its first row on, each with one entry, the
    observed token. All other cells, the final ones, are of the next row. The remainder is the sum, over all these rows,
    of the mass outside of the row's cells times the probabilities of the prefix tokens before the row. An item without
    cells has a remainder of probability 1. `teacher_probs` is 0 for prefix cells.
    """

    num_prefix_tokens: Tensor  # int64 [C], number of prefix cells of each item
    # tau. If it is not 1, each item has one final cell, of probability P, and `P^(1/tau)` and `1 - P^(1/tau)` are
    # compared with the teacher's probabilities, which are given in this form.
    temperature: float = 1.0

    PER_ITEM: ClassVar[tuple[str, ...]] = (*LossCells.PER_ITEM, "num_prefix_tokens")

    @classmethod
    def from_observed_tokens(
        cls, example: LossInputs, ranges: ItemRanges, probs: NDArray[np.float64], **others: Any
    ) -> Self:
        """Return one item per range, with one final cell: the student's last token there; `probs`: float64 [C]."""
        sizes = ranges.row_stop - ranges.row_start
        ends, rows = np.cumsum(sizes), range_indices(ranges.row_start, ranges.row_stop)
        teacher_probs = np.zeros(len(rows))
        teacher_probs[ends - 1] = probs
        return cls.from_numpy(
            cell_offsets=np.concatenate([np.zeros(1, np.int64), ends]),
            entry_offsets=np.arange(len(rows) + 1, dtype=np.int64),
            teacher_probs=teacher_probs,
            rows=rows.astype(np.int32),
            tokens=example.student_ids[example.positions[rows] + 1],
            item_rows=ranges.row_start.astype(np.int32),
            row_counts=sizes,
            num_prefix_tokens=sizes - 1,
            **others,
        )

    @property
    def has_remainder(self) -> Tensor:
        """Bool [C], whether the student's remainder is read."""
        if self.ignores_remainder or not self.divergence.is_linear_in_teacher:
            return torch.full((self.num_items,), not self.ignores_remainder)
        return self.remainder_probs > 0

    def softmax_reads(self, dtype: torch.dtype) -> SoftmaxReads:
        """Return the cells, and the remainder of each row by itself."""
        reads = super().softmax_reads(dtype)
        count = len(reads.remainder_rows)
        return replace(
            reads,
            remainder_groups=torch.arange(count, device=reads.remainder_rows.device),
            num_remainders=count,
            remainder_log_weights=torch.zeros_like(reads.remainder_log_weights),
        )

    def value(self, cells: Tensor, remainders: Tensor, *others: Tensor) -> Tensor:
        """Return the weighted sum of the divergence between final cells, multiplied by their prefixes."""
        return self.divergence_of_products(cells, remainders, self.prefix_sums(cells))

    def divergence_of_products(self, cells: Tensor, remainders: Tensor, sums: Tensor) -> Tensor:
        """Return the same from the sums of `prefix_sums`."""
        return self.divergence_sum(*self.apply_prefix(cells, remainders, sums), self._cells_of_kind(prefix=False))

    def prefix_sums(self, cells: Tensor) -> Tensor:
        """Return [prefix cells + 1], fp64, the cumulative sum of their log-probabilities, from those of all cells."""
        # Over all items: fp64, because differences of it are small.
        logprobs = cells[self._places.prefix].double()
        return torch.cat([logprobs.new_zeros(1), logprobs.cumsum(0)])

    def prefix_logprobs(self, sums: Tensor) -> Tensor:
        """Return [items], fp64, the log-probability of each item's prefix, from the sums of `prefix_sums`."""
        places = self._places
        return sums[places.item_stops] - sums[places.item_starts]

    def apply_prefix(self, cells: Tensor, remainders: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities of final cells, and of items with a remainder, multiplied by the prefixes; fp64.

        They are given for all cells, and for the remainder of each row, in their own rows; `sums`: from `prefix_sums`.
        """
        places = self._places
        logprobs = cells[places.final].double() + sums[places.final_stops] - sums[places.final_starts]
        remainders = remainders.double() + sums[places.remainder_stops] - sums[places.remainder_starts]
        log_remainders = group_logsumexp(remainders, places.remainder_groups, len(places.owners))
        if self.temperature == 1:
            return logprobs, log_remainders
        tempered = log_tempered_remainder(logprobs[places.owners], log_remainders, self.temperature)
        return logprobs / self.temperature, tempered

    @cached_property
    def _places(self) -> _Places:
        """The indices that all methods use, copied to the device together."""
        starts = self.num_prefix_tokens.cumsum(0) - self.num_prefix_tokens
        stops, final = starts + self.num_prefix_tokens, self._cells_of_kind(prefix=False)
        items = self.cell_items[final]
        row_items, groups, within = self.remainder_rows()
        places = _Places(
            prefix=self._cells_of_kind(prefix=True),
            final=final,
            final_starts=starts[items],
            final_stops=stops[items],
            item_starts=starts,
            item_stops=stops,
            remainder_starts=starts[row_items],
            remainder_stops=starts[row_items] + within,
            remainder_groups=groups,
            owners=self.has_remainder.nonzero()[:, 0],
        )
        return _Places(*to_device_together(places, self.teacher_probs.device))

    def _cells_of_kind(self, *, prefix: bool) -> Tensor:
        """Return the indices of the prefix cells, or of the final cells."""
        items = self.cell_items
        within = torch.arange(len(items)) - self.cell_offsets[:-1][items]
        return ((within < self.num_prefix_tokens[items]) == prefix).nonzero()[:, 0]


class _Places(NamedTuple):
    """Indices on the device, int64; starts and stops are in the sums of `SpanProductCells.prefix_sums`."""

    prefix: Tensor  # in the cells
    final: Tensor  # likewise
    final_starts: Tensor
    final_stops: Tensor
    item_starts: Tensor
    item_stops: Tensor
    remainder_starts: Tensor
    remainder_stops: Tensor
    remainder_groups: Tensor
    owners: Tensor  # the items with a remainder


def log_tempered_remainder(log_probs: Tensor, log_remainders: Tensor, temperature: float) -> Tensor:
    """Return `ln(1 - P^(1 / tau))` from `ln P` and `ln(1 - P)` [n], finite, with a finite gradient at P = 0 and P = 1.

    Near `P = 1` it is `ln(1 - P) - ln(tau)`, where `ln(1 - P)`, summed over the remaining tokens, is more precise than
    `P`; elsewhere `ln P` is used.
    """
    near, half = log_remainders < math.log(0.5), math.log(0.5)
    left = torch.where(near, log_remainders, torch.full_like(log_remainders, half)).exp()
    left = left.clamp_min(MIN_TEMPERED_REMAINDER)
    size = -torch.log1p(-left)
    of_near = log_remainders + (size / left).log() + (-torch.expm1(-size / temperature) / size).log()
    far = torch.where(near, torch.full_like(log_probs, half), log_probs)
    return torch.where(near, of_near, (-torch.expm1(far / temperature)).log())
