"""Attention within the documents of packed sequences, with context parallelism.

A packed sequence [1, T] contains several documents without padding. No token may attend to other documents. A mask
[T, T] would cost T x T; here attention is computed per document, which costs the sum of squared lengths. With context
parallelism each process has two blocks of the sequence, one from its front and one from its back (zigzag: this balances
the work, since late tokens attend to more tokens). Keys and values are gathered from all processes; queries are not.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from xtk.errors import XtkError
from xtk.parallel.host_to_device import to_device

ATTENTION_NAME = "xtk"
# For models that others use too: with padding, and without an argument that states the documents.
GENERAL_ATTENTION_NAME = "xtk_general"
# Arguments that this attention can ignore. Models that pass others (soft caps, sinks, biases) keep their attention.
_IGNORED_ARGUMENTS = frozenset(
    {
        "position_ids",
        "use_cache",
        "output_attentions",
        "output_router_logits",
        "is_causal",
        "cache_position",
        "layer_idx",
    }
)


@dataclass(frozen=True)
class PackedSequence:
    """A sequence of concatenated documents, and this process's part of it."""

    lengths: tuple[int, ...]  # lengths of the documents, in order; they sum to the sequence length
    group: Any = None  # a torch.distributed process group that shares the sequence; None: this process has all of it
    num_ranks: int = 1  # size of the group; the sequence length is a multiple of `2 * num_ranks`
    rank: int = 0  # this process's rank
    _segments: list[tuple[int, int, int, int]] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def num_tokens(self) -> int:
        """Sequence length, T."""
        return sum(self.lengths)

    def token_indices(self, rank: int) -> NDArray[np.int64]:
        """Return the token indices that a process has, in its order."""
        if self.num_ranks == 1:
            return np.arange(self.num_tokens)
        blocks = np.arange(self.num_tokens).reshape(2 * self.num_ranks, -1)
        return np.concatenate([blocks[rank], blocks[2 * self.num_ranks - 1 - rank]])

    def position_ids(self) -> NDArray[np.int64]:
        """Return the position of each token in its document, [T]."""
        return np.concatenate([np.arange(length) for length in self.lengths])

    def attention_segments(self) -> list[tuple[int, int, int, int]]:
        """Return (first, past, start, stop) tuples: local tokens [first, past) attend to tokens [start, stop).

        The last local token attends to all of them, the one before it to one less, and so on.
        """
        if not self._segments:
            edges = np.cumsum([0, *self.lengths])
            chunk = self.num_tokens // (2 * self.num_ranks) if self.num_ranks > 1 else self.num_tokens
            blocks = [0] if self.num_ranks == 1 else [self.rank, 2 * self.num_ranks - 1 - self.rank]
            for number, begin in enumerate(block * chunk for block in blocks):
                inside = edges[(edges > begin) & (edges < begin + chunk)]
                for low, high in itertools.pairwise([begin, *inside.tolist(), begin + chunk]):
                    start = int(edges[np.searchsorted(edges, low, side="right") - 1])
                    first = number * chunk + low - begin
                    self._segments.append((first, first + high - low, start, high))
        return self._segments


