"""What a model says in rows of hidden states: how likely the token that stands there is, and which one is likeliest."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from xtk.models.head import Head, LogitsOfRows, rows_in_a_chunk


class Inside(Protocol):
    """What is done with the probabilities of rows, a chunk at a time."""

    def __call__(self, rows: slice, exps: Tensor) -> None:
        """Look at exps [n, V], proportional to the probabilities of some of the rows, before they are gone."""


def read_rows(
    states: Tensor, head: Head, targets: Tensor, *, likeliest: bool = False, inside: Inside | None = None
) -> tuple[Tensor, Tensor]:
    """Read rows, a chunk at a time. Of a head in shards every process of the group gets the same.

    Args:
        states: [N, H], hidden states (or logits [N, V], if the head has no weight).
        head: makes logits of them.
        targets: int64 [N], the token of each row that is asked about.
        likeliest: whether the likeliest tokens are wanted.
        inside: gets the probabilities; of a head that is whole.

    Returns:
        logprobs: float64 [N], natural, of the targets.
        tokens: int64 [N], the likeliest of each row, the lowest id on ties; [0] if they are not wanted.
    """
    shard, width = head.shard, head.width_of(states)
    chunk = rows_in_a_chunk(width)
    if shard is not None:
        chunk = shard.least(chunk, states.device)
    logits_of = LogitsOfRows(head, states, chunk)
    logprobs = torch.zeros(len(states), dtype=torch.float64, device=states.device)
    tokens = torch.zeros(len(states) if likeliest else 0, dtype=torch.int64, device=states.device)
    first = 0 if shard is None else shard.start
    for start in range(0, len(states), chunk):
        rows = slice(start, start + chunk)
        logits, wanted = logits_of(states[rows]), targets[rows] - first
        highest, places = logits.max(1)
        if shard is not None:
            own = highest.clone()
            highest = shard.highest(highest)
            places = torch.where(own == highest, places + first, shard.width)
            places = -shard.highest(-places)
        if likeliest:
            tokens[rows] = places
        here = (wanted >= 0) & (wanted < width)
        said = logits.gather(1, wanted.clamp(0, width - 1)[:, None])[:, 0].masked_fill(~here, 0.0)
        exps = logits.sub_(highest[:, None]).exp_()
        sums = exps.sum(1)
        if inside is not None:
            inside(rows, exps)
        if shard is not None:
            said, sums = shard.add(torch.stack([said, sums]))
        logprobs[rows] = said.double() - highest.double() - sums.double().log()
    return logprobs, tokens
