"""`xtk distill` as a function: loads the student, prepares the run folder, and starts the training loop."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs, set_seed

from xtk import terminal
from xtk.batches.batch_prefetch import report_killed_workers
from xtk.errors import MismatchError, XtkError
from xtk.files.atomic_files import canonical_json, sha256
from xtk.files.output import Output, writer_lock
from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.causal_lm import max_context_length, silence_transformers
from xtk.models.precision import describe_device
from xtk.models.resolver import ModelRef, weights_fingerprint
from xtk.models.student_model_setup import has_mergeable_adapter, is_peft_model, load_student, save_final_student
from xtk.name_registry import unknown_name_error
from xtk.parallel import process_group
from xtk.parallel.parallel_config import ParallelConfig, parse_parallel
from xtk.parallel.process_group import init_process_group, report_lost_processes
from xtk.runs.resume_point import RUN_FOLDER, ResumePoint, check_evaluation, find_checkpoint, prepare_run_folder
from xtk.teachers.online_teacher import OnlineTeacher
from xtk.training.held_out_evaluation import HeldOutData, HeldOutEvaluator
from xtk.training.kinds.run_inputs import RunInputs
from xtk.training.student_generator import check_engine_can_load, check_generation_backend
from xtk.training.student_with_losses import parallelize
from xtk.training.task_evaluation import TaskEvaluator
from xtk.training.train_config import LoggingConfig, RunPaths, TrainConfig
from xtk.training.training_loop import TrainingRun, train

TRACKERS = "trackers"


def distill(
    paths: RunPaths, recipe: TrainConfig, logging_config: LoggingConfig, inputs: RunInputs, *, force: bool,
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Train a student and return the content of its manifest; runs in this process, which may be one of several."""
    silence_transformers()
    accelerator = _start_accelerator(paths, recipe, logging_config)
    terminal.set_main_process(accelerator.is_main_process)
    timeout = timedelta(seconds=logging_config.ddp_timeout)
    layout = parse_parallel(recipe.parallel, accelerator.num_processes).with_mesh(accelerator.device, timeout)
    identity = run_identity(recipe, inputs, layout.num_data_shards, logging_config)
    evaluation = evaluation_identity(inputs, logging_config)
    keeps_best = recipe.early_stopping_patience > 0
    with contextlib.ExitStack() as held:
        process_group.barrier()
        if accelerator.is_main_process:
            held.enter_context(writer_lock(paths.output, "student"))
        process_group.barrier()
        finished = Output(paths.output, RUN_FOLDER, force=force).find_finished(identity)
        if not force:
            check_evaluation(paths.output, evaluation, is_finished=finished is not None)
        if finished is not None:
            return finished
        resumed = ResumePoint() if force else find_checkpoint(paths.output, identity, needs_best=keeps_best)
        set_seed(recipe.seed)
        student = _load_student(paths.student, resumed.folder, recipe, inputs, accelerator, layout)
        limits = [limit for limit in (max_context_length(student.model.config), recipe.max_length) if limit]
        limit = min(limits) if limits else None
        documents, sizes = inputs.training_documents(recipe, limit)
        _check_student_options(recipe, paths.online_teachers, layout, is_peft_model(student.model))
        is_packed = _set_up_forward(student, recipe)
        frozen = _load_frozen_student(paths.student, recipe, inputs, accelerator, packed=is_packed)
        wrapped, parameters = parallelize(
            student, accelerator, layout, packing=is_packed, offload=recipe.fsdp_offload,
            weights=resumed.folder or paths.student.folder, frozen_student=frozen,
        )  # fmt: skip
        _check_student_not_replaced(paths, inputs)
        process_group.barrier()
        if accelerator.is_main_process:
            prepare_run_folder(paths.output, options or {}, identity, resumed, force=force, evaluation=evaluation)
        process_group.barrier()
        if logging_config.report_to:
            start_trackers(accelerator, paths.output / TRACKERS, resumed.step, identity)
        packing_multiple = layout.length_multiple if is_packed else 0
        per_step = recipe.effective_documents_per_step(len(documents), layout.num_data_shards)
        run = TrainingRun(
            accelerator=accelerator,
            parallel=layout,
            student=student,
            wrapped_student=wrapped,
            parameters=parameters,
            tokenizer=inputs.tokenizer,
            batch_builder=inputs.batch_builder(limit, packing_multiple, recipe.regions),
            sampler=inputs.sampler(recipe, documents, sizes, per_step),
            recipe=recipe,
            logging_config=logging_config,
            identity=identity,
            steps=recipe.num_steps(len(documents), layout.num_data_shards),
            output=paths.output,
            initial_student=paths.student,
            packing_multiple=packing_multiple,
            provenance=inputs.provenance,
            merge_adapter=_adapter_merger(paths, recipe, inputs) if has_mergeable_adapter(student.model) else None,
            resume_point=resumed,
        )
        _add_evaluators(run, inputs)
        run.teacher_blocks = inputs.teacher_blocks(run)
        _print_plan(run, inputs, per_step, len(documents))
        with report_killed_workers(), report_lost_processes():
            return train(run)


