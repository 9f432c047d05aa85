"""Chat templates: a conversation as one model reads it, and where in it each message's content stands.

The places are found by rendering the conversation a second time with marks instead of contents, never by
searching for what templates write around them: a content may hold that too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from xtk.errors import XtkError
from xtk.tokens.document import Conversation

# Templates that ask for the date get this one: the same inputs give the same bytes on every day.
TODAY = datetime(2024, 7, 26)
# Characters that Unicode promises never to assign; no template strips or splits at them.
MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]


@dataclass(frozen=True)
class Rendering:
    """A conversation as text.

    Attributes:
        text: what the template makes of it.
        regions: for each message the characters `[start, stop)` of the text that depend on its content; None
            where the template leaves the message out. A content that the template did not change is just its region.
    """

    text: str
    regions: tuple[tuple[int, int] | None, ...]


class ChatTemplate:
    """A chat template, compiled in a sandbox.

    Args:
        source: Jinja, as Hugging Face writes it.
        tokens: {"bos_token": "<s>", ...}, which templates name.
        where: whose it is, for messages.

    Raises:
        XtkError: it is no Jinja.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], where: str) -> None:
        import jinja2

        self.where, self._tokens = where, dict(tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as wrong:
            raise XtkError(f"this chat template cannot be read: {wrong}", where=where) from None

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None) -> str:
        """Return a conversation as text.

        Raises:
            XtkError: the template refuses it (roles that do not alternate, say).
        """
        import jinja2

        try:
            text: str = self._template.render(
                messages=list(messages), tools=tools, documents=None, add_generation_prompt=False, **self._tokens
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as wrong:
            raise XtkError(f"the chat template refuses a conversation: {wrong}", where=self.where) from None
        return text

    def place(self, conversation: Conversation) -> Rendering:
        """Render a conversation and find where its contents stand."""
        messages, tools = conversation.messages, conversation.tools
        text = self.render(messages, tools)
        contents = [message["content"] for message in messages]
        mark = _unused_mark(contents)
        marked = [mark + str(number) + mark for number in range(len(messages))]
        skeleton = self.render(_with_contents(messages, dict(enumerate(marked))), tools)
        regions = _filled(skeleton, marked, contents)
        if regions is None or _joined(skeleton, marked, contents) != text:
            regions = tuple(
                self._region(text, messages, tools, number, sign) if contents[number] else None
                for number, sign in enumerate(marked)
            )
        return Rendering(text, _in_order(regions))

    def _region(
        self, text: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, number: int, mark: str
    ) -> tuple[int, int] | None:
        """Find what of the text depends on one content: what is equal without it, before and after, does not."""
        other = self.render(_with_contents(messages, {number: mark}), tools)
        before, found, after = other.partition(mark)
        if not found:
            return None
        start = _common_prefix(before, text)
        stop = len(text) - _common_prefix(after[::-1], text[start:][::-1])
        return start, stop


def _filled(skeleton: str, marked: list[str], contents: list[str]) -> tuple[tuple[int, int] | None, ...] | None:
    """Return the regions of contents put into the skeleton as they are; None where a mark does not stand there once."""
    regions: list[tuple[int, int] | None] = []
    at = place = 0
    for mark, content in zip(marked, contents, strict=True):
        if not content and mark not in skeleton:
            regions.append(None)
            continue
        if skeleton.count(mark) != 1:
            return None
        found = skeleton.find(mark, at)
        if found < 0:  # the template changes the order of messages
            return None
        place += found - at
        regions.append((place, place + len(content)))
        place += len(content)
        at = found + len(mark)
    return tuple(regions)


def _joined(skeleton: str, marked: list[str], contents: list[str]) -> str:
    for mark, content in zip(marked, contents, strict=True):
        before, found, after = skeleton.partition(mark)
        if found:
            skeleton = before + content + after
    return skeleton


def _in_order(regions: Sequence[tuple[int, int] | None]) -> tuple[tuple[int, int] | None, ...]:
    """Cut regions that run into the one before them."""
    result: list[tuple[int, int] | None] = []
    last = 0
    for region in regions:
        if region is None:
            result.append(None)
            continue
        start = max(region[0], last)
        last = max(start, region[1])
        result.append((start, last))
    return tuple(result)


def _with_contents(messages: Sequence[Mapping[str, Any]], contents: Mapping[int, str]) -> list[dict[str, Any]]:
    # An empty content (of a message that only calls tools) stays empty: templates write such messages in another way.
    return [
        {**message, "content": contents[number]} if number in contents and message["content"] else dict(message)
        for number, message in enumerate(messages)
    ]


def _unused_mark(contents: Sequence[str]) -> str:
    for mark in MARKS:
        if not any(mark in content for content in contents):
            return mark
    raise XtkError("a conversation holds every noncharacter of Unicode (U+FDD0 to U+FDEF); one has to be left")


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


def _environment() -> Any:
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks what a model writes; here its body is text as any other."""

        tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = TODAY.strftime
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)
