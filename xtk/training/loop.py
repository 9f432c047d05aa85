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
from xtk.artifacts.runs import CHECKPOINT, METRICS, fingerprint_of_run
from xtk.errors import Stopped, XtkError
from xtk.models.causal_lm import Cut
from xtk.models.headers import some
from xtk.models.preparation import parameter_groups
from xtk.models.stored_weights import not_finite
from xtk.tokens.tokenizer import Tokenizer
from xtk.training.aside import set_aside
from xtk.training.average import Average
from xtk.training.batches import BatchMaker, MicroBatch, Order
from xtk.training.card import Lineage, model_card
from xtk.training.checkpoint import INTERRUPTED, STUDENT, Resumed, Saver, remove_old_checkpoints
from xtk.training.eval_tasks import Examination
from xtk.training.held_out import Evaluation
from xtk.training.layout import Layout
from xtk.training.live import Blocks
from xtk.training.loader import StepBatches, made_ahead
from xtk.training.metrics import MetricsFile, first_values, highest_memory, last_values, metric
from xtk.training.recipe import Recipe, Reporting
from xtk.training.standing import Standing, is_finite
from xtk.training.stopping import Stop
from xtk.training.student import clip, read_student, reshard
from xtk.training.whole_step import WholeStep


@dataclass
class Run:
    """What the loop works on.

    Attributes:
        accelerator: Accelerate's, which knows processes, devices and trackers.
        layout: how processes share the work.
        cut: the student's model.
        model: what is called: the student, wrapped for its layout.
        parameters: those that are trained.
        tokenizer: the student's.
        maker: makes micro-batches.
        order: which documents a step takes.
        recipe: what decides the result.
        reporting: what is told and kept.
        steps: optimisation steps in all.
        output: the run's folder.
        tokenizer_folder: where the student's tokenizer files lie.
        evaluation: of held-out documents; None: there are none.
        examination: what the student is asked at each evaluation; None: nothing.
        origin: what the student comes from, for its card.
        merge: as `Saver` has it.
        blocks: of steps, before each of which live teachers speak; None: there are none.
        saver: writes what the run changes, once it has begun.
        resumed: where it goes on.
    """

    accelerator: Any
    layout: Layout
    cut: Cut
    model: nn.Module
    parameters: Sequence[nn.Parameter]
    tokenizer: Tokenizer
    maker: BatchMaker
    order: Order
    recipe: Recipe
    reporting: Reporting
    steps: int
    output: Path
    tokenizer_folder: Path
    evaluation: Evaluation | None = None
    examination: Examination | None = None
    origin: Lineage = field(default_factory=Lineage)
    merge: Callable[[Path, Path], None] | None = None
    blocks: Blocks | None = None
    saver: Saver | None = None
    resumed: Resumed = field(default_factory=Resumed)

    @property
    def is_evaluated(self) -> bool:
        """Whether there is anything to evaluate on."""
        return self.evaluation is not None or self.examination is not None

    def evaluate(self) -> dict[str, float]:
        """Return all figures of an evaluation; every process has to call it."""
        return {name: value for one in (self.evaluation, self.examination) if one is not None
                for name, value in one().items()}  # fmt: skip


