"""Hidden states of a text that several processes hold in pieces, brought to where the losses need them.

With context parallelism a process has the states of some positions: a stretch of the text, or one from its front and
one from its back (zigzag). An item of a loss may need rows that two of them hold. So rows travel before the head: each
process gets an even share of all rows, cut between items, and their gradients travel back. Losses never see the layout.
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
from xtk.losses.fused_loss import LossTensors, allowed_splits


@dataclass(frozen=True)
class StateExchange:
    """Who sends which rows to whom; every process of the group works out the same plan.

    Attributes:
        first_received_row: the first row that this process gets; with losses that look back, one more than it answers
            for.
        start, stop: the rows that it answers for.
        sent_rows: int64, which of its own rows it sends, to rank 0 first.
        sent_counts: how many to each rank.
        received_counts: how many come from each rank.
        arrival_order: int64, where in what came each row from `base` to `stop` is.
        group: torch's process group.
    """

    first_received_row: int
    start: int
    stop: int
    sent_rows: Tensor
    sent_counts: list[int]
    received_counts: list[int]
    arrival_order: Tensor
    group: Any

    @classmethod
    def make_plan(
        cls, rows_by_rank: Sequence[NDArray[np.int64]], terms: Sequence[LossTensors], group: Any
    ) -> StateExchange:
        """Work out who answers for which rows.

        Args:
            rows_by_rank: of each rank of the group, the rows whose states it has, in the order in which it has them.
                Rows are
                those of the whole text that the losses compare, counted from 0; each is held once.
            terms: the losses of the whole text.
            group: torch's process group.

        Raises:
            XtkError: a row is held twice, or by nobody.
        """
        ranks, rank = len(rows_by_rank), torch.distributed.get_rank(group)
        everything = np.concatenate([*rows_by_rank, np.zeros(0, np.int64)])
        rows = len(everything)
        if not np.array_equal(np.sort(everything), np.arange(rows)):
            raise XtkError(
                "the rows of a text are not each held by one process",
                where=f"{ranks} processes hold {', '.join(str(len(some)) for some in rows_by_rank)} rows",
                hint="count the rows that the losses compare from 0, over all documents of the micro-batch",
            )
        owner, place = np.empty(rows, np.int64), np.empty(rows, np.int64)
        for number, some in enumerate(rows_by_rank):
            owner[some], place[some] = number, np.arange(len(some))
        again = int(any(term.alternatives is not None for term in terms))
        cuts = np.flatnonzero(allowed_splits(rows, terms))
        edges = [0, *(int(_nearest_split(cuts, rows * number / ranks)) for number in range(1, ranks)), rows]
        bases = [max(0, edge - again) if edge < stop else edge for edge, stop in itertools.pairwise(edges)]
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
        """Return the states [stop - base, H] of which this process computes losses; every process has to call it.

        Args:
            states: [rows held here, H]. Their gradients come back from wherever they went.
        """
        return _ExchangeStates.apply(states, self)  # type: ignore[no-any-return, no-untyped-call]

    def local_terms(self, terms: Sequence[LossTensors]) -> list[LossTensors]:
        """Return the losses of the items that this process answers for."""
        return [term.select(self.start, self.stop, self.first_received_row) for term in terms]


def _nearest_split(cuts: NDArray[np.int64], wanted: float) -> np.int64:
    """Return the cut nearest to where one is wanted."""
    nearest: np.int64 = cuts[np.abs(cuts - wanted).argmin()]
    return nearest


class _ExchangeStates(torch.autograd.Function):
    """Rows sent by a plan, and gradients by the same plan backwards."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, plan: StateExchange) -> Tensor:
        ctx.plan, ctx.shape = plan, states.shape
        received = states.new_empty(sum(plan.received_counts), states.shape[1])
        torch.distributed.all_to_all_single(
            received, states[plan.sent_rows.to(states.device)], plan.received_counts, plan.sent_counts, group=plan.group
        )
        return received[plan.arrival_order.to(states.device)]

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, None]:
        (gradient,) = outputs
        plan: StateExchange = ctx.plan
        back = torch.empty_like(gradient)
        back[plan.arrival_order.to(gradient.device)] = gradient
        returned = gradient.new_empty(len(plan.sent_rows), gradient.shape[1])
        torch.distributed.all_to_all_single(returned, back, plan.sent_counts, plan.received_counts, group=plan.group)
        # A row that a loss looks back to went to two processes, and has the sum of what comes from both.
        return gradient.new_zeros(ctx.shape).index_add_(0, plan.sent_rows.to(gradient.device), returned), None
