"""A model's token sequence of a document: tokens, their bytes in the document's text, and the train mask."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import KW_ONLY, dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from xtk.text.chat.conversation_tokens import NO_REGION, sequence_fields_from_rendering
from xtk.text.chat.parts import MARKS
from xtk.text.document import Document
from xtk.text.rollout_tokens import sampled_tokens_for, sequence_fields_from_sampled
from xtk.text.tokenizer import EncodedText, Tokenizer

_IS_WHITESPACE = np.isin(np.arange(256), np.frombuffer(b" \t\r\n", np.uint8))


@dataclass(eq=False)
class TokenSequence:
    """A model's tokens of a document, in order.

    Plain text is between a start and an end token; a conversation is rendered with the model's chat template. Tokens
    without bytes in the document's text (a start token, template text) have the end of the text before them, except for
    the last of them before a run: its end is the run's start, so that each token starts where the previous one ends
    (except where a template removed text between two tokens of a content). A token of `border_mask` ends with the part.
    """

    ids: NDArray[np.int32]  # [T]
    byte_ends: NDArray[np.int32]  # [T], never decreasing: the byte of the document's text where each token ends
    # [T], whether the token is predicted and trained: never the first token, and only tokens of trained segments.
    train_mask: NDArray[np.bool_]
    text_runs: NDArray[np.int32]  # [P, 3], ascending: tokens `[start, stop)` cover the text from byte `first` on
    # [segments], index of the special token that ends a segment (eos, end of turn), or is it (a mark); -1: none.
    segment_end_tokens: NDArray[np.int32]
    _: KW_ONLY
    # [T], region of tokens that the model's own chat template writes into trained turns, else `NO_REGION`. They have no
    # counterpart in another model: only losses without a teacher train them; `train_mask` is without them.
    template_regions: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    exact: bool = True  # whether the tokens' bytes equal the model's input text; False if a normalizer changed it
    bytes_of: Callable[[int], bytes] | None = None  # returns the bytes of a token id; None: they are not known

    def __post_init__(self) -> None:
        if not len(self.template_regions):
            self.template_regions = np.full(len(self.ids), NO_REGION, np.uint8)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def text_mask(self) -> NDArray[np.bool_]:
        """The tokens with bytes of the document's text, bool [T]."""
        changes = np.zeros(len(self.ids) + 1, np.int32)
        np.add.at(changes, self.text_runs[:, 0], 1)
        np.subtract.at(changes, self.text_runs[:, 1], 1)
        mask: NDArray[np.bool_] = np.cumsum(changes)[:-1] > 0
        return mask

    @property
    def loss_mask(self) -> NDArray[np.bool_]:
        """The tokens on which a loss is computed, bool [T]: trained ones, and template text in trained turns."""
        mask: NDArray[np.bool_] = self.train_mask | (self.template_regions != NO_REGION)
        return mask

    @property
    def byte_starts(self) -> NDArray[np.int32]:
        """The byte of the document's text where each token starts, int32 [T]."""
        starts: NDArray[np.int32] = np.append(np.int32(0), self.byte_ends)[:-1]
        starts[self.text_runs[:, 0]] = self.text_runs[:, 2]
        return starts

    @property
    def border_mask(self) -> NDArray[np.bool_]:
        """The trained tokens that begin in the text of a part and end in the template's text after it, bool [T]."""
        mask: NDArray[np.bool_] = self._trained_without_text & (np.diff(self.byte_ends, prepend=0) > 0)
        return mask

    @property
    def undecodable_mask(self) -> NDArray[np.bool_]:
        """The trained tokens without text, bool [T]: sampled tokens from the first invalid UTF-8 byte on."""
        mask: NDArray[np.bool_] = self._trained_without_text & (np.diff(self.byte_ends, prepend=0) == 0)
        return mask

    @property
    def _trained_without_text(self) -> NDArray[np.bool_]:
        mask: NDArray[np.bool_] = self.train_mask & ~self.text_mask & (self.template_regions == NO_REGION)
        mask[self.segment_end_tokens[self.segment_end_tokens >= 0]] = False
        return mask

    def runs_with_borders(self) -> NDArray[np.int32]:
        """Return `text_runs` in which the tokens of `border_mask` are the last ones of runs; they end with the part."""
        borders = np.flatnonzero(self.border_mask)
        if not len(borders):
            return self.text_runs
        runs = self.text_runs.copy()
        at = np.searchsorted(runs[:, 1], borders)
        follows = np.append(runs[:, 1], -1)[at] == borders
        runs[at[follows], 1] += 1
        alone = borders[~follows]
        added = np.column_stack([alone, alone + 1, np.append(np.int32(0), self.byte_ends)[alone]])
        runs = np.concatenate([runs, added.astype(np.int32)])
        return runs[np.argsort(runs[:, 0])]

    def bytes_after_part(self, token: int) -> bytes | None:
        """Return the bytes of a token of `border_mask` that are the template's; None if they are not known."""
        if self.bytes_of is None or not self.exact:
            return None
        size = int(self.byte_ends[token]) - int(self.byte_ends[token - 1] if token else 0)
        return self.bytes_of(int(self.ids[token]))[size:]

    def whitespace_mask(self, text: str) -> NDArray[np.bool_]:
        """Return bool [T], the tokens whose bytes in the document's text are all spaces, tabs or newlines."""
        others = np.append(0, np.cumsum(~_IS_WHITESPACE[np.frombuffer(text.encode(), np.uint8)]))
        starts = self.byte_starts
        stops = np.maximum(self.byte_ends, starts)
        mask: NDArray[np.bool_] = self.text_mask & (stops > starts) & (others[stops] == others[starts])
        return mask

    @property
    def text_sizes(self) -> NDArray[np.int32]:
        """The bytes of the document's text in each token, int32 [T]; 0 for tokens that are not in `text_mask`."""
        sizes: NDArray[np.int32] = np.maximum(self.byte_ends - self.byte_starts, 0) * self.text_mask
        return sizes

    def byte_ranges(self, *, with_borders: bool = False) -> NDArray[np.int32]:
        """Return int32 [P, 2], bytes `[start, stop)` of each run; `with_borders`: with tokens of `border_mask`."""
        runs = self.runs_with_borders() if with_borders else self.text_runs
        starts = runs[:, 2]
        return np.column_stack([starts, np.maximum(self.byte_ends[runs[:, 1] - 1], starts)])

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
        return replace(
            self,
            ids=self.ids[:length],
            byte_ends=self.byte_ends[:length],
            train_mask=self.train_mask[:length],
            text_runs=runs,
            segment_end_tokens=end_tokens,
            template_regions=self.template_regions[:length],
        )


