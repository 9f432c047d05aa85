"""Bits per byte: what a model needs to write a text down, whatever its tokens are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from xtk import terminal
from xtk.errors import XtkError
from xtk.evaluation.estimates import Ratio
from xtk.evaluation.kinds import KINDS, WHITE, kinds_of
from xtk.evaluation.rows import read_rows
from xtk.evaluation.shares import BytesOfTokens, lay_on_text
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
        of_documents: bits and bytes of each document: of the tokens of its trained text, and of that text in UTF-8.
        tokens: that were scored.
        windows: forward passes a document of more than the context was cut into, over all documents.
        window: tokens that are read at once at most; None: as many as a document has.
        of_kinds: bits and bytes of each document by the kind of text (a name of `KINDS`), as far as there is some; they
            sum to those of all. Empty where nobody asked.
    """

    of_documents: Ratio
    tokens: int
    windows: int
    window: int | None
    of_kinds: dict[str, Ratio] = field(default_factory=dict)

    @property
    def bits(self) -> float:
        """Summed over documents."""
        return float(self.of_documents.sums.sum())

    @property
    def bytes(self) -> int:
        """Summed over documents."""
        return int(self.of_documents.counts.sum())

    @property
    def documents(self) -> int:
        """How many."""
        return len(self.of_documents.sums)

    @property
    def stride(self) -> int | None:
        """By how many tokens each window of a long document is behind the one before it."""
        return None if self.window is None else stride_of(self.window)

    @property
    def bits_per_byte(self) -> float:
        """The quotient; infinite for a model that gives some token no probability."""
        return self.of_documents.value


@dataclass(frozen=True)
class Window:
    """A stretch of a document that is read in one pass.

    Attributes:
        ids: int32 [n].
        counted: bool [n], the tokens that are scored here.
        start: which token of its document is the first one.
        document: whose it is.
    """

    ids: NDArray[np.int32]
    counted: NDArray[np.bool_]
    start: int = 0
    document: int = 0


