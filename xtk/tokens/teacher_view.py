"""What a teacher reads of documents: the text as any model, a prompt of its own before it, or tokens as they are.

Whatever it reads, positions are told in bytes of the document's own text, so that it is aligned with any student.
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
from xtk.tokens.document import SYSTEM_ROLES, Conversation, Document, Segment
from xtk.tokens.pretokenized import TeacherTokenIds
from xtk.tokens.sampled_tokens import replace_prompt, splice_sampled_tokens
from xtk.tokens.token_sequence import TokenSequence, tokenize_documents
from xtk.tokens.tokenizer import Tokenizer

Message = Mapping[str, Any]


def teacher_views(tokenizer: Tokenizer, documents: SequenceOf[Document]) -> list[tuple[Document, TokenSequence]]:
    """Read documents as a teacher does.

    Args:
        tokenizer: the teacher's.
        documents: any; students read the documents that are returned.

    Returns:
        Each document, one of tokens with the text that these spell, and what the teacher reads of it: `ends` and
        `pieces` in bytes of the document's text, `closers` of its segments.

    Raises:
        XtkError: what `sequences` refuses; ids that are not the tokenizer's or spell no text; lists of candidate_ids
            that are not as many as trained tokens.
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
    """Let a teacher with the writer's own tokenizer read the tokens that were drawn, behind its own prompt too."""
    drawn = document.sampled_tokens
    if drawn is None or drawn.tokenizer_fingerprint != tokenizer.fingerprint or np.array_equal(drawn.ids, sequence.ids):
        return sequence
    parts = {
        name: getattr(sequence, name) for name in ("ids", "byte_ends", "train_mask", "text_runs", "segment_end_tokens")
    }
    return TokenSequence(**splice_sampled_tokens(tokenizer, document, drawn, parts), exact=sequence.exact)


def _check_candidate_ids(tokenizer: Tokenizer, document: Document, sequence: TokenSequence) -> None:
    given = document.candidate_ids
    if given is None:
        return
    trained = int(sequence.train_mask.sum())
    if len(given) != trained:
        raise XtkError(
            f"candidate_ids has {len(given):,} lists, and {trained:,} tokens of the document are trained",
            where=tokenizer.name,
            hint="a list for each trained token of the teacher, in order; the first token of all is never trained",
        )
    if len(given.ids) and not 0 <= given.ids.min() <= given.ids.max() < tokenizer.embedding_rows:
        wrong = int(given.ids.min() if given.ids.min() < 0 else given.ids.max())
        raise XtkError(
            f"{wrong} among candidate_ids is no token of the teacher, which has {tokenizer.embedding_rows:,}",
            where=tokenizer.name,
        )


# A prompt of its own.


@dataclass(frozen=True)
class _TeacherDocument:
    """A document as the teacher reads it, with a prompt of its own. Both end alike.

    Attributes:
        document: what the teacher reads.
        shared_start: the byte of its text from which on the two are equal.
        num_shared_segments: how many segments they have in common, at the end.
    """

    document: Document
    shared_start: int = 0
    num_shared_segments: int = 0


def _teacher_document(tokenizer: Tokenizer, document: Document) -> _TeacherDocument:
    prompt = document.teacher_prompt
    if prompt is None or (document.conversation is not None and not any(part.train for part in document.segments)):
        return _TeacherDocument(document)
    if document.conversation is None:
        view = _with_text_prompt(document, str(prompt))
        drawn = replace_prompt(tokenizer, str(prompt), document)
        return view if drawn is None else replace(view, document=replace(view.document, sampled_tokens=drawn))
    return _with_message_prompt(document, document.conversation, prompt)


def _with_text_prompt(document: Document, prompt: str) -> _TeacherDocument:
    """Put a prompt in the place of another one, or in front of a text."""
    own, trained = _split_at_first_trained(document.segments)
    before = "".join(segment.text for segment in own).encode()
    after = prompt.encode()
    # What both prompts end with is read by both sides, so a token that goes on from there into the answer is, too.
    start = len(after) - _common_suffix_length(before, after)
    return _TeacherDocument(
        Document((Segment("prompt", prompt, False), *trained), is_complete=document.is_complete), start, len(trained)
    )


