"""Products along the student's own tokens: how likely it is to come to the last row of an item."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from xtk.losses.alternatives import log_sums
from xtk.losses.cells import Chain

# Where the logarithm of 1 - exp(x) is taken as a multiple of -x.
TINY = 1e-30


@dataclass(frozen=True)
class ChainOfTerm:
    """`Chain` of one term, on the CPU."""

    links: Tensor
    root: float

    @classmethod
    def of(cls, chain: Chain) -> ChainOfTerm:
        """Take the array as it is."""
        return cls(torch.from_numpy(chain.links), chain.root)

    def part(self, items: slice, cell_offsets: Tensor, owners: Tensor, within: Tensor) -> PartOfChain:
        """Cut out some items.

        Args:
            items: which.
            cell_offsets: [items + 1], their cells.
            owners: [rest rows], the items whose rows are listed for their rests, counted among these.
            within: [rest rows], which of the item's rows.
        """
        links = self.links[items]
        starts = links.cumsum(0) - links
        cells = torch.diff(cell_offsets)
        of_cells = torch.arange(len(cells)).repeat_interleave(cells)
        within_item = torch.arange(len(of_cells)) - (cell_offsets[:-1] - cell_offsets[0])[of_cells]
        is_link = within_item < links[of_cells]
        real = (~is_link).nonzero()[:, 0]
        distinct, groups = torch.unique_consecutive(owners, return_inverse=True)
        return PartOfChain(
            links=is_link.nonzero()[:, 0],
            real=real,
            cell_starts=starts[of_cells[real]],
            cell_stops=(starts + links)[of_cells[real]],
            item_starts=starts,
            item_stops=starts + links,
            rest_starts=starts[owners],
            rest_stops=starts[owners] + within,
            rest_groups=groups,
            rest_items=distinct,
            root=self.root,
        )


@dataclass
class PartOfChain:
    """The chains of the items of one chunk. Sums over links run from a start to a stop in the order of all links.

    Attributes:
        links, real: [L], [cells - L], which cells are links, and which are not.
        cell_starts, cell_stops: [cells - L], the links before a cell.
        item_starts, item_stops: [items], the links of each item.
        rest_starts, rest_stops: [rest rows], the links before each row.
        rest_groups: [rest rows], rising, which of the items with an other cell a row belongs to.
        rest_items: [R], these items.
        root: tau.
    """

    links: Tensor
    real: Tensor
    cell_starts: Tensor
    cell_stops: Tensor
    item_starts: Tensor
    item_stops: Tensor
    rest_starts: Tensor
    rest_stops: Tensor
    rest_groups: Tensor
    rest_items: Tensor
    root: float

    def to(self, device: torch.device) -> PartOfChain:
        """Return the same on a device."""
        tensors = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "root"}
        return PartOfChain(root=self.root, **{name: tensor.to(device) for name, tensor in tensors.items()})

    def before(self, cells: Tensor) -> Tensor:
        """Return [items], fp64, the log-probability to come to the last row of each item.

        Args:
            cells: [cells], log-probabilities in their own rows.
        """
        sums = self._sums(cells)
        return sums[self.item_stops] - sums[self.item_starts]

    def multiplied(self, cells: Tensor, rests: Tensor) -> tuple[Tensor, Tensor]:
        """Multiply the cells of each item with its links.

        Args:
            cells: [cells], log-probabilities in their own rows.
            rests: [rest rows], those of what each row leaves over.

        Returns:
            [cells - L] and [R], fp64: log-probabilities of the cells that are no links and of the other cells.
        """
        sums = self._sums(cells)
        said = cells[self.real].double() + sums[self.cell_stops] - sums[self.cell_starts]
        rests = rests.double() + sums[self.rest_stops] - sums[self.rest_starts]
        others = log_sums(rests, self.rest_groups, len(self.rest_items))
        if self.root == 1:
            return said, others
        return said / self.root, rest_of_root(said[self.rest_items], others, self.root)

    def _sums(self, cells: Tensor) -> Tensor:
        # A running sum over a whole chunk: fp64, since its differences are small.
        return torch.cat([cells.new_zeros(1, dtype=torch.float64), cells[self.links].double().cumsum(0)])


def rest_of_root(log_probs: Tensor, log_rests: Tensor, root: float) -> Tensor:
    """Return `ln(1 - P^(1 / root))`, finite and with a finite gradient at both ends.

    Near `P = 1` it is `ln(1 - P) - ln(root)`, and `ln(1 - P)` is known better than `P`; elsewhere `ln P` is.

    Args:
        log_probs: [n], `ln P`.
        log_rests: [n], `ln(1 - P)`, summed over what is left.
        root: tau.
    """
    near = log_rests < math.log(0.5)
    left = torch.where(near, log_rests, torch.full_like(log_rests, math.log(0.5))).exp().clamp_min(TINY)
    size = -torch.log1p(-left)
    of_near = log_rests + (size / left).log() + (-torch.expm1(-size / root) / size).log()
    far = torch.where(near, torch.full_like(log_probs, math.log(0.5)), log_probs)
    return torch.where(near, of_near, (-torch.expm1(far / root)).log())
