"""The tokens of a rendered conversation: which are text of which part, which end a turn, and which a template wrote."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.text.chat.parts import CONTENT, MARKS, REASONING, REASONING_END, TOOL_PARTS, TOOL_START, MessagePart
from xtk.text.chat.positions import PartPosition
from xtk.text.chat.template import RenderedConversation
from xtk.text.different_text_alignment import character_byte_offsets
from xtk.text.document import Conversation, Document
from xtk.text.tokenizer import REASONING_END_TOKENS, TOOL_CALL_START_TOKENS, EncodedText, Tokenizer
from xtk.text.vocabulary import METASPACE

# Kinds of trained tokens; a number in masks.
ANSWER, END_OF_TURN, MARKUP = "answer", "end-of-turn", "markup"
REGIONS = (ANSWER, REASONING, REASONING_END, "tool-call", END_OF_TURN, MARKUP)
MARKUP_REGION, NO_REGION = REGIONS.index(MARKUP), 255
_TOOL_CALL = REGIONS.index("tool-call")
_REGION_OF_KIND = {
    CONTENT: REGIONS.index(ANSWER),
    REASONING: REGIONS.index(REASONING),
    REASONING_END: REGIONS.index(REASONING_END),
    **dict.fromkeys(TOOL_PARTS, _TOOL_CALL),
}
_MARK_TOKENS = {REASONING_END: REASONING_END_TOKENS, TOOL_START: TOOL_CALL_START_TOKENS}
_REASONING_END_TEXT = re.compile("|".join(re.escape(name) for name in REASONING_END_TOKENS).encode())


def region_of_role(role: str) -> int:
    """Return the number of the region of a segment's text, from its role."""
    return _REGION_OF_KIND.get(role, _REGION_OF_KIND[CONTENT])


