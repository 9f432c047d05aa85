"""Message formats of different data sources, which all result in the same document."""

import json

import pytest

from xtk.text.chat.parts import normalize_message, write_arguments
from xtk.text.document import Document

ARGUMENTS = {"city": "Paris", "days": [3, 4.5], "deep": {"key": None, "ok": True}, "note": 'a "b"\n\\ ü'}
CALL = {"name": "get_weather", "arguments": ARGUMENTS}
CALL_WITH_JSON_TEXT = {"name": "get_weather", "arguments": json.dumps(ARGUMENTS)}
REASONING = "I need it."
BASE_MESSAGE = {"role": "assistant", "content": "So:", "reasoning_content": REASONING}


def segments_of(message: dict) -> list[tuple[str, str]]:
    return [(segment.role, segment.text) for segment in Document.from_messages([message]).segments]


EXPECTED = [
    ("reasoning", REASONING),
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
        {"tool_calls": [{"id": "call_1", "type": "function", "function": CALL_WITH_JSON_TEXT}]},  # OpenAI
        {"tool_calls": [CALL]},  # older models of Hugging Face
        {"tool_calls": [{"name": "get_weather", "parameters": ARGUMENTS}]},  # Llama
        {"tool_calls": json.dumps([{"type": "function", "function": CALL}])},  # Parquet
        {"function_call": CALL_WITH_JSON_TEXT},  # OpenAI, before tools
    ],
)
@pytest.mark.parametrize(
    "reasoning",
    [
        {"reasoning_content": REASONING},
        {"thinking": REASONING},
        {"reasoning": REASONING},
        {"content": [{"type": "thinking", "thinking": REASONING}, {"type": "text", "text": "So:"}]},
        {"content": [{"type": "reasoning", "text": REASONING},
                     *({"type": "text", "text": text} for text in ("So", ":"))]},
    ],
)  # fmt: skip
def test_all_message_forms_have_the_same_segments(calls, reasoning):
    assert segments_of({"role": "assistant", "content": "So:", **reasoning, **calls}) == EXPECTED


def test_normalize_message_is_idempotent():
    message = {**BASE_MESSAGE, "tool_calls": [{"type": "function", "function": CALL}], "name": "a"}
    once = normalize_message(message)
    assert normalize_message(once) == once == message


def test_tool_arguments_that_are_not_valid_json_are_kept_as_text():
    assert segments_of({"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": "{x"}]})[-1] == (
        "tool-arguments",
        "{x",
    )
    assert segments_of({"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": ""}]})[-1] == (
        "tool-arguments",
        "{}",
    )


def test_leaf_positions_contain_the_text_of_the_leaf():
    text, leaves = write_arguments(ARGUMENTS)
    assert json.loads(text) == ARGUMENTS
    for leaf in leaves:
        assert json.loads(f'"{text[leaf.start : leaf.stop]}"') == str(leaf.value)
    assert [leaf.value for leaf in leaves if leaf.is_key] == ["city", "days", "deep", "key", "ok", "note"]
    assert [leaf.value for leaf in leaves if not leaf.is_key] == ["Paris", 3, 4.5, 'a "b"\n\\ ü']


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"tool_calls": {"a": 1}}, "must be a list of calls"),
        ({"tool_calls": [{"function": {"arguments": {}}}]}, "each call in tool_calls"),
        ({"tool_calls": [{"name": "f", "arguments": 3}]}, "arguments of the tool call 'f'"),
        ({"reasoning_content": 3}, "must be text"),
        ({"content": [{"type": "image_url", "image_url": {}}]}, "list of text parts"),
        ({"role": None}, "must be an object"),
    ],
)
def test_invalid_message_forms_are_refused(change, error):
    with pytest.raises(ValueError, match=error):
        normalize_message({**BASE_MESSAGE, **change})
