"""A model's token sequence of a document: tokens, their bytes in the document's text, and the train mask."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from xtk.tokens.chat_template import RenderedConversation
from xtk.tokens.document import Document
from xtk.tokens.rollout_tokens import sampled_tokens_for, sequence_fields_from_sampled
from xtk.tokens.tokenizer import EncodedText, Tokenizer
from xtk.tokens.vocabulary import METASPACE

_IS_WHITESPACE = np.isin(np.arange(256), np.frombuffer(b" \t\r\n", np.uint8))


class TokenSequence:
    """A model's tokens of a document, in order.

    Plain text is between a start and an end token; a conversation is rendered with the model's chat template.

    Attributes:
        ids: int32 [T].
        byte_ends: int32 [T], never decreasing: the byte of the document's text where each token ends. Tokens without
            bytes in it (a start token, template text) have the end of the text before them, except for the last of them
            before a run: its end is the run's start, so that each token starts where the previous one ends (except
            where a template removed text between two tokens of a content).
        train_mask: bool [T], whether the token is predicted and trained: never the first token, and only tokens of
            trained segments.
        text_runs: int32 [P, 3], ascending: tokens `[start, stop)` cover the text from byte `first` on, without a gap.
        segment_end_tokens: int32 [segments], index of the token that ends each segment (eos, end of turn); -1: none.
        exact: whether the tokens' bytes equal the model's input text; False if a normalizer changed it.
    """

    def __init__(
        self,
        ids: NDArray[np.int32],
        byte_ends: NDArray[np.int32],
        train_mask: NDArray[np.bool_],
        text_runs: NDArray[np.int32],
        segment_end_tokens: NDArray[np.int32],
        *,
        exact: bool = True,
    ) -> None:
        self.ids, self.byte_ends, self.train_mask, self.text_runs, self.segment_end_tokens = (
            ids,
            byte_ends,
            train_mask,
            text_runs,
            segment_end_tokens,
        )
        self.exact = exact

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def text_mask(self) -> NDArray[np.bool_]:
        """The tokens with bytes of the document's text, bool [T]."""
        mask = np.zeros(len(self.ids), np.bool_)
        for start, stop, _ in self.text_runs.tolist():
            mask[start:stop] = True
        return mask

    @property
    def undecodable_mask(self) -> NDArray[np.bool_]:
        """The trained tokens without text, bool [T]: sampled tokens from the first invalid UTF-8 byte on."""
        mask = self.train_mask & ~self.text_mask
        mask[self.segment_end_tokens[self.segment_end_tokens >= 0]] = False
        return mask

    def whitespace_mask(self, text: str) -> NDArray[np.bool_]:
        """Return bool [T], the tokens whose bytes in the document's text are all spaces, tabs or newlines.

        Args:
            text: the document's text.
        """
        others = np.append(0, np.cumsum(~_IS_WHITESPACE[np.frombuffer(text.encode(), np.uint8)]))
        starts = np.append(0, self.byte_ends)[:-1].astype(np.int64)
        starts[self.text_runs[:, 0]] = self.text_runs[:, 2]
        stops = np.maximum(self.byte_ends, starts)
        mask: NDArray[np.bool_] = self.text_mask & (stops > starts) & (others[stops] == others[starts])
        return mask

    def byte_ranges(self) -> NDArray[np.int32]:
        """Return int32 [P, 2], the bytes `[start, stop)` of the text that each run covers."""
        starts = self.text_runs[:, 2]
        return np.column_stack([starts, np.maximum(self.byte_ends[self.text_runs[:, 1] - 1], starts)])

    def encoded_run(self, number: int) -> EncodedText:
        """Return the tokens of one run, with ends in bytes of the document's text."""
        start, stop, _ = self.text_runs[number].tolist()
        return EncodedText(self.ids[start:stop], self.byte_ends[start:stop], self.exact)

    def truncate(self, length: int) -> TokenSequence:
        """Return the first `length` tokens."""
        if length >= len(self):
            return self
        runs = self.text_runs[self.text_runs[:, 0] < length].copy()
        runs[:, 1] = np.minimum(runs[:, 1], length)
        end_tokens = np.where(self.segment_end_tokens < length, self.segment_end_tokens, -1).astype(np.int32)
        return TokenSequence(
            self.ids[:length], self.byte_ends[:length], self.train_mask[:length], runs, end_tokens, exact=self.exact
        )


