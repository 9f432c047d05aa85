"""Chat templates: rendered conversations, and the positions of each message's content in them.

Positions come from rendering the conversation a second time with placeholders instead of contents, never from
searching for the template's own text, which a content may contain too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.errors import XtkError
from xtk.tokens.document import Conversation
from xtk.tokens.jinja_subprocess import CHAT_TEMPLATE, SandboxedTemplate

# Characters that Unicode never assigns; templates neither strip them nor split at them.
PLACEHOLDER_CHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]


@dataclass(frozen=True)
class ContentPosition:
    """Position of a message's content in a rendered conversation.

    Attributes:
        runs: int32 [R, 3], ascending: characters `[a, a + n)` of the content are `[b, b + n)` of the text, as (a, b,
            n). One run if the template copies the content unchanged.
        stop: the character after the content.
    """

    runs: NDArray[np.int32]
    stop: int


@dataclass(frozen=True)
class RenderedConversation:
    """A rendered conversation.

    Attributes:
        text: the rendered text.
        content_positions: position of each message's content; None where the template omits it.
    """

    text: str
    content_positions: tuple[ContentPosition | None, ...]


class ChatTemplate:
    """A chat template, compiled and rendered in a process with resource limits.

    Args:
        source: the Jinja template, in Hugging Face's dialect.
        special_tokens: {"bos_token": "<s>", ...}, variables of the template.
        where: name of its tokenizer in errors.

    Raises:
        XtkError: it has a syntax error, or exceeds the limits of `jinja_subprocess` during compilation.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], where: str) -> None:
        self.where, self._tokens = where, dict(special_tokens)
        self._template = SandboxedTemplate(source, CHAT_TEMPLATE, where)

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, **arguments: Any
    ) -> str:
        """Return a rendered conversation.

        Args:
            messages: each with a role and a content.
            tools: tools that the assistant may call.
            arguments: other variables of the template; `add_generation_prompt=True` appends the start of a reply.

        Raises:
            XtkError: the template refuses the messages (roles that do not alternate, say), or exceeds its limits.
        """
        (text,) = self._template.render_batch([self._template_variables(messages, tools, arguments)])
        return text

    def _template_variables(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, arguments: Mapping[str, Any]
    ) -> dict[str, Any]:
        others = {"documents": None, "add_generation_prompt": False, **self._tokens, **arguments}
        return {"messages": list(messages), "tools": tools, **others}

    def render_batch_with_positions(
        self, conversations: Sequence[Conversation], **arguments: Any
    ) -> list[RenderedConversation]:
        """Return rendered conversations (`arguments` as in `render`) with the positions of their contents."""
        all_marked = []
        values = []
        for conversation in conversations:
            messages = conversation.messages
            mark = _unused_placeholder([message["content"] for message in messages])
            marked = [mark + str(number) + mark for number in range(len(messages))]
            all_marked.append(marked)
            variants = (messages, _replace_contents(messages, dict(enumerate(marked))))
            values += [self._template_variables(variant, conversation.tools, arguments) for variant in variants]
        texts = iter(self._template.render_batch(values))
        return [
            self._locate_contents(conversation, marked, next(texts), next(texts), arguments)
            for conversation, marked in zip(conversations, all_marked, strict=True)
        ]

    def _locate_contents(
        self, conversation: Conversation, marked: list[str], text: str, skeleton: str, arguments: Mapping[str, Any]
    ) -> RenderedConversation:
        """Return a rendered conversation with the positions of its contents.

        Args:
            conversation: the conversation.
            marked: placeholder of each content in the skeleton.
            text: the rendered conversation.
            skeleton: the same, rendered with placeholders instead of contents.
            arguments: as in `render`.
        """
        contents = [message["content"] for message in conversation.messages]
        for written in (contents, [content.strip() for content in contents]):
            starts = _content_starts(skeleton, marked, written)
            if starts is not None and _fill_placeholders(skeleton, marked, written) == text:
                parts = zip(contents, written, starts, strict=True)
                return RenderedConversation(text, tuple(_position_of_content(*part) for part in parts))
        regions = [
            self._content_region(text, conversation, number, sign, arguments) if contents[number] else None
            for number, sign in enumerate(marked)
        ]
        found = [
            None if region is None else _locate_content(content, text, region)
            for content, region in zip(contents, regions, strict=True)
        ]
        return RenderedConversation(text, _drop_out_of_order_runs(found))

    def text_between_turns(
        self, conversation: Conversation, next_message: Mapping[str, Any], **arguments: Any
    ) -> tuple[str, tuple[int, int]]:
        """Return the template's text from the end of the last message to the beginning of the next reply.

        Args:
            conversation: its last message is the assistant's.
            next_message: the response to it, from a user or a tool.
            arguments: as in `render`.

        Returns:
            The text, and the range of characters `[start, stop)` in it that is the content of `next_message`.

        Raises:
            XtkError: the template refuses the messages, or omits the assistant's message.
        """
        messages = [*conversation.messages, next_message]
        mark = _unused_placeholder([one["content"] for one in messages])
        marked = {**messages[-2], "content": mark}
        arguments = {"add_generation_prompt": True, **arguments}

        def after(content: str) -> str:
            answered = {**next_message, "content": content}
            text = self.render([*messages[:-2], marked, answered], conversation.tools, **arguments)
            if text.count(mark) != 1:
                raise XtkError(
                    "the chat template does not render the assistant's message exactly once",
                    where=self.where,
                    hint="use a chat template that keeps assistant messages, as multi-turn rollouts need it",
                )
            return text.partition(mark)[2]

        text, other = after(next_message["content"]), _unused_placeholder([*(one["content"] for one in messages), mark])
        before, found, suffix = after(other).partition(other)
        if not found or not text.startswith(before) or not text.endswith(suffix):
            return text, (0, len(text))
        return text, (len(before), len(text) - len(suffix))

    def _content_region(
        self, text: str, conversation: Conversation, number: int, mark: str, arguments: Mapping[str, Any]
    ) -> tuple[int, int] | None:
        """Return the range of the text that depends on one content: the rest is equal when rendered without it."""
        messages = _replace_contents(conversation.messages, {number: mark})
        other = self.render(messages, conversation.tools, **arguments)
        before, found, after = other.partition(mark)
        if not found:
            return None
        start = _common_prefix(before, text)
        stop = len(text) - _common_prefix(after[::-1], text[start:][::-1])
        return start, stop