def train(run: Run, identity: dict[str, Any]) -> dict[str, Any]:
    """Train from the last checkpoint, or from the start, to the end; return what `xtk.json` says.

    Raises:
        Stopped: a signal or a time limit ended it, after a checkpoint.
        XtkError: loss or gradient is not finite too often, or in all steps; or weights of the student are not.
    """
    accelerator, recipe = run.accelerator, run.recipe
    optimizer = _optimizer(run.cut, recipe)
    run.model.train()
    torch.manual_seed(recipe.seed + run.layout.copy_rank)
    average = Average(run.cut.model, recipe.ema_decay)
    run.saver = saver = Saver(run.cut.model, optimizer, run.tokenizer_folder, averages=average.tensors,
                              layout=str(run.layout), merge=run.merge, run=fingerprint_of_run(identity))  # fmt: skip
    _lend(run, average, optimizer)
    done, standing = _resume(run, saver)
    metrics = MetricsFile(run.output / METRICS, done) if accelerator.is_main_process else None
    meter = _Meter(run, standing.tokens)
    if run.is_evaluated and run.reporting.eval_on_start and not done:
        with meter.paused():
            _log(run, metrics, {"step": 0, **run.evaluate()})
    with terminal.Progress("distill", run.steps, "steps", done=done) as progress, Stop(run.reporting.deadline) as stop:
        batches, kept = meter.waited_for(_batches(run, range(done, run.steps), meter, stop)), done
        for step in range(done, run.steps):
            micro_batches = next(batches, None)
            if micro_batches is None:  # while teachers spoke
                if step > kept:
                    standing.tokens = meter.total()
                    due = bool(run.reporting.save_steps) and step % run.reporting.save_steps == 0
                    _save(run, saver, step, standing, interrupted=not due)
                _stop(run, step, stop.agreed(accelerator.device, by_signals=True))
            learning_rate = recipe.learning_rate_at(step, run.steps)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            losses, norm = _step(run, optimizer, micro_batches)
            _take_note(run, standing, average, step, losses, norm)
            meter.count(micro_batches)
            last = step + 1 == run.steps
            record = {"step": step + 1, **losses, "learning_rate": learning_rate, "gradient_norm": norm}
            if (step + 1) % run.reporting.logging_steps == 0 or step == 0 or last:
                record |= meter.read() | {"skipped_steps": standing.skipped_steps}
                if run.blocks is not None:
                    record |= run.blocks.told(step)
            evaluated = _due(step + 1, run.reporting.eval_steps, last) and run.is_evaluated
            if evaluated:
                with meter.paused(), average.in_place(run.model):
                    record |= run.evaluate()
                    bits = record.get("eval_bits_per_byte")
                    better = bits is not None and standing.evaluated(step + 1, bits)
                    if better and recipe.early_stopping_patience:
                        saver.write_best(run.output, step + 1)
                last = last or 0 < recipe.early_stopping_patience <= standing.evaluations_since
            if "tokens_per_second" in record or evaluated:
                _log(run, metrics, record)
            stopped = stop.agreed(accelerator.device)
            due = bool(run.reporting.save_steps) and (step + 1) % run.reporting.save_steps == 0
            if (due or stopped) and not last:
                with meter.paused():
                    standing.tokens = meter.total()
                    _save(run, saver, step + 1, standing, interrupted=not due)
                kept = step + 1
            shown = "  ".join(f"{name} {value:.4f}" for name, value in losses.items())
            progress.advance(1, f"{shown}  {meter.told}")
            if last:
                break
            if stopped:
                _stop(run, step + 1, stopped)
    standing.tokens = meter.total()
    accelerator.wait_for_everyone()
    content = _checked_content(run, standing, step + 1, identity)
    best = standing.best_step if recipe.early_stopping_patience else 0
    if best:
        content["best"] = {"step": best, "eval_bits_per_byte": standing.best_bits_per_byte}
    with average.in_place(run.model):
        saver.finish(run.output, content, model_card(run.origin, content, first_values(run.output / METRICS)), best)
    if accelerator.is_main_process:
        remove_old_checkpoints(run.output, run.reporting.save_total_limit, run.resumed.damaged, finished=True)
    if run.blocks is not None:
        run.blocks.finish()
    accelerator.end_training()  # takes the process group down
    return content


def _take_note(
    run: Run, standing: Standing, average: Average, step: int, losses: Mapping[str, float], norm: float
) -> None:
    """Count a step, and have the average follow the weights that it changed; all processes call it.

    Raises:
        XtkError: too many steps were skipped, or weights of the student are not finite.
    """
    if not is_finite(losses, norm):
        _check_weights(run, f"step {step + 1:,}")
        standing.skip(step + 1, losses["loss"], norm, run.reporting.max_skipped_steps)
        return
    standing.skipped_in_a_row = 0
    if run.recipe.learning_rate:
        average.follow()


def _checked_content(run: Run, standing: Standing, steps: int, identity: dict[str, Any]) -> dict[str, Any]:
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
    _check_weights(run, f"the student after step {steps:,}")
    return {
        "kind": STUDENT,
        "steps": steps,
        "documents_per_step": run.order.per_step,
        "recipe": identity,
        "metrics": last_values(run.output / METRICS),
    }


def _check_weights(run: Run, where: str) -> None:
    """Refuse to go on with weights that hold NaN or infinity, which no later step mends; all processes call it.

    Raises:
        XtkError: names the weights.
    """
    names = not_finite(run.cut.model)
    if run.layout.highest(int(bool(names)), run.accelerator.device):
        there = f"{len(names):,} ({some(names)})" if names else "those of another process"
        raise XtkError(
            f"weights of the student are not finite (NaN or infinity): {there}",
            where=f"{where}, {run.output}",
            hint="an earlier checkpoint of this run, if there is one; a smaller --learning-rate",
        )


def _lend(run: Run, average: Average, optimizer: torch.optim.Optimizer) -> None:
    """Let live teachers have the student, or its device, while they speak."""
    if run.blocks is not None:
        run.blocks.own = partial(_own_teacher, run, average)
        if run.recipe.offload_student:
            run.blocks.aside = partial(set_aside, run.cut.model, optimizer, torch.device("cpu"))


