"""What a run has counted so far. Checkpoints keep it, so that one that goes on decides as one that never stopped."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from xtk import terminal
from xtk.errors import CorruptError, XtkError


@dataclass
class TrainerState:
    """Where a run stands.

    Attributes:
        tokens: that all steps took, over all processes.
        skipped_steps: whose loss or gradient was no number, so that nothing was learnt.
        consecutive_skipped_steps: of those, the last ones.
        best_step: after which held-out text took fewest bits a byte; 0: nothing was evaluated.
        best_bits_per_byte: how many.
        evaluations_without_improvement: that were not better.
    """

    tokens: int = 0
    skipped_steps: int = 0
    consecutive_skipped_steps: int = 0
    best_step: int = 0
    best_bits_per_byte: float | None = None
    evaluations_without_improvement: int = 0

    @classmethod
    def from_manifest(cls, manifest: Mapping[str, Any]) -> TrainerState:
        """Return what `xtk.json` of a checkpoint says.

        Raises:
            Damaged: a count is none.
        """
        found = {one.name: manifest[one.name] for one in fields(cls) if one.name in manifest}
        for name, value in found.items():
            if name == "best_bits_per_byte" and (value is None or (type(value) is float and math.isfinite(value))):
                continue
            if type(value) is not int or not 0 <= value < 1 << 63:
                raise CorruptError(f"{name} of this checkpoint is not a count: {value!r:.40}")
        return cls(**found)

    def to_dict(self) -> dict[str, Any]:
        """Return what `xtk.json` of a checkpoint is to say."""
        return asdict(self)

    def count_skipped_step(self, step: int, loss: float, gradient_norm: float, max_consecutive: int) -> None:
        """Count a step whose loss or gradient is no number.

        Args:
            step: counted from 1.
            loss: of the step.
            gradient_norm: of its gradient.
            max_consecutive: so many in a row.

        Raises:
            XtkError: they are more.
        """
        self.skipped_steps += 1
        self.consecutive_skipped_steps += 1
        told = f"the loss is {loss}, the norm of its gradient {gradient_norm}"
        if self.consecutive_skipped_steps > max_consecutive:
            raise XtkError(
                told,
                where=f"step {step:,}" + (f", as in the {max_consecutive:,} before it" if max_consecutive else ""),
                hint="a smaller --learning-rate, a longer --warmup-ratio, --mixed-precision no; checkpoints are kept",
            )
        terminal.note(f"distill: step {step:,} is skipped: {told}")

    def count_evaluation(self, step: int, bits_per_byte: float) -> bool:
        """Count an evaluation; return whether it is the best so far."""
        best = math.inf if self.best_bits_per_byte is None else self.best_bits_per_byte
        if not bits_per_byte < best:
            self.evaluations_without_improvement += 1
            return False
        self.best_step, self.best_bits_per_byte, self.evaluations_without_improvement = step, bits_per_byte, 0
        return True


def step_is_finite(losses: Mapping[str, float], gradient_norm: float) -> bool:
    """Say whether a step may be taken; all processes know the same of it, and say the same."""
    return math.isfinite(losses["loss"]) and math.isfinite(gradient_norm)
