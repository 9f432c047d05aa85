"""Log-probabilities of given tokens, and the most likely tokens, from hidden states."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from xtk.models.output_head import ChunkedLogits, OutputHead, chunk_rows


class ProbabilityCallback(Protocol):
    """Callback for the probabilities of rows, chunk by chunk."""

    def __call__(self, rows: slice, exps: Tensor) -> None:
        """Use exps [n, V], proportional to the probabilities of some rows; the memory is reused afterwards."""


def compute_token_logprobs(
    states: Tensor,
    head: OutputHead,
    targets: Tensor,
    *,
    return_top1: bool = False,
    callback: ProbabilityCallback | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of target tokens, and the most likely tokens; logits are computed chunk by chunk.

    With a sharded head every process of the group gets the same result.

    Args:
        states: [N, H], hidden states (or logits [N, V], if the head has no weight).
        targets: int64 [N], the token of each row whose log-probability is returned.
        return_top1: also return the most likely tokens.
        callback: called with the probabilities of each chunk; needs an unsharded head.

    Returns:
        logprobs: float64 [N], in nats.
        tokens: int64 [N], the most likely token of each row, the lowest id on ties; [0] without `return_top1`.
    """
    shard, width = head.shard, head.num_logits(states)
    chunk = chunk_rows(width)
    if shard is not None:
        chunk = shard.all_reduce_min(chunk, states.device)
    logits_of = ChunkedLogits(head, states, chunk)
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