def tokenize_documents(tokenizer: Tokenizer, documents: SequenceOf[Document]) -> list[TokenSequence]:
    """Return the token sequences of documents for one model; its own rollouts keep their sampled tokens.

    The start token is bos, or eos for tokenizers without a bos; the end token is eos. Without a start token the first
    token of a text has no prediction and is not trained. A conversation is rendered with the tokenizer's chat
    template, which adds such tokens itself.

    Raises:
        XtkError: for a conversation, the tokenizer has no chat template, or it refuses the messages.
    """
    own = [sampled_tokens_for(tokenizer, document) for document in documents]
    others = [document for document, sampled in zip(documents, own, strict=True) if sampled is None]
    encoded = iter(tokenizer.encode([document.text for document in others if document.conversation is None]))
    conversations = [document.conversation for document in others if document.conversation is not None]
    renderings = tokenizer.chat_template.render_batch_with_positions(conversations) if conversations else []
    tokens = tokenizer.encode_rendered(
        [rendering.text for rendering in renderings],
        [
            [
                (b, b + size)
                for place in rendering.content_positions
                if place is not None
                for _, b, size in place.runs.tolist()
            ]
            for rendering in renderings
        ],
    )
    rendered = zip(renderings, tokens, strict=True)
    return [
        TokenSequence(**sequence_fields_from_sampled(tokenizer, document, sampled))
        if sampled is not None
        else _sequence_from_text(tokenizer, document, next(encoded))
        if document.conversation is None
        else _sequence_from_conversation(tokenizer, document, *next(rendered))
        for document, sampled in zip(documents, own, strict=True)
    ]


def _sequence_from_text(tokenizer: Tokenizer, document: Document, tokens: EncodedText) -> TokenSequence:
    start, end = tokenizer.start_id, tokenizer.end_id
    front = [] if start is None else [start]
    back = [] if end is None or not document.is_complete else [end]
    size = int(tokens.byte_ends[-1]) if len(tokens.byte_ends) else 0
    first, stop = len(front), len(front) + len(tokens.ids)
    trained = np.concatenate(
        [
            np.zeros(first, np.bool_),
            document.trained_mask(tokens.byte_ends),
            np.full(len(back), document.is_end_trained, np.bool_),
        ]
    )
    if not front and len(trained):
        trained[0] = False
    end_tokens = np.full(len(document.segments), -1, np.int32)
    end_tokens[-1:] = stop if back else -1
    return TokenSequence(
        ids=np.concatenate([np.array(front, np.int32), tokens.ids, np.array(back, np.int32)]),
        byte_ends=np.concatenate([np.zeros(first, np.int32), tokens.byte_ends, np.full(len(back), size, np.int32)]),
        train_mask=trained,
        text_runs=np.array([[first, stop, 0]] if stop > first else [], np.int32).reshape(-1, 3),
        segment_end_tokens=end_tokens,
        exact=tokens.exact,
    )


def _sequence_from_conversation(
    tokenizer: Tokenizer, document: Document, rendering: RenderedConversation, tokens: EncodedText
) -> TokenSequence:
    text = rendering.text.encode()
    byte_of = _byte_offsets(rendering.text)
    starts = np.concatenate([np.zeros(1, np.int32), tokens.byte_ends])[:-1]
    runs: list[tuple[int, int, int]] = []
    end_tokens = np.full(len(document.segments), -1, np.int32)
    ends, trained = np.zeros(len(tokens.ids), np.int32), np.zeros(len(tokens.ids), np.bool_)
    first_byte = 0
    for number, (segment, place) in enumerate(zip(document.segments, rendering.content_positions, strict=True)):
        if place is not None:
            content_byte_of = _byte_offsets(segment.text)
            for at, rendered, size in place.runs.tolist():
                start, stop = int(byte_of[rendered]), int(byte_of[rendered + size])
                low, high = _tokens_within(text, starts, tokens.byte_ends, start, stop)
                if low < high and not (runs and runs[-1][1] == low):
                    low -= int(low > 0 and _is_space_before(tokenizer, text, tokens, starts, low - 1, start))
                if low < high:
                    shift = first_byte + int(content_byte_of[at]) - start
                    begin = max(int(starts[low]), start) + shift
                    if low and not (runs and runs[-1][1] == low):
                        ends[low - 1] = begin
                    runs.append((low, high, begin))
                    ends[low:high] = tokens.byte_ends[low:high] + shift
                    trained[low:high] = segment.train
            end_tokens[number] = _segment_end_token(tokenizer, text, tokens, starts, int(byte_of[place.stop]))
        if segment.train and end_tokens[number] < 0:
            low, high = _tokens_after_content(rendering, byte_of, starts, end_tokens, number)
            end_tokens[number] = _only_end_token(tokenizer, tokens, low, high)
        if (end_token := end_tokens[number]) >= 0:  # templates also close a truncated last message
            trained[end_token] = segment.train and (document.is_complete or number < len(end_tokens) - 1)
        first_byte += len(segment.text.encode())
    trained[:1] = False  # the first token has no prediction
    return TokenSequence(
        ids=tokens.ids,
        byte_ends=np.maximum.accumulate(ends) if len(ends) else ends,
        train_mask=trained,
        text_runs=np.array(runs, np.int32).reshape(-1, 3),
        segment_end_tokens=end_tokens,
        exact=tokens.exact,
    )


