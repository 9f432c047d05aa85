"""The loop. One process or many, one micro-batch or several a step: the same loss and the same gradient."""

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
from xtk.models.causal_lm import BackboneWithHead
from xtk.models.safetensors_headers import format_names
from xtk.models.student_model import parameter_groups
from xtk.models.weight_validation import non_finite_parameters
from xtk.tokens.tokenizer import Tokenizer
from xtk.training.batch_prefetch import StepBatchBuilder, prefetch
from xtk.training.checkpoint import INTERRUPTED, STUDENT, CheckpointSaver, ResumePoint, remove_old_checkpoints
from xtk.training.eval_tasks import TaskEvaluator
from xtk.training.graceful_stop import StopListener
from xtk.training.held_out_evaluation import HeldOutEvaluator
from xtk.training.metrics_file import MetricsFile, first_values, last_values, metric_name, peak_memory_bytes
from xtk.training.micro_batches import BatchBuilder, BatchSampler, MicroBatch
from xtk.training.model_card import Provenance, model_card
from xtk.training.online_scoring import TeacherBlocks
from xtk.training.parallel_config import ParallelConfig
from xtk.training.step_reduction import StepReduction
from xtk.training.student_module import clip_gradients, forward_student, reshard_weights
from xtk.training.student_offload import offload_student
from xtk.training.train_config import LoggingConfig, TrainConfig
from xtk.training.trainer_state import TrainerState, step_is_finite
from xtk.training.weight_ema import ExponentialMovingAverage


@dataclass
class TrainingRun:
    """What the loop works on.

    Attributes:
        accelerator: Accelerate's, which knows processes, devices and trackers.
        parallel: how processes share the work.
        student: the student's model.
        wrapped_student: what is called: the student, wrapped for its layout.
        parameters: those that are trained.
        tokenizer: the student's.
        batch_builder: makes micro-batches.
        sampler: which documents a step takes.
        recipe: what decides the result.
        logging_config: what is told and kept.
        steps: optimisation steps in all.
        output: the run's folder.
        tokenizer_folder: where the student's tokenizer files lie.
        held_out_evaluator: of held-out documents; None: there are none.
        task_evaluator: what the student is asked at each evaluation; None: nothing.
        provenance: what the student comes from, for its card.
        merge_adapter: as `CheckpointSaver` has it.
        teacher_blocks: of steps, before each of which live teachers speak; None: there are none.
        saver: writes what the run changes, once it has begun.
        resume_point: where it goes on.
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
        """Return all figures of an evaluation; every process has to call it."""
        return {name: value for one in (self.held_out_evaluator, self.task_evaluator) if one is not None
                for name, value in one().items()}  # fmt: skip


def train(run: TrainingRun, identity: dict[str, Any]) -> dict[str, Any]:
    """Train from the last checkpoint, or from the start, to the end; return what `xtk.json` says.

    Raises:
        Stopped: a signal or a time limit ended it, after a checkpoint.
        XtkError: loss or gradient is not finite too often, or in all steps; or weights of the student are not.
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
    done, standing = _resume(run, saver)
    metrics = MetricsFile(run.output / METRICS_FILE, done) if accelerator.is_main_process else None
    meter = _Meter(run, standing.tokens)
    if run.has_evaluation and run.logging_config.eval_on_start and not done:
        with meter.exclude_from_rate():
            _log(run, metrics, {"step": 0, **run.evaluate()})
    with (
        terminal.Progress("distill", run.steps, "steps", done=done) as progress,
        StopListener(run.logging_config.deadline) as stop,
    ):
        batches, kept = meter.timed(_step_batches(run, range(done, run.steps), meter, stop)), done
        for step in range(done, run.steps):
            micro_batches = next(batches, None)
            if micro_batches is None:  # while teachers spoke
                if step > kept:
                    standing.tokens = meter.total_tokens()
                    due = bool(run.logging_config.save_steps) and step % run.logging_config.save_steps == 0
                    _save(run, saver, step, standing, interrupted=not due)
                _raise_stopped(run, step, stop.reason(accelerator.device, by_signals=True))
            learning_rate = recipe.learning_rate_at(step, run.steps)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            losses, norm = _step(run, optimizer, micro_batches)
            _take_note(run, standing, average, step, losses, norm)
            meter.count(micro_batches)
            last = step + 1 == run.steps
            record = {"step": step + 1, **losses, "learning_rate": learning_rate, "gradient_norm": norm}
            if (step + 1) % run.logging_config.logging_steps == 0 or step == 0 or last:
                record |= meter.metrics() | {"skipped_steps": standing.skipped_steps}
                if run.teacher_blocks is not None:
                    record |= run.teacher_blocks.metrics(step)
            evaluated = _due(step + 1, run.logging_config.eval_steps, last) and run.has_evaluation
            if evaluated:
                with meter.exclude_from_rate(), average.swapped_in(run.wrapped_student):
                    record |= run.evaluate()
                    bits = record.get("eval_bits_per_byte")
                    better = bits is not None and standing.count_evaluation(step + 1, bits)
                    if better and recipe.early_stopping_patience:
                        saver.write_best(run.output, step + 1)
                last = last or 0 < recipe.early_stopping_patience <= standing.evaluations_without_improvement
            if "tokens_per_second" in record or evaluated:
                _log(run, metrics, record)
            stopped = stop.reason(accelerator.device)
            due = bool(run.logging_config.save_steps) and (step + 1) % run.logging_config.save_steps == 0
            if (due or stopped) and not last:
                with meter.exclude_from_rate():
                    standing.tokens = meter.total_tokens()
                    _save(run, saver, step + 1, standing, interrupted=not due)
                kept = step + 1
            shown = "  ".join(f"{name} {value:.4f}" for name, value in losses.items())
            progress.advance(1, f"{shown}  {meter.summary}")
            if last:
                break
            if stopped:
                _raise_stopped(run, step + 1, stopped)
    standing.tokens = meter.total_tokens()
    accelerator.wait_for_everyone()
    content = _checked_content(run, standing, step + 1, identity)
    best = standing.best_step if recipe.early_stopping_patience else 0
    if best:
        content["best"] = {"step": best, "eval_bits_per_byte": standing.best_bits_per_byte}
    with average.swapped_in(run.wrapped_student):
        saver.write_final(
            run.output, content, model_card(run.provenance, content, first_values(run.output / METRICS_FILE)), best
        )
    if accelerator.is_main_process:
        remove_old_checkpoints(run.output, run.logging_config.save_total_limit, run.resume_point.damaged, finished=True)
    if run.teacher_blocks is not None:
        run.teacher_blocks.finish()
    accelerator.end_training()  # takes the process group down
    return content


