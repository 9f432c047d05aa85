"""Options of `xtk distill`, and of `xtk distill-on-policy`, which has them and its own; by heading of their help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from xtk.options.declaration import (
    INPUTS,
    REPORTING,
    REQUIRED,
    CommandOptions,
    Heading,
    argument,
    option,
    output_option,
    redeclared,
)
from xtk.options.shared import (
    MODEL_DTYPES,
    ConfigOption,
    CorpusOptions,
    DocumentColumnOptions,
    ForceOption,
    JsonOption,
    PromptOptions,
    QuietOption,
    RewardOptions,
    SamplingOptions,
    StartTokenOption,
    TrustRemoteCodeOption,
)
from xtk.options.training_options import (
    LoggingOptions,
    OnPolicyOptions,
    OptimizationOptions,
    ParallelismOptions,
    RegionOptions,
    SequenceOptions,
    StudentModelOptions,
    TeacherUseOptions,
)
from xtk.rollouts import GENERATORS


@dataclass(frozen=True, kw_only=True)
class DistillOptions(
    CorpusOptions,
    DocumentColumnOptions,
    SequenceOptions,
    RegionOptions,
    TeacherUseOptions,
    OptimizationOptions,
    StudentModelOptions,
    ParallelismOptions,
    LoggingOptions,
    StartTokenOption,
    TrustRemoteCodeOption,
    ForceOption,
    JsonOption,
    QuietOption,
    CommandOptions,
):
    """Options of `xtk distill`."""

    MAIN_OPTIONS: ClassVar[Sequence[str]] = (
        "output", "loss", "teacher", "projection", "max_steps", "learning_rate", "per_device_train_batch_size",
        "lora_r", "eval_data", "save_steps", "config",
    )  # fmt: skip
    HEADINGS: ClassVar[Sequence[Heading]] = (
        Heading("Data", (CorpusOptions, DocumentColumnOptions, SequenceOptions, "dataloader_num_workers")),
        Heading("Teacher", ("teacher", "reference", TeacherUseOptions)),
        Heading("Objective", ("loss", "projection", "scale_kd_to", RegionOptions)),
        Heading("Optimization", (OptimizationOptions, "max_skipped_steps", "torch_compile")),
        Heading("Student", (StudentModelOptions, "start_token", "trust_remote_code")),
        Heading("Parallelism", ("num_processes", ParallelismOptions, "devices", "ddp_timeout")),
        Heading(
            "Checkpoints and logging",
            (LoggingOptions, "max_seconds", "report_to", "eval_data", "eval_tasks", "early_stopping_patience"),
        ),
    )  # fmt: skip

    student: str = argument(
        REQUIRED,
        "Student: a folder, GGUF file, hub id or PEFT adapter; - reads its path from standard input.",
        metavar="STUDENT",
        is_path=True,
        effect=INPUTS,
    )
    cache: tuple[str, ...] = argument(
        REQUIRED,
        "Teacher caches, or plain data for --teacher or --loss ce alone. - reads one path from standard input.",
        metavar="CACHE...",
        is_path=True,
        effect=INPUTS,
    )
    output: str = output_option(
        "Output folder of the run: the trained student, checkpoints and metrics.", "FOLDER", is_recorded=False
    )
    projection: tuple[str, ...] = option(
        (),
        "Projection file, one per teacher in any order; - reads one from standard input. Repeatable; auto "
        "(default): built with --method multitoken if a loss needs one.",
        metavar="PATH|auto",
        is_path=True,
        effect=INPUTS,
    )
    loss: tuple[str, ...] = option(
        (),
        "Loss term with options, such as ce:weight=0.5 or p-kl:whitespace=mask; repeat it for a sum. "
        "auto (default): one that fits each teacher; docs/reference/losses.md lists all.",
        metavar="NAME[:KEY=VALUE,...]",
        effect=INPUTS,
    )
    teacher: tuple[str, ...] = option(
        (),
        "Model that scores plain data during training; self: the student with its current weights. Repeatable; "
        "options as in cache-teacher, such as MODEL:top_k=64,dtype=bfloat16.",
        metavar="MODEL[:KEY=VALUE,...]",
        effect=INPUTS,
    )
    reference: tuple[str, ...] = option(
        (),
        "Small model of each teacher's family (or its cache, if teachers are caches), in their order. For "
        "--teacher-shift and policy-gradient:offset.",
        metavar="MODEL[:KEY=VALUE,...]|CACHE",
        effect=INPUTS,
        identity_if_set=True,
    )
    devices: str = option(
        "",
        "Separate devices (indices on this machine), such as teacher=1; on-policy: rollout=2+3,teacher=1. A role "
        "left out time-shares the student's devices.",
        metavar="ROLE=N[+N...],...",
    )
    max_seconds: float = option(
        0,
        "Time limit in seconds: then save a checkpoint and exit with code 75; 0: none. The same command resumes.",
        min=0,
        is_recorded=False,
    )
    eval_data: tuple[str, ...] = option(
        (),
        "Held-out documents, for bits per byte and CE; or a cache of them per teacher (repeat the option). Caches "
        "add all losses and the top-1 agreement with the teachers.",
        metavar="DATA|CACHE",
        is_path=True,
        effect=INPUTS,
    )
    eval_tasks: tuple[str, ...] = option(
        (),
        "Problems or tasks evaluated during training, with options of evaluate-answers or evaluate-tasks. Repeatable. "
        "Examples: test.jsonl:reward=gsm8k,max_prompts=200 and arc_easy:max_prompts=200.",
        metavar="DATA:reward=REWARD[,KEY=VALUE,...]|TASK,...[:KEY=VALUE,...]",
        effect=REPORTING,
    )
    report_to: tuple[str, ...] = option(
        (),
        "Experiment trackers of Accelerate, such as tensorboard, wandb or trackio.",
        metavar="NAME,...",
        effect=REPORTING,
    )
    num_processes: int = option(1, "Number of processes on this machine, each with one device.", min=1)
    config: str = redeclared(
        ConfigOption,
        "config",
        "",
        help="YAML or JSON file with values of these options, such as the recipe.json of another run. Options on "
        "the command line override it.",
    )


@dataclass(frozen=True, kw_only=True)
class OnPolicyDistillOptions(PromptOptions, SamplingOptions, OnPolicyOptions, RewardOptions, DistillOptions):
    """Options of `xtk distill-on-policy`."""

    MAIN_OPTIONS = (
        "output",
        "teacher",
        "reward",
        "loss",
        "num_generations",
        "max_completion_length",
        "temperature",
        "max_steps",
        "learning_rate",
        "rollout_backend",
        "eval_data",
    )
    HEADINGS = (
        *DistillOptions.HEADINGS[:-2],
        Heading(
            "On-policy",
            (
                PromptOptions, SamplingOptions, OnPolicyOptions, RewardOptions, "rollout_backend", "rollout_engine",
                "rollout_server", "rollout_dtype", "rollout_batch_tokens",
            ),
        ),
        *DistillOptions.HEADINGS[-2:],
    )  # fmt: skip

    cache: tuple[str, ...] = redeclared(
        DistillOptions, "cache", help="Data with prompts. - reads one path from standard input.", metavar="DATA..."
    )
    rollout_backend: str = option(
        "transformers",
        "Generation backend; weights are synced to vllm and server first. transformers: in the training process; "
        "vllm: a subprocess; server: a vLLM server.",
        metavar=f"[{'|'.join(GENERATORS)}]",
    )
    rollout_engine: tuple[str, ...] = option(
        (), "Engine argument of --rollout-backend vllm. Repeatable.", metavar="NAME=VALUE"
    )
    rollout_server: tuple[str, ...] = option(
        (),
        "Server URL of --rollout-backend server, such as http://localhost:8000/v1. Repeatable; "
        "docs/how-to/on-policy-vllm.md starts one.",
        metavar="URL",
    )
    rollout_dtype: str = option(
        "auto",
        "Computation data type of --rollout-backend vllm; auto: that in which the student trains.",
        choices=MODEL_DTYPES,
    )
    rollout_batch_tokens: int = option(
        16384, "Tokens of prompts and completions generated at once, padding included.", min=1
    )


DISTILL_COMMANDS: dict[str, type[DistillOptions]] = {
    "distill": DistillOptions,
    "distill-on-policy": OnPolicyDistillOptions,
}


def distill_command(*, on_policy: bool) -> str:
    """Return the name of the command of a kind of runs."""
    return "distill-on-policy" if on_policy else "distill"
