"""Exchange of hidden states between context-parallel processes, so that each computes the losses of whole items.

With context parallelism a process has the states of some positions: one block of the text, or one from its front and
one from its back (zigzag). An item of a loss may need rows of two processes. So rows are exchanged before the output
head: each process gets an equal number of rows, split between items, and gradients return the same way. Losses never
see the layout.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xtk.errors import XtkError
from xtk.losses.cells.loss_cells import LossCells
from xtk.losses.head import allowed_splits
from xtk.parallel.host_to_device import to_device


@dataclass(frozen=True)
class StateExchange:
    """Plan of which rows each process sends and receives; every process of the group computes the same plan."""

    first_received_row: int  # the first row that it receives: `start`, or the row before it for losses that need it
    start: int  # first row whose loss this process computes
    stop: int  # one past the last
    sent_rows: Tensor  # int64, indices of the local rows that it sends, those for rank 0 first
    sent_counts: list[int]  # number of rows sent to each rank
    received_counts: list[int]  # number of rows received from each rank
    arrival_order: Tensor  # int64 [stop - first_received_row], the index of each row among those received
    group: Any  # a torch.distributed process group

    @classmethod
    def make_plan(
        cls, rows_by_rank: Sequence[NDArray[np.int64]], terms: Sequence[LossCells], group: Any
    ) -> StateExchange:
        """Return the exchange plan of this process, for the losses of the whole text.

        `rows_by_rank`: for each rank of the group, the rows whose states it has, in its order. Rows are those of the
        whole text that the losses compare, counted from 0; each is on exactly one rank.
        """
        ranks, rank = len(rows_by_rank), torch.distributed.get_rank(group)
        everything = np.concatenate([*rows_by_rank, np.zeros(0, np.int64)])
        rows = len(everything)
        if not np.array_equal(np.sort(everything), np.arange(rows)):
            raise XtkError(
                "the loss got hidden states of other positions than the processes of --parallel cp have",
                where=f"{ranks} processes with {', '.join(str(len(some)) for some in rows_by_rank)} rows",
                hint="in an own loss, number the compared positions of a micro-batch 0, 1, ..., each on one process",
            )
        owner, place = np.empty(rows, np.int64), np.empty(rows, np.int64)
        for number, some in enumerate(rows_by_rank):
            owner[some], place[some] = number, np.arange(len(some))
        overlap = max((term.ROWS_BEFORE for term in terms), default=0)
        splits = np.flatnonzero(allowed_splits(rows, terms))
        edges = [0, *(int(_nearest_split(splits, rows * number / ranks)) for number in range(1, ranks)), rows]
        bases = [max(0, edge - overlap) if edge < stop else edge for edge, stop in itertools.pairwise(edges)]
        wanted = [np.arange(base, stop) for base, stop in zip(bases, edges[1:], strict=True)]
        mine = wanted[rank]
        sent = [place[some[owner[some] == rank]] for some in wanted]
        arrival = np.argsort(owner[mine], kind="stable")
        order = np.empty_like(arrival)
        order[arrival] = np.arange(len(mine))
        return cls(
            first_received_row=bases[rank],
            start=edges[rank],
            stop=edges[rank + 1],
            sent_rows=torch.from_numpy(np.concatenate(sent)),
            sent_counts=[len(some) for some in sent],
            received_counts=np.bincount(owner[mine], minlength=ranks).tolist(),
            arrival_order=torch.from_numpy(order),
            group=group,
        )

    def exchange(self, states: Tensor) -> Tensor:
        """Return the states [stop - first_received_row, H] of this process's losses; gradients are sent back."""
        return _ExchangeStates.apply(states, self)  # type: ignore[no-any-return, no-untyped-call]

    def local_terms(self, terms: Sequence[LossCells]) -> list[LossCells]:
        """Return the losses restricted to the items of this process."""
        return [term.select_rows(self.start, self.stop, self.first_received_row) for term in terms]


def _nearest_split(splits: NDArray[np.int64], target: float) -> np.int64:
    """Return the allowed split nearest to a target row."""
    nearest: np.int64 = splits[np.abs(splits - target).argmin()]
    return nearest


class _ExchangeStates(torch.autograd.Function):
    """All-to-all of rows by a plan, and of their gradients by the reversed plan."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, plan: StateExchange) -> Tensor:
        ctx.plan, ctx.shape = plan, states.shape
        received = states.new_empty(sum(plan.received_counts), states.shape[1])
        torch.distributed.all_to_all_single(
            received,
            states[to_device(plan.sent_rows, states.device)],
            plan.received_counts,
            plan.sent_counts,
            group=plan.group,
        )
        return received[to_device(plan.arrival_order, states.device)]

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, None]:
        (gradient,) = outputs
        plan: StateExchange = ctx.plan
        back = torch.empty_like(gradient)
        back[to_device(plan.arrival_order, gradient.device)] = gradient
        returned = gradient.new_empty(len(plan.sent_rows), gradient.shape[1])
        torch.distributed.all_to_all_single(returned, back, plan.sent_counts, plan.received_counts, group=plan.group)
        # A row that a loss needs as the previous row was sent to two processes; its gradient is the sum of both.
        return gradient.new_zeros(ctx.shape).index_add_(0, to_device(plan.sent_rows, gradient.device), returned), None
