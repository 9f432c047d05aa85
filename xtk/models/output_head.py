"""The head of a language model: logits of a few rows of hidden states at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from xtk.errors import XtkError


@dataclass(frozen=True)
class HeadAdapter:
    """LoRA on a head: `scaling * (states @ down^T) @ up^T` is added to the logits.

    Attributes:
        lora_a: [r, H].
        lora_b: [V, r].
        scaling: alpha / r, as peft has it.
        dropout: of the states on their way in, if any.
    """

    lora_a: Tensor
    lora_b: Tensor
    scaling: float
    dropout: nn.Module | None = None

    def project_down(self, states: Tensor) -> Tensor:
        """Return [N, r], what `up` is multiplied with."""
        states = states.to(self.lora_a.dtype)
        if self.dropout is not None:
            states = self.dropout(states)
        return self.scaling * nn.functional.linear(states, self.lora_a)


@dataclass(frozen=True)
class HeadShard:
    """The rows of a head that this process has, where a group of processes has them all.

    Attributes:
        first_token: the first of them.
        vocab_size: V of the whole head.
        group: torch's process group; its ranks hold the rows in their order.
    """

    first_token: int
    vocab_size: int
    group: Any

    @classmethod
    def from_group(cls, num_rows: int, group: Any) -> HeadShard:
        """Learn from all processes of a group how many rows each has; all of them have to call it.

        Raises:
            XtkError: a process has none.
        """
        counts: list[int] = [0] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(counts, num_rows, group=group)
        if 0 in counts:
            raise XtkError(
                "a process has no row of the head",
                where=f"rank {counts.index(0)} of {len(counts)}; the head has {sum(counts):,} rows",
                hint="fewer processes for this vocabulary",
            )
        return cls(sum(counts[: torch.distributed.get_rank(group)]), sum(counts), group)

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Sum values over the group, in place; autograd does not see it."""
        torch.distributed.all_reduce(values, group=self.group)
        return values

    def all_reduce_max(self, values: Tensor) -> Tensor:
        """Take the largest of each value over the group, in place."""
        torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX, group=self.group)
        return values

    def all_gather(self, values: Tensor) -> list[Tensor]:
        """Return the values of each process of the group, all of one shape."""
        several = [torch.empty_like(values) for _ in range(torch.distributed.get_world_size(self.group))]
        torch.distributed.all_gather(several, values.contiguous(), group=self.group)
        return several

    def all_reduce_min(self, number: int, device: torch.device) -> int:
        """Return the smallest of a number over the group."""
        values = torch.tensor(number, device=device)
        torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MIN, group=self.group)
        return int(values)


@dataclass(frozen=True)
class OutputHead:
    """What turns hidden states into logits: `cap(scale * (states @ weight^T + bias + adapters))`.

    Attributes:
        weight: [V, H]; None if the model's logits cannot be told as above. The "hidden states" are then the logits
            themselves.
        bias: [V] or None.
        scale: of the logits (Cohere, Granite, Falcon-H1, HyperCLOVA X).
        softcap: c, where the logits x are `c tanh(x / c)` (Gemma); None: as they are.
        adapters: LoRA on the head.
        shard: whose rows these are, if other processes have the others; None: all of them.
    """

    weight: Tensor | None
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    adapters: Sequence[HeadAdapter] = ()
    shard: HeadShard | None = None

    def num_logits(self, states: Tensor) -> int:
        """Return V, the columns of the logits of some states; of a shard, those of this process."""
        return states.shape[1] if self.weight is None else self.weight.shape[0]

    def matrix_inputs(self, states: Tensor) -> list[Tensor]:
        """Return what the matrices are multiplied with, [N, H] and a [N, r] for each adapter."""
        return [states, *(adapter.project_down(states) for adapter in self.adapters)]

    @property
    def matrices(self) -> list[Tensor]:
        """The matrices [V, H], [V, r], ... whose products add up to the logits; none if the states are logits."""
        return [] if self.weight is None else [self.weight, *(adapter.lora_b for adapter in self.adapters)]


class ChunkedLogits:
    """Makes logits [n, V] of a few rows at a time, in memory that is used again for the next rows.

    Fresh memory for each chunk costs more in page faults than the exponentials of its logits.

    Args:
        head: the matrix, or none if states are logits already.
        states: [N, H], whose rows will be given.
        rows: how many at most at a time.
        dtype: of the product; the logits are fp32 (fp64 for fp64).
        slopes: whether `slope` is wanted.

    Attributes:
        matrices: those of the head, in the dtype of the product.
        softcap_gradient: [n, V], what a soft cap multiplies gradients with, of the last logits; None without a cap.
        scratch: [n, V] in the dtype of the product, memory that is free between two calls.
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
        self.matrices = [matrix.detach().to(self._compute) for matrix in head.matrices]
        self._bias = None if head.bias is None else head.bias.detach()
        wide = torch.float64 if self._compute == torch.float64 else torch.float32
        size = (min(max_rows, len(states)), head.num_logits(states))
        self._logits = states.new_empty(size, dtype=wide)
        self._narrow = None if self._compute == wide or weight is None else states.new_empty(size, dtype=self._compute)
        self._slopes = (
            states.new_empty(size, dtype=wide) if with_softcap_gradient and head.softcap is not None else None
        )
        self.softcap_gradient: Tensor | None = None
        self.scratch: Tensor | None = None

    def __call__(self, states: Tensor) -> Tensor:
        """Return the logits of some rows; they stand until the next call.

        Args:
            states: [n, H], n at most as many as were said.
        """
        with torch.no_grad():
            return self.from_matrix_inputs(self._head.matrix_inputs(states) if self.matrices else [states])

    def from_matrix_inputs(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return the same of what the matrices are multiplied with, [n, H], [n, r], ..., without the head's scale."""
        logits = self._logits[: len(inputs[0])]
        if not self.matrices:
            return logits.copy_(inputs[0])
        product = self.scratch = logits if self._narrow is None else self._narrow[: len(logits)]
        for number, (rows, matrix) in enumerate(zip(inputs, self.matrices, strict=True)):
            if number:
                product.addmm_(rows.to(self._compute), matrix.T)
            else:
                torch.mm(rows.to(self._compute), matrix.T, out=product)
        if product.dtype != logits.dtype:
            logits.copy_(product)
        if self._bias is not None:
            logits.add_(self._bias)
        if self._head.scale != 1:
            logits.mul_(self._head.scale)
        return logits if self._head.softcap is None else self._capped(logits, self._head.softcap)

    def _capped(self, logits: Tensor, cap: float) -> Tensor:
        torch.tanh(logits.div_(cap), out=logits)
        if self._slopes is not None:
            self.softcap_gradient = torch.mul(logits, logits, out=self._slopes[: len(logits)]).neg_().add_(1)
        return logits.mul_(cap)


# Each chunk reads the whole head once more: at 64 MiB of logits that is half of the time, at 256 MiB a tenth.
MAX_CHUNK_BYTES = 256 << 20


def chunk_rows(vocab_size: int) -> int:
    """Return how many rows of logits [n, V] in fp32 fit the budget of a chunk."""
    return max(16, MAX_CHUNK_BYTES // (4 * vocab_size))