def run_identity(
    recipe: TrainConfig, inputs: RunInputs, num_data_shards: int, logging_config: LoggingConfig
) -> dict[str, Any]:
    """Return the options and fingerprints that decide whether two runs are the same, as a recipe file has them."""
    held_out: dict[str, Any] = {}
    if recipe.early_stopping_patience:
        if not ((logging_config.eval_documents or inputs.held_out) and logging_config.eval_steps):
            raise XtkError(
                "--early-stopping-patience needs evaluations during training",
                hint="add --eval-data DATA --eval-steps N",
            )
        held_out = {"eval_documents": _held_out_fingerprint(inputs, logging_config),
                    "eval_steps": logging_config.eval_steps,
                    **({"eval_on_start": True} if logging_config.eval_on_start else {})}  # fmt: skip
    identity = {**recipe.identity(num_data_shards), **inputs.identity, **held_out}
    return dict(json.loads(canonical_json(identity)))  # a tuple is a list in the file


def evaluation_identity(inputs: RunInputs, logging_config: LoggingConfig) -> dict[str, str]:
    """Return fingerprints of what a run is evaluated on, by option; they do not affect the student."""
    identity = {}
    if logging_config.eval_documents or inputs.held_out is not None:
        identity["--eval-data"] = _held_out_fingerprint(inputs, logging_config)
    if logging_config.eval_tasks:
        identity["--eval-tasks"] = sha256(canonical_json([task.identity for task in logging_config.eval_tasks]))
    return identity


def _held_out_fingerprint(inputs: RunInputs, logging_config: LoggingConfig) -> str:
    """Return the fingerprint of the held-out documents."""
    if inputs.held_out is not None:
        return inputs.held_out.fingerprint
    return logging_config.eval_documents_fingerprint


def _set_up_forward(student: BackboneWithHead, recipe: TrainConfig) -> bool:
    """Compile the student if configured; return whether documents are packed."""
    is_packed = recipe.packing and student.enable_packing(recipe.preparation.attn_implementation)
    if recipe.packing and not is_packed:
        terminal.note("distill: warning: the student's architecture does not support --packing; documents are padded")
    if recipe.preparation.torch_compile:
        student.compile_backbone()
    return is_packed


def _print_plan(run: TrainingRun, inputs: RunInputs, per_step: int, documents: int) -> None:
    """Print the losses, the number of steps and the parallel layout of a run that begins."""
    if inputs.auto_loss_note:
        terminal.note(f"distill: --loss auto chose {inputs.auto_loss_note}")
    configured_documents = run.recipe.documents_per_step(run.parallel.num_data_shards)
    if per_step < configured_documents:
        what = "documents of the data" if run.recipe.on_policy is None else "completions of all prompts"
        terminal.note(
            f"distill: each step uses all {per_step:,} {what} once: --per-device-train-batch-size x "
            f"--gradient-accumulation-steps x processes is {configured_documents:,}"
        )
    device, precision, dtype = run.accelerator.device, run.recipe.mixed_precision, run.recipe.preparation.dtype
    workers = run.logging_config.dataloader_num_workers
    loaders = f", {workers} data loader {'process' if workers == 1 else 'processes'} each" if workers else ""
    terminal.note(
        f"distill: {run.steps:,} steps of {per_step} documents, {documents:,} documents, "
        f"{run.parallel.describe()} on {describe_device(device, precision, dtype)}{loaders}"
    )
    if device.type == "cuda" and precision == "no" and dtype == "float32":
        terminal.note(
            "distill: computes in float32 without TF32, about ten times slower than bf16 on recent GPUs: "
            "--mixed-precision bf16"
        )
    if device.type == "cuda" and run.accelerator.num_processes == 1 and torch.cuda.device_count() > 1:
        count = torch.cuda.device_count()
        terminal.note(f"distill: uses one of {count} GPUs; --num-processes {count} uses all")


