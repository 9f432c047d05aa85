"""The student with its losses as one module: forward pass, parallel wrapping, and gradient clipping."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from xtk.batches.micro_batches import MicroBatch
from xtk.errors import XtkError
from xtk.losses.cells.loss_cells import LossCells
from xtk.losses.context_parallel_hidden_states import StateExchange
from xtk.losses.head import fused_loss
from xtk.losses.teacher_shift import with_frozen_student
from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.output_head import OutputHead
from xtk.models.packed_attention import PackedSequence
from xtk.parallel.fsdp_and_tensor_parallel import apply_fsdp
from xtk.parallel.host_to_device import to_device
from xtk.parallel.parallel_config import ParallelConfig
from xtk.runs.sharded_state import read_model_shards

# Gets the states [n, H] of this process in a forward pass, while weights are gathered; their indices [n] in
# `loss_positions`; and the output head.
HiddenStateHook = Callable[[Tensor, NDArray[np.int64], OutputHead], None]


@dataclass(frozen=True)
class TokenBatch:
    """Inputs of a forward pass, as a `MicroBatch` has them."""

    input_ids: NDArray[np.int64]  # [B, T] padded, or [1, T] packed
    document_lengths: tuple[int, ...] | None  # of packed documents; None: not packed
    loss_positions: NDArray[np.int64]  # [N], indices into the flattened hidden states at which losses are computed


class StudentWithLoss(nn.Module):
    """The student with its losses, so that DDP or FSDP wraps a single forward pass.

    `frozen_student`: for terms with a shifted target. `has_unit_gradient`: no caller scales the total before the
    backward pass.
    """

    def __init__(
        self,
        split_model: BackboneWithHead,
        frozen_student: BackboneWithHead | None = None,
        *,
        has_unit_gradient: bool = False,
    ) -> None:
        super().__init__()
        self.split_model, self._has_unit_gradient = split_model, has_unit_gradient
        self._frozen = (frozen_student,)  # in a tuple: no submodule, so that neither its mode nor its weights change

    def forward(
        self,
        input_ids: Tensor,
        loss_positions: NDArray[np.int64],
        terms: Sequence[LossCells],
        packed_sequence: PackedSequence | None = None,
        hook: HiddenStateHook | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the scaled total loss [], and the sum of each loss over this process's tokens or spans [terms].

        Args:
            input_ids: [B, T], the same in every process of a context parallel group.
            loss_positions: [N], indices into the flattened hidden states [B * T, H] at which losses are computed.
            packed_sequence: lengths and context parallel split of packed documents; None: not packed.
        """
        (frozen,) = self._frozen
        if frozen is not None and any(term.target_logits is not None for term in terms):
            with torch.no_grad():
                frozen_states, _, _ = self._states(frozen, input_ids, loss_positions, packed_sequence)
            terms = with_frozen_student(terms, frozen_states, frozen.head)
        states, compared, here = self._states(self.split_model, input_ids, loss_positions, packed_sequence)
        head = self.split_model.head
        if hook is not None:
            hook(states, here, head)
        if not terms:
            return states.new_zeros(()), states.new_zeros(0)
        if packed_sequence is not None and packed_sequence.num_ranks > 1:
            plan = StateExchange.make_plan(compared, terms, packed_sequence.group)
            states, terms = plan.exchange(states), plan.local_terms(terms)
        return fused_loss(states, head, terms, has_unit_gradient=self._has_unit_gradient)

    def _states(
        self, model: BackboneWithHead, input_ids: Tensor, positions: NDArray[np.int64], packed: PackedSequence | None
    ) -> tuple[Tensor, list[NDArray[np.int64]], NDArray[np.int64]]:
        """Return hidden states [n, H] of local positions, and the position indices of each process and of this one."""
        if packed is None or packed.num_ranks == 1:
            flat_states = model(input_ids, packed).flatten(0, 1)
            everything = np.arange(len(positions))
            chosen = to_device(torch.from_numpy(positions), flat_states.device)
            return flat_states.index_select(0, chosen), [everything], everything
        held = [packed.token_indices(rank) for rank in range(packed.num_ranks)]
        mine = to_device(torch.from_numpy(held[packed.rank]), input_ids.device)
        flat_states = model(input_ids.index_select(1, mine), packed).flatten(0, 1)
        compared = [np.flatnonzero(np.isin(positions, some)) for some in held]
        here = np.searchsorted(held[packed.rank], positions[compared[packed.rank]])
        states = flat_states.index_select(0, to_device(torch.from_numpy(here), flat_states.device))
        return states, compared, compared[packed.rank]


