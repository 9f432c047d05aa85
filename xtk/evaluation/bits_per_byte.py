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
from xtk.evaluation.byte_attribution import TokenByteCosts, attribute_to_bytes
from xtk.evaluation.standard_errors import Ratio
from xtk.evaluation.text_categories import TEXT_CATEGORIES, WHITE_SPACE, categorize_bytes
from xtk.evaluation.token_logprobs import compute_token_logprobs
from xtk.models.causal_lm import BackboneWithHead, max_context_length
from xtk.tokens.document import Document
from xtk.tokens.token_sequence import TokenSequence, count_preserved_bytes, tokenize_documents
from xtk.tokens.tokenizer import Tokenizer

READ_BATCH_SIZE = 256
BATCH_TOKENS = 8192


@dataclass(frozen=True)
class BitsPerByteResult:
    """The result over a corpus.

    Attributes:
        per_document: bits and bytes of each document: of the tokens of its trained text, and of that text in UTF-8.
        num_tokens: that were scored.
        num_windows: forward passes a document of more than the context was cut into, over all documents.
        window_tokens: tokens that are read at once at most; None: as many as a document has.
        per_category: bits and bytes of each document by the kind of text (a name of `KINDS`), as far as there is some;
            they
            sum to those of all. Empty where nobody asked.
    """

    per_document: Ratio
    num_tokens: int
    num_windows: int
    window_tokens: int | None
    per_category: dict[str, Ratio] = field(default_factory=dict)

    @property
    def bits(self) -> float:
        """Summed over documents."""
        return float(self.per_document.sums.sum())

    @property
    def bytes(self) -> int:
        """Summed over documents."""
        return int(self.per_document.counts.sum())

    @property
    def num_documents(self) -> int:
        """How many."""
        return len(self.per_document.sums)

    @property
    def stride(self) -> int | None:
        """By how many tokens each window of a long document is behind the one before it."""
        return None if self.window_tokens is None else window_stride(self.window_tokens)

    @property
    def bits_per_byte(self) -> float:
        """The quotient; infinite for a model that gives some token no probability."""
        return self.per_document.value


@dataclass(frozen=True)
class ScoringWindow:
    """A stretch of a document that is read in one pass.

    Attributes:
        ids: int32 [n].
        is_scored: bool [n], the tokens that are scored here.
        first_token: which token of its document is the first one.
        document_index: whose it is.
    """

    ids: NDArray[np.int32]
    is_scored: NDArray[np.bool_]
    first_token: int = 0
    document_index: int = 0


