"""Attention within the documents of packed sequences, with context parallelism.

A packed sequence [1, T] contains several documents without padding. No token may attend to other documents. A mask
[T, T] would cost T x T; here attention is computed per document, which costs the sum of squared lengths: by one call of
torch's `varlen_attn` per layer where the device has it, else by one call per document. With context parallelism each
process has two blocks of the sequence, one from its front and one from its back (zigzag: this balances the work, since
late tokens attend to more tokens). Keys and values are gathered from all processes; queries are not.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

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
_IGNORED_ARGUMENTS = {"position_ids", "use_cache", "output_attentions", "output_router_logits", "is_causal",
                      "cache_position", "layer_idx"}  # fmt: skip
_VARLEN_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class PackedSequence:
    """A sequence of concatenated documents, and this process's part of it."""

    lengths: tuple[int, ...]  # lengths of the documents, in order; they sum to the sequence length
    group: Any = None  # a torch.distributed process group that shares the sequence; None: this process has all of it
    num_ranks: int = 1  # size of the group; the sequence length is a multiple of `2 * num_ranks`
    rank: int = 0  # this process's rank
    _segments: list[tuple[int, int, int, int]] = field(default_factory=list, init=False, repr=False, compare=False)
    # By device: `varlen_attn` with the documents, and indices of their keys in the gathered sequence.
    varlen_calls: dict[torch.device, tuple[Callable[..., Tensor], Tensor] | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

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

    def gathered_indices(self) -> NDArray[np.int64]:
        """Return the index of each token, [T], in the parts of all processes, one after the other."""
        return np.argsort(np.concatenate([self.token_indices(rank) for rank in range(self.num_ranks)]))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def prepare(self, device: torch.device) -> None:
        """Copy the arguments of `varlen_attn` to a device, once for all layers; the host does not wait."""
        if device in self.varlen_calls:
            return
        self.varlen_calls[device] = None
        if has_varlen_attention(device):
            from torch.nn.attention.varlen import varlen_attn

            first, past, start, stop = np.array(self.attention_segments()).T
            queries, keys, gathered = past - first, stop - start, self.gathered_indices()
            arrays = [np.cumsum([0, *lengths], dtype=np.int32) for lengths in (queries, keys)]
            arrays.append(np.concatenate([gathered[low:high] for low, high in zip(start, stop, strict=True)]))
            of_queries, of_keys, indices = (to_device(torch.from_numpy(array), device) for array in arrays)
            options: dict[str, Any] = {"max_q": int(queries.max()), "max_k": int(keys.max())}
            if torch.__version__ >= "2.12":  # 2.11 accepts grouped heads without it
                options["enable_gqa"] = True
            call = functools.partial(varlen_attn, cu_seq_q=of_queries, cu_seq_k=of_keys, **options)
            self.varlen_calls[device] = cast("Callable[..., Tensor]", call), indices


def has_varlen_attention(device: torch.device) -> bool:
    """Return whether torch and a device have `varlen_attn` with windows, which is FlashAttention 2.

    Its last query of a segment attends to all keys of the segment, each query before it to one key less.
    """
    is_cuda = device.type == "cuda" and torch.version.cuda is not None and torch.__version__ >= "2.11"
    return is_cuda and torch.cuda.get_device_capability(device) >= (8, 0)


def _varlen_dtype(query: Tensor, value: Tensor, dropout: float) -> torch.dtype | None:
    """Return the dtype in which `varlen_attn` computes a layer; None if it does not support the layer."""
    kind, size = query.device.type, query.shape[-1]
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    # Not all devices have kernels for heads of 200 to 248.
    is_supported = size % 8 == 0 and (size <= 192 or size == 256) and value.shape[-1] <= size
    return dtype if is_supported and dtype in _VARLEN_DTYPES and dropout == 0 else None


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
    if packed is None:
        key, value = _repeat_groups(query, key, value)
        return _attend_segment(query, key, value, dropout, scaling, sliding_window).transpose(1, 2).contiguous(), None
    if query.device not in packed.varlen_calls:
        packed.prepare(query.device)
    varlen = packed.varlen_calls[query.device]
    dtype = None if varlen is None else _varlen_dtype(query, value, dropout)
    if varlen is None or dtype is None:
        return _attend_by_document(query, key, value, dropout, scaling, sliding_window, packed), None
    query, key, value = (some.to(dtype) for some in (query, key, value))
    if packed.num_ranks > 1:
        key, value = _gather_keys_values(key, value, packed, varlen[1])
    size = value.shape[-1]
    if size < query.shape[-1]:  # values have the size of keys
        value = functional.pad(value, (0, query.shape[-1] - size))
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    per_token = (some[0].transpose(0, 1) for some in (query, key, value))
    output = varlen[0](*per_token, scale=scaling, window_size=window)
    return output[None, ..., :size].contiguous(), None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend_by_document(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
    packed: PackedSequence,
) -> Tensor:
    """Return attention [B, T, heads, D], by a call per document: torch.compile would compile each number of them."""
    if packed.num_ranks > 1:
        indices = to_device(torch.from_numpy(packed.gathered_indices()), query.device)
        key, value = _gather_keys_values(key, value, packed, indices)
    key, value = _repeat_groups(query, key, value)
    parts = _segments_of(query, key, value, packed)
    outputs = [_attend_segment(*part, dropout, scaling, sliding_window) for part in parts]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()


def _repeat_groups(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values with as many heads as the queries."""
    groups = query.shape[1] // key.shape[1]
    return (key, value) if groups == 1 else (key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1))


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


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _gather_keys_values(key: Tensor, value: Tensor, packed: PackedSequence, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values at indices of the parts of all processes, one after the other."""
    together: Tensor = _AllGatherSequence.apply(torch.cat([key, value], dim=3), packed)  # type: ignore[no-untyped-call]
    keys, values = torch.split(together, [key.shape[3], value.shape[3]], dim=3)
    return keys.index_select(2, indices), values.index_select(2, indices)


class _AllGatherSequence(torch.autograd.Function):
    """All-gather of a sequence's parts by rank; the backward pass sums the gradients of all processes."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, row: PackedSequence) -> Tensor:
        ctx.row = row
        parts = [torch.empty_like(local) for _ in range(row.num_ranks)]
        torch.distributed.all_gather(parts, local.contiguous(), group=row.group)
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, None]:
        (gradient,) = outputs
        row: PackedSequence = ctx.row
        given = torch.stack(gradient.chunk(row.num_ranks, dim=2)).contiguous()
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


@torch.compiler.disable  # type: ignore[untyped-decorator]
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
