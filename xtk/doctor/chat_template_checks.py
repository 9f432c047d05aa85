"""Checks of chat templates: duplicate start tokens, and changes to message contents."""

from __future__ import annotations

from collections.abc import Iterator

from xtk.doctor.doctor_inputs import ConversationContents, DoctorInputs, DoctorModel, Finding
from xtk.errors import XtkError
from xtk.text.document import Document
from xtk.text.token_sequence import count_lost_bytes, tokenize_documents

QUESTION = {"role": "user", "content": "What is two and two?"}
FOLLOW_UP = {"role": "user", "content": "And three?"}
THOUGHT, ANSWER = "<think>\nTwo and two.\n</think>\n\n", "Four."


def duplicate_start_token(inputs: DoctorInputs) -> Iterator[Finding]:
    """Find a start token that both the tokenizer and the chat template add."""
    for side in inputs.models:
        tokenizer = side.tokenizer
        bos = tokenizer.special_token_ids.get("bos")
        if not side.has_chat_template or bos is None:
            continue
        added = _adds_start_token(side)
        try:
            written = tokenizer.chat_template.render([QUESTION]).startswith(
                tokenizer.special_token_names.get(bos, "\0")
            )
        except XtkError:
            continue
        if added and written:
            name = tokenizer.special_token_names[bos]
            what = f"both the tokenizer and the chat template add {name} at the start; other tools get it twice"
            hint = "xtk adds it once; in other tools, tokenize rendered chats with add_special_tokens=False"
            yield Finding("duplicate_start_token", "warning", what, side.name, hint)
        else:
            part = "the tokenizer" if added else "the chat template"
            what = f"{part} adds the start token" if added or written else "no start token is added"
            yield Finding("duplicate_start_token", "ok", what, side.name)


def _adds_start_token(side: DoctorModel) -> bool:
    """Return whether the tokenizer adds its bos token to texts."""
    return side.tokenizer.start_ids[:1] == (side.tokenizer.special_token_ids["bos"],)


def template_content(inputs: DoctorInputs) -> Iterator[Finding]:
    """Find changes that a chat template makes to answers like those of the data: thoughts, white space."""
    contents = inputs.conversation_contents
    for side in inputs.models:
        if not side.has_chat_template:
            if not contents.conversations:
                yield Finding("template_content", "ok", "there is no chat template", side.name)
                continue
            try:  # to report the same error as the commands
                _ = side.tokenizer.chat_template
            except XtkError as failure:
                yield Finding("template_content", "error", failure.what, side.name, failure.hint or "")
            continue
        try:
            findings = list(_try_template(side, contents))
        except XtkError as failure:
            level = "error" if contents.conversations else "warning"
            yield Finding("template_content", level, failure.what, side.name, failure.hint or "")
            continue
        what = "the chat template does not change answers like those of the data"
        if not contents.conversations:
            what = "changes of answers by the chat template are not checked without conversations"
        yield from findings or [Finding("template_content", "ok", what, side.name)]


def _try_template(side: DoctorModel, contents: ConversationContents) -> Iterator[Finding]:
    """Yield notes about the changes that concern the data, after one conversation in any case, which may be refused."""
    answered = [QUESTION, {"role": "assistant", "content": ANSWER}]
    text = side.tokenizer.chat_template.render(answered)
    prompt = side.tokenizer.chat_template.render([QUESTION], add_generation_prompt=True)
    adds_thoughts = "<think>" in text or "<think>" in prompt[len(side.tokenizer.chat_template.render([QUESTION])) :]
    if contents.conversations and adds_thoughts:
        what = "the chat template adds <think> to answers without one, or to the generation prompt"
        yield Finding(
            "template_content",
            "note",
            what,
            side.name,
            "use data with thoughts, or --chat-template-kwargs for rollouts",
        )
    padded = f"  {ANSWER}\n\n"
    tries = {
        "removes thoughts from answers": (contents.thoughts, THOUGHT + ANSWER, [], THOUGHT.split("\n")[1]),
        "removes thoughts from earlier answers": (
            contents.earlier_thoughts, THOUGHT + ANSWER, [FOLLOW_UP], THOUGHT.split("\n")[1]
        ),
        "changes white space at the ends of answers": (contents.outer_space, padded, [], padded),
    }  # fmt: skip
    for what, (is_in_data, answer, after, kept_text) in tries.items():
        messages = [QUESTION, {"role": "assistant", "content": answer}, *after]
        if is_in_data and kept_text not in side.tokenizer.chat_template.render(messages):
            document = Document.from_messages(messages)
            lost = count_lost_bytes(document, tokenize_documents(side.tokenizer, [document])[0])
            message = f"the chat template {what}: these bytes are not trained"
            yield Finding("template_content", "note", message, side.name, figures={"bytes": lost})