def tokenize_documents(tokenizer: Tokenizer, documents: SequenceOf[Document]) -> list[TokenSequence]:
    """Return the token sequences of documents for one model; its own rollouts keep their sampled tokens.

    A text follows `Tokenizer.start_ids`; the end token is eos. Without a start token the first token of a text has no
    prediction and is not trained. A conversation is rendered with the tokenizer's chat template, which adds such tokens
    itself.
    """
    own = [sampled_tokens_for(tokenizer, document) for document in documents]
    others = [document for document, sampled in zip(documents, own, strict=True) if sampled is None]
    encoded = iter(tokenizer.encode([document.text for document in others if document.conversation is None]))
    conversations = [document.conversation for document in others if document.conversation is not None]
    renderings = [tokenizer.chat_template.render_with_positions(conversation) for conversation in conversations]
    tokens = tokenizer.encode_rendered(
        [rendering.text for rendering in renderings], [rendering.content_ranges for rendering in renderings]
    )
    rendered = zip(renderings, tokens, strict=True)
    return [
        TokenSequence(**sequence_fields_from_sampled(tokenizer, document, sampled))
        if sampled is not None
        else _sequence_from_text(tokenizer, document, next(encoded))
        if document.conversation is None
        else TokenSequence(
            **sequence_fields_from_rendering(tokenizer, document, *next(rendered)),
            bytes_of=tokenizer.vocabulary.bytes_of,
        )
        for document, sampled in zip(documents, own, strict=True)
    ]


def _sequence_from_text(tokenizer: Tokenizer, document: Document, tokens: EncodedText) -> TokenSequence:
    front, end = tokenizer.start_ids, tokenizer.end_id
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


def count_preserved_bytes(
    document: Document,
    sequence: TokenSequence,
    *,
    start: int = 0,
    with_marks: bool = False,
    with_borders: bool = False,
) -> int:
    """Return the number of bytes of a document's trained text, from `start` on, that are unchanged in the sequence.

    `with_marks`: count also marks of reasoning and tool calls that are text in this tokenizer; `with_borders`: also
    bytes of tokens that end in the template's text.
    """
    ranges = sequence.byte_ranges(with_borders=with_borders)
    total = first = 0
    for segment in document.segments:
        stop = first + len(segment.text.encode())
        if segment.train and (with_marks or segment.role not in MARKS):
            overlap = np.minimum(ranges[:, 1], stop) - np.maximum(ranges[:, 0], max(first, start))
            total += int(np.maximum(overlap, 0).sum())
        first = stop
    return total


def count_lost_bytes(document: Document, sequence: TokenSequence) -> int:
    """Return the number of bytes of a document's trained text that the chat template drops or changes."""
    trained = sum(
        len(segment.text.encode()) for segment in document.segments if segment.train and segment.role not in MARKS
    )
    return trained - count_preserved_bytes(document, sequence, with_borders=True)


def format_lost_bytes(counts: SequenceOf[int]) -> str:
    """Return a sentence with the total of `count_lost_bytes` over conversations."""
    rewritten = [count for count in counts if count]
    return (
        f"{sum(rewritten):,} bytes of trained text in {len(rewritten):,} of {len(counts):,} checked conversations are "
        "not trained: the chat template drops or changes them (reasoning, white space)"
    )
