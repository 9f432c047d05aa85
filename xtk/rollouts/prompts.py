"""What a student is to go on from: records of data as prompts, and the tokens that it reads of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.artifacts.corpus import Corpus
from xtk.artifacts.records import prompt_of
from xtk.rollouts.rollout import Prompt
from xtk.tokens.document import Conversation, Document
from xtk.tokens.tokenizer import Tokenizer


def read_prompts(corpus: Corpus, limit: int | None = None) -> list[Prompt]:
    """Read prompts: `prompt` (text or messages), or `messages` before the last answer, or `text`.

    Args:
        corpus: records, with `tools` and `teacher_prompt` if they have them, and the columns of weight and route that
            are asked for.
        limit: of so many records at most; None: of all.

    Raises:
        XtkError: a record has none of these, or something else in their place.
    """
    found: Iterator[Prompt] = (
        Prompt(number, prompt_of(record, corpus.columns, where), record)
        for number, (record, where) in enumerate(corpus.records())
    )
    return list(islice(found, limit))


def prompt_ids(
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
    renderings = [tokenizer.chat_template.place(talk, **arguments) for talk in talks]
    rendered = iter(
        tokenizer.encode_rendered(
            [rendering.text for rendering in renderings],
            [
                [(at, at + size) for place in rendering.places if place is not None for _, at, size in place.runs]
                for rendering in renderings
            ],
        )
    )
    return [
        np.concatenate([start, next(texts).ids]) if document.conversation is None else next(rendered).ids
        for document in documents
    ]


def ids_between_turns(
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
        template_arguments: as in `prompt_ids`.

    Raises:
        XtkError: the template refuses it.
    """
    text, (start, stop) = tokenizer.chat_template.between_turns(conversation, message, **(template_arguments or {}))
    if ended:
        names = [tokenizer.control_names[token] for token in tokenizer.end_ids if token in tokenizer.control_names]
        closer = next((name for name in names if text.startswith(name)), "")
        text, start, stop = text[len(closer) :], start - len(closer), stop - len(closer)
    (encoded,) = tokenizer.encode_rendered([text], [[(max(start, 0), stop)] if stop > start else []])
    return encoded.ids


def ids_of_text(tokenizer: Tokenizer, text: str) -> NDArray[np.int32]:
    """Return the tokens of a text that stands behind another one, tokenised by itself."""
    (encoded,) = tokenizer.encode([text])
    ids = encoded.ids
    own_space = tokenizer.puts_space and len(ids) and tokenizer.vocabulary.spelling(int(ids[0])) == b" "
    return ids[1:] if own_space and not text.startswith(" ") else ids
