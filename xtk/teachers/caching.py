"""Filling a teacher cache: read, plan shards, score, write; and go on after a kill."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk import terminal
from xtk.artifacts.corpus import Corpus
from xtk.artifacts.folders import Folder, LocalFolder, folder_at
from xtk.artifacts.locks import only_writer
from xtk.artifacts.outputs import check_folder
from xtk.artifacts.ranks import Ranks
from xtk.artifacts.shard import Place, Row
from xtk.artifacts.teacher_cache import (
    CacheWriter,
    finished_cache,
    put_shard,
    refuse_foreign,
    remove_cache,
    reopen_cache,
    totals,
)
from xtk.errors import XtkError
from xtk.lookup import lookup
from xtk.teachers import BACKENDS
from xtk.teachers.checks import check_scores
from xtk.teachers.planning import Dealing, Plan, make_plan, read_shards
from xtk.teachers.processes import Workers
from xtk.teachers.request import CacheRequest, cache_header, check_request, dealing_of, open_teacher, ranks_for
from xtk.teachers.teacher import Teacher
from xtk.tokens.document import Document
from xtk.tokens.sequence import Sequence
from xtk.tokens.tokenizer import Tokenizer

SHARDS_IN_FLIGHT = 1  # scored, and not yet written


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
        dealing: how documents become shards.
        plan: which documents each shard holds.
        header: of the cache.
        ranks: of the cache, for a codec that needs them.
    """

    request: CacheRequest
    corpus: Corpus
    place: str | Path
    dealing: Dealing
    plan: Plan
    header: dict[str, Any]
    ranks: Ranks | None


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
    folder = folder_at(place)
    if isinstance(folder, LocalFolder):
        check_folder(folder.path, "a cache", (request.teacher, *corpus.sources))
    if force:
        refuse_foreign(folder)
    tokenizer = Tokenizer(request.teacher, name=request.name)
    dealing = dealing_of(request)
    plan = make_plan(dealing, corpus, tokenizer)
    ranks = ranks_for(request, tokenizer, plan)
    opening = replace(request, backend_options={**request.backend_options, "longest": plan.longest})
    work = Work(opening, corpus, place, dealing, plan, cache_header(request, tokenizer, plan, ranks), ranks)
    if not force and (finished := finished_cache(folder, work.header)):
        return totals(finished)
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
        mine = share.of(list(range(len(plan.shards))))
        writer = CacheWriter(folder, work.header, plan.rows(), mine)
        missing = share.of(writer.missing())
        # A folder that cannot be written to is known before the teacher starts.
        writer.write_files(tokenizer.files() | ({} if ranks is None else {ranks.file: ranks.content}))
        if missing:
            fill = fill or stack.enter_context(_opened(work, tokenizer, share, len(missing)))
            _fill_told(fill, writer, plan, share, missing)
        if others := writer.look_again():
            terminal.note(
                f"cache-teacher: the shards of machine {share.rank} are there; {len(others)} of {len(plan.shards)} are "
                "still to come from others. The one that ends last writes the manifest; run one again if none did"
            )
            return None
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
    rows_of = work.plan.rows()
    firsts = [0, *itertools.accumulate(rows_of)]
    written: deque[tuple[int, Future[dict[str, Any]]]] = deque()
    with (
        ThreadPoolExecutor(1, thread_name_prefix="xtk-read") as reading,
        ThreadPoolExecutor(1, thread_name_prefix="xtk-write") as writing,
    ):
        shards = read_shards(work.dealing, work.corpus, tokenizer, work.plan, set(numbers))
        coming = reading.submit(next, shards, None)
        while (read := coming.result()) is not None:
            coming = reading.submit(next, shards, None)
            number, pieces = read
            rows = _scored(work, teacher, number, pieces)
            place = Place(number, firsts[number], rows_of[number])
            while len(written) >= SHARDS_IN_FLIGHT or (written and written[0][1].done()):
                last, entry = written.popleft()
                yield last, entry.result()
            written.append((number, writing.submit(put_shard, folder, work.header, place, rows, work.ranks)))
        for last, entry in written:
            yield last, entry.result()


def _scored(work: Work, teacher: Teacher, number: int, pieces: list[tuple[Document, Sequence]]) -> list[Row]:
    """Score the documents of a shard.

    Raises:
        XtkError: what the teacher says of one of them is no distribution.
    """
    scores = teacher.score([tokens for _, tokens in pieces], _given(work, pieces))
    where = f"{work.corpus.name}, shard {number}"
    if len(scores) != len(pieces):
        raise XtkError(
            f"the teacher was asked for {len(pieces)} documents and answered for {len(scores)}",
            where=where,
            hint="this is a mistake of the backend: another --backend",
        )
    rows = [Row(document, tokens, said) for (document, tokens), said in zip(pieces, scores, strict=True)]
    for at, row in enumerate(rows):
        check_scores(
            row,
            f"{where}, row {at}",
            width=teacher.width,
            support=work.request.support,
            precision=work.request.precision,
        )
    return rows


def _given(work: Work, pieces: list[tuple[Document, Sequence]]) -> list[NDArray[np.int32]] | None:
    """Return the ids that the data names at each trained token, for `--support given`."""
    if work.request.support.kind != "given":
        return None
    if any(document.given_ids is None for document, _ in pieces):
        raise XtkError(
            "a document names no ids",
            where=work.corpus.name,
            hint="--support given takes them from a column: a list of ids for each trained token, in given_ids",
        )
    return [
        document.given_ids.padded(int(tokens.trained.sum()))
        for document, tokens in pieces
        if document.given_ids is not None
    ]
