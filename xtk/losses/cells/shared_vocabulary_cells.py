"""Comparison on tokens that both vocabularies have, the cells: both distributions are divided by their mass there."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xtk.cache.teacher_logprobs import TeacherLogprobs
from xtk.losses.cells.loss_cells import LossCells, group_logsumexp
from xtk.losses.divergences import ForwardKLDivergence
from xtk.losses.interface import ItemRanges
from xtk.losses.kernels.chunked_softmax import EntryGroups, SoftmaxReads
from xtk.losses.kernels.largest_tokens import LargestTokens
from xtk.losses.kernels.sampled_support_correction import TeacherArrays
from xtk.losses.kernels.shared_vocabulary_cells_numba import fill_shared_cells
from xtk.parallel.host_to_device import to_device
from xtk.projection.projection import TokenPairs
from xtk.projection.vocabulary_array import VocabularyArray

NO_REMAINDER = math.log(1e-30)


def shared_cell_fields(
    ranges: ItemRanges, unit_probs: NDArray[np.float64], logprobs: TeacherLogprobs, pairs: TokenPairs
) -> dict[str, Any]:
    """Return the arguments of `SharedVocabularyCells.from_numpy` for items that begin with the given ranges.

    `unit_probs`: float64 [C], as in `fill_shared_cells`, which divides them in place.
    """
    cell_offsets, probs, tokens, remainders = fill_shared_cells(
        ranges.position_start, unit_probs, TeacherArrays.from_logprobs(logprobs), pairs.student_of_teacher
    )
    return {
        "cell_offsets": cell_offsets,
        "entry_offsets": np.arange(len(tokens) + 1, dtype=np.int64),
        "teacher_probs": probs,
        "rows": np.repeat(ranges.row_start, np.diff(cell_offsets)).astype(np.int32),
        "tokens": tokens,
        "item_rows": ranges.row_start.astype(np.int32),
        "row_counts": ranges.row_stop - ranges.row_start,
        "remainder_probs": remainders,
        "paired_tokens": pairs.paired_students,
    }


@dataclass(frozen=True, kw_only=True)
class SharedVocabularyCells(LossCells):
    """Cells of shared tokens in the first row of each item, given that the next token is a shared one.

    The remainder contains all other shared tokens. Tokens that are not shared are left out on both sides.
    `teacher_probs` and `remainder_probs` are the teacher's probabilities, divided by its mass on shared tokens.
    """

    paired_tokens: VocabularyArray  # int32 [n], the student's shared tokens
    # Compared cells of an item, the student's most likely; others add to the remainders. 0, or forward KL: all.
    top_k: int = 0

    @property
    def has_remainder(self) -> Tensor:
        """Bool [C], whether the student's remainder is read: always, for the mass on shared tokens."""
        return torch.ones(self.num_items, dtype=torch.bool)

    def remainder_rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows that remainders are read from: the first row of each item."""
        items = torch.arange(self.num_items)
        return items, items, torch.zeros_like(items)

    def softmax_reads(self, dtype: torch.dtype) -> SoftmaxReads:
        """Return the cells and the remainders, and the student's mass on tokens that are not shared."""
        reads = super().softmax_reads(dtype)
        nothing, device = torch.zeros(self.num_items, dtype=torch.int64), self.rows.device
        return replace(
            reads,
            remainder_log_weights=torch.zeros_like(reads.remainder_log_weights),
            largest=LargestTokens(self.first_rows, nothing, to_device(nothing[:0], device), self.paired_tokens),
        )

    def value(self, cells: Tensor, remainders: Tensor, *others: Tensor) -> Tensor:
        """Return the weighted sum of the divergence between the distributions over shared tokens.

        `remainders`: [items], of all tokens in no cell. `others`: [0], no sorted probabilities; and [items], the
        student's probability of all tokens not shared.
        """
        sorted_logprobs, unshared = others
        items = to_device(self.cell_items, cells.device)
        log_rest = self.shared_remainders(remainders, unshared)
        return self.compare_shared(items, self.teacher_probs, cells, log_rest) + sorted_logprobs.sum()

    def shared_remainders(self, remainders: Tensor, unshared: Tensor) -> Tensor:
        """Return [items], log-probabilities of shared tokens in no cell, from those of all tokens in no cell.

        `unshared`: [items], the probability of all tokens that are not shared.
        """
        # The difference of two sums of the same terms: relative to the remainder, not to 1, where it may be 1e-9.
        finite = torch.finfo(unshared.dtype)
        fraction = (unshared.clamp_min(finite.tiny).log() - remainders).exp().clamp_max(1 - 4 * finite.eps)
        num_entries = torch.diff(self.entry_offsets[self.cell_offsets])
        is_complete = to_device(num_entries == len(self.paired_tokens), remainders.device)
        return torch.where(is_complete, torch.full_like(remainders, NO_REMAINDER), remainders + (-fraction).log1p())

    def compare_shared(self, items: Tensor, probs: Tensor, log_probs: Tensor, log_rest: Tensor) -> Tensor:
        """Return the weighted sum of the divergence, after dividing the student's probabilities by their sum.

        `items`: int64 [n], the item of each cell, in any order. `log_rest`: [items], of the shared tokens that are in
        no cell.
        """
        owners = torch.arange(self.num_items, device=items.device)
        totals = group_logsumexp(torch.cat([log_probs, log_rest]), torch.cat([items, owners]), self.num_items)
        log_probs, log_rest = log_probs - totals[items], log_rest - totals
        rest = to_device(self.remainder_probs.clamp_min(0).to(log_probs.dtype), items.device)
        probs = probs.to(log_probs.dtype)
        if self.top_k and not isinstance(self.divergence, ForwardKLDivergence):
            kept, left = self._largest_cells(log_probs.detach(), items)
            left_items = items[left]
            rest = rest.scatter_add(0, left_items, probs[left])
            groups = torch.cat([owners, left_items])
            log_rest = group_logsumexp(torch.cat([log_rest, log_probs[left]]), groups, self.num_items)
            items, probs, log_probs = items[kept], probs[kept], log_probs[kept]
        return self.sum_divergence(items, probs, log_probs, owners, rest, log_rest)

    def _largest_cells(self, log_probs: Tensor, items: Tensor) -> tuple[Tensor, Tensor]:
        """Return the indices of the `top_k` largest cells of each item, and of all others; of equal ones the first.

        How many these are follows from the offsets on the host, so that it does not wait for the device.
        """
        order = log_probs.argsort(descending=True, stable=True)
        order = order[items[order].argsort(stable=True)]
        places = torch.arange(len(items)) - self.cell_offsets[:-1].repeat_interleave(torch.diff(self.cell_offsets))
        kept = places < self.top_k
        device = items.device
        return order[to_device(kept.nonzero()[:, 0], device)], order[to_device((~kept).nonzero()[:, 0], device)]


