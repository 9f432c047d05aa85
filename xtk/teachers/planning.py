"""Which documents each shard of a cache holds, known from reading the data once; and reading them shard by shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from xtk import terminal
from xtk.artifacts.corpus import Corpus, Fingerprint
from xtk.artifacts.records import ASKED
from xtk.errors import XtkError
from xtk.tokens.document import Document
from xtk.tokens.reading import read_documents
from xtk.tokens.rewriting import Rewriting, rewriting
from xtk.tokens.sequence import Sequence, left_out, sequences, told_rewritten
from xtk.tokens.tokenizer import Tokenizer

LONG_DOCUMENTS = ("refuse", "truncate", "split", "skip")
READ_AT_ONCE = 1024
LOOKED_AT = 1000  # documents in which what the tokenizer cannot spell is counted


@dataclass(frozen=True)
class Dealing:
    """How documents become rows and shards.

    Attributes:
        limit: tokens of a document at most: of the teacher's context, and of `max_length`; None: any.
        max_length: what the user asked for, if anything.
        long_documents: what becomes of longer ones, of `LONG_DOCUMENTS`.
        shard_tokens: tokens of the teacher in a shard.
    """

    limit: int | None
    max_length: int | None
    long_documents: str
    shard_tokens: int


@dataclass(frozen=True)
class PlannedShard:
    """Which pieces of which documents a shard holds. A document that is too long has several pieces, others one.

    Attributes:
        first, last: its documents, both included.
        skipped: pieces of the first document that are in the shard before.
        pieces: how many it holds.
        tokens: of the teacher, in all of them.
    """

    first: int
    last: int
    skipped: int
    pieces: int
    tokens: int


@dataclass
class Plan:
    """What reading the data once tells. It grows with the number of shards, not with that of documents.

    Attributes:
        shard_tokens: tokens of the teacher in a shard, at most where a document has not more.
        counts: int64 [U], how often each token of the teacher comes.
        shards: what each holds.
        documents: that were read.
        pieces: rows that will be written.
        tokens: of the teacher in them.
        positions: those of them that are trained.
        fingerprint: of the documents.
        too_long: documents that are longer than the teacher reads.
        longest: tokens of the longest row.
        optional_columns: fields of documents that the cache stores for training, in the order of the table.
    """

    shard_tokens: int
    counts: NDArray[np.int64]
    shards: list[PlannedShard] = field(default_factory=list)
    documents: int = 0
    pieces: int = 0
    tokens: int = 0
    positions: int = 0
    fingerprint: str = ""
    too_long: int = 0
    longest: int = 0
    optional_columns: list[str] = field(default_factory=list)

    def rows(self) -> list[int]:
        """Return of each shard how many rows it has."""
        return [shard.pieces for shard in self.shards]

    def add(self, document: int, piece: int, sequence: Sequence) -> None:
        """Deal the next piece to a shard: as many as fit its tokens, at least one."""
        self.deal(document, piece, len(sequence))
        np.add.at(self.counts, sequence.ids, 1)
        self.positions += int(sequence.trained.sum())

    def deal(self, document: int, piece: int, size: int) -> None:
        """Deal a piece of which only the number of its tokens is known."""
        if self.shards and self.shards[-1].tokens + size <= self.shard_tokens:
            shard = self.shards[-1]
            self.shards[-1] = PlannedShard(shard.first, document, shard.skipped, shard.pieces + 1, shard.tokens + size)
        else:
            self.shards.append(PlannedShard(document, document, piece, 1, size))
        self.pieces += 1
        self.tokens += size
        self.longest = max(self.longest, size)


def make_plan(
    dealing: Dealing,
    corpus: Corpus,
    tokenizer: Tokenizer,
    show: Callable[[Document, Sequence], None] | None = None,
    who: str = "cache-teacher",
) -> Plan:
    """Read the data once: deal it to shards, and tell what a user should know before the teacher starts.

    Args:
        dealing: how documents become shards.
        corpus: the data.
        tokenizer: the teacher's.
        show: is called with every document as it will be cached.
        who: tells it: the command; "": nobody, who has told it before.

    Raises:
        XtkError: the data is empty or too long for the teacher.
    """
    fingerprint = Fingerprint()
    plan = Plan(dealing.shard_tokens, np.zeros(tokenizer.width, np.int64))
    plan.optional_columns = [name for name in ASKED if name in corpus.columns]
    longest = (0, 0)
    rewritten: list[int] = []
    empty = drawn = 0
    lost = Rewriting(tokenizer.name)
    for document, tokens in _tokenised(corpus, tokenizer, fingerprint):
        if not who:
            pass
        elif document.conversation is not None and len(rewritten) < LOOKED_AT:
            rewritten.append(left_out(document, tokens))
        elif document.undivided is None and plan.documents < LOOKED_AT and len(tokens.pieces):
            lost += rewriting(tokenizer, [document.text], [tokens.piece(0)])
        if dealing.limit is not None and len(tokens) > dealing.limit:
            plan.too_long += 1
            longest = max(longest, (len(tokens), plan.documents))
        empty += not document.text
        drawn += document.drawn is not None
        pieces = _within(dealing, tokenizer, document, tokens)
        for number, (cached, piece) in enumerate(pieces):
            plan.add(plan.documents, number, piece)
            if show is not None:
                show(cached, piece)
        plan.documents += 1
    plan.fingerprint = str(fingerprint)
    plan.optional_columns += ["sampled_tokens"] if drawn else []
    if plan.too_long:
        _tell_too_long(dealing, corpus, plan, *longest, who)
    if empty and who:
        terminal.note(f"{who}: {empty:,} of {plan.documents:,} documents are empty; nothing of them is trained")
    if warning := lost.warning():
        terminal.note(f"{who}: {warning}")
    if sum(rewritten):
        terminal.note(f"{who}: {told_rewritten(rewritten)}")
    if empty == plan.documents or not plan.pieces:
        raise XtkError("there is no text in this corpus", where=corpus.name)
    if not plan.positions and who:
        raise XtkError(
            "nothing of this data is trained: no token of the teacher spells text that is",
            where=f"{corpus.name}; {tokenizer.name}",
            hint="look whether the chat template writes what the assistant says, and whether masks leave anything",
        )
    return plan


def _tell_too_long(dealing: Dealing, corpus: Corpus, plan: Plan, length: int, number: int, who: str) -> None:
    counted = f"{plan.too_long:,} of {plan.documents:,} documents are longer than " + (
        f"the {dealing.limit:,} tokens that the teacher reads"
        if dealing.max_length is None
        else f"--max-length {dealing.limit:,}"
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
    dealing: Dealing, corpus: Corpus, tokenizer: Tokenizer, plan: Plan, wanted: set[int]
) -> Iterator[tuple[int, list[tuple[Document, Sequence]]]]:
    """Yield the number and the pieces of each shard that is wanted; documents of others are read, not tokenised.

    Raises:
        XtkError: the data is not what it was when the shards were planned.
    """
    fingerprint = Fingerprint()
    held: list[Document] = []
    number = 0
    for at, document in enumerate(corpus):
        fingerprint.add(document)
        while number < len(plan.shards) and plan.shards[number].first <= at:
            shard = plan.shards[number]
            if number in wanted:
                held.append(document)
            if at < shard.last:
                break
            if number in wanted:
                pieces = _pieces_of(dealing, corpus, tokenizer, held, shard.first)
                pieces = pieces[shard.skipped : shard.skipped + shard.pieces]
                if sum(len(tokens) for _, tokens in pieces) != shard.tokens:
                    raise _changed(corpus)
                yield number, pieces
                held = []
            number += 1
    if str(fingerprint) != plan.fingerprint:
        raise _changed(corpus)


def _pieces_of(
    dealing: Dealing,
    corpus: Corpus,
    tokenizer: Tokenizer,
    documents: list[Document],
    first: int,
) -> list[tuple[Document, Sequence]]:
    read = _read(tokenizer, documents, corpus, first)
    return [piece for document, tokens in read for piece in _within(dealing, tokenizer, document, tokens)]


def _changed(corpus: Corpus) -> XtkError:
    return XtkError("the data changed while it was read", where=corpus.name, hint="--force, once it stands still")


def _within(
    dealing: Dealing, tokenizer: Tokenizer, document: Document, tokens: Sequence
) -> Iterator[tuple[Document, Sequence]]:
    """Yield a document as it is cached: whole, or what `--long-documents` makes of one that is too long."""
    limit, long_documents = dealing.limit, dealing.long_documents
    if limit is None or len(tokens) <= limit:
        yield document, tokens
    elif document.undivided:
        if long_documents == "split":
            raise XtkError(
                f"a document is longer than the teacher reads, and is not split: {document.undivided}",
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


def _tokenised(corpus: Corpus, tokenizer: Tokenizer, fingerprint: Fingerprint) -> Iterator[tuple[Document, Sequence]]:
    documents: list[Document] = []
    first = 0
    for document in corpus:
        fingerprint.add(document)
        documents.append(document)
        if len(documents) == READ_AT_ONCE:
            yield from _read(tokenizer, documents, corpus, first)
            first += len(documents)
            documents = []
    yield from _read(tokenizer, documents, corpus, first)


def _read(
    tokenizer: Tokenizer, documents: list[Document], corpus: Corpus, first: int
) -> list[tuple[Document, Sequence]]:
    """Read documents as the teacher does; one that cannot be read is named by its number."""
    try:
        return read_documents(tokenizer, documents)
    except XtkError:
        for number, document in enumerate(documents, start=first):
            try:
                read_documents(tokenizer, [document])
            except XtkError as wrong:
                where = f"{corpus.name}, document {number}; {wrong.where}"
                raise XtkError(wrong.what, where=where, hint=wrong.hint) from None
        raise
