"""Texts that end a completion, found in the bytes that tokens spell: also in those of several."""

from __future__ import annotations

from collections.abc import Sequence

from xtk.tokens.tokenizer import Tokenizer


class StopStringDetector:
    """Reads the tokens of one completion as they are drawn.

    Args:
        tokenizer: whose tokens they are.
        stop: the texts; none may be empty.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._vocabulary = tokenizer.vocabulary
        self._stops = [text.encode() for text in stop]
        self._kept = max(map(len, self._stops), default=1) - 1
        self._tail = b""

    def add_token(self, token: int) -> bool:
        """Read one more token; say whether it completes one of the texts. No text goes on past a control token."""
        if self._vocabulary.special_mask[token]:
            self._tail = b""
            return False
        text = self._tail + self._vocabulary.bytes_by_id[token]
        self._tail = text[max(0, len(text) - self._kept) :]
        return any(stop in text for stop in self._stops)
