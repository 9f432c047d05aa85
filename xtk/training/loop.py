"""The loop. One process or many, one micro-batch or several a step: the same loss and the same gradient."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from xtk import terminal
from xtk.errors import Stopped
from xtk.evaluation.bits import bits_per_byte
from xtk.losses.head import Term, fused_loss
from xtk.models.causal_lm import Cut
from xtk.models.head import rows_in_a_chunk
from xtk.tokens.tokenizer import Tokenizer
from xtk.training.average import Average
from xtk.training.batches import BatchMaker, MicroBatch, Order, ahead
from xtk.training.card import Origin, model_card
from xtk.training.checkpoint import METRICS, Saver, checkpoints, remove_old_checkpoints
from xtk.training.metrics import MetricsFile, first_values, last_values, metric
from xtk.training.recipe import Recipe, Reporting
from xtk.training.standing import Standing, is_finite
from xtk.training.stopping import Stop
from xtk.training.whole_step import WholeStep


class Student(nn.Module):
    """The student with its loss inside, so that whatever wraps it for many processes sees one forward pass."""

    def __init__(self, cut: Cut) -> None:
        super().__init__()
        self.cut = cut

    def forward(self, input_ids: Tensor, places: Tensor, terms: Sequence[Term]) -> tuple[Tensor, Tensor]:
        """Return the scaled total and each term's sum over its items.

        Args:
            input_ids: [B, T].
            places: [N], rows of the flattened hidden states.
            terms: the losses.
        """
        states = self.cut(input_ids).flatten(0, 1).index_select(0, places)
        head = self.cut.head
        return fused_loss(states, head, terms, rows_in_a_chunk(head.width_of(states)))


@dataclass
class Run:
    """What the loop works on.

    Attributes:
        accelerator: Accelerate's, which knows processes, devices and trackers.
        cut: the student's model.
        tokenizer: the student's.
        maker: makes micro-batches.
        order: which documents a step takes.
        recipe: what decides the result.
        reporting: what is told and kept.
        steps: optimisation steps in all.
        output: the run's folder.
        tokenizer_folder: where the student's tokenizer files lie.
        origin: what the student comes from, for its card.
    """

    accelerator: Any
    cut: Cut
    tokenizer: Tokenizer
    maker: BatchMaker
    order: Order
    recipe: Recipe
    reporting: Reporting
    steps: int
    output: Path
    tokenizer_folder: Path
    origin: Origin = field(default_factory=Origin)


def train(run: Run, identity: dict[str, Any]) -> dict[str, Any]:
    """Train from the last checkpoint, or from the start, to the end; return what `xtk.json` says.

    Raises:
        Stopped: a signal or a time limit ended it, after a checkpoint.
        XtkError: the loss or its gradient is no number, too often.
    """
    accelerator, recipe = run.accelerator, run.recipe
    optimizer = _optimizer(run.cut, recipe)
    model = accelerator.prepare_model(Student(run.cut))
    model.train()
    torch.manual_seed(recipe.seed + accelerator.process_index)
    average = Average(run.cut.model, recipe.ema_decay)
    layout = f"dp={accelerator.num_processes}"
    saver = Saver(run.cut.model, optimizer, run.tokenizer_folder, averages=average.tensors, layout=layout)
    done, standing = _resume(run, saver)
    metrics = MetricsFile(run.output / METRICS, done) if accelerator.is_main_process else None
    batches = ahead(lambda step: _micro_batches(run, step), range(done, run.steps))
    meter = _Meter(accelerator, standing.tokens, run.maker.teachers)
    with terminal.Progress("distill", run.steps, "steps", done=done) as progress, Stop(run.reporting.deadline) as stop:
        for step, micro_batches in zip(range(done, run.steps), batches, strict=True):
            learning_rate = recipe.learning_rate_at(step, run.steps)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            losses, norm = _step(run, model, optimizer, micro_batches)
            if is_finite(losses, norm):
                standing.skipped_in_a_row = 0
                average.follow()
            else:
                standing.skip(step + 1, losses["loss"], norm, run.reporting.max_skipped_steps)
            meter.count(micro_batches)
            last = step + 1 == run.steps
            record = {"step": step + 1, **losses, "learning_rate": learning_rate, "gradient_norm": norm}
            if (step + 1) % run.reporting.logging_steps == 0 or step == 0 or last:
                record |= meter.read() | {"skipped_steps": standing.skipped_steps}
            if _due(step + 1, run.reporting.eval_steps, last) and run.reporting.eval_documents:
                with meter.paused(), average.in_place(model):
                    record["eval_bits_per_byte"] = _evaluate(run)
                    if standing.evaluated(step + 1, record["eval_bits_per_byte"]) and recipe.early_stopping_patience:
                        saver.write_best(run.output, step + 1)
                last = last or 0 < recipe.early_stopping_patience <= standing.evaluations_since
            if metrics is not None and ("tokens_per_second" in record or "eval_bits_per_byte" in record):
                metrics.write(record)
                accelerator.log({key: value for key, value in record.items() if key != "step"}, step=step + 1)
            stopped = stop.agreed(accelerator.device)
            due = stopped or (run.reporting.save_steps and (step + 1) % run.reporting.save_steps == 0)
            if due and not last:
                with meter.paused():
                    standing.tokens = meter.total()
                    _save(run, saver, step + 1, standing)
            shown = "  ".join(f"{name} {value:.4f}" for name, value in losses.items())
            progress.advance(1, f"{shown}  {meter.rate:,.0f} tokens/s")
            if last:
                break
            if stopped:
                accelerator.end_training()
                raise Stopped(f"stopped after step {step + 1:,} of {run.steps:,}: {stopped}", where=str(run.output),
                              hint="run the same command again: it goes on from there")  # fmt: skip
    standing.tokens = meter.total()
    accelerator.wait_for_everyone()
    content = {"kind": "student", "steps": step + 1, "recipe": identity, "metrics": last_values(run.output / METRICS)}
    best = standing.best_step if recipe.early_stopping_patience else 0
    if best:
        content["best"] = {"step": best, "eval_bits_per_byte": standing.best_bits_per_byte}
    with average.in_place(model):
        saver.finish(run.output, content, model_card(run.origin, content, first_values(run.output / METRICS)), best)
    if accelerator.is_main_process:
        remove_old_checkpoints(run.output, run.reporting.save_total_limit)
    accelerator.end_training()  # takes the process group down
    return content


def _step(
    run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: list[MicroBatch]
) -> tuple[dict[str, float], float]:
    """Take one optimisation step; return the mean of each loss and the norm of the gradient before clipping.

    Where one of them is no number nothing is moved: not the weights, nor what the optimizer remembers.
    """
    accelerator, recipe = run.accelerator, run.recipe
    maker = run.maker
    whole = WholeStep(maker.objectives, maker.weighing, maker.teachers, micro_batches, accelerator)
    balance = 1.0
    if recipe.balance == "ce":
        balance = whole.balance(_pass(run, model, micro_batches, whole.scales(), backward=False))
    sums = _pass(run, model, micro_batches, whole.scales(balance), backward=True)
    norm = float(accelerator.clip_grad_norm_(model.parameters(), recipe.max_grad_norm or float("inf")))
    losses = whole.losses(sums, balance)
    if is_finite(losses, norm):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return losses | ({"balance": balance} if recipe.balance == "ce" else {}), norm


def _pass(
    run: Run, model: nn.Module, micro_batches: list[MicroBatch], scales: list[float], *, backward: bool
) -> list[float]:
    """Take the micro-batches through the model; return each term's sum over its items, over all processes.

    Without `backward` nothing is kept, and the random numbers (of dropout) are left for the pass that comes after.
    """
    accelerator = run.accelerator
    device = accelerator.device
    sums = torch.zeros(len(scales), device=device, dtype=torch.float64)
    devices = [device] if device.type == "cuda" else []
    with contextlib.nullcontext() if backward else torch.random.fork_rng(devices), torch.set_grad_enabled(backward):
        for number, batch in enumerate(micro_batches):
            last = number + 1 == len(micro_batches)
            terms = [term.to(device, scale) for term, scale in zip(batch.terms, scales, strict=True)]
            with contextlib.nullcontext() if last else accelerator.no_sync(model):
                total, parts = model(
                    torch.from_numpy(batch.input_ids).to(device), torch.from_numpy(batch.places).to(device), terms
                )
                if backward:
                    # Gradients are averaged over processes, and the scales are already those of the whole step.
                    accelerator.backward(total * accelerator.num_processes)
            sums += parts.double()
    reduced: list[float] = accelerator.reduce(sums, "sum").tolist()
    return reduced


def _optimizer(cut: Cut, recipe: Recipe) -> torch.optim.Optimizer:
    trained = [parameter for parameter in cut.model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.ndim > 1], "weight_decay": recipe.weight_decay},
        {"params": [parameter for parameter in trained if parameter.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=recipe.learning_rate, fused=True)


def _micro_batches(run: Run, step: int) -> list[MicroBatch]:
    accelerator = run.accelerator
    shares = run.order.share(
        step, accelerator.process_index, accelerator.num_processes, run.recipe.per_device_train_batch_size
    )
    return [run.maker.make(numbers, run.order.epoch(step)) for numbers in shares]


def _resume(run: Run, saver: Saver) -> tuple[int, Standing]:
    """Return the steps that are done, and where the run stands after them."""
    found = checkpoints(run.output)
    if not found:
        return 0, Standing()
    step, folder = found[-1]
    standing = Standing.of(saver.load(folder, run.recipe.seed))
    terminal.note(f"distill: going on from {folder}")
    return step, standing


def _save(run: Run, saver: Saver, step: int, standing: Standing) -> None:
    saver.write_checkpoint(run.output, step, standing.told())
    if run.accelerator.is_main_process:
        remove_old_checkpoints(run.output, run.reporting.save_total_limit)
    run.accelerator.wait_for_everyone()


def _evaluate(run: Run) -> float:
    """Return held-out bits per byte, computed by the first process while the others wait."""
    value = torch.zeros(1, dtype=torch.float64, device=run.accelerator.device)
    if run.accelerator.is_main_process:
        value[0] = bits_per_byte(run.cut, run.tokenizer, run.reporting.eval_documents).bits_per_byte
    return float(run.accelerator.reduce(value, "sum"))


def _due(step: int, every: int, last: bool) -> bool:
    return last or (every > 0 and step % every == 0)


class _Meter:
    """Counts tokens over time, since the last reading.

    Args:
        accelerator: Accelerate's.
        tokens: that the run took before this process went on with it.
        teachers: how metrics call them.
    """

    def __init__(self, accelerator: Any, tokens: int, teachers: Sequence[str]) -> None:
        self._accelerator = accelerator
        self._tokens = self._silent = 0
        self._unaligned = np.zeros((len(teachers), 2))
        self._teachers = teachers
        self._all_tokens = tokens
        self._since = self._begun = time.monotonic()
        self.rate = 0.0

    def count(self, batches: list[MicroBatch]) -> None:
        """Count what a step took."""
        self._tokens += sum(batch.tokens for batch in batches)
        self._unaligned += sum(batch.unaligned for batch in batches)
        self._silent += sum(batch.silent for batch in batches)

    def total(self) -> int:
        """Return the tokens of the run so far, over all processes; every process has to call it."""
        tokens = torch.tensor(self._tokens, dtype=torch.float64, device=self._accelerator.device)
        return self._all_tokens + int(self._accelerator.reduce(tokens, "sum"))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave what is done meanwhile, which is no training, out of the rate."""
        started = time.monotonic()
        yield
        self._since += time.monotonic() - started

    def read(self) -> dict[str, float]:
        """Return rates over all processes, and begin anew; every process has to call it."""
        counts = torch.tensor([self._tokens, self._silent, *self._unaligned.reshape(-1)], dtype=torch.float64)
        tokens, silent, *unaligned = self._accelerator.reduce(counts.to(self._accelerator.device), "sum").tolist()
        now = time.monotonic()
        self.rate = tokens / max(now - self._since, 1e-9)
        self._all_tokens += int(tokens)
        self._tokens = 0
        self._unaligned[:] = 0
        self._since = now
        if silent:
            terminal.note(f"distill: the teacher said NaN at {silent:,.0f} positions so far, which are left out")
        return {
            "tokens": self._all_tokens,
            "tokens_per_second": round(self.rate, 1),
            "seconds": round(now - self._begun, 3),
            **{
                metric("unaligned", name, self._teachers): round(missed / max(rows, 1), 6)
                for name, missed, rows in zip(self._teachers, unaligned[::2], unaligned[1::2], strict=True)
            },
        }
