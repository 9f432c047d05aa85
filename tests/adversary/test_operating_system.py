"""Full or read-only disks, limits, closed streams and signals: an error message, exit code, no partial artifact."""

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


def start(command: list, **options) -> subprocess.Popen:
    return subprocess.Popen(
        [*XTK, *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def wait_for_exit(process: subprocess.Popen, timeout: float = 200) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=timeout)
    assert "Traceback" not in err, err
    return process.returncode, out, " ".join(err.split())


@pytest.fixture
def small_disk(tmp_path):
    """Yield the folder of a small separate file system; skip the test if this user cannot mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user cannot mount a disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("command", ["build-projection", "cache-teacher"])
def test_full_disk_leaves_no_partial_output(pair, corpus, small_disk, command):
    data = (corpus,) if command == "cache-teacher" else ()
    models = (pair.teacher,) if data else (pair.student, pair.teacher)
    (small_disk / "ballast").write_bytes(b"x" * 56_000)
    code, out, err = wait_for_exit(start([command, *models, *data, "-o", small_disk / "out"]))
    assert (code, out) == (1, "")
    assert "xtk: the disk is full" in err
    assert not list(small_disk.glob(".xtk-tmp-*"))
    assert not (small_disk / "out" / "manifest.json").exists()


@pytest.mark.parametrize("command", ["build-projection", "cache-teacher"])
def test_read_only_disk_is_refused(pair, corpus, small_disk, command):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    data = (corpus,) if command == "cache-teacher" else ()
    models = (pair.teacher,) if data else (pair.student, pair.teacher)
    code, out, err = wait_for_exit(start([command, *models, *data, "-o", small_disk / "out"]))
    assert (code, out) == (1, "")
    assert "no permission to write" in err or "read-only" in err


@pytest.mark.parametrize("limit", [3_000, 20_000])
def test_file_size_limit_is_reported(pair, corpus, tmp_path, limit):
    for command in (["build-projection", pair.student, pair.teacher], ["cache-teacher", pair.teacher, corpus]):
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "numba")}
        process = start(
            [*command, "-o", tmp_path / "out"], env=environment,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        )  # fmt: skip
        code, out, err = wait_for_exit(process)
        assert (code, out) == (1, ""), err
        assert "exceeds the size limit of this shell or file system" in err
        assert not (tmp_path / "out").is_file()
        assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize("arguments", [["inspect"], ["inspect", "--json"], ["--version"], ["--help"]])
def test_full_stdout_is_reported(cache, arguments):
    inputs = [cache] if arguments[0] == "inspect" else []
    with Path("/dev/full").open("w") as full:
        process = subprocess.run(
            [*XTK, *arguments, *map(str, inputs)], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert process.returncode == 1, process.stderr
    assert "Traceback" not in process.stderr
    assert "cannot be written" in process.stderr or "the disk is full" in process.stderr


def test_closed_stdout_is_refused_before_any_work(pair, tmp_path):
    script = " ".join(
        [*XTK, "build-projection", str(pair.student), str(pair.teacher), "-o", str(tmp_path / "p"), ">&-"]
    )
    result = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (1, "")
    assert "stdout is closed" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_command_works_with_closed_stdin_and_stderr(pair, tmp_path):
    script = " ".join(
        [*XTK, "build-projection", str(pair.student), str(pair.teacher), "-o", str(tmp_path / "p"), "<&- 2>&-"]
    )
    result = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, f"{tmp_path / 'p'}\n")


def test_sigterm_while_writing_ends_with_a_message_and_the_next_run_keeps_the_shards(run, pair, tmp_path):
    import small_inputs

    data = small_inputs.write_jsonl(tmp_path / "many.jsonl", small_inputs.sentences(3000, seed=5))
    out = tmp_path / "out"
    command = ["cache-teacher", pair.teacher, data, "--top-k", 8, "--shard-tokens", 400, "-o", out]
    process = start(command)
    deadline = time.monotonic() + 120
    while not list(out.glob("shard-*")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    code, printed, err = wait_for_exit(process)
    assert (code, printed) == (128 + signal.SIGTERM, "")
    assert "xtk: terminated; run the same command again to resume" in err
    assert not list(out.glob(".xtk-lock-*"))
    assert not (out / "manifest.json").exists()
    kept = {path: path.stat().st_mtime_ns for path in out.glob("shard-*")}
    assert kept
    run(*command)
    assert (out / "manifest.json").exists()
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


def test_out_of_memory_errors_have_a_plain_message():
    from xtk.errors import from_os_error

    for error in (MemoryError(), OSError(12, "Cannot allocate memory"), RuntimeError("not enough memory: you tried")):
        converted = from_os_error(error)
        assert converted is not None
        assert converted.what == "there is not enough memory"


@pytest.mark.parametrize(
    ("error", "message"),
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
def test_errors_of_the_system_and_of_libraries_have_a_plain_message(error, message):
    from xtk.errors import from_os_error

    converted = from_os_error(error)
    assert converted is not None
    assert message in converted.what
