"""A writer that is killed at any instant: what is finished stays, and the finished cache is that of no kill at all."""

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

from xtk.artifacts.teacher_cache import TeacherCache

DOCUMENTS = 60
SEED = 20_240


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    return small_inputs.write_jsonl(folder / "texts.jsonl", small_inputs.sentences(DOCUMENTS, seed=11))


@pytest.fixture(scope="module")
def whole(pair, texts, tmp_path_factory) -> tuple[dict[str, bytes], float]:
    """The files of a cache that nobody disturbed, and the seconds that it took."""
    folder = tmp_path_factory.mktemp("whole") / "cache"
    started = time.monotonic()
    finish(pair, texts, folder, 1)
    return cache_writer_processes.contents(folder), time.monotonic() - started


def finish(pair, texts: Path, folder: Path, processes: int) -> None:
    writer = cache_writer_processes.start(pair.teacher, texts, folder, processes=processes)
    writer.join(300)
    assert writer.exitcode == 0, cache_writer_processes.said(folder)


def assert_only_whole_shards(folder: Path, whole: dict[str, bytes]) -> None:
    """What has its final name after a kill is what it is in the end; the manifest is not there before all of it."""
    if not folder.exists():
        return
    found = {
        name: content
        for name, content in cache_writer_processes.contents(folder).items()
        if not name.startswith(".xtk-")
    }
    assert found.items() <= whole.items()
    assert "manifest.json" not in found or found == whole


def assert_ends_equal(pair, texts: Path, folder: Path, whole: dict[str, bytes], processes: int) -> None:
    finish(pair, texts, folder, processes)
    assert (
        cache_writer_processes.contents(folder) == whole
    )  # byte for byte, and nothing beside it: no lock, nothing half
    read = [row.document.text for row in TeacherCache(folder)]
    assert read == [json.loads(line)["text"] for line in texts.read_text(encoding="utf-8").splitlines()]


def kill_many_times(pair, texts, folder: Path, whole: dict[str, bytes], seconds: float, kills: int) -> int:
    """Kill writers after random delays, again and again; return how many caches were finished on the way."""
    draw = random.Random(SEED)
    print(f"delays are drawn from seed {SEED}, up to {seconds:.2f} s")
    killed = caches = 0
    while killed < kills:
        target = folder / str(caches)
        writer = cache_writer_processes.start(pair.teacher, texts, target)
        writer.join(draw.uniform(0, seconds))
        writer.kill()
        writer.join()
        assert_only_whole_shards(target, whole)
        if writer.exitcode == 0:
            caches += 1
        else:
            assert writer.exitcode == -signal.SIGKILL, cache_writer_processes.said(target)
            killed += 1
    assert_ends_equal(pair, texts, folder / str(caches), whole, 1)
    for number in range(caches):
        assert cache_writer_processes.contents(folder / str(number)) == whole
    return caches


@pytest.mark.slow
def test_five_kills(pair, texts, whole, tmp_path):
    kill_many_times(pair, texts, tmp_path, *whole, kills=5)


@pytest.mark.long
def test_two_hundred_kills(pair, texts, whole, tmp_path):
    finished = kill_many_times(pair, texts, tmp_path, *whole, kills=200)
    print(f"{finished} caches were finished in between")


def kill_one_of(writer, draw: random.Random) -> bool:
    """Kill a writer or, as often, one of its processes; say whether it was the writer."""
    children = cache_writer_processes.children_of(writer.pid)
    if draw.random() < 0.5 or not children:
        writer.kill()
        return True
    os.kill(draw.choice(children), signal.SIGKILL)
    return False


def gone(processes: list[int]) -> bool:
    """Wait until processes have ended."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if not any(Path(f"/proc/{process}/cmdline").exists() and Path(f"/proc/{process}/cmdline").read_bytes()
                   for process in processes):  # fmt: skip
            return True
        time.sleep(0.02)
    return False


def kill_two_processes(pair, texts, folder: Path, whole: dict[str, bytes], kills: int) -> None:
    """Kill, of two processes or the one that watches them, any one at a random moment, most of them while they write.

    They start slowly: a delay counts from a new shard on, or, once in four times, from the very start.
    """
    draw = random.Random(SEED)
    print(f"delays are drawn from seed {SEED}")
    killed = caches = 0
    while killed < kills:
        target = folder / str(caches)
        there = len(list(target.glob("shard-*")))
        writer = cache_writer_processes.start(pair.teacher, texts, target, processes=2)
        if draw.random() < 0.25:
            writer.join(draw.uniform(0, 5))
        else:
            while writer.is_alive() and len(list(target.glob("shard-*"))) == there:
                time.sleep(0.005)
            writer.join(draw.uniform(0, 0.5))
        children = cache_writer_processes.children_of(writer.pid) if writer.is_alive() else []
        was_parent = kill_one_of(writer, draw) if writer.is_alive() else False
        writer.join(60)
        assert gone(children)
        assert_only_whole_shards(target, whole)
        if writer.exitcode == 0:
            caches += 1
            continue
        killed += 1
        assert writer.exitcode == (-signal.SIGKILL if was_parent else 1)
        if not was_parent:
            assert "was killed by SIGKILL" in cache_writer_processes.said(target)
    assert_ends_equal(pair, texts, folder / str(caches), whole, 2)


@pytest.mark.long
def test_a_kill_of_two_processes_ends_all_of_them_and_the_work_goes_on(pair, texts, whole, tmp_path):
    kill_two_processes(pair, texts, tmp_path, whole[0], kills=2)


@pytest.mark.long
def test_twenty_kills_of_two_processes(pair, texts, whole, tmp_path):
    kill_two_processes(pair, texts, tmp_path, whole[0], kills=20)