def _take_note(
    run: TrainingRun,
    standing: TrainerState,
    average: ExponentialMovingAverage,
    step: int,
    losses: Mapping[str, float],
    norm: float,
) -> None:
    """Count a step, and have the average follow the weights that it changed; all processes call it.

    Raises:
        XtkError: too many steps were skipped, or weights of the student are not finite.
    """
    if not step_is_finite(losses, norm):
        _check_finite_weights(run, f"step {step + 1:,}")
        standing.count_skipped_step(step + 1, losses["loss"], norm, run.logging_config.max_skipped_steps)
        return
    standing.consecutive_skipped_steps = 0
    if run.recipe.learning_rate:
        average.update()


def _checked_content(run: TrainingRun, standing: TrainerState, steps: int, identity: dict[str, Any]) -> dict[str, Any]:
    """Return what `xtk.json` says of a student, after a check that it may be written; all processes call it.

    Raises:
        XtkError: no step changed it, or its weights are not finite.
    """
    if standing.skipped_steps == steps:
        raise XtkError(
            f"all {steps:,} steps were skipped, since loss or gradient was not finite: no student is written",
            where=str(run.output),
            hint="a smaller --learning-rate or --mixed-precision no; look at the data and at the teacher",
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
    """Refuse to go on with weights that hold NaN or infinity, which no later step mends; all processes call it.

    Raises:
        XtkError: names the weights.
    """
    names = non_finite_parameters(run.student.model)
    if run.parallel.all_reduce_max(int(bool(names)), run.accelerator.device):
        there = f"{len(names):,} ({format_names(names)})" if names else "those of another process"
        raise XtkError(
            f"weights of the student are not finite (NaN or infinity): {there}",
            where=f"{where}, {run.output}",
            hint="an earlier checkpoint of this run, if there is one; a smaller --learning-rate",
        )


def _connect_online_teachers(
    run: TrainingRun, average: ExponentialMovingAverage, optimizer: torch.optim.Optimizer
) -> None:
    """Let live teachers have the student, or its device, while they speak."""
    if run.teacher_blocks is not None:
        run.teacher_blocks.lend_student = partial(_self_teacher, run, average)
        if run.recipe.offload_student:
            run.teacher_blocks.offload = partial(offload_student, run.student.model, optimizer, torch.device("cpu"))


@contextlib.contextmanager
def _self_teacher(run: TrainingRun, average: ExponentialMovingAverage, weights: str) -> Iterator[BackboneWithHead]:
    """Lend the student as its own teacher, with the weights of a name of `OWN`."""
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
        hint="run the same command again: it goes on from there",
    )