@contextlib.contextmanager
def _own_teacher(run: Run, average: Average, weights: str) -> Iterator[Cut]:
    """Lend the student as its own teacher, with the weights of a name of `OWN`."""
    run.cut.model.eval()
    without = run.cut.model.disable_adapter() if weights == "base" else contextlib.nullcontext()
    with average.in_place(run.model) if weights == "ema" else contextlib.nullcontext(), without:
        yield run.cut
    run.cut.model.train()


def _stop(run: Run, done: int, why: str) -> NoReturn:
    run.accelerator.end_training()
    raise Stopped(
        f"stopped after step {done:,} of {run.steps:,}: {why}" if done else f"stopped before the first step: {why}",
        where=str(run.output),
        hint="run the same command again: it goes on from there",
    )


def _step(
    run: Run, optimizer: torch.optim.Optimizer, micro_batches: list[MicroBatch]
) -> tuple[dict[str, float], float]:
    """Take one optimisation step; return the mean of each loss and the norm of the gradient before clipping.

    Where one of them is no number nothing is moved: not the weights, nor what the optimizer remembers.
    """
    recipe, maker, device = run.recipe, run.maker, run.accelerator.device
    if recipe.max_batch_tokens:  # every process takes as many passes, some of them empty
        passes = run.layout.highest(len(micro_batches), device)
        micro_batches = [*micro_batches, *(maker.make([]) for _ in range(passes - len(micro_batches)))]
    whole = WholeStep(maker.objectives, maker.weighing, maker.teachers, micro_batches, run.layout, device)
    balance = 1.0
    if recipe.balance == "ce":
        balance = whole.balance(_pass(run, micro_batches, whole.scales(), backward=False)[0])
    sums, seen = _pass(run, micro_batches, whole.scales(balance), backward=True)
    norm = clip(run.parameters, recipe.max_grad_norm)
    losses = whole.losses(sums, balance) | whole.ratios(seen)
    if is_finite(losses, norm) and recipe.learning_rate:  # at 0, AdamW and averages would turn -0.0 into 0.0
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return losses | ({"balance": balance} if recipe.balance == "ce" else {}), norm


def _pass(
    run: Run, micro_batches: list[MicroBatch], scales: list[float], *, backward: bool
) -> tuple[list[float], list[list[float]]]:
    """Take the micro-batches through the model; return each term's sum over its items, over all processes.

    Beside it, `SurrogateOfTerm.seen` of each term; zeros of those without a surrogate. Without `backward` nothing is
    kept, and the random numbers (of dropout) are left for the pass that comes after.
    """
    accelerator, layout, device = run.accelerator, run.layout, run.accelerator.device
    told = torch.zeros(len(scales), 4, device=device, dtype=torch.float64)
    devices = [device] if device.type == "cuda" else []
    with contextlib.nullcontext() if backward else torch.random.fork_rng(devices), torch.set_grad_enabled(backward):
        for number, batch in enumerate(micro_batches):
            last = number + 1 == len(micro_batches)
            terms = [term.to(device, scale) for term, scale in zip(batch.terms, scales, strict=True)]
            # Weights that are shared out are gathered and given back each pass, gradients with them.
            with contextlib.nullcontext() if last or layout.sharded else accelerator.no_sync(run.model):
                total, parts = read_student(run.model, batch, terms, layout, device)
                if backward:
                    # Gradients are averaged over copies, and the scales are already those of the whole step.
                    torch.autograd.backward(total * layout.copies)
            told[:, 0] += parts.double()
            for of_term, term in zip(told, terms, strict=True):
                if term.surrogate is not None:
                    of_term[1:] += term.surrogate.seen
    if not backward:
        reshard(run.model)
    told = layout.add(told, "copies")
    return told[:, 0].tolist(), told[:, 1:].tolist()


def _optimizer(cut: Cut, recipe: Recipe) -> torch.optim.Optimizer:
    """Return AdamW, with groups of parameters that decay and that are cut alike."""
    groups: dict[Any, dict[str, Any]] = {}
    for group in parameter_groups(cut.model, recipe.weight_decay):
        for parameter in group["params"]:
            key = (group["weight_decay"], getattr(parameter, "device_mesh", None))
            groups.setdefault(key, {**group, "params": []})["params"].append(parameter)
    return torch.optim.AdamW(list(groups.values()), lr=recipe.learning_rate, fused=True)


def _batches(run: Run, steps: range, meter: _Meter, stop: Stop) -> Iterator[list[MicroBatch]]:
    """Yield what each step takes, made ahead; what live teachers take is no training.

    It ends before the last step where live teachers were asked to stop.
    """
    blocks = iter([steps]) if run.blocks is None else run.blocks(steps, stop)
    while True:
        with meter.taught():
            block = next(blocks, None)
        if block is None:
            return
        yield from made_ahead(_maker(run), block, run.reporting.dataloader_num_workers)


