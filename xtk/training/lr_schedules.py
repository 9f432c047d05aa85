"""Learning rates over a run: functions of the step alone, under the names that transformers has for them."""

from __future__ import annotations

import math

SCHEDULES = ("cosine", "linear", "constant", "cosine_with_min_lr", "inverse_sqrt", "warmup_stable_decay")
# What transformers takes for the warm-up of inverse_sqrt where there is none.
INVERSE_SQRT_TIMESCALE = 10_000


def lr_factor(
    schedule: str, step: int, num_steps: int, warmup_steps: int, *, min_lr_rate: float = 0.0, decay_ratio: float = 0.0
) -> float:
    """Return what the learning rate of a step is multiplied with.

    The first step has a share of it and not 0, and the last one more than 0 (or `min_lr_rate`): no step is wasted.

    Args:
        schedule: one of `SCHEDULES`.
        step: counted from 0.
        num_steps: of the run.
        warmup_steps: steps in which it rises in a line.
        min_lr_rate: where cosine_with_min_lr ends.
        decay_ratio: the share of the steps in which warmup_stable_decay falls, as a cosine.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "inverse_sqrt":
        scale = warmup_steps or INVERSE_SQRT_TIMESCALE
        return math.sqrt(scale / (step - warmup_steps + scale))
    if schedule == "warmup_stable_decay":
        decay = max(1, min(num_steps - warmup_steps, round(decay_ratio * num_steps)))
        return _cosine(max(0, step - (num_steps - decay)) / decay)
    done = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    if schedule == "cosine_with_min_lr":
        return min_lr_rate + (1 - min_lr_rate) * _cosine(done)
    return {"cosine": _cosine(done), "linear": 1 - done, "constant": 1.0}[schedule]


def _cosine(done: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * done))
