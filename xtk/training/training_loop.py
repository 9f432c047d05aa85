"""The training loop: steps, logging, evaluation, checkpoints; equal gradients for any number of processes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn

from xtk import terminal
from xtk.artifacts.run_folders import CHECKPOINT, METRICS_FILE, run_fingerprint
from xtk.errors import ResumableStop, XtkError
from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.safetensors_headers import format_names
from xtk.models.student_model_setup import parameter_groups
from xtk.models.weight_validation import non_finite_parameters
from xtk.tokens.tokenizer import Tokenizer
from xtk.training.batch_prefetch import StepBatchBuilder, prefetch
from xtk.training.checkpoint import INTERRUPTED, STUDENT, CheckpointSaver, ResumePoint, remove_old_checkpoints
from xtk.training.cross_process_reduction import StepReduction
from xtk.training.graceful_stop import StopListener
from xtk.training.held_out_evaluation import HeldOutEvaluator
from xtk.training.metrics_file import MetricsFile, first_values, last_values, metric_name, peak_memory_bytes
from xtk.training.micro_batches import BatchBuilder, BatchSampler, MicroBatch
from xtk.training.model_card import Provenance, model_card
from xtk.training.online_teacher_scoring import TeacherBlocks
from xtk.training.parallel_config import ParallelConfig
from xtk.training.student_offload import offload_student
from xtk.training.student_with_losses import clip_gradients, forward_student, reshard_weights
from xtk.training.task_evaluation import TaskEvaluator
from xtk.training.train_config import LoggingConfig, TrainConfig
from xtk.training.trainer_state import TrainerState, step_is_finite
from xtk.training.weight_ema import ExponentialMovingAverage


@dataclass
class TrainingRun:
    """Everything that the training loop uses.

    Attributes:
        accelerator: Accelerate's accelerator: processes, devices and trackers.
        parallel: the parallel layout.
        student: the student, split into backbone and output head.
        wrapped_student: the student with its losses, wrapped for the layout.
        parameters: the trainable parameters.
        tokenizer: the student's tokenizer.
        batch_builder: builds micro-batches.
        sampler: chooses the documents of each step.
        recipe: the options that decide the result.
        logging_config: logging, evaluation and checkpoints.
        steps: total number of optimizer steps.
        output: the run folder.
        tokenizer_folder: folder with the student's tokenizer files.
        held_out_evaluator: evaluates held-out documents; None: there are none.
        task_evaluator: evaluates --eval-tasks; None: there are none.
        provenance: base model, teachers and data, for the model card.
        merge_adapter: as in `CheckpointSaver`.
        teacher_blocks: blocks of steps, each scored by online teachers before it; None: no online teachers.
        saver: writes checkpoints; set when training begins.
        resume_point: the checkpoint from which the run resumes.
    """

    accelerator: Any
    parallel: ParallelConfig
    student: BackboneWithHead
    wrapped_student: nn.Module
    parameters: Sequence[nn.Parameter]
    tokenizer: Tokenizer
    batch_builder: BatchBuilder
    sampler: BatchSampler
    recipe: TrainConfig
    logging_config: LoggingConfig
    steps: int
    output: Path
    tokenizer_folder: Path
    held_out_evaluator: HeldOutEvaluator | None = None
    task_evaluator: TaskEvaluator | None = None
    provenance: Provenance = field(default_factory=Provenance)
    merge_adapter: Callable[[Path, Path], None] | None = None
    teacher_blocks: TeacherBlocks | None = None
    saver: CheckpointSaver | None = None
    resume_point: ResumePoint = field(default_factory=ResumePoint)

    @property
    def has_evaluation(self) -> bool:
        """Whether there is anything to evaluate on."""
        return self.held_out_evaluator is not None or self.task_evaluator is not None

    def evaluate(self) -> dict[str, float]:
        """Return all metrics of an evaluation (collective)."""
        return {name: value for one in (self.held_out_evaluator, self.task_evaluator) if one is not None
                for name, value in one().items()}  # fmt: skip


def train(run: TrainingRun, identity: dict[str, Any]) -> dict[str, Any]:
    """Train from the last checkpoint, or from the start, to the end; return the content of `xtk.json`.

    Raises:
        ResumableStop: a signal or a time limit ended the run, after a checkpoint.
        XtkError: too many steps, or weights of the student, are not finite.
    """
    accelerator, recipe = run.accelerator, run.recipe
    optimizer = _optimizer(run.student, recipe)
    run.wrapped_student.train()
    torch.manual_seed(recipe.seed + run.parallel.gradient_replica)
    average = ExponentialMovingAverage(run.student.model, recipe.ema_decay)
    run.saver = saver = CheckpointSaver(run.student.model, optimizer, run.tokenizer_folder, averages=average.averages,
                              parallel=str(run.parallel), merge_adapter=run.merge_adapter,
                                  run_fingerprint=run_fingerprint(identity))  # fmt: skip
    _connect_online_teachers(run, average, optimizer)
    done, state = _resume(run, saver)
    metrics = MetricsFile(run.output / METRICS_FILE, done) if accelerator.is_main_process else None
    meter = _Meter(run, state.tokens)
    if run.has_evaluation and run.logging_config.eval_on_start and not done:
        with meter.exclude_from_rate():
            _log(run, metrics, {"step": 0, **_evaluate(run, saver, state, 0)})
    with (
        terminal.Progress("distill", run.steps, "steps", done=done) as progress,
        StopListener(run.logging_config.deadline) as stop,
    ):
        batches, kept = meter.timed(_step_batches(run, range(done, run.steps), meter, stop)), done
        for step in range(done, run.steps):
            micro_batches = next(batches, None)
            if micro_batches is None:  # stopped while teachers scored
                if step > kept:
                    state.tokens = meter.total_tokens()
                    _save(run, saver, step, state)
                _raise_stopped(run, step, stop.reason(accelerator.device, by_signals=True))
            learning_rate = recipe.learning_rate_at(step, run.steps)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            losses, norm = _step(run, optimizer, micro_batches)
            _count_step(run, state, average, step, losses, norm)
            meter.count(micro_batches)
            last = step + 1 == run.steps
            record = {"step": step + 1, **losses, "learning_rate": learning_rate, "gradient_norm": norm}
            if (step + 1) % run.logging_config.logging_steps == 0 or step == 0 or last:
                record |= meter.metrics() | {"skipped_steps": state.skipped_steps}
                if run.teacher_blocks is not None:
                    record |= run.teacher_blocks.metrics(step)
            evaluated = _due(step + 1, run.logging_config.eval_steps, last) and run.has_evaluation
            if evaluated:
                with meter.exclude_from_rate(), average.swapped_in(run.wrapped_student):
                    record |= _evaluate(run, saver, state, step + 1)
                last = last or 0 < recipe.early_stopping_patience <= state.evaluations_without_improvement
            if "tokens_per_second" in record or evaluated:
                _log(run, metrics, record)
            stopped = stop.reason(accelerator.device)
            if (_saves_at(run, step + 1) or stopped) and not last:
                with meter.exclude_from_rate():
                    state.tokens = meter.total_tokens()
                    _save(run, saver, step + 1, state)
                kept = step + 1
            shown = "  ".join(f"{name} {value:.4f}" for name, value in losses.items())
            progress.advance(1, f"{shown}  {meter.summary}")
            if last:
                break
            if stopped:
                _raise_stopped(run, step + 1, stopped)
    state.tokens = meter.total_tokens()
    accelerator.wait_for_everyone()
    content = _checked_content(run, state, step + 1, identity)
    best = state.best_step if recipe.early_stopping_patience and state.best_bits_per_byte is not None else None
    if best is not None:
        content["best"] = {"step": best, "eval_bits_per_byte": state.best_bits_per_byte}
    with average.swapped_in(run.wrapped_student):
        saver.write_final(
            run.output, content, model_card(run.provenance, content, first_values(run.output / METRICS_FILE)), best
        )
    if accelerator.is_main_process:
        remove_old_checkpoints(run.output, run.logging_config.save_total_limit, run.resume_point.damaged, finished=True)
    if run.teacher_blocks is not None:
        run.teacher_blocks.finish()
    accelerator.end_training()  # destroys the process group
    return content


def _evaluate(run: TrainingRun, saver: CheckpointSaver, state: TrainerState, step: int) -> dict[str, float]:
    """Return the metrics of an evaluation; for early stopping, keep the weights if it is the best (collective)."""
    metrics = run.evaluate()
    bits = metrics.get("eval_bits_per_byte")
    if bits is not None and state.count_evaluation(step, bits) and run.recipe.early_stopping_patience:
        saver.write_best(run.output, step)
    return metrics


def _count_step(
    run: TrainingRun,
    state: TrainerState,
    average: ExponentialMovingAverage,
    step: int,
    losses: Mapping[str, float],
    norm: float,
) -> None:
    """Update counters and the EMA after a step (collective).

    Raises:
        XtkError: too many steps were skipped, or weights of the student are not finite.
    """
    if not step_is_finite(losses, norm):
        _check_finite_weights(run, f"step {step + 1:,}")
        state.count_skipped_step(step + 1, losses["loss"], norm, run.logging_config.max_skipped_steps)
        return
    state.consecutive_skipped_steps = 0
    if run.recipe.learning_rate:
        average.update()


def _checked_content(run: TrainingRun, state: TrainerState, steps: int, identity: dict[str, Any]) -> dict[str, Any]:
    """Return the content of the student's `xtk.json`, after checking that the student is valid (collective).

    Raises:
        XtkError: all steps were skipped, or weights are not finite.
    """
    if state.skipped_steps == steps:
        raise XtkError(
            f"no student is saved: the loss or the gradient was NaN or infinite in all {steps:,} steps",
            where=str(run.output),
            hint="use a smaller --learning-rate or --mixed-precision no; check the data and the teacher",
        )
    _check_finite_weights(run, f"the student after step {steps:,}")
    return {
        "kind": STUDENT,
        "steps": steps,
        "documents_per_step": run.sampler.documents_per_step,
        "recipe": identity,
        "metrics": last_values(run.output / METRICS_FILE),
    }


def _check_finite_weights(run: TrainingRun, where: str) -> None:
    """Raise XtkError if weights are NaN or infinite, which later steps cannot repair (collective).

    Raises:
        XtkError: lists the weights.
    """
    names = non_finite_parameters(run.student.model)
    if run.parallel.all_reduce_max(int(bool(names)), run.accelerator.device):
        affected = f"{len(names):,} tensors ({format_names(names)})" if names else "in another process"
        raise XtkError(
            f"the student has weights that are NaN or infinite: {affected}",
            where=f"{where}, {run.output}",
            hint="use a smaller --learning-rate; resume from an earlier checkpoint if there is one",
        )


def _connect_online_teachers(
    run: TrainingRun, average: ExponentialMovingAverage, optimizer: torch.optim.Optimizer
) -> None:
    """Give online teachers access to the student (--teacher self) or its device (--offload-student)."""
    if run.teacher_blocks is not None:
        run.teacher_blocks.lend_student = partial(_self_teacher, run, average)
        if run.recipe.offload_student:
            run.teacher_blocks.offload = partial(offload_student, run.student.model, optimizer, torch.device("cpu"))


@contextlib.contextmanager
def _self_teacher(run: TrainingRun, average: ExponentialMovingAverage, weights: str) -> Iterator[BackboneWithHead]:
    """Yield the student as its own teacher, with weights of a name in `STUDENT_WEIGHTS`."""
    run.student.model.eval()
    without = run.student.model.disable_adapter() if weights == "base" else contextlib.nullcontext()
    with average.swapped_in(run.wrapped_student) if weights == "ema" else contextlib.nullcontext(), without:
        yield run.student
    run.student.model.train()


def _raise_stopped(run: TrainingRun, done: int, why: str) -> NoReturn:
    run.accelerator.end_training()
    raise ResumableStop(
        f"stopped after step {done:,} of {run.steps:,}: {why}" if done else f"stopped before the first step: {why}",
        where=str(run.output),
        hint="run the same command again to resume",
    )


def _step(
    run: TrainingRun, optimizer: torch.optim.Optimizer, micro_batches: list[MicroBatch]
) -> tuple[dict[str, float], float]:
    """Take one optimizer step; return the metrics of the losses and the gradient norm before clipping.

    If loss or norm is not finite, neither the weights nor the optimizer state change.
    """
    recipe, builder, device = run.recipe, run.batch_builder, run.accelerator.device
    if recipe.max_batch_tokens:  # all processes take the same number of passes; some are empty
        passes = run.parallel.all_reduce_max(len(micro_batches), device)
        micro_batches = [*micro_batches, *(builder.build([]) for _ in range(passes - len(micro_batches)))]
    reduction = StepReduction(
        builder.objectives, builder.score_weighting, builder.teachers, micro_batches, run.parallel, device
    )
    kd_scale = 1.0
    if recipe.scale_kd_to == "ce":
        kd_scale = reduction.kd_scale(_pass(run, micro_batches, reduction.term_scales(), backward=False)[0])
    sums, ratios = _pass(run, micro_batches, reduction.term_scales(kd_scale), backward=True)
    norm = clip_gradients(run.parameters, recipe.max_grad_norm)
    losses = reduction.loss_metrics(sums, kd_scale) | reduction.surrogate_metrics(ratios)
    if step_is_finite(losses, norm) and recipe.learning_rate:  # at 0, AdamW and EMA would turn -0.0 into 0.0
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return losses | ({"kd_scale": kd_scale} if recipe.scale_kd_to == "ce" else {}), norm


def _pass(
    run: TrainingRun, micro_batches: list[MicroBatch], scales: list[float], *, backward: bool
) -> tuple[list[float], list[list[float]]]:
    """Run forward (and backward) passes; return each loss summed over tokens or spans of all processes.

    Also returns the ratio statistics of policy-gradient losses (zeros for others). Without `backward`, gradients and
    random states stay unchanged, so that the next pass has the same dropout.
    """
    accelerator, layout, device = run.accelerator, run.parallel, run.accelerator.device
    totals = torch.zeros(len(scales), 4, device=device, dtype=torch.float64)
    devices = [device] if device.type == "cuda" else []
    with contextlib.nullcontext() if backward else torch.random.fork_rng(devices), torch.set_grad_enabled(backward):
        for number, batch in enumerate(micro_batches):
            last = number + 1 == len(micro_batches)
            terms = [term.to(device, scale) for term, scale in zip(batch.terms, scales, strict=True)]
            # Sharded weights are gathered, and gradients reduced, in every pass.
            with contextlib.nullcontext() if last or layout.is_sharded else accelerator.no_sync(run.wrapped_student):
                total, parts = forward_student(run.wrapped_student, batch, terms, layout, device)
                if backward:
                    # Gradients are averaged over replicas, but the scales are already those of the whole step.
                    torch.autograd.backward(total * layout.num_gradient_replicas)
            totals[:, 0] += parts.double()
            for term_totals, term in zip(totals, terms, strict=True):
                if term.surrogate is not None:
                    term_totals[1:] += term.surrogate.ratio_statistics
    if not backward:
        reshard_weights(run.wrapped_student)
    totals = layout.all_reduce_sum(totals, "copies")
    return totals[:, 0].tolist(), totals[:, 1:].tolist()


def _optimizer(student: BackboneWithHead, recipe: TrainConfig) -> torch.optim.Optimizer:
    """Return AdamW, with parameters grouped by weight decay and device mesh."""
    groups: dict[Any, dict[str, Any]] = {}
    for group in parameter_groups(student.model, recipe.weight_decay):
        for parameter in group["params"]:
            key = (group["weight_decay"], getattr(parameter, "device_mesh", None))
            groups.setdefault(key, {**group, "params": []})["params"].append(parameter)
    return torch.optim.AdamW(list(groups.values()), lr=recipe.learning_rate, fused=True)


def _step_batches(run: TrainingRun, steps: range, meter: _Meter, stop: StopListener) -> Iterator[list[MicroBatch]]:
    """Yield the prefetched micro-batches of each step; time of online teachers does not count as training.

    It ends early if a stop signal arrives while online teachers score.
    """
    blocks = iter([steps]) if run.teacher_blocks is None else run.teacher_blocks(steps, stop)
    while True:
        with meter.exclude_from_rate_and_wait():
            block = next(blocks, None)
        if block is None:
            return
        yield from prefetch(_step_batch_builder(run), block, run.logging_config.dataloader_num_workers)


def _step_batch_builder(run: TrainingRun) -> StepBatchBuilder:
    """Return the builder of this process's micro-batches."""
    recipe, layout = run.recipe, run.parallel
    return StepBatchBuilder(run.batch_builder, run.sampler, recipe.per_device_train_batch_size, recipe.max_batch_tokens,
                       layout.data_shard, layout.num_data_shards)  # fmt: skip


