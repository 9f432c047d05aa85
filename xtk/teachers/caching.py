"""Filling a teacher cache: read, plan shards, score, write; and go on after a kill."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from xtk import terminal
from xtk.artifacts.corpus import Corpus, Fingerprint
from xtk.artifacts.folders import Folder, LocalFolder, folder_at
from xtk.artifacts.locks import only_writer
from xtk.artifacts.shard import Row
from xtk.artifacts.teacher_cache import CacheWriter, finished_cache, put_shard, remove_cache, reopen_cache, totals
from xtk.errors import XtkError
from xtk.lookup import lookup
from xtk.projection.build import identity
from xtk.teachers import BACKENDS
from xtk.teachers.checks import check_scores
from xtk.teachers.processes import Workers
from xtk.teachers.teacher import Teacher, TeacherRequest
from xtk.tokens.document import Document
from xtk.tokens.rewriting import Rewriting, rewriting
from xtk.tokens.sequence import Sequence, left_out, sequences, told_rewritten
from xtk.tokens.signal import Support
from xtk.tokens.tokenizer import Tokenizer

LONG_DOCUMENTS = ("refuse", "truncate", "split", "skip")
READ_AT_ONCE = 1024
LOOKED_AT = 1000  # documents in which what the tokenizer cannot spell is counted
SHARDS_IN_FLIGHT = 1  # scored, and not yet written


@dataclass(frozen=True)
class CacheRequest:
    """What a cache is to hold.

    Attributes:
        teacher: a local model folder.
        name: how messages call it.
        support: which tokens of a distribution are kept.
        dtype: of the teacher's weights and arithmetic.
        backend: who runs it.
        codec: how signals are packed.
        long_documents: what becomes of documents longer than the teacher's context (or `max_length`).
        max_length: a smaller limit than the context; None: the context.
        batch_tokens: padded tokens in a forward pass.
        shard_tokens: teacher tokens in a shard; a kill loses at most one shard's work.
        trust_remote_code: run the model's own code.
        backend_options: what only one backend knows.
    """

    teacher: Path
    name: str
    support: Support
    dtype: str = "float32"
    backend: str = "transformers"
    codec: str = "raw"
    long_documents: str = "refuse"
    max_length: int | None = None
    batch_tokens: int = 8192
    shard_tokens: int = 65536
    trust_remote_code: bool = False
    backend_options: dict[str, Any] = field(default_factory=dict)


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
    """What reading the data once tells. It grows with the number of shards, not with that of documents."""

    shard_tokens: int
    shards: list[PlannedShard] = field(default_factory=list)
    documents: int = 0
    pieces: int = 0
    tokens: int = 0
    positions: int = 0
    fingerprint: str = ""
    too_long: int = 0

    def add(self, document: int, piece: int, sequence: Sequence) -> None:
        """Deal the next piece to a shard: as many as fit its tokens, at least one."""
        size = len(sequence)
        if self.shards and self.shards[-1].tokens + size <= self.shard_tokens:
            shard = self.shards[-1]
            self.shards[-1] = PlannedShard(shard.first, document, shard.skipped, shard.pieces + 1, shard.tokens + size)
        else:
            self.shards.append(PlannedShard(document, document, piece, 1, size))
        self.pieces += 1
        self.tokens += size
        self.positions += int(sequence.trained.sum())


@dataclass(frozen=True)
class Share:
    """Which part of a cache this run writes, and in how many processes.

    Attributes:
        processes: on this machine, a teacher each.
        rank: of this machine.
        machines: that share the folder, shards dealt by index.
    """

    processes: int = 1
    rank: int = 0
    machines: int = 1

    def check(self) -> None:
        """Refuse what makes no sense.

        Raises:
            XtkError: tells which option.
        """
        if self.processes < 1:
            raise XtkError(f"--num-processes is {self.processes}; there is at least one")
        if not 0 <= self.rank < self.machines:
            raise XtkError(
                f"--machine-rank is {self.rank} of --num-machines {self.machines}",
                hint="ranks count from 0: 0 and 1 of two machines",
            )

    def of(self, shards: list[int]) -> list[int]:
        """Return those that are this machine's."""
        return [number for number in shards if number % self.machines == self.rank]