def _step(
    run: TrainingRun, optimizer: torch.optim.Optimizer, micro_batches: list[MicroBatch]
) -> tuple[dict[str, float], float]:
    """Take one optimisation step; return the mean of each loss and the norm of the gradient before clipping.

    Where one of them is no number nothing is moved: not the weights, nor what the optimizer remembers.
    """
    recipe, maker, device = run.recipe, run.batch_builder, run.accelerator.device
    if recipe.max_batch_tokens:  # every process takes as many passes, some of them empty
        passes = run.parallel.all_reduce_max(len(micro_batches), device)
        micro_batches = [*micro_batches, *(maker.build([]) for _ in range(passes - len(micro_batches)))]
    whole = StepReduction(maker.objectives, maker.score_weighting, maker.teachers, micro_batches, run.parallel, device)
    balance = 1.0
    if recipe.scale_kd_to == "ce":
        balance = whole.kd_scale(_pass(run, micro_batches, whole.term_scales(), backward=False)[0])
    sums, seen = _pass(run, micro_batches, whole.term_scales(balance), backward=True)
    norm = clip_gradients(run.parameters, recipe.max_grad_norm)
    losses = whole.loss_metrics(sums, balance) | whole.surrogate_metrics(seen)
    if step_is_finite(losses, norm) and recipe.learning_rate:  # at 0, AdamW and averages would turn -0.0 into 0.0
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return losses | ({"kd_scale": balance} if recipe.scale_kd_to == "ce" else {}), norm


def _pass(
    run: TrainingRun, micro_batches: list[MicroBatch], scales: list[float], *, backward: bool
) -> tuple[list[float], list[list[float]]]:
    """Take the micro-batches through the model; return each term's sum over its items, over all processes.

    Beside it, `SurrogateOfTerm.seen` of each term; zeros of those without a surrogate. Without `backward` nothing is
    kept, and the random numbers (of dropout) are left for the pass that comes after.
    """
    accelerator, layout, device = run.accelerator, run.parallel, run.accelerator.device
    told = torch.zeros(len(scales), 4, device=device, dtype=torch.float64)
    devices = [device] if device.type == "cuda" else []
    with contextlib.nullcontext() if backward else torch.random.fork_rng(devices), torch.set_grad_enabled(backward):
        for number, batch in enumerate(micro_batches):
            last = number + 1 == len(micro_batches)
            terms = [term.to(device, scale) for term, scale in zip(batch.terms, scales, strict=True)]
            # Weights that are shared out are gathered and given back each pass, gradients with them.
            with contextlib.nullcontext() if last or layout.is_sharded else accelerator.no_sync(run.wrapped_student):
                total, parts = forward_student(run.wrapped_student, batch, terms, layout, device)
                if backward:
                    # Gradients are averaged over copies, and the scales are already those of the whole step.
                    torch.autograd.backward(total * layout.num_gradient_replicas)
            told[:, 0] += parts.double()
            for of_term, term in zip(told, terms, strict=True):
                if term.surrogate is not None:
                    of_term[1:] += term.surrogate.ratio_statistics
    if not backward:
        reshard_weights(run.wrapped_student)
    told = layout.all_reduce_sum(told, "copies")
    return told[:, 0].tolist(), told[:, 1:].tolist()


def _optimizer(cut: BackboneWithHead, recipe: TrainConfig) -> torch.optim.Optimizer:
    """Return AdamW, with groups of parameters that decay and that are cut alike."""
    groups: dict[Any, dict[str, Any]] = {}
    for group in parameter_groups(cut.model, recipe.weight_decay):
        for parameter in group["params"]:
            key = (group["weight_decay"], getattr(parameter, "device_mesh", None))
            groups.setdefault(key, {**group, "params": []})["params"].append(parameter)
    return torch.optim.AdamW(list(groups.values()), lr=recipe.learning_rate, fused=True)


def _step_batches(run: TrainingRun, steps: range, meter: _Meter, stop: StopListener) -> Iterator[list[MicroBatch]]:
    """Yield what each step takes, made ahead; what live teachers take is no training.

    It ends before the last step where live teachers were asked to stop.
    """
    blocks = iter([steps]) if run.teacher_blocks is None else run.teacher_blocks(steps, stop)
    while True:
        with meter.exclude_from_rate_and_wait():
            block = next(blocks, None)
        if block is None:
            return
        yield from prefetch(_maker(run), block, run.logging_config.dataloader_num_workers)


def _maker(run: TrainingRun) -> StepBatchBuilder:
    """Return what makes the micro-batches of this process."""
    recipe, layout = run.recipe, run.parallel
    return StepBatchBuilder(run.batch_builder, run.sampler, recipe.per_device_train_batch_size, recipe.max_batch_tokens,
                       layout.data_shard, layout.num_data_shards)  # fmt: skip


