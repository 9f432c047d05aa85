"""Runs that are ended on their way, and whether they end as the one that nothing ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from xtk.artifacts.run_folders import read_recipe
from xtk.training.metrics_file import read_metrics


def start(arguments: Sequence[object], launcher: Sequence[object] = ()) -> subprocess.Popen[str]:
    """Start a run as a process of its own, `python LAUNCHER... -m xtk ARGUMENTS...`."""
    return subprocess.Popen(
        [sys.executable, *map(str, [*launcher, "-m", "xtk", *arguments])],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
        # A shell starts what runs in its background with ctrl-C ignored, and that is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_for(path: Path, process: subprocess.Popen[str], seconds: float = 120) -> None:
    """Return when a file or folder is there, or the process has ended."""
    until = time.monotonic() + seconds
    while not path.exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.001)


def stop_at_a_checkpoint(
    arguments: Sequence[object], output: Path, how: int, *extra: object, at: int = 4
) -> tuple[int, str]:
    """Start a run, send a signal when `checkpoint-AT` appears; return the exit code and what it wrote to stderr."""
    process = start([*arguments, output, *extra])
    wait_for(output / f"checkpoint-{at}", process)
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, how)
    return ended(process, output)


def ended(process: subprocess.Popen[str], output: Path) -> tuple[int, str]:
    """Wait until a run has ended before its end; return the exit code and what it wrote to stderr."""
    stdout, stderr = process.communicate(timeout=60)
    assert stdout == ""
    assert not (output / "xtk.json").exists()
    return process.returncode, stderr


def told(folder: Path) -> list[dict[str, object]]:
    """The metrics without clocks."""
    clocks = {"tokens_per_second", "training_seconds", "data_wait_fraction", "peak_memory_gib"}
    return [
        {key: value for key, value in line.items() if key not in clocks}
        for line in read_metrics(folder / "metrics.jsonl")
    ]


def assert_same(found: Path, expected: Path) -> None:
    assert told(found) == told(expected)
    assert (found / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()
    assert read_recipe(found) == read_recipe(expected)


def processes_that_name(output: Path) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if str(output).encode() in words and b"distill" in words:
                found.append(int(path.parent.name))
    return found


def worker(output: Path, rank: int) -> int:
    """Return the process of a run that has this rank."""
    for found in processes_that_name(output):
        with contextlib.suppress(OSError):
            if f"RANK={rank}".encode() in Path(f"/proc/{found}/environ").read_bytes().split(b"\0"):
                return found
    raise LookupError(f"no process of rank {rank}")


def assert_none_left(output: Path, seconds: float = 20) -> None:
    """Fail if a process of a run is still there after a while."""
    until = time.monotonic() + seconds
    while (left := processes_that_name(output)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left
