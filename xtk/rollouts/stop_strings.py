"""Detects stop strings in the bytes of sampled tokens, also across several tokens."""

from __future__ import annotations

from collections.abc import Sequence

from xtk.text.tokenizer import Tokenizer


class StopStringDetector:
    """Detects stop strings in the tokens of one completion, one token at a time.

    Args:
        stop: stop strings; none may be empty.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._vocabulary = tokenizer.vocabulary
        self._stops = [text.encode() for text in stop]
        self._kept = max(map(len, self._stops), default=1) - 1
        self._tail = b""

    def add_token(self, token: int) -> bool:
        """Append a token; return whether it completes a stop string. Stop strings do not span special tokens."""
        if self._vocabulary.special_mask[token]:
            self._tail = b""
            return False
        text = self._tail + self._vocabulary.bytes_by_id[token]
        self._tail = text[max(0, len(text) - self._kept) :]
        return any(stop in text for stop in self._stops)
