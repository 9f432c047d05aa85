"""examples/cluster/ray_cache_teacher.py: two Ray workers, one of them killed, write the same cache as one process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import cache_writer_processes
import pytest

pytest.importorskip("ray", reason="ray is missing: run nox -s cluster")
pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "examples" / "cluster" / "ray_cache_teacher.py"
OPTIONS = ("--top-k", 16, "--shard-tokens", 100)


@contextlib.contextmanager
def started_script(folder: Path, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Start the script with a separate Ray instance, which ends with it."""
    root = str(Path(__file__).parents[2])
    env = {
        **os.environ,
        "PYTHONPATH": root,
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "HOME": str(folder),
    }  # Ray stores a token in HOME
    env.pop("RAY_ADDRESS", None)
    process = subprocess.Popen([sys.executable, str(SCRIPT), *map(str, arguments)], cwd=folder, env=env, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=60)


def scoring_process(part: int, cache: Path) -> tuple[int, int]:
    """Return the ids of the process that scores a part and of its parent."""
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = command.read_bytes().decode(errors="replace").split("\0")
            if str(cache) in words and words[-3:] == ["--machine-rank", str(part), ""]:
                parent = int((command.parent / "stat").read_text().rpartition(")")[2].split()[1])
                return int(command.parent.name), parent
    raise LookupError(f"no process scores part {part}")


def wait_for(file: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 200
    while not file.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_killed_worker_is_replaced_and_the_cache_equals_that_of_one_process(run, pair, corpus, tmp_path):
    run("cache-teacher", pair.teacher, corpus, *OPTIONS, "-o", tmp_path / "one")
    cache = tmp_path / "cache"
    with started_script(tmp_path, "--parts", 2, pair.teacher, corpus, *OPTIONS, "-o", cache) as process:
        wait_for(cache / "shard-00001.arrow", process)
        scorer, worker = scoring_process(1, cache)
        os.kill(scorer, signal.SIGSTOP)  # it cannot finish before its worker is killed
        before = {path.name for path in cache.glob("shard-*.arrow")}
        assert Path(f"/proc/{worker}/cmdline").read_bytes().startswith(b"ray::run_xtk")
        os.kill(worker, signal.SIGKILL)
        stdout, stderr = process.communicate(timeout=300)
    print(f"killed worker {worker} and with it process {scorer}; shards then: {sorted(before)}\n{stdout}\n{stderr}")
    assert process.returncode == 0, stderr
    assert stdout == f"{cache}\n"
    assert not Path(f"/proc/{scorer}").exists()
    assert "shards already exist" in stderr  # the second attempt continues where the first one stopped
    assert before < {path.name for path in cache.glob("shard-*.arrow")}
    assert cache_writer_processes.contents(cache) == cache_writer_processes.contents(tmp_path / "one")


def test_caches_of_parts_are_merged_and_a_part_without_data_fails(run, pair, corpus, tmp_path):
    lines = corpus.read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "corpus-0.jsonl").write_text("".join(lines[:20]), encoding="utf-8")
    arguments = ("--parts", 2, "--retries", 1, pair.teacher, "corpus-{part}.jsonl", *OPTIONS, "-o", "cache")
    with started_script(tmp_path, *arguments) as process:
        _, stderr = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "1 of 2 parts failed; finished shards are kept" in stderr
    assert not (tmp_path / "cache").exists()

    (tmp_path / "corpus-1.jsonl").write_text("".join(lines[20:]), encoding="utf-8")
    with started_script(tmp_path, *arguments) as process:
        stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    assert stdout == "cache\n"
    for part in (0, 1):
        run("cache-teacher", pair.teacher, f"corpus-{part}.jsonl", *OPTIONS, "-o", f"one-{part}", cwd=tmp_path)
    run("cache", "merge", "one-0", "one-1", "-o", "one", cwd=tmp_path)
    assert cache_writer_processes.contents(tmp_path / "cache") == cache_writer_processes.contents(tmp_path / "one")
