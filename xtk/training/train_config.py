"""Configuration of a run: training options (which decide the result), logging options and paths."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from xtk.artifacts.data_file_readers import MAX_DOCUMENT_BYTES
from xtk.errors import XtkError
from xtk.losses import LossSpec
from xtk.models.student_model_setup import StudentModelConfig
from xtk.name_registry import unknown_name_error
from xtk.teachers.online_teacher import OnlineTeacher
from xtk.tokens.document import Document
from xtk.training.lr_schedules import SCHEDULES, lr_factor
from xtk.training.on_policy_config import OnPolicyConfig
from xtk.training.task_evaluation import EvalTask

LONG_DOCUMENTS = ("refuse", "truncate", "skip")
KD_SCALES = ("none", "ce")
# Newer options, left out of a run's identity at their default so that older runs can be resumed.
KEYS_OMITTED_BY_DEFAULT = (
    "combine_teachers", "teacher_weights", "scale_kd_to", "warmup_steps", "min_lr_rate", "decay_ratio", "ema_decay",
    "early_stopping_patience", "on_policy",
)  # fmt: skip
# Options of batching and parallelism, which do not change the result.
PARALLELISM_KEYS = ("per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "packing",
           "max_batch_tokens", "parallel", "fsdp_offload", "teacher_block_steps", "offload_student")  # fmt: skip


@dataclass(frozen=True)
class TrainConfig:
    """Training options of `xtk distill`. Lengths are in optimizer steps, batch sizes in documents.

    Attributes:
        losses: the losses to add, each averaged over its tokens or spans in the step.
        max_steps: number of steps; 0: `num_train_epochs` decides.
        num_train_epochs: passes over the data.
        per_device_train_batch_size: documents per forward pass of one process.
        gradient_accumulation_steps: forward passes of one process per step.
        learning_rate, lr_scheduler_type, warmup_ratio, weight_decay, max_grad_norm: as in Hugging Face; AdamW.
        warmup_steps: steps of warm-up; 0: `warmup_ratio` decides.
        min_lr_rate: final fraction of the learning rate with cosine_with_min_lr.
        decay_ratio: fraction of the steps in which warmup_stable_decay decays.
        ema_decay: decay of the exponential moving average that becomes the student; 0: the student is the last weights.
        early_stopping_patience: end the run after this many evaluations in a row without improvement; the student is
            the best one. 0: no early stopping.
        mixed_precision: "no" (fp32) or "bf16" (autocast over fp32 weights); losses are computed in fp32.
        gradient_checkpointing: recompute activations instead of storing them.
        long_documents: what to do with documents longer than the student's context or `max_length`.
        seed: seed of the document order, of sampling and of dropout.
        combine_teachers: how several teachers are combined: a key of `COMBINATION_METHODS`.
        teacher_weights: fixed weights, or the score from which they are computed; "": equal weights.
        packing: pack documents into one sequence, if the student's architecture supports it.
        max_batch_tokens: maximum tokens per forward pass of one process; 0: `per_device_train_batch_size` decides.
        parallel: parallel layout: `fsdp=2,tp=2`.
        fsdp_offload: keep sharded weights and optimizer state in CPU memory.
        teacher_block_steps: steps per block that online teachers score at a time; 0: chosen automatically.
        offload_student: move the student and its optimizer state to the CPU while online teachers score.
        scale_kd_to: "ce": rescale the distillation loss to the size of the CE loss at every step; "none".
        preparation: how the model is loaded, and which weights are trained.
        on_policy: options of on-policy training; None: train on the data.
    """

    losses: tuple[LossSpec, ...]
    max_steps: int = 0
    num_train_epochs: float = 1.0
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    learning_rate: float = 5e-5
    lr_scheduler_type: str = "cosine"
    warmup_ratio: float = 0.05
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    mixed_precision: str = "no"
    gradient_checkpointing: bool = False
    long_documents: str = "refuse"
    max_length: int | None = None
    seed: int = 42
    combine_teachers: str = "sum"
    teacher_weights: str = ""
    packing: bool = True
    max_batch_tokens: int = 0
    parallel: str = ""
    fsdp_offload: bool = False
    teacher_block_steps: int = 0
    offload_student: bool = False
    scale_kd_to: str = "none"
    warmup_steps: int = 0
    min_lr_rate: float = 0.1
    decay_ratio: float = 0.1
    ema_decay: float = 0.0
    early_stopping_patience: int = 0
    preparation: StudentModelConfig = field(default_factory=StudentModelConfig)
    on_policy: OnPolicyConfig | None = None

    def __post_init__(self) -> None:
        if self.lr_scheduler_type not in SCHEDULES:
            raise unknown_name_error("learning-rate schedule", self.lr_scheduler_type, SCHEDULES)
        if self.mixed_precision not in ("no", "bf16"):
            raise unknown_name_error("value of --mixed-precision", self.mixed_precision, ("no", "bf16"))
        if self.scale_kd_to not in KD_SCALES:
            raise unknown_name_error("value of --scale-kd-to", self.scale_kd_to, KD_SCALES)
        if self.long_documents not in LONG_DOCUMENTS:
            raise unknown_name_error("value of --long-documents", self.long_documents, LONG_DOCUMENTS)
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
            if getattr(self, name) < 1:
                raise XtkError(
                    f"--{name.replace('_', '-')} is {getattr(self, name)}, but must be at least 1",
                    hint=f"use --{name.replace('_', '-')} 1 or more",
                )
        if self.max_steps < 0 or (self.max_steps == 0 and self.num_train_epochs <= 0):
            given = f"--max-steps is {self.max_steps} and --num-train-epochs is {self.num_train_epochs:g}"
            raise XtkError(
                f"nothing would be trained with {given}", hint="use --max-steps or --num-train-epochs above 0"
            )
        limits = {
            "num_train_epochs": (0, math.inf),
            "warmup_ratio": (0, 1),
            "warmup_steps": (0, math.inf),
            "min_lr_rate": (0, 1),
            "decay_ratio": (0, 1),
            "early_stopping_patience": (0, math.inf),
            "weight_decay": (0, math.inf),
            "max_grad_norm": (0, math.inf),
            "seed": (0, 2**63),
        }
        for name, (low, high) in limits.items():
            if not (low <= getattr(self, name) <= high and math.isfinite(getattr(self, name))):
                bounds = f"at least {low}" if high == math.inf else f"between {low} and {high}"
                raise XtkError(
                    f"--{name.replace('_', '-')} is {getattr(self, name)}, but must be {bounds}",
                    hint=f"use --{name.replace('_', '-')} with a number {bounds}",
                )
        if self.max_batch_tokens < 0:
            raise XtkError(
                f"--max-batch-tokens is {self.max_batch_tokens}, but must be at least 0",
                hint="use --max-batch-tokens 0 to limit a forward pass by --per-device-train-batch-size only",
            )
        if self.teacher_block_steps < 0:
            raise XtkError(
                f"--teacher-block-steps is {self.teacher_block_steps}, but must be at least 0",
                hint="use --teacher-block-steps 0 for an automatic number",
            )
        if self.max_length is not None and self.max_length < 2:
            raise XtkError(
                f"--max-length is {self.max_length}, but must be at least 2 tokens",
                hint="use --max-length 0 for the student's context length",
            )
        if not 0 <= self.ema_decay < 1:
            raise XtkError(
                f"--ema-decay is {self.ema_decay}, but must be at least 0 and below 1",
                hint="use --ema-decay 0.999, or 0 for no averaging",
            )
        if not (math.isfinite(self.learning_rate) and self.learning_rate >= 0):
            raise XtkError(
                f"--learning-rate is {self.learning_rate}, but must be a finite number of at least 0",
                hint="use for example --learning-rate 5e-5, or 0 to evaluate without training",
            )

    def num_steps(self, documents: int, num_data_shards: int) -> int:
        """Return the number of optimizer steps; on-policy, each prompt counts once per completion and pass."""
        if self.max_steps:
            return self.max_steps
        size = self.effective_documents_per_step(documents, num_data_shards)
        if self.on_policy is not None:
            documents *= self.on_policy.num_generations * self.on_policy.num_iterations
        return max(1, math.ceil(self.num_train_epochs * documents / size))

    def effective_documents_per_step(self, documents: int, num_data_shards: int) -> int:
        """Return the documents per optimizer step, at most those of an epoch, so that a step has no duplicates.

        Args:
            documents: documents of the data; on-policy, number of prompts.
            num_data_shards: number of processes with different documents.
        """
        per_epoch = documents * (1 if self.on_policy is None else self.on_policy.num_generations)
        return min(self.documents_per_step(num_data_shards), per_epoch)

    def documents_per_step(self, num_data_shards: int) -> int:
        """Return the documents per optimizer step that the batch options ask for, over all data parallel processes."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * num_data_shards

    def learning_rate_at(self, step: int, num_steps: int) -> float:
        """Return the learning rate of a step (counted from 0): warm-up, then the schedule."""
        warmup = self.warmup_steps or round(self.warmup_ratio * num_steps)
        return self.learning_rate * lr_factor(
            self.lr_scheduler_type,
            step,
            num_steps,
            warmup,
            min_lr_rate=self.min_lr_rate,
            decay_ratio=self.decay_ratio,
        )

    def identity(self, num_data_shards: int) -> dict[str, Any]:
        """Return the options that decide whether two runs are the same, for any number of processes."""
        content = asdict(self)
        for one in fields(self):
            if one.name in KEYS_OMITTED_BY_DEFAULT and content[one.name] == one.default:
                del content[one.name]
        del content["preparation"]
        if prepared := self.preparation.identity_options():
            content["student_model"] = prepared
        if self.on_policy is not None:
            content["on_policy"] = self.on_policy.identity()
        content["losses"] = [str(loss) for loss in self.losses]
        content["documents_per_step"] = self.documents_per_step(num_data_shards)
        for name in PARALLELISM_KEYS:
            del content[name]
        return content


