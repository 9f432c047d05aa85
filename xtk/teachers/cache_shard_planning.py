"""Assignment of documents to the shards of a cache, and reading of the documents of each shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from xtk import terminal
from xtk.data.corpus_reader import Corpus, CorpusFingerprint
from xtk.data.record_to_document import OPT_IN_FIELDS
from xtk.errors import XtkError
from xtk.progress import phase
from xtk.text.document import Document
from xtk.text.normalization_changes import NormalizationLoss, count_normalization_loss
from xtk.text.teacher_tokenization import teacher_views
from xtk.text.token_sequence import TokenSequence, count_lost_bytes, format_lost_bytes, tokenize_documents
from xtk.text.tokenizer import Tokenizer

Chunk = tuple[Document, TokenSequence]  # a document, or a piece of it, with its teacher tokens
LONG_DOCUMENTS = ("refuse", "truncate", "split", "skip")
READ_BATCH_SIZE = 1024
MAX_CHECKED_DOCUMENTS = 1000  # documents checked for text that the tokenizer cannot represent


@dataclass(frozen=True)
class ShardingOptions:
    """How documents are limited in length and assigned to shards."""

    # Maximum tokens of a document: of the teacher's context and `max_length`; None: no limit
    max_document_tokens: int | None
    max_length: int | None  # the value of --max-length, if given
    long_documents: str  # treatment of longer documents, one of `LONG_DOCUMENTS`
    shard_tokens: int  # teacher tokens per shard


@dataclass(frozen=True)
class PlannedShard:
    """The chunks of documents in a shard. A document has one chunk, or several if it is too long and is split."""

    first_document: int  # first and last document, both included
    last_document: int
    skipped_chunks: int  # chunks of the first document that are in the previous shard
    num_chunks: int  # chunks in the shard
    num_tokens: int  # teacher tokens in the shard


@dataclass
class ShardPlan:
    """The shards of a cache and statistics of its data. Its size depends on the number of shards, not of documents."""

    shard_tokens: int  # maximum teacher tokens per shard, unless a single document has more
    token_counts: NDArray[np.int64]  # int64 [U], occurrences of each teacher token
    shards: list[PlannedShard] = field(default_factory=list)  # content of each shard
    num_documents: int = 0  # documents read
    num_chunks: int = 0  # rows of the cache
    num_tokens: int = 0  # teacher tokens in these rows
    num_positions: int = 0  # trained tokens among them
    fingerprint: str = ""  # of the documents
    num_too_long: int = 0  # documents longer than the maximum length
    max_chunk_tokens: int = 0  # tokens of the longest row
    optional_columns: list[str] = field(default_factory=list)  # optional columns of the cache, in order

    def chunks_per_shard(self) -> list[int]:
        """Return the number of rows of each shard."""
        return [shard.num_chunks for shard in self.shards]

    def add_chunk(self, document: int, chunk: int, sequence: TokenSequence) -> None:
        """Assign the next chunk to the last shard if it fits, else to a new shard, and count its tokens."""
        size, last = len(sequence), self.shards[-1] if self.shards else None
        if last is not None and last.num_tokens + size <= self.shard_tokens:
            chunks, tokens = last.num_chunks + 1, last.num_tokens + size
            self.shards[-1] = replace(last, last_document=document, num_chunks=chunks, num_tokens=tokens)
        else:
            self.shards.append(PlannedShard(document, document, chunk, 1, size))
        np.add.at(self.token_counts, sequence.ids, 1)
        self.num_positions += int(sequence.train_mask.sum())
        self.num_chunks += 1
        self.num_tokens += size
        self.max_chunk_tokens = max(self.max_chunk_tokens, size)


@phase("reading and tokenizing the data")
def make_shard_plan(
    sharding: ShardingOptions,
    corpus: Corpus,
    tokenizer: Tokenizer,
    # called with every document in the form that will be cached
    on_document: Callable[[Document, TokenSequence], object] | None = None,
    log_prefix: str = "cache-teacher",  # prefix of notes, the command; "": no notes, if they are already printed
) -> ShardPlan:
    """Read the data once, and return the assignment of its documents to shards; print notes on unusual data."""
    fingerprint = CorpusFingerprint()
    plan = ShardPlan(sharding.shard_tokens, np.zeros(tokenizer.embedding_rows, np.int64))
    plan.optional_columns = [name for name in OPT_IN_FIELDS if name in corpus.columns]
    longest = (0, 0)
    rewritten: list[int] = []
    empty = with_sampled_tokens = untrained = 0
    lost = NormalizationLoss(tokenizer.name)
    notes: list[str] = []
    for document, tokens in _tokenized_documents(corpus, tokenizer, fingerprint):
        if log_prefix and document.conversation is not None and len(rewritten) < MAX_CHECKED_DOCUMENTS:
            rewritten.append(count_lost_bytes(document, tokens))
        elif (
            log_prefix
            and plan.num_documents < MAX_CHECKED_DOCUMENTS
            and (document.unsplittable_reason is None and len(tokens.text_runs))
        ):
            lost += count_normalization_loss(tokenizer, [document.text], [tokens.encoded_run(0)])
        if sharding.max_document_tokens is not None and len(tokens) > sharding.max_document_tokens:
            plan.num_too_long += 1
            longest = max(longest, (len(tokens), plan.num_documents))
        empty += not document.text
        untrained += bool(document.text) and not tokens.train_mask.any()
        with_sampled_tokens += document.sampled_tokens is not None
        pieces = _fit_to_limit(sharding, tokenizer, document, tokens)
        for number, (cached, piece) in enumerate(pieces):
            plan.add_chunk(plan.num_documents, number, piece)
            if on_document is not None:
                on_document(cached, piece)
        plan.num_documents += 1
    plan.fingerprint = str(fingerprint)
    plan.optional_columns += ["sampled_tokens"] if with_sampled_tokens else []
    if plan.num_too_long:
        notes.append(_describe_too_long(sharding, corpus, plan, *longest))
    total = f"of {plan.num_documents:,} documents"
    if empty:
        notes.append(f"{empty:,} {total} are empty and have no trained tokens")
    if untrained and plan.num_positions:
        assistant = "only assistant messages and completions are trained"
        notes.append(f"{untrained:,} {total} have no trained tokens ({assistant})")
    notes += [warning] if (warning := lost.warning()) else []
    notes += [format_lost_bytes(rewritten)] if sum(rewritten) else []
    for note in notes if log_prefix else ():
        terminal.note(f"{log_prefix}: {note}")
    if empty == plan.num_documents:
        raise XtkError(
            "all documents of the data are empty",
            where=corpus.name,
            hint="check the file; to select another column: --columns text=COLUMN",
        )
    if not plan.num_chunks:
        raise XtkError(
            "all documents of the data are too long, so that --long-documents skip leaves none",
            where=corpus.name,
            hint="use --long-documents split or truncate",
        )
    if not plan.num_positions and log_prefix:
        raise XtkError(
            "the data has no trained tokens in the teacher's tokenization",
            where=f"{corpus.name}; {tokenizer.name}",
            hint="check that the chat template prints the assistant's messages, and that masks or labels select tokens",
        )
    return plan


def _describe_too_long(dealing: ShardingOptions, corpus: Corpus, plan: ShardPlan, length: int, number: int) -> str:
    """Return a note on documents that are too long; raise XtkError for --long-documents refuse."""
    limit = f"--max-length {dealing.max_document_tokens:,}"
    if dealing.max_length is None:
        limit = f"the {dealing.max_document_tokens:,} tokens of the teacher's context"
    counted = f"{plan.num_too_long:,} of {plan.num_documents:,} documents are longer than {limit}"
    if dealing.long_documents == "refuse":
        raise XtkError(
            counted,
            where=f"{corpus.name}; the longest is document {number} with {length:,} tokens",
            hint="use --long-documents split, truncate or skip, or a larger --max-length if the teacher supports it",
        )
    return f"{counted}; using --long-documents {dealing.long_documents}"


def read_shards(
    sharding: ShardingOptions, corpus: Corpus, tokenizer: Tokenizer, plan: ShardPlan, shard_numbers: set[int]
) -> Iterator[tuple[int, list[tuple[Document, TokenSequence]]]]:
    """Yield the number and the documents of each requested shard; documents of other shards are not tokenized."""
    fingerprint = CorpusFingerprint()
    held: list[Document] = []
    number = 0
    last = -1, list[Chunk]()  # index and pieces of the last document of a shard: the next shard may begin with it
    for at, document in enumerate(corpus):
        fingerprint.add(document)
        while number < len(plan.shards) and plan.shards[number].first_document <= at:
            shard = plan.shards[number]
            if number in shard_numbers:
                held.append(document)
            if at < shard.last_document:
                break
            if number in shard_numbers:
                known = last[1] if shard.first_document == last[0] else []
                first = shard.first_document + bool(known)
                chunks = chunk_documents(sharding, corpus, tokenizer, held[bool(known) :], first)
                last = at, chunks[-1] if chunks else known
                pieces = [*known, *(piece for some in chunks for piece in some)]
                pieces = pieces[shard.skipped_chunks : shard.skipped_chunks + shard.num_chunks]
                if sum(len(tokens) for _, tokens in pieces) != shard.num_tokens:
                    raise _data_changed_error(corpus)
                yield number, pieces
                held = []
            number += 1
    if str(fingerprint) != plan.fingerprint:
        raise _data_changed_error(corpus)


def chunk_documents(
    sharding: ShardingOptions, corpus: Corpus, tokenizer: Tokenizer, documents: list[Document], first: int = 0
) -> list[list[Chunk]]:
    """Return the chunks of each document; errors name the corpus and the number of the document, from `first`."""
    read = _read_documents(tokenizer, documents, corpus, first)
    return [list(_fit_to_limit(sharding, tokenizer, document, tokens)) for document, tokens in read]


def _data_changed_error(corpus: Corpus) -> XtkError:
    return XtkError(
        "the data files changed while xtk read them",
        where=corpus.name,
        hint="stop the program that writes these files, then run the command again with --force",
    )


def _fit_to_limit(
    dealing: ShardingOptions, tokenizer: Tokenizer, document: Document, tokens: TokenSequence
) -> Iterator[tuple[Document, TokenSequence]]:
    """Yield a document as it is cached: unchanged, or treated by `--long-documents` if it is too long."""
    limit, long_documents = dealing.max_document_tokens, dealing.long_documents
    if limit is None or len(tokens) <= limit:
        yield document, tokens
    elif document.unsplittable_reason:
        if long_documents == "split":
            raise XtkError(
                f"a document is too long for the teacher and cannot be split: {document.unsplittable_reason}",
                hint="use --long-documents truncate or skip",
            )
        if long_documents != "skip":
            yield document, tokens.truncate(limit)
    elif long_documents in ("refuse", "truncate"):
        yield next(_split_document(tokenizer, document, tokens, limit))
    elif long_documents == "split":
        yield from _split_document(tokenizer, document, tokens, limit)


def _split_document(
    tokenizer: Tokenizer, document: Document, tokens: TokenSequence, limit: int
) -> Iterator[tuple[Document, TokenSequence]]:
    """Split a long document into separate documents of at most `limit` tokens each.

    Splits are at ends of tokens that are also ends of characters. Each chunk is tokenized again, so that student and
    teacher read the same text.
    """
    text = document.text.encode()
    ends = tokens.byte_ends[tokens.text_mask]
    ends = np.unique(ends[[end > 0 and (end == len(text) or text[end] & 0xC0 != 0x80) for end in ends.tolist()]])
    # Reserve an end token and a small margin: a chunk may have more tokens than the same text in the whole document.
    max_chunk_tokens = max(1, limit - int(tokens.text_runs[0, 0]) - 2 - limit // 64)
    start = 0
    while start < len(text):
        held = int(np.searchsorted(ends, start, side="right"))
        for size in (max_chunk_tokens, max_chunk_tokens // 2, max_chunk_tokens // 4, 1):
            stop = int(ends[min(held + max(size, 1) - 1, len(ends) - 1)])
            piece = document.byte_slice(start, stop)
            (sequence,) = tokenize_documents(tokenizer, [piece])
            if len(sequence) <= limit:
                break
        yield piece, sequence
        start = stop


def _tokenized_documents(
    corpus: Corpus, tokenizer: Tokenizer, fingerprint: CorpusFingerprint
) -> Iterator[tuple[Document, TokenSequence]]:
    documents: list[Document] = []
    first = 0
    for document in corpus:
        fingerprint.add(document)
        documents.append(document)
        if len(documents) == READ_BATCH_SIZE:
            yield from _read_documents(tokenizer, documents, corpus, first)
            first += len(documents)
            documents = []
    yield from _read_documents(tokenizer, documents, corpus, first)


def _read_documents(
    tokenizer: Tokenizer, documents: list[Document], corpus: Corpus, first: int
) -> list[tuple[Document, TokenSequence]]:
    """Tokenize documents in the form that the teacher reads; errors name the number of the document."""
    try:
        return teacher_views(tokenizer, documents)
    except XtkError:
        for number, document in enumerate(documents, start=first):
            try:
                teacher_views(tokenizer, [document])
            except XtkError as failure:
                where = f"{corpus.name}, document {number}; {failure.where}"
                raise XtkError(failure.what, where=where, hint=failure.hint) from None
        raise
