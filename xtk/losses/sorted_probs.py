"""Probabilities by rank: the student's largest of a row against the teacher's, one after the other."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from xtk.losses import sorted_prob_kernels
from xtk.losses.loss_cells import SortedProbs

# Rows at a time, where a row is looked at through a mask: the copy is a part of the chunk.
BLOCK_ROWS = 32


@dataclass(frozen=True)
class TermSortedProbs:
    """`Ranks` of one term: their structure on the CPU, their numbers on a device."""

    rows: Tensor
    offsets: Tensor
    probs: Tensor
    min_remainder: Tensor
    max_remainder: Tensor
    excluded_tokens: Tensor | None
    weight: float

    @classmethod
    def from_sorted_probs(cls, ranks: SortedProbs) -> TermSortedProbs:
        """Take the arrays as they are."""
        tensors = {
            name: torch.from_numpy(getattr(ranks, name))
            for name in ("rows", "offsets", "probs", "min_remainder", "max_remainder")
        }
        unranked = None if ranks.excluded_tokens is None else torch.from_numpy(ranks.excluded_tokens)
        return cls(**tensors, excluded_tokens=unranked, weight=ranks.weight)

    def to(self, device: torch.device) -> TermSortedProbs:
        """Return the same on a device."""
        moved = {
            name: getattr(self, name).to(device, non_blocking=True)
            for name in ("probs", "min_remainder", "max_remainder")
        }
        unranked = None if self.excluded_tokens is None else self.excluded_tokens.to(device, non_blocking=True)
        return dataclasses.replace(self, **moved, excluded_tokens=unranked)

    def select(self, items: slice, first_row: int) -> TermSortedProbs:
        """Return those of some items, for states whose first row is `base`."""
        offsets = self.offsets[items.start : items.stop + 1]
        return dataclasses.replace(
            self,
            rows=self.rows[items] - first_row,
            offsets=offsets - offsets[0],
            probs=self.probs[int(offsets[0]) : int(offsets[-1])],
            min_remainder=self.min_remainder[items],
            max_remainder=self.max_remainder[items],
        )

    def for_chunk(self, items: slice, first_row: int, dtype: torch.dtype) -> ChunkSortedProbs:
        """Cut out some items.

        Args:
            items: which.
            first_row: the row of the logits that comes first in the chunk.
            dtype: what the loss is computed in.
        """
        some, device = self.select(items, first_row), self.probs.device
        counts = torch.diff(some.offsets)
        return ChunkSortedProbs(
            rows=some.rows.long(),
            counts=counts,
            probs=some.probs.to(dtype),
            min_remainder=some.min_remainder.to(dtype),
            max_remainder=some.max_remainder.to(dtype),
            rank_items=torch.arange(len(counts)).repeat_interleave(counts).to(device),
            excluded_tokens=self.excluded_tokens,
            weight=self.weight,
        )


@dataclass(frozen=True)
class ChunkSortedProbs:
    """The ranks of the items of one chunk.

    Attributes:
        rows: [items], of the chunk, on the CPU.
        counts: [items], how many ranks each has, on the CPU.
        probs: [ranks], the teacher's.
        min_remainder, max_remainder: [items], what the teacher has behind the last rank.
        rank_items: [ranks], the item of each.
        excluded_tokens: the tokens that take no part; None: all do.
        weight: of the sum of differences.
    """

    rows: Tensor
    counts: Tensor
    probs: Tensor
    min_remainder: Tensor
    max_remainder: Tensor
    rank_items: Tensor
    excluded_tokens: Tensor | None
    weight: float

    def included_mask(self, start: int, width: int, dtype: torch.dtype) -> Tensor | None:
        """Return [width], 1 for the tokens from `start` on that take part, 0 for others; None: all do."""
        if self.excluded_tokens is None:
            return None
        outside = self.excluded_tokens.long() - start
        mask = torch.ones(width, dtype=dtype, device=self.probs.device)
        mask[outside[(outside >= 0) & (outside < width)]] = 0
        return mask

    def find_largest(self, logits: Tensor, first: int, start: int) -> LargestLogits:
        """Find the largest of some logits [n, width], of rows from `first` and tokens from `start` on."""
        here = ((self.rows >= first) & (self.rows < first + len(logits))).nonzero()[:, 0]
        counts = self.counts[here]
        mask = self.included_mask(start, logits.shape[1], logits.dtype)
        found = _largest_tokens(logits, self.rows[here] - first, counts, mask).to(logits.device)
        tokens = torch.full((len(self.rank_items),), -1, dtype=torch.int64, device=logits.device)
        said = torch.full(tokens.shape, -torch.inf, dtype=logits.dtype, device=logits.device)
        wanted = torch.zeros(len(self.rows), dtype=torch.bool)
        wanted[here] = True
        ranks = wanted.to(logits.device)[self.rank_items].nonzero()[:, 0][found >= 0]
        found = found[found >= 0]
        tokens[ranks] = found + start
        rows = (self.rows - first).to(logits.device)[self.rank_items[ranks]]
        said[ranks] = logits.view(-1).take(rows * logits.shape[1] + found)
        return LargestLogits(tokens, said)

    def included_sums(self, exponentials: Tensor, first: int, start: int) -> Tensor:
        """Return [items], the sums over the tokens that take part, of rows from `first` and tokens from `start` on."""
        rows = (self.rows - first).to(exponentials.device)
        here = (rows >= 0) & (rows < len(exponentials))
        mask = self.included_mask(start, exponentials.shape[1], exponentials.dtype)
        of_rows = exponentials.sum(1) if mask is None else exponentials.mv(mask)
        return torch.where(here, of_rows[rows.clamp(0, len(exponentials) - 1)], of_rows.new_zeros(()))

    def merge_largest(self, several: list[LargestLogits]) -> LargestLogits:
        """Return the largest of all, of what was found among different tokens of the same rows."""
        tokens, said = torch.cat([one.tokens for one in several]), torch.cat([one.logits for one in several])
        owners = self.rank_items.repeat(len(several))
        order = said.argsort(descending=True, stable=True)
        order = order[owners[order].argsort(stable=True)]
        counts = self.counts.to(tokens.device)
        begins = (counts.cumsum(0) - counts)[self.rank_items]
        within = torch.arange(len(self.rank_items), device=tokens.device) - begins
        chosen = order[begins * len(several) + within]
        return LargestLogits(tokens[chosen], said[chosen])

    def rank_distances(
        self, ranks_with_token: Tensor, log_probs: Tensor, masses: Tensor, prefix_logprobs: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return what each rank adds [ranks], and what is behind the last rank of each item [items].

        Args:
            ranks_with_token: [H], the ranks that the student has a token for.
            log_probs: [H], the student's largest.
            masses: [items], of all tokens that take part.
            prefix_logprobs: [items], log-probabilities that multiply a row; None: nothing does.
        """
        probs = log_probs.exp()
        if prefix_logprobs is not None:
            factors = prefix_logprobs.exp().to(probs.dtype)
            probs, masses = probs * factors[self.rank_items[ranks_with_token]], masses * factors
        ours = torch.zeros_like(self.probs).index_copy(0, ranks_with_token, probs)
        rests = (masses - torch.zeros_like(masses).index_add(0, self.rank_items, ours)).clamp_min(0)
        outside = (rests - self.max_remainder).relu() + (self.min_remainder - rests).relu()
        return self.weight * (self.probs - ours).abs(), self.weight * outside


