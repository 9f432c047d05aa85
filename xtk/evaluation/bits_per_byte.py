"""Bits per byte of a corpus: a language model's loss that does not depend on its tokenizer."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xtk.errors import XtkError
from xtk.evaluation.byte_text_categories import TEXT_CATEGORIES, WHITE_SPACE, categorize_bytes
from xtk.evaluation.standard_errors import Ratio
from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.causal_lm import max_context_length
from xtk.models.output_head import compute_token_logprobs
from xtk.numba_kernel import numba_kernel
from xtk.progress import Progress
from xtk.text.document import Document
from xtk.text.token_sequence import TokenSequence, count_preserved_bytes, tokenize_documents
from xtk.text.tokenizer import Tokenizer

READ_BATCH_SIZE = 256
BATCH_TOKENS = 8192
PREFIX_SUM_ROWS = 64  # rows of float64 prefix sums at a time


@dataclass(frozen=True)
class BitsPerByteResult:
    """Bits per byte over a corpus."""

    per_document: Ratio  # for each document, the bits of its trained text's tokens, and the bytes of that text in UTF-8
    num_tokens: int  # number of scored tokens
    num_windows: int  # number of windows into which all documents were split
    window_tokens: int | None  # largest number of tokens per window; None: unlimited
    num_skipped_bytes: int = 0  # bytes of the trained text before the first byte that all compared models predict
    # Bits and bytes of each document for each text category (a name of `TEXT_CATEGORIES`) that occurs; they sum to
    # those of the full text. Empty unless requested.
    per_category: dict[str, Ratio] = field(default_factory=dict)

    @property
    def bits(self) -> float:
        """Total bits over all documents."""
        return float(self.per_document.sums.sum())

    @property
    def bytes(self) -> int:
        """Total bytes over all documents."""
        return int(self.per_document.counts.sum())

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.per_document.sums)

    @property
    def stride(self) -> int | None:
        """Distance in tokens between consecutive windows of a long document; None: no windows."""
        return None if self.window_tokens is None else window_stride(self.window_tokens)

    @property
    def bits_per_byte(self) -> float:
        """Total bits over total bytes; infinite if a token has probability 0."""
        return self.per_document.value


@dataclass(frozen=True)
class ScoringWindow:
    """A range of a document's tokens that is processed in one forward pass."""

    ids: NDArray[np.int32]  # [n], token ids
    is_scored: NDArray[np.bool_]  # [n], the tokens that are scored in this window
    first_token: int = 0  # index of its first token in the document
    document_index: int = 0  # index of the document


