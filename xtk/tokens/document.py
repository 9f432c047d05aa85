"""A document: what is read, and which of its bytes are trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Segment:
    """A stretch of a document.

    Attributes:
        role: "text", "prompt", "completion", or in a conversation the message's ("user", "assistant", "tool"...).
        text: the stretch itself.
        train: whether its tokens carry a loss.
    """

    role: str
    text: str
    train: bool


@dataclass(frozen=True)
class Conversation:
    """Messages as chat templates read them.

    Attributes:
        messages: each with "role" and "content" (a string), and whatever else templates read ("tool_calls"...).
        tools: descriptions of the tools that the assistant may call.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class Document:
    """Segments in order. Their texts joined are the document's text.

    Attributes:
        segments: at least one.
        ends: whether the text ends here. The piece of a longer text does not, and gets no end token.
        conversation: the messages, for each model to read through its own template; None for text. A segment
            is then the content of a message, and what templates write around it belongs to no segment.
    """

    segments: tuple[Segment, ...]
    ends: bool = True
    conversation: Conversation | None = None

    @classmethod
    def of_text(cls, text: str) -> Document:
        """Return plain text: one trained segment."""
        return cls((Segment("text", readable(text), True),))

    @classmethod
    def of_completion(cls, prompt: str, completion: str) -> Document:
        """Return a prompt, read and not trained, and its completion."""
        return cls((Segment("prompt", readable(prompt), False), Segment("completion", readable(completion), True)))

    @classmethod
    def of_messages(
        cls, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None = None, given: int = 0
    ) -> Document:
        """Return a conversation. The assistant's turns are trained; prompts and what tools answer are read.

        Args:
            messages: each with "role" and "content".
            tools: what the assistant may call.
            given: how many messages are a prompt, read and not trained whoever speaks.

        Raises:
            ValueError: a message without a role, or with a content that is no text.
        """
        contents = [content_of(message) for message in messages]
        plain = tuple({**message, "content": text} for message, text in zip(messages, contents, strict=True))
        segments = tuple(
            Segment(str(message["role"]), message["content"], message["role"] == "assistant" and number >= given)
            for number, message in enumerate(plain)
        )
        return cls(segments, conversation=Conversation(plain, None if tools is None else tuple(tools)))

    @cached_property
    def text(self) -> str:
        """The whole text."""
        return "".join(segment.text for segment in self.segments)

    @property
    def ends_trained(self) -> bool:
        """Whether the end of the document, and with it its end token, is trained."""
        return bool(self.text) and self.segments[-1].train

    def piece(self, start: int, stop: int) -> Document:
        """Return the bytes `[start, stop)`, both on a character's edge, as a document of its own."""
        segments, first = [], 0
        for segment in self.segments:
            text = segment.text.encode()
            part = text[max(0, start - first) : max(0, stop - first)]
            if part:
                segments.append(Segment(segment.role, part.decode(), segment.train))
            first += len(text)
        return Document(tuple(segments), ends=self.ends and stop >= first)

    def trained(self, ends: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Say for each byte offset where a token ends whether that token is trained: its last byte is.

        Args:
            ends: [n], byte offsets, 1 or more for tokens that spell something.

        Returns:
            bool [n].
        """
        edges = np.cumsum([0] + [len(segment.text.encode()) for segment in self.segments])
        at = np.searchsorted(edges, ends, side="left") - 1
        flags = np.array([*(segment.train for segment in self.segments), False])
        return np.asarray(flags[np.clip(at, 0, len(self.segments))] & (ends > 0), np.bool_)


def content_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message: a string, a list of parts that are text, or none beside a tool call.

    Raises:
        ValueError: it has no role, or its content is something else.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError('a message is an object such as {"role": "user", "content": "..."}')
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return readable(content)
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        texts = [part.get("text") for part in content]
        if all(isinstance(text, str) for text in texts):
            return readable("".join(map(str, texts)))
    raise ValueError(f"the content of a message of role {message['role']!r} is no text")


def readable(text: str) -> str:
    """Return the text as UTF-8 can hold it: a lone surrogate becomes U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
