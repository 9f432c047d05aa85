"""Output head of a language model, logits in chunks of rows, and log-probabilities from hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from xtk.errors import XtkError


@dataclass(frozen=True)
class HeadAdapter:
    """LoRA on a head: `scaling * (states @ lora_a^T) @ lora_b^T` is added to the logits."""

    lora_a: Tensor  # [r, H]
    lora_b: Tensor  # [V, r]
    scaling: float  # alpha / r, as in peft
    dropout: nn.Module | None = None  # dropout of the input states; None: none

    def project_down(self, states: Tensor) -> Tensor:
        """Return the input of `lora_b`, [N, r]."""
        states = states.to(self.lora_a.dtype)
        if self.dropout is not None:
            states = self.dropout(states)
        return self.scaling * nn.functional.linear(states, self.lora_a)


@dataclass(frozen=True)
class HeadShard:
    """The shard of this process of a head whose vocabulary is split over a group of processes."""

    first_token: int  # token id of the shard's first row
    vocab_size: int  # V of the full head
    group: Any  # a torch.distributed process group; its ranks have the rows in order
    largest: int  # rows of the largest shard of the group

    @classmethod
    def from_group(cls, num_rows: int, group: Any) -> HeadShard:
        """Return this process's shard, given its number of rows; a collective call."""
        counts: list[int] = [0] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(counts, num_rows, group=group)
        if 0 in counts:
            raise XtkError(
                "--parallel tp=N leaves a process without rows of the output head",
                where=f"rank {counts.index(0)} of {len(counts)}; the head has {sum(counts):,} rows",
                hint="use a smaller N in --parallel tp=N",
            )
        return cls(sum(counts[: torch.distributed.get_rank(group)]), sum(counts), group, max(counts))

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Sum values over the group, in place and without autograd, and return them."""
        torch.distributed.all_reduce(values, group=self.group)
        return values

    def all_reduce_max(self, values: Tensor) -> Tensor:
        """Take the maximum of each value over the group, in place, and return them."""
        torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX, group=self.group)
        return values

    def all_gather(self, values: Tensor) -> list[Tensor]:
        """Return the values of each process of the group; all have the same shape."""
        several = [torch.empty_like(values) for _ in range(torch.distributed.get_world_size(self.group))]
        torch.distributed.all_gather(several, values.contiguous(), group=self.group)
        return several


@dataclass(frozen=True)
class OutputHead:
    """Output head: maps hidden states to logits, `cap(scale * (states @ weight^T + bias + adapters))`."""

    # [V, H]; None if the model's logits do not have this form. The "hidden states" are then the logits themselves
    weight: Tensor | None
    bias: Tensor | None = None  # [V] or None
    scale: float = 1.0  # factor of the logits (Cohere, Granite, Falcon-H1, HyperCLOVA X)
    softcap: float | None = None  # c of the soft cap `c tanh(x / c)` on logits x (Gemma); None: no soft cap
    adapters: Sequence[HeadAdapter] = ()  # LoRA on the head
    shard: HeadShard | None = None  # this process's rows, if the head is sharded; None: all rows

    def num_logits(self, states: Tensor) -> int:
        """Return V, the number of columns of the logits; with a shard, of this process's."""
        return states.shape[1] if self.weight is None else self.weight.shape[0]

    def matrix_inputs(self, states: Tensor) -> list[Tensor]:
        """Return the inputs of `matrices`: [N, H], and [N, r] for each adapter."""
        return [states, *(adapter.project_down(states) for adapter in self.adapters)]

    @property
    def matrices(self) -> list[Tensor]:
        """The matrices [V, H], [V, r], ... whose products sum to the logits; empty if the states are logits."""
        return [] if self.weight is None else [self.weight, *(adapter.lora_b for adapter in self.adapters)]


class ChunkedLogits:
    """Computes logits [n, V], fp32 or fp64, of up to `max_rows` of the rows of states [N, H] at a time, in one buffer.

    New memory for each chunk would cost more in page faults than the exponentials of its logits. `dtype`: of the
    product.
    """

    def __init__(
        self,
        head: OutputHead,
        states: Tensor,
        max_rows: int,
        dtype: torch.dtype | None = None,
        *,
        with_softcap_gradient: bool = False,
    ) -> None:
        self._head, weight = head, head.weight
        self._compute = dtype or (states.dtype if weight is None else weight.dtype)
        # Matrices of the head, in the dtype of the product.
        self.matrices = [matrix.detach().to(self._compute) for matrix in head.matrices]
        self._bias = None if head.bias is None else head.bias.detach()
        logits_dtype = torch.float64 if self._compute == torch.float64 else torch.float32
        size = (min(max_rows, len(states)), head.num_logits(states))
        self._logits = states.new_empty(size, dtype=logits_dtype)
        self._product_buffer = (
            None if self._compute == logits_dtype or weight is None else states.new_empty(size, dtype=self._compute)
        )
        self._softcap_gradient_buffer = (
            states.new_empty(size, dtype=logits_dtype) if with_softcap_gradient and head.softcap is not None else None
        )
        self.softcap_gradient: Tensor | None = None  # [n, V], derivative at the last logits; None: no soft cap
        self.scratch: Tensor | None = None  # [n, V] in the dtype of the product, a buffer that is free between calls

    def __call__(self, states: Tensor) -> Tensor:
        """Return the logits of some rows [n, H], n at most `max_rows`; they are overwritten by the next call."""
        with torch.no_grad():
            return self.from_matrix_inputs(self._head.matrix_inputs(states) if self.matrices else [states])

    def from_matrix_inputs(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return the logits for inputs of the head's matrices, [n, H], [n, r], ...; overwritten by the next call."""
        logits = self._logits[: len(inputs[0])]
        if not self.matrices:
            return logits.copy_(inputs[0])
        product = self.scratch = logits if self._product_buffer is None else self._product_buffer[: len(logits)]
        if logits.is_cuda and product.dtype != logits.dtype:  # summed in fp32, and not rounded
            product = logits
        for number, (rows, matrix) in enumerate(zip(inputs, self.matrices, strict=True)):
            if number:
                add_product_(product, rows.to(self._compute), matrix.T)
            elif product.dtype == self._compute:
                torch.mm(rows.to(self._compute), matrix.T, out=product)
            else:
                torch.ops.aten.mm.dtype_out(rows.to(self._compute), matrix.T, product.dtype, out=product)
        if product.dtype != logits.dtype:
            logits.copy_(product)
        if self._bias is not None:
            logits.add_(self._bias)
        if self._head.scale != 1:
            logits.mul_(self._head.scale)
        return logits if self._head.softcap is None else self._capped(logits, self._head.softcap)

    def _capped(self, logits: Tensor, cap: float) -> Tensor:
        torch.tanh(logits.div_(cap), out=logits)
        if self._softcap_gradient_buffer is not None:
            self.softcap_gradient = (
                torch.mul(logits, logits, out=self._softcap_gradient_buffer[: len(logits)]).neg_().add_(1)
            )
        return logits.mul_(cap)


# Rows at a time of a product that is added to a tensor of another dtype.
PRODUCT_ROWS = 8192


def add_product_(total: Tensor, left: Tensor, right: Tensor, scale: float = 1.0) -> None:
    """Add `scale * left @ right` to a sum [n, m] in place; the sum may be fp32 where the matrices are bf16."""
    if total.dtype == left.dtype:
        total.addmm_(left, right, alpha=scale)
    elif total.is_cuda:
        torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, alpha=scale, out=total)
    else:  # a CPU has no such operator
        for start in range(0, len(total), PRODUCT_ROWS):
            some = slice(start, start + PRODUCT_ROWS)
            total[some].add_(left[some] @ right, alpha=scale)


