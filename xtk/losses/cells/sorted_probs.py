"""Comparison of sorted probabilities: the student's largest of a row against the teacher's, rank by rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xtk.losses.cells.span_probability_products import SpanProductCells
from xtk.losses.interface import ItemRanges, LossInputs
from xtk.losses.kernels.chunked_softmax import SoftmaxReads
from xtk.losses.kernels.largest_tokens import LargestTokens
from xtk.losses.kernels.sampled_support_correction import TeacherArrays
from xtk.losses.kernels.sorted_probs_numba import fill_paired_cells
from xtk.parallel.host_to_device import to_device
from xtk.projection.vocabulary_array import VocabularyArray


@dataclass(frozen=True, kw_only=True)
class SortedProbCells(SpanProductCells):
    """Cells, and in addition sorted probabilities in the last row of each item, which are compared rank by rank."""

    rank_rows: Tensor  # int32 [C], rows of the student's logits
    rank_offsets: Tensor  # int64 [C+1], the ranks of item c
    rank_probs: Tensor  # float32 [ranks], the teacher's probabilities, descending within an item
    min_remainder: Tensor  # float32 [C], lower bound of the teacher's mass after the last rank
    max_remainder: Tensor  # float32 [C], upper bound of that mass
    rank_weight: float  # factor of the sum of absolute differences
    excluded_tokens: VocabularyArray | None = None  # int32 [n], student tokens that are not ranked; None: all are

    PER_ITEM: ClassVar[tuple[str, ...]] = (
        *SpanProductCells.PER_ITEM, "rank_rows", "min_remainder", "max_remainder",
    )  # fmt: skip
    ON_DEVICE: ClassVar[tuple[str, ...]] = (
        *SpanProductCells.ON_DEVICE, "rank_probs", "min_remainder", "max_remainder",
    )  # fmt: skip

    @classmethod
    def from_teacher(
        cls,
        example: LossInputs,
        ranges: ItemRanges,
        student_of_teacher: NDArray[np.int32],
        max_ranks: int,
        rank_weight: float,
    ) -> Self:
        """Return one item per range: cells of paired tokens and ranks of unpaired tokens, both in its last row.

        Both distributions are multiplied by the probabilities of the model's own tokens before the last. The teacher's
        mass after the last rank is at least what it lists there, and at most all that is left. `student_of_teacher`:
        int32 [U], the student token paired with each teacher token; -1: none.
        """
        teacher = example.teacher_logprobs
        assert teacher is not None
        cell_offsets, probs, rows, tokens, rank_offsets, rank_probs, after_last_rank, remainders = fill_paired_cells(
            ranges,
            TeacherArrays.from_logprobs(teacher),
            example.student_ids[example.positions + 1],
            example.teacher_ids[teacher.positions],
            teacher.observed_logprobs,
            student_of_teacher,
            max_ranks,
        )
        sizes = ranges.row_stop - ranges.row_start
        return cls.from_numpy(
            cell_offsets=cell_offsets,
            entry_offsets=np.arange(len(rows) + 1, dtype=np.int64),
            teacher_probs=probs,
            rows=rows,
            tokens=tokens,
            item_rows=ranges.row_start.astype(np.int32),
            row_counts=sizes,
            num_prefix_tokens=sizes - 1,
            rank_rows=(ranges.row_stop - 1).astype(np.int32),
            rank_offsets=rank_offsets,
            rank_probs=rank_probs,
            min_remainder=after_last_rank,
            max_remainder=after_last_rank + remainders,
            rank_weight=rank_weight,
        )

    def select(self, items: slice, first_row: int) -> Self:
        """Return some items, with rows relative to `first_row`."""
        offsets, chosen = self.rank_offsets[items.start : items.stop + 1], super().select(items, first_row)
        return replace(
            chosen,
            rank_rows=chosen.rank_rows - first_row,
            rank_offsets=offsets - offsets[0],
            rank_probs=self.rank_probs[int(offsets[0]) : int(offsets[-1])],
        )

    def softmax_reads(self, dtype: torch.dtype) -> SoftmaxReads:
        """Return the cells, and the largest tokens of the last rows."""
        counts = torch.diff(self.rank_offsets)
        largest = LargestTokens(self.rank_rows.long(), counts, self._rank_items, self.excluded_tokens)
        return replace(super().softmax_reads(dtype), largest=largest)

    def value(self, cells: Tensor, remainders: Tensor, *others: Tensor) -> Tensor:
        """Return the weighted sum of the divergence between cells and of the differences of ranks.

        `others`: [ranks], log-probabilities of the student's largest tokens, -inf where there are no more; and [items],
        the student's probability of all tokens that are ranked.
        """
        sums = self.prefix_sums(cells)
        value = self.divergence_of_products(cells, remainders, sums)
        log_probs, masses = others
        items, teacher_probs = self._rank_items, self.rank_probs.to(log_probs.dtype)
        factors = self.prefix_logprobs(sums).exp().to(log_probs.dtype)
        probs, masses = log_probs.exp() * factors[items], masses * factors
        after_last_rank = (masses - torch.zeros_like(masses).index_add(0, items, probs)).clamp_min(0)
        highest, lowest = (one.to(log_probs.dtype) for one in (self.max_remainder, self.min_remainder))
        outside = (after_last_rank - highest).relu() + (lowest - after_last_rank).relu()
        by_rank, outside = self.rank_weight * (teacher_probs - probs).abs(), self.rank_weight * outside
        if self.weights is not None:
            by_rank, outside = by_rank * self.weights[items], outside * self.weights
        return value + by_rank.sum() + outside.sum()

    @cached_property
    def _rank_items(self) -> Tensor:
        """int64 [ranks], the item of each rank, on the device."""
        counts = torch.diff(self.rank_offsets)
        return to_device(torch.arange(self.num_items).repeat_interleave(counts), self.rank_probs.device)
