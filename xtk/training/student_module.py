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
from xtk.losses.context_parallel import StateExchange
from xtk.losses.fused_loss import LossTensors, fused_loss
from xtk.models.causal_lm import BackboneWithHead
from xtk.models.output_head import OutputHead, chunk_rows
from xtk.models.packed_attention import PackedSequence
from xtk.models.weight_sharding import apply_fsdp
from xtk.training.parallel_config import ParallelConfig


class HiddenStateHook(Protocol):
    """What is done with hidden states beside the losses, where weights are whole."""

    def __call__(self, states: Tensor, here: NDArray[np.int64], head: OutputHead) -> None:
        """Look at states [n, H]; `here` [n] tells which of the rows that are compared they are."""


class StudentWithLoss(nn.Module):
    """The student with its loss inside, so that whatever wraps it for many processes sees one forward pass."""

    def __init__(self, split_model: BackboneWithHead) -> None:
        super().__init__()
        self.split_model = split_model

    def forward(
        self,
        input_ids: Tensor,
        loss_positions: NDArray[np.int64],
        terms: Sequence[LossTensors],
        packed_sequence: PackedSequence | None = None,
        hook: HiddenStateHook | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the scaled total and each term's sum over its items; of this process's items, if others have some.

        Args:
            input_ids: [B, T], the same in every process that shares the row.
            loss_positions: [N], rows of the flattened hidden states [B * T, H] that are compared.
            terms: the losses.
            packed_sequence: the documents, where they stand in one row.
            hook: gets the states of the places that this process has.
        """
        states, compared, here = self._states(input_ids, loss_positions, packed_sequence)
        head = self.split_model.head
        if hook is not None:
            hook(states, here, head)
        if not terms:
            return states.new_zeros(()), states.new_zeros(0)
        if packed_sequence is not None and packed_sequence.num_ranks > 1:
            plan = StateExchange.make_plan(compared, terms, packed_sequence.group)
            states, terms = plan.exchange(states), plan.local_terms(terms)
        return fused_loss(states, head, terms, chunk_rows(head.num_logits(states)))

    def _states(
        self, input_ids: Tensor, places: NDArray[np.int64], row: PackedSequence | None
    ) -> tuple[Tensor, list[NDArray[np.int64]], NDArray[np.int64]]:
        """Return the hidden states [n, H] of the places that are here, and which places each process of a row has."""
        if row is None or row.num_ranks == 1:
            found = self.split_model(input_ids, row).flatten(0, 1)
            everything = np.arange(len(places))
            return found.index_select(0, torch.from_numpy(places).to(found.device)), [everything], everything
        held = [row.token_indices(rank) for rank in range(row.num_ranks)]
        mine = torch.from_numpy(held[row.rank]).to(input_ids.device)
        found = self.split_model(input_ids.index_select(1, mine), row).flatten(0, 1)
        compared = [np.flatnonzero(np.isin(places, some)) for some in held]
        here = np.searchsorted(held[row.rank], places[compared[row.rank]])
        states = found.index_select(0, torch.from_numpy(here).to(found.device))
        return states, compared, compared[row.rank]


def forward_student(
    model: nn.Module,
    batch: TokenBatch,
    terms: Sequence[LossTensors],
    parallel: ParallelConfig,
    device: torch.device,
    hook: HiddenStateHook | None = None,
) -> tuple[Tensor, Tensor]:
    """Take tokens through the student, wrapped as it is; every process has to call it.

    Args:
        model: what `shared` returned.
        batch: the tokens.
        terms: the losses, on the device.
        parallel: of the processes.
        device: of this one.
        hook: as in `Student.forward`.

    Returns:
        What `Student.forward` does.
    """
    row = None
    if batch.document_lengths is not None:
        row = PackedSequence(
            batch.document_lengths, parallel.group("cp") if parallel.cp > 1 else None, parallel.cp, parallel.rank("cp")
        )
    input_ids = torch.from_numpy(batch.input_ids).to(device)
    found: tuple[Tensor, Tensor] = model(input_ids, batch.loss_positions, terms, row, hook)
    return found


class TokenBatch(Protocol):
    """Tokens on their way into the student; see `MicroBatch`."""

    @property
    def input_ids(self) -> NDArray[np.int64]:
        """[B, T], or [1, T], documents one behind the other."""

    @property
    def document_lengths(self) -> tuple[int, ...] | None:
        """Of the documents in one row."""

    @property
    def loss_positions(self) -> NDArray[np.int64]:
        """[N], the rows of the flattened hidden states that are compared."""


def parallelize(
    student_model: BackboneWithHead, accelerator: Any, parallel: ParallelConfig, *, packing: bool, offload: bool = False
) -> tuple[nn.Module, list[nn.Parameter]]:
    """Bring the student to where it is trained.

    Args:
        student_model: the student, loaded whole, the same in every process.
        accelerator: Accelerate's.
        parallel: of the processes, with its mesh.
        packing: whether rows of documents are wanted; needed to share rows.
        offload: weights and optimizer stay in the memory of the CPU; where weights are shared out.

    Returns:
        What is called, and the parameters that are trained.

    Raises:
        XtkError: this model cannot be shared so.
    """
    if parallel.cp > 1 and not (packing and student_model.enable_packing() and student_model.supports_context_parallel):
        raise XtkError(
            "this model's rows cannot be shared by several processes",
            where=f"{type(student_model.model).__name__}, --parallel {parallel}",
            hint="--parallel fsdp or tp instead of cp" if packing else "--packing, or another --parallel",
        )
    if offload and not parallel.is_sharded:
        raise XtkError("--fsdp-offload is of weights that are shared out", hint="--parallel fsdp=N")
    student = StudentWithLoss(student_model)
    if parallel.is_sharded:
        if getattr(student_model.model, "quantization_method", None) or getattr(
            student_model.model, "is_quantized", False
        ):
            raise XtkError(
                "packed weights are not shared out",
                where=f"--parallel {parallel}",
                hint="replicas alone: no --parallel",
            )
        if parallel.tp > 1:
            student_model.apply_tensor_parallel(parallel.mesh["tp"])
        mesh = parallel.mesh["dp", "shards"] if parallel.dp > 1 else parallel.mesh["shards"]
        apply_fsdp(student, student_model.model, mesh, bf16=accelerator.mixed_precision == "bf16", cpu_offload=offload)
        model: nn.Module = student
    else:
        model = accelerator.prepare_model(student)
    return model, [parameter for parameter in student.parameters() if parameter.requires_grad]


def reshard_weights(model: nn.Module) -> None:
    """Give back the weights that a pass without gradients has left gathered (FSDP2 keeps those of no layer)."""
    if isinstance(model, FSDPModule):
        model.reshard()


def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float) -> float:
    """Scale gradients down to a norm; return what it was, over all parts that processes have.

    Args:
        parameters: trained; of several layouts, if a layer has vectors that are not cut.
        max_norm: 0: never.
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
    if max_norm and norm > max_norm and norm < float("inf"):
        for gradients in kinds.values():
            torch._foreach_mul_(gradients, max_norm / (norm + 1e-6))
    return norm
