"""Disks that are full or read-only, limits, closed streams and signals: a sentence, an exit code, no half artifact."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

XTK = [sys.executable, "-m", "xtk"]


def start(command: list, **more) -> subprocess.Popen:
    return subprocess.Popen(
        [*XTK, *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more
    )


def ended(process: subprocess.Popen, timeout: float = 200) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=timeout)
    assert "Traceback" not in err, err
    return process.returncode, out, " ".join(err.split())


@pytest.fixture
def mounted(tmp_path):
    """A small disk of its own, where this user may mount one: (folder, make it read-only)."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user cannot mount a disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("command", ["build-projection", "cache-teacher"])
def test_a_full_disk_leaves_nothing_half_written(pair, corpus, mounted, command):
    data = (corpus,) if command == "cache-teacher" else ()
    sides = (pair.teacher,) if data else (pair.student, pair.teacher)
    (mounted / "ballast").write_bytes(b"x" * 56_000)
    code, out, err = ended(start([command, *sides, *data, "-o", mounted / "out"]))
    assert (code, out) == (1, "")
    assert "xtk: the disk is full" in err
    assert not list(mounted.glob(".xtk-tmp-*"))
    assert not (mounted / "out" / "manifest.json").exists()


@pytest.mark.parametrize("command", ["build-projection", "cache-teacher"])
def test_a_read_only_disk_is_told_before_any_work(pair, corpus, mounted, command):
    subprocess.run(["mount", "-o", "remount,ro", str(mounted)], check=True)
    data = (corpus,) if command == "cache-teacher" else ()
    sides = (pair.teacher,) if data else (pair.student, pair.teacher)
    code, out, err = ended(start([command, *sides, *data, "-o", mounted / "out"]))
    assert (code, out) == (1, "")
    assert "no permission to write" in err or "read-only" in err


@pytest.mark.parametrize("limit", [3_000, 20_000])
def test_a_limit_on_the_size_of_files_is_told(pair, corpus, tmp_path, limit):
    for command in (["build-projection", pair.student, pair.teacher], ["cache-teacher", pair.teacher, corpus]):
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "numba")}
        process = start(
            [*command, "-o", tmp_path / "out"], env=environment,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        )  # fmt: skip
        code, out, err = ended(process)
        assert (code, out) == (1, ""), err
        assert "exceeds the size limit of this shell or file system" in err
        assert not (tmp_path / "out").is_file()
        assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize("arguments", [["inspect"], ["inspect", "--json"], ["--version"], ["--help"]])
def test_a_full_stdout_is_told(cache, arguments):
    given = [cache] if arguments[0] == "inspect" else []
    with Path("/dev/full").open("w") as full:
        process = subprocess.run(
            [*XTK, *arguments, *map(str, given)], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert process.returncode == 1, process.stderr
    assert "Traceback" not in process.stderr
    assert "cannot be written" in process.stderr or "the disk is full" in process.stderr


def test_a_closed_stdout_is_refused_before_any_work(pair, tmp_path):
    text = " ".join([*XTK, "build-projection", str(pair.student), str(pair.teacher), "-o", str(tmp_path / "p"), ">&-"])
    done = subprocess.run(["sh", "-c", text], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "stdout is closed" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_closed_stdin_and_stderr_are_no_files_of_the_command(pair, tmp_path):
    text = " ".join(
        [*XTK, "build-projection", str(pair.student), str(pair.teacher), "-o", str(tmp_path / "p"), "<&- 2>&-"]
    )
    done = subprocess.run(["sh", "-c", text], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'p'}\n")


def test_sigterm_while_writing_ends_with_a_sentence_and_the_next_run_goes_on(run, pair, tmp_path):
    import small_inputs

    many = small_inputs.write_jsonl(tmp_path / "many.jsonl", small_inputs.sentences(3000, seed=5))
    out = tmp_path / "out"
    command = ["cache-teacher", pair.teacher, many, "--top-k", 8, "--shard-tokens", 400, "-o", out]
    process = start(command)
    until = time.monotonic() + 120
    while not list(out.glob("shard-*")) and process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    code, printed, err = ended(process)
    assert (code, printed) == (128 + signal.SIGTERM, "")
    assert "xtk: terminated; run the same command again to resume" in err
    assert not list(out.glob(".xtk-lock-*"))
    assert not (out / "manifest.json").exists()


def test_memory_that_is_not_there_is_told():
    from xtk.errors import from_os_error

    for error in (MemoryError(), OSError(12, "Cannot allocate memory"), RuntimeError("not enough memory: you tried")):
        told = from_os_error(error)
        assert told is not None
        assert told.what == "there is not enough memory"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(30, "Read-only file system", "/x"), "this file system is read-only"),
        (OSError(27, "File too large", "/x"), "exceeds the size limit"),
        (RuntimeError("I/O error: File too large (os error 27)"), "exceeds the size limit"),
        (RuntimeError("Read-only file system (os error 30)"), "read-only"),
        (OSError(122, "Disk quota exceeded", "/x"), "the disk is full"),
        (OSError(24, "Too many open files", "/x"), "limit of open files of this shell is reached"),
        (OSError(5, "Input/output error", "/x"), "input/output error"),
        (UnicodeEncodeError("utf-8", "a\udcff", 1, 2, "surrogates not allowed"), "the path is not valid UTF-8"),
    ],
)
def test_errors_of_the_system_and_of_libraries_are_sentences(error, told):
    from xtk.errors import from_os_error

    found = from_os_error(error)
    assert found is not None
    assert told in found.what
