"""Learning-rate schedules, with the names of transformers; functions of the step only."""

from __future__ import annotations

import math

SCHEDULES = ("cosine", "linear", "constant", "cosine_with_min_lr", "inverse_sqrt", "warmup_stable_decay")
# The default of transformers for inverse_sqrt without warm-up.
INVERSE_SQRT_TIMESCALE = 10_000


def lr_factor(
    schedule: str, step: int, num_steps: int, warmup_steps: int, *, min_lr_rate: float = 0.0, decay_ratio: float = 0.0
) -> float:
    """Return the factor of the learning rate at a step.

    The factor is above 0 at the first step and the last one (at least `min_lr_rate`), so that no step is wasted.

    Args:
        schedule: one of `SCHEDULES`.
        step: counted from 0.
        decay_ratio: fraction of the steps in which warmup_stable_decay decays, as a cosine.
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
