"""Configuration of a run: training options (which decide the result), logging options and paths."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from xtk.data.corpus_reader import CorpusFingerprint
from xtk.errors import XtkError
from xtk.losses import AUTO_LOSS
from xtk.losses.spec import LossSpec
from xtk.models.precision import resolve_batch_tokens, resolve_mixed_precision
from xtk.models.resolver import ModelRef
from xtk.models.student_model_setup import StudentModelConfig
from xtk.name_registry import unknown_name_error
from xtk.options.declaration import SPEED, Option, check_options, declared_options
from xtk.options.shared import MAX_DOCUMENT_BYTES, StartTokenOption
from xtk.options.spec_parsing import parse_number, parse_pairs
from xtk.options.training_options import (
    LoggingOptions,
    OptimizationOptions,
    ParallelismOptions,
    RegionOptions,
    SequenceOptions,
    TeacherUseOptions,
)
from xtk.teachers.online_teacher import OnlineTeacher
from xtk.text.chat.conversation_tokens import MARKUP, REGIONS
from xtk.text.chat.regions import RegionWeights
from xtk.text.document import Document
from xtk.training.on_policy_config import OnPolicyConfig
from xtk.training.task_evaluation import EvalTask

SCHEDULES = ("cosine", "linear", "constant", "cosine_with_min_lr", "inverse_sqrt", "warmup_stable_decay")
# The default of transformers for inverse_sqrt without warm-up.
INVERSE_SQRT_TIMESCALE = 10_000


def lr_factor(
    schedule: str, step: int, num_steps: int, warmup_steps: int, *, min_lr_rate: float = 0.0, decay_ratio: float = 0.0
) -> float:
    """Return the factor of the learning rate at a step, counted from 0.

    The factor is above 0 at the first step and the last one (at least `min_lr_rate`), so that no step is wasted.
    warmup_stable_decay decays as a cosine in the fraction `decay_ratio` of the steps.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "inverse_sqrt":
        scale = warmup_steps or INVERSE_SQRT_TIMESCALE
        return math.sqrt(scale / (step - warmup_steps + scale))
    if schedule == "warmup_stable_decay":
        decay = max(1, min(num_steps - warmup_steps, round(decay_ratio * num_steps)))
        return _cosine(max(0, step - (num_steps - decay)) / decay)
    done = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    if schedule == "cosine_with_min_lr":
        return min_lr_rate + (1 - min_lr_rate) * _cosine(done)
    return {"cosine": _cosine(done), "linear": 1 - done, "constant": 1.0}[schedule]


