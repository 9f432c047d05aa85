"""Attention over documents that stand one behind the other in a row, and over rows that several processes share.

A packed row [1, T] holds documents without padding between them. No token may look into the document before its own. A
mask [T, T] would say so, at a price of T x T; here each document is attended to by itself, so that the price is the sum
of squares. With context parallelism each process has two stretches of the row, one from its front and one from its back
(zigzag: so all have as much to do, since a late token looks at more than an early one). Keys and values of all are
gathered; queries stay where they are.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from xtk.errors import XtkError

ATTENTION_NAME = "xtk"
# What this attention knows to do; a model that hands it more (soft caps, sinks, biases) keeps its own.
_IGNORED_ARGUMENTS = frozenset(
    {"position_ids", "use_cache", "output_attentions", "is_causal", "cache_position", "layer_idx"}
)


@dataclass(frozen=True)
class PackedSequence:
    """Documents that stand one behind the other, and which part of them this process has.

    Attributes:
        lengths: of the documents, in their order; they fill the row.
        group: torch's process group, whose ranks share the row; None: this process has all of it.
        num_ranks: how many share it; the row is a multiple of `2 * ranks` long.
        rank: which of them this process is.
        seen_windows: the windows with which layers looked at it, once they did.
    """

    lengths: tuple[int, ...]
    group: Any = None
    num_ranks: int = 1
    rank: int = 0
    seen_windows: set[int | None] = field(default_factory=set, init=False, repr=False, compare=False)
    _segments: list[tuple[int, int, int, int]] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def num_tokens(self) -> int:
        """T, the tokens of the whole row."""
        return sum(self.lengths)

    def token_indices(self, rank: int) -> NDArray[np.int64]:
        """Return which tokens of the row a process has, in its order."""
        if self.num_ranks == 1:
            return np.arange(self.num_tokens)
        pieces = np.arange(self.num_tokens).reshape(2 * self.num_ranks, -1)
        return np.concatenate([pieces[rank], pieces[2 * self.num_ranks - 1 - rank]])

    def position_ids(self) -> NDArray[np.int64]:
        """Return [T], the place of each token in its document."""
        return np.concatenate([np.arange(length) for length in self.lengths])

    def attention_segments(self) -> list[tuple[int, int, int, int]]:
        """Return (first, past, start, stop): tokens first to past of those held here look at start to stop of the row.

        The last of them looks at all of these, the one before it at one less, and so on.
        """
        if not self._segments:
            edges = np.cumsum([0, *self.lengths])
            chunk = self.num_tokens // (2 * self.num_ranks) if self.num_ranks > 1 else self.num_tokens
            begins = [0] if self.num_ranks == 1 else [self.rank * chunk, (2 * self.num_ranks - 1 - self.rank) * chunk]
            for number, begin in enumerate(begins):
                inside = edges[(edges > begin) & (edges < begin + chunk)]
                for low, high in itertools.pairwise([begin, *inside.tolist(), begin + chunk]):
                    start = int(edges[np.searchsorted(edges, low, side="right") - 1])
                    first = number * chunk + low - begin
                    self._segments.append((first, first + high - low, start, high))
        return self._segments


class UnsupportedAttention(XtkError):
    """A model asks for what this attention does not do."""


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packed: PackedSequence | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend within documents; what transformers calls when a model's attention is `NAME`.

    Args:
        module: the layer.
        query: [1, heads, T, D], of the tokens that are held here; without `row` [B, heads, T, D], whole documents.
        key: [1, key-value heads, T, D].
        value: [1, key-value heads, T, D].
        attention_mask: None, as transformers makes none for an attention that it does not know.
        dropout: of attention weights.
        scaling: of their logits.
        sliding_window: how many tokens back, with itself, a token looks; None: all of its document.
        packed: the documents; None: each has a row of its own, padded on the right.
        kwargs: what else the layer hands on.

    Returns:
        [B, T, heads, D], and None.

    Raises:
        NotThisAttention: the layer asks for more than this.
    """
    more = sorted(name for name, wanted in kwargs.items() if wanted is not None and name not in _IGNORED_ARGUMENTS)
    if attention_mask is not None or more or not getattr(module, "is_causal", True):
        raise UnsupportedAttention(
            f"this model's attention is more than causal attention ({', '.join(more) or 'a mask'})"
        )
    groups = query.shape[1] // key.shape[1]
    if packed is not None and packed.num_ranks > 1:
        key, value = _gather_keys_values(torch.stack([key, value]), packed)
    if groups > 1:
        key, value = (some.repeat_interleave(groups, dim=1) for some in (key, value))
    if packed is None:
        return _attend_segment(query, key, value, dropout, scaling, sliding_window).transpose(1, 2).contiguous(), None
    packed.seen_windows.add(sliding_window)
    found = [
        _attend_segment(query[:, :, first:past], key[:, :, start:stop], value[:, :, start:stop], dropout, scaling,
                sliding_window)
        for first, past, start, stop in packed.attention_segments()
    ]  # fmt: skip
    return torch.cat(found, dim=2).transpose(1, 2).contiguous(), None


def _attend_segment(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, scaling: float | None, window: int | None
) -> Tensor:
    """Attend where the last query looks at all keys, and each before it at one less."""
    queries, keys = query.shape[2], key.shape[2]
    if window is not None and keys <= window:
        window = None
    if queries == keys and window is None:
        return functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, scale=scaling, is_causal=queries > 1
        )
    own = torch.arange(keys - queries, keys, device=query.device)[:, None]
    theirs = torch.arange(keys, device=query.device)
    seen = theirs <= own if window is None else (theirs <= own) & (theirs > own - window)
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, dropout_p=dropout, scale=scaling)


def _gather_keys_values(local: Tensor, row: PackedSequence) -> Tensor:
    """Return [2, 1, heads, T, D] of the whole row, from what each process has of it."""
    everything: Tensor = _AllGatherSequence.apply(local, row)  # type: ignore[no-untyped-call]
    order = np.concatenate([row.token_indices(rank) for rank in range(row.num_ranks)])
    back = torch.from_numpy(np.argsort(order)).to(local.device)
    return everything.index_select(3, back)


class _AllGatherSequence(torch.autograd.Function):
    """All parts of a row, rank by rank; backwards the sum of what all processes say of one's own."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, row: PackedSequence) -> Tensor:
        ctx.row = row
        parts = [torch.empty_like(local) for _ in range(row.num_ranks)]
        torch.distributed.all_gather(parts, local.contiguous(), group=row.group)
        return torch.cat(parts, dim=3)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, None]:
        (gradient,) = outputs
        row: PackedSequence = ctx.row
        given = torch.stack(gradient.chunk(row.num_ranks, dim=3)).contiguous()
        received = torch.empty_like(given)
        torch.distributed.all_to_all_single(received, given, group=row.group)
        return received.sum(0), None


def register_attention() -> None:
    """Tell transformers of this attention."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, packed_attention)
