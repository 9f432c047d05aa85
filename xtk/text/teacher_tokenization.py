"""A teacher's view of documents: its tokens, possibly with another prompt, or given as token ids.

Byte positions always refer to the document's own text, so that any student can be aligned with it.
"""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.errors import XtkError
from xtk.text.document import SYSTEM_ROLES, Conversation, Document, Segment
from xtk.text.document_token_ids import TeacherTokenIds
from xtk.text.rollout_tokens import replace_prompt, splice_sampled_tokens
from xtk.text.token_sequence import TokenSequence, tokenize_documents
from xtk.text.tokenizer import Tokenizer

Message = Mapping[str, Any]


def teacher_views(tokenizer: Tokenizer, documents: SequenceOf[Document]) -> list[tuple[Document, TokenSequence]]:
    """Return documents as the teacher sees them, with decoded text, for students too; and its sequences.

    `byte_ends` and `text_runs` are in bytes of the document's text, `segment_end_tokens` of its segments.
    """
    views = [_teacher_document(tokenizer, document) for document in documents]
    plain = [view.document for view, document in zip(views, documents, strict=True) if not document.teacher_tokens]
    read = iter(tokenize_documents(tokenizer, plain))
    results = []
    for view, document in zip(views, documents, strict=True):
        if document.teacher_tokens is not None:
            results.append(_decode_teacher_ids(tokenizer, document, document.teacher_tokens))
        else:
            results.append(
                (document, _with_sampled_tokens(tokenizer, document, _map_to_document(document, view, next(read))))
            )
    for document, sequence in results:
        _check_candidate_ids(tokenizer, document, sequence)
    return results


def _with_sampled_tokens(tokenizer: Tokenizer, document: Document, sequence: TokenSequence) -> TokenSequence:
    """Use the sampled tokens for a teacher with the student's tokenizer, also after another prompt."""
    sampled = document.sampled_tokens
    if (
        sampled is None
        or sampled.tokenizer_fingerprint != tokenizer.fingerprint
        or np.array_equal(sampled.ids, sequence.ids)
    ):
        return sequence
    parts = {
        name: getattr(sequence, name) for name in ("ids", "byte_ends", "train_mask", "text_runs", "segment_end_tokens")
    }
    spliced = splice_sampled_tokens(tokenizer, document, sampled, parts)
    return TokenSequence(**spliced, exact=sequence.exact, bytes_of=sequence.bytes_of)


def _check_candidate_ids(tokenizer: Tokenizer, document: Document, sequence: TokenSequence) -> None:
    given = document.candidate_ids
    if given is None:
        return
    trained = int(sequence.train_mask.sum())
    if len(given) != trained:
        raise XtkError(
            f"candidate_ids of a document has {len(given):,} lists, but {trained:,} of its tokens are scored",
            where=tokenizer.name,
            hint="use one list of token ids for each trained teacher token but the first of the text, in order",
        )
    if len(given.ids) and not 0 <= given.ids.min() <= given.ids.max() < tokenizer.embedding_rows:
        failure = int(given.ids.min() if given.ids.min() < 0 else given.ids.max())
        raise XtkError(
            f"candidate_ids of a document contains token id {failure}; the teacher has ids 0 to "
            f"{tokenizer.embedding_rows - 1:,}",
            where=tokenizer.name,
            hint="use token ids of the teacher's tokenizer in candidate_ids",
        )


# Documents with a teacher_prompt.


@dataclass(frozen=True)
class _TeacherDocument:
    """A document with the teacher's prompt. It ends like the original."""

    document: Document  # the document that the teacher sees
    shared_start: int = 0  # the byte of its text where the part that both share starts
    num_shared_segments: int = 0  # number of shared segments, at the end