@dataclass(frozen=True)
class LargestLogits:
    """The student's largest logits of each item, falling.

    Attributes:
        tokens: int64 [ranks]; -1 where there are no more.
        logits: [ranks]; -inf there.
    """

    tokens: Tensor
    logits: Tensor


def scale_rows(exponentials: Tensor, factors: Tensor, bands: list[tuple[Tensor, Tensor]]) -> None:
    """Multiply [n, V], in place, by factors [n] and those of each band [n], added for the tokens of its mask [V]."""
    if not bands:
        exponentials.mul_(factors[:, None])
        return
    for start in range(0, len(exponentials), BLOCK_ROWS):
        rows = slice(start, start + BLOCK_ROWS)
        block = exponentials[rows]
        of_tokens = factors[rows, None].expand_as(block).clone()
        for of_band, mask in bands:
            of_tokens.addr_(of_band[rows], mask)
        block.mul_(of_tokens)


def _largest_tokens(logits: Tensor, rows: Tensor, counts: Tensor, mask: Tensor | None) -> Tensor:
    """Return int64 [ranks], the tokens of the largest logits of some rows, falling; -1 where there are no more.

    Args:
        logits: [n, V].
        rows: [items], on the CPU.
        counts: [items], how many of each, on the CPU.
        mask: [V], 0 for tokens that take no part.
    """
    if logits.device.type == "cpu":
        ranked = torch.ones(logits.shape[1], dtype=torch.bool) if mask is None else mask > 0
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        tokens = sorted_prob_kernels.largest_columns(logits.numpy(), rows.numpy(), offsets.numpy(), ranked.numpy())
        return torch.from_numpy(tokens)
    return largest_by_topk(logits, rows, counts, mask)


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
    for start in range(0, len(rows), BLOCK_ROWS):
        block = logits[rows[start : start + BLOCK_ROWS].to(device)]
        if mask is not None:
            block = block.masked_fill_(mask == 0, -torch.inf)
        wanted = counts[start : start + BLOCK_ROWS].to(device)
        most = int(wanted.max())
        values, tokens = block.topk(min(most, block.shape[1]), dim=1)
        tokens = tokens.masked_fill(values == -torch.inf, -1)
        tokens = torch.nn.functional.pad(tokens, (0, most - tokens.shape[1]), value=-1)
        found.append(tokens[torch.arange(most, device=device) < wanted[:, None]])
    return torch.cat(found)