def _with_message_prompt(
    document: Document, conversation: Conversation, prompt: SequenceOf[Message] | str
) -> _TeacherDocument:
    """Put messages in the place of those before the first trained one, or a text in that of the system message."""
    messages = conversation.messages
    if isinstance(prompt, str):
        kept = 1 if messages and messages[0]["role"] in SYSTEM_ROLES else 0
        role = messages[0]["role"] if kept else SYSTEM_ROLES[0]
        before: tuple[Message, ...] = ({**(messages[0] if kept else {}), "role": role, "content": prompt},)
    else:
        kept, before = len(_split_at_first_trained(document.segments)[0]), tuple(prompt)
    shared = document.segments[kept:]
    segments = (*(Segment(message["role"], message["content"], False) for message in before), *shared)
    start = sum(len(message["content"].encode()) for message in before)
    talk = replace(conversation, messages=(*before, *messages[kept:]))
    return _TeacherDocument(Document(segments, is_complete=document.is_complete, conversation=talk), start, len(shared))


def _split_at_first_trained(segments: tuple[Segment, ...]) -> tuple[tuple[Segment, ...], tuple[Segment, ...]]:
    """Return the segments before the first trained one, and the others."""
    first = next((at for at, segment in enumerate(segments) if segment.train), len(segments))
    return segments[:first], segments[first:]


def _common_suffix_length(one: bytes, other: bytes) -> int:
    """Return how many bytes two texts have in common at their ends."""
    size = min(len(one), len(other))
    one_bytes, other_bytes = (np.frombuffer(text, np.uint8)[len(text) - size :][::-1] for text in (one, other))
    differences = np.flatnonzero(one_bytes != other_bytes)
    return int(differences[0]) if len(differences) else size


def _map_to_document(document: Document, view: _TeacherDocument, sequence: TokenSequence) -> TokenSequence:
    """Tell what a teacher reads in bytes and segments of the document.

    Tokens of the teacher's own prompt spell nothing of it, nor does one that begins there and goes on into what both
    read; but if only spaces of it are the prompt's, it does: as with a space that a tokenizer puts in front of a text.
    """
    if view.document is document:
        return sequence
    text = view.document.text.encode()
    shift = len(text) - len(document.text.encode())
    pieces = [_clip_run(text, sequence, view.shared_start, *piece) for piece in sequence.text_runs.tolist()]
    pieces = [(low, stop, first - shift) for low, stop, first in pieces if low < stop]
    ends = np.zeros(len(sequence), np.int32)
    said = np.zeros(len(sequence), np.bool_)
    for low, stop, first in pieces:
        if low and not said[low - 1]:
            ends[low - 1] = first
        ends[low:stop] = sequence.byte_ends[low:stop] - shift
        said[low:stop] = True
    closers = np.full(len(document.segments), -1, np.int32)
    closers[len(closers) - view.num_shared_segments :] = sequence.segment_end_tokens[
        len(sequence.segment_end_tokens) - view.num_shared_segments :
    ]
    said[closers[closers >= 0]] = True
    return TokenSequence(
        ids=sequence.ids,
        byte_ends=np.maximum.accumulate(ends),
        train_mask=sequence.train_mask & (said | sequence.undecodable_mask),
        text_runs=np.array(pieces, np.int32).reshape(-1, 3),
        segment_end_tokens=closers,
        exact=sequence.exact,
    )


def _clip_run(
    text: bytes, sequence: TokenSequence, start: int, low: int, stop: int, first: int
) -> tuple[int, int, int]:
    """Return a piece from a byte on: its tokens, and the byte where the first of them begins."""
    if first >= start:
        return low, stop, first
    at = low + int(np.searchsorted(sequence.byte_ends[low:stop], start))
    if at == stop or sequence.byte_ends[at] == start:
        return min(at + 1, stop), stop, start
    begins = int(sequence.byte_ends[at - 1]) if at > low else first
    if text[begins:start].strip(b" "):
        return at + 1, stop, int(sequence.byte_ends[at])
    return at, stop, start


# Tokens as they are.


def _decode_teacher_ids(
    tokenizer: Tokenizer, document: Document, tokens: TeacherTokenIds
) -> tuple[Document, TokenSequence]:
    """Make the text of tokens, and its segments. Tokens behind the last trained one change nothing and are left out."""
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
    wrong = np.flatnonzero((tokens.ids < 0) | (tokens.ids >= len(vocabulary)))
    if len(wrong):
        raise XtkError(
            f"token {wrong[0]} of a document's input_ids is {tokens.ids[wrong[0]]}, "
            f"and the tokenizer has {len(vocabulary):,} tokens",
            where=tokenizer.name,
            hint="input_ids are those of the teacher's own tokenizer",
        )
    if not vocabulary.is_text_decodable:
        raise XtkError(
            "the tokens of this tokenizer do not spell the spaces of a text, so input_ids have none to train from",
            where=tokenizer.name,
            hint="data with text, messages, or prompt and completion",
        )


