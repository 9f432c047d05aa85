"""Checks of chat templates and of the regions of conversations: what is changed, trained and aligned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from xtk.doctor.doctor_inputs import DoctorInputs, DoctorModel, Finding
from xtk.errors import XtkError
from xtk.text.chat.conversation_tokens import END_OF_TURN, MARKUP, REGIONS
from xtk.text.chat.parts import REASONING
from xtk.text.chat.regions import RegionStatistics, token_regions
from xtk.text.document import Document
from xtk.text.token_sequence import count_lost_bytes, tokenize_documents
from xtk.text.tokenizer import Tokenizer

QUESTION = {"role": "user", "content": "What is two and two?"}
FOLLOW_UP = {"role": "user", "content": "And three?"}
THOUGHT, ANSWER = "Two and two.", "Four."
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


def template_content(inputs: DoctorInputs) -> Iterator[Finding]:
    """Find changes that a chat template makes to answers like those of the data: thoughts, white space."""
    contents = inputs.conversation_contents
    for side in inputs.models:
        if not side.has_chat_template and "conversations" not in contents:
            yield Finding("ok", "there is no chat template", side.name)
            continue
        try:  # without a template, the same error as in the commands
            findings = list(_try_template(side, contents))
        except XtkError as failure:
            level = "error" if "conversations" in contents else "warning"
            yield Finding(level, failure.what, side.name, failure.hint or "")
            continue
        what = "the chat template does not change answers like those of the data"
        if "conversations" not in contents:
            what = "changes of answers by the chat template are not checked without conversations"
        yield from findings or [Finding("ok", what, side.name)]


def _try_template(side: DoctorModel, contents: frozenset[str]) -> Iterator[Finding]:
    """Yield notes about the changes that concern the data, after one conversation in any case, which may be refused."""
    answered = [QUESTION, {"role": "assistant", "content": ANSWER}]
    template = side.tokenizer.chat_template
    text, asked = template.render(answered), template.render([QUESTION])
    prompt = template.render([QUESTION], add_generation_prompt=True)
    if "conversations" in contents and ("<think>" in text or "<think>" in prompt[len(asked) :]):
        what = "the chat template adds <think> to answers without one, or to the generation prompt"
        yield Finding("note", what, side.name, "use data with thoughts, or --chat-template-kwargs for rollouts")
    thinking, padded = f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}", f"  {ANSWER}\n\n"
    tries = [  # what the data has, an answer with it, messages after the answer, and what must be in the rendered text
        ("thoughts", thinking, [], THOUGHT, "removes thoughts from answers"),
        ("earlier thoughts", thinking, [FOLLOW_UP], THOUGHT, "removes thoughts from earlier answers"),
        ("outer space", padded, [], padded, "changes white space at the ends of answers"),
    ]
    for part, answer, after, kept_text, what in tries:
        messages = [QUESTION, {"role": "assistant", "content": answer}, *after]
        if part in contents and kept_text not in template.render(messages):
            document = Document.from_messages(messages)
            lost = count_lost_bytes(document, tokenize_documents(side.tokenizer, [document])[0])
            message = f"the chat template {what}: these bytes are not trained"
            yield Finding("note", message, side.name, figures={"bytes": lost})


def regions(inputs: DoctorInputs) -> Iterator[Finding]:
    """Print the size of each region of the data, and how much of it is trained and aligned."""
    documents = inputs.data_sample.conversations
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
        yield Finding("ok", what, inputs.student.name, figures={"region": name, **figures})
    num_turns, num_ends = (int(sizes[REGIONS.index(END_OF_TURN)]) for sizes in (statistics.in_data, statistics.trained))
    if num_turns and not num_ends:
        what = "no end of a turn is trained: the student does not learn to stop"
        hint = "use a chat template that writes an end token after the assistant's last message"
        yield Finding("warning", what, inputs.student.name, hint)
    elif num_ends < num_turns:
        missing = num_turns - num_ends
        what = f"{missing:,} of {num_turns:,} ends of turns are not trained: the chat template writes none there"
        yield Finding("note", what, inputs.student.name, GUIDE)


def reasoning_and_tools(inputs: DoctorInputs) -> Iterator[Finding]:
    """Compare how both chat templates write the reasoning, tools and tool calls that the data has."""
    if not all(side.has_chat_template for side in inputs.models):
        return
    contents = inputs.conversation_contents
    if not contents & {"reasoning", "tools", "calls"}:
        what = "the data has no reasoning, tools or tool calls: how the chat templates write them is not checked"
        yield Finding("ok", what)
        return
    abilities = [_Abilities(side.tokenizer) for side in inputs.models]
    findings = [*_compare_reasoning(inputs, *abilities)] if "reasoning" in contents else []
    findings += _compare_tools(inputs, *abilities)
    for side, ability in zip(inputs.models, abilities, strict=True):
        if "earlier reasoning" in contents and ability.reasoning and not ability.earlier_reasoning:
            what = "the chat template drops the reasoning of earlier turns: it is not trained in these turns"
            hint = "split the data after each answer with reasoning, so that it is the last turn"
            findings.append(Finding("note", what, side.name, hint))
    yield from findings or [Finding("ok", "both chat templates write the same parts")]


def _compare_reasoning(inputs: DoctorInputs, student: _Abilities, teacher: _Abilities) -> Iterator[Finding]:
    name = inputs.student.name
    if teacher.always_thinks and not student.reasoning:
        what = "the teacher always writes reasoning, and the student's chat template has no place for it"
        yield Finding("warning", what, name, "remove reasoning from the data, or give the student a template with it")
    elif teacher.reasoning and not student.reasoning:
        what = "the student's chat template writes no reasoning; the teacher's does"
        yield Finding("note", what, name, GUIDE)


def _compare_tools(inputs: DoctorInputs, student: _Abilities, teacher: _Abilities) -> Iterator[Finding]:
    contents = inputs.conversation_contents
    if "calls" in contents and teacher.calls and not student.calls:
        what = "the student's chat template writes no tool calls: they are not trained"
        hint = "give the student a chat template that writes tool calls"
        yield Finding("warning", what, inputs.student.name, hint)
    elif "calls" in contents and student.calls and not teacher.calls:
        what = "the teacher's chat template writes no tool calls: they are trained without the teacher only"
        yield Finding("warning", what, inputs.teacher.name, GUIDE)
    if "tools" not in contents:
        return
    if student.tools != teacher.tools:
        side = inputs.student if teacher.tools else inputs.teacher
        what = "the chat template does not describe the tools of the data; that of the other model does"
        yield Finding("warning", what, side.name, "describe the tools in a system message of the data")


class _Abilities:
    """What a chat template writes: reasoning in the last message or earlier ones, tool calls, and tools.

    `always_thinks`: its generation prompt starts reasoning.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        answer = {"role": "assistant", "content": ANSWER, "reasoning_content": THOUGHT}
        self.reasoning = _trains(tokenizer, [QUESTION, answer], REASONING)
        last = {"role": "assistant", "content": "Six."}
        self.earlier_reasoning = _trains(tokenizer, [QUESTION, answer, FOLLOW_UP, last], REASONING)
        prompt = tokenizer.chat_template.generation_prompt
        self.always_thinks = "<think>" in prompt and "</think>" not in prompt
        called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
        self.calls = _trains(tokenizer, [QUESTION, called], "tool-call")
        try:
            self.tools = TOOL["function"]["name"] in tokenizer.chat_template.render([QUESTION], [TOOL])
        except XtkError:
            self.tools = False


def _trains(tokenizer: Tokenizer, messages: list[dict[str, Any]], region: str) -> bool:
    document = Document.from_messages(messages)
    try:
        (sequence,) = tokenize_documents(tokenizer, [document])
    except XtkError:
        return False
    return bool((token_regions(document, sequence)[sequence.train_mask] == REGIONS.index(region)).any())