def _teacher_document(tokenizer: Tokenizer, document: Document) -> _TeacherDocument:
    prompt = document.teacher_prompt
    if prompt is None or (document.conversation is not None and not any(part.train for part in document.segments)):
        return _TeacherDocument(document)
    if document.conversation is None:
        view = _with_text_prompt(document, str(prompt))
        sampled = replace_prompt(tokenizer, str(prompt), document)
        return view if sampled is None else replace(view, document=replace(view.document, sampled_tokens=sampled))
    return _with_message_prompt(document, document.conversation, prompt)


def _with_text_prompt(document: Document, prompt: str) -> _TeacherDocument:
    """Replace the prompt, or prepend one to a text."""
    own, trained = _split_at_first_trained(document.segments)
    before = "".join(segment.text for segment in own).encode()
    after = prompt.encode()
    # The common end of both prompts is shared, so that a token across its border with the completion is aligned too.
    start = len(after) - _common_suffix_length(before, after)
    return _TeacherDocument(
        Document((Segment("prompt", prompt, False), *trained), is_complete=document.is_complete), start, len(trained)
    )


def _with_message_prompt(
    document: Document, conversation: Conversation, prompt: SequenceOf[Message] | str
) -> _TeacherDocument:
    """Replace the messages before the first trained one, or the system message if the prompt is a string."""
    messages = conversation.messages
    if isinstance(prompt, str):
        kept = 1 if messages and messages[0]["role"] in SYSTEM_ROLES else 0
        role = messages[0]["role"] if kept else SYSTEM_ROLES[0]
        before: tuple[Message, ...] = ({**(messages[0] if kept else {}), "role": role, "content": prompt},)
    else:
        first = len(_split_at_first_trained(document.segments)[0])
        kept, before = conversation.parts[first].message, tuple(prompt)
    shared = document.segments[conversation.num_parts(kept) :]
    prompted = Document.from_messages([{**message, "train": False} for message in before])
    segments = (*prompted.segments, *shared)
    start = len(prompted.text.encode())
    new_conversation = replace(conversation, messages=(*before, *messages[kept:]))
    return _TeacherDocument(
        Document(segments, is_complete=document.is_complete, conversation=new_conversation), start, len(shared)
    )


def _split_at_first_trained(segments: tuple[Segment, ...]) -> tuple[tuple[Segment, ...], tuple[Segment, ...]]:
    """Return the segments before the first trained one, and the rest."""
    first = next((at for at, segment in enumerate(segments) if segment.train), len(segments))
    return segments[:first], segments[first:]


def _common_suffix_length(one: bytes, other: bytes) -> int:
    """Return the length of the longest common suffix in bytes."""
    size = min(len(one), len(other))
    one_bytes, other_bytes = (np.frombuffer(text, np.uint8)[len(text) - size :][::-1] for text in (one, other))
    differences = np.flatnonzero(one_bytes != other_bytes)
    return int(differences[0]) if len(differences) else size


def _map_to_document(document: Document, view: _TeacherDocument, sequence: TokenSequence) -> TokenSequence:
    """Return the teacher's sequence in bytes and segments of the original document.

    Tokens of the teacher's own prompt have no bytes in it, nor does a token that starts there and ends in the shared
    part, unless it has only spaces of the prompt, like a space that a tokenizer prepends to a text.
    """
    if view.document is document:
        return sequence
    text = view.document.text.encode()
    shift = len(text) - len(document.text.encode())
    runs = [_clip_run(text, sequence, view.shared_start, *piece) for piece in sequence.text_runs.tolist()]
    runs = [(low, stop, first - shift) for low, stop, first in runs if low < stop]
    ends = np.zeros(len(sequence), np.int32)
    aligned = np.zeros(len(sequence), np.bool_)
    for low, stop, first in runs:
        if low and not aligned[low - 1]:
            ends[low - 1] = first
        ends[low:stop] = sequence.byte_ends[low:stop] - shift
        aligned[low:stop] = True
    for at in np.flatnonzero(sequence.border_mask).tolist():
        if at and not aligned[at - 1]:
            ends[at - 1] = sequence.byte_ends[at - 1] - shift
        ends[at], aligned[at] = sequence.byte_ends[at] - shift, True
    end_tokens = np.full(len(document.segments), -1, np.int32)
    end_tokens[len(end_tokens) - view.num_shared_segments :] = sequence.segment_end_tokens[
        len(sequence.segment_end_tokens) - view.num_shared_segments :
    ]
    aligned[end_tokens[end_tokens >= 0]] = True
    return TokenSequence(
        sequence.ids,
        np.maximum.accumulate(ends),
        sequence.train_mask & (aligned | sequence.undecodable_mask),
        np.array(runs, np.int32).reshape(-1, 3),
        end_tokens,
        exact=sequence.exact,
        bytes_of=sequence.bytes_of,
    )


