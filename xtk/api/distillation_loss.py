"""The losses of `xtk distill` as a module for other training loops."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from xtk.api.distillation_batch import TEACHER_KEY, TeacherBatch
from xtk.batches.cross_process_reduction import StepReduction
from xtk.errors import MismatchError, XtkError
from xtk.losses import AUTO_LOSS
from xtk.losses.cells.loss_cells import LossCells
from xtk.losses.head import fused_loss
from xtk.losses.spec import parse_losses
from xtk.losses.term import LossTerm
from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.output_head import OutputHead
from xtk.models.packed_attention import GENERAL_ATTENTION_NAME
from xtk.parallel.host_to_device import to_device


class DistillationLoss(nn.Module):
    """Weighted sum of losses, from hidden states and an output head, without logits of the whole batch.

    The values and gradients are those of `xtk distill --loss` on the same documents. A `DistillationCollator` with this
    object makes the batches.

    Args:
        losses: one or several of `xtk distill --loss`, such as "ce:weight=0.3", "byte-kl"; "auto" chooses losses that
            fit the tokenizers and the cache when the collator is created.

    Attributes:
        losses: the losses with their options, once a collator has been created.
        terms: the same as terms of the total loss.
        metrics: {name: value} of the last call: the mean of each loss over its items in the batch, detached tensors.

    Raises:
        XtkError: an unknown loss or option, with the nearest name.
    """

    def __init__(self, *losses: str) -> None:
        super().__init__()
        self.specs = parse_losses(list(losses) or [AUTO_LOSS])
        self.losses: tuple[str, ...] = ()
        self.terms: tuple[LossTerm, ...] = ()
        self._teacher_names: tuple[str, ...] = ()
        self.metrics: dict[str, Tensor] = {}
        self._heads: dict[int, BackboneWithHead] = {}

    def extra_repr(self) -> str:
        """Return the losses, for printing."""
        return " + ".join(map(str, self.specs))

    def bind(self, losses: Sequence[str], terms: tuple[LossTerm, ...], teacher_names: tuple[str, ...]) -> None:
        """Set the losses (without "auto"), as terms too, and the teachers' names in metrics; a collator calls it."""
        if self.terms and self.losses != tuple(losses):
            raise MismatchError(
                "this DistillationLoss already belongs to a DistillationCollator with other losses",
                where=f"{', '.join(self.losses)}; {', '.join(losses)}",
                hint="create one DistillationLoss per training run",
            )
        self.losses, self.terms, self._teacher_names = tuple(losses), terms, teacher_names

    def num_items(self, batches: Iterable[Mapping[str, Any]]) -> Tensor:
        """Return the denominators of an optimizer step: sums over its micro-batches, float64 [n] on the CPU.

        With several processes, sum the result over them (`all_reduce`) before it is passed to `forward`.

        Args:
            batches: the micro-batches of one step.

        Raises:
            XtkError: there are none, or they are not from a `DistillationCollator`.
        """
        batches = [batches] if isinstance(batches, Mapping) else list(batches)
        if not batches or not all(isinstance(batch, Mapping) and TEACHER_KEY in batch for batch in batches):
            raise XtkError(
                "num_items needs the batches of one optimizer step, each with the teacher's part",
                where="DistillationLoss.num_items",
                hint="pass a list of batches from a DistillationCollator",
            )
        return torch.from_numpy(np.sum([batch[TEACHER_KEY].counts for batch in batches], axis=0))

    def forward(
        self,
        hidden_states: Tensor | None = None,
        lm_head: Any = None,
        batch: Mapping[str, Any] | None = None,
        *,
        logits: Tensor | None = None,
        num_items_in_batch: Tensor | None = None,
    ) -> Tensor:
        """Return the total loss, a scalar with a gradient.

        Args:
            hidden_states: [B, T, H], the backbone's last hidden states, after its last normalization.
            lm_head: the output head: a linear layer, or the model that it belongs to. Give the model if it scales or
                caps its logits (Gemma, Cohere, Granite).
            batch: from a `DistillationCollator`, on the device of the states.
            logits: [B, T, V], instead of states and head. Memory is then that of the logits.
            num_items_in_batch: of all micro-batches of the step, from `num_items`; None: of this batch alone.

        Raises:
            XtkError: states or logits do not fit the batch, or the batch was made for other losses.
        """
        if batch is None or TEACHER_KEY not in batch:
            raise XtkError(
                "DistillationLoss needs a batch with the teacher's part",
                where="batch",
                hint="make batches with DistillationCollator, and pass them as they are",
            )
        if (hidden_states is None) == (logits is None) or (logits is None and lm_head is None):
            raise XtkError(
                "DistillationLoss needs either hidden_states and lm_head, or logits",
                hint="call loss(hidden_states, lm_head, batch) or loss(logits=logits, batch=batch)",
            )
        teacher: TeacherBatch = batch[TEACHER_KEY]
        states = hidden_states if logits is None else logits
        assert states is not None
        head = OutputHead(None) if logits is not None else self.output_head(lm_head)
        self._check(batch, teacher, states, head)
        rows = to_device(torch.from_numpy(teacher.loss_positions), states.device)
        cells = self.scaled_cells(teacher, states.device, num_items_in_batch)
        if not cells or not len(rows):
            return states.sum() * 0.0
        selected = states.flatten(0, 1).index_select(0, rows)
        total, sums = fused_loss(selected, head, cells)
        self.record(teacher, sums)
        return total

    def scaled_cells(
        self, teacher: TeacherBatch, device: torch.device, num_items_in_batch: Tensor | None = None
    ) -> list[LossCells]:
        """Return what each loss compares, with its weight divided by its number of items; arguments as in `forward`."""
        given = teacher.counts if num_items_in_batch is None else num_items_in_batch
        counts = given.double().cpu().numpy() if isinstance(given, Tensor) else np.asarray(given, np.float64)
        if counts.shape != teacher.counts.shape:
            raise XtkError(
                f"num_items_in_batch has the shape {list(counts.shape)}, but must be {list(teacher.counts.shape)}",
                where="DistillationLoss",
                hint="pass the result of DistillationLoss.num_items(batches), summed over processes",
            )
        scales = StepReduction(self.terms, None, self._teacher_names, counts).term_scales()
        return [cells.to(device, scale) for cells, scale in zip(teacher.cells, scales, strict=True)]

    def record(self, teacher: TeacherBatch, sums: Tensor) -> None:
        """Set `metrics` from the sum of each loss over the items of a batch."""
        items = [max(cells.denominator, 1e-9) for cells in teacher.cells]
        self.metrics = {term.name: total / count for term, total, count in zip(self.terms, sums, items, strict=True)}

    def output_head(self, lm_head: Any) -> OutputHead:
        """Return the output head of a linear layer, a causal language model of transformers, or an `OutputHead`."""
        if isinstance(lm_head, OutputHead):
            return lm_head
        if type(lm_head) is nn.Linear:
            return OutputHead(lm_head.weight, lm_head.bias)
        if hasattr(lm_head, "get_output_embeddings"):
            if id(lm_head) not in self._heads:
                self._heads[id(lm_head)] = BackboneWithHead(lm_head)
            head = self._heads[id(lm_head)].head
            if head.weight is not None or head.matrices:
                return head
        raise XtkError(
            f"lm_head is a {type(lm_head).__name__}, not a linear layer or a causal language model with one",
            where="DistillationLoss",
            hint="pass model.lm_head or the model; or pass the model's logits: loss(logits=logits, batch=batch)",
        )

    def _check(self, batch: Mapping[str, Any], teacher: TeacherBatch, states: Tensor, head: OutputHead) -> None:
        if self.losses != teacher.losses:
            raise MismatchError(
                "this batch was made for other losses",
                where=f"batch: {', '.join(teacher.losses)}; this DistillationLoss: {', '.join(self.losses) or 'none'}",
                hint="pass the same DistillationLoss to DistillationCollator",
            )
        shape = tuple(batch["input_ids"].shape)
        if tuple(states.shape[:2]) != shape:
            raise MismatchError(
                f"the model's output has the shape {list(states.shape)}, but the batch has the input_ids {list(shape)}",
                where="DistillationLoss",
                hint="pass the output for all positions of input_ids, [B, T, ...]; the loss selects the trained ones",
            )
        width = head.num_logits(states[0])
        if width < teacher.vocab_size:
            raise MismatchError(
                f"the model has {width:,} logits, fewer than the {teacher.vocab_size:,} tokens of the tokenizer",
                where="DistillationLoss",
                hint="pass the tokenizer of this model to DistillationCollator",
            )


def enable_packing(model: Any) -> None:
    """Make a model compute attention by document, for batches of `DistillationCollator(..., packing=True)`.

    A packed batch is one sequence [1, T] of several documents, whose `position_ids` restart at 0. Without this, models
    of transformers compute a mask [T, T] for it, which costs time and memory. Other inputs, padded batches and
    generation have the same results as before.

    Args:
        model: a causal language model of transformers; its attention implementation is changed.

    Raises:
        XtkError: the architecture cannot separate packed documents, or only with eager attention (Gemma 2).
    """
    split_packed_model(model)


def split_packed_model(model: Any) -> BackboneWithHead:
    """Return backbone and head of a model, on which packing was enabled as by `enable_packing`."""
    split = BackboneWithHead(model)
    if not split.enable_packing():
        raise XtkError(
            "the student's architecture does not support packing",
            where=type(model).__name__,
            hint="use DistillationCollator(..., packing=False)",
        )
    if split.supports_context_parallel:
        model.set_attn_implementation(GENERAL_ATTENTION_NAME)
    return split
