"""Running `xtk` in tests: as a new process, or as a fork of a process that has already imported torch and transformers.

Both are real processes with their own standard streams, working directory and exit code. A fork saves the seven
seconds of the imports in each of several hundred runs.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HEAVY = ["torch", "transformers", "accelerate", "pyarrow", "preloaded_models", "xtk.__main__", "xtk.cli"]
fork_context = multiprocessing.get_context("forkserver")


def start_fork_server() -> None:
    """Let the fork server, which does nothing else, import the heavy modules once."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    fork_context.set_forkserver_preload(HEAVY)


def run_in_fork(arguments: list[str], streams: list[str], cwd: str, env: dict[str, str]) -> None:
    for stream, path in enumerate(streams):
        descriptor = os.open(path, os.O_RDONLY if stream == 0 else os.O_WRONLY)
        os.dup2(descriptor, stream)
        os.close(descriptor)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["xtk", *arguments]
    from xtk.__main__ import main

    main()


def run_forked(
    arguments: list[str], stdin: str, cwd: Path, env: dict[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run `xtk` in a fork of the fork server."""
    with tempfile.TemporaryDirectory() as folder:
        streams = [str(Path(folder) / name) for name in ("in", "out", "err")]
        for path, content in zip(streams, (stdin, "", ""), strict=True):
            Path(path).write_text(content, encoding="utf-8")
        process = fork_context.Process(target=run_in_fork, args=(arguments, streams, str(cwd), env))
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
            raise TimeoutError(f"xtk {' '.join(arguments)}")
        stdout, stderr = (Path(path).read_text(encoding="utf-8") for path in streams[1:])
    return subprocess.CompletedProcess(["xtk", *arguments], process.exitcode or 0, stdout, stderr)


def run_fresh(
    arguments: list[str], stdin: str, cwd: Path, env: dict[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run `python -m xtk` as a new process."""
    return subprocess.run(
        [sys.executable, "-m", "xtk", *arguments],
        input=stdin, capture_output=True, text=True, cwd=cwd, env=env, timeout=timeout, check=False,
    )  # fmt: skip


def run_xtk(
    *arguments: object,
    stdin: str = "",
    code: int | None = 0,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    timeout: float = 300,
    fresh: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run `xtk` as a process (`fresh`: not as a fork); assert that its exit code is `code` unless that is None."""
    run = run_fresh if fresh else run_forked
    full_env = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    completed = run([str(argument) for argument in arguments], stdin, cwd or Path.cwd(), full_env, timeout)
    if code is not None:
        assert completed.returncode == code, f"exit code {completed.returncode}\n{completed.stdout}\n{completed.stderr}"
    return completed