def _clip_run(
    text: bytes, sequence: TokenSequence, start: int, low: int, stop: int, first: int
) -> tuple[int, int, int]:
    """Return a run without its tokens before byte `start`, and the byte where its first token begins."""
    if first >= start:
        return low, stop, first
    at = low + int(np.searchsorted(sequence.byte_ends[low:stop], start))
    if at == stop or sequence.byte_ends[at] == start:
        return min(at + 1, stop), stop, start
    begins = int(sequence.byte_ends[at - 1]) if at > low else first
    if text[begins:start].strip(b" "):
        return at + 1, stop, int(sequence.byte_ends[at])
    return at, stop, start


# Documents given as token ids.


def _decode_teacher_ids(
    tokenizer: Tokenizer, document: Document, tokens: TeacherTokenIds
) -> tuple[Document, TokenSequence]:
    """Decode token ids to text and segments. Tokens after the last trained one have no effect and are dropped."""
    _check_ids(tokenizer, tokens)
    size = int(np.flatnonzero(tokens.train_mask)[-1]) + 1 if tokens.train_mask.any() else 1
    ids, trained = tokens.ids[:size], tokens.train_mask[:size]
    roles = [tokenizer.special_token_ids[role] for role in ("bos", "eos") if role in tokenizer.special_token_ids]
    control = tokenizer.vocabulary.special_mask[ids] | np.isin(ids, roles)
    text = _TextBuilder(tokenizer, ids, trained)
    for start, stop in np.flatnonzero(np.diff(control, prepend=True, append=True)).reshape(-1, 2).tolist():
        text.add(start, stop)
    return text.document(document), text.sequence()


def _check_ids(tokenizer: Tokenizer, tokens: TeacherTokenIds) -> None:
    vocabulary = tokenizer.vocabulary
    failure = np.flatnonzero((tokens.ids < 0) | (tokens.ids >= len(vocabulary)))
    if len(failure):
        raise XtkError(
            f"input_ids[{failure[0]}] of a document is {tokens.ids[failure[0]]}; the teacher's tokenizer has ids 0 to "
            f"{len(vocabulary) - 1:,}",
            where=tokenizer.name,
            hint="tokenize the data with the teacher's tokenizer, or use data with text or messages",
        )
    if not vocabulary.is_text_decodable:
        raise XtkError(
            "input_ids cannot be decoded: tokens of the teacher's tokenizer do not contain the spaces between words",
            where=tokenizer.name,
            hint="use data with text, messages, or prompt and completion",
        )