@torch.no_grad()
def evaluate_bits_per_byte(
    model: BackboneWithHead,
    tokenizer: Tokenizer,
    corpus: Iterable[Document],
    *,
    batch_tokens: int = BATCH_TOKENS,
    max_length: int | None = None,
    by_category: bool = False,
) -> BitsPerByteResult:
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
        by_category: tell the kinds of text apart.

    Raises:
        XtkError: the limit is a single token.
    """
    limit = max_input_tokens(model, max_length)
    training = model.training
    model.eval()
    bytes_of = TokenByteCosts(tokenizer.vocabulary.bytes_by_id) if by_category else None
    bits, sizes = [np.zeros(0)], [np.zeros(0)]
    kinds = [np.zeros((0, 2, len(TEXT_CATEGORIES)))]
    tokens = windows = 0
    for documents in _read_batches(corpus):
        read = tokenize_documents(tokenizer, documents)
        pending = [
            replace(window, document_index=number)
            for number, sequence in enumerate(read)
            for window in document_windows(sequence, limit)
        ]
        texts = _CategoryCosts(documents, read) if by_category else None
        found = np.zeros(len(documents))
        for batch in _batch_windows(pending, batch_tokens):
            scored = _score_batch(model, batch, bytes_of)
            found += np.bincount([window.document_index for window in batch], scored.bits(), len(documents))
            tokens += len(scored.logprobs)
            if texts is not None:
                texts.add(batch, scored)
        windows += len(pending)
        bits.append(found)
        sizes.append(np.array([num_predicted_bytes(*pair) for pair in zip(documents, read, strict=True)], np.float64))
        if texts is not None:
            kinds.append(np.stack([texts.bits, texts.bytes], axis=1))
    model.train(training)
    whole = Ratio(np.concatenate(bits), np.concatenate(sizes))
    if not whole.counts.any():
        raise XtkError("there is no text to evaluate on: its documents are empty")
    of_kinds = np.concatenate(kinds)
    present = np.flatnonzero(of_kinds.any(axis=(0, 1))).tolist()
    named = {TEXT_CATEGORIES[kind]: Ratio(of_kinds[:, 0, kind], of_kinds[:, 1, kind]) for kind in present}
    return BitsPerByteResult(whole, tokens, windows, limit, named)


def max_input_tokens(model: BackboneWithHead, max_length: int | None) -> int | None:
    """Return how many tokens a model reads at once at most; None: as many as there are.

    Raises:
        XtkError: it is a single token.
    """
    limits = [limit for limit in (max_context_length(model.model.config), max_length) if limit]
    limit = min(limits) if limits else None
    if limit is not None and limit < 2:
        raise XtkError(f"--max-length is {limit}: no token has one before it that predicts it", hint="2 or more")
    return limit


def window_stride(window_tokens: int) -> int:
    """Return by how many tokens a window is behind the one before it: half a context."""
    return max(1, window_tokens // 2)


class _CategoryCosts:
    """The text of some documents, byte by byte, and what its kinds cost.

    Attributes:
        bits: float64 [documents, kinds].
        bytes: float64 [documents, kinds].
    """

    def __init__(self, documents: list[Document], read: list[TokenSequence]) -> None:
        self.bits, self.bytes = np.zeros((2, len(documents), len(TEXT_CATEGORIES)))
        self._kinds: list[NDArray[np.int8]] = []
        self._edges: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        for number, (document, sequence) in enumerate(zip(documents, read, strict=True)):
            kinds, counted = categorize_bytes(document), _predicted_bytes(document, sequence)
            self.bytes[number] = np.bincount(kinds[counted], minlength=len(TEXT_CATEGORIES))
            places = np.flatnonzero(counted)
            # What lies on a byte that does not count (a prompt's, before a completion) goes with the next that does.
            nearest = np.minimum(np.searchsorted(places, np.arange(len(kinds) + 1)), max(len(places) - 1, 0))
            self._kinds.append(kinds[places[nearest]] if len(places) else np.full(len(nearest), WHITE_SPACE, np.int8))
            starts = np.concatenate([np.zeros(1, np.int64), sequence.byte_ends[:-1]])[: len(sequence)]
            starts[sequence.text_runs[:, 0]] = sequence.text_runs[:, 2]
            self._edges.append((starts, sequence.byte_ends.astype(np.int64)))

    def add(self, batch: list[ScoringWindow], tokens: _ScoredTokens) -> None:
        """Add what the counted tokens of a batch cost."""
        if not len(tokens.logprobs):
            return
        edges = [
            [side[window.first_token + np.flatnonzero(window.is_scored)] for side in self._edges[window.document_index]]
            for window in batch
        ]
        starts, stops = (np.concatenate(side) for side in zip(*edges, strict=True))
        masses = np.concatenate([masses for masses, _ in tokens.prefix_masses])
        sizes = np.concatenate([np.diff(offsets) for _, offsets in tokens.prefix_masses])
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        nats, places = attribute_to_bytes(masses, offsets, tokens.logprobs, starts, stops)
        owners = np.repeat(np.repeat([window.document_index for window in batch], tokens.tokens_per_window), sizes)
        order = np.argsort(owners, kind="stable")
        for part in np.split(order, np.flatnonzero(np.diff(owners[order])) + 1):
            number = int(owners[part[0]])
            kinds = self._kinds[number]
            of_bytes = kinds[np.minimum(places[part], len(kinds) - 1)]
            self.bits[number] += np.bincount(of_bytes, nats[part] / math.log(2), len(TEXT_CATEGORIES))


@dataclass(frozen=True)
class _ScoredTokens:
    """The counted tokens of a batch.

    Attributes:
        tokens_per_window: int64 [windows], of each window.
        logprobs: float64 [n], natural.
        prefix_masses: as `BytesOfTokens.masses` returned them, part by part; none where nobody asked.
    """

    tokens_per_window: NDArray[np.int64]
    logprobs: NDArray[np.float64]
    prefix_masses: list[tuple[NDArray[np.float64], NDArray[np.int64]]]

    def bits(self) -> NDArray[np.float64]:
        """Return float64 [windows]."""
        owners = np.repeat(np.arange(len(self.tokens_per_window)), self.tokens_per_window)
        return np.bincount(owners, -self.logprobs / math.log(2), len(self.tokens_per_window)).astype(np.float64)


def _read_batches(corpus: Iterable[Document]) -> Iterator[list[Document]]:
    group: list[Document] = []
    total = len(corpus) if isinstance(corpus, list) else 0
    with terminal.Progress("evaluate", total, "documents") if total > READ_BATCH_SIZE else _NoProgress() as progress:
        for document in corpus:
            group.append(document)
            if len(group) == READ_BATCH_SIZE:
                yield group
                progress.advance(len(group))
                group = []
        if group:
            yield group


def num_predicted_bytes(document: Document, sequence: TokenSequence) -> int:
    """Return how many bytes of the trained text are predicted."""
    return count_preserved_bytes(document, sequence, start=_first_predicted_byte(sequence))


def _predicted_bytes(document: Document, sequence: TokenSequence) -> NDArray[np.bool_]:
    """Return which bytes of the text those are, bool [bytes]."""
    trained = [np.full(len(segment.text.encode()), segment.train, np.bool_) for segment in document.segments]
    read = np.zeros(sum(map(len, trained)), np.bool_)
    for start, stop in sequence.byte_ranges().tolist():
        read[start:stop] = True
    read[: _first_predicted_byte(sequence)] = False
    read &= np.concatenate([np.zeros(0, np.bool_), *trained])
    return read


def _first_predicted_byte(sequence: TokenSequence) -> int:
    """Return the first byte that is predicted: without a start token nothing predicts the first token."""
    starts_at_once = len(sequence.text_runs) > 0 and sequence.text_runs[0, 0] == 0
    return int(sequence.byte_ends[0]) if starts_at_once else 0


class _NoProgress:
    def __enter__(self) -> _NoProgress:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def advance(self, amount: int, detail: str = "") -> None:
        pass


def document_windows(sequence: TokenSequence, limit: int | None) -> list[ScoringWindow]:
    """Return the windows in which the trained text of a document is scored; none if there is nothing to score."""
    counted = sequence.train_mask & sequence.text_mask
    stop = int(np.flatnonzero(counted)[-1]) + 1 if counted.any() else 0
    return list(split_into_windows(sequence.ids[:stop], counted[:stop], limit)) if stop else []


def split_into_windows(
    ids: NDArray[np.int32], counted: NDArray[np.bool_], limit: int | None
) -> Iterator[ScoringWindow]:
    """Yield the windows of a document; the first one is its beginning.

    Args:
        ids: int32 [T].
        counted: bool [T], the tokens that are scored; each is in one window.
        limit: of a window; None: the document is one.
    """
    if limit is None or len(ids) <= limit:
        yield ScoringWindow(ids, counted)
        return
    yield ScoringWindow(ids[:limit], counted[:limit])
    done = limit
    while done < len(ids):
        stop = min(done + window_stride(limit), len(ids))
        start = stop - limit
        fresh = counted[start:stop].copy()
        fresh[: done - start] = False
        yield ScoringWindow(ids[start:stop], fresh, start)
        done = stop


def _batch_windows(windows: list[ScoringWindow], tokens: int) -> Iterator[list[ScoringWindow]]:
    ordered = sorted(windows, key=lambda window: -len(window.ids))
    start = 0
    while start < len(ordered):
        size = max(1, tokens // len(ordered[start].ids))
        yield ordered[start : start + size]
        start += size


def _score_batch(model: BackboneWithHead, batch: list[ScoringWindow], bytes_of: TokenByteCosts | None) -> _ScoredTokens:
    """Read a batch, longest first; with `bytes_of`, also the beginnings of its counted tokens."""
    longest = len(batch[0].ids)
    ids = torch.zeros(len(batch), longest, dtype=torch.int64)
    counted = torch.zeros(len(batch), longest, dtype=torch.bool)
    for row, window in enumerate(batch):
        ids[row, : len(window.ids)] = torch.from_numpy(window.ids)
        counted[row, : len(window.ids)] = torch.from_numpy(window.is_scored)
    places = counted.flatten().nonzero()[:, 0]
    device = next(model.parameters()).device
    targets = ids.flatten()[places]
    beginnings: list[tuple[NDArray[np.float64], NDArray[np.int64]]] = []

    def look(rows: slice, exps: torch.Tensor) -> None:
        if bytes_of is not None:
            beginnings.append(bytes_of.prefix_masses(exps, targets[rows].tolist()))

    states = model(ids.to(device)).flatten(0, 1)[(places - 1).to(device)]
    logprobs, _ = compute_token_logprobs(states, model.head, targets.to(device), callback=look)
    return _ScoredTokens(counted.sum(1).numpy(), logprobs.cpu().numpy(), beginnings)
