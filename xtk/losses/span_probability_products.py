"""Products of the student's probabilities of the observed tokens before the last token of a span."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from xtk.losses.loss_interface import PrefixProduct
from xtk.losses.tokenization_marginalization import group_logsumexp

# Lower bound of 1 - P in the formula near P = 1, to keep it and its gradient finite.
MIN_REMAINDER = 1e-30


@dataclass(frozen=True)
class TermPrefixProduct:
    """`PrefixProduct` of one loss term, on the CPU."""

    num_prefix_tokens: Tensor
    temperature: float

    @classmethod
    def from_prefix_product(cls, prefix_product: PrefixProduct) -> TermPrefixProduct:
        """Return the prefix product with its array as a CPU tensor."""
        return cls(torch.from_numpy(prefix_product.num_prefix_tokens), prefix_product.temperature)

    def for_chunk(self, items: slice, cell_offsets: Tensor, owners: Tensor, within: Tensor) -> ChunkPrefixProduct:
        """Return the prefix products of some items.

        Args:
            items: range of items.
            cell_offsets: [items + 1], their cells.
            owners: [remainder rows], the item of each remainder row, relative to the range.
            within: [remainder rows], the row's index within its item.
        """
        num_prefix = self.num_prefix_tokens[items]
        starts = num_prefix.cumsum(0) - num_prefix
        cells = torch.diff(cell_offsets)
        of_cells = torch.arange(len(cells)).repeat_interleave(cells)
        within_item = torch.arange(len(of_cells)) - (cell_offsets[:-1] - cell_offsets[0])[of_cells]
        is_prefix = within_item < num_prefix[of_cells]
        final_cells = (~is_prefix).nonzero()[:, 0]
        distinct, groups = torch.unique_consecutive(owners, return_inverse=True)
        return ChunkPrefixProduct(
            prefix_cells=is_prefix.nonzero()[:, 0],
            final_cells=final_cells,
            cell_starts=starts[of_cells[final_cells]],
            cell_stops=(starts + num_prefix)[of_cells[final_cells]],
            item_starts=starts,
            item_stops=starts + num_prefix,
            remainder_starts=starts[owners],
            remainder_stops=starts[owners] + within,
            remainder_groups=groups,
            remainder_items=distinct,
            temperature=self.temperature,
        )


@dataclass
class ChunkPrefixProduct:
    """The prefix products of the items of one chunk. Starts and stops are ranges in the list of all L prefix cells.

    Attributes:
        prefix_cells, final_cells: [L] and [cells - L], indices of the prefix cells and of all other cells.
        cell_starts, cell_stops: [cells - L], the prefix cells before each final cell.
        item_starts, item_stops: [items], the prefix cells of each item.
        remainder_starts, remainder_stops: [remainder rows], the prefix cells before each remainder row.
        remainder_groups: [remainder rows], sorted, index of the row's item in `remainder_items`.
        remainder_items: [R], the items with a remainder.
        temperature: tau.
    """

    prefix_cells: Tensor
    final_cells: Tensor
    cell_starts: Tensor
    cell_stops: Tensor
    item_starts: Tensor
    item_stops: Tensor
    remainder_starts: Tensor
    remainder_stops: Tensor
    remainder_groups: Tensor
    remainder_items: Tensor
    temperature: float

    def to(self, device: torch.device) -> ChunkPrefixProduct:
        """Return a copy on a device."""
        tensors = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "temperature"
        }
        return ChunkPrefixProduct(
            temperature=self.temperature, **{name: tensor.to(device) for name, tensor in tensors.items()}
        )

    def prefix_logprobs(self, cells: Tensor) -> Tensor:
        """Return [items], fp64, the log-probability of the prefix of each item.

        Args:
            cells: [cells], log-probabilities in their own rows.
        """
        sums = self._sums(cells)
        return sums[self.item_stops] - sums[self.item_starts]

    def apply_prefix(self, cells: Tensor, remainders: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities of final cells and remainders, multiplied by the prefixes.

        Args:
            cells: [cells], log-probabilities in their own rows.
            remainders: [remainder rows], log-probabilities of each row's remainder.

        Returns:
            [cells - L] and [R], fp64: log-probabilities of the final cells and of the remainders.
        """
        sums = self._sums(cells)
        cell_logprobs = cells[self.final_cells].double() + sums[self.cell_stops] - sums[self.cell_starts]
        remainders = remainders.double() + sums[self.remainder_stops] - sums[self.remainder_starts]
        remainder_logprobs = group_logsumexp(remainders, self.remainder_groups, len(self.remainder_items))
        if self.temperature == 1:
            return cell_logprobs, remainder_logprobs
        return cell_logprobs / self.temperature, log_tempered_remainder(
            cell_logprobs[self.remainder_items], remainder_logprobs, self.temperature
        )

    def _sums(self, cells: Tensor) -> Tensor:
        # Cumulative sum over a chunk: fp64, because its differences are small.
        return torch.cat([cells.new_zeros(1, dtype=torch.float64), cells[self.prefix_cells].double().cumsum(0)])


def log_tempered_remainder(log_probs: Tensor, log_remainders: Tensor, temperature: float) -> Tensor:
    """Return `ln(1 - P^(1 / tau))`, finite and with a finite gradient at P = 0 and P = 1.

    Near `P = 1` it is `ln(1 - P) - ln(tau)`, where `ln(1 - P)` is more precise than `P`; elsewhere `ln P` is used.

    Args:
        log_probs: [n], `ln P`.
        log_remainders: [n], `ln(1 - P)`, summed over the remaining tokens.
        temperature: tau.
    """
    near = log_remainders < math.log(0.5)
    left = (
        torch.where(near, log_remainders, torch.full_like(log_remainders, math.log(0.5))).exp().clamp_min(MIN_REMAINDER)
    )
    size = -torch.log1p(-left)
    of_near = log_remainders + (size / left).log() + (-torch.expm1(-size / temperature) / size).log()
    far = torch.where(near, torch.full_like(log_probs, math.log(0.5)), log_probs)
    return torch.where(near, of_near, (-torch.expm1(far / temperature)).log())