def _log(run: TrainingRun, metrics: MetricsFile | None, record: dict[str, Any]) -> None:
    """Write a record to the file of metrics, and to trackers, and tell of an evaluation; the first process does."""
    found = [f"{name} {value:.4f}" for name, value in record.items()
             if name.startswith("eval_") and not name.endswith("_error")]  # fmt: skip
    if found:
        terminal.note(f"distill: step {record['step']}: {'  '.join(found)}")
    if metrics is not None:
        metrics.write(record)
        values = {key: value for key, value in record.items() if key != "step"}
        run.accelerator.log(values, step=record["step"])


def _resume(run: TrainingRun, saver: CheckpointSaver) -> tuple[int, TrainerState]:
    """Return the steps that are done, and where the run stands after them."""
    folder = run.resume_point.folder
    if folder is None:
        return 0, TrainerState()
    standing = TrainerState.from_manifest(
        saver.load(folder, run.recipe.seed, random_stream=run.parallel.gradient_replica)
    )
    terminal.note(f"distill: going on from {folder}")
    return run.resume_point.step, standing


def _save(
    run: TrainingRun, saver: CheckpointSaver, step: int, standing: TrainerState, *, interrupted: bool = False
) -> None:
    saver.write_checkpoint(run.output, step, standing.to_dict() | ({INTERRUPTED: True} if interrupted else {}))
    if run.accelerator.is_main_process:
        damaged = [path for path in run.resume_point.damaged if path.name != f"{CHECKPOINT}-{step}"]
        remove_old_checkpoints(run.output, run.logging_config.save_total_limit, damaged)
    run.resume_point = replace(run.resume_point, damaged=())
    run.accelerator.wait_for_everyone()


def _due(step: int, every: int, last: bool) -> bool:
    return last or (every > 0 and step % every == 0)


class _Meter:
    """Counts tokens over time, since the last reading.

    Args:
        run: whose tokens they are.
        tokens: that the run took before this process went on with it.
    """

    def __init__(self, run: TrainingRun, tokens: int) -> None:
        self._layout, self._device = run.parallel, run.accelerator.device
        self._tokens = self._silent = 0
        self._teachers = run.batch_builder.teachers
        self._unaligned = np.zeros((len(self._teachers), 2))
        self._all_tokens = tokens
        self._interval_start = self._started = time.monotonic()
        self._waited = 0.0
        self.summary = ""

    def timed(self, batches: Iterator[list[MicroBatch]]) -> Iterator[list[MicroBatch]]:
        """Yield batches, and count the time until each is there."""
        started = time.monotonic()
        for batch in batches:
            self._waited += time.monotonic() - started
            yield batch
            started = time.monotonic()

    def count(self, batches: list[MicroBatch]) -> None:
        """Count what a step took."""
        self._tokens += sum(batch.tokens for batch in batches)
        self._unaligned += sum(batch.unaligned for batch in batches)
        self._silent += sum(batch.nan_positions for batch in batches)

    def total_tokens(self) -> int:
        """Return the tokens of the run so far, over all processes; every process has to call it."""
        tokens = torch.tensor(self._tokens, dtype=torch.float64, device=self._device)
        return self._all_tokens + int(self._layout.all_reduce_sum(tokens, "data"))

    @contextlib.contextmanager
    def exclude_from_rate(self) -> Iterator[None]:
        """Leave what is done meanwhile, which is no training, out of the rate."""
        started = time.monotonic()
        yield
        self._interval_start += time.monotonic() - started

    @contextlib.contextmanager
    def exclude_from_rate_and_wait(self) -> Iterator[None]:
        """Leave what live teachers take out of the rate, and out of the time that was waited for a batch."""
        started = time.monotonic()
        with self.exclude_from_rate():
            yield
        self._waited -= time.monotonic() - started

    def metrics(self) -> dict[str, float]:
        """Return rates over all processes, and begin anew; every process has to call it."""
        counts = torch.tensor([self._tokens, self._silent, *self._unaligned.reshape(-1)], dtype=torch.float64)
        tokens, silent, *unaligned = self._layout.all_reduce_sum(counts.to(self._device), "data").tolist()
        now = time.monotonic()
        seconds = max(now - self._interval_start, 1e-9)
        waiting = min(1.0, self._layout.all_reduce_max(round(1e6 * self._waited), self._device) / 1e6 / seconds)
        memory = self._layout.all_reduce_max(peak_memory_bytes(self._device), self._device) / 2**30
        self.summary = f"{tokens / seconds:,.0f} tokens/s  {memory:.1f} GiB  waiting {waiting:.1%}"
        self._all_tokens += int(tokens)
        self._tokens, self._waited = 0, 0.0
        self._unaligned[:] = 0
        self._interval_start = now
        if silent:
            terminal.note(f"distill: the teacher said NaN at {silent:,.0f} positions so far, which are left out")
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
