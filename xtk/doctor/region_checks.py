"""Checks of the regions of conversations: what is trained and aligned, and what the student cannot learn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from xtk.doctor.chat_template_checks import ANSWER, QUESTION
from xtk.doctor.doctor_inputs import DoctorInputs, Finding
from xtk.errors import XtkError
from xtk.text.chat.conversation_tokens import END_OF_TURN, MARKUP, REGIONS
from xtk.text.chat.parts import REASONING
from xtk.text.chat.regions import RegionStatistics, token_regions
from xtk.text.document import Document
from xtk.text.token_sequence import tokenize_documents
from xtk.text.tokenizer import Tokenizer

THOUGHT = "Two and two."
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add_numbers",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"first": {"type": "number"}}, "required": ["first"]},
    },
}
CALL = {"type": "function", "id": "a1b2c3d4e", "function": {"name": "add_numbers", "arguments": {"first": 2}}}
GUIDE = "see docs/how-to/conversations.md"


def regions(inputs: DoctorInputs) -> Iterator[Finding]:
    """Print the size of each region of the data, and how much of it is trained and aligned."""
    documents = [document for document, _ in inputs.data_sample.documents if document.conversation is not None]
    if not documents or not all(side.has_chat_template for side in inputs.models):
        return
    statistics = RegionStatistics()
    tokens = [tokenize_documents(side.tokenizer, documents) for side in inputs.models]
    for document, own, theirs in zip(documents, *tokens, strict=True):
        statistics.add(document, own, theirs)
    for name, figures in statistics.to_json().items():
        unit = "tokens" if name in (END_OF_TURN, MARKUP) else "bytes"
        what = (
            f"{name}: {figures['size']:,} {unit}, {100 * figures['trained_fraction']:.1f} % trained by the student, "
            f"{100 * figures['aligned_fraction']:.1f} % aligned with the teacher"
        )
        if name == MARKUP:
            what = f"{name}: {figures['size']:,} {unit} of the student's chat template, not trained by default"
        yield Finding("regions", "ok", what, inputs.student.name, figures={"region": name, **figures})
    num_turns, num_ends = (int(sizes[REGIONS.index(END_OF_TURN)]) for sizes in (statistics.in_data, statistics.trained))
    if num_turns and not num_ends:
        what = "no end of a turn is trained: the student does not learn to stop"
        hint = "use a chat template that writes an end token after the assistant's last message"
        yield Finding("regions", "warning", what, inputs.student.name, hint)
    elif num_ends < num_turns:
        missing = num_turns - num_ends
        what = f"{missing:,} of {num_turns:,} ends of turns are not trained: the chat template writes none there"
        yield Finding("regions", "note", what, inputs.student.name, GUIDE)


def reasoning_and_tools(inputs: DoctorInputs) -> Iterator[Finding]:
    """Compare how both chat templates write the reasoning, tools and tool calls that the data has."""
    if not all(side.has_chat_template for side in inputs.models):
        return
    contents = inputs.conversation_contents
    if not (contents.reasoning or contents.tools or contents.calls):
        what = "the data has no reasoning, tools or tool calls: how the chat templates write them is not checked"
        yield Finding("reasoning_and_tools", "ok", what)
        return
    abilities = [_Abilities(side.tokenizer) for side in inputs.models]
    findings = [*_compare_reasoning(inputs, *abilities)] if contents.reasoning else []
    findings += _compare_tools(inputs, *abilities)
    for side, ability in zip(inputs.models, abilities, strict=True):
        if contents.earlier_reasoning and ability.reasoning and not ability.earlier_reasoning:
            what = "the chat template drops the reasoning of earlier turns: it is not trained in these turns"
            hint = "split the data after each answer with reasoning, so that it is the last turn"
            findings.append(Finding("reasoning_and_tools", "note", what, side.name, hint))
    yield from findings or [Finding("reasoning_and_tools", "ok", "both chat templates write the same parts")]


def _compare_reasoning(inputs: DoctorInputs, student: _Abilities, teacher: _Abilities) -> Iterator[Finding]:
    name, check = inputs.student.name, "reasoning_and_tools"
    if teacher.always_thinks and not student.reasoning:
        what = "the teacher always writes reasoning, and the student's chat template has no place for it"
        yield Finding(check, "warning", what, name, "remove reasoning from the data, or give the student a template "
                      "with it")  # fmt: skip
    elif teacher.reasoning and not student.reasoning:
        what = "the student's chat template writes no reasoning; the teacher's does"
        yield Finding(check, "note", what, name, GUIDE)


def _compare_tools(inputs: DoctorInputs, student: _Abilities, teacher: _Abilities) -> Iterator[Finding]:
    check, contents = "reasoning_and_tools", inputs.conversation_contents
    if contents.calls and teacher.calls and not student.calls:
        what = "the student's chat template writes no tool calls: they are not trained"
        hint = "give the student a chat template that writes tool calls"
        yield Finding(check, "warning", what, inputs.student.name, hint)
    elif contents.calls and student.calls and not teacher.calls:
        what = "the teacher's chat template writes no tool calls: they are trained without the teacher only"
        yield Finding(check, "warning", what, inputs.teacher.name, GUIDE)
    if not contents.tools:
        return
    if bool(student.schema) != bool(teacher.schema):
        side = inputs.student if not student.schema else inputs.teacher
        what = "the chat template does not describe the tools of the data; that of the other model does"
        yield Finding(check, "warning", what, side.name, "describe the tools in a system message of the data")
    elif student.schema != teacher.schema:
        what = f"the chat templates describe tools differently: {student.schema} and {teacher.schema}"
        yield Finding(check, "note", what, figures={"student": student.schema, "teacher": teacher.schema})


class _Abilities:
    """What a chat template writes.

    Attributes:
        reasoning: whether it writes the reasoning of the last message.
        earlier_reasoning: whether it writes that of earlier messages.
        always_thinks: whether its generation prompt starts reasoning.
        calls: whether it writes tool calls.
        schema: the form in which it describes tools; "": not at all.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        answer = {"role": "assistant", "content": ANSWER, "reasoning_content": THOUGHT}
        self.reasoning = _trains(tokenizer, [QUESTION, answer], REASONING)
        earlier = [
            QUESTION,
            answer,
            {"role": "user", "content": "And three?"},
            {"role": "assistant", "content": "Six."},
        ]
        self.earlier_reasoning = _trains(tokenizer, earlier, REASONING)
        prompt = tokenizer.chat_template.generation_prompt
        self.always_thinks = "<think>" in prompt and "</think>" not in prompt
        called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
        self.calls = _trains(tokenizer, [QUESTION, called], "tool-call")
        self.schema = _schema(tokenizer)


def _trains(tokenizer: Tokenizer, messages: list[dict[str, Any]], region: str) -> bool:
    document = Document.from_messages(messages)
    try:
        (sequence,) = tokenize_documents(tokenizer, [document])
    except XtkError:
        return False
    return bool((token_regions(document, sequence)[sequence.train_mask] == REGIONS.index(region)).any())


def _schema(tokenizer: Tokenizer) -> str:
    try:
        text = tokenizer.chat_template.render([QUESTION], [TOOL])
    except XtkError:
        return ""
    if TOOL["function"]["name"] not in text:
        return ""
    forms = {"a JSON object per tool": [TOOL], "the JSON function of a tool": [TOOL["function"]]}
    for form, values in forms.items():
        if any(json.dumps(value, indent=indent) in text for value in values for indent in (None, 2, 4)):
            return form
    return "another form"