def _byte_offsets(text: str) -> NDArray[np.int64]:
    """Return [n + 1], the byte where each character begins, and the length in bytes."""
    if text.isascii():
        return np.arange(len(text) + 1)
    return np.cumsum([0, *(len(character.encode()) for character in text)])


def _tokens_within(
    text: bytes, starts: NDArray[np.int32], ends: NDArray[np.int32], start: int, stop: int
) -> tuple[int, int]:
    """Return the range of tokens in bytes `[start, stop)` of a rendered conversation.

    A token that starts with a space of the template and continues into the content is included, as in plain text, where
    a tokenizer prepends that space itself.
    """
    low = int(np.searchsorted(starts, start))
    high = int(np.searchsorted(ends, stop, side="right"))
    if low and starts[low - 1] < start < ends[low - 1] <= stop and not text[starts[low - 1] : start].strip(b" "):
        low -= 1
    return low, high


def _is_space_before(
    tokenizer: Tokenizer, text: bytes, tokens: EncodedText, starts: NDArray[np.int32], at: int, start: int
) -> bool:
    """Return whether a token is only the template's space before a content that starts at byte `start`.

    In a metaspace vocabulary it belongs to the content: `▁` before `2` as the space in `▁It`.
    """
    vocabulary = tokenizer.vocabulary
    is_space = vocabulary.alphabet == METASPACE and vocabulary.bytes_of(int(tokens.ids[at])) == b" "
    return is_space and tokens.byte_ends[at] == start and text[starts[at] : start] == b" "


def _segment_end_token(
    tokenizer: Tokenizer, text: bytes, tokens: EncodedText, starts: NDArray[np.int32], byte: int
) -> int:
    """Return the index of the special token that ends a turn, the first after `byte` and white space; or -1."""
    for at in range(int(np.searchsorted(starts, byte)), len(starts)):
        token = tokens.ids[at]
        if text[byte : starts[at]].strip():
            return -1
        if tokenizer.vocabulary.special_mask[token] or token == tokenizer.end_id:
            return at
    return -1


def _tokens_after_content(
    rendering: RenderedConversation,
    byte_of: NDArray[np.int64],
    starts: NDArray[np.int32],
    end_tokens: NDArray[np.int32],
    number: int,
) -> tuple[int, int]:
    """Return the range of tokens after a message's content and before the next content; empty if it is unknown.

    A message without content (with tool calls only) has no position; it is after the previous message.
    """
    places = rendering.content_positions
    high = len(starts)
    if number + 1 < len(places):
        following = places[number + 1]
        if following is None:
            return 0, 0
        runs = following.runs
        high = int(np.searchsorted(starts, byte_of[runs[0, 1] if len(runs) else following.stop]))
    for at in (number, number - 1):
        if at < 0 or end_tokens[at] >= 0:
            return (int(end_tokens[at]) + 1 if at >= 0 else 0), high
        if (place := places[at]) is not None:
            return int(np.searchsorted(starts, byte_of[place.stop])), high
    return 0, 0


def _only_end_token(tokenizer: Tokenizer, tokens: EncodedText, low: int, high: int) -> int:
    """Return the token in `[low, high)` that ends a text or a turn; -1 if there is none, or more than one.

    It ends a turn in which the template's own text (tool calls) follows the content.
    """
    found = np.flatnonzero(np.isin(tokens.ids[low:high], list(tokenizer.end_ids)))
    return low + int(found[0]) if len(found) == 1 else -1


def count_preserved_bytes(document: Document, sequence: TokenSequence, *, start: int = 0) -> int:
    """Return the number of bytes of a document's trained text, from `start` on, that are unchanged in the sequence."""
    ranges = sequence.byte_ranges()
    total = first = 0
    for segment in document.segments:
        stop = first + len(segment.text.encode())
        if segment.train:
            overlap = np.minimum(ranges[:, 1], stop) - np.maximum(ranges[:, 0], max(first, start))
            total += int(np.maximum(overlap, 0).sum())
        first = stop
    return total


def count_lost_bytes(document: Document, sequence: TokenSequence) -> int:
    """Return the number of bytes of a document's trained text that are not unchanged in the sequence.

    A chat template may drop or change contents (reasoning blocks, white space at their ends), and a token may contain
    both the end of a content and the start of the template's text after it.
    """
    trained = sum(len(segment.text.encode()) for segment in document.segments if segment.train)
    return trained - count_preserved_bytes(document, sequence)


def format_lost_bytes(counts: SequenceOf[int]) -> str:
    """Return a sentence with the total of `count_lost_bytes` over conversations."""
    rewritten = [count for count in counts if count]
    return (
        f"{sum(rewritten):,} bytes of trained text in {len(rewritten):,} of {len(counts):,} checked conversations are "
        "not trained: the chat template drops or changes them (reasoning, white space), or they share a token with "
        "the template's text"
    )