class _TextBuilder:
    """Builds the text of token ids, run by run; special tokens are between the runs."""

    def __init__(self, tokenizer: Tokenizer, ids: NDArray[np.int32], trained: NDArray[np.bool_]) -> None:
        self._tokenizer, self._ids, self._trained = tokenizer, ids, trained
        self._ends = np.zeros(len(ids), np.int32)
        self._parts: list[tuple[str, bool]] = []
        self._end_tokens: list[int] = []
        self._text_runs: list[tuple[int, int, int]] = []
        self._size = 0  # bytes

    def add(self, start: int, stop: int) -> None:
        """Append the text of tokens `[start, stop)`, and the end token after them if it is trained."""
        spellings = list(map(self._tokenizer.vocabulary.bytes_by_id.__getitem__, self._ids[start:stop].tolist()))
        raw, edges = b"".join(spellings), np.cumsum([0, *map(len, spellings)])
        space = int(not self._text_runs and self._tokenizer.adds_prefix_space and raw.startswith(b" "))
        broken = _continuation_bytes(raw)
        text = self._decoded(raw[space + broken :], edges - space - broken, start)
        size = len(text.encode())
        low = int(np.searchsorted(edges[:-1], broken))
        high = int(np.searchsorted(edges[1:], space + broken + size, side="right"))
        places = self._size + np.clip(edges - space - broken, 0, size)
        self._ends[start:stop] = places[1:]
        if low < high:
            self._text_runs.append((start + low, start + high, int(places[low])))
        self._size += size
        parts = _split_by_train_mask(
            text, np.repeat(self._trained[start:stop], np.diff(edges))[space + broken :][:size]
        )
        ended = stop < len(self._ids) and self._trained[stop] and int(self._ids[stop]) in self._tokenizer.turn_end_ids
        if ended and not (parts and parts[-1][1]):
            parts.append(("", True))  # only the end token of this part is trained
        self._parts += parts
        self._end_tokens += [-1] * len(parts)
        if ended:
            self._end_tokens[-1] = stop

    def _decoded(self, raw: bytes, edges: NDArray[np.int64], first: int) -> str:
        """Decode bytes, without an incomplete character at the end."""
        try:
            return codecs.getincrementaldecoder("utf-8")().decode(raw)
        except UnicodeDecodeError as failure:
            token = first + int(np.searchsorted(edges, failure.start, side="right")) - 1
            raise XtkError(
                f"input_ids of a document cannot be decoded: its token {token} (id {self._ids[token]}) "
                "results in invalid UTF-8",
                where=self._tokenizer.name,
                hint="remove the document, or set the train mask to 0 from this token on",
            ) from None

    def document(self, document: Document) -> Document:
        """Return the document with the decoded segments."""
        mixed = any(not train for _, train in self._parts)
        roles = {True: "completion" if mixed else "text", False: "prompt"}
        parts = self._parts or [("", True)]
        segments = tuple(Segment(roles[train], text, train) for text, train in parts)
        return replace(document, segments=segments, is_complete=bool(self._end_tokens) and self._end_tokens[-1] >= 0)

    def sequence(self) -> TokenSequence:
        """Return the teacher's token sequence."""
        return TokenSequence(
            ids=self._ids,
            byte_ends=np.maximum.accumulate(self._ends),
            train_mask=self._trained & (np.arange(len(self._ids)) > 0),
            text_runs=np.array(self._text_runs, np.int32).reshape(-1, 3),
            segment_end_tokens=np.array(self._end_tokens or [-1], np.int32),
        )


def _continuation_bytes(raw: bytes) -> int:
    """Return the number of leading bytes that continue a character from before (at most 3)."""
    return next((at for at, byte in enumerate(raw[:3]) if byte & 0xC0 != 0x80), min(3, len(raw)))


def _split_by_train_mask(text: str, owners: NDArray[np.bool_]) -> list[tuple[str, bool]]:
    """Split a text where training begins and ends; `owners`: bool [bytes], whether the token of each byte is trained.

    A character is trained if the token of its last byte is.
    """
    raw = np.frombuffer(text.encode(), np.uint8)
    last = np.append(raw[1:] & 0xC0 != 0x80, True)[: len(raw)]
    flags = owners[last]
    edges = [0, *(np.flatnonzero(np.diff(flags)) + 1).tolist(), len(flags)]
    return [(text[start:stop], bool(flags[start])) for start, stop in itertools.pairwise(edges) if start < stop]
