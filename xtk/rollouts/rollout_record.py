"""Prompts, and rollouts: prompt, completion, finish reason and rewards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from xtk.text.document import Document


@dataclass(frozen=True)
class Prompt:
    """A prompt to generate completions for.

    Attributes:
        number: index of the record in the data.
        document: the segments before the completion, none of them trained; rollouts inherit its `teacher_prompt`,
            `weight` and `route`.
        record: the fields of the data record, for rewards and environments.
    """

    number: int
    document: Document
    record: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Rollout:
    """One completion of a prompt, over one or more turns.

    Attributes:
        document: prompt and completion, with the sampled tokens and the advantage in `Document.sampled_tokens`.
        prompt: index of the prompt's record.
        sample: index of this completion among those of its prompt.
        finish_reason: how the last turn ended, one of `FINISH_REASONS`; "turns" where the limit of turns was reached.
        num_turns: number of turns that the student generated.
        reward: weighted sum of the rewards; nan without rewards, or if none could score it.
        rewards: the value of each reward, by name.
        top_ids: int32 [n, G], the most likely tokens at each sampled token, most likely first; None if not requested.
    """

    document: Document
    prompt: int
    sample: int
    finish_reason: str
    num_turns: int = 1
    reward: float = float("nan")
    rewards: Mapping[str, float] = field(default_factory=dict)
    top_ids: Any = None

    @property
    def unusable_reason(self) -> str:
        """Why the rollout cannot be trained on: "empty", "not finite" (a log-probability); "" if it can be used."""
        sampled = self.document.sampled_tokens
        assert sampled is not None
        if not np.isfinite(sampled.logprobs).all():
            return "not finite"
        return "" if any(segment.train and segment.text for segment in self.document.segments) else "empty"
