"""Prompts, and rollouts: prompt, completion, finish reason and rewards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from xtk.text.document import Document


@dataclass(frozen=True)
class Prompt:
    """A prompt to generate completions for."""

    number: int  # index of the record in the data
    document: Document  # untrained segments; rollouts inherit `teacher_prompt`, `weight` and `route`
    record: Mapping[str, Any] = field(default_factory=dict)  # fields of the data record, for rewards and environments


@dataclass(frozen=True)
class Rollout:
    """One completion of a prompt, over one or more turns."""

    document: Document  # prompt and completion, with the sampled tokens and the advantage in `Document.sampled_tokens`
    prompt: int  # index of the prompt's record
    sample: int  # index of this completion among those of its prompt
    finish_reason: str  # how the last turn ended, one of `FINISH_REASONS`; "turns" where the limit of turns was reached
    num_turns: int = 1  # number of turns that the student generated
    reward: float = float("nan")  # weighted sum of the rewards; nan without rewards, or if none could score it
    rewards: Mapping[str, float] = field(default_factory=dict)  # the value of each reward, by name
    top_ids: Any = None  # int32 [n, G], at each sampled token, most likely first; None if not requested

    @property
    def unusable_reason(self) -> str:
        """Why the rollout cannot be trained on: "empty", "not finite" (a log-probability); "" if it can be used."""
        sampled = self.document.sampled_tokens
        assert sampled is not None
        if not np.isfinite(sampled.logprobs).all():
            return "not finite"
        return "" if any(segment.train and segment.text for segment in self.document.segments) else "empty"
