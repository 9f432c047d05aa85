"""Doctor checks of the regions of conversations, and of reasoning and tools in chat templates."""

import json

import pytest
from chat_families import write_family
from transformers import LlamaConfig

from xtk.data.corpus_reader import Corpus
from xtk.doctor.conversation_checks import TOOL, reasoning_and_tools, regions, template_content
from xtk.doctor.doctor_inputs import DoctorInputs, DoctorModel, RunPlan

TOOL_CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
TOOL_CONVERSATION = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "reasoning_content": "I look.", "tool_calls": [TOOL_CALL]},
    {"role": "tool", "content": "sunny", "name": "get_weather"},
    {"role": "assistant", "content": "Sunny."},
]


@pytest.fixture(scope="module")
def make_inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("doctor")

    def get(student: str, teacher: str, messages=TOOL_CONVERSATION, **columns) -> DoctorInputs:
        data = folder / "data.jsonl"
        data.write_text(json.dumps({"messages": messages, **columns}) + "\n")
        models = []
        for role, name in (("student", student), ("teacher", teacher)):
            model = write_family(name, folder / role)
            LlamaConfig().save_pretrained(model)
            models.append(DoctorModel.read(role, model, name))
        return DoctorInputs(*models, RunPlan(), None, Corpus([str(data)]) if messages else None)

    return get


def test_regions_are_sized_by_the_student_and_aligned_with_the_teacher(make_inputs):
    figures = {one.figures["region"]: one.figures for one in regions(make_inputs("smollm3", "qwen3"))}
    # Qwen 3 keeps the reasoning, because a tool message follows it and not a user message.
    assert figures["answer"] == {"region": "answer", "size": 6, "trained_fraction": 1, "aligned_fraction": 1}
    assert figures["reasoning"]["size"] == len("I look.")
    assert figures["reasoning"]["trained_fraction"] == 1
    assert figures["reasoning"]["aligned_fraction"] == 1
    assert figures["end-of-turn"] == {"region": "end-of-turn", "size": 2, "trained_fraction": 1, "aligned_fraction": 1}
    assert figures["tool-call"]["aligned_fraction"] > 0.7


def test_a_template_without_some_end_of_turn_tokens_is_noted(make_inputs):
    (note,) = [one for one in regions(make_inputs("glm4moe", "qwen3")) if one.level == "note"]
    assert "1 of 2 ends of turns" in note.what


def test_reasoning_and_tools_that_a_template_does_not_support_are_reported(make_inputs):
    found = [*reasoning_and_tools(make_inputs("phi4", "qwen3_5_think", tools=[TOOL]))]
    levels = {one.what.partition(",")[0]: one.level for one in found}
    assert levels["the teacher always writes reasoning"] == "warning"
    assert any(one.level == "warning" and "writes no tool calls" in one.what for one in found)
    assert any(one.level == "warning" and "does not describe the tools" in one.what for one in found)
    assert all(one.where.startswith("student") for one in found if one.level == "warning")
    several_turns = [*TOOL_CONVERSATION, {"role": "user", "content": "Thanks"}, {"role": "assistant", "content": "."}]
    inputs = make_inputs("qwen3", "qwen3", several_turns)
    (note,) = [one for one in reasoning_and_tools(inputs) if one.where.startswith("student")]
    assert "drops the reasoning of earlier turns" in note.what
    (fine,) = reasoning_and_tools(make_inputs("mistral", "mistral", several_turns))
    assert fine.level == "ok"


ANSWER = {"role": "assistant", "content": "Sunny."}
THOUGHT = {**ANSWER, "reasoning_content": "I look."}
QUESTION = TOOL_CONVERSATION[0]


@pytest.mark.parametrize(("messages", "columns", "warned"), [
    ([QUESTION, ANSWER], {}, []),
    (None, {}, []),
    ([QUESTION, THOUGHT], {}, ["always writes reasoning"]),
    ([QUESTION, ANSWER], {"tools": [TOOL]}, ["describe the tools"]),
    ([QUESTION, {**ANSWER, "tool_calls": [TOOL_CALL]}], {}, ["no tool calls"]),
])  # fmt: skip
def test_reasoning_and_tools_are_checked_only_where_the_data_has_them(make_inputs, messages, columns, warned):
    findings = [*reasoning_and_tools(make_inputs("phi4", "qwen3_5_think", messages, **columns))]
    assert [one.what for one in findings if one.level == "ok"] == ([] if warned else [findings[0].what])
    warnings = [one.what for one in findings if one.level != "ok"]
    assert len(warnings) == len(warned)
    assert all(text in what for text, what in zip(warned, warnings, strict=True))
    assert warned or "how the chat templates write them is not checked" in findings[0].what


PADDED, THINKING = {**ANSWER, "content": " Sunny.\n"}, {**ANSWER, "content": "<think>\nI look.\n</think>\n\nSunny."}
SPACE, THOUGHTS, EARLIER, ADDS = "changes white space", "removes thoughts from answers", "from earlier answers", "adds"


@pytest.mark.parametrize(("family", "messages", "noted"), [
    ("llama3_1", [QUESTION, PADDED], [SPACE]),
    ("llama3_1", [QUESTION, ANSWER], []),
    ("llama3_1", [PADDED | {"role": "user"}, ANSWER], []),
    ("llama3_1", None, []),
    ("gptoss", [QUESTION, PADDED], []),
    ("qwen3", [QUESTION, THINKING], [ADDS]),  # it removes thoughts of earlier turns only
    ("qwen3", [QUESTION, THINKING, QUESTION, ANSWER], [ADDS, EARLIER]),
    ("deepseekv3", [QUESTION, THINKING, QUESTION, ANSWER], [ADDS, THOUGHTS, EARLIER]),
    ("deepseekv3", [QUESTION, ANSWER], [ADDS]),
])  # fmt: skip
def test_changes_of_answers_are_noted_where_the_data_has_such_answers(make_inputs, family, messages, noted):
    inputs = make_inputs(family, "phi4", messages)
    findings = [one for one in template_content(inputs) if one.where.startswith("student")]
    notes = [one.what for one in findings if one.level == "note"]
    assert len(notes) == len(noted)
    assert all(text in what for text, what in zip(noted, notes, strict=True))
    assert noted or [one.level for one in findings] == ["ok"]


@pytest.mark.slow
def test_the_page_shows_the_documents_of_both_models(run, make_inputs, tmp_path):
    inputs = make_inputs("smollm3", "mistral")
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"messages": TOOL_CONVERSATION}) + "\n")
    folders = [model.folder for model in inputs.models]
    arguments = ["doctor", *folders, data, "--html", tmp_path / "page.html"]
    run(*arguments, code=None)
    page = (tmp_path / "page.html").read_text()
    for region in ("answer", "reasoning", "reasoning-end", "tool-call", "end-of-turn", "markup"):
        assert f'title="{region}"' in page
    assert "I look." in page
    assert "[TOOL_CALLS]" in page
    run(*arguments, code=None)  # the same page is written again
    (tmp_path / "page.html").write_text("my notes")
    done = run(*arguments, code=1)
    assert "page.html" in done.stderr
    assert (tmp_path / "page.html").read_text() == "my notes"
