"""Reads prompts from data records, and tokenizes prompts and the text between turns."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.data.corpus_reader import Corpus
from xtk.data.record_to_document import Record, record_to_document, record_to_prompt
from xtk.errors import XtkError
from xtk.rewards.reward_spec import WeightedRewards, name_row_in_errors
from xtk.rollouts.rollout_record import Prompt
from xtk.text.chat.jinja_template import PROMPT_TEMPLATE, SandboxedTemplate
from xtk.text.document import Conversation, Document
from xtk.text.tokenizer import Tokenizer

RESERVED_TEMPLATE_ARGUMENTS = {"messages", "conversation", "tools", "add_generation_prompt"}  # of chat templates


class PromptFormat:
    """Builds a prompt from a data record.

    `template`: Jinja template over the record's fields; "": its own prompt. `as_chat`: wrap text as a user message.
    """

    def __init__(self, template: str = "", *, as_chat: bool = False) -> None:
        self._chat = as_chat
        self._template = SandboxedTemplate(template, PROMPT_TEMPLATE, template[:200]) if template else None

    def prompt_document(self, record: Record, columns: Mapping[str, str], where: str) -> Document:
        """Return a document with the prompt of a record."""
        return record_to_prompt(*self._with_prompt(record, columns, where), where)

    def document_with_completion(self, record: Record, columns: Mapping[str, str], where: str) -> Document:
        """Return the prompt followed by the record's completion."""
        own, named = self._with_prompt(record, columns, where)
        if own is record:
            return record_to_document(record, columns, where)
        column = columns.get("completion", "completion")
        completion = record.get(column)
        if not isinstance(completion, str):
            has = f"is missing; the record has {', '.join(map(str, record))}"
            raise XtkError(
                f"the completion (column {column} of the data) {'is not a string' if column in record else has}",
                where=where,
                hint="use --columns completion=COLUMN, or --lmbda 1 to train on rollouts only",
            )  # fmt: skip
        if not isinstance(own[named["prompt"]], str):
            completion = [{"role": "assistant", "content": completion}]
        return record_to_document(*_set_field(own, named, "completion", completion), where)

    def _with_prompt(self, record: Record, columns: Mapping[str, str], where: str) -> tuple[Record, Mapping[str, str]]:
        """Return the record with the formatted prompt, and its column names; both unchanged if it is its own prompt."""
        if self._template is not None:
            record, columns = _set_field(record, columns, "prompt", self._rendered(record, where))
        if self._chat:
            teacher_column = columns.get("teacher_prompt", "teacher_prompt")
            # Without the teacher's prompt, which is not formatted yet.
            alone = record_to_prompt({**record, teacher_column: None}, columns, where)
            if alone.conversation is None:
                record, columns = _set_field(record, columns, "prompt", _of_user(alone.text))
                if isinstance(teacher_prompt := record.get(teacher_column), str):
                    record, columns = _set_field(record, columns, "teacher_prompt", _of_user(teacher_prompt))
        return record, columns

    def _rendered(self, record: Record, where: str) -> str:
        assert self._template is not None
        try:
            return self._template.render({str(key): value for key, value in record.items()})
        except XtkError as error:
            hint = f"fields of the record: {', '.join(map(str, record))}"
            raise XtkError(error.what, where=where, hint=hint) from None


def _set_field(record: Record, columns: Mapping[str, str], field: str, value: Any) -> tuple[Record, Mapping[str, str]]:
    """Return the record with a value for a field, in a column that no other field uses, and the new column names."""
    column = field
    while column in record:
        column += "_"
    aliases = ("prompt", "messages", "text") if field == "prompt" else (field,)
    others = {name: place for name, place in columns.items() if name not in aliases}
    return {**record, column: value}, {**others, field: column}


def _of_user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def read_prompt_template(text: str) -> str:
    """Return a prompt template: the content of FILE.jinja without the final newline, or the text itself."""
    if not text.endswith(".jinja"):
        return text
    try:
        template = Path(text).read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as failure:
        raise XtkError(
            f"the prompt template file cannot be read: {failure}",
            where=text,
            hint="use --prompt-template FILE.jinja, in UTF-8, or give the template itself as text",
        ) from None
    if not template:
        raise XtkError("the prompt template file is empty", where=text, hint="write a Jinja template into the file")
    return template


