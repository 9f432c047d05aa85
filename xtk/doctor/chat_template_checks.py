"""Chat templates: what they write in front, and what they do to what was said."""

from __future__ import annotations

from collections.abc import Iterator

import tokenizers

from xtk.doctor.inputs import DoctorInputs, DoctorModel, Finding
from xtk.errors import XtkError
from xtk.tokens.document import Document
from xtk.tokens.token_sequence import count_lost_bytes, tokenize_documents

QUESTION = {"role": "user", "content": "What is two and two?"}
FOLLOW_UP = {"role": "user", "content": "And three?"}
THOUGHT, ANSWER = "<think>\nTwo and two.\n</think>\n\n", "Four."


def duplicate_start_token(inputs: DoctorInputs) -> Iterator[Finding]:
    """Find a start token that both the tokenizer and the template write."""
    for side in inputs.models:
        tokenizer = side.tokenizer
        bos = tokenizer.special_token_ids.get("bos")
        if not _has_template(side) or bos is None:
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
            what = f"the tokenizer puts {name} in front, and so does the chat template: what others tokenise has two"
            hint = "elsewhere tokenise what the template wrote with add_special_tokens=False; xtk reads one"
            yield Finding("duplicate_start_token", "warning", what, side.name, hint)
        else:
            who = "the tokenizer" if added else "the chat template" if written else "nobody"
            yield Finding("duplicate_start_token", "ok", f"{who} writes the start token of a conversation", side.name)


def _adds_start_token(side: DoctorModel) -> bool:
    """Say whether the tokenizer puts its start token in front of texts."""
    backend = tokenizers.Tokenizer.from_buffer(side.tokenizer.to_files()["tokenizer.json"])
    bos = side.tokenizer.special_token_ids["bos"]
    return backend.encode("a", add_special_tokens=True).ids[:1] == [bos]


def template_content(inputs: DoctorInputs) -> Iterator[Finding]:
    """Try what a template does to answers: with thoughts, with white space, in an earlier turn."""
    talks = inputs.has_conversations
    for side in inputs.models:
        if not _has_template(side):
            if not talks:
                yield Finding("template_content", "ok", "there is no chat template", side.name)
                continue
            try:  # as the commands tell it
                _ = side.tokenizer.chat_template
            except XtkError as wrong:
                yield Finding("template_content", "error", wrong.what, side.name, wrong.hint or "")
            continue
        try:
            found = list(_try_template(side))
        except XtkError as wrong:
            yield Finding("template_content", "error" if talks else "warning", wrong.what, side.name, wrong.hint or "")
            continue
        yield from found or [
            Finding("template_content", "ok", "the chat template leaves answers as they are", side.name)
        ]


def _try_template(side: DoctorModel) -> Iterator[Finding]:
    answered = [QUESTION, {"role": "assistant", "content": ANSWER}]
    text = side.tokenizer.chat_template.render(answered)
    asked = side.tokenizer.chat_template.render([QUESTION], add_generation_prompt=True)
    if "<think>" in text or "<think>" in asked[len(side.tokenizer.chat_template.render([QUESTION])) :]:
        what = "the chat template writes a thought by itself, in answers that have none or where an answer begins"
        yield Finding(
            "template_content", "note", what, side.name, "data with thoughts, or --chat-template-kwargs in rollouts"
        )
    tries = {
        "drops thoughts from answers": ([QUESTION], THOUGHT + ANSWER, []),
        "drops thoughts from earlier answers": ([QUESTION], THOUGHT + ANSWER, [FOLLOW_UP]),
        "changes white space at the ends of answers": ([QUESTION], f"  {ANSWER}\n\n", []),
    }
    for what, (before, answer, after) in tries.items():
        document = Document.from_messages([*before, {"role": "assistant", "content": answer}, *after])
        lost = count_lost_bytes(document, tokenize_documents(side.tokenizer, [document])[0])
        if lost:
            told = f"the chat template {what}: these bytes carry no loss"
            yield Finding("template_content", "note", told, side.name, figures={"bytes": lost})


def _has_template(side: DoctorModel) -> bool:
    return side.tokenizer.template_fingerprint is not None
