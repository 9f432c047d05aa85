"""Doctor checks of the regions of conversations, and of reasoning and tools in chat templates."""

import json

import pytest
from chat_families import write_family
from transformers import LlamaConfig

from xtk.artifacts.corpus_reader import Corpus
from xtk.doctor.doctor_inputs import DoctorInputs, DoctorModel, RunPlan
from xtk.doctor.region_checks import reasoning_and_tools, regions

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
    (folder / "data.jsonl").write_text(json.dumps({"messages": TOOL_CONVERSATION}) + "\n")

    def get(student: str, teacher: str) -> DoctorInputs:
        models = []
        for role, name in (("student", student), ("teacher", teacher)):
            model = write_family(name, folder / role)
            LlamaConfig().save_pretrained(model)
            models.append(DoctorModel.read(role, model, name))
        return DoctorInputs(*models, RunPlan(), None, Corpus([str(folder / "data.jsonl")]))

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
    found = [*reasoning_and_tools(make_inputs("phi4", "qwen3_5_think"))]
    levels = {one.what.partition(",")[0]: one.level for one in found}
    assert levels["the teacher always writes reasoning"] == "warning"
    assert any(one.level == "warning" and "writes no tool calls" in one.what for one in found)
    assert any(one.level == "warning" and "does not describe the tools" in one.what for one in found)
    assert all(one.where.startswith("student") for one in found if one.level == "warning")
    (note,) = [one for one in reasoning_and_tools(make_inputs("qwen3", "qwen3")) if one.where.startswith("student")]
    assert "drops the reasoning of earlier turns" in note.what
    (fine,) = reasoning_and_tools(make_inputs("mistral", "mistral"))
    assert fine.level == "ok"
    found = [*reasoning_and_tools(make_inputs("llama3_1", "gptoss"))]
    assert any("describe tools differently" in one.what for one in found)


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
