"""Tools as an environment: a student that calls `<tool_call>{"name": "add", ...}</tool_call>` reads its result.

xtk rollout STUDENT questions.jsonl --environment examples/tools.py:Arithmetic -o rollouts.jsonl
"""

from __future__ import annotations

from xtk.rollouts.tool_calls import ToolEnvironment


def add(a: float, b: float) -> float:
    """Return a sum."""
    return a + b


class Arithmetic(ToolEnvironment):
    """Answers calls of add and multiply."""

    tools = {"add": add, "multiply": lambda a, b: a * b}  # noqa: RUF012