def _cosine(done: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True, kw_only=True)
class TrainConfig(
    StartTokenOption, SequenceOptions, RegionOptions, TeacherUseOptions, OptimizationOptions, ParallelismOptions
):
    """Training options of `xtk distill`. Lengths are in optimizer steps, batch sizes in documents."""

    losses: tuple[LossSpec, ...]  # the losses to add, each averaged over its tokens or spans in the step
    # How the model is loaded, and which weights are trained
    preparation: StudentModelConfig = field(default_factory=StudentModelConfig)
    on_policy: OnPolicyConfig | None = None  # options of on-policy training; None: train on the data

    def __post_init__(self) -> None:
        # Decided here, so that identity and recipe have what the run does, on any device.
        precision = resolve_mixed_precision(self.mixed_precision)
        object.__setattr__(self, "mixed_precision", precision)
        object.__setattr__(self, "max_batch_tokens", resolve_batch_tokens(self.max_batch_tokens))
        if self.lr_scheduler_type not in SCHEDULES:
            raise unknown_name_error("learning-rate schedule", self.lr_scheduler_type, SCHEDULES)
        check_options(self)
        if self.max_steps == 0 and self.num_train_epochs <= 0:
            given = f"--max-steps is {self.max_steps} and --num-train-epochs is {self.num_train_epochs:g}"
            raise XtkError(
                f"nothing would be trained with {given}", hint="use --max-steps or --num-train-epochs above 0"
            )
        if self.max_length == 1:
            raise XtkError(
                "--max-length is 1, but must be at least 2 tokens",
                hint="use --max-length 0 for the student's context length",
            )

        if self.advantage_clip and not any(loss.name == "policy-gradient" for loss in self.losses):
            raise XtkError(
                "--advantage-clip bounds advantages, but no loss has any",
                hint="use it with --loss policy-gradient, or --region-weights",
            )
        _ = self.regions  # refuses invalid values
        is_chosen = MARKUP in self.train_on and set(self.train_on) != set(REGIONS)
        if is_chosen and not any(loss.name in ("ce", AUTO_LOSS) for loss in self.losses):
            raise XtkError(
                "--train-on markup has no effect without --loss ce: a teacher has other text there",
                hint="add --loss ce, or remove markup",
            )

    @cached_property
    def regions(self) -> RegionWeights:
        """The weights of regions."""
        return parse_region_options(self)

    def num_steps(self, documents: int, num_data_shards: int) -> int:
        """Return the number of optimizer steps; on-policy, each prompt counts once per completion and pass."""
        if self.max_steps:
            return self.max_steps
        size = self.effective_documents_per_step(documents, num_data_shards)
        if self.on_policy is not None:
            documents *= self.on_policy.num_generations * self.on_policy.num_iterations
        return max(1, math.ceil(self.num_train_epochs * documents / size))

    def effective_documents_per_step(self, documents: int, num_data_shards: int) -> int:
        """Return the documents (on-policy: prompts) per step, at most those of an epoch, without duplicates."""
        per_epoch = documents * (1 if self.on_policy is None else self.on_policy.num_generations)
        return min(self.documents_per_step(num_data_shards), per_epoch)

    def documents_per_step(self, num_data_shards: int) -> int:
        """Return the documents per optimizer step of the batch options, over all data parallel processes."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * num_data_shards

    def learning_rate_at(self, step: int, num_steps: int) -> float:
        """Return the learning rate of a step (counted from 0): warm-up, then the schedule."""
        warmup = self.warmup_steps or round(self.warmup_ratio * num_steps)
        return self.learning_rate * lr_factor(
            self.lr_scheduler_type, step, num_steps, warmup, min_lr_rate=self.min_lr_rate, decay_ratio=self.decay_ratio
        )

    def identity(self, num_data_shards: int) -> dict[str, Any]:
        """Return the options that decide whether two runs are the same, for any number of processes."""
        content = asdict(self)
        for one, declared in declared_options(type(self)):
            is_default = content[one.name] == one.default
            if declared.effect == SPEED or (declared.identity_if_set and is_default):
                del content[one.name]
        content["max_length"] = self.max_length or None
        del content["preparation"], content["on_policy"]
        if prepared := self.preparation.identity_options():
            content["student_model"] = prepared
        if self.on_policy is not None:
            content["on_policy"] = self.on_policy.identity()
        content["losses"] = [str(loss) for loss in self.losses]
        content["documents_per_step"] = self.documents_per_step(num_data_shards)
        return content


@dataclass(frozen=True, kw_only=True)
class LoggingConfig(LoggingOptions):
    """Options of logging, evaluation and checkpoints; they do not change the student."""

    report_to: tuple[str, ...] = ()  # names of experiment trackers, as in Accelerate
    # Held-out documents of plain data, read before the start. Held-out caches are in `RunPaths`.
    eval_documents: tuple[Document, ...] = ()
    eval_tasks: tuple[EvalTask, ...] = ()  # tasks of each evaluation, read before the start
    deadline: float = math.inf  # value of `time.monotonic()` after which the run saves a checkpoint and ends

    @cached_property
    def eval_documents_fingerprint(self) -> str:
        """The fingerprint of `eval_documents`."""
        return str(CorpusFingerprint.of(self.eval_documents))


@dataclass(frozen=True)
class RunPaths:
    """Inputs and output folder of a run."""

    student: ModelRef  # the model; an adapter is trained further
    # Teacher caches (folders or URLs); or plain data, for losses without a teacher or for online teachers
    data: tuple[str, ...]
    projections: tuple[Path, ...]  # projection files; other projections that losses need are built
    output: Path  # the run folder
    columns: Mapping[str, str] = field(default_factory=dict)  # column names of plain data
    eval_caches: tuple[str, ...] = ()  # caches of the same teachers on held-out documents (folders or URLs)
    online_teachers: tuple[OnlineTeacher, ...] = ()  # teachers that score the data during training, instead of caches
    # References of online teachers, one per teacher, then with `policy-gradient:offset` the student before the run
    references: tuple[OnlineTeacher, ...] = ()
    reference_caches: tuple[str, ...] = ()  # caches of references, one per teacher cache
    max_document_bytes: int = MAX_DOCUMENT_BYTES  # maximum size of a document of plain data


_WEIGHT, _BOUND = Option("", above=0, max=1e6), Option("", min=0)


def parse_region_options(options: RegionOptions) -> RegionWeights:
    """Return the weights of regions."""
    if not options.train_on:
        raise XtkError("--train-on has no region", hint=f"use one or more of {', '.join(REGIONS)}")
    weights = _parse_numbers(options.region_weights, "--region-weights", "weight", _WEIGHT)
    bounds = _parse_numbers(options.advantage_clip, "--advantage-clip", "bound", _BOUND)
    return RegionWeights(options.train_on, weights, bounds)


def _parse_numbers(text: str, flag: str, what: str, limits: Option) -> dict[str, float]:
    if not text:
        return {}
    known = [name.replace("-", "_") for name in REGIONS]
    pairs = parse_pairs(text, f"{flag} {text}", known, noun="region")
    return {
        name: float(parse_number(value, float, f"the {what} of {name} in {flag}", "for example answer=0.5", limits))
        for name, value in pairs
    }