@torch.no_grad()
def evaluate_bits_per_byte(
    model: BackboneWithHead,
    tokenizer: Tokenizer,
    corpus: Iterable[Document],
    *,
    batch_tokens: int = BATCH_TOKENS,
    max_length: int | None = None,
    by_category: bool = False,
    compared_with: Sequence[Tokenizer] = (),
) -> BitsPerByteResult:
    """Return the bits per byte of a model on a corpus.

    Every token of the text is scored once, after the model's start token; the end token is not scored. Without a start
    token the first token is not scored. A document longer than the context is split into windows that overlap by half,
    so that each token after the first window has about half a context before it; each window begins with the start
    token. Log-probabilities are summed in float64.

    Args:
        model: the model, on its device.
        corpus: documents; of a prompt with a completion, only the completion is scored.
        max_length: a smaller limit than the model's context, in tokens.
        by_category: also compute the result for each text category.
        compared_with: tokenizers of other models that are compared on the same bytes: each document is scored from the
            first token boundary of all models on, after which all models predict its text.
    """
    limit = max_input_tokens(model, max_length)
    training = model.training
    model.eval()
    bytes_of = TokenByteCosts(tokenizer.vocabulary.bytes_by_id) if by_category else None
    bits, sizes = [np.zeros(0)], [np.zeros(0)]
    categories = [np.zeros((0, 2, len(TEXT_CATEGORIES)))]
    tokens = windows = skipped = 0
    total = len(corpus) if isinstance(corpus, Sized) else None
    progress = Progress("evaluate", total, "documents")
    for documents in _read_batches(corpus, progress):
        read = tokenize_documents(tokenizer, documents)
        others = [tokenize_documents(other, documents) for other in compared_with]
        starts = [_shared_start(sequences) for sequences in zip(read, *others, strict=True)]
        pending = [
            replace(window, document_index=number)
            for number, (sequence, start) in enumerate(zip(read, starts, strict=True))
            for window in document_windows(sequence, limit, tokenizer.start_ids, start)
        ]
        texts = _CategoryCosts(documents, read, starts) if by_category else None
        document_bits = np.zeros(len(documents))
        waiting = _windows_per_document(pending, len(documents))
        progress.advance(int(np.count_nonzero(waiting == 0)))
        for batch in _batch_windows(pending, batch_tokens):
            scored = _score_batch(model, batch, bytes_of)
            before = np.count_nonzero(waiting)
            waiting -= _windows_per_document(batch, len(documents))
            progress.advance(int(before - np.count_nonzero(waiting)))
            document_bits += np.bincount([window.document_index for window in batch], scored.bits(), len(documents))
            tokens += len(scored.logprobs)
            if texts is not None:
                texts.add(batch, scored)
        windows += len(pending)
        bits.append(document_bits)
        counted = [num_predicted_bytes(*parts) for parts in zip(documents, read, starts, strict=True)]
        skipped += sum(num_predicted_bytes(*parts, 0) for parts in zip(documents, read, strict=True)) - sum(counted)
        sizes.append(np.array(counted, np.float64))
        if texts is not None:
            categories.append(np.stack([texts.bits, texts.bytes], axis=1))
    model.train(training)
    whole = Ratio(np.concatenate(bits), np.concatenate(sizes))
    if not whole.counts.any():
        raise XtkError(
            "the evaluation data has no text: all documents are empty",
            hint="use data with a non-empty text or completion in at least one row",
        )
    by_document = np.concatenate(categories)
    present = np.flatnonzero(by_document.any(axis=(0, 1))).tolist()
    named = {
        TEXT_CATEGORIES[category]: Ratio(by_document[:, 0, category], by_document[:, 1, category])
        for category in present
    }
    return BitsPerByteResult(whole, tokens, windows, limit, skipped, named)


def max_input_tokens(model: BackboneWithHead, max_length: int | None) -> int | None:
    """Return the largest number of tokens per window; None: unlimited."""
    limits = [limit for limit in (max_context_length(model.model.config), max_length) if limit]
    limit = min(limits) if limits else None
    if limit is not None and limit < 2:
        raise XtkError(
            f"--max-length must be at least 2, not {limit}: a token is scored given the token before it",
            hint="use --max-length 2048, or remove it to use the model's context length",
        )
    return limit


