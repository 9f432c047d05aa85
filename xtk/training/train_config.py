"""Everything that decides what a run gives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from xtk.artifacts.data_file_readers import MAX_DOCUMENT_BYTES
from xtk.errors import XtkError
from xtk.losses import LossSpec
from xtk.models.student_model import StudentModelConfig
from xtk.registry import unknown_name_error
from xtk.teachers.online_teacher import OnlineTeacher
from xtk.tokens.document import Document
from xtk.training.eval_tasks import EvalTask
from xtk.training.lr_schedules import SCHEDULES, lr_factor
from xtk.training.on_policy_config import OnPolicyConfig

LONG_DOCUMENTS = ("refuse", "truncate", "skip")
KD_SCALES = ("none", "ce")
# Recipes of runs that were begun by those who did not know of them have none of these.
KEYS_OMITTED_BY_DEFAULT = (
    "combine_teachers", "teacher_weights", "scale_kd_to", "warmup_steps", "min_lr_rate", "decay_ratio", "ema_decay",
    "early_stopping_patience", "on_policy",
)  # fmt: skip
# How the work is cut, which does not change the result.
PARALLELISM_KEYS = ("per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "packing",
           "max_batch_tokens", "parallel", "fsdp_offload", "teacher_block_steps", "offload_student")  # fmt: skip


@dataclass(frozen=True)
class TrainConfig:
    """A run of `xtk distill`. Lengths are counted in optimisation steps, batches in documents.

    Attributes:
        losses: the terms of the sum, each over its own number of items in the step.
        max_steps: steps; 0 to take `num_train_epochs`.
        num_train_epochs: passes over the cache.
        per_device_train_batch_size: documents in a forward pass of one process.
        gradient_accumulation_steps: forward passes of one process in a step.
        learning_rate, lr_scheduler_type, warmup_ratio, weight_decay, max_grad_norm: AdamW's, as in Hugging Face.
        warmup_steps: how many, instead of a ratio; 0: the ratio says.
        min_lr_rate: the share of the learning rate where cosine_with_min_lr ends.
        decay_ratio: the share of the steps in which warmup_stable_decay falls.
        ema_decay: the student is the exponential moving average of the weights; 0: the weights themselves.
        early_stopping_patience: evaluations in a row that are no better than the best before, after which the run
            ends; the student is the best. 0: it runs to its end, and the student is the last.
        mixed_precision: "no" (fp32) or "bf16": the model in bf16 over fp32 weights; losses are fp32 either way.
        gradient_checkpointing: recompute activations instead of keeping them.
        long_documents: what becomes of documents that are longer than the student's context, or `max_length`.
        seed: of the order of documents and of dropout.
        combine_teachers: how several of them teach together: a key of `TEACHERS`.
        teacher_weights: numbers, or where weights come from; "": equal ones.
        packing: documents stand one behind the other in a row, where the student can read them so.
        max_batch_tokens: of a forward pass of a process; 0: as many as `per_device_train_batch_size` documents have.
        parallel: how processes share the work: `fsdp=2,tp=2`.
        fsdp_offload: weights that are shared out, and the optimizer, stay in the memory of the CPU.
        teacher_block_steps: steps whose documents live teachers score at a time; 0: as many as fit.
        offload_student: the student and its optimizer leave the device while live teachers score.
        scale_kd_to: "ce" to bring what is about teachers to the size of cross-entropy, each step anew; "none".
        preparation: how the model is loaded, and what of it is trained.
        on_policy: how the student writes what it learns from; None: it learns from the data.
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
            raise unknown_name_error("schedule", self.lr_scheduler_type, SCHEDULES)
        if self.mixed_precision not in ("no", "bf16"):
            raise unknown_name_error("precision", self.mixed_precision, ("no", "bf16"))
        if self.scale_kd_to not in KD_SCALES:
            raise unknown_name_error("--scale-kd-to", self.scale_kd_to, KD_SCALES)
        if self.long_documents not in LONG_DOCUMENTS:
            raise unknown_name_error("way with long documents", self.long_documents, LONG_DOCUMENTS)
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
            if getattr(self, name) < 1:
                raise XtkError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it is 1 or more")
        if self.max_steps < 0 or (self.max_steps == 0 and self.num_train_epochs <= 0):
            raise XtkError("there is nothing to train: give --max-steps or --num-train-epochs above 0")
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
                raise XtkError(
                    f"--{name.replace('_', '-')} is {getattr(self, name)}; it is a number from {low} to {high}"
                )
        if self.max_batch_tokens < 0:
            raise XtkError(f"--max-batch-tokens is {self.max_batch_tokens}; it is 0 or more")
        if self.teacher_block_steps < 0:
            raise XtkError(f"--teacher-block-steps is {self.teacher_block_steps}; it is 0 or more")
        if self.max_length is not None and self.max_length < 2:
            raise XtkError(f"--max-length is {self.max_length}; a document has at least 2 tokens")
        if not 0 <= self.ema_decay < 1:
            raise XtkError(f"--ema-decay is {self.ema_decay}; it is a number from 0 to below 1, such as 0.999")
        if not (math.isfinite(self.learning_rate) and self.learning_rate >= 0):
            raise XtkError(f"--learning-rate is {self.learning_rate}; it must be a number from 0 (only measure) on")

    def num_steps(self, documents: int, num_data_shards: int) -> int:
        """Return the optimisation steps of the run, of which each prompt is as many documents as it is taken."""
        if self.max_steps:
            return self.max_steps
        size = self.effective_documents_per_step(documents, num_data_shards)
        if self.on_policy is not None:
            documents *= self.on_policy.num_generations * self.on_policy.num_iterations
        return max(1, math.ceil(self.num_train_epochs * documents / size))

    def effective_documents_per_step(self, documents: int, num_data_shards: int) -> int:
        """Return the documents of one optimisation step: no more than an epoch has, so that none comes twice.

        Args:
            documents: of the data; with `on_policy`, prompts, of which each gives several documents.
            num_data_shards: processes that have documents of their own.
        """
        whole = documents * (1 if self.on_policy is None else self.on_policy.num_generations)
        return min(self.documents_per_step(num_data_shards), whole)

    def documents_per_step(self, num_data_shards: int) -> int:
        """Return the documents that one optimisation step has room for, over all data parallel processes."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * num_data_shards

    def learning_rate_at(self, step: int, num_steps: int) -> float:
        """Return the learning rate of step `step` of `steps`, counted from 0: a warm-up, then the schedule."""
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
        """Return what makes two runs the same, however many processes share the work."""
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
    """What a run tells on its way, and what it keeps; nothing here changes the student.

    Attributes:
        logging_steps: steps between two lines of metrics.
        save_steps: steps between two checkpoints; 0: none.
        save_total_limit: checkpoints kept.
        report_to: names of trackers that Accelerate knows.
        eval_documents: held-out documents of plain data, read before the start. Caches are among the inputs.
        eval_tasks: what the student is asked at each evaluation, read before the start.
        eval_steps: steps between two evaluations.
        eval_on_start: evaluate before the first step too.
        dataloader_num_workers: processes that make batches ahead; 0: a thread does.
        max_skipped_steps: in a row whose loss or gradient is no number; more end the run.
        deadline: of `time.monotonic()`, after which the run saves and ends.
        ddp_timeout: seconds after which a process that waits for another one gives up.
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
    """Where a run's inputs lie and its outputs go.

    Attributes:
        student: a local model folder.
        adapter: the folder of an adapter of this model that is trained on; None: there is none.
        data: of teachers, each a folder or a URL; or plain data, for losses that need no teacher and for live ones.
        projections: projection files; those that losses need beside them are built.
        output: the run's folder.
        columns: names of the columns of plain data.
        eval_caches: of the same teachers on held-out documents, each a folder or a URL.
        online_teachers: who score the data while the student trains, in the place of caches.
        max_document_bytes: the largest document of plain data that is read.
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
