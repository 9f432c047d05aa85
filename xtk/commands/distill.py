"""`xtk distill`: a student learns from a teacher cache."""

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
            help="The student: a model folder, or a hub id, or an adapter of peft's to train on; - for a pipe.",
            metavar="STUDENT",
        ),
    ],
    cache: Annotated[
        list[str],
        typer.Argument(
            help="What cache-teacher wrote, one for each teacher; - for a pipe. Or plain data, for ce alone and for "
            "--teacher.",
            metavar="CACHE...",
        ),
    ],
    output: shared_options.Output,
    projection: Annotated[
        list[str] | None,
        typer.Option(
            help="What build-projection or prune-projection wrote; - for a pipe. Repeat it for several teachers, in "
            "any order. auto, or left out: built (multitoken) for a loss that needs one, and kept in XTK_CACHE, or "
            "~/.cache/xtk.",
            metavar="PATH|auto",
        ),
    ] = None,
    loss: Annotated[
        list[str] | None,
        typer.Option(
            help="A term of the sum, with its options: p-kl, ce:weight=0.5. Repeat it for more. ce: the student's own "
            "tokens. byte-kl: what both say about the next bytes; needs no projection. p-kl: projected distributions, "
            "averaged over spans. boundary-kl: only where both sides begin a token. alm: how likely each finds a "
            "span. policy-gradient: what the student drew, by how likely the teacher finds it, and rewards. uld, gold, "
            "h-kl: probabilities by rank, as others do. forward-kl, reverse-kl, jsd, "
            "skew-forward-kl, skew-reverse-kl, tvd: a teacher with the student's tokenizer; for the others an option, "
            "divergence=jsd,beta=0.5. auto, or left out: what suits each teacher's tokenizer and cache, told as the "
            "run begins.",
            metavar="NAME[:KEY=VALUE,...]",
        ),
    ] = None,
    teacher: Annotated[
        list[str] | None,
        typer.Option(
            help="A model that scores plain data while the student trains, without a cache; repeat it for several. "
            "Its options are those of cache-teacher: MODEL:top_k=64,dtype=bfloat16,batch_tokens=16384; support, top_p, "
            "draws, seed, precision, backend, server=URL, and engine.tp_size=2 as its --engine tp_size=2; top_k=all: "
            "the whole vocabulary. self: the student itself, self:weights=ema or base its average or its base model.",
            metavar="MODEL[:KEY=VALUE,...]",
        ),
    ] = None,
    teacher_block_steps: Annotated[
        int,
        typer.Option(
            help="Of --teacher: steps whose documents it scores at a time, before it leaves the device. More: it comes "
            "less often, and its signal takes more room in the output's folder; 0: 64, or as many as take 4 GiB.",
            min=0,
        ),
    ] = 0,
    offload_student: Annotated[
        bool,
        typer.Option(
            "--offload-student",
            help="Of --teacher: student and optimizer leave the device while it scores. Less memory, more traffic.",
        ),
    ] = False,
    scale_kd_to: Annotated[
        str,
        typer.Option(
            help="ce: what is about teachers is scaled to the size of ce, each step anew; steps take a third longer.",
            metavar="[none|ce]",
        ),
    ] = "none",
    combine_teachers: Annotated[
        str,
        typer.Option(
            help="How several caches teach together. sum: the losses of all, each with its weight; mixture: one loss, "
            "from their probabilities mixed; select: the teacher who finds the text likeliest; route: each document "
            "has the teacher whom its --route-column names, or the only one who read it.",
            metavar="[sum|mixture|select|route]",
        ),
    ] = "sum",
    teacher_weights: Annotated[
        str,
        typer.Option(
            help="Numbers, one a cache: 0.7,0.3. Or a score a byte, ce, entropy or max-probability, with alpha and "
            "per=batch, document or span: ce:alpha=5,per=span weighs by softmax(alpha * score). Default: equal ones.",
            metavar="W,W...|SCORE[:KEY=VALUE,...]",
        ),
    ] = "",
    weight_column: shared_options.WeightColumn = "",
    route_column: shared_options.RouteColumn = "",
    on_policy: Annotated[
        bool,
        typer.Option(
            "--on-policy",
            help="The student writes what it learns from, and --teacher scores that; CACHE is data with prompts. The "
            "options from here to --stop-if are about this.",
        ),
    ] = False,
    prompt_template: shared_options.PromptTemplate = "",
    apply_chat_template: shared_options.ApplyChatTemplate = False,
    chat_template_kwargs: shared_options.ChatTemplateKwargs = "",
    num_generations: Annotated[int, typer.Option(help="Completions of a prompt, all in one step.", min=1)] = 1,
    max_completion_length: Annotated[int, typer.Option(help="Tokens of a completion at most.", min=1)] = 256,
    temperature: shared_options.Temperature = 1.0,
    top_p: shared_options.TopP = 1.0,
    top_k: shared_options.TopK = 0,
    stop: shared_options.Stop = None,
    steps_per_generation: Annotated[
        int,
        typer.Option(help="Steps whose completions are written at a time, by the student as it is before them.", min=1),
    ] = 1,
    num_iterations: Annotated[int, typer.Option(help="How often these steps are taken.", min=1)] = 1,
    lmbda: Annotated[
        float,
        typer.Option(help="Share of steps that take what the student wrote; the others take completions of the data."),
    ] = 1.0,
    reward: shared_options.Rewards = None,
    reward_beta: Annotated[
        float,
        typer.Option(help="Rollouts count by softmax(reward / beta) among those of their prompt; 0: all alike."),
    ] = 0.0,
    scale_rewards: shared_options.ScaleRewards = True,
    environment: shared_options.Environment = "",
    max_turns: shared_options.MaxTurns = 8,
    rollout_backend: Annotated[
        str,
        typer.Option(
            help="Who writes for the student: itself, with transformers; vllm, told its weights before each round; a "
            "server of vllm's, told them too.",
            metavar="[transformers|vllm|server]",
        ),
    ] = "transformers",
    rollout_engine: Annotated[
        list[str] | None,
        typer.Option(help="An option of vllm's engine. Repeat it for more.", metavar="NAME=VALUE"),
    ] = None,
    rollout_server: Annotated[
        list[str] | None,
        typer.Option(help="Where a server answers. Repeat it for several.", metavar="URL"),
    ] = None,
    rollout_dtype: Annotated[
        str, typer.Option(help="In which vllm computes.", metavar="[float32|bfloat16|float16]")
    ] = "float32",
    rollout_batch_tokens: Annotated[
        int, typer.Option(help="Tokens that the student reads and writes at a time, padding included.", min=1)
    ] = 16384,
    devices: Annotated[
        str,
        typer.Option(
            help="Devices of their own, by their numbers on this machine: rollout=2+3,teacher=1. What is not named "
            "takes turns with the student on its devices.",
            metavar="ROLE=N[+N...],...",
        ),
    ] = "",
    stop_if: Annotated[
        list[str] | None,
        typer.Option(
            help="A sign of collapse that ends the run: entropy<0.05, repetition>0.5, truncated>0.9, length, dropped, "
            "reward, turns. Repeat it for more.",
            metavar="FIGURE<N|FIGURE>N",
        ),
    ] = None,
    max_steps: Annotated[int, typer.Option(help="Optimisation steps; 0: as --num-train-epochs says.", min=0)] = 0,
    num_train_epochs: Annotated[float, typer.Option(help="Passes over the cache.")] = 1.0,
    per_device_train_batch_size: Annotated[int, typer.Option(help="Documents in a forward pass of a process.")] = 8,
    gradient_accumulation_steps: Annotated[int, typer.Option(help="Forward passes of a process in a step.")] = 1,
    packing: Annotated[
        bool,
        typer.Option(
            "--packing/--no-packing",
            help="Documents stand one behind the other in a row, each read by itself, without padding; where the "
            "student can read them so.",
        ),
    ] = True,
    max_batch_tokens: Annotated[
        int,
        typer.Option(
            help="Tokens of a forward pass of a process at most; 0: of so many documents as above. The documents of a "
            "step stay what they are.",
            min=0,
        ),
    ] = 0,
    parallel: Annotated[
        str,
        typer.Option(
            help="How processes share the work: fsdp=N, each has a part of the weights; tp=N, of each matrix; cp=N, of "
            "each row of tokens; dp=N, replicas, which is what is left. fsdp=2,tp=4: eight processes.",
            metavar="NAME=N,...",
        ),
    ] = "",
    fsdp_offload: Annotated[
        bool, typer.Option("--fsdp-offload", help="Weights and optimizer in the memory of the CPU; with fsdp.")
    ] = False,
    learning_rate: Annotated[
        float, typer.Option(help="AdamW learning rate at the end of the warm-up; 0: no weight changes.")
    ] = 5e-5,
    lr_scheduler_type: Annotated[
        str,
        typer.Option(
            help="After the warm-up. warmup_stable_decay: constant until --decay-ratio before the end, so that it can "
            "be trained longer from a checkpoint before it falls.",
            metavar="[cosine|linear|constant|cosine_with_min_lr|inverse_sqrt|warmup_stable_decay]",
        ),
    ] = "cosine",
    warmup_ratio: Annotated[float, typer.Option(help="Share of the steps in which the learning rate rises.")] = 0.05,
    warmup_steps: Annotated[int, typer.Option(help="So many, instead of a share; 0: the share.", min=0)] = 0,
    min_lr_rate: Annotated[float, typer.Option(help="Share of the learning rate where cosine_with_min_lr ends.")] = 0.1,
    decay_ratio: Annotated[float, typer.Option(help="Share of the steps in which warmup_stable_decay falls.")] = 0.1,
    weight_decay: Annotated[float, typer.Option(help="AdamW's, of matrices; vectors have none.")] = 0.0,
    max_grad_norm: Annotated[float, typer.Option(help="Gradients are scaled down to this norm; 0: never.")] = 1.0,
    ema_decay: Annotated[
        float,
        typer.Option(
            help="The student is the exponential moving average of the weights, kept in fp32: 0.999 for about the last "
            "thousand steps. 0: the weights of the last step."
        ),
    ] = 0.0,
    max_skipped_steps: Annotated[
        int,
        typer.Option(
            help="Steps in a row that are skipped because their loss or gradient is no number; more end the run.", min=0
        ),
    ] = 10,
    mixed_precision: Annotated[
        str, typer.Option(help="no: fp32. bf16: activations in bf16, weights and losses in fp32.", metavar="[no|bf16]")
    ] = "no",
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Less memory for a third more time.")
    ] = False,
    torch_compile: Annotated[
        bool, typer.Option("--torch-compile", help="Compile the model's body: a minute at the start, then faster.")
    ] = False,
    attn_implementation: Annotated[
        str,
        typer.Option(
            help="How attention is computed: sdpa, eager, flash_attention_2, kernels of the hub. Left out: what "
            "transformers takes.",
            metavar="NAME",
        ),
    ] = "",
    dtype: Annotated[
        str,
        typer.Option(
            help="In which weights are held. bfloat16 takes half of the memory, and loses small updates of weights "
            "that are trained; frozen ones lose little.",
            metavar="[float32|bfloat16]",
        ),
    ] = "float32",
    lora_r: Annotated[
        int, typer.Option(help="Train LoRA adapters of this rank, not the model's matrices; 0: the model.", min=0)
    ] = 0,
    lora_alpha: Annotated[int, typer.Option(help="Adapters are scaled by alpha / r; 0: by 2.", min=0)] = 0,
    lora_dropout: Annotated[float, typer.Option(help="Of what goes into adapters.")] = 0.0,
    lora_target_modules: Annotated[
        str, typer.Option(help="Modules with adapters, by the ends of their names: q_proj,v_proj.", metavar="NAME,...")
    ] = "all-linear",
    lora_modules_to_save: Annotated[
        str, typer.Option(help="Modules trained whole beside the adapters: embed_tokens,lm_head.", metavar="NAME,...")
    ] = "",
    use_dora: Annotated[
        bool, typer.Option("--use-dora", help="DoRA: the lengths of columns are trained beside the adapters.")
    ] = False,
    load_in_4bit: Annotated[
        bool,
        typer.Option(
            "--load-in-4bit", help="QLoRA: matrices packed into NF4 by bitsandbytes; the student is an adapter."
        ),
    ] = False,
    load_in_8bit: Annotated[bool, typer.Option("--load-in-8bit", help="The same, packed into int8.")] = False,
    freeze: Annotated[
        list[str] | None,
        typer.Option(
            help=r"Parameters that stay as they are: a part of their names, or a regular expression: embed_tokens, "
            r"'layers\.[0-9]\.'. Repeat it for more.",
            metavar="PATTERN",
        ),
    ] = None,
    resize_vocabulary: Annotated[
        bool,
        typer.Option("--resize-vocabulary", help="Add rows for tokens that the model has none for, around the mean."),
    ] = False,
    long_documents: Annotated[
        str,
        typer.Option(
            help="Documents longer than the student's context: refuse the run, truncate or skip them.",
            metavar="[refuse|truncate|skip]",
        ),
    ] = "refuse",
    max_length: Annotated[
        int, typer.Option(help="Tokens a document at most, if less than the context; 0: the context.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Of the order of documents and of dropout.", min=0)] = 42,
    logging_steps: Annotated[int, typer.Option(help="Steps between two lines of metrics.jsonl.", min=1)] = 10,
    save_steps: Annotated[int, typer.Option(help="Steps between two checkpoints; 0: none.", min=0)] = 500,
    save_total_limit: Annotated[int, typer.Option(help="Checkpoints that are kept.", min=1)] = 2,
    max_seconds: Annotated[
        float,
        typer.Option(
            help="After so many the run saves a checkpoint and ends with exit code 75; run again it goes on. 0: never.",
            min=0,
        ),
    ] = 0,
    eval_data: Annotated[
        list[str] | None,
        typer.Option(
            help="Held-out data: its bits per byte and its ce are logged. Or caches of it, one for each teacher: then "
            "all losses, and how often the student's likeliest token is the teacher's.",
            metavar="DATA|CACHE",
        ),
    ] = None,
    eval_tasks: Annotated[
        list[str] | None,
        typer.Option(
            help="What the student is asked at each evaluation, with options of evaluate: problems and a reward, "
            "gsm8k_test.jsonl:reward=exact,prompt=question,max_prompts=200; or tasks of lm-evaluation-harness, "
            "arc_easy,hellaswag:max_prompts=200, mmlu=FOLDER,humaneval_plus=FOLDER. Repeat it for more.",
            metavar="DATA:reward=NAME[,KEY=VALUE,...]|NAME[=FOLDER],...[:KEY=VALUE,...]",
        ),
    ] = None,
    eval_steps: Annotated[int, typer.Option(help="Steps between two evaluations; 0: at the end.", min=0)] = 0,
    eval_on_start: Annotated[bool, typer.Option("--eval-on-start", help="Evaluate before the first step too.")] = False,
    early_stopping_patience: Annotated[
        int,
        typer.Option(
            help="Evaluations in a row without fewer bits per byte, after which the run ends; the student is then the "
            "best one, and not the last. 0: it runs to its end.",
            min=0,
        ),
    ] = 0,
    columns: shared_options.Columns = "",
    max_document_bytes: shared_options.MaxDocumentBytes = shared_options.MAX_DOCUMENT_BYTES,
    report_to: Annotated[
        list[str] | None,
        typer.Option(help="Trackers that Accelerate knows: tensorboard, wandb, trackio....", metavar="NAME,..."),
    ] = None,
    dataloader_num_workers: Annotated[
        int,
        typer.Option(
            help="Processes that tokenise, align and decode ahead, for each process of the run; 0: a thread does. "
            "More memory, for runs that wait for data (waiting, in metrics.jsonl).",
            min=0,
            max=256,
        ),
    ] = 0,
    num_processes: Annotated[int, typer.Option(help="Processes on this machine, each with a device.", min=1)] = 1,
    num_machines: Annotated[
        int,
        typer.Option(help="Machines that run the same command, each with so many processes, and share folders.", min=1),
    ] = 1,
    machine_rank: Annotated[int, typer.Option(help="Which of --num-machines this one is, from 0.", min=0)] = 0,
    main_process_ip: Annotated[
        str, typer.Option(help="The address of the first of several machines.", metavar="ADDRESS")
    ] = "",
    main_process_port: Annotated[
        int, typer.Option(help="A port of it that is free.", min=0, max=65535, metavar="PORT")
    ] = 29500,
    ddp_timeout: Annotated[
        int, typer.Option(help="Seconds after which a process that waits for another one gives up.", min=1)
    ] = 600,
    trust_remote_code: shared_options.TrustRemoteCode = False,
    force: shared_options.Force = False,
    as_json: shared_options.Json = False,
    quiet: shared_options.Quiet = False,
    config: shared_options.Config = "",
) -> None:
    """Train a student from teacher caches, or beside teachers; interrupted, the same command goes on."""
    given = dict(locals())
    started = time.monotonic()
    from xtk.commands.recipe_rerun import check_rerun, recipe_options
    from xtk.subprocesses import die_with_parent
    from xtk.tokens.tokenizer import Tokenizer
    from xtk.training.distill import distill as train
    from xtk.training.distill import open_inputs, run_identity
    from xtk.training.distributed_launch import Machines, is_worker, launch, world_size
    from xtk.training.eval_tasks import check_supports_eval_tasks
    from xtk.training.graceful_stop import exit_resumable_on_signal
    from xtk.training.parallel_config import parse_parallel

    if is_worker():
        terminal.set_main_process(os.environ.get("RANK", "0") == "0")
    # One that only starts others looks for mistakes before; they tell the rest.
    terminal.set_quiet(quiet or (num_processes * num_machines > 1 and not is_worker()))
    if "-" in (eval_data or []):
        raise typer.BadParameter("--eval-data is read from files, not from the pipe")
    projections = [path for path in projection or [] if path != "auto"]
    if [student, *cache, *projections].count("-") > 1:
        raise typer.BadParameter("only one of STUDENT, CACHE and --projection can come through the pipe")
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
    """Return what the options ask for.

    Args:
        options: the options, by the names of the parameters of `distill`.
        piped: what `-` stands for.
        started: when the command began, by `time.monotonic()`.

    Raises:
        XtkError: a value makes no sense, or there is no such student, teacher or held-out data.
    """
    from pathlib import Path

    from xtk.artifacts.corpus import Corpus, parse_columns_option
    from xtk.artifacts.model_resolver import base_model_and_adapter, resolve_model_folder
    from xtk.artifacts.teacher_cache import is_cache
    from xtk.errors import XtkError
    from xtk.losses import AUTO_LOSS, parse_losses
    from xtk.models.student_model import StudentModelConfig
    from xtk.teachers.online_teacher import parse_online_teacher
    from xtk.training.eval_tasks import parse_eval_tasks
    from xtk.training.parallel_config import parse_devices
    from xtk.training.train_config import LoggingConfig, RunPaths, TrainConfig

    _check_on_policy_options(options)
    named = {"-": piped}
    projections = [path for path in options["projection"] or [] if path != "auto"]
    student, on_policy, eval_data = options["student"], options["on_policy"], options["eval_data"]
    folder, adapter = base_model_and_adapter(resolve_model_folder(named.get(student, student), with_weights=True))
    devices = parse_devices(options["devices"])
    if devices["rollout"] and not on_policy:
        raise XtkError("only a student that writes has --devices rollout=...", hint="--on-policy, or teacher=... alone")
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
                # What a student writes cannot be refused.
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
            # What is wrong with them is told now, not after hours.
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
    """Refuse options about the student's writing where it does not write.

    Raises:
        XtkError: names them.
    """
    from xtk.errors import XtkError

    parameters = inspect.signature(distill).parameters
    names = list(parameters)
    of_writing = names[names.index("on_policy") + 1 : names.index("stop_if") + 1]
    unread = [
        f"--{'no-' if parameters[name].default is True else ''}{name.replace('_', '-')}"
        for name in of_writing
        if name != "devices"  # teachers have devices of their own too
        and given[name] != parameters[name].default
        and (given[name] or parameters[name].default)
    ]
    if unread and not given["on_policy"]:
        raise XtkError(
            f"only a student that writes has {', '.join(unread)}",
            hint="--on-policy beside it, or without; docs/how-to/sweep.md of both in one sweep",
        )