class _TextBuilder:
    """The text of tokens, added stretch by stretch; special tokens lie between the stretches."""

    def __init__(self, tokenizer: Tokenizer, ids: NDArray[np.int32], trained: NDArray[np.bool_]) -> None:
        self._tokenizer, self._ids, self._trained = tokenizer, ids, trained
        self._ends = np.zeros(len(ids), np.int32)
        self._parts: list[tuple[str, bool]] = []
        self._closers: list[int] = []
        self._pieces: list[tuple[int, int, int]] = []
        self._size = 0  # bytes

    def add(self, start: int, stop: int) -> None:
        """Add the text of tokens `[start, stop)`, and what ends it."""
        spellings = list(map(self._tokenizer.vocabulary.bytes_by_id.__getitem__, self._ids[start:stop].tolist()))
        raw, edges = b"".join(spellings), np.cumsum([0, *map(len, spellings)])
        space = int(not self._pieces and self._tokenizer.adds_prefix_space and raw.startswith(b" "))
        broken = _continuation_bytes(raw)
        text = self._decoded(raw[space + broken :], edges - space - broken, start)
        size = len(text.encode())
        low = int(np.searchsorted(edges[:-1], broken))
        high = int(np.searchsorted(edges[1:], space + broken + size, side="right"))
        places = self._size + np.clip(edges - space - broken, 0, size)
        self._ends[start:stop] = places[1:]
        if low < high:
            self._pieces.append((start + low, start + high, int(places[low])))
        self._size += size
        parts = _split_by_train_mask(
            text, np.repeat(self._trained[start:stop], np.diff(edges))[space + broken :][:size]
        )
        ended = stop < len(self._ids) and self._trained[stop] and int(self._ids[stop]) in self._tokenizer.end_ids
        if ended and not (parts and parts[-1][1]):
            parts.append(("", True))  # an answer of which only the end is trained
        self._parts += parts
        self._closers += [-1] * len(parts)
        if ended:
            self._closers[-1] = stop

    def _decoded(self, raw: bytes, edges: NDArray[np.int64], first: int) -> str:
        """Decode bytes, without a character that is not finished at their end."""
        try:
            return codecs.getincrementaldecoder("utf-8")().decode(raw)
        except UnicodeDecodeError as wrong:
            token = first + int(np.searchsorted(edges, wrong.start, side="right")) - 1
            raise XtkError(
                f"token {token} of a document's input_ids, {self._ids[token]}, makes bytes that are no UTF-8",
                where=self._tokenizer.name,
                hint="leave the document out, or train none of it from there on",
            ) from None

    def document(self, document: Document) -> Document:
        """Return the document with its segments."""
        mixed = any(not train for _, train in self._parts)
        roles = {True: "completion" if mixed else "text", False: "prompt"}
        parts = self._parts or [("", True)]
        segments = tuple(Segment(roles[train], text, train) for text, train in parts)
        return replace(document, segments=segments, is_complete=bool(self._closers) and self._closers[-1] >= 0)

    def sequence(self) -> TokenSequence:
        """Return what the teacher reads."""
        return TokenSequence(
            ids=self._ids,
            byte_ends=np.maximum.accumulate(self._ends),
            train_mask=self._trained & (np.arange(len(self._ids)) > 0),
            text_runs=np.array(self._pieces, np.int32).reshape(-1, 3),
            segment_end_tokens=np.array(self._closers or [-1], np.int32),
        )


def _continuation_bytes(raw: bytes) -> int:
    """Return how many bytes belong to a character that began before them."""
    return next((at for at, byte in enumerate(raw[:3]) if byte & 0xC0 != 0x80), min(3, len(raw)))


def _split_by_train_mask(text: str, owners: NDArray[np.bool_]) -> list[tuple[str, bool]]:
    """Cut a text where training begins and ends. A character is trained if the token of its last byte is.

    Args:
        text: n bytes.
        owners: bool [n], whether the token of each byte is trained.
    """
    raw = np.frombuffer(text.encode(), np.uint8)
    last = np.append(raw[1:] & 0xC0 != 0x80, True)[: len(raw)]
    flags = owners[last]
    edges = [0, *(np.flatnonzero(np.diff(flags)) + 1).tolist(), len(flags)]
    return [(text[start:stop], bool(flags[start])) for start, stop in itertools.pairwise(edges) if start < stop]
