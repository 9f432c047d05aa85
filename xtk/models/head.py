"""The head of a language model: logits of a few rows of hidden states at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Head:
    """What turns hidden states into logits.

    Attributes:
        weight: [V, H]; None if the model's logits are more than one matrix product (soft caps, scales).
            The "hidden states" are then the logits themselves.
        bias: [V] or None.
    """

    weight: Tensor | None
    bias: Tensor | None

    def width_of(self, states: Tensor) -> int:
        """Return V, the columns of the logits of some states."""
        return states.shape[1] if self.weight is None else self.weight.shape[0]


class LogitsOfRows:
    """Makes logits [n, V] of a few rows at a time, in memory that is used again for the next rows.

    Fresh memory for each chunk costs more in page faults than the exponentials of its logits.

    Args:
        head: the matrix, or none if states are logits already.
        states: [N, H], whose rows will be given.
        rows: how many at most at a time.
        dtype: of the product; the logits are fp32 (fp64 for fp64).
    """

    def __init__(self, head: Head, states: Tensor, rows: int, dtype: torch.dtype | None = None) -> None:
        weight = head.weight
        self._compute = dtype or (states.dtype if weight is None else weight.dtype)
        self._matrix = None if weight is None else weight.detach().to(self._compute).T
        self._bias = None if head.bias is None else head.bias.detach()
        wide = torch.float64 if self._compute == torch.float64 else torch.float32
        size = (min(rows, len(states)), head.width_of(states))
        self._logits = states.new_empty(size, dtype=wide)
        self._product = self._logits if self._compute == wide else states.new_empty(size, dtype=self._compute)

    def __call__(self, states: Tensor) -> Tensor:
        """Return the logits of some rows; they stand until the next call.

        Args:
            states: [n, H], n at most as many as were said.
        """
        logits, product = self._logits[: len(states)], self._product[: len(states)]
        if self._matrix is None:
            return logits.copy_(states)
        torch.mm(states.to(self._compute), self._matrix, out=product)
        if product.dtype != logits.dtype:
            logits.copy_(product)
        return logits if self._bias is None else logits.add_(self._bias)


# Each chunk reads the whole head once more: at 64 MiB of logits that is half of the time, at 256 MiB a tenth.
CHUNK_BYTES = {"cpu": 256 << 20}
CHUNK_BYTES_ELSEWHERE = 512 << 20


def rows_in_a_chunk(width: int, device: torch.device) -> int:
    """Return how many rows of logits [n, V] in fp32 fit the budget of a chunk."""
    return max(16, CHUNK_BYTES.get(device.type, CHUNK_BYTES_ELSEWHERE) // (4 * width))
