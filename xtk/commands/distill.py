"""`xtk distill` and `xtk distill-on-policy`: train a student from caches, online teachers or its own rollouts."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from xtk import terminal
from xtk.commands.distill_options import DistillOptions, OnPolicyDistillOptions
from xtk.errors import require_package
from xtk.options.declaration import flags_of_set_options, options_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xtk.teachers.online_teacher import OnlineTeacher
    from xtk.text.document import Document
    from xtk.training.on_policy_config import OnPolicyConfig
    from xtk.training.train_config import LoggingConfig, RunPaths, TrainConfig


def distill(options: DistillOptions) -> None:
    """Train a student from teacher caches or online teachers.

    After an interruption, the same command resumes from the last checkpoint.

    Examples:
        xtk distill ./student cache --eval-data test.jsonl -o run
        xtk distill ./student corpus.jsonl --teacher ./teacher --max-steps 500 -o run
    """
    _distill(options)


def distill_on_policy(options: OnPolicyDistillOptions) -> None:
    """Train a student on completions that it samples, scored by teachers.

    --reward also trains on rewards of the completions. After an interruption, the same command resumes from the last
    checkpoint.

    Examples:
        xtk distill-on-policy ./student prompts.jsonl --teacher ./teacher --num-generations 4 -o run
        xtk distill-on-policy ./student gsm8k.jsonl --teacher ./teacher --reward gsm8k -o run
    """
    _distill(options)


def _distill(options: DistillOptions) -> None:
    started = time.monotonic()
    if options.lora_r:
        require_package("peft", "LoRA adapters need")  # before the imports, which take seconds
    from xtk.commands.recorded_run_options import check_rerun, recipe_options
    from xtk.parallel.distributed_launch import is_worker, launch, world_size
    from xtk.parallel.graceful_stop import exit_resumable_on_signal
    from xtk.parallel.parallel_config import parse_parallel
    from xtk.subprocesses import die_with_parent
    from xtk.text.tokenizer import Tokenizer
    from xtk.training.distill import distill as train
    from xtk.training.distill import run_identity
    from xtk.training.kinds.open_inputs import open_inputs
    from xtk.training.task_evaluation import check_supports_eval_tasks

    if is_worker():
        terminal.set_main_process(os.environ.get("RANK", "0") == "0")
    # A process that only launches workers checks the inputs; the workers print everything else.
    terminal.set_quiet(options.quiet or (options.num_processes > 1 and not is_worker()))
    if "-" in options.eval_data:
        raise typer.BadParameter("--eval-data cannot be read from standard input (-); use a file or a cache")
    projections = [path for path in options.projection if path != "auto"]
    if [options.student, *options.cache, *projections].count("-") > 1:
        raise typer.BadParameter("only one of STUDENT, CACHE and --projection can be read from standard input (-)")
    piped = terminal.path_argument("-") if "-" in (options.student, *options.cache, *projections) else ""
    places, recipe, reporting = read_configs(options, piped, started)
    options = with_resolved_defaults(options, recipe, reporting)
    processes = world_size() if is_worker() else options.num_processes
    layout = parse_parallel(recipe.parallel, processes)
    check_supports_eval_tasks(reporting.eval_tasks, layout)
    student = places.student
    tokenizer = Tokenizer(student.folder, start_token=recipe.start_token, adapter=student.adapter)
    inputs = open_inputs(places, recipe, tokenizer)
    kept = recipe_options(options, piped, processes)
    check_rerun(options, kept, run_identity(recipe, inputs, layout.num_data_shards, reporting))
    exit_resumable_on_signal()
    if is_worker():
        die_with_parent(signal_number=signal.SIGKILL)
    elif processes > 1:
        launch(options.num_processes, _for_workers(sys.argv[1:], piped))
        return
    content = train(
        places,
        recipe,
        reporting,
        inputs,
        force=options.force,
        options=kept,
    )
    terminal.result_artifact(
        {"path": options.output, "kind": "student", "steps": content["steps"], "metrics": content["metrics"]},
        as_json=options.as_json,
    )


def with_resolved_defaults(
    options: DistillOptions, recipe: TrainConfig, logging_config: LoggingConfig
) -> DistillOptions:
    """Return options with the defaults that depend on this machine, for the recipe."""
    options = replace(
        options,
        mixed_precision=recipe.mixed_precision,
        max_batch_tokens=recipe.max_batch_tokens,
        dataloader_num_workers=logging_config.dataloader_num_workers,
    )
    if isinstance(options, OnPolicyDistillOptions) and recipe.on_policy and recipe.on_policy.backend == "vllm":
        return replace(options, rollout_dtype=recipe.on_policy.dtype)
    return options


def read_configs(
    options: DistillOptions, piped: str = "", started: float = 0.0
) -> tuple[RunPaths, TrainConfig, LoggingConfig]:
    """Return paths, training and logging configuration; `piped` replaces `-`, the time limit begins at `started`."""
    from xtk.data.corpus_reader import Corpus, parse_columns_option
    from xtk.errors import XtkError
    from xtk.losses import AUTO_LOSS
    from xtk.losses.spec import parse_losses
    from xtk.models.precision import resolve_loader_workers
    from xtk.models.student_model_setup import StudentModelConfig
    from xtk.parallel.parallel_config import num_training_gpus, parse_devices
    from xtk.training.task_evaluation import parse_eval_tasks
    from xtk.training.train_config import LoggingConfig, TrainConfig

    devices = parse_devices(options.devices, num_training_gpus(options.num_processes))
    if devices["rollout"] and not isinstance(options, OnPolicyDistillOptions):
        raise XtkError(
            "only xtk distill-on-policy has --devices rollout=...", hint="name only teachers: --devices teacher=..."
        )
    places = _paths(options, piped, devices["teacher"])
    recipe = options_of(
        TrainConfig,
        options,
        losses=tuple(parse_losses(list(options.loss) or [AUTO_LOSS])),
        preparation=options_of(StudentModelConfig, options),
        on_policy=_on_policy(options, places.online_teachers, devices["rollout"])
        if isinstance(options, OnPolicyDistillOptions)
        else None,
    )
    held_out: tuple[Document, ...] = ()
    if options.eval_data and not places.eval_caches:  # read now, so that errors in the data appear before training
        held_out = tuple(Corpus(options.eval_data, parse_columns_option(options.columns), options.max_document_bytes))
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", options.num_processes))
    reporting = options_of(
        LoggingConfig,
        options,
        dataloader_num_workers=resolve_loader_workers(
            options.dataloader_num_workers,
            processes,
            needs_thread=bool(places.online_teachers) or recipe.on_policy is not None,
        ),
        report_to=tuple(name.strip() for names in options.report_to for name in names.split(",")),
        deadline=started + options.max_seconds if options.max_seconds else math.inf,
        eval_documents=held_out,
        eval_tasks=parse_eval_tasks(options.eval_tasks),
    )
    return places, recipe, reporting


def _paths(options: DistillOptions, piped: str, teacher_devices: tuple[int, ...]) -> RunPaths:
    """Return inputs and output of the run."""
    from functools import partial
    from pathlib import Path

    from xtk.cache.output import is_cache
    from xtk.data.corpus_reader import parse_columns_option
    from xtk.models.resolver import ModelRef, base_model_and_adapter, resolve_model_folder
    from xtk.teachers.online_teacher import observed_only, parse_online_teacher
    from xtk.training.train_config import RunPaths

    named = {"-": piped}
    student = named.get(options.student, options.student)
    folder, adapter = base_model_and_adapter(resolve_model_folder(student, with_weights=True))
    student_model = ModelRef(folder, adapter, trust_remote_code=options.trust_remote_code)
    open_teacher = partial(
        parse_online_teacher,
        # Completions of the student cannot be refused.
        long_documents="truncate" if isinstance(options, OnPolicyDistillOptions) else options.long_documents,
        trust_remote_code=options.trust_remote_code,
        student=student_model,
        student_start=options.start_token,
        devices=teacher_devices,
    )
    references: list[OnlineTeacher] = []
    if options.teacher_shift and options.teacher:
        references = [open_teacher(spec) for spec in options.reference]
    elif options.teacher and options.reference:
        references = [open_teacher(observed_only(spec)) for spec in (*options.reference, student)]
    return RunPaths(
        student_model,
        tuple(named.get(path, path) for path in options.cache),
        tuple(Path(named.get(path, path)) for path in options.projection if path != "auto"),
        Path(options.output),
        parse_columns_option(options.columns, weight=options.weight_column, route=options.route_column),
        eval_caches=options.eval_data if all(map(is_cache, options.eval_data)) else (),
        online_teachers=tuple(map(open_teacher, options.teacher)),
        references=tuple(references),
        reference_caches=() if options.teacher else options.reference,
        max_document_bytes=options.max_document_bytes,
    )


def _on_policy(
    options: OnPolicyDistillOptions, teachers: tuple[OnlineTeacher, ...], devices: tuple[int, ...]
) -> OnPolicyConfig:
    """Return the on-policy configuration from options."""
    from xtk.engines.backend import parse_engine_options
    from xtk.errors import XtkError
    from xtk.models.precision import resolve_compute_dtype
    from xtk.rewards.reward_spec import parse_reward
    from xtk.rollouts.generator_interface import SamplingConfig
    from xtk.rollouts.prompts import read_prompt_template, read_template_arguments
    from xtk.training.on_policy_config import OnPolicyConfig

    if options.rollout_backend != "vllm" and flags_of_set_options(options, ["rollout_dtype"]):
        raise XtkError("--rollout-dtype needs --rollout-backend vllm", hint="add it, or remove --rollout-dtype")
    if not options.environment and flags_of_set_options(options, ["max_turns"]):
        raise XtkError("--max-turns needs --environment", hint="add it, or remove --max-turns")
    num_candidates = max((teacher.num_candidates for teacher in teachers), default=0)
    return options_of(
        OnPolicyConfig,
        options,
        prompt_template=read_prompt_template(options.prompt_template),
        chat_template_kwargs=read_template_arguments(options.chat_template_kwargs),
        sampling=options_of(SamplingConfig, options, top_logprobs=num_candidates),
        rewards=tuple(map(parse_reward, options.reward)),
        max_turns=options.max_turns if options.environment else 1,
        backend=options.rollout_backend,
        engine=parse_engine_options(list(options.rollout_engine)),
        server=options.rollout_server,
        dtype=resolve_compute_dtype(options.rollout_dtype, options.mixed_precision, options.dtype),
        batch_tokens=options.rollout_batch_tokens,
        devices=devices,
    )


def _for_workers(arguments: list[str], piped: str) -> list[str]:
    """Return the command line for workers, with `-` replaced by the piped path, since workers have another stdin."""
    from xtk.errors import XtkError

    if piped and not {"-", "--projection=-"} & set(arguments):
        raise XtkError(
            "the --config file has the value - (standard input), which several processes cannot share",
            hint="use - on the command line instead, or --num-processes 1",
        )
    return replace_piped_arguments(arguments, piped)


def replace_piped_arguments(arguments: Sequence[str], piped: str) -> list[str]:
    """Return arguments with `-` replaced by the piped path, since other processes have no pipe."""
    named = {"-": piped, "--projection=-": f"--projection={piped}"}
    return [named.get(argument, argument) for argument in arguments]
