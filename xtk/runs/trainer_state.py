"""Trainer counters, stored in checkpoints so that resuming is exact."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from xtk import terminal
from xtk.errors import XtkError


@dataclass
class TrainerState:
    """Counters of a run."""

    tokens: int = 0  # tokens of all steps so far, over all processes
    skipped_steps: int = 0  # steps without an update, because loss or gradient was not finite
    consecutive_skipped_steps: int = 0  # skipped steps since the last update
    best_step: int = 0  # step with the fewest bits per byte on held-out text; 0: before the first one
    best_bits_per_byte: float | None = None  # bits per byte at that step; None: no evaluation yet
    evaluations_without_improvement: int = 0  # evaluations since then

    @classmethod
    def from_manifest(cls, manifest: Mapping[str, Any]) -> TrainerState:
        """Return the counters in a checkpoint's `xtk.json`."""
        return cls(**{field.name: manifest[field.name] for field in fields(cls) if field.name in manifest})

    def to_dict(self) -> dict[str, Any]:
        """Return the counters for a checkpoint's `xtk.json`."""
        return asdict(self)

    def count_skipped_step(self, step: int, loss: float, gradient_norm: float, max_consecutive: int) -> None:
        """Count a step whose loss or gradient is not finite."""
        self.skipped_steps += 1
        self.consecutive_skipped_steps += 1
        values = f"loss {loss}, gradient norm {gradient_norm}"
        if self.consecutive_skipped_steps > max_consecutive:
            raise XtkError(
                f"the loss or the gradient is not finite in {max_consecutive + 1:,} consecutive step(s): {values}",
                where=f"step {step:,}",
                hint="use a smaller --learning-rate, a larger --warmup-ratio or --mixed-precision no",
            )
        terminal.note(f"distill: warning: skipping step {step:,}, which is not finite: {values}")

    def count_evaluation(self, step: int, bits_per_byte: float) -> bool:
        """Count an evaluation; return whether it is the best so far."""
        best = math.inf if self.best_bits_per_byte is None else self.best_bits_per_byte
        if not bits_per_byte < best:
            self.evaluations_without_improvement += 1
            return False
        self.best_step, self.best_bits_per_byte, self.evaluations_without_improvement = step, bits_per_byte, 0
        return True


def step_is_finite(losses: Mapping[str, float], gradient_norm: float) -> bool:
    """Return whether loss and gradient norm are finite; equal in all processes, as both are reduced."""
    return math.isfinite(losses["loss"]) and math.isfinite(gradient_norm)