def _add_evaluators(run: TrainingRun, inputs: RunInputs) -> None:
    """Give a run the evaluators of held-out documents and of `--eval-tasks`, if there are any."""
    data = inputs.held_out or HeldOutData.of_documents(run.logging_config.eval_documents)
    if len(data.source):
        limit = max_context_length(run.student.model.config)
        run.held_out_evaluator = HeldOutEvaluator(
            data, run.wrapped_student, run.tokenizer, limit, run.packing_multiple, run.parallel, run.accelerator.device
        )
    if run.logging_config.eval_tasks:
        run.task_evaluator = TaskEvaluator(
            run.logging_config.eval_tasks, run.student, run.tokenizer, run.recipe.mixed_precision
        )


def _check_student_options(
    recipe: TrainConfig, teachers: Sequence[OnlineTeacher], layout: ParallelConfig, adapted: bool
) -> None:
    """Check that the sharded student can generate, be offloaded, or be its own teacher, as the options require."""
    if recipe.on_policy is not None:
        check_generation_backend(recipe.on_policy, layout)
        check_engine_can_load(recipe.on_policy, recipe.preparation)
        recipe.on_policy.check_batch(recipe.documents_per_step(layout.num_data_shards))
    if recipe.offload_student and not teachers:
        raise XtkError("--offload-student needs --teacher", hint="remove --offload-student, or add --teacher MODEL")
    if recipe.offload_student and layout.is_sharded:
        raise XtkError(
            f"--offload-student needs an unsharded student, and --parallel is {layout}", hint="use --fsdp-offload"
        )
    if recipe.offload_student and layout.num_processes > 1:
        # DDP's hooks are lost when a parameter's data changes its device: gradients would silently not be summed.
        raise XtkError(
            "--offload-student needs a single process", hint="use --parallel fsdp=N --fsdp-offload, or a cache"
        )
    if recipe.offload_student and recipe.teacher_shift:
        raise XtkError(
            "--offload-student would leave the copy of the student for --teacher-shift on the GPU",
            hint="remove --offload-student, or distill from caches of teacher and reference",
        )
    self_weights = {teacher.student_weights for teacher in teachers} - {""}
    if self_weights and layout.is_sharded:
        raise XtkError(
            f"--teacher self needs an unsharded student, and --parallel is {layout}",
            hint="use --parallel dp=N; or --teacher with the student's folder, for its initial weights",
        )
    if recipe.teacher_shift and (layout.is_sharded or layout.cp > 1):
        raise XtkError(
            f"--teacher-shift needs an unsharded student, and --parallel is {layout}", hint="use --parallel dp=N"
        )
    if "ema" in self_weights and not recipe.ema_decay:
        raise XtkError("--teacher self:weights=ema needs --ema-decay", hint="add --ema-decay 0.99")
    if "base" in self_weights and not adapted:
        raise XtkError("--teacher self:weights=base needs a student with an adapter", hint="add --lora-r 16")


def _start_accelerator(paths: RunPaths, recipe: TrainConfig, logging_config: LoggingConfig) -> Any:
    """Join the process group; return Accelerate's accelerator."""
    check_trackers(logging_config.report_to)
    if paths.online_teachers and logging_config.dataloader_num_workers:
        raise XtkError("--teacher does not support --dataloader-num-workers", hint="use --dataloader-num-workers 0")
    torch.set_float32_matmul_precision("highest")  # no TF32: a float32 run is float32
    timeout = timedelta(seconds=logging_config.ddp_timeout)
    init_process_group(timeout)
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision=recipe.mixed_precision,
        log_with=list(logging_config.report_to) or None,
        project_dir=str(paths.output / TRACKERS) if logging_config.report_to else None,
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=timeout),
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),  # one copy of the gradients, not two
        ],
    )
    kind = str(accelerator.distributed_type.value)
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise XtkError(
            f"Accelerate is configured for {kind}, but xtk distill shards the model itself (--parallel)",
            hint="use accelerate launch --multi_gpu -m xtk distill ... --parallel fsdp=N",
        )
    return accelerator


