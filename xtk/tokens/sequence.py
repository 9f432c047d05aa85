"""A document as one model reads it: the tokens, the bytes that they spell, and which of them are trained."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from xtk.tokens.chat import Rendering
from xtk.tokens.document import Document
from xtk.tokens.tokenizer import Encoded, Tokenizer


class Sequence:
    """Tokens of a document in the order in which a model reads them.

    Plain text stands between a start and an end token; a conversation stands in the model's own template.

    Attributes:
        ids: int32 [T].
        ends: int32 [T], never falling: the byte of the document's text where each token ends. Tokens that spell
            none of it (a start token, templates) end where the text before them did, but for the last of them
            before a piece: it ends where the piece begins, so that every token begins where the one before it ends.
        trained: bool [T], whether the token is predicted and carries a loss: not the first one, and
            only inside trained segments.
        pieces: int32 [P, 3], rising: tokens `[start, stop)` spell the text from byte `first` on, without a gap.
        closers: int32 [segments], the token that says that a segment has ended (eos, end of turn); -1: none.
        exact: whether its tokens spell the text that the model was given, or a normaliser rewrote some of it.
    """

    def __init__(
        self,
        ids: NDArray[np.int32],
        ends: NDArray[np.int32],
        trained: NDArray[np.bool_],
        pieces: NDArray[np.int32],
        closers: NDArray[np.int32],
        *,
        exact: bool = True,
    ) -> None:
        self.ids, self.ends, self.trained, self.pieces, self.closers = ids, ends, trained, pieces, closers
        self.exact = exact

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def spells(self) -> NDArray[np.bool_]:
        """Whether each token spells the document's text."""
        mask = np.zeros(len(self.ids), np.bool_)
        for start, stop, _ in self.pieces.tolist():
            mask[start:stop] = True
        return mask

    def byte_ranges(self) -> NDArray[np.int32]:
        """Return int32 [P, 2], the bytes `[start, stop)` of the text that each piece spells."""
        starts = self.pieces[:, 2]
        return np.column_stack([starts, np.maximum(self.ends[self.pieces[:, 1] - 1], starts)])

    def piece(self, number: int) -> Encoded:
        """Return the tokens of one piece, their ends in bytes of the whole text."""
        start, stop, _ = self.pieces[number].tolist()
        return Encoded(self.ids[start:stop], self.ends[start:stop], self.exact)

    def cut(self, length: int) -> Sequence:
        """Return the first `length` tokens."""
        if length >= len(self):
            return self
        pieces = self.pieces[self.pieces[:, 0] < length].copy()
        pieces[:, 1] = np.minimum(pieces[:, 1], length)
        closers = np.where(self.closers < length, self.closers, -1).astype(np.int32)
        return Sequence(self.ids[:length], self.ends[:length], self.trained[:length], pieces, closers, exact=self.exact)


def sequences(tokenizer: Tokenizer, documents: SequenceOf[Document]) -> list[Sequence]:
    """Tokenise documents as a model reads them.

    The start token is bos, or eos for tokenizers without a bos; the end token is eos. Without a start
    token the first token of a text is not predicted by anything and not trained. A conversation is rendered
    by the tokenizer's chat template, which writes such tokens itself.

    Raises:
        XtkError: a conversation, and the tokenizer has no chat template or one that refuses it.
    """
    encoded = iter(tokenizer.encode([document.text for document in documents if document.conversation is None]))
    talks = [document.conversation for document in documents if document.conversation is not None]
    renderings = [tokenizer.chat_template.place(talk) for talk in talks]
    tokens = tokenizer.encode_rendered(
        [rendering.text for rendering in renderings],
        [[region for region in rendering.regions if region] for rendering in renderings],
    )
    rendered = zip(renderings, tokens, strict=True)
    return [
        _of_text(tokenizer, document, next(encoded))
        if document.conversation is None
        else _of_conversation(tokenizer, document, *next(rendered))
        for document in documents
    ]


def _of_text(tokenizer: Tokenizer, document: Document, tokens: Encoded) -> Sequence:
    start, end = tokenizer.start_id, tokenizer.end_id
    front = [] if start is None else [start]
    back = [] if end is None or not document.ends else [end]
    size = int(tokens.ends[-1]) if len(tokens.ends) else 0
    first, stop = len(front), len(front) + len(tokens.ids)
    trained = np.concatenate(
        [np.zeros(first, np.bool_), document.trained(tokens.ends), np.full(len(back), document.ends_trained, np.bool_)]
    )
    if not front and len(trained):
        trained[0] = False
    closers = np.full(len(document.segments), -1, np.int32)
    closers[-1:] = stop if back else -1
    return Sequence(
        ids=np.concatenate([np.array(front, np.int32), tokens.ids, np.array(back, np.int32)]),
        ends=np.concatenate([np.zeros(first, np.int32), tokens.ends, np.full(len(back), size, np.int32)]),
        trained=trained,
        pieces=np.array([[first, stop, 0]] if stop > first else [], np.int32).reshape(-1, 3),
        closers=closers,
        exact=tokens.exact,
    )