class UnsupportedAttention(XtkError):
    """A layer needs a mask or another feature that this attention does not support."""


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
    """Return causal attention within documents; transformers calls it for the attention implementation `xtk`.

    Args:
        query: [1, heads, T, D], this process's tokens; without `packed` [B, heads, T, D], one document per row.
        key, value: [1, key-value heads, T, D].
        attention_mask: None; transformers builds no mask for custom attention.
        sliding_window: number of tokens, including itself, to which a token attends; None: all of its document.
        packed: the documents; None: one document per row, padded on the right.

    Returns:
        [B, T, heads, D], and None.
    """
    more = sorted(name for name, wanted in kwargs.items() if wanted is not None and name not in _IGNORED_ARGUMENTS)
    if attention_mask is not None or more or not getattr(module, "is_causal", True):
        raise UnsupportedAttention(
            "packed sequences are not supported: the model's attention needs more than a causal mask "
            f"({', '.join(more) or 'its own mask'})",
            hint="use --no-packing",
        )
    groups = query.shape[1] // key.shape[1]
    if packed is not None and packed.num_ranks > 1:
        key, value = _gather_keys_values(torch.stack([key, value]), packed)
    if groups > 1:
        key, value = (some.repeat_interleave(groups, dim=1) for some in (key, value))
    if packed is None:
        return _attend_segment(query, key, value, dropout, scaling, sliding_window).transpose(1, 2).contiguous(), None
    parts = _segments_of(query, key, value, packed)
    outputs = [_attend_segment(*part, dropout, scaling, sliding_window) for part in parts]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _segments_of(
    query: Tensor, key: Tensor, value: Tensor, packed: PackedSequence
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Return queries, keys and values of each segment.

    The gradient of a split is one concatenation; that of a slice is a whole tensor, for each segment.
    """
    segments = packed.attention_segments()
    queries = torch.split(query, [past - first for first, past, _, _ in segments], dim=2)
    keys, values = (_split_ranges(some, [(start, stop) for *_, start, stop in segments]) for some in (key, value))
    return zip(queries, keys, values, strict=True)


def _split_ranges(some: Tensor, ranges: list[tuple[int, int]]) -> list[Tensor]:
    """Return ranges of dimension 2; those that follow each other are splits of one slice."""
    breaks = [at for at in range(1, len(ranges)) if ranges[at][0] != ranges[at - 1][1]]
    parts: list[Tensor] = []
    for first, last in itertools.pairwise([0, *breaks, len(ranges)]):
        together = ranges[first:last]
        start, stop = together[0][0], together[-1][1]
        whole = some if (start, stop) == (0, some.shape[2]) else some[:, :, start:stop]
        parts += torch.split(whole, [high - low for low, high in together], dim=2)
    return parts


def _attend_segment(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, scaling: float | None, window: int | None
) -> Tensor:
    """Return causal attention where the last query attends to all keys, and each one before it to one less."""
    queries, keys = query.shape[2], key.shape[2]
    if window is not None and keys <= window:
        window = None
    if queries == keys and window is None:
        return functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, scale=scaling, is_causal=queries > 1
        )
    query_positions = torch.arange(keys - queries, keys, device=query.device)[:, None]
    key_positions = torch.arange(keys, device=query.device)
    mask = key_positions <= query_positions
    if window is not None:
        mask &= key_positions > query_positions - window
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)


def _gather_keys_values(local: Tensor, row: PackedSequence) -> Tensor:
    """Return keys and values of the full sequence, [2, 1, heads, T, D], gathered from all processes."""
    gathered: Tensor = _AllGatherSequence.apply(local, row)  # type: ignore[no-untyped-call]
    order = np.concatenate([row.token_indices(rank) for rank in range(row.num_ranks)])
    back = to_device(torch.from_numpy(np.argsort(order)), local.device)
    return gathered.index_select(3, back)


class _AllGatherSequence(torch.autograd.Function):
    """All-gather of a sequence's parts by rank; the backward pass sums the gradients of all processes."""

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


def general_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Return attention within the documents of a packed sequence, or by a mask; arguments as for `packed_attention`.

    Without `packed`, the documents are those of `position_ids`: one begins at each 0.
    """
    if attention_mask is not None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        options.pop("packed", None)
        attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
        by_mask: tuple[Tensor, None] = attend(module, query, key, value, attention_mask, **options)
        return by_mask
    positions = options.get("position_ids")
    is_whole = query.shape[0] == 1 and query.shape[2] == key.shape[2]  # no key-value cache
    if options.get("packed") is None and is_whole and positions is not None and positions.shape == (1, query.shape[2]):
        options["packed"] = _documents_of_positions(positions)
    return packed_attention(module, query, key, value, None, **options)


_last_documents: list[tuple[Any, PackedSequence]] = []  # all layers of a forward pass get the same tensor


def _documents_of_positions(position_ids: Tensor) -> PackedSequence:
    if not _last_documents or _last_documents[0][0]() is not position_ids:
        begins = [0, *(position_ids[0, 1:] == 0).nonzero().flatten().add(1).tolist(), position_ids.shape[1]]
        packed = PackedSequence(tuple(stop - start for start, stop in itertools.pairwise(begins)))
        _last_documents[:] = [(weakref.ref(position_ids), packed)]
    return _last_documents[0][1]


def _general_mask(
    *sizes: Any, q_length: int, kv_length: int, q_offset: Any = 0, attention_mask: Tensor | None = None, **options: Any
) -> Tensor | None:
    """Return None if the last token attends to all keys, and each one before it to one less; else a mask."""
    from transformers.masking_utils import sdpa_mask

    if attention_mask is None and isinstance(q_offset, int) and q_offset + q_length == kv_length:
        return None
    mask: Tensor | None = sdpa_mask(
        *sizes, q_length=q_length, kv_length=kv_length, q_offset=q_offset, attention_mask=attention_mask, **options
    )
    return mask


def register_attention() -> None:
    """Register both attentions in transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, packed_attention)
    AttentionInterface.register(GENERAL_ATTENTION_NAME, general_attention)
    AttentionMaskInterface.register(GENERAL_ATTENTION_NAME, _general_mask)
