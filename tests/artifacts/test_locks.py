"""One writer at a time, and none that is held up by the dead."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import socket
import time
from pathlib import Path

import pytest

from xtk.artifacts.write_locks import exclusive_write_lock
from xtk.errors import XtkError

_forks = multiprocessing.get_context("forkserver")


def hold(folder: Path, rank: int, held: multiprocessing.Event, release: multiprocessing.Event) -> None:
    with exclusive_write_lock(folder, "cache", rank):
        held.set()
        release.wait(60)


@pytest.fixture
def holder():
    """Start a process that holds a folder; end it at the end."""
    started = []

    def start(folder: Path, rank: int = 0):
        held, release = _forks.Event(), _forks.Event()
        process = _forks.Process(target=hold, args=(folder, rank, held, release))
        process.start()
        assert held.wait(60)
        started.append(process)
        return process, release

    yield start
    for process in started:
        process.kill()
        process.join()


def test_a_second_writer_is_refused_and_told_who_holds_the_folder(holder, tmp_path):
    process, release = holder(tmp_path / "c")
    with (
        pytest.raises(XtkError, match="another process is writing this cache") as caught,
        exclusive_write_lock(tmp_path / "c", "cache"),
    ):
        pass
    assert f"process {process.pid} on {socket.gethostname()}" in caught.value.where
    assert str(tmp_path / "c") in caught.value.where
    assert caught.value.hint
    release.set()
    process.join(60)
    with exclusive_write_lock(tmp_path / "c", "cache"):
        pass
    assert not (tmp_path / "c").exists()  # it was made for the lock, and nothing was written


def test_ranks_do_not_hold_each_other_up(holder, tmp_path):
    holder(tmp_path / "c", 1)
    with exclusive_write_lock(tmp_path / "c", "cache", 0):
        pass
    assert [path.name for path in (tmp_path / "c").iterdir()] == [".xtk-lock-1"]


def test_a_killed_writer_holds_nobody_up_and_leaves_nothing(holder, tmp_path):
    for rank in (0, 1):
        process, _ = holder(tmp_path / "c", rank)
        process.kill()
        process.join()
    (tmp_path / "c" / "shard-00000.arrow").write_bytes(b"")
    assert len(list((tmp_path / "c").iterdir())) == 3
    with exclusive_write_lock(tmp_path / "c", "cache"):
        pass
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["shard-00000.arrow"]


def test_a_folder_that_cannot_be_written_to_or_is_none_is_left_to_the_writer(tmp_path):
    (tmp_path / "file").write_text("a file")
    with exclusive_write_lock(tmp_path / "file", "cache"):
        pass
    assert (tmp_path / "file").read_text() == "a file"


def run_together(work, arguments: list[tuple]) -> None:
    """Run a function in several processes at once; none of them may fail."""
    processes = [_forks.Process(target=work, args=some) for some in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * len(processes)


def contend(folder: Path, seed: int, until: float) -> None:
    """Take and give back the lock; while it is held, nobody else may be inside."""
    draw = random.Random(seed)
    taken = 0
    while time.time() < until or not taken:
        try:
            with exclusive_write_lock(folder, "cache"):
                inside = os.open(folder.with_name("inside"), os.O_CREAT | os.O_EXCL)  # fails if another one is there
                taken += 1
                time.sleep(draw.uniform(0, 0.002))
                folder.with_name("inside").unlink()
                os.close(inside)
        except XtkError:
            time.sleep(draw.uniform(0, 0.001))


def test_of_many_that_take_and_remove_the_lock_only_one_is_ever_inside(tmp_path):
    until = time.time() + 2
    run_together(contend, [(tmp_path / "c", seed, until) for seed in range(4)])
    assert list(tmp_path.glob("**/.xtk-lock*")) == []


def take_again_and_again(folder: Path, rank: int, until: float) -> None:
    while time.time() < until:
        with exclusive_write_lock(folder, "cache", rank):
            pass


def test_a_writer_that_ends_never_refuses_one_that_starts_with_another_rank(tmp_path):
    until = time.time() + 3
    run_together(take_again_and_again, [(tmp_path / "c", rank, until) for rank in range(4)])
    assert list(tmp_path.glob("**/.xtk-lock*")) == []


def make_and_remove(folder: Path, until: float) -> None:
    while time.time() < until:
        with contextlib.suppress(OSError):
            folder.mkdir()
        with contextlib.suppress(OSError):
            folder.rmdir()


def test_a_folder_that_others_make_and_remove_is_never_written_without_its_lock(tmp_path):
    until = time.time() + 2
    other = _forks.Process(target=make_and_remove, args=(tmp_path / "c", until))
    other.start()
    while time.time() < until:
        with exclusive_write_lock(tmp_path / "c", "cache"):
            assert (tmp_path / "c" / ".xtk-lock-0").exists()
    other.join(60)


def test_a_link_where_the_lock_would_be_changes_no_file_of_the_user(tmp_path):
    (tmp_path / "notes").write_text("notes")
    (tmp_path / "c").mkdir()
    for target in (tmp_path / "notes", tmp_path / "nowhere" / "lock"):
        (tmp_path / "c" / ".xtk-lock-0").symlink_to(target)
        with (
            pytest.raises(OSError, match="symbolic links"),
            exclusive_write_lock(tmp_path / "c", "cache"),
        ):
            pass
        assert (tmp_path / "notes").read_text() == "notes"
        (tmp_path / "c" / ".xtk-lock-0").unlink()
