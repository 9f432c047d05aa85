"""The kernels of torch's `varlen_attn` in plain operations for the CPU, for which torch has none."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from xtk.models import packed_attention

Segment = tuple[slice, slice, Tensor]


class FlashAttention:
    """The two kernels, as documented for FlashAttention 2, with records of their calls.

    Of a segment with m queries and n keys, query i attends to keys up to i + n - m, and to `left` keys before that one.
    """

    def __init__(self) -> None:
        self.forward_calls: list[dict[str, Any]] = []
        self.backward_calls = 0

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_offsets: Tensor,
        key_offsets: Tensor,
        max_queries: int,
        max_keys: int,
        dropout: float,
        is_causal: bool,
        return_debug_mask: bool,
        **options: Any,
    ) -> tuple[Tensor, ...]:
        """Return outputs [T, heads, D], logarithms of the sums of exponentials [heads, T], and three unused tensors."""
        assert dropout == 0
        assert is_causal == (options["window_size_left"] == -1)
        assert query.shape[-1] == key.shape[-1] == value.shape[-1]
        assert query.shape[-1] % 8 == 0
        segments = _segments(query_offsets, key_offsets, max_queries, max_keys, options)
        self.forward_calls.append({"segments": len(segments), "key_heads": key.shape[1], "dtype": query.dtype})
        output, sums = torch.zeros_like(query), query.new_zeros(query.shape[1], len(query))
        key, value = _repeated(key, query), _repeated(value, query)
        for rows, columns, mask in segments:
            scores = _scores(query[rows], key[columns], mask, options)
            sums[:, rows] = scores.logsumexp(-1)
            output[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value[columns])
        unused = torch.zeros(2, dtype=torch.uint64)
        return output, sums, unused, unused.clone(), unused.clone()

    def backward(
        self,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        sums: Tensor,
        query_offsets: Tensor,
        key_offsets: Tensor,
        max_queries: int,
        max_keys: int,
        dropout: float,
        is_causal: bool,
        state: Tensor,
        unused: Tensor,
        **options: Any,
    ) -> tuple[Tensor, ...]:
        """Return the gradients of queries, keys and values."""
        self.backward_calls += 1
        keys, values = _repeated(key, query), _repeated(value, query)
        gradients = [torch.zeros_like(some) for some in (query, keys, values)]
        for rows, columns, mask in _segments(query_offsets, key_offsets, max_queries, max_keys, options):
            weights = (_scores(query[rows], keys[columns], mask, options) - sums[:, rows, None]).exp()
            upstream = torch.einsum("qhd,khd->hqk", gradient[rows], values[columns])
            mean = (gradient[rows] * output[rows]).sum(-1).T[..., None]
            inner = options["scale"] * weights * (upstream - mean)
            gradients[0][rows] += torch.einsum("hqk,khd->qhd", inner, keys[columns])
            gradients[1][columns] += torch.einsum("hqk,qhd->khd", inner, query[rows])
            gradients[2][columns] += torch.einsum("hqk,qhd->khd", weights, gradient[rows])
        shape = (len(key), key.shape[1], -1, key.shape[2])
        return gradients[0], gradients[1].reshape(shape).sum(2), gradients[2].reshape(shape).sum(2)


def _repeated(some: Tensor, query: Tensor) -> Tensor:
    return some.repeat_interleave(query.shape[1] // some.shape[1], 1)


def _scores(query: Tensor, key: Tensor, mask: Tensor, options: dict[str, Any]) -> Tensor:
    return (options["scale"] * torch.einsum("qhd,khd->hqk", query, key)).masked_fill(~mask, -torch.inf)


def _segments(
    query_offsets: Tensor, key_offsets: Tensor, max_queries: int, max_keys: int, options: dict[str, Any]
) -> list[Segment]:
    assert query_offsets.dtype == key_offsets.dtype == torch.int32
    assert (max_queries, max_keys) == (query_offsets.diff().max(), key_offsets.diff().max())
    assert options["window_size_right"] == 0
    left, segments = options["window_size_left"], []
    rows, columns = (itertools.pairwise(offsets.tolist()) for offsets in (query_offsets, key_offsets))
    for (first, past), (start, stop) in zip(rows, columns, strict=True):
        last = torch.arange(stop - start - (past - first), stop - start)[:, None]
        numbers = torch.arange(stop - start)
        mask = (numbers <= last) & ((numbers >= last - left) if left >= 0 else True)
        segments.append((slice(first, past), slice(start, stop), mask))
    return segments


@contextmanager
def flash_attention_on_cpu() -> Iterator[FlashAttention]:
    """Register the kernels for the CPU, on which xtk then uses `varlen_attn`, also in float32."""
    kernels = FlashAttention()
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", kernels.forward, "CPU")
    library.impl("_flash_attention_backward", kernels.backward, "CPU")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_attention, "has_varlen_attention", lambda device: True)
        patch.setattr(packed_attention, "_VARLEN_DTYPES", (torch.float32, torch.bfloat16))
        yield kernels
    library._destroy()