def first_regions(regions: NDArray[np.uint8], starts: NDArray[np.int32], stops: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Return uint8 [n], the region in which each token begins; `regions`: uint8 [bytes], at least one.

    A token that begins in markup, or in no region, and reaches into another one counts as that one. A token without
    bytes (its start, int32 [n], is its stop) has the region before it, or, if there is none, after it.
    """
    size = len(regions)
    is_plain = np.isin(regions, (MARKUP_REGION, NO_REGION))
    following = np.minimum.accumulate(np.where(is_plain, size, np.arange(size))[::-1])[::-1]
    first = following[np.clip(starts, 0, size - 1)]
    is_inside = (first < stops) & (starts < size)
    last = np.clip(stops - 1, 0, size - 1)
    last = np.where(regions[last] == NO_REGION, np.clip(starts, 0, size - 1), last)
    of_tokens: NDArray[np.uint8] = regions[np.where(is_inside, np.minimum(first, size - 1), last)]
    return of_tokens


def sequence_fields_from_rendering(
    tokenizer: Tokenizer, document: Document, rendering: RenderedConversation, tokens: EncodedText
) -> dict[str, Any]:
    """Return the fields of a `TokenSequence` of a conversation that is rendered in the model's chat template."""
    assert document.conversation is not None
    return _ConversationTokens(tokenizer, document, document.conversation, rendering, tokens).fields()


@dataclass
class _ConversationTokens:
    tokenizer: Tokenizer
    document: Document
    conversation: Conversation
    rendering: RenderedConversation
    tokens: EncodedText

    def __post_init__(self) -> None:
        size, count = len(self.tokens.ids), len(self.document.segments)
        self._text, self._byte_of = self.rendering.text.encode(), character_byte_offsets(self.rendering.text)
        self._starts = np.concatenate([np.zeros(1, np.int32), self.tokens.byte_ends])[:-1]
        self._ends, self._trained = np.zeros(size, np.int32), np.zeros(size, np.bool_)
        self._runs: list[tuple[int, int, int]] = []
        self._tails: dict[int, tuple[int, int]] = {}
        self._end_tokens = np.full(count, -1, np.int32)

    def fields(self) -> dict[str, Any]:
        """Return the fields of a `TokenSequence`."""
        first_byte = 0
        rows = zip(self.document.segments, self.conversation.parts, self.rendering.positions, strict=True)
        for number, (segment, part, place) in enumerate(rows):
            if part.kind in MARKS and (special := self._special_mark(number, part)) >= 0:
                self._end_tokens[number] = special
            elif place is not None:
                self._add_runs(segment.text, place, first_byte, train=segment.train)
            if number + 1 == self.conversation.part_ranges[part.message].stop:
                self._end_tokens[number] = self._find_turn_end(number, place)
            if (end := self._end_tokens[number]) >= 0:  # templates also close a truncated last message
                is_cut = number + 1 == len(self._end_tokens) and not self.document.is_complete
                self._trained[end] = segment.train and not is_cut
            first_byte += len(segment.text.encode())
        regions = self._train_generated_tokens()
        self._trained[:1], regions[:1] = False, NO_REGION  # the first token has no prediction
        ends = self._ends
        return {
            "ids": self.tokens.ids,
            "byte_ends": np.maximum.accumulate(ends) if len(ends) else ends,
            "train_mask": self._trained,
            "text_runs": np.array(self._runs, np.int32).reshape(-1, 3),
            "segment_end_tokens": self._end_tokens,
            "template_regions": regions,
            "exact": self.tokens.exact,
        }

    def _add_runs(self, text: str, place: PartPosition, first_byte: int, *, train: bool) -> None:
        """Add the tokens of a part's text, from byte `first_byte` of the document on."""
        own_byte_of, runs = character_byte_offsets(text), self._runs
        for at, rendered, size in place.runs.tolist():
            start, stop = int(self._byte_of[rendered]), int(self._byte_of[rendered + size])
            low, high = self._tokens_within(start, stop)
            if low < high and not (runs and runs[-1][1] == low):
                low -= int(low > 0 and self._is_space_before(low - 1, start))
            if low < high:
                shift = first_byte + int(own_byte_of[at]) - start
                begin = max(int(self._starts[low]), start) + shift
                if low and not (runs and runs[-1][1] == low):
                    self._ends[low - 1] = begin
                runs.append((low, high, begin))
                self._ends[low:high] = self.tokens.byte_ends[low:high] + shift
                self._trained[low:high] = train
            if high < len(self._starts) and start <= self._starts[high] < stop < self.tokens.byte_ends[high]:
                shift = first_byte + int(own_byte_of[at]) - start
                self._tails[high] = int(self._starts[high]) + shift, stop + shift

    def _tokens_within(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range of tokens in bytes `[start, stop)` of the rendered conversation.

        A token that starts with a space of the template and continues into the part is included, as in plain text,
        where a tokenizer prepends that space itself.
        """
        starts, ends = self._starts, self.tokens.byte_ends
        low, high = int(np.searchsorted(starts, start)), int(np.searchsorted(ends, stop, side="right"))
        if low and starts[low - 1] < start < ends[low - 1] <= stop:
            low -= int(not self._text[starts[low - 1] : start].strip(b" "))
        return low, high

    def _is_space_before(self, at: int, start: int) -> bool:
        """Return whether a token is only the template's space before a part that starts at byte `start`.

        In a metaspace vocabulary it belongs to the part: `▁` before `2` as the space in `▁It`.
        """
        vocabulary = self.tokenizer.vocabulary
        is_space = vocabulary.alphabet == METASPACE and vocabulary.bytes_of(int(self.tokens.ids[at])) == b" "
        return is_space and self.tokens.byte_ends[at] == start and self._text[self._starts[at] : start] == b" "

    # Special tokens.

    def _special_mark(self, number: int, part: MessagePart) -> int:
        """Return the index of the special token that is a mark, the first one between its neighbors; or -1."""
        low, high = self._gap_around(number)
        ids = list(self.tokenizer.special_ids(_MARK_TOKENS[part.kind]))
        places = np.flatnonzero(np.isin(self.tokens.ids[low:high], ids))
        return low + int(places[0]) if len(places) else -1

    def _gap_around(self, number: int) -> tuple[int, int]:
        """Return the range of tokens between the parts around a mark; empty if the one it belongs to is omitted."""
        places, kind = self.rendering.positions, self.conversation.parts[number].kind
        if places[number - 1 if kind == REASONING_END else number + 1] is None:
            return 0, 0
        before = next((at for at in range(number - 1, -1, -1) if places[at] is not None), None)
        low = 0 if before is None else self._token_after(places[before])
        if before is not None and self._end_tokens[before] >= 0:
            low = int(self._end_tokens[before]) + 1
        following = next((place for place in places[number + 1 :] if place is not None), None)
        return low, len(self._starts) if following is None else self._token_at(following.start)

    def _token_after(self, place: PartPosition | None) -> int:
        return 0 if place is None else self._token_at(place.stop)

    def _find_turn_end(self, number: int, place: PartPosition | None) -> int:
        """Return the index of the token that ends the message of this last part; -1 without one, or if unclear."""
        segment, part = self.document.segments[number], self.conversation.parts[number]
        if self._is_omitted(part.message):
            return -1
        if place is not None and part.kind == CONTENT and (end := self._special_after(place)) >= 0:
            return end
        if segment.train or (place is not None and part.kind != CONTENT):
            return self._turn_end_after(number)
        return -1

    def _is_omitted(self, message: int) -> bool:
        """Return whether the template writes nothing of a message that has text: its end would end another text."""
        numbers = self.conversation.part_ranges[message]
        has_text = any(self.conversation.parts[at].text for at in numbers)
        return has_text and all(self.rendering.positions[at] is None for at in numbers)

    def _special_after(self, place: PartPosition) -> int:
        """Return the index of the first special token after a content and white space; or -1."""
        byte = int(self._byte_of[place.stop])
        for at in range(int(np.searchsorted(self._starts, byte)), len(self._starts)):
            token = self.tokens.ids[at]
            if self._text[byte : self._starts[at]].strip():
                return -1
            if self.tokenizer.vocabulary.special_mask[token] or token == self.tokenizer.end_id:
                return at
        return -1

    def _turn_end_after(self, number: int) -> int:
        """Return the end token of a message from the template's text after its last part; -1 if it is unclear.

        Messages of which the template writes no text (an empty content) are in the same range: there is one end token
        for each of them, or only one for the message itself.
        """
        parts, places = self.conversation.parts, self.rendering.positions
        message, low, first = parts[number].message, 0, 0
        for at in range(number, -1, -1):
            if self._end_tokens[at] >= 0:
                low, first = int(self._end_tokens[at]) + 1, parts[at].message + 1
                break
            if (place := places[at]) is not None:
                low, first = self._token_after(place), parts[at].message
                break
        following = range(number + 1, len(parts))
        there = next((at for at in following if parts[at].message > message and places[at] is not None), None)
        stop = len(self.conversation.messages) if there is None else parts[there].message
        high = len(self._starts) if there is None else self._first_token(there)
        turn_ends = low + np.flatnonzero(np.isin(self.tokens.ids[low:high], list(self.tokenizer.turn_end_ids)))
        if len(turn_ends) == stop - first:
            return int(turn_ends[message - first])
        ranges = self.conversation.part_ranges[first:message]
        is_only_one = stop == message + 1 and all(places[at] is not None for parts in ranges for at in parts)
        return int(turn_ends[0]) if len(turn_ends) == 1 and is_only_one else -1

    # Tokens that the assistant generates.

    def _train_generated_tokens(self) -> NDArray[np.uint8]:
        """Train the tokens that begin in a part and end in the template's text, and return `template_regions`.

        They are all other tokens that the assistant generates in trained turns.
        """
        regions = np.full(len(self._trained), NO_REGION, np.uint8)
        is_text = np.zeros(len(self._trained), np.bool_)
        for start, stop, _ in self._runs:
            is_text[start:stop] = True
        for message in self.rendering.reply_starts:
            numbers = [at for at in self.conversation.part_ranges[message] if self.rendering.positions[at] is not None]
            if not numbers or not self.document.segments[numbers[0]].train:
                continue
            low, high = self._generated_range(message, numbers)
            for at in np.flatnonzero(~self._trained[low:high]) + low:
                if at in self._tails:
                    self._trained[at] = self._set_byte_ends(int(at), is_text)
            others = np.flatnonzero(~(self._trained | is_text)[low:high]) + low
            if len(others):
                first, of_bytes = self._byte_regions(message, low, high)
                starts, stops = self._starts[others], self.tokens.byte_ends[others]
                regions[others] = first_regions(of_bytes, starts - first, stops - first)
        return regions

    def _set_byte_ends(self, at: int, is_text: NDArray[np.bool_]) -> bool:
        """Let a token that begins in a part end with it; False if text is missing before it."""
        begin, end = self._tails[at]
        if at and not (is_text[at - 1] or at - 1 in self._tails):
            self._ends[at - 1] = begin
        if at and self._ends[at - 1] != begin:
            return False
        self._ends[at] = end
        return True

    def _generated_range(self, message: int, numbers: list[int]) -> tuple[int, int]:
        """Return the range of tokens that the assistant generates in a message with the parts `numbers` in the text."""
        first, last = (self.rendering.positions[numbers[at]] for at in (0, -1))
        assert first is not None
        assert last is not None
        start = self.rendering.reply_starts[message]
        low = self._token_at(first.start if start is None else start)
        end = int(self._end_tokens[self.conversation.part_ranges[message].stop - 1])
        is_last = message == len(self.conversation.messages) - 1
        if is_last and not self.document.is_complete:
            stop = int(self._byte_of[last.stop])
            return low, int(np.searchsorted(self.tokens.byte_ends, stop, side="right"))
        if end >= 0:
            return low, end + 1
        after = self._token_after(last)
        is_end = np.isin(self.tokens.ids[after:], list(self.tokenizer.turn_end_ids))
        return low, len(self._starts) if is_last and not is_end.any() else after

    def _byte_regions(self, message: int, low: int, high: int) -> tuple[int, NDArray[np.uint8]]:
        """Return the first byte of tokens `[low, high)` of a message, and the region of each of their bytes."""
        first, stop = int(self._starts[low]), int(self.tokens.byte_ends[high - 1])
        regions = np.full(max(stop - first, 1), MARKUP_REGION, np.uint8)
        at, before = first, None
        for number in self.conversation.part_ranges[message]:
            if (place := self._byte_range(number)) is None:
                continue
            part = self.conversation.parts[number]
            self._fill_between(regions, first, (at, place[0]), (before, part))
            regions[max(place[0] - first, 0) : max(place[1] - first, 0)] = region_of_role(part.kind)
            at, before = place[1], part
        self._fill_between(regions, first, (at, stop), (before, None))
        return first, regions

    def _byte_range(self, number: int) -> tuple[int, int] | None:
        """Return the bytes of a part, or of the special token that is its mark; None if it is omitted."""
        token, place = int(self._end_tokens[number]), self.rendering.positions[number]
        if place is not None:
            return int(self._byte_of[place.start]), int(self._byte_of[place.stop])
        if token >= 0 and self.conversation.parts[number].kind in MARKS:
            return int(self._starts[token]), int(self.tokens.byte_ends[token])
        return None

    def _fill_between(
        self,
        regions: NDArray[np.uint8],
        first: int,
        between: tuple[int, int],
        parts: tuple[MessagePart | None, MessagePart | None],
    ) -> None:
        """Set the regions, from byte `first` on, of the template's text between two parts; None: there is none."""
        start, stop = between
        before, following = parts
        if following is not None and following.kind in TOOL_PARTS and (before is None or before.kind == REASONING):
            reasoning_stop = self._reasoning_stop(start, stop)
            regions[max(start - first, 0) : max(reasoning_stop - first, 0)] = REGIONS.index(REASONING_END)
            start = reasoning_stop
        regions[max(start - first, 0) : max(stop - first, 0)] = self._region_between(before, following)

    def _reasoning_stop(self, start: int, stop: int) -> int:
        """Return the byte where the end of reasoning stops in template text `[start, stop)`; `start` without one.

        It is a mark that `MARKS` does not have, or that follows no reasoning, or a special token that ends a message.
        """
        marks = list(_REASONING_END_TEXT.finditer(self._text, start, stop))
        if marks:
            return marks[-1].end()
        at = int(np.searchsorted(self._starts, start))
        is_end = at < len(self._starts) and int(self.tokens.ids[at]) in self.tokenizer.turn_end_ids
        return int(self.tokens.byte_ends[at]) if is_end else start

    def _first_token(self, number: int) -> int:
        place = self.rendering.positions[number]
        assert place is not None
        return self._token_at(place.start)

    def _token_at(self, character: int) -> int:
        return int(np.searchsorted(self._starts, self._byte_of[character]))

    @staticmethod
    def _region_between(before: MessagePart | None, following: MessagePart | None) -> int:
        """Return the region of the template's text between two parts of a message."""
        kinds = [None if part is None else part.kind for part in (before, following)]
        if any(kind in TOOL_PARTS for kind in kinds):
            return _TOOL_CALL
        if kinds[0] in (REASONING, REASONING_END):
            return REGIONS.index(REASONING_END)
        return REGIONS.index(REASONING) if kinds[1] == REASONING else MARKUP_REGION