@dataclass(frozen=True)
class Work:
    """All that a process needs to know to write shards of a cache.

    Attributes:
        request: what the cache is to hold.
        corpus: the documents.
        place: where the cache goes.
        limit: tokens of a document at most.
        plan: which documents each shard holds.
        header: of the cache.
    """

    request: CacheRequest
    corpus: Corpus
    place: str | Path
    limit: int | None
    plan: Plan
    header: dict[str, Any]


# Writes shards of a cache, and tells of each what the manifest is to tell.
Fill = Callable[[list[int]], Iterator[tuple[int, dict[str, Any]]]]


def cache_teacher(
    request: CacheRequest, corpus: Corpus, place: str | Path, *, force: bool = False, share: Share | None = None
) -> dict[str, Any] | None:
    """Score a corpus with a teacher into a cache; finished shards of a killed run are kept.

    Args:
        request: what it is to hold.
        corpus: the documents, read twice: once to plan, once to score.
        place: where the cache goes: a folder, or a remote one.
        force: replace whatever cache is there.
        share: which part of it is this run's, and in how many processes; None: all of it, in this process.

    Returns:
        `documents`, `positions`, `tokens`, `bytes` of the finished cache; None while shards of other machines are
        to come.

    Raises:
        XtkError: the data is empty or too long for the teacher, the folder holds another cache or has another
            writer, a model cannot be loaded.
    """
    share = share or Share()
    check_request(request)
    share.check()
    if force and share.machines > 1:
        raise XtkError("--force would remove what other machines write", hint="remove the folder, then start them all")
    tokenizer = Tokenizer(request.teacher, name=request.name)
    limit = token_limit(request)
    plan = make_plan(request, corpus, tokenizer, limit)
    work = Work(request, corpus, place, limit, plan, _header(request, tokenizer, plan))
    folder = folder_at(place)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_held(folder, share))
        fill: Fill | None = None
        if force:
            # What cannot be made anew is not removed.
            fill = stack.enter_context(_opened(work, tokenizer, share, len(plan.shards)))
            remove_cache(folder)
        elif finished := finished_cache(folder, work.header):
            return totals(finished)
        else:
            reopen_cache(folder)
        writer = CacheWriter(folder, work.header, len(plan.shards))
        missing = share.of(writer.missing())
        if missing:
            fill = fill or stack.enter_context(_opened(work, tokenizer, share, len(missing)))
            _fill_told(fill, writer, plan, share, missing)
        if others := writer.look_again():
            terminal.note(
                f"cache-teacher: the shards of machine {share.rank} are there; {len(others)} of {len(plan.shards)} are "
                "still to come from others. The one that ends last writes the manifest; run one again if none did"
            )
            return None
        writer.write_tokenizer(tokenizer.files())
        return totals(writer.finish())


def _held(folder: Folder, share: Share) -> contextlib.AbstractContextManager[None]:
    """Hold a folder against a second writer by mistake; remote ones have no locks."""
    if isinstance(folder, LocalFolder):
        return only_writer(folder.path, "cache", share.rank)
    return contextlib.nullcontext()


@contextlib.contextmanager
def _opened(work: Work, tokenizer: Tokenizer, share: Share, shards: int) -> Iterator[Fill]:
    """Open the teacher, here or in processes of their own."""
    processes = min(share.processes, shards)
    if processes > 1:
        on_devices = getattr(lookup(BACKENDS, work.request.backend, "backend"), "on_devices", True)
        try:
            with Workers(processes, work, on_devices=on_devices) as workers:
                yield workers.fill
        finally:
            folder_at(work.place).remove_leftovers()  # of one that was killed
    else:
        teacher = open_teacher(work.request, tokenizer)
        yield lambda numbers: fill(work, teacher, tokenizer, numbers)


def _fill_told(fill: Fill, writer: CacheWriter, plan: Plan, share: Share, missing: list[int]) -> None:
    """Write the shards that are missing, and show how far it is."""
    mine = share.of(list(range(len(plan.shards))))
    tokens = {number: plan.shards[number].tokens for number in mine}
    if len(missing) < len(mine):
        terminal.note(f"cache-teacher: going on, {len(mine) - len(missing)} of {len(mine)} shards are there")
    total = sum(tokens.values())
    done = total - sum(tokens[number] for number in missing)
    with terminal.Progress("cache-teacher", total, "tokens", done=done) as progress:
        for number, entry in fill(missing):
            writer.accept(number, entry)
            progress.advance(tokens[number])


