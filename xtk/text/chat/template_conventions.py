"""What a chat template expects of messages: which key has the reasoning, and which form tool calls have.

Templates differ in this without declaring it. The key is read from the template's source; forms of calls are tried
once, on a short conversation.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xtk.errors import XtkError
from xtk.text.chat.parts import REASONING_KEY, REASONING_KEYS, write_arguments

# Mistral's templates refuse ids of calls that have another length.
_CALL_ID_LENGTH = re.compile(r"length\s*!=\s*9\b")
_CALL_ID = 9  # characters
_PROBE_NAME, _PROBE_KEY = "Zqname", "Zqkey"

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class TemplateConventions:
    """What a template reads."""

    reasoning_key: str  # the key of a message that it takes the reasoning from; "": it writes none
    arguments_as_text: bool = False  # whether it needs the arguments of tool calls as JSON text: it concatenates them
    flat_calls: bool = False  # whether it reads a call as `{"name", "arguments"}`, and not as `{"function": ...}`
    short_call_ids: bool = False  # whether ids of calls must have 9 letters
    null_content: bool = False  # whether it writes calls only of messages whose content is None

    def apply(self, messages: Messages) -> list[dict[str, Any]]:
        """Return normalized messages in the form that the template reads.

        With short ids, a tool's message without one gets that of the call that it answers: they are in the same order.
        """
        converted, unanswered = [self._apply_to(message) for message in messages], list[str]()
        if self.short_call_ids:
            for message in converted:
                unanswered += [str(call["id"]) for call in message.get("tool_calls") or ()]
                if message["role"] == "tool":
                    given = message.setdefault("tool_call_id", unanswered[0] if unanswered else _short_id(""))
                    unanswered = [call for call in unanswered if call != given]
        return converted

    def _apply_to(self, message: Mapping[str, Any]) -> dict[str, Any]:
        result = dict(message)
        thought = result.pop(REASONING_KEY, None)
        if thought and self.reasoning_key:
            result[self.reasoning_key] = thought
        if calls := result.get("tool_calls"):
            result["tool_calls"] = [self._call(call) for call in calls]
            if self.null_content and not result.get("content"):
                result["content"] = None
        if self.short_call_ids and isinstance(result.get("tool_call_id"), str):
            result["tool_call_id"] = _short_id(result["tool_call_id"])
        return result

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        result, function = dict(call), dict(call["function"])
        if self.arguments_as_text:
            function["arguments"] = write_arguments(function["arguments"])[0]
        if self.short_call_ids:
            result["id"] = _short_id(str(result.get("id") or function["name"]))
        if self.flat_calls:
            return {**{key: value for key, value in result.items() if key != "function"}, **function}
        return {**result, "function": function}


def _short_id(given: str) -> str:
    if len(given) == _CALL_ID and given.isalnum():
        return given
    return hashlib.sha256(given.encode()).hexdigest()[:_CALL_ID]


def find_conventions(source: str, render: Callable[[Messages], str]) -> TemplateConventions:
    """Return the conventions of a template; `render` renders messages as they are, or raises XtkError."""
    key = next((key for key in REASONING_KEYS if re.search(rf"(\.|['\"]){key}\b", source)), "")
    short = bool(_CALL_ID_LENGTH.search(source))
    forms = [
        TemplateConventions(key, *form, short, null)
        for null in (False, True)
        for form in ((False, False), (True, False), (False, True))
    ]
    if "tool_calls" not in source:
        return forms[0]
    written = [_count_written(form, render) for form in forms]
    return forms[written.index(max(written))]


def _count_written(conventions: TemplateConventions, render: Callable[[Messages], str]) -> int:
    """Return how much of a call the template writes in this form: its name, and its arguments as JSON or text."""
    function = {"name": _PROBE_NAME, "arguments": {_PROBE_KEY: "v"}}
    call = {"type": "function", "id": "a1b2c3d4e", "function": function}
    call_messages: Messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    tool_result = {"role": "tool", "content": "r", "tool_call_id": "a1b2c3d4e", "name": "f"}
    tries: tuple[Messages, ...] = (call_messages, [*call_messages, tool_result])
    for messages in tries:
        try:
            text = render(conventions.apply(messages))
        except XtkError:
            continue
        as_repr, as_text = f"'{_PROBE_KEY}'", json.dumps(f'"{_PROBE_KEY}"')[1:-1]  # Python's form; JSON in JSON
        return (_PROBE_NAME in text) + (_PROBE_KEY in text and as_repr not in text and as_text not in text)
    return 0
