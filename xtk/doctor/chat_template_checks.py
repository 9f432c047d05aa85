"""Checks of chat templates: duplicate start tokens, and changes to message contents."""

from __future__ import annotations

from collections.abc import Iterator

import tokenizers

from xtk.doctor.doctor_inputs import DoctorInputs, DoctorModel, Finding
from xtk.errors import XtkError
from xtk.tokens.document import Document
from xtk.tokens.token_sequence import count_lost_bytes, tokenize_documents

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
    """Return whether the tokenizer adds its start token to texts."""
    backend = tokenizers.Tokenizer.from_buffer(side.tokenizer.to_files()["tokenizer.json"])
    bos = side.tokenizer.special_token_ids["bos"]
    return backend.encode("a", add_special_tokens=True).ids[:1] == [bos]


def template_content(inputs: DoctorInputs) -> Iterator[Finding]:
    """Find changes that a chat template makes to answers: removed thoughts or changed white space."""
    has_conversations = inputs.has_conversations
    for side in inputs.models:
        if not side.has_chat_template:
            if not has_conversations:
                yield Finding("template_content", "ok", "there is no chat template", side.name)
                continue
            try:  # to report the same error as the commands
                _ = side.tokenizer.chat_template
            except XtkError as wrong:
                yield Finding("template_content", "error", wrong.what, side.name, wrong.hint or "")
            continue
        try:
            found = list(_try_template(side))
        except XtkError as wrong:
            yield Finding(
                "template_content", "error" if has_conversations else "warning", wrong.what, side.name, wrong.hint or ""
            )
            continue
        yield from found or [Finding("template_content", "ok", "the chat template does not change answers", side.name)]


def _try_template(side: DoctorModel) -> Iterator[Finding]:
    answered = [QUESTION, {"role": "assistant", "content": ANSWER}]
    text = side.tokenizer.chat_template.render(answered)
    prompt = side.tokenizer.chat_template.render([QUESTION], add_generation_prompt=True)
    if "<think>" in text or "<think>" in prompt[len(side.tokenizer.chat_template.render([QUESTION])) :]:
        what = "the chat template adds <think> to answers without one, or to the generation prompt"
        yield Finding(
            "template_content",
            "note",
            what,
            side.name,
            "use data with thoughts, or --chat-template-kwargs for rollouts",
        )
    tries = {
        "removes thoughts from answers": ([QUESTION], THOUGHT + ANSWER, []),
        "removes thoughts from earlier answers": ([QUESTION], THOUGHT + ANSWER, [FOLLOW_UP]),
        "changes white space at the ends of answers": ([QUESTION], f"  {ANSWER}\n\n", []),
    }
    for what, (before, answer, after) in tries.items():
        document = Document.from_messages([*before, {"role": "assistant", "content": answer}, *after])
        lost = count_lost_bytes(document, tokenize_documents(side.tokenizer, [document])[0])
        if lost:
            message = f"the chat template {what}: these bytes are not trained"
            yield Finding("template_content", "note", message, side.name, figures={"bytes": lost})
