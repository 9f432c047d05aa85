"""Write locks: one writer at a time, and the lock of a killed process blocks no other writer."""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
import time
from pathlib import Path

import pytest

from xtk.errors import XtkError
from xtk.files.output import writer_lock

_forks = multiprocessing.get_context("forkserver")


def hold(folder: Path, writer_index: int, held: multiprocessing.Event, release: multiprocessing.Event) -> None:
    with writer_lock(folder, "cache", writer_index):
        held.set()
        release.wait(60)


@pytest.fixture
def holder():
    """Return a function that starts a process which holds the lock of a folder; kill these processes at the end."""
    started = []

    def start(folder: Path, writer_index: int = 0):
        held, release = _forks.Event(), _forks.Event()
        process = _forks.Process(target=hold, args=(folder, writer_index, held, release))
        process.start()
        assert held.wait(60)
        started.append(process)
        return process, release

    yield start
    for process in started:
        process.kill()
        process.join()


def test_second_writer_is_refused_and_the_error_names_the_lock_holder(holder, tmp_path):
    process, release = holder(tmp_path / "c")
    with (
        pytest.raises(XtkError, match="another process is writing this cache") as raised,
        writer_lock(tmp_path / "c", "cache"),
    ):
        pass
    assert f"process {process.pid} on {socket.gethostname()}" in raised.value.where
    assert str(tmp_path / "c") in raised.value.where
    assert raised.value.hint
    release.set()
    process.join(60)
    with writer_lock(tmp_path / "c", "cache"):
        pass
    assert list(tmp_path.iterdir()) == []  # no lock file


def test_writers_with_different_indexes_do_not_block_each_other(holder, tmp_path):
    holder(tmp_path / "c", 1)
    with writer_lock(tmp_path / "c", "cache", 0):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [".xtk-lock-c.1"]


def test_lock_of_a_killed_writer_is_ignored_and_removed(holder, tmp_path):
    process, _ = holder(tmp_path / "c")
    process.kill()
    process.join()
    assert len(list(tmp_path.iterdir())) == 1
    with writer_lock(tmp_path / "c", "cache"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_link_to_a_folder_has_the_lock_of_the_folder(holder, tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "c")
    holder(tmp_path / "c")
    with pytest.raises(XtkError, match="another process is writing"), writer_lock(tmp_path / "link", "cache"):
        pass


@pytest.mark.parametrize("name", ["x" * 250, "file/out"])
def test_names_that_are_too_long_and_paths_below_files_do_not_fail_because_of_the_lock(tmp_path, name):
    (tmp_path / "file").write_text("a file")
    with writer_lock(tmp_path / name, "cache"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def run_concurrently(target, argument_lists: list[tuple]) -> None:
    """Run a function in several processes at once; all of them must exit with 0."""
    processes = [_forks.Process(target=target, args=arguments) for arguments in argument_lists]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * len(processes)


def contend(folder: Path, seed: int, until: float) -> None:
    """Acquire and release the lock repeatedly; fail if two processes hold it at the same time."""
    rng = random.Random(seed)
    num_acquired = 0
    while time.time() < until or not num_acquired:
        try:
            with writer_lock(folder, "cache"):
                inside = os.open(folder.with_name("inside"), os.O_CREAT | os.O_EXCL)  # fails if it exists
                num_acquired += 1
                time.sleep(rng.uniform(0, 0.002))
                folder.with_name("inside").unlink()
                os.close(inside)
        except XtkError:
            time.sleep(rng.uniform(0, 0.001))


def test_concurrent_writers_never_hold_the_same_lock(tmp_path):
    until = time.time() + 2
    run_concurrently(contend, [(tmp_path / "c", seed, until) for seed in range(4)])
    assert list(tmp_path.glob("**/.xtk-lock*")) == []


def test_symlink_in_place_of_the_lock_is_not_followed(tmp_path):
    (tmp_path / "notes").write_text("notes")
    for target in (tmp_path / "notes", tmp_path / "nowhere" / "lock"):
        lock = tmp_path / ".xtk-lock-c"
        lock.symlink_to(target)
        with writer_lock(tmp_path / "c", "cache"):  # without a lock
            assert (tmp_path / "notes").read_text() == "notes"
        assert lock.is_symlink()
        lock.unlink()
