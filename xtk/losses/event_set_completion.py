"""escd: bpm at shared boundaries, and after the first token of a longer one the mass that must complete it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from xtk.losses.byte_prefix_marginalization import find_student_boundaries, longest_prefix_cells
from xtk.losses.cells.loss_cells import LossCells
from xtk.losses.cells.next_byte_cells import concatenated_ranges
from xtk.losses.interface import ComparisonSpace, Loss, LossInputs
from xtk.losses.kernels.chunked_softmax import EntryGroups, SoftmaxReads
from xtk.losses.kernels.event_set_completion_numba import fill_event_sets
from xtk.losses.kernels.sampled_support_correction import TeacherArrays
from xtk.losses.kernels.token_boundaries_numba import NEXT_DISTRIBUTION, NONE, STUDENT_COLUMNS, TEACHER_COLUMNS
from xtk.parallel.host_to_device import to_device, vocabulary_tensor
from xtk.projection.vocabulary_array import VocabularyArray
from xtk.projection.vocabulary_byte_partition import BytePartition


@dataclass(frozen=True, kw_only=True)
class EventSetCells(LossCells):
    """Cells, and in addition event sets: disjoint sets of tokens in the item's row, each with a mass of the teacher.

    An event set adds `-mass ln(student's probability of its tokens)`. Cells and event sets may have common tokens.
    """

    set_offsets: Tensor  # int64 [C + 1], the event sets of item c
    set_masses: Tensor  # [sets]
    sorted_token_ids: VocabularyArray  # int32 [n], the student's tokens in byte order
    firsts: Tensor  # int32 [sets], first index of each in `sorted_token_ids`
    stops: Tensor  # int32 [sets], one past the last; no set is empty
    token_offsets: Tensor  # int64 [sets + 1], the cumulative sizes of the sets

    ON_DEVICE: ClassVar[tuple[str, ...]] = (
        *LossCells.ON_DEVICE, "set_masses", "firsts", "stops",
    )  # fmt: skip

    def select(self, items: slice, first_row: int) -> Self:
        """Return some items, with rows relative to `first_row`."""
        offsets = self.set_offsets[items.start : items.stop + 1]
        sets = slice(int(offsets[0]), int(offsets[-1]))
        return replace(
            super().select(items, first_row),
            set_offsets=offsets - sets.start,
            set_masses=self.set_masses[sets],
            firsts=self.firsts[sets],
            stops=self.stops[sets],
            token_offsets=self.token_offsets[sets.start : sets.stop + 1],
        )

    def softmax_reads(self, dtype: torch.dtype) -> SoftmaxReads:
        """Return the cells and remainders, and the tokens of the event sets."""
        device, count = self.rows.device, len(self.firsts)
        firsts, sizes = self.firsts.long(), (self.stops - self.firsts).long()
        num_tokens = int(self.token_offsets[-1] - self.token_offsets[0])
        groups = torch.arange(count, device=device).repeat_interleave(sizes, output_size=num_tokens)
        tokens = EntryGroups(
            rows=to_device(self.first_rows[self._set_items], device)[groups],
            tokens=vocabulary_tensor(self.sorted_token_ids, device)[concatenated_ranges(firsts, sizes, num_tokens)],
            groups=groups,
            num_groups=count,
        )
        return replace(super().softmax_reads(dtype), alternatives=tokens)

    def value(self, cells: Tensor, remainders: Tensor, *others: Tensor) -> Tensor:
        """Return the weighted sum of the divergence between cells and of the event sets' terms; others: [sets]."""
        (of_sets,) = others
        values = -self.set_masses.to(of_sets.dtype) * of_sets
        if self.weights is not None:
            values = values * self.weights[to_device(self._set_items, values.device)]
        return self.divergence_sum(cells, remainders) + values.sum()

    @property
    def _set_items(self) -> Tensor:
        """int64 [sets], the item of each event set."""
        return torch.arange(self.num_items).repeat_interleave(torch.diff(self.set_offsets))


class ESCD(Loss):
    """escd: bpm's `KL((t(u), t_rem) | (s(u), s_rem))` at shared boundaries, and `- sum_g M_g ln s(C_g)` after them.

    The second term is at the student's token after its token `a` at a shared boundary. `g` are event sets of the
    teacher tokens that no student token equals: such a token and those that begin with it. `M_g` is the teacher's mass
    of the set at the boundary. It counts if the bytes of the shortest member begin with those of `a` and go on; `C_g`
    are the student tokens that begin with what is left of it. Both terms are averaged over the student tokens with a
    teacher. Options: `divergence` of the first term, and its options. Event-set completion, arXiv 2609.34738, from the
    teacher's full distribution; here the mass that a support does not list is in the remainder and in no event set.
    The second term is a cross-entropy: it is 0 for equal tokenizers, but not for models that predict the same text.
    """

    comparison_space = "bytes"
    averaged_over = "student tokens with a teacher"

    def build_cells(self, example: LossInputs, comparison_space: ComparisonSpace) -> LossCells:
        """Return one item per student token, in text order."""
        assert isinstance(comparison_space, BytePartition)
        stored = example.teacher_logprobs
        assert stored is not None
        items = find_student_boundaries(example, comparison_space)
        cells = longest_prefix_cells(example, comparison_space, items, with_inside=False)
        indices = example.positions[items[:, STUDENT_COLUMNS + NEXT_DISTRIBUTION]] + 1  # of the student's tokens
        roots = np.full(len(items), NONE, np.int64)
        follows = np.flatnonzero(np.diff(indices) == 1) + 1
        roots[follows] = items[follows - 1, TEACHER_COLUMNS + NEXT_DISTRIBUTION]
        set_offsets, masses, firsts, stops = fill_event_sets(
            comparison_space.student,
            comparison_space.teacher,
            comparison_space.longest_prefixes.event_heads,
            TeacherArrays.from_logprobs(stored),
            roots,
            example.student_ids[indices - 1],
        )
        return EventSetCells.from_numpy(
            **cells,
            set_offsets=set_offsets,
            set_masses=masses.astype(np.float32),
            sorted_token_ids=comparison_space.shared_token_ids,
            firsts=firsts,
            stops=stops,
            token_offsets=np.append(0, np.cumsum(stops - firsts, dtype=np.int64)),
        )