# Each chunk reads the full head again: with 64 MiB of logits that is half of the time, with 256 MiB a tenth. On a GPU
# each also reads and writes the fp32 gradient of the head, and launches all operations of the losses.
MAX_CHUNK_BYTES, MAX_GPU_CHUNK_BYTES = 256 << 20, 1 << 30


def chunk_rows(vocab_size: int, device: torch.device | None = None) -> int:
    """Return the number of rows of fp32 logits [n, V] of a chunk, at least 16; None: on the CPU."""
    max_bytes = MAX_CHUNK_BYTES if device is None or device.type == "cpu" else MAX_GPU_CHUNK_BYTES
    return max(16, max_bytes // (4 * vocab_size))


def chunk_rows_of(head: OutputHead, states: Tensor) -> int:
    """Return the rows of a chunk of logits of these states; with a shard, the same in all processes of its group."""
    width = head.num_logits(states) if head.shard is None else head.shard.largest
    return chunk_rows(width, states.device)


def compute_dtype(states: Tensor, weight: Tensor | None) -> torch.dtype:
    """Return the dtype of a head's products: that of autocast, if it is enabled, else that of the weight."""
    if weight is None:
        return states.dtype
    if torch.is_autocast_enabled(states.device.type):
        return torch.get_autocast_dtype(states.device.type)
    return weight.dtype


def compute_token_logprobs(
    states: Tensor,
    head: OutputHead,
    targets: Tensor,
    *,
    return_top1: bool = False,
    callback: Callable[[slice, Tensor], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of target tokens, and the most likely tokens; logits are computed chunk by chunk.

    With a sharded head every process of the group gets the same result. Under autocast the products are those of
    training on a GPU, where their sums are not rounded; a CPU would round them, and computes in the head's dtype.

    Args:
        states: [N, H], hidden states (or logits [N, V], if the head has no weight).
        targets: int64 [N], the token of each row whose log-probability is returned.
        return_top1: also return the most likely tokens.
        callback: called with the rows of each chunk and [n, V], proportional to their probabilities, in memory that
            is reused afterwards; needs an unsharded head.

    Returns:
        logprobs: float64 [N], in nats.
        tokens: int64 [N], the most likely token of each row, the lowest id on ties; [0] without `return_top1`.
    """
    shard, width = head.shard, head.num_logits(states)
    chunk = chunk_rows_of(head, states)
    logits_of = ChunkedLogits(head, states, chunk, compute_dtype(states, head.weight) if states.is_cuda else None)
    logprobs = torch.zeros(len(states), dtype=torch.float64, device=states.device)
    tokens = torch.zeros(len(states) if return_top1 else 0, dtype=torch.int64, device=states.device)
    first = 0 if shard is None else shard.first_token
    for start in range(0, len(states), chunk):
        rows = slice(start, start + chunk)
        logits, local_targets = logits_of(states[rows]), targets[rows] - first
        highest, top1 = logits.max(1)
        if shard is not None:
            own = highest.clone()
            highest = shard.all_reduce_max(highest)
            top1 = torch.where(own == highest, top1 + first, shard.vocab_size)
            top1 = -shard.all_reduce_max(-top1)
        if return_top1:
            tokens[rows] = top1
        is_local = (local_targets >= 0) & (local_targets < width)
        target_logits = logits.gather(1, local_targets.clamp(0, width - 1)[:, None])[:, 0].masked_fill(~is_local, 0.0)
        exps = logits.sub_(highest[:, None]).exp_()
        sums = exps.sum(1)
        if callback is not None:
            callback(rows, exps)
        if shard is not None:
            target_logits, sums = shard.all_reduce_sum(torch.stack([target_logits, sums]))
        logprobs[rows] = target_logits.double() - highest.double() - sums.double().log()
    return logprobs, tokens
