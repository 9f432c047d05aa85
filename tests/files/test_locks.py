"""Write locks: one writer at a time, and the lock of a killed process blocks no other writer."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import socket
import time
from pathlib import Path

import pytest

from xtk.errors import XtkError
from xtk.files.write_locks import exclusive_write_lock

_forks = multiprocessing.get_context("forkserver")


def hold(folder: Path, writer_index: int, held: multiprocessing.Event, release: multiprocessing.Event) -> None:
    with exclusive_write_lock(folder, "cache", writer_index):
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
        exclusive_write_lock(tmp_path / "c", "cache"),
    ):
        pass
    assert f"process {process.pid} on {socket.gethostname()}" in raised.value.where
    assert str(tmp_path / "c") in raised.value.where
    assert raised.value.hint
    release.set()
    process.join(60)
    with exclusive_write_lock(tmp_path / "c", "cache"):
        pass
    assert not (tmp_path / "c").exists()  # created for the lock and left empty, so it was removed


def test_writers_with_different_indexes_do_not_block_each_other(holder, tmp_path):
    holder(tmp_path / "c", 1)
    with exclusive_write_lock(tmp_path / "c", "cache", 0):
        pass
    assert [path.name for path in (tmp_path / "c").iterdir()] == [".xtk-lock-1"]


def test_lock_of_a_killed_writer_is_ignored_and_removed(holder, tmp_path):
    for writer_index in (0, 1):
        process, _ = holder(tmp_path / "c", writer_index)
        process.kill()
        process.join()
    (tmp_path / "c" / "shard-00000.arrow").write_bytes(b"")
    assert len(list((tmp_path / "c").iterdir())) == 3
    with exclusive_write_lock(tmp_path / "c", "cache"):
        pass
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["shard-00000.arrow"]


def test_locking_a_path_that_is_a_file_does_nothing(tmp_path):
    (tmp_path / "file").write_text("a file")
    with exclusive_write_lock(tmp_path / "file", "cache"):
        pass
    assert (tmp_path / "file").read_text() == "a file"


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
            with exclusive_write_lock(folder, "cache"):
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


def acquire_repeatedly(folder: Path, writer_index: int, until: float) -> None:
    while time.time() < until:
        with exclusive_write_lock(folder, "cache", writer_index):
            pass


def test_ending_writer_never_blocks_a_writer_with_another_index(tmp_path):
    until = time.time() + 3
    run_concurrently(acquire_repeatedly, [(tmp_path / "c", writer_index, until) for writer_index in range(4)])
    assert list(tmp_path.glob("**/.xtk-lock*")) == []


def create_and_remove_repeatedly(folder: Path, until: float) -> None:
    while time.time() < until:
        with contextlib.suppress(OSError):
            folder.mkdir()
        with contextlib.suppress(OSError):
            folder.rmdir()


def test_lock_is_held_although_another_process_creates_and_removes_the_folder(tmp_path):
    until = time.time() + 2
    other = _forks.Process(target=create_and_remove_repeatedly, args=(tmp_path / "c", until))
    other.start()
    while time.time() < until:
        with exclusive_write_lock(tmp_path / "c", "cache"):
            assert (tmp_path / "c" / ".xtk-lock-0").exists()
    other.join(60)


def test_symlink_in_place_of_the_lock_is_refused_and_its_target_unchanged(tmp_path):
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