def read_template_arguments(text: str) -> dict[str, Any]:
    """Parse `--chat-template-kwargs`: extra arguments of chat templates, a JSON object; "": none."""
    try:
        arguments = json.loads(text) if text else {}
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise XtkError(
            f"--chat-template-kwargs {text!r} is not a JSON object",
            hint="use for example --chat-template-kwargs '{\"enable_thinking\": false}'",
        )
    if named := RESERVED_TEMPLATE_ARGUMENTS & arguments.keys():
        raise XtkError(
            f"--chat-template-kwargs sets {', '.join(sorted(named))}, which xtk sets itself",
            hint="remove these names from --chat-template-kwargs",
        )
    return arguments


def read_prompts(
    corpus: Corpus, max_prompts: int | None = None, prompt_format: PromptFormat | None = None
) -> list[Prompt]:
    """Return prompts: `prompt` (text or messages), else `messages` before the last answer, else `text`."""
    prompt_format = prompt_format or PromptFormat()
    prompts: Iterator[Prompt] = (
        Prompt(number, prompt_format.prompt_document(record, corpus.columns, where), record)
        for number, (record, where) in enumerate(corpus.records())
    )
    return list(islice(prompts, max_prompts))


def tokenize_prompts(
    tokenizer: Tokenizer, documents: Sequence[Document], template_arguments: Mapping[str, Any] | None = None
) -> list[NDArray[np.int32]]:
    """Return the prompt tokens that the student continues.

    Text follows the start token; messages are rendered with the chat template and its generation prompt, with extra
    arguments such as {"enable_thinking": False}.
    """
    start = np.array(tokenizer.start_ids, np.int32)
    arguments = {"add_generation_prompt": True, **(template_arguments or {})}
    texts = iter(tokenizer.encode([document.text for document in documents if document.conversation is None]))
    conversations = [document.conversation for document in documents if document.conversation is not None]
    renderings = [tokenizer.chat_template.render_with_positions(chat, **arguments) for chat in conversations]
    ranges = [rendering.content_ranges for rendering in renderings]
    rendered = iter(tokenizer.encode_rendered([rendering.text for rendering in renderings], ranges))
    return [
        np.concatenate([start, next(texts).ids]) if document.conversation is None else next(rendered).ids
        for document in documents
    ]


def tokenize_between_turns(
    tokenizer: Tokenizer,
    conversation: Conversation,
    message: Mapping[str, Any],
    sampled_end: int | None,
    template_arguments: Mapping[str, Any] | None = None,
) -> NDArray[np.int32]:
    """Return the template's tokens between the last message, a turn of the student, and its next turn.

    `sampled_end`: the stop token that the student sampled, if it did; then the template's own is left out.
    """
    text, (start, stop) = tokenizer.chat_template.text_between_turns(
        conversation, message, **(template_arguments or {})
    )
    if sampled_end is not None:
        names = [
            tokenizer.special_token_names[token]
            for token in (tokenizer.turn_end_ids - tokenizer.next_turn_ids) | {sampled_end}
            if token in tokenizer.special_token_names
        ]
        # Llama 2 writes a space before its end token, which the student did not sample.
        without_space = text.lstrip()
        end_token = next((name for name in names if without_space.startswith(name)), None)
        if end_token is not None:
            size = len(text) - len(without_space) + len(end_token)
            text, start, stop = text[size:], start - size, stop - size
    (encoded,) = tokenizer.encode_rendered([text], [[(max(start, 0), stop)] if stop > start else []])
    return encoded.ids


def tokenize_continuation(tokenizer: Tokenizer, text: str) -> NDArray[np.int32]:
    """Return the tokens of a text that follows another one, tokenized separately."""
    (encoded,) = tokenizer.encode([text])
    ids = encoded.ids
    own_space = tokenizer.adds_prefix_space and len(ids) and tokenizer.vocabulary.bytes_of(int(ids[0])) == b" "
    return ids[1:] if own_space and not text.startswith(" ") else ids


def check_rewards_apply(rewards: WeightedRewards, prompts: Sequence[Prompt]) -> None:
    """Refuse prompts that no reward can score, before anything is generated; without rewards, do nothing."""
    can_score = not rewards.specs
    for prompt in prompts:
        with name_row_in_errors(prompt.number):
            can_score = rewards.can_score(prompt.record) or can_score
    if not can_score:
        columns = list(dict.fromkeys(str(name) for prompt in prompts for name in prompt.record))
        raise unscored_error(rewards, f"it has the columns {', '.join(columns)}")


def unscored_error(rewards: WeightedRewards, where: str | None = None) -> XtkError:
    """Return the error for rewards that score nothing."""
    return XtkError(
        f"--reward {', '.join(map(str, rewards.specs))} cannot score any row of the data",
        where=where,
        hint="give the data the columns that this reward needs (docs/reference/rewards.md lists them), or name the "
        "column of the expected answer with --reward NAME:column=COLUMN",
    )