def _on_policy(given: dict[str, Any], teachers: tuple[OnlineTeacher, ...], devices: tuple[int, ...]) -> OnPolicyConfig:
    """Return what the options say of the student's writing."""
    from xtk.engines.engine_options import parse_engine_options
    from xtk.rewards.reward_spec import parse_reward
    from xtk.rollouts.generator_interface import SamplingConfig
    from xtk.rollouts.prompts import read_prompt_template, read_template_arguments
    from xtk.training.on_policy_config import OnPolicyConfig, parse_stop_condition

    asked = max((teacher.num_candidates for teacher in teachers), default=0)
    sampling = SamplingConfig(
        **_fields_from_options(SamplingConfig, given) | {"stop": tuple(given["stop"] or ()), "top_logprobs": asked}
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
    """Return the options that a dataclass has under the same names."""
    return {field.name: given[field.name] for field in dataclasses.fields(kind) if field.name in given}


def _split_names(text: str) -> tuple[str, ...]:
    """Return the names in a list with commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _for_workers(arguments: list[str], piped: str) -> list[str]:
    """Return the command line with what came through the pipe named: the workers' stdin is not this one.

    Raises:
        XtkError: the dash is not on the command line, but in the file of options, which workers read themselves.
    """
    from xtk.errors import XtkError

    if piped and not {"-", "--projection=-"} & set(arguments):
        raise XtkError("several processes cannot read a pipe that --config names", hint="give - on the command line")
    named = {"-": piped, "--projection=-": f"--projection={piped}"}
    return [named.get(argument, argument) for argument in arguments]
