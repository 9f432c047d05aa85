"""A document: what is read, and which of its bytes are trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xtk.errors import XtkError
from xtk.tokens.pretokenized import CandidateIdLists, SampledTokens, TeacherTokenIds

TRAIN_FLAG_KEYS = ("train", "weight")  # of a message: whether it is trained; the second is OpenAI's name
SYSTEM_ROLES = ("system", "developer")


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
        is_complete: whether the text ends here. The piece of a longer text does not, and gets no end token.
        conversation: the messages, for each model to read through its own template; None for text. A segment
            is then the content of a message, and what templates write around it belongs to no segment.
        teacher_prompt: what only the teacher reads, in the place of what stands before the trained segments;
            messages, or a text, which is the system message of a conversation. None: it reads what students read.
        teacher_tokens: the document as tokens of the teacher, from which a teacher's reading makes the segments; None
            for text and messages.
        candidate_ids: tokens of the teacher that its signal is to tell about, for each of its trained tokens.
        weight: how much it counts in training: 2 is as if it came twice, 0 as if it did not come.
        teacher_name: the name of the teacher that teaches it; "": it names none.
        sampled_tokens: the document as the student wrote it, a stretch of drawn tokens for each trained segment; None:
            it did
            not.
    """

    segments: tuple[Segment, ...]
    is_complete: bool = True
    conversation: Conversation | None = None
    teacher_prompt: str | tuple[Mapping[str, Any], ...] | None = None
    teacher_tokens: TeacherTokenIds | None = None
    candidate_ids: CandidateIdLists | None = None
    weight: float = 1.0
    teacher_name: str = ""
    sampled_tokens: SampledTokens | None = None

    @classmethod
    def from_text(cls, text: str) -> Document:
        """Return plain text: one trained segment."""
        return cls((Segment("text", replace_surrogates(text), True),))

    @classmethod
    def from_completion(cls, prompt: str, completion: str) -> Document:
        """Return a prompt, read and not trained, and its completion."""
        return cls(
            (
                Segment("prompt", replace_surrogates(prompt), False),
                Segment("completion", replace_surrogates(completion), True),
            )
        )

    @classmethod
    def from_messages(
        cls, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None = None, num_prompt_messages: int = 0
    ) -> Document:
        """Return a conversation. The assistant's turns are trained; prompts and what tools answer are read.

        A message may say otherwise: `"train": false`, or `"weight": 0`, is read and not trained; `"train": true` is
        trained whoever speaks. Templates do not see these marks.

        Args:
            messages: each with "role" and "content".
            tools: what the assistant may call.
            num_prompt_messages: how many messages are a prompt, read and not trained whoever speaks and whatever they
                say.

        Raises:
            ValueError: a message without a role, with a content that is no text, or with a mark that is neither yes
                nor no.
        """
        plain = tuple(map(_normalize_message, messages))
        segments = tuple(
            Segment(str(read["role"]), read["content"], _is_message_trained(message) and number >= num_prompt_messages)
            for number, (message, read) in enumerate(zip(messages, plain, strict=True))
        )
        return cls(segments, conversation=Conversation(plain, None if tools is None else tuple(tools)))

    @classmethod
    def from_teacher_ids(cls, ids: ArrayLike, train_mask: ArrayLike | None = None) -> Document:
        """Return tokens of the teacher, which it reads as they are. Their text is made when it reads them.

        Args:
            ids: [T], without padding.
            train_mask: [T], which of them carry a loss; all if left out.

        Raises:
            ValueError: an id is no number of 32 bits, or there are not as many flags as ids.
        """
        return cls((), teacher_tokens=TeacherTokenIds.from_lists(ids, train_mask))

    def with_teacher_prompt(self, prompt: str | Sequence[Mapping[str, Any]]) -> Document:
        """Return the document with another prompt for the teacher.

        Raises:
            ValueError: messages for a document that has none, a message that is none, a system message that is
                trained, or tokens that are read as they are.
        """
        if self.teacher_tokens is not None:
            raise ValueError("the teacher reads input_ids as they are; a teacher_prompt has no place beside them")
        if isinstance(prompt, str):
            if self.conversation is not None and self.segments[:1] and _is_trained_system_segment(self.segments[0]):
                raise ValueError("teacher_prompt is a text, and the system message that it would replace is trained")
            return replace(self, teacher_prompt=replace_surrogates(prompt))
        if self.conversation is None:
            raise ValueError("teacher_prompt is a list of messages, and the document is no conversation")
        return replace(self, teacher_prompt=tuple(map(_normalize_message, prompt)))

    def with_candidate_ids(self, id_lists: Sequence[ArrayLike]) -> Document:
        """Return the document with tokens that the teacher is to tell about, a list for each trained one in order.

        Raises:
            ValueError: an id is no number of 32 bits.
        """
        return replace(self, candidate_ids=CandidateIdLists.from_lists(id_lists))

    @cached_property
    def text(self) -> str:
        """The whole text.

        Raises:
            XtkError: it consists of tokens of a teacher, and no teacher has read it.
        """
        if self.teacher_tokens is not None and not self.segments:
            raise XtkError(
                "input_ids are tokens of a teacher, and only a teacher reads them",
                hint="xtk cache-teacher TEACHER DATA; or --columns text=COLUMN, if the data has a text too",
            )
        return "".join(segment.text for segment in self.segments)

    @property
    def unsplittable_reason(self) -> str | None:
        """Why the document cannot be cut into documents of their own; None if it can."""
        if self.conversation is not None:
            return "the turns of a conversation follow from each other"
        if self.teacher_tokens is not None:
            return "input_ids are read as they are"
        if self.sampled_tokens is not None:
            return "the tokens of a rollout are read as they were drawn"
        if self.teacher_prompt is not None:
            return "a teacher_prompt is about the whole of what follows it"
        return None if self.candidate_ids is None else "candidate_ids belong to the tokens of the whole document"

    @property
    def is_end_trained(self) -> bool:
        """Whether the end of the document, and with it its end token, is trained."""
        return bool(self.text) and self.segments[-1].train

    def byte_slice(self, start: int, stop: int) -> Document:
        """Return the bytes `[start, stop)`, both on a character's edge, as a document of its own.

        Raises:
            ValueError: it is undivided.
        """
        if self.unsplittable_reason:
            raise ValueError(self.unsplittable_reason)
        segments, first = [], 0
        for segment in self.segments:
            text = segment.text.encode()
            part = text[max(0, start - first) : max(0, stop - first)]
            if part:
                segments.append(Segment(segment.role, part.decode(), segment.train))
            first += len(text)
        return Document(
            tuple(segments),
            is_complete=self.is_complete and stop >= first,
            weight=self.weight,
            teacher_name=self.teacher_name,
        )

    def trained_mask(self, byte_ends: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Say for each byte offset where a token ends whether that token is trained: its last byte is.

        Args:
            byte_ends: [n], byte offsets, 1 or more for tokens that spell something.

        Returns:
            bool [n].
        """
        edges = np.cumsum([0] + [len(segment.text.encode()) for segment in self.segments])
        at = np.searchsorted(edges, byte_ends, side="left") - 1
        flags = np.array([*(segment.train for segment in self.segments), False])
        return np.asarray(flags[np.clip(at, 0, len(self.segments))] & (byte_ends > 0), np.bool_)


def _normalize_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as templates read it: its content a text, and without marks of what is trained."""
    content = message_content(message)
    return {**{key: value for key, value in message.items() if key not in TRAIN_FLAG_KEYS}, "content": content}


def _is_message_trained(message: Mapping[str, Any]) -> bool:
    """Say whether a message is trained: as it says itself, or else if it is the assistant's."""
    said = {key: message[key] for key in TRAIN_FLAG_KEYS if message.get(key) is not None}
    for key, value in said.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            raise ValueError(f"{key!r} of a message is {value!r}; a message is trained or not: true or false, 1 or 0")
    if not said.get("weight", 1):
        return False
    return bool(said.get("train", message["role"] == "assistant"))


def _is_trained_system_segment(segment: Segment) -> bool:
    return segment.role in SYSTEM_ROLES and segment.train


def message_content(message: Mapping[str, Any]) -> str:
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
        return replace_surrogates(content)
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        texts = [part.get("text") for part in content]
        if all(isinstance(text, str) for text in texts):
            return replace_surrogates("".join(map(str, texts)))
    raise ValueError(f"the content of a message of role {message['role']!r} is no text")


def replace_surrogates(text: str) -> str:
    """Return the text as UTF-8 can hold it: a lone surrogate becomes U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
