"""Parts of chat messages that are trained: reasoning, content and tool calls, read from the forms that data has.

A message becomes one or more parts, in this order: its reasoning and the mark that ends it, its content, and for each
tool call the mark that starts it, the function's name and its arguments. Marks are decisions of the model that chat
templates write in different ways: two models are compared there if both write the same text, or if both have a special
token for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xtk.errors import XtkError
from xtk.untrusted_json import parse_json

REASONING, REASONING_END, CONTENT = "reasoning", "reasoning-end", "content"
TOOL_START, TOOL_NAME, TOOL_ARGUMENTS = "tool-start", "tool-name", "tool-arguments"
MARKS = {REASONING_END: "</think>", TOOL_START: "<tool_call>"}  # the text of marks, where a template writes it
TOOL_PARTS = (TOOL_START, TOOL_NAME, TOOL_ARGUMENTS)

# Keys of a message's reasoning: DeepSeek, Qwen and vLLM; gpt-oss; OpenAI's Responses and OpenRouter; Cohere.
REASONING_KEY = "reasoning_content"  # that of normalized messages
REASONING_KEYS = (REASONING_KEY, "thinking", "reasoning", "thought")
_TEXT_PART, _REASONING_PARTS = "text", ("thinking", "reasoning")  # types of the parts of a content

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class ArgumentLeaf:
    """A key, a string or a number of a tool call's arguments."""

    path: Path  # keys and indices that lead to the value; for a key, to the value that it names
    is_key: bool  # whether it is the key
    value: str | int | float  # the key or the value
    start: int  # first character in the arguments' text, without quotation marks
    stop: int  # one past the last


@dataclass(frozen=True)
class MessagePart:
    """A part of a message."""

    message: int  # index of the message
    kind: str  # one of the constants above
    call: int  # index of the tool call; -1: none
    text: str  # its text; for arguments JSON with ", " and ": " between values; for marks that of `MARKS`
    leaves: tuple[ArgumentLeaf, ...] = ()  # of arguments, in the order of the text


def message_parts(messages: Sequence[Mapping[str, Any]]) -> tuple[MessagePart, ...]:
    """Return the parts of normalized messages, at least the content of each."""
    return tuple(part for number, message in enumerate(messages) for part in _parts_of(number, message))


def _parts_of(number: int, message: Mapping[str, Any]) -> Iterator[MessagePart]:
    if thought := message.get(REASONING_KEY):
        yield MessagePart(number, REASONING, -1, thought)
        yield MessagePart(number, REASONING_END, -1, MARKS[REASONING_END])
    yield MessagePart(number, CONTENT, -1, message["content"])
    for at, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        yield MessagePart(number, TOOL_START, at, MARKS[TOOL_START])
        yield MessagePart(number, TOOL_NAME, at, function["name"])
        yield MessagePart(number, TOOL_ARGUMENTS, at, *write_arguments(function["arguments"]))


def write_arguments(arguments: Any) -> tuple[str, tuple[ArgumentLeaf, ...]]:
    """Return arguments as text, and their leaves; arguments that are not a JSON object are their own text."""
    if isinstance(arguments, str):
        return arguments, (ArgumentLeaf((), False, arguments, 0, len(arguments)),) if arguments else ()
    writer = _ArgumentWriter()
    writer.write(arguments, ())
    return "".join(writer.pieces), tuple(writer.leaves)


