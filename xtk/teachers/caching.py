"""Filling a teacher cache: read, plan shards, score, write; and go on after a kill."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk import terminal
from xtk.artifacts.corpus import Corpus, Fingerprint
from xtk.artifacts.hub import fingerprint_of_weights
from xtk.artifacts.teacher_cache import CODEC, CacheWriter, Row, finished_cache, remove_cache, totals
from xtk.errors import XtkError
from xtk.lookup import lookup
from xtk.teachers import BACKENDS
from xtk.tokens.document import Document
from xtk.tokens.rewriting import Rewriting, rewriting
from xtk.tokens.sequence import Sequence, left_out, sequences, told_rewritten
from xtk.tokens.tokenizer import Tokenizer

LONG_DOCUMENTS = ("refuse", "truncate", "split", "skip")
READ_AT_ONCE = 1024
LOOKED_AT = 1000  # documents in which what the tokenizer cannot spell is counted


@dataclass(frozen=True)
class CacheRequest:
    """What a cache is to hold.

    Attributes:
        teacher: a local model folder.
        name: how messages call it.
        top_k: ids in the support of a position.
        dtype: of the teacher's weights and arithmetic.
        backend: who runs it.
        long_documents: what becomes of documents longer than the teacher's context (or `max_length`).
        max_length: a smaller limit than the context; None: the context.
        batch_tokens: padded tokens in a forward pass.
        shard_tokens: teacher tokens in a shard; a kill loses at most one shard's work.
    """

    teacher: Path
    name: str
    top_k: int = 64
    dtype: str = "float32"
    backend: str = "transformers"
    long_documents: str = "refuse"
    max_length: int | None = None
    batch_tokens: int = 8192
    shard_tokens: int = 65536
    trust_remote_code: bool = False


@dataclass(frozen=True)
class _Plan:
    """What reading the data once tells: the length of each piece that will be cached."""

    lengths: NDArray[np.int64]
    fingerprint: str
    too_long: int

    def shards(self, tokens: int) -> list[tuple[int, int]]:
        """Deal documents to shards in order: as many as fit `tokens`, at least one."""
        ranges, first, held = [], 0, 0
        for number, length in enumerate(self.lengths.tolist()):
            if held and held + length > tokens:
                ranges.append((first, number))
                first, held = number, 0
            held += length
        return [*ranges, (first, len(self.lengths))]


def cache_teacher(request: CacheRequest, corpus: Corpus, folder: Path, *, force: bool = False) -> dict[str, Any]:
    """Score a corpus with a teacher into a cache; finished shards of a killed run are kept.

    Args:
        request: what it is to hold.
        corpus: the documents, read twice: once to plan, once to score.
        folder: where the cache goes.
        force: replace whatever cache is there.

    Returns:
        `documents`, `positions`, `tokens`, `bytes` of the finished cache.

    Raises:
        XtkError: the data is empty or too long for the teacher, the folder holds another cache, a model cannot be
            loaded.
    """
    if request.max_length is not None and request.max_length < 4:
        raise XtkError(f"--max-length is {request.max_length}; a document has at least 4 tokens")
    if request.top_k < 1:
        raise XtkError(f"--top-k is {request.top_k}; a support holds at least one id")
    tokenizer = Tokenizer(request.teacher, name=request.name)
    limit = _limit(request)
    plan = _plan(request, corpus, tokenizer, limit)
    header = _header(request, tokenizer, plan)
    teacher = _teacher(request, tokenizer) if force else None  # what cannot be made anew is not removed
    if force:
        remove_cache(folder)
    if finished := finished_cache(folder, header):
        return totals(finished)
    ranges = plan.shards(request.shard_tokens)
    writer = CacheWriter(folder, header, len(ranges))
    missing = set(writer.missing())
    if missing:
        if len(missing) < len(ranges):
            terminal.note(f"cache-teacher: going on, {len(ranges) - len(missing)} of {len(ranges)} shards are there")
        _score(
            teacher or _teacher(request, tokenizer), request, corpus, tokenizer, limit, plan, writer, ranges, missing
        )
    writer.write_tokenizer(tokenizer.files())
    return totals(writer.finish())


def _teacher(request: CacheRequest, tokenizer: Tokenizer) -> Any:
    teacher = lookup(BACKENDS, request.backend, "backend")(
        request.teacher,
        dtype=request.dtype,
        batch_tokens=request.batch_tokens,
        trust_remote_code=request.trust_remote_code,
    )
    if teacher.width < len(tokenizer):
        raise XtkError(
            f"the teacher has {teacher.width:,} vocabulary rows; its tokenizer names {len(tokenizer):,} tokens",
            where=request.name,
        )
    return teacher


def _score(
    teacher: Any,
    request: CacheRequest,
    corpus: Corpus,
    tokenizer: Tokenizer,
    limit: int | None,
    plan: _Plan,
    writer: CacheWriter,
    ranges: list[tuple[int, int]],
    missing: set[int],
) -> None:
    fingerprint = Fingerprint()
    pieces = _pieces(request, corpus, tokenizer, limit, fingerprint)
    done = int(sum(plan.lengths[low:high].sum() for at, (low, high) in enumerate(ranges) if at not in missing))
    with terminal.Progress("cache-teacher", int(plan.lengths.sum()), "tokens", done=done) as progress:
        for number, (first, last) in enumerate(ranges):
            batch = list(itertools.islice(pieces, last - first))
            if [len(tokens) for _, tokens in batch] != plan.lengths[first:last].tolist():
                raise _changed(corpus)
            if number not in missing:
                continue
            signals = teacher.score([tokens for _, tokens in batch], request.top_k)
            rows = [Row(document, tokens, signal) for (document, tokens), signal in zip(batch, signals, strict=True)]
            writer.write(number, first, rows)
            progress.advance(int(plan.lengths[first:last].sum()))
    if next(pieces, None) is not None or str(fingerprint) != plan.fingerprint:
        raise _changed(corpus)


def _changed(corpus: Corpus) -> XtkError:
    return XtkError("the data changed while it was read", where=corpus.name, hint="--force, once it stands still")


def _plan(request: CacheRequest, corpus: Corpus, tokenizer: Tokenizer, limit: int | None) -> _Plan:
    fingerprint = Fingerprint()
    lengths: list[int] = []
    too_long: list[tuple[int, int]] = []
    rewritten: list[int] = []
    documents = empty = 0
    lost = Rewriting(tokenizer.name)
    for document, tokens in _tokenised(corpus, tokenizer, fingerprint):
        if document.conversation is not None:
            rewritten.append(left_out(document, tokens))
        elif documents < LOOKED_AT and len(tokens.pieces):
            lost += rewriting(tokenizer, [document.text], [tokens.piece(0)])
        if limit is not None and len(tokens) > limit:
            too_long.append((documents, len(tokens)))
        empty += not document.text
        lengths += [len(piece) for _, piece in _within(tokenizer, document, tokens, limit, request.long_documents)]
        documents += 1
    if too_long:
        _tell_too_long(request, corpus, limit, too_long, documents)
    if empty:
        terminal.note(f"cache-teacher: {empty:,} of {documents:,} documents are empty; nothing of them is trained")
    if warning := lost.warning():
        terminal.note(f"cache-teacher: {warning}")
    if sum(rewritten):
        terminal.note("cache-teacher: " + told_rewritten(rewritten))
    if empty == documents or not lengths:
        raise XtkError("there is no text in this corpus", where=corpus.name)
    return _Plan(np.array(lengths, np.int64), str(fingerprint), len(too_long))


def _tell_too_long(
    request: CacheRequest, corpus: Corpus, limit: int | None, too_long: list[tuple[int, int]], documents: int
) -> None:
    number, length = max(too_long, key=lambda pair: pair[1])
    counted = (
        f"{len(too_long):,} of {documents:,} documents are longer than the {limit:,} tokens that the teacher reads"
        if request.max_length is None
        else f"{len(too_long):,} of {documents:,} documents are longer than --max-length {limit:,}"
    )
    if request.long_documents == "refuse":
        raise XtkError(
            counted,
            where=f"{corpus.name}; the longest is document {number} with {length:,} tokens",
            hint="--long-documents split, truncate or skip",
        )
    terminal.note(f"cache-teacher: {counted}: --long-documents {request.long_documents}")


def _within(
    tokenizer: Tokenizer, document: Document, tokens: Sequence, limit: int | None, long_documents: str
) -> Iterator[tuple[Document, Sequence]]:
    """Yield a document as it is cached: whole, or what `--long-documents` makes of one that is too long."""
    if limit is None or len(tokens) <= limit:
        yield document, tokens
    elif document.conversation is not None:
        if long_documents == "split":
            raise XtkError(
                "a conversation is longer than the teacher reads; its turns follow from each other and are not split",
                hint="--long-documents truncate or skip",
            )
        if long_documents != "skip":
            yield document, tokens.cut(limit)
    elif long_documents in ("refuse", "truncate"):
        yield next(_split(tokenizer, document, tokens, limit))
    elif long_documents == "split":
        yield from _split(tokenizer, document, tokens, limit)


def _split(
    tokenizer: Tokenizer, document: Document, tokens: Sequence, limit: int
) -> Iterator[tuple[Document, Sequence]]:
    """Cut a long document into pieces, documents of their own, of at most `limit` tokens each.

    Cuts fall where a token ends on a character's edge. A piece is tokenised anew, so that what a student reads
    is what the teacher read.
    """
    text = document.text.encode()
    ends = tokens.ends[tokens.spells]
    ends = np.unique(ends[[end > 0 and (end == len(text) or text[end] & 0xC0 != 0x80) for end in ends.tolist()]])
    # An end token, and a little room: a piece may have a token more than it had inside the whole.
    room = max(1, limit - int(tokens.pieces[0, 0]) - 2 - limit // 64)
    start = 0
    while start < len(text):
        held = int(np.searchsorted(ends, start, side="right"))
        for size in (room, room // 2, room // 4, 1):
            stop = int(ends[min(held + max(size, 1) - 1, len(ends) - 1)])
            piece = document.piece(start, stop)
            (sequence,) = sequences(tokenizer, [piece])
            if len(sequence) <= limit:
                break
        yield piece, sequence
        start = stop


def _pieces(
    request: CacheRequest, corpus: Corpus, tokenizer: Tokenizer, limit: int | None, fingerprint: Fingerprint
) -> Iterator[tuple[Document, Sequence]]:
    for document, tokens in _tokenised(corpus, tokenizer, fingerprint):
        yield from _within(tokenizer, document, tokens, limit, request.long_documents)


def _tokenised(corpus: Corpus, tokenizer: Tokenizer, fingerprint: Fingerprint) -> Iterator[tuple[Document, Sequence]]:
    documents: list[Document] = []
    first = 0
    for document in corpus:
        fingerprint.add(document)
        documents.append(document)
        if len(documents) == READ_AT_ONCE:
            yield from zip(documents, _read(tokenizer, documents, corpus, first), strict=True)
            first += len(documents)
            documents = []
    yield from zip(documents, _read(tokenizer, documents, corpus, first), strict=True)


def _read(tokenizer: Tokenizer, documents: list[Document], corpus: Corpus, first: int) -> list[Sequence]:
    """Tokenise documents; a conversation that the chat template refuses is named by its number."""
    try:
        return sequences(tokenizer, documents)
    except XtkError:
        for number, document in enumerate(documents, start=first):
            try:
                sequences(tokenizer, [document])
            except XtkError as wrong:
                where = f"{corpus.name}, document {number}; {wrong.where}"
                raise XtkError(wrong.what, where=where, hint=wrong.hint) from None
        raise


def _limit(request: CacheRequest) -> int | None:
    from transformers import AutoConfig

    from xtk.models.causal_lm import context_length, loading_error, quieten_transformers

    quieten_transformers()
    if not (request.teacher / "config.json").is_file():
        raise XtkError("there is no model in this folder (config.json)", where=request.name)

    try:
        configuration = AutoConfig.from_pretrained(
            request.teacher, local_files_only=True, trust_remote_code=request.trust_remote_code
        )
    except Exception as wrong:
        raise loading_error(request.teacher, wrong) from wrong
    context = context_length(configuration)
    limits = [limit for limit in (context, request.max_length) if limit is not None]
    return min(limits) if limits else None


def _header(request: CacheRequest, tokenizer: Tokenizer, plan: _Plan) -> dict[str, Any]:
    return {
        "kind": "teacher-cache",
        "codec": CODEC,
        "teacher": {
            "name": request.teacher.resolve().name,
            "weights": fingerprint_of_weights(request.teacher),
            "tokenizer": tokenizer.fingerprint,
            "template": tokenizer.template_fingerprint,
            "width": tokenizer.width,
        },
        "data": {"documents": plan.fingerprint, "rows": len(plan.lengths), "too_long": plan.too_long},
        "options": {
            "support": "top-k",
            "top_k": request.top_k,
            "dtype": request.dtype,
            "backend": request.backend,
            "long_documents": request.long_documents,
            "max_length": request.max_length,
            "batch_tokens": request.batch_tokens,
            "shard_tokens": request.shard_tokens,
        },
    }