def _log(run: TrainingRun, metrics: MetricsFile | None, record: dict[str, Any]) -> None:
    """Write a record to the metrics file and trackers, and print evaluation results (main process only)."""
    found = [f"{name} {value:.4f}" for name, value in record.items()
             if name.startswith("eval_") and not name.endswith("_error")]  # fmt: skip
    if found:
        terminal.note(f"distill: step {record['step']}: {'  '.join(found)}")
    if metrics is not None:
        metrics.write(record)
        values = {key: value for key, value in record.items() if key != "step"}
        run.accelerator.log(values, step=record["step"])


def _resume(run: TrainingRun, saver: CheckpointSaver) -> tuple[int, TrainerState]:
    """Return the number of completed steps and the counters after them."""
    folder = run.resume_point.folder
    if folder is None:
        return 0, TrainerState()
    state = TrainerState.from_manifest(saver.load(folder, run.recipe.seed, random_stream=run.parallel.gradient_replica))
    terminal.note(f"distill: resuming from {folder}")
    return run.resume_point.step, state


def _saves_at(run: TrainingRun, step: int) -> bool:
    """Return whether a checkpoint is due after a step, by --save-steps."""
    return bool(run.logging_config.save_steps) and step % run.logging_config.save_steps == 0


def _save(run: TrainingRun, saver: CheckpointSaver, step: int, state: TrainerState) -> None:
    interrupted = {} if _saves_at(run, step) else {INTERRUPTED: True}
    saver.write_checkpoint(run.output, step, state.to_dict() | interrupted)
    if run.accelerator.is_main_process:
        damaged = [path for path in run.resume_point.damaged if path.name != f"{CHECKPOINT}-{step}"]
        remove_old_checkpoints(run.output, run.logging_config.save_total_limit, damaged)
    run.resume_point = replace(run.resume_point, damaged=())
    run.accelerator.wait_for_everyone()


