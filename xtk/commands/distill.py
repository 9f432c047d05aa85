"""`xtk distill`: train a student from teacher caches, online teachers or its own rollouts."""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xtk import terminal
from xtk.commands import shared_options

if TYPE_CHECKING:
    from xtk.teachers.online_teacher import OnlineTeacher
    from xtk.training.on_policy_config import OnPolicyConfig
    from xtk.training.train_config import LoggingConfig, RunPaths, TrainConfig


def distill(
    student: Annotated[
        str,
        typer.Argument(
            help="Student: a folder, hub id or PEFT adapter to train further; - reads its path from standard input.",
            metavar="STUDENT",
        ),
    ],
    cache: Annotated[
        list[str],
        typer.Argument(
            help="Teacher caches, or plain data for --teacher, --on-policy or --loss ce alone. - reads one path from "
            "standard input.",
            metavar="CACHE...",
        ),
    ],
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            help="Output folder of the run: the trained student, checkpoints and metrics.",
            metavar="FOLDER",
        ),
    ],
    projection: Annotated[
        list[str] | None,
        typer.Option(
            help="Projection file, one per teacher in any order; - reads one from standard input. Repeatable; auto "
            "(default): built with --method multitoken if a loss needs one.",
            metavar="PATH|auto",
        ),
    ] = None,
    loss: Annotated[
        list[str] | None,
        typer.Option(
            help="Loss term with options, such as p-kl or ce:weight=0.5; repeat it for a weighted sum. auto "
            "(default): one that fits each teacher; docs/reference/losses.md lists all.",
            metavar="NAME[:KEY=VALUE,...]",
        ),
    ] = None,
    teacher: Annotated[
        list[str] | None,
        typer.Option(
            help="Model that scores plain data during training; self: the student with its current weights. "
            "Repeatable; options as in cache-teacher, such as MODEL:top_k=64,dtype=bfloat16.",
            metavar="MODEL[:KEY=VALUE,...]",
        ),
    ] = None,
    teacher_block_steps: Annotated[
        int,
        typer.Option(
            help="With --teacher: optimizer steps whose data the teacher scores at once, before training on it. "
            "0: automatic (64, or what fits in 4 GiB).",
            min=0,
        ),
    ] = 0,
    offload_student: Annotated[
        bool,
        typer.Option(
            "--offload-student",
            help="With --teacher: move student and optimizer to CPU memory while the teacher scores.",
        ),
    ] = False,
    scale_kd_to: Annotated[
        str,
        typer.Option(
            help="ce: scale the sum of distillation losses to the value of --loss ce at every step; a third slower.",
            metavar="[none|ce]",
        ),
    ] = "none",
    combine_teachers: Annotated[
        str,
        typer.Option(
            help="Combination of several teachers: sum of losses, mixture of probabilities, select or route. "
            "select: per document, the teacher with the lowest CE per byte; route: the one in --route-column.",
            metavar="[sum|mixture|select|route]",
        ),
    ] = "sum",
    teacher_weights: Annotated[
        str,
        typer.Option(
            help="Teacher weights in their order, such as 0.7,0.3 (default: equal), or a score to compute them from. "
            "ce:alpha=5,per=span: softmax(-alpha * CE) per span; docs/how-to/several-teachers.md lists all.",
            metavar="W,W...|SCORE[:KEY=VALUE,...]",
        ),
    ] = "",
    weight_column: shared_options.WeightColumn = "",
    route_column: shared_options.RouteColumn = "",
    on_policy: Annotated[
        bool,
        typer.Option(
            "--on-policy",
            help="Train on completions sampled from the student, scored by --teacher and, if given, --reward. "
            "CACHE is then data with prompts.",
        ),
    ] = False,
    prompt_template: shared_options.PromptTemplate = "",
    apply_chat_template: shared_options.ApplyChatTemplate = False,
    chat_template_kwargs: shared_options.ChatTemplateKwargs = "",
    num_generations: Annotated[
        int, typer.Option(help="Rollouts per prompt, in one optimizer step; each is a document of the batch.", min=1)
    ] = 1,
    max_completion_length: Annotated[int, typer.Option(help="Maximum number of tokens per completion.", min=1)] = 256,
    temperature: shared_options.Temperature = 1.0,
    top_p: shared_options.TopP = 1.0,
    top_k: shared_options.TopK = 0,
    stop: shared_options.Stop = None,
    steps_per_generation: Annotated[
        int,
        typer.Option(help="Optimizer steps per batch of rollouts, which one version of the weights generates.", min=1),
    ] = 1,
    num_iterations: Annotated[
        int,
        typer.Option(
            help="Optimizer passes over each batch of rollouts (mu in GRPO). Above 1: cheaper, less on-policy.", min=1
        ),
    ] = 1,
    lmbda: Annotated[
        float,
        typer.Option(help="Fraction of steps on sampled completions; other steps use completions of the data."),
    ] = 1.0,
    reward: shared_options.Rewards = None,
    reward_beta: Annotated[
        float,
        typer.Option(help="Weight the losses of a prompt's rollouts by softmax(reward / beta); 0: equally."),
    ] = 0.0,
    scale_rewards: shared_options.ScaleRewards = True,
    environment: shared_options.Environment = "",
    max_turns: shared_options.MaxTurns = 8,
    rollout_backend: Annotated[
        str,
        typer.Option(
            help="Generation backend; weights are synced to vllm and server first. transformers: in the "
            "training process; vllm: a subprocess; server: a vLLM server.",
            metavar="[transformers|vllm|server]",
        ),
    ] = "transformers",
    rollout_engine: Annotated[
        list[str] | None,
        typer.Option(help="Engine argument of --rollout-backend vllm. Repeatable.", metavar="NAME=VALUE"),
    ] = None,
    rollout_server: Annotated[
        list[str] | None,
        typer.Option(
            help="Server URL of --rollout-backend server, such as http://localhost:8000/v1. Repeatable; "
            "docs/how-to/on-policy-vllm.md starts one.",
            metavar="URL",
        ),
    ] = None,
    rollout_dtype: Annotated[
        str, typer.Option(help="Computation data type of --rollout-backend vllm.", metavar="[float32|bfloat16|float16]")
    ] = "float32",
    rollout_batch_tokens: Annotated[
        int, typer.Option(help="Tokens of prompts and completions generated at once, padding included.", min=1)
    ] = 16384,
    devices: Annotated[
        str,
        typer.Option(
            help="Separate devices (indices on this machine) for rollouts and teachers, such as rollout=2+3,teacher=1. "
            "A role left out time-shares the student's devices.",
            metavar="ROLE=N[+N...],...",
        ),
    ] = "",
    stop_if: Annotated[
        list[str] | None,
        typer.Option(
            help="Rollout metric and limit that end the run, such as 'entropy<0.05'. Repeatable; "
            "docs/reference/metrics.md lists the metrics.",
            metavar="METRIC<N|METRIC>N",
        ),
    ] = None,
    max_steps: Annotated[
        int, typer.Option(help="Number of optimizer steps; 0: given by --num-train-epochs.", min=0)
    ] = 0,
    num_train_epochs: Annotated[float, typer.Option(help="Number of passes over the training documents.")] = 1.0,
    per_device_train_batch_size: Annotated[int, typer.Option(help="Documents per forward pass and process.")] = 8,
    gradient_accumulation_steps: Annotated[
        int, typer.Option(help="Forward passes per optimizer step and process.")
    ] = 1,
    packing: Annotated[
        bool,
        typer.Option(
            "--packing/--no-packing",
            help="Pack documents into rows without padding, if the model supports it; attention is per document.",
        ),
    ] = True,
    max_batch_tokens: Annotated[
        int,
        typer.Option(
            help="Maximum tokens per forward pass and process; a larger batch is split into several passes. "
            "0: split by --per-device-train-batch-size only.",
            min=0,
        ),
    ] = 0,
    parallel: Annotated[
        str,
        typer.Option(
            help="Processes by kind of parallelism: fsdp=N, tp=N (tensor), cp=N (context), dp=N (data). "
            "fsdp=2,tp=4 needs 8 processes; dp takes the processes that are left.",
            metavar="NAME=N,...",
        ),
    ] = "",
    fsdp_offload: Annotated[
        bool, typer.Option("--fsdp-offload", help="With --parallel fsdp=N: keep weights and optimizer in CPU memory.")
    ] = False,
    learning_rate: Annotated[
        float, typer.Option(help="AdamW learning rate at the end of the warm-up; 0: weights do not change.")
    ] = 5e-5,
    lr_scheduler_type: Annotated[
        str,
        typer.Option(
            help="Learning rate schedule after the warm-up. warmup_stable_decay: constant, then a decay over "
            "the last --decay-ratio of the steps.",
            metavar="[cosine|linear|constant|cosine_with_min_lr|inverse_sqrt|warmup_stable_decay]",
        ),
    ] = "cosine",
    warmup_ratio: Annotated[
        float, typer.Option(help="Fraction of the steps with a rising learning rate (warm-up).")
    ] = 0.05,
    warmup_steps: Annotated[
        int, typer.Option(help="Number of warm-up steps, instead of --warmup-ratio; 0: use the ratio.", min=0)
    ] = 0,
    min_lr_rate: Annotated[
        float, typer.Option(help="With --lr-scheduler-type cosine_with_min_lr: final fraction of --learning-rate.")
    ] = 0.1,
    decay_ratio: Annotated[
        float,
        typer.Option(help="With --lr-scheduler-type warmup_stable_decay: fraction of the steps in the final decay."),
    ] = 0.1,
    weight_decay: Annotated[
        float, typer.Option(help="AdamW weight decay of matrices; biases and norms have none.")
    ] = 0.0,
    max_grad_norm: Annotated[float, typer.Option(help="Maximum gradient norm (clipping); 0: no clipping.")] = 1.0,
    ema_decay: Annotated[
        float,
        typer.Option(
            help="Decay of an exponential moving average of the weights, saved as the student; 0: none. 0.999 "
            "averages about the last 1000 steps, in float32."
        ),
    ] = 0.0,
    max_skipped_steps: Annotated[
        int,
        typer.Option(
            help="Maximum number of consecutive steps skipped for a non-finite loss or gradient; more end the run.",
            min=0,
        ),
    ] = 10,
    mixed_precision: Annotated[
        str,
        typer.Option(
            help="Mixed precision: no (float32), or bf16 activations with float32 weights and losses.",
            metavar="[no|bf16]",
        ),
    ] = "no",
    gradient_checkpointing: Annotated[
        bool,
        typer.Option(
            "--gradient-checkpointing",
            help="Recompute activations in the backward pass: less memory, about a third slower.",
        ),
    ] = False,
    torch_compile: Annotated[
        bool,
        typer.Option(
            "--torch-compile",
            help="Compile the model with torch.compile: about a minute at the start, then faster steps.",
        ),
    ] = False,
    attn_implementation: Annotated[
        str,
        typer.Option(
            help="Attention implementation: sdpa, eager, flash_attention_2 or a hub kernel. Default: chosen by"
            " transformers.",
            metavar="NAME",
        ),
    ] = "",
    dtype: Annotated[
        str,
        typer.Option(
            help="Data type of the weights in memory; computation: --mixed-precision. bfloat16 needs half the "
            "memory, but loses small updates of trained weights.",
            metavar="[float32|bfloat16]",
        ),
    ] = "float32",
    lora_r: Annotated[int, typer.Option(help="LoRA rank; 0: train the full model.", min=0)] = 0,
    lora_alpha: Annotated[
        int, typer.Option(help="LoRA alpha: adapters are scaled by alpha / rank; 0: scaled by 2.", min=0)
    ] = 0,
    lora_dropout: Annotated[float, typer.Option(help="Dropout probability of LoRA adapter inputs.")] = 0.0,
    lora_target_modules: Annotated[
        str,
        typer.Option(
            help="Modules with LoRA adapters, by the end of their names, such as q_proj,v_proj.", metavar="NAME,..."
        ),
    ] = "all-linear",
    lora_modules_to_save: Annotated[
        str,
        typer.Option(
            help="Modules trained in full besides the LoRA adapters, such as embed_tokens,lm_head.", metavar="NAME,..."
        ),
    ] = "",
    use_dora: Annotated[bool, typer.Option("--use-dora", help="DoRA: LoRA with trained column magnitudes.")] = False,
    load_in_4bit: Annotated[
        bool,
        typer.Option(
            "--load-in-4bit",
            help="QLoRA: load the student's frozen weights in 4-bit NF4 (bitsandbytes); needs --lora-r.",
        ),
    ] = False,
    load_in_8bit: Annotated[
        bool,
        typer.Option(
            "--load-in-8bit", help="Load the student's frozen weights in int8 (bitsandbytes); needs --lora-r."
        ),
    ] = False,
    freeze: Annotated[
        list[str] | None,
        typer.Option(
            help="Parameters that are not trained, by a part of their name or a regular expression. Repeatable.",
            metavar="PATTERN",
        ),
    ] = None,
    resize_vocabulary: Annotated[
        bool,
        typer.Option(
            "--resize-vocabulary",
            help="Add embedding rows for tokens without one, initialized near the mean of the others.",
        ),
    ] = False,
    long_documents: Annotated[
        str,
        typer.Option(
            help="Handling of documents longer than --max-length or the context: refuse the run, truncate or skip.",
            metavar="[refuse|truncate|skip]",
        ),
    ] = "refuse",
    max_length: Annotated[
        int,
        typer.Option(
            help="Maximum number of tokens per document; --long-documents handles longer ones. 0: the context length."
        ),
    ] = 0,
    seed: Annotated[
        int, typer.Option(help="Random seed of document order, dropout, LoRA initialization and rollouts.", min=0)
    ] = 42,
    logging_steps: Annotated[int, typer.Option(help="Steps between two lines of metrics.jsonl.", min=1)] = 10,
    save_steps: Annotated[int, typer.Option(help="Steps between two checkpoints; 0: no checkpoints.", min=0)] = 500,
    save_total_limit: Annotated[
        int, typer.Option(help="Maximum number of checkpoints kept; older ones are deleted.", min=1)
    ] = 2,
    max_seconds: Annotated[
        float,
        typer.Option(
            help="Time limit in seconds: then save a checkpoint and exit with code 75; 0: none. The same "
            "command resumes.",
            min=0,
        ),
    ] = 0,
    eval_data: Annotated[
        list[str] | None,
        typer.Option(
            help="Held-out documents, for bits per byte and CE; or caches of them, one per teacher: repeat it. "
            "Caches add all losses and the top-1 agreement with the teachers.",
            metavar="DATA|CACHE",
        ),
    ] = None,
    eval_tasks: Annotated[
        list[str] | None,
        typer.Option(
            help="Task evaluated during training: data with a reward, or tasks as in evaluate --tasks. Repeatable. "
            "Keys are options of evaluate: test.jsonl:reward=exact,max_prompts=200 or arc_easy:max_prompts=200.",
            metavar="DATA:reward=REWARD[,KEY=VALUE,...]|TASK[=FOLDER],...[:KEY=VALUE,...]",
        ),
    ] = None,
    eval_steps: Annotated[int, typer.Option(help="Steps between two evaluations; 0: only at the end.", min=0)] = 0,
    eval_on_start: Annotated[
        bool, typer.Option("--eval-on-start", help="Evaluate before the first step, too.")
    ] = False,
    early_stopping_patience: Annotated[
        int,
        typer.Option(
            help="Evaluations without lower bits per byte after which the run ends; 0: no early stopping. The "
            "student then has the weights of the best evaluation.",
            min=0,
        ),
    ] = 0,
    columns: shared_options.Columns = "",
    max_document_bytes: shared_options.MaxDocumentBytes = shared_options.MAX_DOCUMENT_BYTES,
    report_to: Annotated[
        list[str] | None,
        typer.Option(
            help="Experiment trackers of Accelerate, such as tensorboard, wandb or trackio.", metavar="NAME,..."
        ),
    ] = None,
    dataloader_num_workers: Annotated[
        int,
        typer.Option(
            help="Processes that tokenise, align and decode ahead, for each process of the run; 0: a thread does. "
            "More memory, for runs that wait for data (data_wait_fraction in metrics.jsonl).",
            min=0,
            max=256,
        ),
    ] = 0,
    num_processes: Annotated[
        int, typer.Option(help="Number of processes on this machine, each with one device.", min=1)
    ] = 1,
    num_machines: Annotated[
        int,
        typer.Option(
            help="Number of machines with shared folders; each runs the command with its own --machine-rank. "
            "All use the same --main-process-ip.",
            min=1,
        ),
    ] = 1,
    machine_rank: Annotated[
        int, typer.Option(help="Index of this machine, from 0, when --num-machines is above 1.", min=0)
    ] = 0,
    main_process_ip: Annotated[
        str, typer.Option(help="With --num-machines: address of the machine with index 0.", metavar="ADDRESS")
    ] = "",
    main_process_port: Annotated[
        int,
        typer.Option(
            help="With --num-machines: free port on the machine with index 0.", min=0, max=65535, metavar="PORT"
        ),
    ] = 29500,
    ddp_timeout: Annotated[
        int, typer.Option(help="Seconds that a process waits for the others before the run fails.", min=1)
    ] = 600,
    trust_remote_code: shared_options.TrustRemoteCode = False,
    force: shared_options.Force = False,
    as_json: shared_options.Json = False,
    quiet: shared_options.Quiet = False,
    config: Annotated[
        str,
        typer.Option(
            help="YAML or JSON file with values of these options, such as the recipe.json of another run. Options on "
            "the command line override it.",
            metavar="FILE",
        ),
    ] = "",
) -> None:
    """Train a student from teacher caches or online teachers.

    After an interruption, the same command resumes from the last checkpoint.

    Examples:
        xtk distill ./student cache --loss p-kl --projection projection.safetensors -o run
        xtk distill ./student prompts.jsonl --on-policy --teacher ./teacher --num-generations 4 -o run
    """
    given = dict(locals())
    started = time.monotonic()
    from xtk.commands.recorded_run_options import check_rerun, recipe_options
    from xtk.subprocesses import die_with_parent
    from xtk.tokens.tokenizer import Tokenizer
    from xtk.training.distill import distill as train
    from xtk.training.distill import open_inputs, run_identity
    from xtk.training.distributed_launch import Machines, is_worker, launch, world_size
    from xtk.training.graceful_stop import exit_resumable_on_signal
    from xtk.training.parallel_config import parse_parallel
    from xtk.training.task_evaluation import check_supports_eval_tasks

    if is_worker():
        terminal.set_main_process(os.environ.get("RANK", "0") == "0")
    # A process that only launches workers checks the inputs; the workers print everything else.
    terminal.set_quiet(quiet or (num_processes * num_machines > 1 and not is_worker()))
    if "-" in (eval_data or []):
        raise typer.BadParameter("--eval-data cannot be read from standard input (-); use a file or a cache")
    projections = [path for path in projection or [] if path != "auto"]
    if [student, *cache, *projections].count("-") > 1:
        raise typer.BadParameter("only one of STUDENT, CACHE and --projection can be read from standard input (-)")
    piped = terminal.path_argument("-") if "-" in (student, *cache, *projections) else ""
    places, recipe, reporting = read_configs(given, piped, started)
    machines = Machines(num_machines, machine_rank, main_process_ip, main_process_port)
    processes = num_processes * num_machines
    layout = parse_parallel(recipe.parallel, world_size() if is_worker() else processes)
    check_supports_eval_tasks(reporting.eval_tasks, layout)
    inputs = open_inputs(places, recipe, Tokenizer(places.student))
    kept = recipe_options(given, piped, world_size() // num_machines if is_worker() else num_processes)
    check_rerun(config, kept, run_identity(recipe, inputs, layout.num_data_shards, reporting))
    exit_resumable_on_signal()
    if is_worker():
        die_with_parent(signal_number=signal.SIGKILL)
    elif processes > 1:
        launch(num_processes, _for_workers(sys.argv[1:], piped), machines)
        return
    content = train(places, recipe, reporting, inputs, force=force, trust_remote_code=trust_remote_code, options=kept)
    terminal.result_artifact(
        {"path": output, "kind": "student", "steps": content["steps"], "metrics": content["metrics"]}, as_json=as_json
    )


def read_configs(
    options: dict[str, Any], piped: str = "", started: float = 0.0
) -> tuple[RunPaths, TrainConfig, LoggingConfig]:
    """Return paths, training and logging configuration from options.

    Args:
        options: values by parameter name of `distill`.
        piped: the path that replaces `-`.
        started: `time.monotonic()` at the start of the command.

    Raises:
        XtkError: a value is invalid, or the student, a teacher or the held-out data does not exist.
    """
    from pathlib import Path

    from xtk.artifacts.corpus_reader import Corpus, parse_columns_option
    from xtk.artifacts.model_resolver import base_model_and_adapter, resolve_model_folder
    from xtk.artifacts.teacher_cache import is_cache
    from xtk.errors import XtkError
    from xtk.losses import AUTO_LOSS, parse_losses
    from xtk.models.student_model_setup import StudentModelConfig
    from xtk.teachers.online_teacher import parse_online_teacher
    from xtk.training.parallel_config import parse_devices
    from xtk.training.task_evaluation import parse_eval_tasks
    from xtk.training.train_config import LoggingConfig, RunPaths, TrainConfig

    _check_on_policy_options(options)
    named = {"-": piped}
    projections = [path for path in options["projection"] or [] if path != "auto"]
    student, on_policy, eval_data = options["student"], options["on_policy"], options["eval_data"]
    folder, adapter = base_model_and_adapter(resolve_model_folder(named.get(student, student), with_weights=True))
    devices = parse_devices(options["devices"])
    if devices["rollout"] and not on_policy:
        raise XtkError(
            "--devices rollout=... needs --on-policy", hint="add --on-policy, or name only --devices teacher=..."
        )
    places = RunPaths(
        folder,
        tuple(named.get(path, path) for path in options["cache"]),
        tuple(Path(named.get(path, path)) for path in projections),
        Path(options["output"]),
        parse_columns_option(options["columns"], weight=options["weight_column"], route=options["route_column"]),
        adapter,
        eval_caches=held if (held := tuple(eval_data or ())) and all(map(is_cache, held)) else (),
        online_teachers=tuple(
            parse_online_teacher(
                one,
                # Completions of the student cannot be refused.
                long_documents="truncate" if on_policy else options["long_documents"],
                trust_remote_code=options["trust_remote_code"],
                student=folder,
                devices=devices["teacher"],
            )
            for one in options["teacher"] or []
        ),
        max_document_bytes=options["max_document_bytes"],
    )
    preparation = StudentModelConfig(
        **_fields_from_options(StudentModelConfig, options)
        | {
            "lora_target_modules": _split_names(options["lora_target_modules"]),
            "lora_modules_to_save": _split_names(options["lora_modules_to_save"]),
            "freeze": tuple(options["freeze"] or ()),
        }
    )
    recipe = TrainConfig(
        **_fields_from_options(TrainConfig, options)
        | {
            "losses": tuple(parse_losses(options["loss"] or [AUTO_LOSS])),
            "max_length": options["max_length"] or None,
            "preparation": preparation,
            "on_policy": _on_policy(options, places.online_teachers, devices["rollout"]) if on_policy else None,
        }
    )
    reporting = LoggingConfig(
        **_fields_from_options(LoggingConfig, options)
        | {
            "report_to": tuple(name.strip() for names in options["report_to"] or [] for name in names.split(",")),
            "deadline": started + options["max_seconds"] if options["max_seconds"] else math.inf,
            # Read now, so that errors in the data appear before training.
            "eval_documents": tuple(
                Corpus(eval_data, parse_columns_option(options["columns"]), options["max_document_bytes"])
            )
            if eval_data and not places.eval_caches
            else (),
            "eval_tasks": parse_eval_tasks(options["eval_tasks"] or []),
        }
    )
    return places, recipe, reporting


def _check_on_policy_options(given: dict[str, Any]) -> None:
    """Refuse on-policy options without --on-policy.

    Raises:
        XtkError: such options are set.
    """
    from xtk.errors import XtkError

    parameters = inspect.signature(distill).parameters
    names = list(parameters)
    on_policy_options = names[names.index("on_policy") + 1 : names.index("stop_if") + 1]
    unread = [
        f"--{'no-' if parameters[name].default is True else ''}{name.replace('_', '-')}"
        for name in on_policy_options
        if name != "devices"  # also valid for teachers without --on-policy
        and given[name] != parameters[name].default
        and (given[name] or parameters[name].default)
    ]
    if unread and not given["on_policy"]:
        raise XtkError(
            f"{', '.join(unread)} {'need' if len(unread) > 1 else 'needs'} --on-policy",
            hint="add --on-policy, or remove the option; for runs of both kinds in a sweep see docs/how-to/sweep.md",
        )


def _on_policy(given: dict[str, Any], teachers: tuple[OnlineTeacher, ...], devices: tuple[int, ...]) -> OnPolicyConfig:
    """Return the on-policy configuration from options."""
    from xtk.engines.engine_options import parse_engine_options
    from xtk.rewards.reward_spec import parse_reward
    from xtk.rollouts.generator_interface import SamplingConfig
    from xtk.rollouts.prompts import read_prompt_template, read_template_arguments
    from xtk.training.on_policy_config import OnPolicyConfig, parse_stop_condition

    num_candidates = max((teacher.num_candidates for teacher in teachers), default=0)
    sampling = SamplingConfig(
        **_fields_from_options(SamplingConfig, given)
        | {"stop": tuple(given["stop"] or ()), "top_logprobs": num_candidates}
    )
    return OnPolicyConfig(
        **_fields_from_options(OnPolicyConfig, given)
        | {
            "prompt_template": read_prompt_template(given["prompt_template"]),
            "chat_template_kwargs": read_template_arguments(given["chat_template_kwargs"]),
            "sampling": sampling,
            "rewards": tuple(map(parse_reward, given["reward"] or [])),
            "stop_if": tuple(map(parse_stop_condition, given["stop_if"] or [])),
            "max_turns": given["max_turns"] if given["environment"] else 1,
            "backend": given["rollout_backend"],
            "engine": parse_engine_options(given["rollout_engine"] or []),
            "server": tuple(given["rollout_server"] or ()),
            "dtype": given["rollout_dtype"],
            "batch_tokens": given["rollout_batch_tokens"],
            "devices": devices,
        }
    )


def _fields_from_options(kind: type, given: dict[str, Any]) -> dict[str, Any]:
    """Return the options that are fields of a dataclass."""
    return {field.name: given[field.name] for field in dataclasses.fields(kind) if field.name in given}


def _split_names(text: str) -> tuple[str, ...]:
    """Return the names of a comma-separated list."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _for_workers(arguments: list[str], piped: str) -> list[str]:
    """Return the command line for workers, with `-` replaced by the piped path, since workers have another stdin.

    Raises:
        XtkError: the `-` is in the --config file, which workers read themselves.
    """
    from xtk.errors import XtkError

    if piped and not {"-", "--projection=-"} & set(arguments):
        raise XtkError(
            "the --config file has the value - (standard input), which several processes cannot share",
            hint="use - on the command line instead, or --num-processes 1",
        )
    named = {"-": piped, "--projection=-": f"--projection={piped}"}
    return [named.get(argument, argument) for argument in arguments]
