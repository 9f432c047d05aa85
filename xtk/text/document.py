"""Documents: plain text, prompt and completion, or conversations, with the segments that are trained."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xtk.errors import XtkError
from xtk.text.chat.parts import CONTENT, MessagePart, message_parts, normalize_message, replace_surrogates
from xtk.text.document_token_ids import CandidateIdLists, SampledTokens, TeacherTokenIds

TRAIN_FLAG_KEYS = ("train", "weight")  # of a message: whether it is trained; the second is OpenAI's name
SYSTEM_ROLES = ("system", "developer")


@dataclass(frozen=True)
class Segment:
    """A part of a document."""

    # "text", "prompt", "completion"; in a conversation the message's role ("user", "assistant", "tool"...) for a
    # content, and the kind of the part (see `message_parts`) for others.
    role: str
    text: str  # the segment's text
    train: bool  # whether its tokens are trained (contribute to the loss)


@dataclass(frozen=True)
class Conversation:
    """Messages as input of a chat template."""

    messages: tuple[Mapping[str, Any], ...]  # in the form of `normalize_message`
    tools: tuple[Any, ...] | None = None  # descriptions of the tools that the assistant may call

    @cached_property
    def parts(self) -> tuple[MessagePart, ...]:
        """The parts of the messages; a document has a segment for each."""
        return message_parts(self.messages)

    @cached_property
    def part_ranges(self) -> tuple[range, ...]:
        """The indices of the parts of each message."""
        counts = Counter(part.message for part in self.parts)
        stops = itertools.accumulate(counts[number] for number in range(len(self.messages)))
        return tuple(range(stop - counts[number], stop) for number, stop in enumerate(stops))

    def num_parts(self, num_messages: int) -> int:
        """Return the number of parts of the first `num_messages` messages."""
        return self.part_ranges[num_messages - 1].stop if num_messages else 0

    def segment_roles(self) -> tuple[str, ...]:
        """Return the role of the segment of each part."""
        return tuple(
            str(self.messages[part.message]["role"]) if part.kind == CONTENT else part.kind for part in self.parts
        )


@dataclass(frozen=True)
class Document:
    """Segments in order; the document's text is the concatenation of their texts."""

    segments: tuple[Segment, ...]  # at least one, except for `teacher_tokens`
    is_complete: bool = True  # whether the text ends here: a part of a longer text gets no end token
    # The messages, rendered with each model's own chat template; None for text. Each segment is then a part of a
    # message (its content, its reasoning, a tool call's arguments); text that the template adds belongs to no segment.
    conversation: Conversation | None = None
    # Replaces the segments before the trained ones for the teacher only: messages, or a text, which becomes the system
    # message of a conversation. None: the same prompt as for the student.
    teacher_prompt: str | tuple[Mapping[str, Any], ...] | None = None
    # The document as ids of the teacher, whose tokenizer decodes them to segments; None for text and messages.
    teacher_tokens: TeacherTokenIds | None = None
    candidate_ids: CandidateIdLists | None = None  # teacher ids to score, for each of its trained tokens
    weight: float = 1.0  # weight in training: 2 is like two copies, 0 like none
    teacher_name: str = ""  # name of the teacher for this document; "": any
    # The document's tokens as the student sampled them, a run for each trained segment; None if it is not a rollout.
    sampled_tokens: SampledTokens | None = None

    @classmethod
    def from_text(cls, text: str) -> Document:
        """Return plain text: one trained segment."""
        return cls((Segment("text", replace_surrogates(text), True),))

    @classmethod
    def from_completion(cls, prompt: str, completion: str) -> Document:
        """Return a document with an untrained prompt and a trained completion."""
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
        """Return a conversation. Assistant messages, with reasoning and tool calls, are trained; the others are not.

        A message may set this: `"train": false` or `"weight": 0` is not trained; `"train": true` is trained whatever
        its role. Chat templates do not see these keys. `messages`: in the forms that `normalize_message` reads;
        ValueError: another form. The first `num_prompt_messages` are the prompt, not trained whatever their role and
        keys.
        """
        conversation = Conversation(tuple(map(_normalize_message, messages)), None if tools is None else tuple(tools))
        trained = [
            _is_message_trained(message) and number >= num_prompt_messages for number, message in enumerate(messages)
        ]
        segments = tuple(
            Segment(role, part.text, trained[part.message])
            for role, part in zip(conversation.segment_roles(), conversation.parts, strict=True)
        )
        return cls(segments, conversation=conversation)

    @classmethod
    def from_teacher_ids(cls, ids: ArrayLike, train_mask: ArrayLike | None = None) -> Document:
        """Return a document of the teacher's token ids [T], used unchanged; their text is decoded later.

        `train_mask`: [T], which of them are trained; all by default. ValueError: an invalid id, or another length.
        """
        return cls((), teacher_tokens=TeacherTokenIds.from_lists(ids, train_mask))

    def with_teacher_prompt(self, prompt: str | Sequence[Mapping[str, Any]]) -> Document:
        """Return the document with another prompt for the teacher; ValueError if it cannot have this one."""
        if self.teacher_tokens is not None:
            raise ValueError(
                "a document with input_ids, which are used unchanged, cannot have a teacher_prompt; remove one of both"
            )
        if isinstance(prompt, str):
            first = self.segments[0] if self.conversation is not None and self.segments else None
            if first is not None and first.role in SYSTEM_ROLES and first.train:
                raise ValueError(
                    "teacher_prompt would replace a system message that is trained; set train of this message to false"
                )
            return replace(self, teacher_prompt=replace_surrogates(prompt))
        if self.conversation is None:
            raise ValueError("teacher_prompt is a list of messages, but the document has no messages; use a string")
        return replace(self, teacher_prompt=tuple(map(_normalize_message, prompt)))

    def with_candidate_ids(self, id_lists: Sequence[ArrayLike]) -> Document:
        """Return the document with candidate ids for the teacher, a list for each of its trained tokens in order."""
        return replace(self, candidate_ids=CandidateIdLists.from_lists(id_lists))

    @cached_property
    def text(self) -> str:
        """The text of the document."""
        if self.teacher_tokens is not None and not self.segments:
            raise XtkError(
                "the data has only input_ids (teacher token ids), but this command needs text",
                hint="use this data with xtk cache-teacher, or select a text column with --columns text=COLUMN",
            )
        return "".join(segment.text for segment in self.segments)

    @property
    def unsplittable_reason(self) -> str | None:
        """Why the document cannot be split into separate documents; None if it can."""
        if self.conversation is not None:
            return "the turns of a conversation follow from each other"
        if self.teacher_tokens is not None:
            return "input_ids are used unchanged"
        if self.sampled_tokens is not None:
            return "the tokens of a rollout are used as they were sampled"
        if self.teacher_prompt is not None:
            return "a teacher_prompt belongs to all of the text after it"
        return None if self.candidate_ids is None else "candidate_ids belong to the tokens of the whole document"

    @property
    def trained_messages(self) -> list[bool]:
        """Whether each message of a conversation is trained; all of its parts are alike."""
        assert self.conversation is not None
        return [self.segments[parts.start].train for parts in self.conversation.part_ranges]

    @property
    def is_end_trained(self) -> bool:
        """Whether the end of the document, and so its end token, is trained."""
        return bool(self.text) and self.segments[-1].train

    def byte_slice(self, start: int, stop: int) -> Document:
        """Return the bytes `[start, stop)`, both on character boundaries, as a separate document."""
        if self.unsplittable_reason:
            raise ValueError(f"the document cannot be split: {self.unsplittable_reason}")
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
        """Return bool [n], whether each token is trained: its last byte is; `byte_ends`: [n], never decreasing.

        A token without bytes (a space that the tokenizer prepended) belongs to the text token after it: it is trained
        if that token is, unless a prompt begins there.
        """
        edges = np.cumsum([0] + [len(segment.text.encode()) for segment in self.segments])
        flags = np.array([*(segment.train for segment in self.segments), False])

        def of_byte(byte: NDArray[np.integer]) -> NDArray[np.bool_]:
            at = np.searchsorted(edges, byte, side="right") - 1
            return np.asarray(flags[np.clip(at, 0, len(self.segments))] & (byte >= 0), np.bool_)

        trained = of_byte(byte_ends - 1)
        empty = np.flatnonzero(np.diff(byte_ends, prepend=0) == 0)
        following = np.searchsorted(byte_ends, byte_ends[empty], side="right")
        empty, following = empty[following < len(byte_ends)], following[following < len(byte_ends)]
        trained[empty] = trained[following] & of_byte(byte_ends[empty])
        return trained


def _normalize_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as input of a chat template, without the train flags."""
    return {key: value for key, value in normalize_message(message).items() if key not in TRAIN_FLAG_KEYS}


def _is_message_trained(message: Mapping[str, Any]) -> bool:
    """Return whether a message is trained: by its train flag, else if it is the assistant's."""
    flags = {key: message[key] for key in TRAIN_FLAG_KEYS if message.get(key) is not None}
    for key, value in flags.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            raise ValueError(f"{key} of a message is {value!r}, but must be true or false, or 1 or 0")
    if not flags.get("weight", 1):
        return False
    return bool(flags.get("train", message["role"] == "assistant"))
