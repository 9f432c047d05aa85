"""Tool calls in text: well-formed calls are parsed, malformed ones are answered with an error."""

from __future__ import annotations

import json
import math
import runpy
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from xtk.errors import XtkError
from xtk.rollouts.environments import CheckedEnvironment
from xtk.rollouts.tool_calls import (
    MAX_CALLS,
    MAX_CHARACTERS,
    MalformedToolCall,
    ToolCall,
    ToolEnvironment,
    parse_tool_calls,
)

VALUES = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda part: st.lists(part, max_size=3)
                      | st.dictionaries(st.text(), part, max_size=3), max_leaves=8)  # fmt: skip


def tagged(call: object) -> str:
    return f"<tool_call>\n{call if isinstance(call, str) else json.dumps(call)}\n</tool_call>"


@given(st.lists(st.tuples(st.text(), st.dictionaries(st.text(), VALUES, max_size=3)), max_size=4), st.booleans())
def test_well_formed_calls_are_parsed(calls, as_ascii):
    call_texts = [
        json.dumps({"name": name, "arguments": arguments}, ensure_ascii=as_ascii) for name, arguments in calls
    ]
    if "</think>" not in "".join(call_texts):
        assert parse_tool_calls(" and ".join(map(tagged, call_texts))) == [ToolCall(*call) for call in calls]
    untagged_texts = [text.replace('"arguments"', '"parameters"', 1) for text in call_texts]
    if "</think>" not in "".join(untagged_texts) and all("arguments" not in name for name, _ in calls):
        assert parse_tool_calls("<|python_tag|>" + "; ".join(untagged_texts), "json") == [
            ToolCall(*call) for call in calls
        ]


@given(st.text(alphabet='<tool_call>/{}[]":,\\ \n;name"argumnts1'), st.sampled_from(["tags", "json"]))
def test_any_text_is_parsed_without_an_exception(text, form):
    for start in ("", "<tool_call>", "{", '<tool_call>{"name": "'):
        for call in parse_tool_calls(start + text, form):
            assert isinstance(call, ToolCall | MalformedToolCall)


@pytest.mark.parametrize(("text", "reason"), [
    (tagged("{"), "not valid JSON"), (tagged(""), "not valid JSON"), (tagged("[1]"), "not an object with"),
    (tagged('{"name": 1, "arguments": {}}'), "not an object with"),
    (tagged('{"name": "f", "arguments": [1]}'), "of f are"),
    (tagged('{"name": "f", "arguments": {"x": NaN}}'), "NaN is not a JSON number"),
    (tagged('{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}"), "not valid JSON"),
    ('<tool_call>{"name": "f"}', "not closed"), ('<tool_call>{"name": "f"} <tool_call>', "not closed"),
    (tagged("[" * 100_000), "longer than"), (tagged("[" * 10_000), "nested deeper"),
    (tagged('{"name": "' + "x" * MAX_CHARACTERS + '"}'), "longer than"),
])  # fmt: skip
def test_malformed_calls_have_a_reason(text, reason):
    calls = parse_tool_calls(text)
    assert isinstance(calls[0], MalformedToolCall)
    assert reason in calls[0].reason


def test_text_without_calls_yields_no_calls():
    for text in ("", "4", "tool_call", "</tool_call>", "<tool_call", "<think>" + tagged({"name": "f"}) + "</think> 4"):
        assert parse_tool_calls(text) == []
    assert parse_tool_calls("The sum is {}.", "json") == []
    with pytest.raises(ValueError, match="unknown format"):
        parse_tool_calls("", "xml")


def test_limits_keep_parsing_fast():
    many = parse_tool_calls(tagged({"name": "f", "arguments": {}}) * 1000)
    assert len(many) == MAX_CALLS + 1
    assert "more than 16 calls" in many[-1].reason
    started = time.monotonic()
    for text in ("<tool_call>" * 100_000, "<tool_call>" + '"</tool_call>' * 100_000, '<tool_call>"' + "\\" * 1_000_000,
                 "<tool_call>" + "</tool_call>" * 100_000, "{" * 1_000_000, "{}" * 500_000,
                 '<tool_call>{"name":"a' + "</tool_call>" * 100_000):  # fmt: skip
        parse_tool_calls(text)
        parse_tool_calls(text, "json")
    assert time.monotonic() - started < 10


def test_tags_inside_json_strings_are_text():
    call = {"name": "f", "arguments": {"x": 'a\\"</tool_call><tool_call>', "y": "</tool_call>"}}
    assert parse_tool_calls(tagged(call) + tagged({"name": "g", "arguments": {}})) == [
        ToolCall("f", call["arguments"]), ToolCall("g", {}),
    ]  # fmt: skip


class Tools(ToolEnvironment):
    tools = {"add": lambda a, b: a + b, "fail": lambda: 1 / 0, "odd": object, "long": lambda: "x" * 10**6}  # noqa: RUF012


def test_calls_are_answered_with_results_or_errors():
    environment = CheckedEnvironment(Tools, {})
    assert (environment.role, environment.initial_text, environment.reward()) == ("tool", None, None)
    for call, answer in [
        ({"name": "add", "arguments": {"a": 1, "b": 2}}, "3"),
        ({"name": "add", "arguments": {"a": "x", "b": "é"}}, "xé"),
        ({"name": "add", "arguments": {"a": 1}}, "error: TypeError: missing a required argument: 'b'"),
        ({"name": "sub", "arguments": {}}, "error: unknown tool sub; available tools: add, fail, odd, long"),
        ({"name": "fail"}, "error: ZeroDivisionError: division by zero"),
        ({"name": "odd"}, "error: TypeError: Object of type object is not JSON serializable"),
        ("no", "error: the call is not valid JSON: Expecting value: line 2 column 1 (char 1)"),
    ]:  # fmt: skip
        assert environment.step(f"So: {tagged(call)}") == (answer, False)
    assert len(environment.step(tagged({"name": "long"}))[0]) == Tools.max_characters
    both, finished = environment.step(tagged({"name": "add", "arguments": {"a": 1, "b": 2}}) + tagged("{}"))
    assert [json.loads(line) for line in both.splitlines()] == [
        {"name": "add", "content": "3"},
        {"name": None, "content": 'error: the call is not an object with a "name" and "arguments"'},
    ]
    assert not finished
    assert environment.step("It is 3.") == ("", True)


@pytest.mark.parametrize("reward", [np.float32(0.5), np.float16(0.5), np.array(0.5), torch.tensor(0.5), Fraction(1, 2)])
def test_environment_rewards_are_numbers_of_any_library(reward):
    environment = type("Scored", (Tools,), {"reward": lambda self: reward})
    assert CheckedEnvironment(environment, {}).reward() == 0.5


@pytest.mark.parametrize("reward", ["0.5", [0.5], {}, math.inf, 10**400, np.float64(1e39), torch.ones(2)])
def test_environment_rewards_that_are_not_finite_numbers_are_refused(reward):
    environment = type("Scored", (Tools,), {"reward": lambda self: reward})
    with pytest.raises(XtkError, match="must return a finite number"):
        CheckedEnvironment(environment, {}).reward()


def test_example_tool_environment_answers_calls():
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "tools.py"))["Arithmetic"]
    assert CheckedEnvironment(example, {}).step(tagged({"name": "multiply", "arguments": {"a": 6, "b": 7}})) == (
        "42",
        False,
    )