def _check_student_not_replaced(paths: RunPaths, inputs: RunInputs) -> None:
    """Raise MismatchError if the student's files are not those of the recipe any more."""
    stated = inputs.identity["inputs"]["student"]
    for name, folder in (("weights", paths.student.folder), ("adapter", paths.student.adapter)):
        if folder is not None and weights_fingerprint(folder) != stated[name]:
            raise MismatchError(
                "the files of the student were replaced since the run started",
                where=str(folder),
                hint="restore them, and run the same command again",
            )


def _load_student(
    source: ModelRef,
    checkpoint: Path | None,
    recipe: TrainConfig,
    inputs: RunInputs,
    accelerator: Any,
    layout: ParallelConfig,
) -> BackboneWithHead:
    """Return the student, unsharded, split into backbone and output head; without weights if they are read later."""
    model = load_student(
        source,
        recipe.preparation,
        inputs.tokenizer,
        checkpoint=checkpoint,
        # With sharding, each process reads its shard later.
        device=torch.device("meta") if layout.is_sharded else accelerator.device,
        mixed_precision=recipe.mixed_precision,
    )
    if layout.is_sharded and model.device.type != "meta":
        terminal.note("distill: every process loads all weights of the student, then keeps its shard")
    if recipe.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return BackboneWithHead(model, accelerator.device)


def _load_frozen_student(
    source: ModelRef, recipe: TrainConfig, inputs: RunInputs, accelerator: Any, *, packed: bool
) -> BackboneWithHead | None:
    """Return the student before the run, without gradients; None if no target needs it."""
    if not recipe.teacher_shift:
        return None
    set_seed(recipe.seed)  # as for the student
    config, precision = recipe.preparation, recipe.mixed_precision
    model = load_student(
        source, config, inputs.tokenizer, device=accelerator.device, mixed_precision=precision, quiet=True
    )
    frozen = BackboneWithHead(model.eval().requires_grad_(requires_grad=False), accelerator.device)
    if packed:
        frozen.enable_packing(config.attn_implementation)
    return frozen


def _adapter_merger(paths: RunPaths, recipe: TrainConfig, inputs: RunInputs) -> Callable[[Path, Path], None]:
    """Return a function (adapter folder, output folder) that loads student and adapter and writes the merged model."""

    def merge(adapter: Path, folder: Path) -> None:
        model = load_student(
            paths.student,
            recipe.preparation,
            inputs.tokenizer,
            checkpoint=adapter,
            device=torch.device("cpu"),
            mixed_precision=recipe.mixed_precision,
            quiet=True,
        )
        _check_student_not_replaced(paths, inputs)
        save_final_student(model, folder)

    return merge


TRACKER_PROJECT, RUN_NAME_FILE = "xtk", "name"


def check_trackers(names: Sequence[str]) -> None:
    """Raise XtkError for trackers that are unknown or not installed."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    installed = {str(tracker.value) for tracker in get_available_trackers()}
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            raise unknown_name_error("tracker", name, list(LOGGER_TYPE_TO_CLASS))
        if name not in installed:
            raise XtkError(
                f"the tracker {name} is not installed", hint=f"run pip install {name}, or change --report-to"
            )


def start_trackers(accelerator: Any, folder: Path, step: int, identity: dict[str, Any]) -> None:
    """Start the trackers of a run in its main process, or resume those of an earlier start at a step."""
    name = ""
    if accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        kept = folder / RUN_NAME_FILE
        if not kept.is_file():
            kept.write_text(f"{folder.parent.resolve().name}-{secrets.token_hex(4)}", encoding="utf-8")
        name = kept.read_text(encoding="utf-8")
    accelerator.init_trackers(
        TRACKER_PROJECT,
        config={"recipe": canonical_json(identity)},
        init_kwargs={
            "tensorboard": {"purge_step": step + 1} if step else {},
            "wandb": {"id": name, "name": name, "resume": "allow", "dir": str(folder)},
            "trackio": {"name": name, "resume": "allow"},
        },
    )