def _maker(run: Run) -> StepBatches:
    """Return what makes the micro-batches of this process."""
    recipe, layout = run.recipe, run.layout
    return StepBatches(run.maker, run.order, recipe.per_device_train_batch_size, recipe.max_batch_tokens,
                       layout.data_rank, layout.data_ranks)  # fmt: skip


def _log(run: Run, metrics: MetricsFile | None, record: dict[str, Any]) -> None:
    """Write a record to the file of metrics, and to trackers, and tell of an evaluation; the first process does."""
    found = [f"{name} {value:.4f}" for name, value in record.items()
             if name.startswith("eval_") and not name.endswith("_error")]  # fmt: skip
    if found:
        terminal.note(f"distill: step {record['step']}: {'  '.join(found)}")
    if metrics is not None:
        metrics.write(record)
        values = {key: value for key, value in record.items() if key != "step"}
        run.accelerator.log(values, step=record["step"])


def _resume(run: Run, saver: Saver) -> tuple[int, Standing]:
    """Return the steps that are done, and where the run stands after them."""
    folder = run.resumed.folder
    if folder is None:
        return 0, Standing()
    standing = Standing.of(saver.load(folder, run.recipe.seed, stream=run.layout.copy_rank))
    terminal.note(f"distill: going on from {folder}")
    return run.resumed.step, standing


def _save(run: Run, saver: Saver, step: int, standing: Standing, *, interrupted: bool = False) -> None:
    saver.write_checkpoint(run.output, step, standing.told() | ({INTERRUPTED: True} if interrupted else {}))
    if run.accelerator.is_main_process:
        damaged = [path for path in run.resumed.damaged if path.name != f"{CHECKPOINT}-{step}"]
        remove_old_checkpoints(run.output, run.reporting.save_total_limit, damaged)
    run.resumed = replace(run.resumed, damaged=())
    run.accelerator.wait_for_everyone()


def _due(step: int, every: int, last: bool) -> bool:
    return last or (every > 0 and step % every == 0)


class _Meter:
    """Counts tokens over time, since the last reading.

    Args:
        run: whose tokens they are.
        tokens: that the run took before this process went on with it.
    """

    def __init__(self, run: Run, tokens: int) -> None:
        self._layout, self._device = run.layout, run.accelerator.device
        self._tokens = self._silent = 0
        self._teachers = run.maker.teachers
        self._unaligned = np.zeros((len(self._teachers), 2))
        self._all_tokens = tokens
        self._since = self._begun = time.monotonic()
        self._waited = 0.0
        self.told = ""

    def waited_for(self, batches: Iterator[list[MicroBatch]]) -> Iterator[list[MicroBatch]]:
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
        self._silent += sum(batch.silent for batch in batches)

    def total(self) -> int:
        """Return the tokens of the run so far, over all processes; every process has to call it."""
        tokens = torch.tensor(self._tokens, dtype=torch.float64, device=self._device)
        return self._all_tokens + int(self._layout.add(tokens, "data"))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave what is done meanwhile, which is no training, out of the rate."""
        started = time.monotonic()
        yield
        self._since += time.monotonic() - started

    @contextlib.contextmanager
    def taught(self) -> Iterator[None]:
        """Leave what live teachers take out of the rate, and out of the time that was waited for a batch."""
        started = time.monotonic()
        with self.paused():
            yield
        self._waited -= time.monotonic() - started

    def read(self) -> dict[str, float]:
        """Return rates over all processes, and begin anew; every process has to call it."""
        counts = torch.tensor([self._tokens, self._silent, *self._unaligned.reshape(-1)], dtype=torch.float64)
        tokens, silent, *unaligned = self._layout.add(counts.to(self._device), "data").tolist()
        now = time.monotonic()
        seconds = max(now - self._since, 1e-9)
        waiting = min(1.0, self._layout.highest(round(1e6 * self._waited), self._device) / 1e6 / seconds)
        memory = self._layout.highest(highest_memory(self._device), self._device) / 2**30
        self.told = f"{tokens / seconds:,.0f} tokens/s  {memory:.1f} GiB  waiting {waiting:.1%}"
        self._all_tokens += int(tokens)
        self._tokens, self._waited = 0, 0.0
        self._unaligned[:] = 0
        self._since = now
        if silent:
            terminal.note(f"distill: the teacher said NaN at {silent:,.0f} positions so far, which are left out")
        return {
            "tokens": self._all_tokens,
            "tokens_per_second": round(tokens / seconds, 1),
            "seconds": round(now - self._begun, 3),
            "waiting": round(waiting, 6),
            "memory": round(memory, 3),
            **{
                metric("unaligned", name, self._teachers): round(missed / max(rows, 1), 6)
                for name, missed, rows in zip(self._teachers, unaligned[::2], unaligned[1::2], strict=True)
            },
        }
