"""Distillation in the Trainer of transformers, and in trainers that derive from it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
import transformers
from torch import Tensor

from xtk import terminal
from xtk.api.distillation_batch import TEACHER_KEY, TeacherBatch
from xtk.api.distillation_collator import DOCUMENT_KEY, TEXT_KEY, DistillationCollator
from xtk.api.distillation_loss import DistillationLoss, split_packed_model
from xtk.errors import XtkError
from xtk.losses.cells.loss_cells import LossCells
from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.packed_attention import PackedSequence
from xtk.training.student_with_losses import StudentWithLoss

_LOSSES_ARGUMENT = "distillation_losses"


class DistillationTrainerMixin:
    """Computes the losses of a `DistillationCollator` in a trainer that derives from `transformers.Trainer`.

    Put it before the trainer: `class MyTrainer(DistillationTrainerMixin, SFTTrainer)`. `data_collator` is the collator,
    the dataset is its `TeacherCache`, or has a column "document" with indices into it. Losses are computed from hidden
    states inside of the model's forward pass, so that DDP, FSDP and mixed precision apply; logits of a whole batch do
    not exist. Each loss is averaged over its items in all micro-batches and processes of a step.

    Raises:
        XtkError: `data_collator` is not a `DistillationCollator`, or the trainer uses DataParallel, tensor, context or
            sequence parallelism, DeepSpeed's ZeRO stage 3 or version 1 of FSDP.
    """

    # The loss is divided by the number of items of the whole step.
    loss_is_scaled_for_ga = True

    # Attributes of the trainer.
    model: Any
    accelerator: Any
    data_collator: Any

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        collator = self.data_collator
        if not isinstance(collator, DistillationCollator):
            raise XtkError(
                f"data_collator is a {type(collator).__name__}, but must be a DistillationCollator",
                where=type(self).__name__,
                hint="pass data_collator=xtk.DistillationCollator(tokenizer, cache, loss)",
            )
        _check_layout(self)
        self.distillation_loss: DistillationLoss = collator.loss
        self._loss_sums: Tensor | None = None
        self._loss_items: Tensor | None = None
        if any(weight.requires_grad and weight.dtype == torch.bfloat16 for weight in self.model.parameters()):
            terminal.note(
                f"{type(self).__name__}: warning: the trained weights are bf16, so updates below 1/256 of a weight are "
                "lost; load the model with dtype=torch.float32 and train with bf16=True to keep them"
            )
        _compute_losses_in_forward(self.model, packing=collator.packing)

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return the total loss of a micro-batch, and with `return_outputs` also {"loss": the same}.

        Args:
            model: the student, perhaps wrapped.
            inputs: a batch of the collator.
            return_outputs: whether to return outputs too; there are no logits.
            num_items_in_batch: denominators of the whole step, from `_get_num_items_in_batch`.
        """
        teacher: TeacherBatch = inputs[TEACHER_KEY]
        ids = inputs["input_ids"]
        cells = self.distillation_loss.scaled_cells(teacher, ids.device, num_items_in_batch)
        total, sums = model(**{"input_ids": ids, _LOSSES_ARGUMENT: (teacher, cells)})
        self.distillation_loss.record(teacher, sums)
        if self.model.training:
            self._count_losses(cells, sums)
        # Gradients are averaged over processes, but the denominators are those of all.
        total = total * self.accelerator.num_processes
        return (total, {"loss": total}) if return_outputs else total

    def log(self, logs: dict[str, float], *arguments: Any, **options: Any) -> None:
        """Add the mean of each loss since the last log to the logs of training."""
        if "loss" in logs and self._loss_sums is not None and self._loss_items is not None:
            both = torch.stack([self._loss_sums, self._loss_items.to(self._loss_sums.device)])
            sums, items = self.accelerator.reduce(both, "sum").tolist()
            terms = self.distillation_loss.terms
            means = {term.name: total / count for term, total, count in zip(terms, sums, items, strict=True) if count}
            logs = {**logs, **{f"loss/{name}": value for name, value in means.items()}}
            self._loss_sums = self._loss_items = None
        super().log(logs, *arguments, **options)  # type: ignore[misc]

    def _count_losses(self, cells: Sequence[LossCells], sums: Tensor) -> None:
        items = torch.tensor([float(cell.denominator) for cell in cells])
        sums = sums.detach().float()
        self._loss_sums = sums if self._loss_sums is None else self._loss_sums + sums
        self._loss_items = items if self._loss_items is None else self._loss_items + items

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Return the denominators of the losses over all micro-batches and processes of a step (collective)."""
        if not batch_samples:
            return None
        counts = self.distillation_loss.num_items(batch_samples)
        return self.accelerator.reduce(counts.to(device), "sum") if self.accelerator.num_processes > 1 else counts

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns = [DOCUMENT_KEY, TEXT_KEY]


class DistillationTrainer(DistillationTrainerMixin, transformers.Trainer):  # type: ignore[misc]
    """`transformers.Trainer` with the losses of a `DistillationCollator`; see `DistillationTrainerMixin`.

    loss = xtk.DistillationLoss("ce:weight=0.3", "byte-kl")
    collator = xtk.DistillationCollator(tokenizer, cache, loss)
    DistillationTrainer(model, args, data_collator=collator, train_dataset=cache).train()
    """


def _check_layout(trainer: Any) -> None:
    """Refuse layouts of the Trainer in which a process has a part of the positions, the vocabulary or a weight.

    The head's weight is read inside of the model's forward pass, where only FSDP2 and DDP have it whole.
    """
    config = getattr(trainer.accelerator, "parallelism_config", None)
    sizes = {name: int(getattr(config, f"{name}_size", 1) or 1) for name in ("tp", "cp", "sp")}
    used = [f"{name}_size={size}" for name, size in sizes.items() if size > 1]
    if trainer.args.n_gpu > 1:
        used.append(f"DataParallel over {trainer.args.n_gpu} GPUs")
    state = trainer.accelerator.state
    if getattr(getattr(state, "deepspeed_plugin", None), "zero_stage", 0) == 3:
        used.append("DeepSpeed ZeRO stage 3")
    if getattr(getattr(state, "fsdp_plugin", None), "fsdp_version", 2) == 1:
        used.append("version 1 of FSDP")
    if used:
        raise XtkError(
            f"DistillationTrainer does not support {', '.join(used)}",
            where="TrainingArguments",
            hint="start one process per GPU (torchrun, accelerate launch) with DDP or FSDP2; "
            "or use xtk distill --parallel",
        )


def _compute_losses_in_forward(model: Any, *, packing: bool) -> None:
    """Make a model's forward pass return (total loss, sums of the losses) if it gets losses.

    Inside of the forward pass, wrappers of data parallelism see all uses of the weights.
    """
    split = split_packed_model(model) if packing else BackboneWithHead(model)
    model.forward = _ForwardWithLosses(model, StudentWithLoss(split))


class _ForwardWithLosses:
    """The `forward` of a student: as before, and with losses as an argument, their values instead of outputs.

    An object instead of a function, so that a copy of the model has a copy of it, which runs the copied model.
    """

    def __init__(self, model: Any, student: StudentWithLoss) -> None:
        self._model, self._student = model, student
        self._replaced = vars(model).get("forward")  # set by another library on this model; None: that of the class

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._forward)  # `generate` reads which arguments the model has

    @property
    def _forward(self) -> Any:
        return self._replaced or MethodType(type(self._model).forward, self._model)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        losses = options.pop(_LOSSES_ARGUMENT, None)
        if losses is None:
            return self._forward(*arguments, **options)
        teacher, cells = losses
        lengths = teacher.document_lengths
        packed = None if lengths is None else PackedSequence(lengths)
        return self._student(options["input_ids"], teacher.loss_positions, cells, packed)