@torch.no_grad()
def bits_per_byte(
    model: Cut,
    tokenizer: Tokenizer,
    corpus: Iterable[Document],
    *,
    batch_tokens: int = BATCH_TOKENS,
    max_length: int | None = None,
    by_kind: bool = False,
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
        by_kind: tell the kinds of text apart.

    Raises:
        XtkError: the limit is a single token.
    """
    limit = limit_of(model, max_length)
    training = model.training
    model.eval()
    bytes_of = BytesOfTokens(tokenizer.vocabulary.spellings) if by_kind else None
    bits, sizes = [np.zeros(0)], [np.zeros(0)]
    kinds = [np.zeros((0, 2, len(KINDS)))]
    tokens = windows = 0
    for documents in _groups(corpus):
        read = sequences(tokenizer, documents)
        pending = [
            replace(window, document=number)
            for number, sequence in enumerate(read)
            for window in windows_of_text(sequence, limit)
        ]
        texts = _Texts(documents, read) if by_kind else None
        found = np.zeros(len(documents))
        for batch in _batches(pending, batch_tokens):
            scored = _score(model, batch, bytes_of)
            found += np.bincount([window.document for window in batch], scored.bits(), len(documents))
            tokens += len(scored.logprobs)
            if texts is not None:
                texts.add(batch, scored)
        windows += len(pending)
        bits.append(found)
        sizes.append(np.array([counted_bytes(*pair) for pair in zip(documents, read, strict=True)], np.float64))
        if texts is not None:
            kinds.append(np.stack([texts.bits, texts.bytes], axis=1))
    model.train(training)
    whole = Ratio(np.concatenate(bits), np.concatenate(sizes))
    if not whole.counts.any():
        raise XtkError("there is no text to evaluate on: its documents are empty")
    of_kinds = np.concatenate(kinds)
    present = np.flatnonzero(of_kinds.any(axis=(0, 1))).tolist()
    named = {KINDS[kind]: Ratio(of_kinds[:, 0, kind], of_kinds[:, 1, kind]) for kind in present}
    return BitsPerByte(whole, tokens, windows, limit, named)


def limit_of(model: Cut, max_length: int | None) -> int | None:
    """Return how many tokens a model reads at once at most; None: as many as there are.

    Raises:
        XtkError: it is a single token.
    """
    limits = [limit for limit in (context_length(model.model.config), max_length) if limit]
    limit = min(limits) if limits else None
    if limit is not None and limit < 2:
        raise XtkError(f"--max-length is {limit}: no token has one before it that predicts it", hint="2 or more")
    return limit


def stride_of(limit: int) -> int:
    """Return by how many tokens a window is behind the one before it: half a context."""
    return max(1, limit // 2)


class _Texts:
    """The text of some documents, byte by byte, and what its kinds cost.

    Attributes:
        bits: float64 [documents, kinds].
        bytes: float64 [documents, kinds].
    """

    def __init__(self, documents: list[Document], read: list[Sequence]) -> None:
        self.bits, self.bytes = np.zeros((2, len(documents), len(KINDS)))
        self._kinds: list[NDArray[np.int8]] = []
        self._edges: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        for number, (document, sequence) in enumerate(zip(documents, read, strict=True)):
            kinds, counted = kinds_of(document), _counted_bytes(document, sequence)
            self.bytes[number] = np.bincount(kinds[counted], minlength=len(KINDS))
            places = np.flatnonzero(counted)
            # What lies on a byte that does not count (a prompt's, before a completion) goes with the next that does.
            nearest = np.minimum(np.searchsorted(places, np.arange(len(kinds) + 1)), max(len(places) - 1, 0))
            self._kinds.append(kinds[places[nearest]] if len(places) else np.full(len(nearest), WHITE, np.int8))
            starts = np.concatenate([np.zeros(1, np.int64), sequence.ends[:-1]])[: len(sequence)]
            starts[sequence.pieces[:, 0]] = sequence.pieces[:, 2]
            self._edges.append((starts, sequence.ends.astype(np.int64)))

    def add(self, batch: list[Window], tokens: _Scored) -> None:
        """Add what the counted tokens of a batch cost."""
        if not len(tokens.logprobs):
            return
        edges = [[side[window.start + np.flatnonzero(window.counted)] for side in self._edges[window.document]]
                 for window in batch]  # fmt: skip
        starts, stops = (np.concatenate(side) for side in zip(*edges, strict=True))
        masses = np.concatenate([masses for masses, _ in tokens.beginnings])
        sizes = np.concatenate([np.diff(offsets) for _, offsets in tokens.beginnings])
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        nats, places = lay_on_text(masses, offsets, tokens.logprobs, starts, stops)
        owners = np.repeat(np.repeat([window.document for window in batch], tokens.counts), sizes)
        order = np.argsort(owners, kind="stable")
        for part in np.split(order, np.flatnonzero(np.diff(owners[order])) + 1):
            number = int(owners[part[0]])
            kinds = self._kinds[number]
            of_bytes = kinds[np.minimum(places[part], len(kinds) - 1)]
            self.bits[number] += np.bincount(of_bytes, nats[part] / math.log(2), len(KINDS))


@dataclass(frozen=True)
class _Scored:
    """The counted tokens of a batch.

    Attributes:
        counts: int64 [windows], of each window.
        logprobs: float64 [n], natural.
        beginnings: as `BytesOfTokens.masses` returned them, part by part; none where nobody asked.
    """

    counts: NDArray[np.int64]
    logprobs: NDArray[np.float64]
    beginnings: list[tuple[NDArray[np.float64], NDArray[np.int64]]]

    def bits(self) -> NDArray[np.float64]:
        """Return float64 [windows]."""
        owners = np.repeat(np.arange(len(self.counts)), self.counts)
        return np.bincount(owners, -self.logprobs / math.log(2), len(self.counts)).astype(np.float64)


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
    return bytes_read(document, sequence, start=_first_predicted(sequence))


def _counted_bytes(document: Document, sequence: Sequence) -> NDArray[np.bool_]:
    """Return which bytes of the text those are, bool [bytes]."""
    trained = [np.full(len(segment.text.encode()), segment.train, np.bool_) for segment in document.segments]
    read = np.zeros(sum(map(len, trained)), np.bool_)
    for start, stop in sequence.byte_ranges().tolist():
        read[start:stop] = True
    read[: _first_predicted(sequence)] = False
    read &= np.concatenate([np.zeros(0, np.bool_), *trained])
    return read


def _first_predicted(sequence: Sequence) -> int:
    """Return the first byte that is predicted: without a start token nothing predicts the first token."""
    starts_at_once = len(sequence.pieces) > 0 and sequence.pieces[0, 0] == 0
    return int(sequence.ends[0]) if starts_at_once else 0


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


def windows_of(ids: NDArray[np.int32], counted: NDArray[np.bool_], limit: int | None) -> Iterator[Window]:
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
    done = limit
    while done < len(ids):
        stop = min(done + stride_of(limit), len(ids))
        start = stop - limit
        fresh = counted[start:stop].copy()
        fresh[: done - start] = False
        yield Window(ids[start:stop], fresh, start)
        done = stop


def _batches(windows: list[Window], tokens: int) -> Iterator[list[Window]]:
    ordered = sorted(windows, key=lambda window: -len(window.ids))
    start = 0
    while start < len(ordered):
        size = max(1, tokens // len(ordered[start].ids))
        yield ordered[start : start + size]
        start += size


def _score(model: Cut, batch: list[Window], bytes_of: BytesOfTokens | None) -> _Scored:
    """Read a batch, longest first; with `bytes_of`, also the beginnings of its counted tokens."""
    longest = len(batch[0].ids)
    ids = torch.zeros(len(batch), longest, dtype=torch.int64)
    counted = torch.zeros(len(batch), longest, dtype=torch.bool)
    for row, window in enumerate(batch):
        ids[row, : len(window.ids)] = torch.from_numpy(window.ids)
        counted[row, : len(window.ids)] = torch.from_numpy(window.counted)
    places = counted.flatten().nonzero()[:, 0]
    device = next(model.parameters()).device
    targets = ids.flatten()[places]
    beginnings: list[tuple[NDArray[np.float64], NDArray[np.int64]]] = []

    def look(rows: slice, exps: torch.Tensor) -> None:
        if bytes_of is not None:
            beginnings.append(bytes_of.masses(exps, targets[rows].tolist()))

    states = model(ids.to(device)).flatten(0, 1)[(places - 1).to(device)]
    logprobs, _ = read_rows(states, model.head, targets.to(device), inside=look)
    return _Scored(counted.sum(1).numpy(), logprobs.cpu().numpy(), beginnings)
