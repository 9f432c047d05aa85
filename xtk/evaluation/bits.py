"""Bits per byte: what a model needs to write a text down, whatever its tokens are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from xtk import terminal
from xtk.errors import XtkError
from xtk.evaluation.rows import read_rows
from xtk.models.causal_lm import Cut, context_length
from xtk.tokens.document import Document
from xtk.tokens.sequence import Sequence, bytes_read, sequences
from xtk.tokens.tokenizer import Tokenizer

READ_AT_ONCE = 256
BATCH_TOKENS = 8192


@dataclass(frozen=True)
class BitsPerByte:
    """The result over a corpus.

    Attributes:
        bits: summed over the tokens of the trained text.
        bytes: of that text, in UTF-8.
        tokens: that were scored.
        documents: how many.
        windows: forward passes a document of more than the context was cut into, over all documents.
    """

    bits: float
    bytes: int
    tokens: int
    documents: int
    windows: int

    @property
    def bits_per_byte(self) -> float:
        """The quotient; infinite for a model that gives some token no probability."""
        return self.bits / self.bytes if self.bytes else math.nan


@dataclass(frozen=True)
class Window:
    """A stretch of a document that is read in one pass.

    Attributes:
        ids: int32 [n].
        counted: bool [n], the tokens that are scored here.
    """

    ids: np.ndarray
    counted: np.ndarray


@torch.no_grad()
def bits_per_byte(
    model: Cut,
    tokenizer: Tokenizer,
    corpus: Iterable[Document],
    *,
    batch_tokens: int = BATCH_TOKENS,
    max_length: int | None = None,
) -> BitsPerByte:
    """Score a corpus.

    Every token of the text is scored once, after a start token; the end token is not text and does not count.
    A document longer than the context is read in windows that overlap by half, so that each token but those of the
    first window has at least half a context before it. Log-probabilities are summed in float64.

    Args:
        model: on its device.
        tokenizer: the model's.
        corpus: of a prompt with its completion, the completion counts.
        batch_tokens: padded tokens in a forward pass.
        max_length: a smaller limit than the model's context.

    Raises:
        XtkError: the limit is a single token.
    """
    limits = [limit for limit in (context_length(model.model.config), max_length) if limit]
    limit = min(limits) if limits else None
    if limit is not None and limit < 2:
        raise XtkError(f"--max-length is {limit}: no token has one before it that predicts it", hint="2 or more")
    training = model.training
    model.eval()
    bits, size, tokens, count, windows = 0.0, 0, 0, 0, 0
    for documents in _groups(corpus):
        pending: list[Window] = []
        for document, sequence in zip(documents, sequences(tokenizer, documents), strict=True):
            pieces = windows_of_text(sequence, limit)
            pending += pieces
            windows += len(pieces)
            size += counted_bytes(document, sequence)
            count += 1
        for batch in _batches(pending, batch_tokens):
            bits += _score(model, batch)
            tokens += sum(int(window.counted.sum()) for window in batch)
    model.train(training)
    if not size:
        raise XtkError("there is no text to evaluate on: its documents are empty")
    return BitsPerByte(bits, size, tokens, count, windows)


def _groups(corpus: Iterable[Document]) -> Iterator[list[Document]]:
    group: list[Document] = []
    total = len(corpus) if isinstance(corpus, list) else 0
    with terminal.Progress("evaluate", total, "documents") if total > READ_AT_ONCE else _Silent() as progress:
        for document in corpus:
            group.append(document)
            if len(group) == READ_AT_ONCE:
                yield group
                progress.advance(len(group))
                group = []
        if group:
            yield group


def counted_bytes(document: Document, sequence: Sequence) -> int:
    """Return how many bytes of the trained text are predicted."""
    # Without a start token nothing predicts the first token.
    starts_at_once = len(sequence.pieces) > 0 and sequence.pieces[0, 0] == 0
    return bytes_read(document, sequence, start=int(sequence.ends[0]) if starts_at_once else 0)


class _Silent:
    def __enter__(self) -> _Silent:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def advance(self, amount: int, detail: str = "") -> None:
        pass


def windows_of_text(sequence: Sequence, limit: int | None) -> list[Window]:
    """Return the windows in which the trained text of a document is scored; none if there is nothing to score."""
    counted = sequence.trained & sequence.spells
    stop = int(np.flatnonzero(counted)[-1]) + 1 if counted.any() else 0
    return list(windows_of(sequence.ids[:stop], counted[:stop], limit)) if stop else []


def windows_of(ids: np.ndarray, counted: np.ndarray, limit: int | None) -> Iterator[Window]:
    """Yield the windows of a document; the first one is its beginning.

    Args:
        ids: int32 [T].
        counted: bool [T], the tokens that are scored; each is in one window.
        limit: of a window; None: the document is one.
    """
    if limit is None or len(ids) <= limit:
        yield Window(ids, counted)
        return
    yield Window(ids[:limit], counted[:limit])
    stride = max(1, limit // 2)
    done = limit
    while done < len(ids):
        stop = min(done + stride, len(ids))
        start = stop - limit
        fresh = counted[start:stop].copy()
        fresh[: done - start] = False
        yield Window(ids[start:stop], fresh)
        done = stop


def _batches(windows: list[Window], tokens: int) -> Iterator[list[Window]]:
    ordered = sorted(windows, key=lambda window: -len(window.ids))
    start = 0
    while start < len(ordered):
        size = max(1, tokens // len(ordered[start].ids))
        yield ordered[start : start + size]
        start += size


def _score(model: Cut, batch: list[Window]) -> float:
    """Return the bits of the counted tokens of a batch."""
    longest = len(batch[0].ids)
    ids = torch.zeros(len(batch), longest, dtype=torch.int64)
    counted = torch.zeros(len(batch), longest, dtype=torch.bool)
    for row, window in enumerate(batch):
        ids[row, : len(window.ids)] = torch.from_numpy(window.ids)
        counted[row, : len(window.ids)] = torch.from_numpy(window.counted)
    places = counted.flatten().nonzero()[:, 0]
    device = next(model.parameters()).device
    targets = ids.flatten()[places].to(device)
    states = model(ids.to(device)).flatten(0, 1)[(places - 1).to(device)]
    logprobs, _ = read_rows(states, model.head, targets)
    return -float(logprobs.sum()) / math.log(2)