def _due(step: int, every: int, last: bool) -> bool:
    return last or (every > 0 and step % every == 0)


class _Meter:
    """Measures throughput, data wait and memory between logged steps.

    Args:
        run: the training run.
        tokens: tokens of the run before this start.
    """

    def __init__(self, run: TrainingRun, tokens: int) -> None:
        self._layout, self._device = run.parallel, run.accelerator.device
        self._tokens = self._num_nan = 0
        self._teachers = run.batch_builder.teachers
        self._unaligned = np.zeros((len(self._teachers), 2))
        self._all_tokens = tokens
        self._interval_start = self._started = time.monotonic()
        self._waited = 0.0
        self.summary = ""

    def timed(self, batches: Iterator[list[MicroBatch]]) -> Iterator[list[MicroBatch]]:
        """Yield batches, and measure the time until each is available."""
        started = time.monotonic()
        for batch in batches:
            self._waited += time.monotonic() - started
            yield batch
            started = time.monotonic()

    def count(self, batches: list[MicroBatch]) -> None:
        """Count the tokens of a step."""
        self._tokens += sum(batch.tokens for batch in batches)
        self._unaligned += sum(batch.unaligned for batch in batches)
        self._num_nan += sum(batch.nan_positions for batch in batches)

    def total_tokens(self) -> int:
        """Return the tokens of the run so far, over all processes (collective)."""
        tokens = torch.tensor(self._tokens, dtype=torch.float64, device=self._device)
        return self._all_tokens + int(self._layout.all_reduce_sum(tokens, "data"))

    @contextlib.contextmanager
    def exclude_from_rate(self) -> Iterator[None]:
        """Exclude the time of a `with` block, which is not training, from the throughput."""
        started = time.monotonic()
        yield
        self._interval_start += time.monotonic() - started

    @contextlib.contextmanager
    def exclude_from_rate_and_wait(self) -> Iterator[None]:
        """Exclude the time of online teachers from the throughput and from the data wait."""
        started = time.monotonic()
        with self.exclude_from_rate():
            yield
        self._waited -= time.monotonic() - started

    def metrics(self) -> dict[str, float]:
        """Return the metrics since the last call, over all processes, and reset (collective)."""
        counts = torch.tensor([self._tokens, self._num_nan, *self._unaligned.reshape(-1)], dtype=torch.float64)
        tokens, num_nan, *unaligned = self._layout.all_reduce_sum(counts.to(self._device), "data").tolist()
        now = time.monotonic()
        seconds = max(now - self._interval_start, 1e-9)
        waiting = min(1.0, self._layout.all_reduce_max(round(1e6 * self._waited), self._device) / 1e6 / seconds)
        memory = self._layout.all_reduce_max(peak_memory_bytes(self._device), self._device) / 2**30
        self.summary = f"{tokens / seconds:,.0f} tokens/s  {memory:.1f} GiB  data wait {waiting:.1%}"
        self._all_tokens += int(tokens)
        self._tokens, self._waited = 0, 0.0
        self._unaligned[:] = 0
        self._interval_start = now
        if num_nan:
            terminal.note(f"distill: warning: {num_nan:,.0f} positions skipped so far: teacher log-probability is NaN")
        return {
            "tokens": self._all_tokens,
            "tokens_per_second": round(tokens / seconds, 1),
            "training_seconds": round(now - self._started, 3),
            "data_wait_fraction": round(waiting, 6),
            "peak_memory_gib": round(memory, 3),
            **{
                metric_name("unaligned_fraction", name, self._teachers): round(missed / max(rows, 1), 6)
                for name, missed, rows in zip(self._teachers, unaligned[::2], unaligned[1::2], strict=True)
            },
        }
