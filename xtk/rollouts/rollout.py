"""A prompt, and what a student made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from xtk.tokens.document import Document


@dataclass(frozen=True)
class Prompt:
    """What a student is to go on from.

    Attributes:
        number: which record of the data it is.
        document: the segments before the completion, none of them trained; its `teacher_prompt`, `weight` and `route`
            are those of the rollouts.
        record: the fields of the data, which rewards and environments read.
    """

    number: int
    document: Document
    record: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Rollout:
    """One way in which a student went on from a prompt.

    Attributes:
        document: prompt and completion, with the tokens as they were drawn (`Document.drawn`, with the advantage).
        prompt: the number of the prompt.
        sample: which of its completions this is.
        finish_reason: how the last turn ended, of `FINISHES`; "turns" where an environment had no more of them to give.
        num_turns: how often the student spoke.
        reward: what it is worth; nan where there are no rewards, or none could judge it.
        rewards: each of them.
        top_ids: for each drawn token, the likeliest tokens in its place, the likeliest first, where they were asked
            for; None: they were not.
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
        """Why nothing is learnt from it: it is "empty", or a log-probability is "not finite"; "" if it can be used."""
        drawn = self.document.sampled_tokens
        assert drawn is not None
        if not np.isfinite(drawn.logprobs).all():
            return "not finite"
        return "" if any(segment.train and segment.text for segment in self.document.segments) else "empty"
