"""The student as a step sees it: one module from tokens to losses, in one process or shared by many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from xtk.errors import XtkError
from xtk.losses.context import RowExchange
from xtk.losses.head import Term, fused_loss
from xtk.models.attention import Row
from xtk.models.causal_lm import Cut
from xtk.models.head import Head, rows_in_a_chunk
from xtk.models.parallel import share_weights
from xtk.training.layout import Layout


class Look(Protocol):
    """What is done with hidden states beside the losses, where weights are whole."""

    def __call__(self, states: Tensor, here: NDArray[np.int64], head: Head) -> None:
        """Look at states [n, H]; `here` [n] tells which of the rows that are compared they are."""


class Student(nn.Module):
    """The student with its loss inside, so that whatever wraps it for many processes sees one forward pass."""

    def __init__(self, cut: Cut) -> None:
        super().__init__()
        self.cut = cut

    def forward(
        self,
        input_ids: Tensor,
        places: NDArray[np.int64],
        terms: Sequence[Term],
        row: Row | None = None,
        look: Look | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the scaled total and each term's sum over its items; of this process's items, if others have some.

        Args:
            input_ids: [B, T], the same in every process that shares the row.
            places: [N], rows of the flattened hidden states [B * T, H] that are compared.
            terms: the losses.
            row: the documents, where they stand in one row.
            look: gets the states of the places that this process has.
        """
        states, compared, here = self._states(input_ids, places, row)
        head = self.cut.head
        if look is not None:
            look(states, here, head)
        if not terms:
            return states.new_zeros(()), states.new_zeros(0)
        if row is not None and row.ranks > 1:
            plan = RowExchange.plan(compared, terms, row.group)
            states, terms = plan.rows(states), plan.terms(terms)
        return fused_loss(states, head, terms, rows_in_a_chunk(head.width_of(states)))

    def _states(
        self, input_ids: Tensor, places: NDArray[np.int64], row: Row | None
    ) -> tuple[Tensor, list[NDArray[np.int64]], NDArray[np.int64]]:
        """Return the hidden states [n, H] of the places that are here, and which places each process of a row has."""
        if row is None or row.ranks == 1:
            found = self.cut(input_ids, row).flatten(0, 1)
            everything = np.arange(len(places))
            return found.index_select(0, torch.from_numpy(places).to(found.device)), [everything], everything
        held = [row.held(rank) for rank in range(row.ranks)]
        mine = torch.from_numpy(held[row.rank]).to(input_ids.device)
        found = self.cut(input_ids.index_select(1, mine), row).flatten(0, 1)
        compared = [np.flatnonzero(np.isin(places, some)) for some in held]
        here = np.searchsorted(held[row.rank], places[compared[row.rank]])
        states = found.index_select(0, torch.from_numpy(here).to(found.device))
        return states, compared, compared[row.rank]


def read_student(
    model: nn.Module,
    batch: Rows,
    terms: Sequence[Term],
    layout: Layout,
    device: torch.device,
    look: Look | None = None,
) -> tuple[Tensor, Tensor]:
    """Take tokens through the student, wrapped as it is; every process has to call it.

    Args:
        model: what `shared` returned.
        batch: the tokens.
        terms: the losses, on the device.
        layout: of the processes.
        device: of this one.
        look: as in `Student.forward`.

    Returns:
        What `Student.forward` does.
    """
    row = None
    if batch.lengths is not None:
        row = Row(batch.lengths, layout.group("cp") if layout.cp > 1 else None, layout.cp, layout.rank("cp"))
    input_ids = torch.from_numpy(batch.input_ids).to(device)
    found: tuple[Tensor, Tensor] = model(input_ids, batch.places, terms, row, look)
    return found


class Rows(Protocol):
    """Tokens on their way into the student; see `MicroBatch`."""

    @property
    def input_ids(self) -> NDArray[np.int64]:
        """[B, T], or [1, T], documents one behind the other."""

    @property
    def lengths(self) -> tuple[int, ...] | None:
        """Of the documents in one row."""

    @property
    def places(self) -> NDArray[np.int64]:
        """[N], the rows of the flattened hidden states that are compared."""


def shared(
    cut: Cut, accelerator: Any, layout: Layout, *, packed: bool, offload: bool = False
) -> tuple[nn.Module, list[nn.Parameter]]:
    """Bring the student to where it is trained.

    Args:
        cut: the student, loaded whole, the same in every process.
        accelerator: Accelerate's.
        layout: of the processes, with its mesh.
        packed: whether rows of documents are wanted; needed to share rows.
        offload: weights and optimizer stay in the memory of the CPU; where weights are shared out.

    Returns:
        What is called, and the parameters that are trained.

    Raises:
        XtkError: this model cannot be shared so.
    """
    if layout.cp > 1 and not (packed and cut.pack() and cut.shares_rows):
        raise XtkError(
            "this model's rows cannot be shared by several processes",
            where=f"{type(cut.model).__name__}, --parallel {layout}",
            hint="--parallel fsdp or tp instead of cp" if packed else "--packing, or another --parallel",
        )
    if offload and not layout.sharded:
        raise XtkError("--fsdp-offload is of weights that are shared out", hint="--parallel fsdp=N")
    student = Student(cut)
    if layout.sharded:
        if getattr(cut.model, "quantization_method", None) or getattr(cut.model, "is_quantized", False):
            raise XtkError(
                "packed weights are not shared out", where=f"--parallel {layout}", hint="replicas alone: no --parallel"
            )
        if layout.tp > 1:
            cut.cut_matrices(layout.mesh["tp"])
        mesh = layout.mesh["dp", "shards"] if layout.dp > 1 else layout.mesh["shards"]
        share_weights(student, cut.model, mesh, bf16=accelerator.mixed_precision == "bf16", offload=offload)
        model: nn.Module = student
    else:
        model = accelerator.prepare_model(student)
    return model, [parameter for parameter in student.parameters() if parameter.requires_grad]


def reshard(model: nn.Module) -> None:
    """Give back the weights that a pass without gradients has left gathered (FSDP2 keeps those of no layer)."""
    if isinstance(model, FSDPModule):
        model.reshard()


def clip(parameters: Sequence[nn.Parameter], most: float) -> float:
    """Scale gradients down to a norm; return what it was, over all parts that processes have.

    Args:
        parameters: trained; of several layouts, if a layer has vectors that are not cut.
        most: 0: never.
    """
    kinds: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = parameter.grad
            kind = (getattr(gradient, "device_mesh", None), getattr(gradient, "placements", None), gradient.device)
            kinds.setdefault(kind, []).append(gradient)
    squares = 0.0
    for gradients in kinds.values():
        of_kind = nn.utils.get_total_norm(gradients)
        whole = of_kind.full_tensor() if hasattr(of_kind, "full_tensor") else of_kind
        squares += float(whole) ** 2
    norm: float = squares**0.5
    if most and norm > most and norm < float("inf"):
        for gradients in kinds.values():
            torch._foreach_mul_(gradients, most / (norm + 1e-6))
    return norm
