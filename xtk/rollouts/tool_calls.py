"""Parses tool calls in a model's text, and runs them in an environment."""

from __future__ import annotations

import bisect
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"  # Llama 3
MAX_CALLS = 16
MAX_CHARACTERS = 1 << 16  # per call
MAX_DEPTH = 32
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[\]{}]', re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """A tool call: name of the tool, and arguments by name."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class MalformedToolCall:
    """A malformed tool call; the reason is one sentence that can be returned to the model."""

    reason: str


def parse_tool_calls(text: str, call_format: str = "tags") -> list[ToolCall | MalformedToolCall]:
    """Return the tool calls in a turn of a model, in order; an empty list if there are none.

    Reasoning before the last `</think>` is skipped. No text raises an error: a call that is malformed, longer than
    `MAX_CHARACTERS`, nested deeper than `MAX_DEPTH` or preceded by `MAX_CALLS` others is a `MalformedToolCall`.
    `call_format`: `tags` for `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen); `json` for a
    turn that is `{"name": ..., "parameters": {...}}`, several separated by `;` (Llama 3).
    """
    if call_format not in ("tags", "json"):
        raise ValueError(f"unknown format of tool calls {call_format!r}; use tags or json")
    text = text.rpartition("</think>")[2]
    calls: list[ToolCall | MalformedToolCall] = []
    for content in _tagged(text) if call_format == "tags" else _separated(text):
        if len(calls) == MAX_CALLS:
            return [*calls, MalformedToolCall(f"more than {MAX_CALLS} calls in one turn; the others were ignored")]
        calls.append(MalformedToolCall(content.reason) if isinstance(content, MalformedToolCall) else _call(content))
    return calls


def _tagged(text: str) -> list[str | MalformedToolCall]:
    """Return the contents of the tags; a tag inside a JSON string is part of the string."""
    texts: list[str | MalformedToolCall] = []
    place = text.find(OPEN)
    while place >= 0 and len(texts) <= MAX_CALLS:
        start = place + len(OPEN)
        end = text.find(CLOSE, start)
        inner = text.find(OPEN, start)
        strings = _strings(text, start) if end >= 0 else []
        while end >= 0 and _is_inside(end, strings) and end - start <= MAX_CHARACTERS:
            later = text.find(CLOSE, end + 1)
            if later < 0:
                break
            end = later
        if end < 0 or (0 <= inner < end and not _is_inside(inner, strings)):
            texts.append(MalformedToolCall(f"the call is not closed with {CLOSE}"))
            place = inner
            continue
        texts.append(text[start:end])
        place = text.find(OPEN, end)
    return texts


def _strings(text: str, start: int) -> list[tuple[int, int]]:
    """Return the ranges of JSON strings in a text from `start` on, as far as a call may reach, with their quotes."""
    stop = min(len(text), start + MAX_CHARACTERS + len(CLOSE) + 1)
    return [one.span() for one in _BRACKETS.finditer(text, start, stop) if one[0].startswith('"')]


def _is_inside(place: int, strings: Sequence[tuple[int, int]]) -> bool:
    """Return whether a place is inside of a string: after its first quote, and before its last."""
    number = bisect.bisect_left(strings, (place, 0)) - 1
    return number >= 0 and place < strings[number][1]


def _separated(text: str) -> list[str | MalformedToolCall]:
    """Return the JSON objects that the turn consists of; an empty list if it does not begin with one."""
    text = text.strip().removeprefix(PYTHON_TAG).strip()
    if not text.startswith("{"):
        return []
    texts: list[str | MalformedToolCall] = []
    start = depth = 0
    for match in _BRACKETS.finditer(text):
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(match[0], 0)
        if depth == 0 and match[0] in "}]":
            texts.append(text[start : match.end()].strip().removeprefix(";"))
            start = match.end()
            if len(texts) > MAX_CALLS:
                return texts
    rest = text[start:].strip().removeprefix(";").strip()
    return [*texts, rest] if rest else texts


def _call(content: str) -> ToolCall | MalformedToolCall:
    if len(content) > MAX_CHARACTERS:
        return MalformedToolCall(f"the call is longer than {MAX_CHARACTERS} characters")
    depth = deepest = 0
    for match in _BRACKETS.finditer(content):
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(match[0], 0)
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        return MalformedToolCall(f"the call is nested deeper than {MAX_DEPTH} levels")
    try:
        read = json.loads(content, parse_constant=_refuse_constant)
    except ValueError as failure:
        return MalformedToolCall(f"the call is not valid JSON: {failure}")
    if not isinstance(read, dict) or not isinstance(read.get("name"), str):
        return MalformedToolCall('the call is not an object with a "name" and "arguments"')
    arguments = read.get("arguments", read.get("parameters", {}))
    if not isinstance(arguments, dict):
        return MalformedToolCall(f'the "arguments" of {read["name"][:80]} are not an object')
    return ToolCall(read["name"], arguments)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


class ToolEnvironment:
    """An environment that responds to tool calls with the results of Python functions. Derive a class from it.

    Malformed calls, unknown tools, wrong arguments and exceptions of a tool return `error: ...`, so that the model can
    try again. One call returns its result; several return a JSON line each, in order. Results are text, or dumped as
    JSON. A turn without a call ends the episode.
    """

    role = "tool"
    tools: Mapping[str, Callable[..., Any]] = {}  # functions by tool name; called with the arguments by name
    form = "tags"  # format of the calls, as in `parse_tool_calls`
    max_characters = 4000  # maximum characters of a response; the rest is truncated

    def reset(self, record: Mapping[str, Any]) -> str | None:
        """Begin an episode; adds nothing to the prompt."""
        return None

    def step(self, text: str) -> tuple[str, bool]:
        """Return the results of a turn's calls, and whether the episode is over (no call)."""
        calls = parse_tool_calls(text, self.form)
        answers = [self._answer(call) for call in calls]
        if len(answers) > 1:
            names = [call.name if isinstance(call, ToolCall) else None for call in calls]
            lines = [{"name": name, "content": one} for name, one in zip(names, answers, strict=True)]
            answers = ["\n".join(json.dumps(line, ensure_ascii=False) for line in lines)]
        return "".join(answers)[: self.max_characters], not calls

    def _answer(self, call: ToolCall | MalformedToolCall) -> str:
        if isinstance(call, MalformedToolCall):
            return f"error: {call.reason}"
        tool = self.tools.get(call.name)
        if tool is None:
            return f"error: unknown tool {call.name[:80]}; available tools: {', '.join(self.tools)}"
        try:
            inspect.signature(tool).bind(**call.arguments)
            result = tool(**call.arguments)
            return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
        except Exception as failure:
            return f"error: {type(failure).__name__}: {failure}"[: self.max_characters]