def _content_starts(skeleton: str, marked: list[str], written: list[str]) -> list[int | None] | None:
    """Return where contents start in the filled skeleton; None if a placeholder does not occur exactly once."""
    starts: list[int | None] = []
    at = place = 0
    for mark, content in zip(marked, written, strict=True):
        if not content and mark not in skeleton:
            starts.append(None)
            continue
        found = skeleton.find(mark, at)
        if skeleton.count(mark) != 1 or found < 0:  # not found: the template reorders messages
            return None
        place += found - at
        starts.append(place)
        place += len(content)
        at = found + len(mark)
    return starts


def _fill_placeholders(skeleton: str, marked: list[str], written: list[str]) -> str:
    for mark, content in zip(marked, written, strict=True):
        before, found, after = skeleton.partition(mark)
        if found:
            skeleton = before + content + after
    return skeleton


def _position_of_content(content: str, written: str, start: int | None) -> ContentPosition | None:
    return None if start is None else _single_run_position(content.find(written), start, len(written))


def _single_run_position(content_at: int, text_at: int, size: int) -> ContentPosition:
    runs = [(content_at, text_at, size)] if size else []
    return ContentPosition(np.array(runs, np.int32).reshape(-1, 3), text_at + size)


def _locate_content(content: str, text: str, region: tuple[int, int]) -> ContentPosition:
    """Return the position of a content in the range of the text that depends on it.

    Templates that drop text (reasoning, white space) keep the end of it, so the last of several matches is used.
    """
    start, stop = region
    part = text[start:stop]
    for candidate in (content, content.strip()):
        at = part.rfind(candidate)
        if candidate and at >= 0:
            return _single_run_position(content.find(candidate), start + at, len(candidate))
    for kept in (part, part.strip()):
        at = content.rfind(kept)
        if kept and at >= 0:
            return _single_run_position(at, start + part.find(kept), len(kept))
    from xtk.tokens.different_text_alignment import matching_runs

    back = matching_runs(content[::-1], part[::-1])[::-1]
    ends = np.array([len(content), len(part)]) - back[:, :2]
    runs = np.column_stack([ends - back[:, 2:], back[:, 2:]]) + np.array([0, start, 0])
    return ContentPosition(runs.astype(np.int32), stop)


def _drop_out_of_order_runs(places: Sequence[ContentPosition | None]) -> tuple[ContentPosition | None, ...]:
    """Remove runs that do not come after those of the previous message.

    If a template changes one message depending on another's content, the range of `_content_region` is too wide.
    """
    result: list[ContentPosition | None] = []
    last = 0
    for place in places:
        if place is None:
            result.append(None)
            continue
        runs = place.runs[place.runs[:, 1] >= last]
        last = int(runs[-1, 1] + runs[-1, 2]) if len(runs) else last
        result.append(ContentPosition(runs, max(place.stop, last)))
    return tuple(result)


def _replace_contents(messages: Sequence[Mapping[str, Any]], contents: Mapping[int, str]) -> list[dict[str, Any]]:
    # An empty content (of a message with tool calls only) stays empty: templates render such messages differently.
    return [
        {**message, "content": contents[number]} if number in contents and message["content"] else dict(message)
        for number, message in enumerate(messages)
    ]


def _unused_placeholder(contents: Sequence[str]) -> str:
    for mark in PLACEHOLDER_CHARACTERS:
        if not any(mark in content for content in contents):
            return mark
    raise XtkError(
        "a conversation contains all Unicode noncharacters U+FDD0 to U+FDEF; at least one must be unused",
        hint="remove one of these characters from the messages",
    )


def _common_prefix(one: str, other: str) -> int:
    size = min(len(one), len(other))
    low, high = 0, size
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
