"""Triton kernels for passes over a chunk's logits, each of which is several passes over memory in PyTorch.

They are used with XTK_TRITON=1 only: Triton's interpreter has tested them on a CPU, and no GPU has.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Columns that a program reads at a time.
BLOCK_COLUMNS = 4096


@triton.jit  # type: ignore[untyped-decorator]
def _subtract_exp_and_sum(logits, row_max, sums, num_columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * num_columns
    highest = tl.load(row_max + row)
    partial = tl.zeros([BLOCK], tl.float32)
    for first in range(0, num_columns, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < num_columns
        exponentials = tl.exp(tl.load(start + columns, mask=inside, other=float("-inf")) - highest)
        tl.store(start + columns, exponentials, mask=inside)
        partial += exponentials
    tl.store(sums + row, tl.sum(partial, 0))


@triton.jit  # type: ignore[untyped-decorator]
def _scale_and_cast(values, factors, out, num_columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    start = row * num_columns
    factor = tl.load(factors + row)
    for first in range(0, num_columns, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < num_columns
        scaled = tl.load(values + start + columns, mask=inside) * factor
        tl.store(out + start + columns, scaled.to(out.dtype.element_ty), mask=inside)


def can_run(logits: Tensor) -> bool:
    """Return whether the kernels take these logits: float32 on a GPU, or anywhere by Triton's interpreter."""
    return logits.dtype == torch.float32 and (logits.is_cuda or bool(triton.knobs.runtime.interpret))


def subtract_exp_and_sum_(logits: Tensor, row_max: Tensor) -> Tensor:
    """Turn float32 logits, contiguous, in place, into `exp(logit - row_max)`; return the sum of each row, [n].

    One pass that reads and writes; PyTorch needs two of them and one that reads.
    """
    sums = logits.new_empty(len(logits))
    if len(logits):
        _subtract_exp_and_sum[(len(logits),)](logits, row_max, sums, logits.shape[1], BLOCK=BLOCK_COLUMNS)
    return sums


def scale_add_and_cast(values: Tensor, factors: Tensor, indices: Tensor, increments: Tensor, out: Tensor) -> Tensor:
    """Write `values * factors[:, None]`, plus increments at a few indices, into `out` of a smaller dtype; return `out`.

    All sums are in float32. One pass that reads 4 and writes 2 bytes; PyTorch reads and writes 14. `values`, float32
    [n, V], contiguous, is overwritten at the indices, int64 [increments], into the flattened values; they may repeat.
    """
    if not len(values):
        return out
    _scale_and_cast[(len(values),)](values, factors, out, values.shape[1], BLOCK=BLOCK_COLUMNS)
    flat = values.view(-1)
    # Where an index repeats, the same product is written again.
    flat.scatter_(0, indices, flat.take(indices) * factors[indices // values.shape[1]])
    flat.scatter_add_(0, indices, increments)
    out.view(-1).scatter_(0, indices, flat.take(indices).to(out.dtype))
    return out
