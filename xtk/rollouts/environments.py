"""Environments: what a student's turns are answered with. Plain Python, one object an episode.

    class Countdown:
        role = "user"                       # of its messages in a conversation; "tool" if it says none

        def reset(self, record):            # the fields of the prompt's row; a text to begin with, or None
            self.left = int(record["left"])
            return None

        def step(self, text):               # what the student said; the answer, and whether the episode is over
            self.left -= 1
            return f"{self.left} left", self.left == 0

        def reward(self):                   # may be left out; added to those of --reward
            return 1.0

A text goes on with what `step` answers; in a conversation it is a message, and the next turn is begun.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import numpy as np

from xtk.errors import XtkError
from xtk.rewards.reward_spec import LARGEST
from xtk.tokens.document import replace_surrogates
from xtk.user_code import load_user_object, user_code_errors

USAGE = "--environment FILE.py:CLASS"
Answer = TypeVar("Answer")


class Environment(Protocol):
    """One episode. `role: str`, of its messages, and `reward() -> float` may be left out."""

    def reset(self, record: Mapping[str, Any]) -> str | None:
        """Begin; return a text that stands behind the prompt, if there is one."""

    def step(self, text: str) -> tuple[str, bool]:
        """Read a turn of the student's; return what it is answered, and whether the episode is over."""


def load_environment(spec: str) -> Callable[[], Environment]:
    """Return the class of `FILE.py:CLASS`.

    Raises:
        XtkError: there is none, or it has no `reset` and `step`.
    """
    found: Callable[[], Environment] = load_user_object(spec, USAGE, "class")
    missing = [name for name in ("reset", "step") if not callable(getattr(found, name, None))]
    if missing:
        raise XtkError(f"{spec} has no {' and no '.join(missing)}", hint="docs/how-to/tools.md tells what it needs")
    return found


class CheckedEnvironment:
    """An environment of the user's, its answers checked.

    Args:
        environment: makes it.
        record: the fields of the prompt's row.

    Raises:
        XtkError: it cannot be made or begun.
    """

    def __init__(self, environment: Callable[[], Environment], record: Mapping[str, Any]) -> None:
        self._environment = self._try("__init__", environment)
        self.role = self._try("role", lambda: str(getattr(self._environment, "role", "tool")))
        self.initial_text = self._try("reset", lambda: self._environment.reset(copy.deepcopy(record)))
        if not isinstance(self.initial_text, str | None):
            raise self._wrong("reset", self.initial_text, "a text or None")
        self.initial_text = self.initial_text and replace_surrogates(self.initial_text)

    def step(self, text: str) -> tuple[str, bool]:
        """Answer a turn.

        Raises:
            XtkError: it fails, or answers something else than a text and yes or no.
        """
        found: Any = self._try("step", lambda: self._environment.step(text))
        if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[0], str):
            raise self._wrong("step", found, "a text and whether the episode is over, as a tuple")
        if not isinstance(found[1], bool | np.bool_ | int):
            raise self._wrong("step", found, "a text and whether the episode is over, as a tuple")
        return replace_surrogates(found[0]), bool(found[1])

    def reward(self) -> float | None:
        """Return what the episode is worth: nan if it cannot say, None if environments of its kind say nothing.

        Raises:
            XtkError: it fails, or returns what is no number.
        """
        judge = self._try("reward", lambda: getattr(self._environment, "reward", None))
        if judge is None:
            return None
        value = self._try("reward", judge)
        if value is None:
            return math.nan
        if not isinstance(value, int | float) or abs(value) > LARGEST:
            raise self._wrong("reward", value, "a finite number")
        return float(value)

    def _try(self, name: str, call: Callable[[], Answer]) -> Answer:
        with user_code_errors(f"{name} of the environment", hint=USAGE):
            return call()

    def _wrong(self, name: str, value: Any, wanted: str) -> XtkError:
        return XtkError(f"{name} of the environment returned {str(value)[:80]!r}; it returns {wanted}", hint=USAGE)
