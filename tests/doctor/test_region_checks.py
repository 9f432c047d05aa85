"""What the doctor says of the regions of conversations, and of templates that write other parts."""

import json

import pytest
from chat_families import write_family
from transformers import LlamaConfig

from xtk.artifacts.corpus_reader import Corpus
from xtk.doctor.doctor_inputs import DoctorInputs, DoctorModel, RunPlan
from xtk.doctor.region_checks import reasoning_and_tools, regions

CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
CALLING = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "reasoning_content": "I look.", "tool_calls": [CALL]},
    {"role": "tool", "content": "sunny", "name": "get_weather"},
    {"role": "assistant", "content": "Sunny."},
]


@pytest.fixture(scope="module")
def inputs_of(tmp_path_factory):
    folder = tmp_path_factory.mktemp("doctor")
    (folder / "data.jsonl").write_text(json.dumps({"messages": CALLING}) + "\n")

    def get(student: str, teacher: str) -> DoctorInputs:
        models = []
        for role, name in (("student", student), ("teacher", teacher)):
            place = write_family(name, folder / role)
            LlamaConfig().save_pretrained(place)
            models.append(DoctorModel.read(role, place, name))
        return DoctorInputs(*models, RunPlan(), None, Corpus([str(folder / "data.jsonl")]))

    return get


def told(findings) -> dict[tuple[str, str], str]:
    return {(one.level, one.where): one.what for one in findings}


def test_regions_are_measured_in_the_data_by_the_student_and_against_the_teacher(inputs_of):
    figures = {one.figures["region"]: one.figures for one in regions(inputs_of("smollm3", "qwen3"))}
    # Qwen 3 drops the reasoning, because a message of the user does not follow it but one of the tool does.
    assert figures["answer"] == {"region": "answer", "size": 6, "trained_fraction": 1, "aligned_fraction": 1}
    assert figures["reasoning"]["size"] == len("I look.")
    assert figures["reasoning"]["trained_fraction"] == 1
    assert figures["end-of-turn"] == {"region": "end-of-turn", "size": 2, "trained_fraction": 1, "aligned_fraction": 1}
    assert figures["tool-call"]["aligned_fraction"] > 0.7


def test_a_template_that_writes_no_end_is_found(inputs_of):
    (note,) = [one for one in regions(inputs_of("glm4moe", "qwen3")) if one.level == "note"]
    assert "1 of 2 ends of turns" in note.what


def test_what_a_template_cannot_write_is_found(inputs_of):
    found = [*reasoning_and_tools(inputs_of("phi4", "qwen3_5_think"))]
    levels = {one.what.partition(",")[0]: one.level for one in found}
    assert levels["the teacher always writes reasoning"] == "warning"
    assert any(one.level == "warning" and "writes no tool calls" in one.what for one in found)
    assert any(one.level == "warning" and "does not describe the tools" in one.what for one in found)
    assert all(one.where.startswith("student") for one in found if one.level == "warning")
    (note,) = [one for one in reasoning_and_tools(inputs_of("qwen3", "qwen3")) if one.where.startswith("student")]
    assert "drops the reasoning of earlier turns" in note.what
    (fine,) = reasoning_and_tools(inputs_of("mistral", "mistral"))
    assert fine.level == "ok"
    found = [*reasoning_and_tools(inputs_of("llama3_1", "gptoss"))]
    assert any("describe tools differently" in one.what for one in found)


@pytest.mark.slow
def test_the_page_shows_the_documents_of_both_models(run, inputs_of, tmp_path):
    inputs = inputs_of("smollm3", "mistral")
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"messages": CALLING}) + "\n")
    folders = [side.folder for side in inputs.models]
    arguments = ["doctor", *folders, data, "--html", tmp_path / "page.html"]
    run(*arguments, code=None)
    page = (tmp_path / "page.html").read_text()
    for region in ("answer", "reasoning", "reasoning-end", "tool-call", "end-of-turn", "markup"):
        assert f'title="{region}"' in page
    assert "I look." in page
    assert "[TOOL_CALLS]" in page
    run(*arguments, code=None)  # the same page again
    (tmp_path / "page.html").write_text("my notes")
    refused = run(*arguments, code=1)
    assert "page.html" in refused.stderr
    assert (tmp_path / "page.html").read_text() == "my notes"
