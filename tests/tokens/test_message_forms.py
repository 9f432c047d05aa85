"""The forms of messages that data has: one document from all of them."""

import json

import pytest

from xtk.tokens.document import Document
from xtk.tokens.message_parts import normalize_message, write_arguments

ARGUMENTS = {"city": "Paris", "days": [3, 4.5], "deep": {"key": None, "ok": True}, "note": 'a "b"\n\\ ü'}
CALL = {"name": "get_weather", "arguments": ARGUMENTS}
AS_TEXT = {"name": "get_weather", "arguments": json.dumps(ARGUMENTS)}
THOUGHT = "I need it."
BASE = {"role": "assistant", "content": "So:", "reasoning_content": THOUGHT}


def parts_of(message: dict) -> list[tuple[str, str]]:
    return [(segment.role, segment.text) for segment in Document.from_messages([message]).segments]


EXPECTED = [
    ("reasoning", THOUGHT),
    ("reasoning-end", "</think>"),
    ("assistant", "So:"),
    ("tool-start", "<tool_call>"),
    ("tool-name", "get_weather"),
    ("tool-arguments", json.dumps(ARGUMENTS, ensure_ascii=False)),
]


@pytest.mark.parametrize(
    "calls",
    [
        {"tool_calls": [{"id": "call_1", "type": "function", "function": CALL}]},  # Hugging Face
        {"tool_calls": [{"id": "call_1", "type": "function", "function": AS_TEXT}]},  # OpenAI
        {"tool_calls": [CALL]},  # older models of Hugging Face
        {"tool_calls": [{"name": "get_weather", "parameters": ARGUMENTS}]},  # Llama
        {"tool_calls": json.dumps([{"type": "function", "function": CALL}])},  # Parquet
        {"function_call": AS_TEXT},  # OpenAI, before tools
    ],
)
@pytest.mark.parametrize(
    "thought",
    [
        {"reasoning_content": THOUGHT},
        {"thinking": THOUGHT},
        {"reasoning": THOUGHT},
        {"content": [{"type": "thinking", "thinking": THOUGHT}, {"type": "text", "text": "So:"}]},
        {"content": [{"type": "reasoning", "text": THOUGHT}, *({"type": "text", "text": one} for one in ("So", ":"))]},
    ],
)  # fmt: skip
def test_all_forms_have_the_same_parts(calls, thought):
    assert parts_of({"role": "assistant", "content": "So:", **thought, **calls}) == EXPECTED


def test_a_message_is_normal_after_one_pass():
    message = {**BASE, "tool_calls": [{"type": "function", "function": CALL}], "name": "a"}
    once = normalize_message(message)
    assert normalize_message(once) == once == message


def test_arguments_that_are_no_json_object_are_their_own_text():
    assert parts_of({"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": "{x"}]})[-1] == (
        "tool-arguments",
        "{x",
    )
    assert parts_of({"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": ""}]})[-1] == (
        "tool-arguments",
        "{}",
    )


def test_leaves_are_where_their_text_is():
    text, leaves = write_arguments(ARGUMENTS)
    assert json.loads(text) == ARGUMENTS
    for leaf in leaves:
        assert json.loads(f'"{text[leaf.start : leaf.stop]}"') == str(leaf.value)
    assert [leaf.value for leaf in leaves if leaf.is_key] == ["city", "days", "deep", "key", "ok", "note"]
    assert [leaf.value for leaf in leaves if not leaf.is_key] == ["Paris", 3, 4.5, 'a "b"\n\\ ü']


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tool_calls": {"a": 1}}, "must be a list of calls"),
        ({"tool_calls": [{"function": {"arguments": {}}}]}, "each call in tool_calls"),
        ({"tool_calls": [{"name": "f", "arguments": 3}]}, "arguments of the tool call 'f'"),
        ({"reasoning_content": 3}, "must be text"),
        ({"content": [{"type": "image_url", "image_url": {}}]}, "list of text parts"),
        ({"role": None}, "must be an object"),
    ],
)
def test_other_forms_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        normalize_message({**BASE, **change})