def _of_conversation(tokenizer: Tokenizer, document: Document, rendering: Rendering, tokens: Encoded) -> Sequence:
    starts = np.concatenate([np.zeros(1, np.int32), tokens.ends])[:-1]
    pieces: list[tuple[int, int, int]] = []
    closers = np.full(len(document.segments), -1, np.int32)
    ends, trained = np.zeros(len(tokens.ids), np.int32), np.zeros(len(tokens.ids), np.bool_)
    first_byte = 0
    for number, (segment, region) in enumerate(zip(document.segments, rendering.regions, strict=True)):
        if region is not None:
            for byte, rendered, size in _verbatim(segment.text, rendering.text, region).tolist():
                low = int(np.searchsorted(starts, rendered))
                high = int(np.searchsorted(tokens.ends, rendered + size, side="right"))
                if low < high:
                    shift = first_byte + byte - rendered
                    if low and not (pieces and pieces[-1][1] == low):
                        ends[low - 1] = starts[low] + shift
                    pieces.append((low, high, starts[low] + shift))
                    ends[low:high] = tokens.ends[low:high] + shift
                    trained[low:high] = segment.train
            closer = _closer(tokenizer, tokens, starts, len(rendering.text[: region[1]].encode()))
            closers[number] = closer
            if closer >= 0:
                trained[closer] = segment.train
        first_byte += len(segment.text.encode())
    trained[:1] = False  # nothing predicts the first token
    return Sequence(
        ids=tokens.ids,
        ends=np.maximum.accumulate(ends) if len(ends) else ends,
        trained=trained,
        pieces=np.array(pieces, np.int32).reshape(-1, 3),
        closers=closers,
        exact=tokens.exact,
    )


def _verbatim(content: str, text: str, region: tuple[int, int]) -> NDArray[np.int64]:
    """Return which bytes of a content a template wrote as they are.

    Returns:
        int64 [R, 3]: bytes `[a, a + n)` of the content stand at bytes `[b, b + n)` of the rendered text.
    """
    start, stop = region
    found = text[start:stop]
    before = len(text[:start].encode())
    if found == content:
        return np.array([[0, before, len(content.encode())]], np.int64)
    from xtk.tokens.difference import byte_of_character, matching_runs

    runs = matching_runs(content, found)
    one, other = byte_of_character(content), byte_of_character(found)
    a, b = one[runs[:, 0]], other[runs[:, 1]]
    return np.column_stack([a, b + before, one[runs[:, 0] + runs[:, 2]] - a]).astype(np.int64)


def _closer(tokenizer: Tokenizer, tokens: Encoded, starts: NDArray[np.int32], byte: int) -> int:
    """Return the special token that stands right after a byte, as an end of turn does; -1 without one."""
    at = int(np.searchsorted(starts, byte))
    while at < len(starts) and starts[at] == byte and tokens.ends[at] == byte:
        at += 1  # a token that spells nothing
    if at < len(starts) and starts[at] == byte and tokenizer.vocabulary.special[tokens.ids[at]]:
        return at
    return -1


def bytes_read(document: Document, sequence: Sequence, *, start: int = 0) -> int:
    """Return how many bytes of a document's trained text, from `start` on, a model reads as they are."""
    ranges = sequence.byte_ranges()
    total = first = 0
    for segment in document.segments:
        stop = first + len(segment.text.encode())
        if segment.train:
            overlap = np.minimum(ranges[:, 1], stop) - np.maximum(ranges[:, 0], max(first, start))
            total += int(np.maximum(overlap, 0).sum())
        first = stop
    return total


def left_out(document: Document, sequence: Sequence) -> int:
    """Return how many bytes of a document's trained text a model does not read as they are.

    A chat template may drop or rewrite contents (thinking blocks, white space at their ends), and a token may hold
    the end of a content and the beginning of what the template writes after it.
    """
    trained = sum(len(segment.text.encode()) for segment in document.segments if segment.train)
    return trained - bytes_read(document, sequence)


def told_rewritten(counts: SequenceOf[int]) -> str:
    """Tell in words what `left_out` of some conversations adds up to."""
    rewritten = [count for count in counts if count]
    return (
        f"the chat template drops or rewrites {sum(rewritten):,} bytes of answers in {len(rewritten):,} of "
        f"{len(counts):,} conversations (thinking blocks, white space at their ends); they carry no loss"
    )