def window_stride(window_tokens: int) -> int:
    """Return the distance in tokens between consecutive windows: half a window."""
    return max(1, window_tokens // 2)


class _CategoryCosts:
    """Bits and bytes of some documents for each text category, both float64 [documents, categories]."""

    def __init__(self, documents: list[Document], read: list[TokenSequence], first_bytes: list[int]) -> None:
        self.bits, self.bytes = np.zeros((2, len(documents), len(TEXT_CATEGORIES)))
        self._categories: list[NDArray[np.int8]] = []
        self._edges: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        for number, (document, sequence, first) in enumerate(zip(documents, read, first_bytes, strict=True)):
            categories, scored_mask = categorize_bytes(document), _predicted_bytes(document, sequence, first)
            self.bytes[number] = np.bincount(categories[scored_mask], minlength=len(TEXT_CATEGORIES))
            indices = np.flatnonzero(scored_mask)
            # Bits on a byte that is not scored (of a prompt, before a completion) go to the next scored byte.
            nearest = np.minimum(np.searchsorted(indices, np.arange(len(categories) + 1)), max(len(indices) - 1, 0))
            self._categories.append(
                categories[indices[nearest]] if len(indices) else np.full(len(nearest), WHITE_SPACE, np.int8)
            )
            self._edges.append((sequence.byte_starts.astype(np.int64), sequence.byte_ends.astype(np.int64)))

    def add(self, batch: list[ScoringWindow], tokens: _ScoredTokens) -> None:
        """Add the bits of the scored tokens of a batch."""
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
        nats, indices = attribute_to_bytes(masses, offsets, tokens.logprobs, starts, stops)
        owners = np.repeat(np.repeat([window.document_index for window in batch], tokens.tokens_per_window), sizes)
        order = np.argsort(owners, kind="stable")
        for part in np.split(order, np.flatnonzero(np.diff(owners[order])) + 1):
            number = int(owners[part[0]])
            categories = self._categories[number]
            of_bytes = categories[np.minimum(indices[part], len(categories) - 1)]
            self.bits[number] += np.bincount(of_bytes, nats[part] / math.log(2), len(TEXT_CATEGORIES))


@dataclass(frozen=True)
class _ScoredTokens:
    """The scored tokens of a batch."""

    tokens_per_window: NDArray[np.int64]  # [windows], number of scored tokens of each window
    logprobs: NDArray[np.float64]  # [n], in nats
    # Results of `TokenByteCosts.prefix_masses`, chunk by chunk; empty unless requested.
    prefix_masses: list[tuple[NDArray[np.float64], NDArray[np.int64]]]

    def bits(self) -> NDArray[np.float64]:
        """Return the bits of each window, float64 [windows]."""
        owners = np.repeat(np.arange(len(self.tokens_per_window)), self.tokens_per_window)
        return np.bincount(owners, -self.logprobs / math.log(2), len(self.tokens_per_window)).astype(np.float64)


def _read_batches(corpus: Iterable[Document], progress: Progress) -> Iterator[list[Document]]:
    documents = iter(corpus)
    with progress:
        while group := list(islice(documents, READ_BATCH_SIZE)):
            yield group


def num_predicted_bytes(document: Document, sequence: TokenSequence, start: int | None = None) -> int:
    """Return the number of bytes of the trained text that are scored, from the first predicted one or `start` on.

    Marks of reasoning and tool calls count where the tokenizer has them as text, as their tokens do.
    """
    first = first_predicted_byte(sequence) if start is None else start
    return count_preserved_bytes(document, sequence, start=first, with_marks=True)


def _predicted_bytes(document: Document, sequence: TokenSequence, first_byte: int) -> NDArray[np.bool_]:
    """Return bool [bytes], the bytes of the text from `first_byte` on that are trained and scored."""
    trained = [np.full(len(segment.text.encode()), segment.train, np.bool_) for segment in document.segments]
    read = np.zeros(sum(map(len, trained)), np.bool_)
    for start, stop in sequence.byte_ranges().tolist():
        read[start:stop] = True
    read[:first_byte] = False
    read &= np.concatenate([np.zeros(0, np.bool_), *trained])
    return read


def first_predicted_byte(sequence: TokenSequence) -> int:
    """Return the index of the first predicted byte: without a start token nothing predicts the first token."""
    starts_at_once = len(sequence.text_runs) > 0 and sequence.text_runs[0, 0] == 0
    return int(sequence.byte_ends[0]) if starts_at_once else 0


def _shared_start(sequences: Sequence[TokenSequence]) -> int:
    """Return the first byte of a text that all models predict and at which all have a token boundary."""
    first = max(map(first_predicted_byte, sequences))
    if not first:
        return 0
    boundaries = set.intersection(*(set(sequence.byte_ends.tolist()) for sequence in sequences))
    last = max(int(sequence.byte_ends.max(initial=0)) for sequence in sequences)
    return min((byte for byte in boundaries if byte >= first), default=last)


def document_windows(
    sequence: TokenSequence, limit: int | None, start_ids: Sequence[int], first_byte: int = 0
) -> list[ScoringWindow]:
    """Return the windows of at most `limit` tokens in which the trained text of a document is scored.

    Each window begins with the model's start tokens if the document does. Tokens before `first_byte` are not scored.
    """
    scored_mask = sequence.train_mask & sequence.text_mask & (sequence.byte_starts >= first_byte)
    stop = int(np.flatnonzero(scored_mask)[-1]) + 1 if scored_mask.any() else 0
    ids = sequence.ids[:stop]
    front = start_ids if tuple(ids[: len(start_ids)].tolist()) == tuple(start_ids) else ()
    return list(split_into_windows(ids, scored_mask[:stop], limit, front)) if stop else []


def split_into_windows(
    ids: NDArray[np.int32], scored_mask: NDArray[np.bool_], limit: int | None, start_ids: Sequence[int] = ()
) -> Iterator[ScoringWindow]:
    """Yield the windows of a document [T] in order; each token of the mask is scored in one of them.

    `start_ids`: tokens with which the document begins, and each window.
    """
    if limit is None or len(ids) <= limit:
        yield ScoringWindow(ids, scored_mask)
        return
    yield ScoringWindow(ids[:limit], scored_mask[:limit])
    front = np.array(start_ids, np.int32)
    content = max(1, limit - len(front))
    done = limit
    while done < len(ids):
        stop = min(done + min(window_stride(limit), content), len(ids))
        start = stop - content
        fresh = np.concatenate([np.zeros(len(front), np.bool_), scored_mask[start:stop]])
        fresh[: len(front) + done - start] = False
        yield ScoringWindow(np.concatenate([front, ids[start:stop]]), fresh, start - len(front))
        done = stop


def _windows_per_document(windows: list[ScoringWindow], num_documents: int) -> NDArray[np.int64]:
    indices = np.array([window.document_index for window in windows], np.int64)
    return np.bincount(indices, minlength=num_documents)


def _batch_windows(windows: list[ScoringWindow], tokens: int) -> Iterator[list[ScoringWindow]]:
    ordered = sorted(windows, key=lambda window: -len(window.ids))
    start = 0
    while start < len(ordered):
        size = max(1, tokens // len(ordered[start].ids))
        yield ordered[start : start + size]
        start += size


def _score_batch(model: BackboneWithHead, batch: list[ScoringWindow], bytes_of: TokenByteCosts | None) -> _ScoredTokens:
    """Return the log-probabilities of a batch's scored tokens; with `bytes_of`, also the masses of their prefixes."""
    longest = len(batch[0].ids)
    ids = torch.zeros(len(batch), longest, dtype=torch.int64)
    scored_mask = torch.zeros(len(batch), longest, dtype=torch.bool)
    for row, window in enumerate(batch):
        ids[row, : len(window.ids)] = torch.from_numpy(window.ids)
        scored_mask[row, : len(window.ids)] = torch.from_numpy(window.is_scored)
    indices = scored_mask.flatten().nonzero()[:, 0]
    device = next(model.parameters()).device
    targets = ids.flatten()[indices]
    prefix_masses: list[tuple[NDArray[np.float64], NDArray[np.int64]]] = []

    def add_prefix_masses(rows: slice, exps: Tensor) -> None:
        if bytes_of is not None:
            prefix_masses.append(bytes_of.prefix_masses(exps, targets[rows].tolist()))

    states = model(ids.to(device)).flatten(0, 1)[(indices - 1).to(device)]
    logprobs, _ = compute_token_logprobs(states, model.head, targets.to(device), callback=add_prefix_masses)
    return _ScoredTokens(scored_mask.sum(1).numpy(), logprobs.cpu().numpy(), prefix_masses)


class TokenByteCosts:
    """Cost in nats of each byte of a token, given the token's earlier bytes.

    With M(b) the mass of all tokens that begin with the bytes b, byte j of a token costs `ln M(first j - 1) -
    ln M(first j)`. The last byte also costs `ln M(all) - ln P(token)`, because no longer token was chosen. The costs
    sum to `-ln P(token)`. So a space before a word costs what predicting a space costs, not an equal fraction of the
    word's cost.

    This is exact for the observed tokenization; it does not sum over other tokenizations of the same bytes, as the
    probability of the next byte would (Phan et al. 2024, arXiv 2410.09303).
    `spellings`: the bytes of each token; empty for control tokens.
    """

    def __init__(self, spellings: Sequence[bytes]) -> None:
        self._spellings = spellings
        order = sorted((token for token, spelling in enumerate(spellings) if spelling), key=spellings.__getitem__)
        self._sorted = [spellings[token] for token in order]
        self._order = torch.tensor(order, dtype=torch.int64)
        self._ranges: dict[int, NDArray[np.int64]] = {}

    def prefix_ranges(self, token: int) -> NDArray[np.int64]:
        """Return int64 [bytes, 2]: for each prefix of a token, the range of tokens in byte order with that prefix.

        For a token without bytes this is one range: all tokens with bytes.
        """
        if token not in self._ranges:
            spelling = self._spellings[token] if token < len(self._spellings) else b""
            ranges = [
                (bisect_left(self._sorted, spelling[:size]), self._range_end(spelling[:size]))
                for size in range(1, len(spelling) + 1)
            ]
            self._ranges[token] = np.array(ranges or [(0, len(self._sorted))], np.int64)
        return self._ranges[token]

    def _range_end(self, beginning: bytes) -> int:
        """Return the end of the range of tokens, in byte order, that begin with some bytes."""
        kept = beginning.rstrip(b"\xff")
        if not kept:
            return len(self._sorted)
        return bisect_left(self._sorted, kept[:-1] + bytes([kept[-1] + 1]))

    def prefix_masses(self, exps: Tensor, tokens: Sequence[int]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return the mass of each prefix of some tokens [n] in rows [n, V] proportional to probabilities.

        float64 [prefixes], concatenated over tokens, at least one each; and int64 [n + 1], the range of each token.
        """
        self._order = self._order.to(exps.device)
        ranges = [self.prefix_ranges(token) for token in tokens]
        offsets = np.cumsum([0, *map(len, ranges)])
        prefix_sums = np.zeros(int(offsets[-1]))
        for start in range(0, len(tokens), PREFIX_SUM_ROWS):
            part = exps[start : start + PREFIX_SUM_ROWS]
            sums = torch.zeros(len(part), len(self._order) + 1, dtype=torch.float64, device=exps.device)
            torch.cumsum(part[:, self._order], 1, dtype=torch.float64, out=sums[:, 1:])
            edges = offsets[start : start + len(part) + 1]
            rows = torch.from_numpy(np.repeat(np.arange(len(part)), np.diff(edges))).to(exps.device)
            byte_indices = torch.from_numpy(np.concatenate(ranges[start : start + len(part)])).to(exps.device)
            masses = (sums[rows, byte_indices[:, 1]] - sums[rows, byte_indices[:, 0]]) / part.double().sum(1)[rows]
            prefix_sums[edges[0] : edges[-1]] = masses.cpu().numpy()
        return prefix_sums, offsets


@numba_kernel
def attribute_to_bytes(
    masses: NDArray[np.float64],
    offsets: NDArray[np.int64],
    logprobs: NDArray[np.float64],
    starts: NDArray[np.int64],
    stops: NDArray[np.int64],
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the cost of each byte of some tokens, and the byte of the text to which it belongs.

    Most tokens have as many bytes as their range of the text. If a token has more (a space added by the tokenizer), the
    excess goes to the first byte of its range; if it has fewer (normalization removed some), the last bytes of the
    range get nothing. The cost of a token with an empty range goes to the next byte.

    Args:
        masses: float64 [prefixes], from `TokenByteCosts.prefix_masses`.
        offsets: int64 [n + 1], the prefixes of each token.
        logprobs: float64 [n], log-probabilities of the tokens, in nats.
        starts: int64 [n], byte offset in the text where each token begins.
        stops: int64 [n], byte offset where it ends.

    Returns:
        float64 [prefixes], costs in nats, which sum to minus the log-probability for each token; and int64 [prefixes].
    """
    costs, byte_indices = np.zeros(len(masses)), np.zeros(len(masses), np.int64)
    for token in range(len(logprobs)):
        first, last = offsets[token], offsets[token + 1] - 1
        ahead = max(0, last + 1 - first - (stops[token] - starts[token]))
        for at in range(first, last + 1):
            byte_indices[at] = starts[token] + max(0, at - first - ahead)
        if logprobs[token] == -np.inf:  # unknown which of its bytes was impossible
            costs[last] = np.inf
            continue
        if np.isnan(logprobs[token]):
            costs[first : last + 1] = np.nan
            continue
        # Differences of prefix sums have rounding errors; a prefix is at least as likely as its continuation.
        next_logprob = logprobs[token]
        for at in range(last, first - 1, -1):
            prefix_logprob = next_logprob if masses[at] <= 0 else min(0.0, max(next_logprob, math.log(masses[at])))
            if at == last:
                costs[at] += prefix_logprob - next_logprob
            else:
                costs[at + 1] += prefix_logprob - next_logprob
            next_logprob = prefix_logprob
        costs[first] -= next_logprob
    return costs, byte_indices
