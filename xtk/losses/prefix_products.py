"""Products along the student's own tokens: how likely it is to come to the last row of an item."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from xtk.losses.loss_cells import PrefixProduct
from xtk.losses.prefix_alternatives import group_logsumexp

# Where the logarithm of 1 - exp(x) is taken as a multiple of -x.
MIN_REMAINDER = 1e-30


@dataclass(frozen=True)
class TermPrefixProduct:
    """`PrefixProduct` of one term, on the CPU."""

    num_prefix_tokens: Tensor
    temperature: float

    @classmethod
    def from_prefix_product(cls, chain: PrefixProduct) -> TermPrefixProduct:
        """Take the array as it is."""
        return cls(torch.from_numpy(chain.num_prefix_tokens), chain.temperature)

    def for_chunk(self, items: slice, cell_offsets: Tensor, owners: Tensor, within: Tensor) -> ChunkPrefixProduct:
        """Cut out some items.

        Args:
            items: which.
            cell_offsets: [items + 1], their cells.
            owners: [rest rows], the items whose rows are listed for their rests, counted among these.
            within: [rest rows], which of the item's rows.
        """
        links = self.num_prefix_tokens[items]
        starts = links.cumsum(0) - links
        cells = torch.diff(cell_offsets)
        of_cells = torch.arange(len(cells)).repeat_interleave(cells)
        within_item = torch.arange(len(of_cells)) - (cell_offsets[:-1] - cell_offsets[0])[of_cells]
        is_link = within_item < links[of_cells]
        real = (~is_link).nonzero()[:, 0]
        distinct, groups = torch.unique_consecutive(owners, return_inverse=True)
        return ChunkPrefixProduct(
            prefix_cells=is_link.nonzero()[:, 0],
            final_cells=real,
            cell_starts=starts[of_cells[real]],
            cell_stops=(starts + links)[of_cells[real]],
            item_starts=starts,
            item_stops=starts + links,
            remainder_starts=starts[owners],
            remainder_stops=starts[owners] + within,
            remainder_groups=groups,
            remainder_items=distinct,
            temperature=self.temperature,
        )


@dataclass
class ChunkPrefixProduct:
    """The chains of the items of one chunk. Sums over links run from a start to a stop in the order of all links.

    Attributes:
        prefix_cells, final_cells: [L], [cells - L], which cells are links, and which are not.
        cell_starts, cell_stops: [cells - L], the links before a cell.
        item_starts, item_stops: [items], the links of each item.
        remainder_starts, remainder_stops: [rest rows], the links before each row.
        remainder_groups: [rest rows], rising, which of the items with an other cell a row belongs to.
        remainder_items: [R], these items.
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
        """Return the same on a device."""
        tensors = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "temperature"
        }
        return ChunkPrefixProduct(
            temperature=self.temperature, **{name: tensor.to(device) for name, tensor in tensors.items()}
        )

    def prefix_logprobs(self, cells: Tensor) -> Tensor:
        """Return [items], fp64, the log-probability to come to the last row of each item.

        Args:
            cells: [cells], log-probabilities in their own rows.
        """
        sums = self._sums(cells)
        return sums[self.item_stops] - sums[self.item_starts]

    def apply_prefix(self, cells: Tensor, rests: Tensor) -> tuple[Tensor, Tensor]:
        """Multiply the cells of each item with its links.

        Args:
            cells: [cells], log-probabilities in their own rows.
            rests: [rest rows], those of what each row leaves over.

        Returns:
            [cells - L] and [R], fp64: log-probabilities of the cells that are no links and of the other cells.
        """
        sums = self._sums(cells)
        said = cells[self.final_cells].double() + sums[self.cell_stops] - sums[self.cell_starts]
        rests = rests.double() + sums[self.remainder_stops] - sums[self.remainder_starts]
        others = group_logsumexp(rests, self.remainder_groups, len(self.remainder_items))
        if self.temperature == 1:
            return said, others
        return said / self.temperature, log_tempered_remainder(said[self.remainder_items], others, self.temperature)

    def _sums(self, cells: Tensor) -> Tensor:
        # A running sum over a whole chunk: fp64, since its differences are small.
        return torch.cat([cells.new_zeros(1, dtype=torch.float64), cells[self.prefix_cells].double().cumsum(0)])


def log_tempered_remainder(log_probs: Tensor, log_remainders: Tensor, temperature: float) -> Tensor:
    """Return `ln(1 - P^(1 / root))`, finite and with a finite gradient at both ends.

    Near `P = 1` it is `ln(1 - P) - ln(root)`, and `ln(1 - P)` is known better than `P`; elsewhere `ln P` is.

    Args:
        log_probs: [n], `ln P`.
        log_remainders: [n], `ln(1 - P)`, summed over what is left.
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
