"""What a model says in rows of hidden states: how likely the token that stands there is, and which one is likeliest."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from xtk.models.output_head import ChunkedLogits, OutputHead, chunk_rows


class ProbabilityCallback(Protocol):
    """What is done with the probabilities of rows, a chunk at a time."""

    def __call__(self, rows: slice, exps: Tensor) -> None:
        """Look at exps [n, V], proportional to the probabilities of some of the rows, before they are gone."""


def compute_token_logprobs(
    states: Tensor,
    head: OutputHead,
    targets: Tensor,
    *,
    return_top1: bool = False,
    callback: ProbabilityCallback | None = None,
) -> tuple[Tensor, Tensor]:
    """Read rows, a chunk at a time. Of a head in shards every process of the group gets the same.

    Args:
        states: [N, H], hidden states (or logits [N, V], if the head has no weight).
        head: makes logits of them.
        targets: int64 [N], the token of each row that is asked about.
        return_top1: whether the likeliest tokens are wanted.
        callback: gets the probabilities; of a head that is whole.

    Returns:
        logprobs: float64 [N], natural, of the targets.
        tokens: int64 [N], the likeliest of each row, the lowest id on ties; [0] if they are not wanted.
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
        logits, wanted = logits_of(states[rows]), targets[rows] - first
        highest, places = logits.max(1)
        if shard is not None:
            own = highest.clone()
            highest = shard.all_reduce_max(highest)
            places = torch.where(own == highest, places + first, shard.vocab_size)
            places = -shard.all_reduce_max(-places)
        if return_top1:
            tokens[rows] = places
        here = (wanted >= 0) & (wanted < width)
        said = logits.gather(1, wanted.clamp(0, width - 1)[:, None])[:, 0].masked_fill(~here, 0.0)
        exps = logits.sub_(highest[:, None]).exp_()
        sums = exps.sum(1)
        if callback is not None:
            callback(rows, exps)
        if shard is not None:
            said, sums = shard.all_reduce_sum(torch.stack([said, sums]))
        logprobs[rows] = said.double() - highest.double() - sums.double().log()
    return logprobs, tokens
