"""Which documents each shard of a cache holds, known from reading the data once; and reading them shard by shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from xtk import terminal
from xtk.artifacts.corpus import Corpus, CorpusFingerprint
from xtk.artifacts.dataset_records import OPT_IN_FIELDS
from xtk.errors import XtkError
from xtk.tokens.document import Document
from xtk.tokens.normalization_loss import NormalizationLoss, count_normalization_loss
from xtk.tokens.teacher_view import teacher_views
from xtk.tokens.token_sequence import TokenSequence, count_lost_bytes, format_lost_bytes, tokenize_documents
from xtk.tokens.tokenizer import Tokenizer

LONG_DOCUMENTS = ("refuse", "truncate", "split", "skip")
READ_BATCH_SIZE = 1024
MAX_CHECKED_DOCUMENTS = 1000  # documents in which what the tokenizer cannot spell is counted


@dataclass(frozen=True)
class ShardingOptions:
    """How documents become rows and shards.

    Attributes:
        max_document_tokens: tokens of a document at most: of the teacher's context, and of `max_length`; None: any.
        max_length: what the user asked for, if anything.
        long_documents: what becomes of longer ones, of `LONG_DOCUMENTS`.
        shard_tokens: tokens of the teacher in a shard.
    """

    max_document_tokens: int | None
    max_length: int | None
    long_documents: str
    shard_tokens: int


@dataclass(frozen=True)
class PlannedShard:
    """Which pieces of which documents a shard holds. A document that is too long has several pieces, others one.

    Attributes:
        first_document, last_document: its documents, both included.
        skipped_chunks: pieces of the first document that are in the shard before.
        num_chunks: how many it holds.
        num_tokens: of the teacher, in all of them.
    """

    first_document: int
    last_document: int
    skipped_chunks: int
    num_chunks: int
    num_tokens: int


@dataclass
class ShardPlan:
    """What reading the data once tells. It grows with the number of shards, not with that of documents.

    Attributes:
        shard_tokens: tokens of the teacher in a shard, at most where a document has not more.
        token_counts: int64 [U], how often each token of the teacher comes.
        shards: what each holds.
        num_documents: that were read.
        num_chunks: rows that will be written.
        num_tokens: of the teacher in them.
        num_positions: those of them that are trained.
        fingerprint: of the documents.
        num_too_long: documents that are longer than the teacher reads.
        max_chunk_tokens: tokens of the longest row.
        optional_columns: fields of documents that the cache stores for training, in the order of the table.
    """

    shard_tokens: int
    token_counts: NDArray[np.int64]
    shards: list[PlannedShard] = field(default_factory=list)
    num_documents: int = 0
    num_chunks: int = 0
    num_tokens: int = 0
    num_positions: int = 0
    fingerprint: str = ""
    num_too_long: int = 0
    max_chunk_tokens: int = 0
    optional_columns: list[str] = field(default_factory=list)

    def chunks_per_shard(self) -> list[int]:
        """Return of each shard how many rows it has."""
        return [shard.num_chunks for shard in self.shards]

    def add_chunk(self, document: int, chunk: int, sequence: TokenSequence) -> None:
        """Deal the next piece to a shard: as many as fit its tokens, at least one."""
        self.assign_chunk(document, chunk, len(sequence))
        np.add.at(self.token_counts, sequence.ids, 1)
        self.num_positions += int(sequence.train_mask.sum())

    def assign_chunk(self, document: int, chunk: int, num_tokens: int) -> None:
        """Deal a piece of which only the number of its tokens is known."""
        if self.shards and self.shards[-1].num_tokens + num_tokens <= self.shard_tokens:
            shard = self.shards[-1]
            self.shards[-1] = PlannedShard(
                shard.first_document,
                document,
                shard.skipped_chunks,
                shard.num_chunks + 1,
                shard.num_tokens + num_tokens,
            )
        else:
            self.shards.append(PlannedShard(document, document, chunk, 1, num_tokens))
        self.num_chunks += 1
        self.num_tokens += num_tokens
        self.max_chunk_tokens = max(self.max_chunk_tokens, num_tokens)


def make_shard_plan(
    sharding: ShardingOptions,
    corpus: Corpus,
    tokenizer: Tokenizer,
    on_document: Callable[[Document, TokenSequence], None] | None = None,
    log_prefix: str = "cache-teacher",
) -> ShardPlan:
    """Read the data once: deal it to shards, and tell what a user should know before the teacher starts.

    Args:
        sharding: how documents become shards.
        corpus: the data.
        tokenizer: the teacher's.
        on_document: is called with every document as it will be cached.
        log_prefix: tells it: the command; "": nobody, who has told it before.

    Raises:
        XtkError: the data is empty or too long for the teacher.
    """
    fingerprint = CorpusFingerprint()
    plan = ShardPlan(sharding.shard_tokens, np.zeros(tokenizer.embedding_rows, np.int64))
    plan.optional_columns = [name for name in OPT_IN_FIELDS if name in corpus.columns]
    longest = (0, 0)
    rewritten: list[int] = []
    empty = drawn = 0
    lost = NormalizationLoss(tokenizer.name)
    for document, tokens in _tokenized_documents(corpus, tokenizer, fingerprint):
        if not log_prefix:
            pass
        elif document.conversation is not None and len(rewritten) < MAX_CHECKED_DOCUMENTS:
            rewritten.append(count_lost_bytes(document, tokens))
        elif (
            document.unsplittable_reason is None
            and plan.num_documents < MAX_CHECKED_DOCUMENTS
            and len(tokens.text_runs)
        ):
            lost += count_normalization_loss(tokenizer, [document.text], [tokens.encoded_run(0)])
        if sharding.max_document_tokens is not None and len(tokens) > sharding.max_document_tokens:
            plan.num_too_long += 1
            longest = max(longest, (len(tokens), plan.num_documents))
        empty += not document.text
        drawn += document.sampled_tokens is not None
        pieces = _fit_to_limit(sharding, tokenizer, document, tokens)
        for number, (cached, piece) in enumerate(pieces):
            plan.add_chunk(plan.num_documents, number, piece)
            if on_document is not None:
                on_document(cached, piece)
        plan.num_documents += 1
    plan.fingerprint = str(fingerprint)
    plan.optional_columns += ["sampled_tokens"] if drawn else []
    if plan.num_too_long:
        _report_too_long(sharding, corpus, plan, *longest, log_prefix)
    if empty and log_prefix:
        terminal.note(
            f"{log_prefix}: {empty:,} of {plan.num_documents:,} documents are empty; nothing of them is trained"
        )
    if warning := lost.warning():
        terminal.note(f"{log_prefix}: {warning}")
    if sum(rewritten):
        terminal.note(f"{log_prefix}: {format_lost_bytes(rewritten)}")
    if empty == plan.num_documents or not plan.num_chunks:
        raise XtkError("there is no text in this corpus", where=corpus.name)
    if not plan.num_positions and log_prefix:
        raise XtkError(
            "nothing of this data is trained: no token of the teacher spells text that is",
            where=f"{corpus.name}; {tokenizer.name}",
            hint="look whether the chat template writes what the assistant says, and whether masks leave anything",
        )
    return plan


def _report_too_long(
    dealing: ShardingOptions, corpus: Corpus, plan: ShardPlan, length: int, number: int, who: str
) -> None:
    counted = f"{plan.num_too_long:,} of {plan.num_documents:,} documents are longer than " + (
        f"the {dealing.max_document_tokens:,} tokens that the teacher reads"
        if dealing.max_length is None
        else f"--max-length {dealing.max_document_tokens:,}"
    )
    if dealing.long_documents == "refuse":
        raise XtkError(
            counted,
            where=f"{corpus.name}; the longest is document {number} with {length:,} tokens",
            hint="--long-documents split, truncate or skip",
        )
    if who:
        terminal.note(f"{who}: {counted}: --long-documents {dealing.long_documents}")


def read_shards(
    sharding: ShardingOptions, corpus: Corpus, tokenizer: Tokenizer, plan: ShardPlan, shard_numbers: set[int]
) -> Iterator[tuple[int, list[tuple[Document, TokenSequence]]]]:
    """Yield the number and the pieces of each shard that is wanted; documents of others are read, not tokenised.

    Raises:
        XtkError: the data is not what it was when the shards were planned.
    """
    fingerprint = CorpusFingerprint()
    held: list[Document] = []
    number = 0
    for at, document in enumerate(corpus):
        fingerprint.add(document)
        while number < len(plan.shards) and plan.shards[number].first_document <= at:
            shard = plan.shards[number]
            if number in shard_numbers:
                held.append(document)
            if at < shard.last_document:
                break
            if number in shard_numbers:
                pieces = _chunk_documents(sharding, corpus, tokenizer, held, shard.first_document)
                pieces = pieces[shard.skipped_chunks : shard.skipped_chunks + shard.num_chunks]
                if sum(len(tokens) for _, tokens in pieces) != shard.num_tokens:
                    raise _data_changed_error(corpus)
                yield number, pieces
                held = []
            number += 1
    if str(fingerprint) != plan.fingerprint:
        raise _data_changed_error(corpus)


def _chunk_documents(
    dealing: ShardingOptions,
    corpus: Corpus,
    tokenizer: Tokenizer,
    documents: list[Document],
    first: int,
) -> list[tuple[Document, TokenSequence]]:
    read = _read_documents(tokenizer, documents, corpus, first)
    return [piece for document, tokens in read for piece in _fit_to_limit(dealing, tokenizer, document, tokens)]


def _data_changed_error(corpus: Corpus) -> XtkError:
    return XtkError("the data changed while it was read", where=corpus.name, hint="--force, once it stands still")


def _fit_to_limit(
    dealing: ShardingOptions, tokenizer: Tokenizer, document: Document, tokens: TokenSequence
) -> Iterator[tuple[Document, TokenSequence]]:
    """Yield a document as it is cached: whole, or what `--long-documents` makes of one that is too long."""
    limit, long_documents = dealing.max_document_tokens, dealing.long_documents
    if limit is None or len(tokens) <= limit:
        yield document, tokens
    elif document.unsplittable_reason:
        if long_documents == "split":
            raise XtkError(
                f"a document is longer than the teacher reads, and is not split: {document.unsplittable_reason}",
                hint="--long-documents truncate or skip",
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
    """Cut a long document into pieces, documents of their own, of at most `limit` tokens each.

    Cuts fall where a token ends on a character's edge. A piece is tokenised anew, so that what a student reads
    is what the teacher read.
    """
    text = document.text.encode()
    ends = tokens.byte_ends[tokens.text_mask]
    ends = np.unique(ends[[end > 0 and (end == len(text) or text[end] & 0xC0 != 0x80) for end in ends.tolist()]])
    # An end token, and a little room: a piece may have a token more than it had inside the whole.
    room = max(1, limit - int(tokens.text_runs[0, 0]) - 2 - limit // 64)
    start = 0
    while start < len(text):
        held = int(np.searchsorted(ends, start, side="right"))
        for size in (room, room // 2, room // 4, 1):
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
    """Read documents as the teacher does; one that cannot be read is named by its number."""
    try:
        return teacher_views(tokenizer, documents)
    except XtkError:
        for number, document in enumerate(documents, start=first):
            try:
                teacher_views(tokenizer, [document])
            except XtkError as wrong:
                where = f"{corpus.name}, document {number}; {wrong.where}"
                raise XtkError(wrong.what, where=where, hint=wrong.hint) from None
        raise
