"""Cache writers killed at any moment: finished shards stay, and the final cache equals an uninterrupted one."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import cache_writer_processes
import pytest
import small_inputs

from xtk.cache.reader import TeacherCache

DOCUMENTS = 60
SEED = 20_240


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    return small_inputs.write_jsonl(folder / "texts.jsonl", small_inputs.sentences(DOCUMENTS, seed=11))


@pytest.fixture(scope="module")
def uninterrupted(pair, texts, tmp_path_factory) -> tuple[dict[str, bytes], float]:
    """Return the files of an uninterrupted cache, and the seconds it took."""
    folder = tmp_path_factory.mktemp("whole") / "cache"
    started = time.monotonic()
    complete_cache(pair, texts, folder, 1)
    return cache_writer_processes.contents(folder), time.monotonic() - started


def complete_cache(pair, texts: Path, folder: Path, processes: int) -> None:
    writer = cache_writer_processes.start_writer(pair.teacher, texts, folder, processes=processes)
    writer.join(300)
    assert writer.exitcode == 0, cache_writer_processes.read_log(folder)


def assert_only_complete_files(folder: Path, uninterrupted: dict[str, bytes]) -> None:
    """Check that files with a final name have the final content, and a manifest exists only if all files do."""
    if not folder.exists():
        return
    found = {
        name: content
        for name, content in cache_writer_processes.contents(folder).items()
        if not name.startswith(".xtk-")
    }
    assert found.items() <= uninterrupted.items()
    assert "manifest.json" not in found or found == uninterrupted


def assert_resumes_to(pair, texts: Path, folder: Path, uninterrupted: dict[str, bytes], processes: int) -> None:
    complete_cache(pair, texts, folder, processes)
    assert cache_writer_processes.contents(folder) == uninterrupted  # byte for byte, without a lock or a partial file
    texts_in_cache = [row.document.text for row in TeacherCache(folder)]
    assert texts_in_cache == [json.loads(line)["text"] for line in texts.read_text(encoding="utf-8").splitlines()]


def kill_many_times(pair, texts, folder: Path, uninterrupted: dict[str, bytes], seconds: float, kills: int) -> int:
    """Kill writers after random delays; return the number of caches that were finished before a kill."""
    rng = random.Random(SEED)
    print(f"seed of the delays: {SEED}, up to {seconds:.2f} s")
    num_killed = num_caches = 0
    while num_killed < kills:
        target = folder / str(num_caches)
        writer = cache_writer_processes.start_writer(pair.teacher, texts, target)
        writer.join(rng.uniform(0, seconds))
        writer.kill()
        writer.join()
        assert_only_complete_files(target, uninterrupted)
        if writer.exitcode == 0:
            num_caches += 1
        else:
            assert writer.exitcode == -signal.SIGKILL, cache_writer_processes.read_log(target)
            num_killed += 1
    assert_resumes_to(pair, texts, folder / str(num_caches), uninterrupted, 1)
    for number in range(num_caches):
        assert cache_writer_processes.contents(folder / str(number)) == uninterrupted
    return num_caches


@pytest.mark.slow
def test_cache_is_identical_after_five_kills(pair, texts, uninterrupted, tmp_path):
    kill_many_times(pair, texts, tmp_path, *uninterrupted, kills=5)


@pytest.mark.long
def test_cache_is_identical_after_two_hundred_kills(pair, texts, uninterrupted, tmp_path):
    finished = kill_many_times(pair, texts, tmp_path, *uninterrupted, kills=200)
    print(f"{finished} caches were finished in between")


def kill_one_of(writer, rng: random.Random) -> bool:
    """Kill a writer or, with equal probability, one of its subprocesses; return True if it was the writer."""
    children = cache_writer_processes.child_processes(writer.pid)
    if rng.random() < 0.5 or not children:
        writer.kill()
        return True
    os.kill(rng.choice(children), signal.SIGKILL)
    return False


def wait_until_ended(processes: list[int]) -> bool:
    """Return True when processes have ended, False after 10 seconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if not any(Path(f"/proc/{process}/cmdline").exists() and Path(f"/proc/{process}/cmdline").read_bytes()
                   for process in processes):  # fmt: skip
            return True
        time.sleep(0.02)
    return False


def kill_two_processes(pair, texts, folder: Path, uninterrupted: dict[str, bytes], kills: int) -> None:
    """Kill a writer or one of its two subprocesses at random moments, mostly while they write.

    They start slowly: a delay counts from the next new shard on or, in one of four cases, from the start.
    """
    rng = random.Random(SEED)
    print(f"seed of the delays: {SEED}")
    num_killed = num_caches = 0
    while num_killed < kills:
        target = folder / str(num_caches)
        num_shards = len(list(target.glob("shard-*")))
        writer = cache_writer_processes.start_writer(pair.teacher, texts, target, processes=2)
        if rng.random() < 0.25:
            writer.join(rng.uniform(0, 5))
        else:
            while writer.is_alive() and len(list(target.glob("shard-*"))) == num_shards:
                time.sleep(0.005)
            writer.join(rng.uniform(0, 0.5))
        children = cache_writer_processes.child_processes(writer.pid) if writer.is_alive() else []
        was_parent = kill_one_of(writer, rng) if writer.is_alive() else False
        writer.join(60)
        assert wait_until_ended(children)
        assert_only_complete_files(target, uninterrupted)
        if writer.exitcode == 0:
            num_caches += 1
            continue
        num_killed += 1
        assert writer.exitcode == (-signal.SIGKILL if was_parent else 1)
        if not was_parent:
            assert "was killed by SIGKILL" in cache_writer_processes.read_log(target)
    assert_resumes_to(pair, texts, folder / str(num_caches), uninterrupted, 2)


@pytest.mark.long
def test_kill_of_one_of_two_processes_ends_all_and_the_cache_resumes(pair, texts, uninterrupted, tmp_path):
    kill_two_processes(pair, texts, tmp_path, uninterrupted[0], kills=2)


@pytest.mark.long
def test_cache_of_two_processes_is_identical_after_twenty_kills(pair, texts, uninterrupted, tmp_path):
    kill_two_processes(pair, texts, tmp_path, uninterrupted[0], kills=20)