@dataclass(frozen=True)
class LoggingConfig:
    """Options of logging, evaluation and checkpoints; they do not change the student.

    Attributes:
        logging_steps: steps between logged metrics.
        save_steps: steps between checkpoints; 0: none.
        save_total_limit: maximum number of checkpoints to keep.
        report_to: names of experiment trackers, as in Accelerate.
        eval_documents: held-out documents of plain data, read before the start. Held-out caches are in `RunPaths`.
        eval_tasks: tasks of each evaluation, read before the start.
        eval_steps: steps between evaluations.
        eval_on_start: evaluate before the first step too.
        dataloader_num_workers: worker processes that build batches ahead of time; 0: one thread.
        max_skipped_steps: maximum consecutive steps whose loss or gradient is not finite; more end the run.
        deadline: value of `time.monotonic()` after which the run saves a checkpoint and ends.
        ddp_timeout: timeout of collective operations in seconds.
    """

    logging_steps: int = 10
    save_steps: int = 500
    save_total_limit: int = 2
    report_to: tuple[str, ...] = ()
    eval_documents: tuple[Document, ...] = ()
    eval_tasks: tuple[EvalTask, ...] = ()
    eval_steps: int = 0
    eval_on_start: bool = False
    dataloader_num_workers: int = 0
    max_skipped_steps: int = 10
    deadline: float = math.inf
    ddp_timeout: int = 600


@dataclass(frozen=True)
class RunPaths:
    """Inputs and output folder of a run.

    Attributes:
        student: local model folder.
        adapter: folder of an adapter of this model to continue training; None: none.
        data: teacher caches (folders or URLs); or plain data, for losses without a teacher or for online teachers.
        projections: projection files; other projections that losses need are built.
        output: the run folder.
        columns: column names of plain data.
        eval_caches: caches of the same teachers on held-out documents (folders or URLs).
        online_teachers: teachers that score the data during training, instead of caches.
        max_document_bytes: maximum size of a document of plain data.
    """

    student: Path
    data: tuple[str, ...]
    projections: tuple[Path, ...]
    output: Path
    columns: Mapping[str, str] = field(default_factory=dict)
    adapter: Path | None = None
    eval_caches: tuple[str, ...] = ()
    online_teachers: tuple[OnlineTeacher, ...] = ()
    max_document_bytes: int = MAX_DOCUMENT_BYTES