def check_request(request: CacheRequest) -> None:
    """Refuse what makes no sense, before anything is read.

    Raises:
        XtkError: tells which option.
    """
    support = request.support
    if request.max_length is not None and request.max_length < 4:
        raise XtkError(f"--max-length is {request.max_length}; a document has at least 4 tokens")
    able: frozenset[str] = lookup(BACKENDS, request.backend, "backend").supports
    if support.kind not in able:
        raise XtkError(
            f"the backend {request.backend} does not give the support {support.kind}",
            hint=f"--support {', '.join(sorted(able))}; or --backend transformers, which gives all",
        )


def open_teacher(request: CacheRequest, tokenizer: Tokenizer) -> Teacher:
    """Load or reach the teacher.

    Raises:
        XtkError: it cannot be loaded, or has fewer rows than its tokenizer has tokens.
    """
    teacher: Teacher = lookup(BACKENDS, request.backend, "backend")(
        TeacherRequest(
            folder=request.teacher,
            name=request.name,
            tokenizer=tokenizer,
            support=request.support,
            dtype=request.dtype,
            batch_tokens=request.batch_tokens,
            trust_remote_code=request.trust_remote_code,
            options=request.backend_options,
        )
    )
    if teacher.width < len(tokenizer):
        raise XtkError(
            f"the teacher has {teacher.width:,} vocabulary rows; its tokenizer names {len(tokenizer):,} tokens",
            where=request.name,
        )
    return teacher


