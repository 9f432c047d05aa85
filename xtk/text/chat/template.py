"""Chat templates: rendered conversations, and the positions of each message's parts in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from xtk.errors import XtkError
from xtk.text.chat.jinja_template import CHAT_TEMPLATE, SandboxedTemplate
from xtk.text.chat.parts import CONTENT, REASONING, REASONING_KEY, MessagePart
from xtk.text.chat.positions import (
    PartPosition,
    insert_placeholders,
    locate_parts,
    search_parts,
    unused_character,
)
from xtk.text.chat.template_conventions import TemplateConventions, find_conventions
from xtk.text.document import Conversation


@dataclass(frozen=True)
class RenderedConversation:
    """A rendered conversation."""

    text: str  # the rendered text
    positions: tuple[PartPosition | None, ...]  # of each part of the conversation; None: the template omits it
    # For each message of the assistant, the character where the text that the model generates begins, which is the
    # template's at first (the start of reasoning or of a tool call); None if it is unknown.
    reply_starts: Mapping[int, int | None] = field(default_factory=dict)

    @property
    def content_ranges(self) -> list[tuple[int, int]]:
        """The ranges of characters that are copied from messages, in which no special tokens are read."""
        return [(b, b + n) for place in self.positions if place is not None for _, b, n in place.runs.tolist()]


_REPLY_MARK = "xtkReply"  # a text that no template contains


class ChatTemplate:
    """A chat template, in Hugging Face's dialect of Jinja; `where`: its tokenizer, in errors.

    `special_tokens`: {"bos_token": "<s>", ...}, variables of the template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], where: str) -> None:
        self.where, self._source, self._tokens = where, source, dict(special_tokens)
        self._template = SandboxedTemplate(source, CHAT_TEMPLATE, where)

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, **arguments: Any
    ) -> str:
        """Return a rendered conversation.

        `arguments`: other variables of the template; `add_generation_prompt=True` appends the start of a reply.
        """
        return self._render_as_given(self.conventions.apply(messages), tools, **arguments)

    def _render_as_given(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, **arguments: Any
    ) -> str:
        others = {"documents": None, "add_generation_prompt": False, **self._tokens, **arguments}
        return self._template.render({"messages": list(messages), "tools": tools, **others})

    @cached_property
    def conventions(self) -> TemplateConventions:
        """How the template wants its messages."""
        return find_conventions(self._source, self._render_as_given)

    @cached_property
    def generation_prompt(self) -> str:
        """The template's text that starts a reply; "" if it has none, or refuses a conversation of one question."""
        question = [{"role": "user", "content": "a"}]
        try:
            before, text = self.render(question), self.render(question, add_generation_prompt=True)
        except XtkError:
            return ""
        return text[len(before) :] if text.startswith(before) else ""

    @cached_property
    def text_after_reply(self) -> str:
        """The template's text after the last reply of a conversation; "" if it is not found."""
        question = {"role": "user", "content": "a"}
        try:
            text = self.render([question, {"role": "assistant", "content": _REPLY_MARK}])
        except XtkError:
            return ""
        return text.rpartition(_REPLY_MARK)[2]

    def render_with_positions(self, conversation: Conversation, **arguments: Any) -> RenderedConversation:
        """Return a rendered conversation (`arguments` as in `render`) with the positions of its parts."""
        placeholders = insert_placeholders(conversation.messages, conversation.parts)
        text, skeleton = (
            self.render(messages, conversation.tools, **arguments)
            for messages in (conversation.messages, placeholders.messages)
        )
        positions = locate_parts(conversation.parts, placeholders.marks, text, skeleton)
        if positions is None:
            regions = [self._part_region(text, conversation, part, arguments) for part in conversation.parts]
            positions = search_parts(conversation.parts, regions, text)
        starts = self._reply_starts(conversation, text, positions, arguments)
        return RenderedConversation(text, tuple(positions), starts)

    def _reply_starts(
        self,
        conversation: Conversation,
        text: str,
        positions: Sequence[PartPosition | None],
        arguments: Mapping[str, Any],
    ) -> dict[int, int | None]:
        """Return where each reply of the assistant begins: after the generation prompt."""
        result, before = dict[int, int | None](), 0
        for number, message in enumerate(conversation.messages):
            pairs = ((conversation.parts[at], positions[at]) for at in conversation.part_ranges[number])
            there = [(part, place) for part, place in pairs if place is not None]
            if there and message["role"] == "assistant":
                first, start = there[0][0], there[0][1].start
                result[number] = self._prompt_end(text, before, start)
                if result[number] is None and first.kind != CONTENT:
                    result[number] = self._rendered_prompt_end(conversation, number, text, before, start, arguments)
            before = max([before, *(place.stop for _, place in there)])
        return result

    def _prompt_end(self, text: str, before: int, start: int) -> int | None:
        """Return the end of the generation prompt in the characters `[before, start)`; None if it is not there."""
        prompt = self.generation_prompt
        for written in (prompt, prompt.partition("<think>")[0]):  # a prompt may begin the reasoning
            at = text.rfind(written, before, start) if written else -1
            if at >= 0:
                return at + len(written)
        return None

    def _rendered_prompt_end(
        self,
        conversation: Conversation,
        number: int,
        text: str,
        before: int,
        start: int,
        arguments: Mapping[str, Any],
    ) -> int | None:
        """Return the length of the messages before, rendered with the generation prompt, if the text begins so."""
        try:
            prompt = self.render(
                conversation.messages[:number], conversation.tools, **{**arguments, "add_generation_prompt": True}
            )
        except XtkError:
            return None
        return len(prompt) if text.startswith(prompt) and before <= len(prompt) <= start else None

    def text_between_turns(
        self, conversation: Conversation, next_message: Mapping[str, Any], **arguments: Any
    ) -> tuple[str, tuple[int, int]]:
        """Return the template's text from the end of the last message, the assistant's, to the next reply.

        And the range of characters `[start, stop)` in it that is the content of `next_message`, from a user or a tool.
        """
        messages = [*conversation.messages, next_message]
        mark = unused_character([message["content"] for message in messages])
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

        text = after(next_message["content"])
        other = unused_character([*(message["content"] for message in messages), mark])
        before, separator, suffix = after(other).partition(other)
        if not separator or not text.startswith(before) or not text.endswith(suffix):
            return text, (0, len(text))
        return text, (len(before), len(text) - len(suffix))

    def _part_region(
        self, text: str, conversation: Conversation, part: MessagePart, arguments: Mapping[str, Any]
    ) -> tuple[int, int] | None:
        """Return the range of the text that depends on a content or a reasoning: the rest is equal without it."""
        if part.kind not in (CONTENT, REASONING) or not part.text:
            return None
        mark = unused_character(part.text for part in conversation.parts)
        key = CONTENT if part.kind == CONTENT else REASONING_KEY
        messages = [dict(message) for message in conversation.messages]
        messages[part.message][key] = mark
        before, separator, after = self.render(messages, conversation.tools, **arguments).partition(mark)
        if not separator:
            return None
        start = _common_prefix(before, text)
        stop = len(text) - _common_prefix(after[::-1], text[start:][::-1])
        return start, stop


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
