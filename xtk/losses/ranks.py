"""Probabilities by rank: the student's largest of a row against the teacher's, one after the other."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from xtk.losses import rank_kernels
from xtk.losses.cells import Ranks

# Rows at a time, where a row is looked at through a mask: the copy is a part of the chunk.
BLOCK = 32


@dataclass(frozen=True)
class RanksOfTerm:
    """`Ranks` of one term: their structure on the CPU, their numbers on a device."""

    rows: Tensor
    offsets: Tensor
    probs: Tensor
    least: Tensor
    most: Tensor
    unranked: Tensor | None
    weight: float

    @classmethod
    def of(cls, ranks: Ranks) -> RanksOfTerm:
        """Take the arrays as they are."""
        tensors = {
            name: torch.from_numpy(getattr(ranks, name)) for name in ("rows", "offsets", "probs", "least", "most")
        }
        unranked = None if ranks.unranked is None else torch.from_numpy(ranks.unranked)
        return cls(**tensors, unranked=unranked, weight=ranks.weight)

    def to(self, device: torch.device) -> RanksOfTerm:
        """Return the same on a device."""
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in ("probs", "least", "most")}
        unranked = None if self.unranked is None else self.unranked.to(device, non_blocking=True)
        return dataclasses.replace(self, **moved, unranked=unranked)

    def part(self, items: slice, base: int, logits: Tensor) -> PartOfRanks:
        """Find the largest logits of some items.

        Args:
            items: which.
            base: the row of the logits that comes first in the chunk.
            logits: [n, V], of the chunk.
        """
        device, dtype = logits.device, logits.dtype
        offsets = self.offsets[items.start : items.stop + 1]
        rows = self.rows[items].long() - base
        counts = torch.diff(offsets)
        mask = None
        if self.unranked is not None:
            mask = torch.ones(logits.shape[1], dtype=dtype, device=device)
            mask[self.unranked[self.unranked < len(mask)].long()] = 0
        tokens = _largest(logits, rows, offsets - offsets[0], mask).to(device)
        held = (tokens >= 0).nonzero()[:, 0]
        of_ranks = torch.arange(len(rows)).repeat_interleave(counts).to(device)
        rows = rows.to(device)
        places = rows[of_ranks[held]] * logits.shape[1] + tokens[held]
        return PartOfRanks(
            rows=rows,
            probs=self.probs[int(offsets[0]) : int(offsets[-1])].to(dtype),
            least=self.least[items].to(dtype),
            most=self.most[items].to(dtype),
            of_ranks=of_ranks,
            held=held,
            held_rows=rows[of_ranks[held]],
            places=places,
            logits=logits.view(-1).take(places),
            mask=mask,
            weight=self.weight,
        )


@dataclass
class PartOfRanks:
    """The ranks of the items of one chunk.

    Attributes:
        rows: [items], of the chunk.
        probs: [ranks], the teacher's.
        least, most: [items], what the teacher has behind the last rank.
        of_ranks: [ranks], the item of each.
        held: [H], the ranks that the student has a token for.
        held_rows: [H], of the chunk.
        places: [H], flat indices of these tokens into the chunk's logits.
        logits: [H], of these tokens.
        mask: [V], 1 for tokens that take part, 0 for others; None: all do.
        weight: of the sum of differences.
    """

    rows: Tensor
    probs: Tensor
    least: Tensor
    most: Tensor
    of_ranks: Tensor
    held: Tensor
    held_rows: Tensor
    places: Tensor
    logits: Tensor
    mask: Tensor | None
    weight: float

    def masses(self, exponentials: Tensor, normaliser: Tensor) -> Tensor:
        """Return [items], the probability of all tokens that take part."""
        if self.mask is None:
            return normaliser.new_ones(len(self.rows))
        return (exponentials.mv(self.mask) / normaliser)[self.rows]

    def distance(self, log_probs: Tensor, masses: Tensor, before: Tensor | None) -> Tensor:
        """Return the weighted sum over items of the differences between ranks, and between what is behind the last.

        Args:
            log_probs: [H], the student's largest.
            masses: [items], of all tokens that take part.
            before: [items], log-probabilities that multiply a row; None: nothing does.
        """
        probs = log_probs.exp()
        if before is not None:
            factors = before.exp().to(probs.dtype)
            probs, masses = probs * factors[self.of_ranks[self.held]], masses * factors
        ours = torch.zeros_like(self.probs).index_copy(0, self.held, probs)
        rests = (masses - torch.zeros_like(masses).index_add(0, self.of_ranks, ours)).clamp_min(0)
        outside = (rests - self.most).relu() + (self.least - rests).relu()
        return self.weight * ((self.probs - ours).abs().sum() + outside.sum())


def scale(exponentials: Tensor, factors: Tensor, bands: list[tuple[Tensor, Tensor]]) -> None:
    """Multiply [n, V], in place, by factors [n] and those of each band [n], added for the tokens of its mask [V]."""
    if not bands:
        exponentials.mul_(factors[:, None])
        return
    for start in range(0, len(exponentials), BLOCK):
        rows = slice(start, start + BLOCK)
        block = exponentials[rows]
        of_tokens = factors[rows, None].expand_as(block).clone()
        for of_band, mask in bands:
            of_tokens.addr_(of_band[rows], mask)
        block.mul_(of_tokens)


def _largest(logits: Tensor, rows: Tensor, offsets: Tensor, mask: Tensor | None) -> Tensor:
    """Return int64 [ranks], the tokens of the largest logits of some rows, falling; -1 where there are no more.

    Args:
        logits: [n, V].
        rows: [items], on the CPU.
        offsets: [items + 1], how many of each, on the CPU, from 0.
        mask: [V], 0 for tokens that take no part.
    """
    if logits.device.type == "cpu":
        ranked = torch.ones(logits.shape[1], dtype=torch.bool) if mask is None else mask > 0
        tokens = rank_kernels.largest(logits.numpy(), rows.numpy(), offsets.numpy(), ranked.numpy())
        return torch.from_numpy(tokens)
    return largest_by_topk(logits, rows, torch.diff(offsets), mask)


def largest_by_topk(logits: Tensor, rows: Tensor, counts: Tensor, mask: Tensor | None) -> Tensor:
    """Return int64 [ranks], the tokens of the largest logits of some rows, falling; -1 where there are no more.

    What `rank_kernels.largest` does on a CPU, a few rows at a time.

    Args:
        logits: [n, V].
        rows: [items], on the CPU.
        counts: [items], how many of each, on the CPU.
        mask: [V], 0 for tokens that take no part; None: all do.
    """
    device = logits.device
    found = [torch.zeros(0, dtype=torch.int64, device=device)]
    for start in range(0, len(rows), BLOCK):
        block = logits[rows[start : start + BLOCK].to(device)]
        if mask is not None:
            block = block.masked_fill_(mask == 0, -torch.inf)
        wanted = counts[start : start + BLOCK].to(device)
        most = int(wanted.max())
        values, tokens = block.topk(min(most, block.shape[1]), dim=1)
        tokens = tokens.masked_fill(values == -torch.inf, -1)
        tokens = torch.nn.functional.pad(tokens, (0, most - tokens.shape[1]), value=-1)
        found.append(tokens[torch.arange(most, device=device) < wanted[:, None]])
    return torch.cat(found)
