"""Runs that are interrupted and resumed, and their comparison with an uninterrupted run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from xtk.runs.folder import read_recipe
from xtk.runs.metrics_file import read_metrics


def start_run(
    arguments: Sequence[object], launcher: Sequence[object] = (), ignored_signals: Sequence[int] = ()
) -> subprocess.Popen[str]:
    """Start a run as a separate process, `python LAUNCHER... -m xtk ARGUMENTS...`, with some signals ignored."""
    return subprocess.Popen(
        [sys.executable, *map(str, [*launcher, "-m", "xtk", *arguments])],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
        preexec_fn=lambda: [signal.signal(number, signal.SIG_IGN) for number in ignored_signals],
    )


def wait_for_path(path: Path, process: subprocess.Popen[str], timeout: float = 120) -> None:
    """Wait until a file or folder exists, the process has ended, or the timeout has passed."""
    wait_until(path.exists, process, timeout)


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str], timeout: float = 120) -> None:
    """Wait until a condition holds, the process has ended, or the timeout has passed."""
    deadline = time.monotonic() + timeout
    while not condition() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)


def signal_at_checkpoint(
    arguments: Sequence[object], output: Path, signal_number: int, *extra: object, step: int = 4
) -> tuple[int, str]:
    """Start a run and send it a signal at `checkpoint-STEP` or a later one; return its exit code and its stderr."""
    process = start_run([*arguments, output, *extra])
    # `--save-total-limit` may remove `checkpoint-STEP` before this process sees it.
    names = [f"checkpoint-{later}" for later in range(step, step + 100)]
    wait_until(lambda: any((output / name).exists() for name in names), process)
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal_number)
    return exit_of_unfinished_run(process, output)


def exit_of_unfinished_run(process: subprocess.Popen[str], output: Path) -> tuple[int, str]:
    """Wait for a run that stops before its last step; return its exit code and its stderr."""
    stdout, stderr = process.communicate(timeout=60)
    assert stdout == ""
    assert not (output / "xtk.json").exists()
    return process.returncode, stderr


def deterministic_metrics(folder: Path) -> list[dict[str, object]]:
    """Return the records of `metrics.jsonl` without timings and memory."""
    timing_metrics = {"tokens_per_second", "training_seconds", "data_wait_fraction", "peak_memory_gib"}
    return [
        {key: value for key, value in line.items() if key not in timing_metrics}
        for line in read_metrics(folder / "metrics.jsonl")
    ]


def assert_equal_runs(run: Path, expected_run: Path) -> None:
    assert deterministic_metrics(run) == deterministic_metrics(expected_run)
    assert (run / "model.safetensors").read_bytes() == (expected_run / "model.safetensors").read_bytes()
    assert read_recipe(run) == read_recipe(expected_run)


def processes_of_run(output: Path) -> list[int]:
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if str(output).encode() in words and b"distill" in words:
                pids.append(int(path.parent.name))
    return pids


def process_of_rank(output: Path, rank: int) -> int:
    """Return the process id of a rank of a run."""
    for pid in processes_of_run(output):
        with contextlib.suppress(OSError):
            if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return pid
    raise LookupError(f"no process of rank {rank}")


def assert_no_processes_left(output: Path, timeout: float = 20) -> None:
    """Fail if a process of the run still exists after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while (pids := processes_of_run(output)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not pids
