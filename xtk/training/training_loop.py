"""The training loop: steps, logging, evaluation, checkpoints; equal gradients for any number of processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from xtk import terminal
from xtk.batches.batch_prefetch import StepBatchBuilder, copied_ahead, prefetch
from xtk.batches.cross_process_reduction import REGION_METRICS, StepReduction
from xtk.batches.first_step_bits_per_byte import (
    STUDENT_METRIC,
    TEACHER_METRIC,
    TextScorer,
    comparison_metrics,
    report_weak_teachers,
)
from xtk.batches.micro_batches import BatchBuilder, BatchSampler, MicroBatch
from xtk.errors import ResumableStop, XtkError
from xtk.files.run_names import CHECKPOINT
from xtk.losses.cells.clipped_surrogate import ClippedSurrogateCells
from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.resolver import ModelRef
from xtk.models.safetensors_headers import format_names
from xtk.models.student_model_setup import parameter_groups
from xtk.models.weight_validation import non_finite_parameters
from xtk.parallel import process_group
from xtk.parallel.graceful_stop import StopListener
from xtk.parallel.host_to_device import read_together
from xtk.parallel.parallel_config import ParallelConfig
from xtk.progress import Progress
from xtk.runs.checkpoint import INTERRUPTED, STUDENT, CheckpointSaver, remove_old_checkpoints
from xtk.runs.folder import METRICS_FILE, run_fingerprint
from xtk.runs.metrics_file import MetricsFile, first_values, last_values
from xtk.runs.model_card import Provenance, model_card
from xtk.runs.resume_point import ResumePoint
from xtk.runs.trainer_state import TrainerState, step_is_finite
from xtk.text.chat.conversation_tokens import REGIONS
from xtk.text.tokenizer import Tokenizer
from xtk.text.tokenizer_files import tokenizer_folder
from xtk.training.ema_and_cpu_offload import ExponentialMovingAverage, offload_student
from xtk.training.held_out_evaluation import HeldOutEvaluator
from xtk.training.online_teacher_scoring import TeacherBlocks
from xtk.training.student_with_losses import GradientClipping, forward_student, predicted_tokens, reshard_weights
from xtk.training.task_evaluation import TaskEvaluator
from xtk.training.throughput_meter import ThroughputMeter
from xtk.training.train_config import LoggingConfig, TrainConfig


@dataclass
class TrainingRun:
    """Everything that the training loop uses."""

    accelerator: Any  # Accelerate's accelerator: processes, devices and trackers
    parallel: ParallelConfig  # the parallel layout
    student: BackboneWithHead  # the student, split into backbone and output head
    wrapped_student: nn.Module  # the student with its losses, wrapped for the layout
    parameters: Sequence[nn.Parameter]  # the trainable parameters
    tokenizer: Tokenizer  # the student's tokenizer
    batch_builder: BatchBuilder  # builds micro-batches
    sampler: BatchSampler  # chooses the documents of each step
    recipe: TrainConfig  # the options that decide the result
    logging_config: LoggingConfig  # logging, evaluation and checkpoints
    identity: dict[str, Any]  # the options and fingerprints that decide whether two runs are the same
    steps: int  # total number of optimizer steps
    output: Path  # the run folder
    initial_student: ModelRef  # the student before training, with its tokenizer files
    packing_multiple: int = 0  # with packing, the length of a packed sequence is a multiple of this; 0: no packing
    held_out_evaluator: HeldOutEvaluator | None = None  # evaluates held-out documents; None: there are none
    task_evaluator: TaskEvaluator | None = None  # evaluates --eval-tasks; None: there are none
    provenance: Provenance = field(default_factory=Provenance)  # base model, teachers and data, for the model card
    merge_adapter: Callable[[Path, Path], None] | None = None  # as in `CheckpointSaver`
    # Blocks of steps, each scored by online teachers before it; None: no online teachers
    teacher_blocks: TeacherBlocks | None = None
    saver: CheckpointSaver | None = None  # writes checkpoints; set when training begins
    resume_point: ResumePoint = field(default_factory=ResumePoint)  # the checkpoint from which the run resumes

    @property
    def has_evaluation(self) -> bool:
        """Whether there is anything to evaluate on."""
        return self.held_out_evaluator is not None or self.task_evaluator is not None

    def evaluate(self) -> dict[str, float]:
        """Return all metrics of an evaluation (collective)."""
        return {name: value for one in (self.held_out_evaluator, self.task_evaluator) if one is not None
                for name, value in one().items()}  # fmt: skip


def train(run: TrainingRun) -> dict[str, Any]:
    """Train from the last checkpoint, or from the start, to the end; return the content of `xtk.json`.

    Raises:
        ResumableStop: a signal or a time limit ended the run, after a checkpoint.
    """
    return _TrainingLoop(run).train()


class _TrainingLoop:
    """The state of a run while it trains: optimizer, counters, checkpoints and metrics."""

    def __init__(self, run: TrainingRun) -> None:
        self.run, self.recipe = run, run.recipe
        self.optimizer = _optimizer(run.student, run.recipe)
        run.wrapped_student.train()
        torch.manual_seed(run.recipe.seed + run.parallel.gradient_replica)
        self.average = ExponentialMovingAverage(run.student.model, run.recipe.ema_decay)
        tokenizer_files = tokenizer_folder(run.initial_student.folder, run.initial_student.adapter)
        run.saver = self.saver = CheckpointSaver(
            run.student.model, self.optimizer, tokenizer_files, start_token=run.recipe.start_token,
            averages=self.average.averages,
            parallel=str(run.parallel), merge_adapter=run.merge_adapter, run_fingerprint=run_fingerprint(run.identity),
        )  # fmt: skip
        if run.teacher_blocks is not None:  # teachers may be the student (--teacher self) or use its device
            run.teacher_blocks.lend_student = partial(_self_teacher, run, self.average)
            if run.recipe.offload_student:
                move = partial(offload_student, run.student.model, self.optimizer, torch.device("cpu"))
                run.teacher_blocks.offload = move
        self.first_step, self.state = _resume(run, self.saver)
        self.saved_step = self.first_step
        is_main = run.accelerator.is_main_process
        # Without a checkpoint, the evaluation at step 0 is repeated too.
        last_step = self.first_step if self.first_step else -1
        self.metrics = MetricsFile(run.output / METRICS_FILE, last_step) if is_main else None
        self.meter = ThroughputMeter(
            run.parallel, run.accelerator.device, run.batch_builder.teachers, self.state.tokens
        )

    def train(self) -> dict[str, Any]:
        """Take all remaining steps; return the content of `xtk.json`."""
        run = self.run
        steps = self.first_step
        with (
            Progress("distill", run.steps, "steps", done=self.first_step) as progress,
            StopListener(run.logging_config.deadline) as stop,
        ):
            if run.has_evaluation and run.logging_config.eval_on_start and not self.first_step:
                with self.meter.exclude_from_rate():
                    _log(run, self.metrics, {"step": 0, **self._evaluate(0)})
            batches = self.meter.timed(_step_batches(run, range(self.first_step, run.steps), self.meter, stop))
            is_last = False
            while not is_last and steps < run.steps:
                micro_batches = next(batches, None)
                if micro_batches is None:
                    self._stop_before(steps, stop)
                losses, is_last = self._train_step(steps, micro_batches)
                steps += 1
                stopped = stop.reason()
                if (_saves_at(run, steps) or stopped) and not is_last:
                    with self.meter.exclude_from_rate():
                        self._save(steps)
                progress.advance(1, f"{shown_losses(losses)}  {self.meter.summary}")
                if stopped and not is_last:
                    _raise_stopped(run, steps, stopped)
        return self._finish(steps)

    def _stop_before(self, step: int, stop: StopListener) -> NoReturn:
        """End a run that was stopped while online teachers scored the documents of a step (collective)."""
        if step > self.saved_step:
            self._save(step)
        _raise_stopped(self.run, step, stop.reason(by_signals=True))

    def _train_step(self, step: int, micro_batches: list[MicroBatch]) -> tuple[dict[str, float], bool]:
        """Take a step (counted from 0), evaluate and log if due; return its losses, and whether it is the last."""
        run, recipe, state = self.run, self.recipe, self.state
        learning_rate = recipe.learning_rate_at(step, run.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        losses, norm = _step(run, self.optimizer, micro_batches)
        self._count_step(step, losses, norm)
        if step == 0 and not (run.teacher_blocks is not None and run.teacher_blocks.lends_student):
            report_weak_teachers(losses, run.batch_builder.teachers)
        self.meter.count(micro_batches)
        is_last = step + 1 == run.steps
        record = {"step": step + 1, **losses, "learning_rate": learning_rate, "gradient_norm": norm}
        is_logged = (step + 1) % run.logging_config.logging_steps == 0 or step == 0 or is_last
        if is_logged:
            record |= self.meter.metrics() | {"skipped_steps": state.skipped_steps}
            if run.teacher_blocks is not None:
                record |= run.teacher_blocks.metrics(step)
        every = run.logging_config.eval_steps
        is_evaluated = run.has_evaluation and (is_last or (every > 0 and (step + 1) % every == 0))
        if is_evaluated:
            with self.meter.exclude_from_rate(), self.average.swapped_in(run.wrapped_student):
                record |= self._evaluate(step + 1)
            is_last = is_last or 0 < recipe.early_stopping_patience <= state.evaluations_without_improvement
        if is_logged or is_evaluated:
            _log(run, self.metrics, record)
        return losses, is_last

    def _count_step(self, step: int, losses: Mapping[str, float], norm: float) -> None:
        """Update counters and the EMA after a step (collective)."""
        if not step_is_finite(losses, norm):
            _check_finite_weights(self.run, f"step {step + 1:,}")
            self.state.count_skipped_step(step + 1, losses["loss"], norm, self.run.logging_config.max_skipped_steps)
            return
        self.state.consecutive_skipped_steps = 0
        if self.recipe.learning_rate:
            self.average.update()

    def _evaluate(self, step: int) -> dict[str, float]:
        """Return the metrics of an evaluation; for early stopping, keep the weights if it is the best (collective)."""
        metrics = self.run.evaluate()
        bits = metrics.get("eval_bits_per_byte")
        is_better = bits is not None and self.state.count_evaluation(step, bits)
        if is_better and self.recipe.early_stopping_patience:
            self.saver.write_best(self.run.output, step)
        return metrics

    def _save(self, step: int) -> None:
        """Write a checkpoint and remove old ones (collective)."""
        run = self.run
        self.state.tokens = self.meter.total_tokens()
        interrupted = {} if _saves_at(run, step) else {INTERRUPTED: True}
        self.saver.write_checkpoint(run.output, step, self.state.to_dict() | interrupted)
        if run.accelerator.is_main_process:
            damaged = [path for path in run.resume_point.damaged if path.name != f"{CHECKPOINT}-{step}"]
            remove_old_checkpoints(run.output, run.logging_config.save_total_limit, damaged)
        run.resume_point = replace(run.resume_point, damaged=())
        process_group.barrier()
        self.saved_step = step

    def _finish(self, steps: int) -> dict[str, Any]:
        """Write the student; return the content of its `xtk.json` (collective)."""
        run, state, accelerator = self.run, self.state, self.run.accelerator
        state.tokens = self.meter.total_tokens()
        process_group.barrier()
        if state.skipped_steps == steps:
            raise XtkError(
                f"no student is saved: the loss or the gradient was NaN or infinite in all {steps:,} steps",
                where=str(run.output),
                hint="use a smaller --learning-rate or --mixed-precision no; check the data and the teacher",
            )
        _check_finite_weights(run, f"the student after step {steps:,}")
        keeps_best = self.recipe.early_stopping_patience and state.best_bits_per_byte is not None
        best = state.best_step if keeps_best else None
        content = {
            "kind": STUDENT,
            "steps": steps,
            "documents_per_step": run.sampler.documents_per_step,
            "recipe": run.identity,
            "metrics": last_values(run.output / METRICS_FILE, best),
        }
        if best is not None:
            content["best"] = {"step": best, "eval_bits_per_byte": state.best_bits_per_byte}
        with self.average.swapped_in(run.wrapped_student):
            card = model_card(run.provenance, content, first_values(run.output / METRICS_FILE))
            self.saver.write_final(run.output, content, card, best)
        if accelerator.is_main_process:
            damaged = run.resume_point.damaged
            remove_old_checkpoints(run.output, run.logging_config.save_total_limit, damaged, finished=True)
        if run.teacher_blocks is not None:
            run.teacher_blocks.finish()
        accelerator.end_training()  # destroys the process group
        return content


def _check_finite_weights(run: TrainingRun, where: str) -> None:
    """Raise XtkError if weights are NaN or infinite, which later steps cannot repair (collective)."""
    names = non_finite_parameters(run.student.model)
    if run.parallel.all_reduce_max(int(bool(names))):
        affected = f"{len(names):,} tensors ({format_names(names)})" if names else "in another process"
        raise XtkError(
            f"the student has weights that are NaN or infinite: {affected}",
            where=f"{where}, {run.output}",
            hint="use a smaller --learning-rate; resume from an earlier checkpoint if there is one",
        )


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
    reduction = StepReduction.of_step(
        builder.objectives, builder.score_weighting, builder.teachers, micro_batches, run.parallel, device
    )
    # With --max-batch-tokens, processes may have fewer micro-batches than others; all take the same number of passes.
    micro_batches = [*micro_batches, *(builder.build([]) for _ in range(reduction.num_passes - len(micro_batches)))]
    kd_scale = 1.0
    if recipe.scale_kd_to == "ce":
        totals, _ = _pass(run, micro_batches, reduction.term_scales(), backward=False)
        kd_scale = reduction.kd_scale(totals[:, 0].tolist())
    # Gradients are averaged over replicas, but the scales are those of the whole step.
    scales = [scale * run.parallel.num_gradient_replicas for scale in reduction.term_scales(kd_scale)]
    totals, text_sums = _pass(run, micro_batches, scales, backward=True)
    clipping = GradientClipping(run.parameters)
    # All that the host needs of a step is read at once: on a GPU it waits here until the step is computed.
    flat_totals, text_sums_read, *norms = read_together([totals, text_sums, *clipping.norms])
    norm = clipping.clip([value for (value,) in norms], recipe.max_grad_norm)
    of_terms = np.array(flat_totals).reshape(len(builder.objectives), -1)
    losses = reduction.loss_metrics(of_terms[:, 0].tolist(), kd_scale) | reduction.surrogate_metrics(
        of_terms[:, 1:4].tolist()
    )
    losses |= reduction.region_metrics(of_terms[:, 4:], kd_scale)
    losses |= comparison_metrics(text_sums_read, builder.teachers)
    if step_is_finite(losses, norm) and recipe.learning_rate:  # at 0, AdamW and EMA would turn -0.0 into 0.0
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return losses | ({"kd_scale": kd_scale} if recipe.scale_kd_to == "ce" else {}), norm


def _pass(
    run: TrainingRun, micro_batches: list[MicroBatch], scales: list[float], *, backward: bool
) -> tuple[Tensor, Tensor]:
    """Run forward (and backward) passes; return sums over all processes, float64 [terms, 5 + regions], on the device.

    The first is the loss summed over tokens or spans, the next three are the ratio statistics of policy-gradient losses
    (zeros for others), and the others are sums of the loss by region, with `backward` only. Without `backward`,
    gradients and random states stay unchanged, so that the next pass has the same dropout.

    Also return the sums of `TextScorer.sums`, float64 [teachers, 3]: zeros after the first step.
    """
    accelerator, layout, device = run.accelerator, run.parallel, run.accelerator.device
    totals = torch.zeros(len(scales), 5 + len(REGIONS), device=device, dtype=torch.float64)
    text_sums = torch.zeros(len(run.batch_builder.teachers), 3, device=device, dtype=torch.float64)
    devices = [device] if device.type == "cuda" else []
    with contextlib.nullcontext() if backward else torch.random.fork_rng(devices), torch.set_grad_enabled(backward):
        for number, (batch, terms) in enumerate(copied_ahead(micro_batches, scales, device)):
            last = number + 1 == len(micro_batches)
            texts = batch.compared_text if backward else ()
            hook = TextScorer(texts, predicted_tokens(batch), layout.cp) if texts else None
            # Sharded weights are gathered, and gradients reduced, in every pass.
            with contextlib.nullcontext() if last or layout.is_sharded else accelerator.no_sync(run.wrapped_student):
                total, parts = forward_student(run.wrapped_student, batch, terms, layout, device, hook)
                if backward:
                    torch.autograd.backward(total)
            if hook is not None:
                text_sums += hook.sums
            totals[:, 0] += parts.double()
            for term_totals, term in zip(totals, terms, strict=True):
                term_totals[4:] += term.region_sums
                if isinstance(term, ClippedSurrogateCells):
                    term_totals[1:4] += term.ratio_statistics
    if not backward:
        reshard_weights(run.wrapped_student)
    if micro_batches[0].compared_text:  # of the first step, in all processes
        layout.all_reduce_sum(text_sums, "copies")
    return layout.all_reduce_sum(totals, "copies"), text_sums


def _optimizer(student: BackboneWithHead, recipe: TrainConfig) -> torch.optim.Optimizer:
    """Return AdamW, with parameters grouped by weight decay and device mesh."""
    groups: dict[Any, dict[str, Any]] = {}
    for group in parameter_groups(student.model, recipe.weight_decay):
        for parameter in group["params"]:
            key = (group["weight_decay"], getattr(parameter, "device_mesh", None))
            groups.setdefault(key, {**group, "params": []})["params"].append(parameter)
    return torch.optim.AdamW(list(groups.values()), lr=recipe.learning_rate, fused=True)


def _step_batches(
    run: TrainingRun, steps: range, meter: ThroughputMeter, stop: StopListener
) -> Iterator[list[MicroBatch]]:
    """Yield the prefetched micro-batches of each step; time of online teachers does not count as training.

    It ends early if a stop signal arrives while online teachers score.
    """
    blocks = iter([steps]) if run.teacher_blocks is None else run.teacher_blocks(steps, stop)
    while True:
        with meter.exclude_from_rate_and_wait():
            block = next(blocks, None)
        if block is None:
            return
        yield from prefetch(step_batch_builder(run), block, run.logging_config.dataloader_num_workers or 0)


def step_batch_builder(run: TrainingRun) -> StepBatchBuilder:
    """Return the builder of this process's micro-batches."""
    recipe, layout = run.recipe, run.parallel
    max_tokens = recipe.max_batch_tokens or 0
    return StepBatchBuilder(run.batch_builder, run.sampler, recipe.per_device_train_batch_size, max_tokens,
                       layout.data_shard, layout.num_data_shards, run.accelerator.device.type == "cuda")  # fmt: skip


def shown_losses(metrics: Mapping[str, float]) -> str:
    """Return the metrics of a step that the progress shows: the loss first, and no value twice."""
    names: dict[float, str] = {}  # the name that a value is shown with: a single loss is the total loss, too
    for name, value in metrics.items():
        if not name.startswith((REGION_METRICS, TEACHER_METRIC, STUDENT_METRIC)):
            names.setdefault(value, name)
    return "  ".join(f"{name} {value:.4f}" for value, name in names.items())


def _log(run: TrainingRun, metrics: MetricsFile | None, record: dict[str, Any]) -> None:
    """Write a record to the metrics file and trackers, and print evaluation results (main process only)."""
    printed = [f"{name} {value:.4f}" for name, value in record.items()
             if name.startswith("eval_") and not name.endswith("_error")]  # fmt: skip
    if printed:
        terminal.note(f"distill: step {record['step']}: {'  '.join(printed)}")
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
