"""Cache writers as processes that can be killed, forked from a process that has already imported everything."""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path

fork_context = multiprocessing.get_context("forkserver")


def write_cache(teacher: Path, corpus: Path, folder: Path, log: Path, processes: int, shard_tokens: int) -> None:
    """Write a cache, with standard output and errors in a log file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
    from xtk.cache.teacher_logprobs import Support
    from xtk.data.corpus_reader import Corpus
    from xtk.errors import XtkError
    from xtk.models.resolver import ModelRef
    from xtk.teachers.cache_build_config import CacheRequest
    from xtk.teachers.cache_building import CachePartition, cache_teacher

    request = CacheRequest(ModelRef(teacher, name="teacher"), Support("top-k", top_k=4), shard_tokens=shard_tokens)
    try:
        cache_teacher(request, Corpus([str(corpus)]), folder, partition=CachePartition(processes))
    except XtkError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(1)


def start_writer(
    teacher: Path, corpus: Path, folder: Path, *, processes: int = 1, shard_tokens: int = 40
) -> multiprocessing.Process:
    """Start a cache writer; its log is FOLDER.log."""
    log = folder.with_name(folder.name + ".log")
    writer = fork_context.Process(target=write_cache, args=(teacher, corpus, folder, log, processes, shard_tokens))
    writer.start()
    return writer


def read_log(folder: Path) -> str:
    """Return the log of the last writer of a folder."""
    return folder.with_name(folder.name + ".log").read_text(encoding="utf-8")


def child_processes(pid: int) -> list[int]:
    """Return the ids of the processes that a process has started."""
    pids = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        pids += [int(number) for number in task.read_text().split()]
    return pids


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder as {name: bytes}."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write_partition(teacher: Path, corpus: Path, folder: Path, rank: int, num_machines: int) -> None:
    """Write one machine's partition of the cache that the `cache` fixture of conftest.py writes."""
    from xtk.cache.teacher_logprobs import Support
    from xtk.data.corpus_reader import Corpus
    from xtk.models.resolver import ModelRef
    from xtk.teachers.cache_build_config import CacheRequest
    from xtk.teachers.cache_building import CachePartition, cache_teacher

    request = CacheRequest(ModelRef(teacher, name="teacher"), Support("top-k", top_k=16), shard_tokens=400)
    cache_teacher(request, Corpus([str(corpus)]), folder, partition=CachePartition(1, rank, num_machines))