def fill(
    work: Work, teacher: Teacher, tokenizer: Tokenizer, numbers: list[int]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Score and write shards: while one is scored, the next is read and the last is written.

    Args:
        work: which cache.
        teacher: opened.
        tokenizer: the teacher's.
        numbers: the shards that are wanted.

    Yields:
        The number of a shard that is written, and what the manifest is to tell of it.

    Raises:
        XtkError: the data changed, or the teacher says what is no distribution.
    """
    folder = folder_at(work.place)
    written: deque[tuple[int, Future[dict[str, Any]]]] = deque()
    with (
        ThreadPoolExecutor(1, thread_name_prefix="xtk-read") as reading,
        ThreadPoolExecutor(1, thread_name_prefix="xtk-write") as writing,
    ):
        shards = _read_shards(work.request, work.corpus, tokenizer, work.limit, work.plan, set(numbers))
        coming = reading.submit(next, shards, None)
        while (read := coming.result()) is not None:
            coming = reading.submit(next, shards, None)
            number, pieces = read
            rows = _scored(work, teacher, number, pieces)
            while len(written) >= SHARDS_IN_FLIGHT or (written and written[0][1].done()):
                last, entry = written.popleft()
                yield last, entry.result()
            written.append((number, writing.submit(put_shard, folder, work.header, number, rows)))
        for last, entry in written:
            yield last, entry.result()


def _scored(work: Work, teacher: Teacher, number: int, pieces: list[tuple[Document, Sequence]]) -> list[Row]:
    """Score the documents of a shard.

    Raises:
        XtkError: what the teacher says of one of them is no distribution.
    """
    scores = teacher.score([tokens for _, tokens in pieces])
    where = f"{work.corpus.name}, shard {number}"
    if len(scores) != len(pieces):
        raise XtkError(
            f"the teacher was asked for {len(pieces)} documents and answered for {len(scores)}",
            where=where,
            hint="this is a mistake of the backend: another --backend",
        )
    rows = [Row(document, tokens, said) for (document, tokens), said in zip(pieces, scores, strict=True)]
    for at, row in enumerate(rows):
        check_scores(row, f"{where}, row {at}", width=teacher.width, support=work.request.support)
    return rows


def _read_shards(
    request: CacheRequest, corpus: Corpus, tokenizer: Tokenizer, limit: int | None, plan: Plan, wanted: set[int]
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
                pieces = _pieces_of(request, corpus, tokenizer, limit, held, shard.first)
                pieces = pieces[shard.skipped : shard.skipped + shard.pieces]
                if sum(len(tokens) for _, tokens in pieces) != shard.tokens:
                    raise _changed(corpus)
                yield number, pieces
                held = []
            number += 1
    if str(fingerprint) != plan.fingerprint:
        raise _changed(corpus)


def _pieces_of(
    request: CacheRequest,
    corpus: Corpus,
    tokenizer: Tokenizer,
    limit: int | None,
    documents: list[Document],
    first: int,
) -> list[tuple[Document, Sequence]]:
    read = _read(tokenizer, documents, corpus, first)
    return [
        piece
        for document, tokens in zip(documents, read, strict=True)
        for piece in _within(tokenizer, document, tokens, limit, request.long_documents)
    ]


def _changed(corpus: Corpus) -> XtkError:
    return XtkError("the data changed while it was read", where=corpus.name, hint="--force, once it stands still")


def make_plan(request: CacheRequest, corpus: Corpus, tokenizer: Tokenizer, limit: int | None) -> Plan:
    """Read the data once: deal it to shards, and tell what a user should know before the teacher starts.

    Raises:
        XtkError: the data is empty or too long for the teacher.
    """
    fingerprint = Fingerprint()
    plan = Plan(request.shard_tokens)
    longest = (0, 0)
    rewritten: list[int] = []
    empty = 0
    lost = Rewriting(tokenizer.name)
    for document, tokens in _tokenised(corpus, tokenizer, fingerprint):
        if document.conversation is not None and len(rewritten) < LOOKED_AT:
            rewritten.append(left_out(document, tokens))
        elif document.conversation is None and plan.documents < LOOKED_AT and len(tokens.pieces):
            lost += rewriting(tokenizer, [document.text], [tokens.piece(0)])
        if limit is not None and len(tokens) > limit:
            plan.too_long += 1
            longest = max(longest, (len(tokens), plan.documents))
        empty += not document.text
        for number, (_, piece) in enumerate(_within(tokenizer, document, tokens, limit, request.long_documents)):
            plan.add(plan.documents, number, piece)
        plan.documents += 1
    plan.fingerprint = str(fingerprint)
    if plan.too_long:
        _tell_too_long(request, corpus, limit, plan, *longest)
    if empty:
        terminal.note(f"cache-teacher: {empty:,} of {plan.documents:,} documents are empty; nothing of them is trained")
    if warning := lost.warning():
        terminal.note(f"cache-teacher: {warning}")
    if sum(rewritten):
        terminal.note("cache-teacher: " + told_rewritten(rewritten))
    if empty == plan.documents or not plan.pieces:
        raise XtkError("there is no text in this corpus", where=corpus.name)
    return plan


def _tell_too_long(
    request: CacheRequest, corpus: Corpus, limit: int | None, plan: Plan, length: int, number: int
) -> None:
    counted = f"{plan.too_long:,} of {plan.documents:,} documents are longer than " + (
        f"the {limit:,} tokens that the teacher reads" if request.max_length is None else f"--max-length {limit:,}"
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


def token_limit(request: CacheRequest) -> int | None:
    """Return the tokens of a document at most: of the teacher's context, and of `--max-length`."""
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
    room: int = lookup(BACKENDS, request.backend, "backend").room
    limits = [limit for limit in (context and context - room, request.max_length) if limit]
    return min(limits) if limits else None


def _header(request: CacheRequest, tokenizer: Tokenizer, plan: Plan) -> dict[str, Any]:
    backend = lookup(BACKENDS, request.backend, "backend")
    support = request.support
    asked = {
        "top-k": ("top_k",),
        "top-p": ("top_k", "top_p"),
        "sample": ("draws", "sets", "seed"),
        "top-k+sample": ("top_k", "draws", "sets", "seed"),
    }
    return {
        "kind": "teacher-cache",
        "codec": {"name": request.codec, "draws": support.draws, "sets": support.sets},
        "teacher": {
            "name": request.teacher.resolve().name,
            "weights": backend.identity(request.teacher, request.backend_options),
            "template": tokenizer.template_fingerprint,
            "width": tokenizer.width,
            **{key: value for key, value in identity(tokenizer).items() if key in ("tokenizer", "roles")},
        },
        "data": {"documents": plan.fingerprint, "rows": plan.pieces, "too_long": plan.too_long},
        "options": {
            "support": support.kind,
            **{name: getattr(support, name) for name in asked.get(support.kind, ())},
            "entropy": backend.entropy,
            "dtype": request.dtype,
            "backend": request.backend,
            "long_documents": request.long_documents,
            "max_length": request.max_length,
            "batch_tokens": request.batch_tokens,
            "shard_tokens": request.shard_tokens,
        },
    }
