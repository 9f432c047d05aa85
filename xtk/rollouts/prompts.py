"""What a student is to go on from: records of data as prompts, and the tokens that it reads of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.artifacts.corpus import Corpus
from xtk.artifacts.dataset_records import Record, record_to_document, record_to_prompt
from xtk.errors import XtkError
from xtk.rollouts.rollout import Prompt
from xtk.tokens.document import Conversation, Document
from xtk.tokens.template_rendering import PROMPT_TEMPLATE, SandboxedTemplate
from xtk.tokens.tokenizer import Tokenizer

RESERVED_TEMPLATE_ARGUMENTS = {"messages", "conversation", "tools", "add_generation_prompt"}  # of chat templates


class PromptFormat:
    """How a record is put to a model.

    Args:
        template: of Jinja, which writes the prompt from the record's fields; "": the record's own prompt.
        chat: a prompt that is text is what a user says, in the model's chat template.

    Raises:
        XtkError: it is no template.
    """

    def __init__(self, template: str = "", *, as_chat: bool = False) -> None:
        self._chat = as_chat
        self._template = SandboxedTemplate(template, PROMPT_TEMPLATE, template[:200]) if template else None

    def prompt_document(self, record: Record, columns: Mapping[str, str], where: str) -> Document:
        """Return what a model is to go on from.

        Raises:
            XtkError: the record lacks a field that the template names, or has no prompt.
        """
        return record_to_prompt(*self._with_prompt(record, columns, where), where)

    def document_with_completion(self, record: Record, columns: Mapping[str, str], where: str) -> Document:
        """Return the same, and behind it the completion that the record has.

        Raises:
            XtkError: as `document`; or the record has no completion.
        """
        own, named = self._with_prompt(record, columns, where)
        if own is record:
            return record_to_document(record, columns, where)
        column = columns.get("completion", "completion")
        said = record.get(column)
        if not isinstance(said, str):
            found = "is no text" if column in record else f"is not there; there is {', '.join(map(str, record))}"
            raise XtkError(
                f"the data's own answer to a prompt, {column}, {found}", where=where,
                hint="--columns completion=COLUMN; or --lmbda 1, which takes none",
            )  # fmt: skip
        if not isinstance(own[named["prompt"]], str):
            said = [{"role": "assistant", "content": said}]
        return record_to_document(*_set_field(own, named, "completion", said), where)

    def _with_prompt(self, record: Record, columns: Mapping[str, str], where: str) -> tuple[Record, Mapping[str, str]]:
        """Return a record with the prompt as it is put, and the names of its columns; the same if that is its own."""
        if self._template is not None:
            record, columns = _set_field(record, columns, "prompt", self._rendered(record, where))
        if self._chat:
            teachers = columns.get("teacher_prompt", "teacher_prompt")
            alone = record_to_prompt(
                {**record, teachers: None}, columns, where
            )  # what only the teacher reads is no text yet
            if alone.conversation is None:
                record, columns = _set_field(record, columns, "prompt", _of_user(alone.text))
                if isinstance(told := record.get(teachers), str):
                    record, columns = _set_field(record, columns, "teacher_prompt", _of_user(told))
        return record, columns

    def _rendered(self, record: Record, where: str) -> str:
        assert self._template is not None
        try:
            (text,) = self._template.render_batch([{str(key): value for key, value in record.items()}])
        except XtkError as wrong:
            raise XtkError(wrong.what, where=where, hint=f"fields: {', '.join(map(str, record))}") from None
        return text


def _set_field(record: Record, columns: Mapping[str, str], field: str, value: Any) -> tuple[Record, Mapping[str, str]]:
    """Return a record that has this in a field, in a column that no other field may mean, and the names of columns."""
    column = field
    while column in record:
        column += "_"
    told_by = ("prompt", "messages", "text") if field == "prompt" else (field,)
    others = {name: place for name, place in columns.items() if name not in told_by}
    return {**record, column: value}, {**others, field: column}


def _of_user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def read_prompt_template(text: str) -> str:
    """Return a template of prompts: what a file FILE.jinja holds, without the line feed at its end, or the text itself.

    Raises:
        XtkError: there is no such file, it is empty, or it is no text in UTF-8.
    """
    if not text.endswith(".jinja"):
        return text
    try:
        template = Path(text).read_text(encoding="utf-8").removesuffix("\n")
    except (FileNotFoundError, IsADirectoryError):
        raise XtkError(
            "no such file", where=text, hint="--prompt-template FILE.jinja, or the template itself"
        ) from None
    except UnicodeDecodeError:
        raise XtkError("a template is text in UTF-8", where=text) from None
    if not template:
        raise XtkError("this template is empty", where=text)
    return template


def read_template_arguments(text: str) -> dict[str, Any]:
    """Read `--chat-template-kwargs`: what chat templates are told beside the messages, a JSON object; "": nothing.

    Raises:
        XtkError: it is no JSON object, or has what templates are told anyway.
    """
    try:
        found = json.loads(text) if text else {}
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise XtkError(f"--chat-template-kwargs is {text!r}, and no JSON object", hint="'{\"enable_thinking\": false}'")
    if named := RESERVED_TEMPLATE_ARGUMENTS & found.keys():
        raise XtkError(f"--chat-template-kwargs has {', '.join(sorted(named))}, which the data or the command tells")
    return found


def read_prompts(
    corpus: Corpus, max_prompts: int | None = None, prompt_format: PromptFormat | None = None
) -> list[Prompt]:
    """Read prompts: `prompt` (text or messages), or `messages` before the last answer, or `text`.

    Args:
        corpus: records, with `tools` and `teacher_prompt` if they have them, and the columns of weight and route that
            are asked for.
        max_prompts: of so many records at most; None: of all.
        prompt_format: how they are put; None: as they stand there.

    Raises:
        XtkError: a record has none of these, or something else in their place.
    """
    prompt_format = prompt_format or PromptFormat()
    found: Iterator[Prompt] = (
        Prompt(number, prompt_format.prompt_document(record, corpus.columns, where), record)
        for number, (record, where) in enumerate(corpus.records())
    )
    return list(islice(found, max_prompts))


def tokenize_prompts(
    tokenizer: Tokenizer, documents: Sequence[Document], template_arguments: Mapping[str, Any] | None = None
) -> list[NDArray[np.int32]]:
    """Return the tokens that a student reads before it writes.

    Args:
        tokenizer: its.
        documents: prompts. A text stands behind the start token; messages stand in the chat template, which begins
            the answer.
        template_arguments: what the template is told beside them, such as {"enable_thinking": False}.

    Raises:
        XtkError: a conversation, and the tokenizer has no chat template or one that refuses it.
    """
    start = np.array([] if tokenizer.start_id is None else [tokenizer.start_id], np.int32)
    arguments = {"add_generation_prompt": True, **(template_arguments or {})}
    texts = iter(tokenizer.encode([document.text for document in documents if document.conversation is None]))
    talks = [document.conversation for document in documents if document.conversation is not None]
    renderings = tokenizer.chat_template.render_batch_with_positions(talks, **arguments) if talks else []
    rendered = iter(
        tokenizer.encode_rendered(
            [rendering.text for rendering in renderings],
            [
                [
                    (at, at + size)
                    for place in rendering.content_positions
                    if place is not None
                    for _, at, size in place.runs
                ]
                for rendering in renderings
            ],
        )
    )
    return [
        np.concatenate([start, next(texts).ids]) if document.conversation is None else next(rendered).ids
        for document in documents
    ]


def tokenize_between_turns(
    tokenizer: Tokenizer,
    conversation: Conversation,
    message: Mapping[str, Any],
    ended: bool,
    template_arguments: Mapping[str, Any] | None = None,
) -> NDArray[np.int32]:
    """Return the tokens that a template writes behind what the student drew, up to where its next turn begins.

    Args:
        tokenizer: the student's.
        conversation: its last message is what the student said.
        message: what it is answered.
        ended: whether it drew a token that ends its turn; the template's own is left out then.
        template_arguments: as in `tokenize_prompts`.

    Raises:
        XtkError: the template refuses it.
    """
    text, (start, stop) = tokenizer.chat_template.text_between_turns(
        conversation, message, **(template_arguments or {})
    )
    if ended:
        names = [
            tokenizer.special_token_names[token]
            for token in tokenizer.end_ids
            if token in tokenizer.special_token_names
        ]
        closer = next((name for name in names if text.startswith(name)), "")
        text, start, stop = text[len(closer) :], start - len(closer), stop - len(closer)
    (encoded,) = tokenizer.encode_rendered([text], [[(max(start, 0), stop)] if stop > start else []])
    return encoded.ids


def tokenize_continuation(tokenizer: Tokenizer, text: str) -> NDArray[np.int32]:
    """Return the tokens of a text that stands behind another one, tokenised by itself."""
    (encoded,) = tokenizer.encode([text])
    ids = encoded.ids
    own_space = tokenizer.adds_prefix_space and len(ids) and tokenizer.vocabulary.bytes_of(int(ids[0])) == b" "
    return ids[1:] if own_space and not text.startswith(" ") else ids