@dataclass(frozen=True, kw_only=True)
class CandidateUnitCells(SharedVocabularyCells):
    """Shared tokens and units of several tokens as candidates; a unit's score is the mean of its log-probabilities.

    The distributions over candidates are the softmax of the scores. The score of a token is its log-probability. The
    tokens of a unit are predicted by different rows of the item.
    """

    unit_offsets: Tensor  # int64 [C + 1], the units of item c
    unit_token_offsets: Tensor  # int64 [units + 1], the tokens of each unit; no unit is empty
    unit_rows: Tensor  # int32 [tokens], the row that predicts each token
    unit_tokens: Tensor  # int32 [tokens]
    unit_probs: Tensor  # [units], the teacher's probability of each candidate

    ON_DEVICE: ClassVar[tuple[str, ...]] = (
        *SharedVocabularyCells.ON_DEVICE, "unit_rows", "unit_tokens", "unit_probs",
    )  # fmt: skip

    def select(self, items: slice, first_row: int) -> Self:
        """Return some items, with rows relative to `first_row`."""
        units = self.unit_offsets[items.start : items.stop + 1]
        tokens = self.unit_token_offsets[int(units[0]) : int(units[-1]) + 1]
        of_tokens = slice(int(tokens[0]), int(tokens[-1]))
        return replace(
            super().select(items, first_row),
            unit_offsets=units - units[0],
            unit_token_offsets=tokens - tokens[0],
            unit_rows=self.unit_rows[of_tokens] - first_row,
            unit_tokens=self.unit_tokens[of_tokens],
            unit_probs=self.unit_probs[int(units[0]) : int(units[-1])],
        )

    def softmax_reads(self, dtype: torch.dtype) -> SoftmaxReads:
        """Return the cells and remainders in the first rows, and the units' tokens."""
        count = len(self.unit_tokens)
        tokens = EntryGroups(
            self.unit_rows.long(), self.unit_tokens.long(), torch.arange(count, device=self.unit_rows.device), count
        )
        return replace(super().softmax_reads(dtype), alternatives=tokens)

    def value(self, cells: Tensor, remainders: Tensor, *others: Tensor) -> Tensor:
        """Return the weighted sum of the divergence between the distributions over candidates.

        `others`: [tokens], log-probabilities of the units' tokens; then as in the base class.
        """
        tokens, sorted_logprobs, unshared = others
        device, sizes = cells.device, torch.diff(self.unit_token_offsets)
        units = to_device(torch.arange(len(sizes)).repeat_interleave(sizes), device)
        scores = tokens.new_zeros(len(sizes)).index_add(0, units, tokens) / to_device(sizes, device)
        unit_items = to_device(torch.arange(self.num_items).repeat_interleave(torch.diff(self.unit_offsets)), device)
        value = self.compare_shared(
            torch.cat([to_device(self.cell_items, device), unit_items]),
            torch.cat([self.teacher_probs, self.unit_probs.to(self.teacher_probs.dtype)]),
            torch.cat([cells, scores]),
            self.shared_remainders(remainders, unshared),
        )
        return value + sorted_logprobs.sum()
