"""Environments: Python classes that respond to turns of the student, one object per episode; docs/how-to/tools.md."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import numpy as np

from xtk.errors import XtkError
from xtk.rewards.reward_spec import LARGEST, float_of_reward
from xtk.text.chat.parts import replace_surrogates
from xtk.user_code import load_user_object, user_code_errors

USAGE = "--environment FILE.py:CLASS"
Answer = TypeVar("Answer")


class Environment(Protocol):
    """One episode. `role: str` (of its messages; "tool" by default) and `reward() -> float` are optional.

    A text prompt continues with the text that `step` returns; in a conversation it is a message before a new turn.
    """

    def reset(self, record: Mapping[str, Any]) -> str | None:
        """Begin an episode; return text to append to the prompt, or None."""

    def step(self, text: str) -> tuple[str, bool]:
        """Return the response to a turn of the student, and whether the episode is over."""


def load_environment(spec: str) -> Callable[[], Environment]:
    """Return the class that FILE.py:CLASS names."""
    environment_class: Callable[[], Environment] = load_user_object(spec, USAGE, "class")
    missing = [name for name in ("reset", "step") if not callable(getattr(environment_class, name, None))]
    if missing:
        raise XtkError(
            f"environment class {spec} has no method {' and no method '.join(missing)}",
            hint=f"add {' and '.join(missing)}; see docs/how-to/tools.md",
        )
    return environment_class


class CheckedEnvironment:
    """A user's environment with checked return values."""

    def __init__(self, environment: Callable[[], Environment], record: Mapping[str, Any]) -> None:
        self._environment = self._try("__init__", environment)
        self.role = self._try("role", lambda: str(getattr(self._environment, "role", "tool")))
        self.initial_text = self._try("reset", lambda: self._environment.reset(copy.deepcopy(record)))
        if not isinstance(self.initial_text, str | None):
            raise self._wrong("reset", self.initial_text, "a string or None")
        self.initial_text = self.initial_text and replace_surrogates(self.initial_text)

    def step(self, text: str) -> tuple[str, bool]:
        """Return the response to a turn, and whether the episode is over."""
        answer: Any = self._try("step", lambda: self._environment.step(text))
        is_pair = isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], str)
        if not is_pair or not isinstance(answer[1], bool | np.bool_ | int):
            raise self._wrong("step", answer, "a tuple (response, done) of a string and a bool")
        return replace_surrogates(answer[0]), bool(answer[1])

    def reward(self) -> float | None:
        """Return the episode's reward; nan if it is None, None if the environment has no `reward`."""
        judge = self._try("reward", lambda: getattr(self._environment, "reward", None))
        if judge is None:
            return None
        value = self._try("reward", judge)
        if value is None:
            return math.nan
        number = self._try("reward", lambda: float_of_reward(value))
        if number is None or abs(number) > LARGEST:
            raise self._wrong("reward", value, "a finite number")
        return number

    def _try(self, name: str, call: Callable[[], Answer]) -> Answer:
        with user_code_errors(f"the method {name} of the environment", where="--environment", hint=USAGE):
            return call()

    def _wrong(self, name: str, value: Any, wanted: str) -> XtkError:
        return XtkError(
            f"the method {name} of the environment returned {str(value)[:80]!r}; it must return {wanted}",
            where="--environment",
            hint=USAGE,
        )