class _ArgumentWriter:
    """Writes a JSON value like `json.dumps`, and records where its leaves are."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.leaves: list[ArgumentLeaf] = []
        self._size = 0

    def write(self, value: Any, path: Path) -> None:
        if isinstance(value, dict):
            self._add("{")
            for number, (key, inner) in enumerate(value.items()):
                self._add(", " if number else "")
                self._add_string(key, (*path, key), is_key=True)
                self._add(": ")
                self.write(inner, (*path, key))
            self._add("}")
        elif isinstance(value, list):
            self._add("[")
            for number, inner in enumerate(value):
                self._add(", " if number else "")
                self.write(inner, (*path, number))
            self._add("]")
        elif isinstance(value, str):
            self._add_string(value, path)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            self._add_leaf(json.dumps(value), path, value)
        else:
            self._add(json.dumps(value))

    def _add(self, text: str) -> None:
        self.pieces.append(text)
        self._size += len(text)

    def _add_string(self, value: str, path: Path, *, is_key: bool = False) -> None:
        self._add('"')
        self._add_leaf(json_escaped(value), path, value, is_key=is_key)
        self._add('"')

    def _add_leaf(self, text: str, path: Path, value: str | float, *, is_key: bool = False) -> None:
        if text:
            self.leaves.append(ArgumentLeaf(path, is_key, value, self._size, self._size + len(text)))
        self._add(text)


def json_escaped(text: str, *, ascii_only: bool = False) -> str:
    """Return a text as it stands between the quotation marks of JSON."""
    return json.dumps(text, ensure_ascii=ascii_only)[1:-1]


def replace_leaves(arguments: Any, texts: Mapping[tuple[Path, bool], Any]) -> Any:
    """Return arguments with other leaves: `{(path, whether it is the key): the new value}`."""

    def replaced(value: Any, path: Path) -> Any:
        if isinstance(value, dict):
            return {texts.get(((*path, key), True), key): replaced(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [replaced(item, (*path, number)) for number, item in enumerate(value)]
        return texts.get((path, False), value)

    return replaced(arguments, ())


def normalize_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message in one form: `content` and `reasoning_content` as strings, `tool_calls` as OpenAI has them.

    Args:
        message: with a role, and a content that is a string, null or a list of parts. Reasoning under any of
            `REASONING_KEYS` or as a part of type "thinking" or "reasoning"; tool calls as `{"function": {"name",
            "arguments"}}` or `{"name", "arguments"}`, with arguments as an object or its JSON text; or one
            `function_call`.

    Raises:
        ValueError: it has no role, or one of these has another form.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError('each message must be an object such as {"role": "user", "content": "..."}')
    content, thought = _read_content(message)
    for key in REASONING_KEYS:
        given = message.get(key)
        if given is not None and not isinstance(given, str):
            raise ValueError(f"{key} of a message with role {message['role']!r} must be text")
        thought = thought or given or ""
    taken = {*REASONING_KEYS, "content", "tool_calls", "function_call"}
    result = {key: value for key, value in message.items() if key not in taken}
    result["content"] = replace_surrogates(content)
    if thought:
        result[REASONING_KEY] = replace_surrogates(thought)
    calls = _read_calls(message)
    if calls:
        result["tool_calls"] = calls
    return result


def _read_content(message: Mapping[str, Any]) -> tuple[str, str]:
    """Return the text and the reasoning in the content of a message."""
    content = message.get("content")
    if content is None:
        return "", ""
    if isinstance(content, str):
        return content, ""
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        reasoning = [part for part in content if part.get("type") in _REASONING_PARTS]
        texts = [part.get("text") for part in content if part.get("type") not in _REASONING_PARTS]
        thoughts = [next((part[key] for key in (*_REASONING_PARTS, "text") if key in part), None) for part in reasoning]
        if all(isinstance(text, str) for text in (*texts, *thoughts)):
            return "".join(map(str, texts)), "".join(map(str, thoughts))
    raise ValueError(f"the content of a message with role {message['role']!r} must be a string or a list of text parts")


def _read_calls(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    given = message.get("tool_calls")
    if given is None:
        given = [] if message.get("function_call") is None else [{"function": message["function_call"]}]
    if isinstance(given, str):  # Parquet cannot hold objects of different shapes
        given = parse_json(given, what="tool_calls", where="a message") if given.strip() else []
    if not isinstance(given, list):
        raise ValueError("tool_calls of a message must be a list of calls")
    return [_read_call(call) for call in given]


def _read_call(call: Any) -> dict[str, Any]:
    function = call.get("function") or call if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(
            'each call in tool_calls must be an object such as {"function": {"name": "...", "arguments": {}}}'
        )
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        try:
            parsed = parse_json(arguments, what="arguments", where=function["name"]) if arguments.strip() else {}
        except XtkError:
            parsed = None  # what a model wrote need not be JSON
        arguments = parsed if isinstance(parsed, dict) else replace_surrogates(arguments)
    elif arguments is None:
        arguments = {}
    elif not isinstance(arguments, Mapping):
        raise ValueError(f"the arguments of the tool call {function['name']!r} must be an object, or its JSON text")
    others = {key: value for key, value in call.items() if key not in ("function", "name", "arguments", "parameters")}
    name = replace_surrogates(function["name"])
    return {"type": "function", **others, "function": {"name": name, "arguments": _plain(arguments)}}


def _plain(value: Any) -> Any:
    """Return a value with text that UTF-8 can encode."""
    if isinstance(value, Mapping):
        return {replace_surrogates(str(key)): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return replace_surrogates(value) if isinstance(value, str) else value


def replace_surrogates(text: str) -> str:
    """Return the text in a form that UTF-8 can encode: a lone surrogate becomes U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
