"""The largest logits of rows, in descending order, out of all tokens or some."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from xtk.losses.kernels import chunked_softmax_numba
from xtk.parallel.host_to_device import to_device
from xtk.projection.vocabulary_array import VocabularyArray

# Rows at a time where a mask is applied, so that the copy is small compared to the chunk.
BLOCK_ROWS = 32


@dataclass(frozen=True)
class LargestLogits:
    """The student's largest logits of each item, in descending order."""

    tokens: Tensor  # int64 [ranks]; -1 where there are no more
    logits: Tensor  # [ranks]; -inf where there are no more


@dataclass(frozen=True)
class LargestTokens:
    """Which of the largest tokens of some rows to find: the first few of each item, one per rank."""

    rows: Tensor  # int64 [items], rows within the chunk, on the CPU
    counts: Tensor  # [items], number of ranks of each, on the CPU
    rank_items: Tensor  # [ranks], the item of each rank
    excluded_tokens: VocabularyArray | None  # tokens that are not ranked; None: all are

    def included_mask(self, start: int, width: int, dtype: torch.dtype) -> Tensor | None:
        """Return [width], 1 for ranked tokens from token id `start` on, 0 for excluded ones; None: all are ranked."""
        if self.excluded_tokens is None:
            return None
        device, copies = self.rank_items.device, self.excluded_tokens.copies
        key = (device, dtype, start, width)
        if key not in copies:  # it is the same for all chunks
            columns = torch.from_numpy(self.excluded_tokens.values).long() - start
            mask = torch.ones(width, dtype=dtype)
            mask[columns[(columns >= 0) & (columns < width)]] = 0
            copies[key] = to_device(mask, device)
        kept: Tensor = copies[key]
        return kept

    def find(self, logits: Tensor, first: int, start: int) -> LargestLogits:
        """Return the largest logits of each item in a window [n, width] with first row `first`, first token `start`."""
        here = ((self.rows >= first) & (self.rows < first + len(logits))).nonzero()[:, 0]
        rows, counts, device = self.rows[here] - first, self.counts[here], logits.device
        mask = self.included_mask(start, logits.shape[1], logits.dtype)
        largest = _largest_tokens(logits, rows, counts, mask)
        entries = to_device(rows.repeat_interleave(counts), device) * logits.shape[1] + largest.clamp_min(0)
        values = logits.view(-1).take(entries).masked_fill_(largest < 0, -torch.inf)
        largest = torch.where(largest < 0, largest, largest + start)
        if len(here) == len(self.rows):
            return LargestLogits(largest, values)
        wanted = torch.zeros(len(self.rows), dtype=torch.bool)
        wanted[here] = True
        ranks = to_device(wanted.repeat_interleave(self.counts).nonzero()[:, 0], device)
        shape = (len(self.rank_items),)
        tokens = torch.full(shape, -1, dtype=torch.int64, device=device)
        largest_logits = torch.full(shape, -torch.inf, dtype=logits.dtype, device=device)
        return LargestLogits(tokens.index_copy_(0, ranks, largest), largest_logits.index_copy_(0, ranks, values))

    def included_sums(self, exponentials: Tensor, first: int, start: int) -> Tensor:
        """Return [items], sums of exponentials over ranked tokens in a window with first row `first`, token `start`."""
        rows = to_device(self.rows - first, exponentials.device)
        here = (rows >= 0) & (rows < len(exponentials))
        mask = self.included_mask(start, exponentials.shape[1], exponentials.dtype)
        if mask is None:
            of_rows = exponentials.sum(1)
        else:  # into a given tensor, since autocast computes other calls of mv in bf16 on a GPU
            of_rows = torch.mv(exponentials, mask, out=exponentials.new_empty(len(exponentials)))
        return torch.where(here, of_rows[rows.clamp(0, len(exponentials) - 1)], of_rows.new_zeros(()))

    def merge(self, several: list[LargestLogits]) -> LargestLogits:
        """Return the largest logits of each item, out of those found in different windows of the same rows."""
        tokens, largest_logits = (
            torch.cat([group.tokens for group in several]),
            torch.cat([group.logits for group in several]),
        )
        owners = self.rank_items.repeat(len(several))
        order = largest_logits.argsort(descending=True, stable=True)
        order = order[owners[order].argsort(stable=True)]
        counts = to_device(self.counts, tokens.device)
        begins = (counts.cumsum(0) - counts)[self.rank_items]
        within = torch.arange(len(self.rank_items), device=tokens.device) - begins
        chosen = order[begins * len(several) + within]
        return LargestLogits(tokens[chosen], largest_logits[chosen])


def scale_rows(exponentials: Tensor, factors: Tensor, bands: list[tuple[Tensor, Tensor]]) -> None:
    """Multiply [n, V], in place, by row factors [n] plus, for tokens in a band's mask [V], the band's factors [n]."""
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
    """Return int64 [ranks], the tokens of the largest logits of some rows, as `largest_by_topk`."""
    if logits.device.type == "cpu":
        ranked = torch.ones(logits.shape[1], dtype=torch.bool) if mask is None else mask > 0
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        tokens = chunked_softmax_numba.largest_columns(logits.numpy(), rows.numpy(), offsets.numpy(), ranked.numpy())
        return torch.from_numpy(tokens)
    return largest_by_topk(logits, rows, counts, mask)


def largest_by_topk(logits: Tensor, rows: Tensor, counts: Tensor, mask: Tensor | None) -> Tensor:
    """Return int64 [ranks], the tokens of the largest logits of some rows, descending; -1 where there are no more.

    The same as `chunked_softmax_numba.largest_columns`, for GPUs; it works on a few rows at a time, and only on rows
    with a count above 0. `rows` and `counts` are on the CPU; `mask`: [V], 0 for excluded tokens; None: none are.
    """
    device, is_ranked = logits.device, counts > 0
    rows, counts = rows[is_ranked], counts[is_ranked]
    parts = [torch.zeros(0, dtype=torch.int64, device=device)]
    for start in range(0, len(rows), BLOCK_ROWS):
        block = logits[to_device(rows[start : start + BLOCK_ROWS], device)]
        if mask is not None:
            block = block.masked_fill_(mask == 0, -torch.inf)
        wanted = counts[start : start + BLOCK_ROWS]
        most = int(wanted.max())
        values, tokens = block.topk(min(most, block.shape[1]), dim=1)
        tokens = tokens.masked_fill(values == -torch.inf, -1)
        tokens = torch.nn.functional.pad(tokens, (0, most - tokens.shape[1]), value=-1)
        ranks = (torch.arange(most) < wanted[:, None]).flatten().nonzero()[:, 0]
        parts.append(tokens.flatten()[to_device(ranks, device)])
    return torch.cat(parts)