def forward_student(
    model: nn.Module,
    batch: MicroBatch | TokenBatch,
    terms: Sequence[LossCells],
    parallel: ParallelConfig,
    device: torch.device,
    hook: HiddenStateHook | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the wrapped student on a batch (collective)."""
    packed = None
    if batch.document_lengths is not None:
        packed = PackedSequence(
            batch.document_lengths, parallel.group("cp") if parallel.cp > 1 else None, parallel.cp, parallel.rank("cp")
        )
    input_ids = to_device(torch.from_numpy(batch.input_ids), device)
    outputs: tuple[Tensor, Tensor] = model(input_ids, batch.loss_positions, terms, packed, hook)
    return outputs


def predicted_tokens(batch: MicroBatch | TokenBatch) -> NDArray[np.int64]:
    """Return the token that each loss position predicts, int64 [N]."""
    following: NDArray[np.int64] = batch.input_ids.reshape(-1)[batch.loss_positions + 1]
    return following


def parallelize(
    student_model: BackboneWithHead,
    accelerator: Any,
    parallel: ParallelConfig,
    *,
    packing: bool,
    offload: bool = False,
    weights: Path | None = None,
    frozen_student: BackboneWithHead | None = None,
) -> tuple[nn.Module, list[nn.Parameter]]:
    """Return the student wrapped for its parallel layout, on its devices, and its trainable parameters.

    The student is unsharded, the same in every process. `weights`: its folder, if it is on the meta device.
    """
    if parallel.cp > 1 and not (packing and student_model.enable_packing() and student_model.supports_context_parallel):
        raise XtkError(
            "the student does not support context parallelism (--parallel cp)"
            if packing
            else "--parallel cp needs --packing",
            where=f"{type(student_model.model).__name__}, --parallel {parallel}",
            hint="use --parallel fsdp or tp instead of cp, or remove --attn-implementation if it is given"
            if packing
            else "use --packing, or another --parallel",
        )
    if offload and not parallel.is_sharded:
        raise XtkError(
            "--fsdp-offload needs --parallel fsdp=N or tp=N", hint="add --parallel fsdp=N, or remove --fsdp-offload"
        )
    student = StudentWithLoss(student_model, frozen_student, has_unit_gradient=True)
    if parallel.is_sharded:
        if getattr(student_model.model, "quantization_method", None) or getattr(
            student_model.model, "is_quantized", False
        ):
            raise XtkError(
                "quantized weights (--load-in-4bit, --load-in-8bit) cannot be sharded",
                where=f"--parallel {parallel}",
                hint="use --parallel dp=N, or do not quantize",
            )
        if parallel.tp > 1:
            student_model.apply_tensor_parallel(parallel.mesh["tp"])
        mesh = parallel.mesh["dp", "shards"] if parallel.dp > 1 else parallel.mesh["shards"]
        apply_fsdp(student, student_model.model, mesh, bf16=accelerator.mixed_precision == "bf16", cpu_offload=offload)
        if student_model.model.device.type == "meta":
            assert weights is not None
            device = torch.device("cpu") if offload else accelerator.device
            read_model_shards(student, student_model.model, weights, device, accelerator.device)
        model: nn.Module = student
    else:
        model = accelerator.prepare_model(student)
    return model, [parameter for parameter in student.parameters() if parameter.requires_grad]


def reshard_weights(model: nn.Module) -> None:
    """Free weights that stay gathered after a forward pass without backward (FSDP2: those outside of layers)."""
    if isinstance(model, FSDPModule):
        model.reshard()


class GradientClipping:
    """Norms of the gradients over all shards, and clipping by them."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        kinds: dict[Any, list[Tensor]] = {}
        for parameter in parameters:
            if parameter.grad is not None:
                gradient = parameter.grad
                kind = (getattr(gradient, "device_mesh", None), getattr(gradient, "placements", None), gradient.device)
                kinds.setdefault(kind, []).append(gradient)
        self._gradients = list(kinds.values())
        local_norms = map(nn.utils.get_total_norm, self._gradients)
        # The norm of the gradients of each placement, on their devices.
        self.norms = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in local_norms]

    def clip(self, norms: Sequence[float], max_norm: float) -> float:
        """Clip the gradients to a total norm, 0: no clipping; return the norm before clipping."""
        norm: float = sum((norm**2 for norm in norms), 0.0) ** 0.5
        if max_norm and norm > max_norm and norm < float("inf"):
            for gradients in self._gradients:
                torch._foreach_mul_(gradients, max_norm / (norm + 1e-6))
        return norm
