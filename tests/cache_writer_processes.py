"""Writers of caches as processes that can be killed: forks of one that has imported everything already."""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path

_forks = multiprocessing.get_context("forkserver")


def write(teacher: Path, corpus: Path, folder: Path, log: Path, processes: int, shard_tokens: int) -> None:
    """Write a cache; what goes wrong stands in the log."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(descriptor, number)
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
    from xtk.artifacts.corpus_reader import Corpus
    from xtk.errors import XtkError
    from xtk.teachers.cache_build_config import CacheRequest
    from xtk.teachers.cache_building import CachePartition, cache_teacher
    from xtk.tokens.teacher_logprobs import Support

    request = CacheRequest(teacher, "teacher", Support("top-k", top_k=4), shard_tokens=shard_tokens)
    try:
        cache_teacher(request, Corpus([str(corpus)]), folder, partition=CachePartition(processes))
    except XtkError as wrong:
        sys.stderr.write(f"{wrong}\n")
        sys.exit(1)


def start(
    teacher: Path, corpus: Path, folder: Path, *, processes: int = 1, shard_tokens: int = 40
) -> multiprocessing.Process:
    """Start a writer; its log lies beside the folder."""
    log = folder.with_name(folder.name + ".log")
    writer = _forks.Process(target=write, args=(teacher, corpus, folder, log, processes, shard_tokens))
    writer.start()
    return writer


def said(folder: Path) -> str:
    """Return what the last writer of a folder said."""
    return folder.with_name(folder.name + ".log").read_text(encoding="utf-8")


def children_of(process: int) -> list[int]:
    """Return the processes that a process has started."""
    found = []
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        found += [int(number) for number in task.read_text().split()]
    return found


def contents(folder: Path) -> dict[str, bytes]:
    """Return {name: bytes} of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write_share(teacher: Path, corpus: Path, folder: Path, rank: int, machines: int) -> None:
    """Write one machine's part of the cache of the fixtures."""
    from xtk.artifacts.corpus_reader import Corpus
    from xtk.teachers.cache_build_config import CacheRequest
    from xtk.teachers.cache_building import CachePartition, cache_teacher
    from xtk.tokens.teacher_logprobs import Support

    request = CacheRequest(teacher, "teacher", Support("top-k", top_k=16), shard_tokens=400)
    cache_teacher(request, Corpus([str(corpus)]), folder, partition=CachePartition(1, rank, machines))
