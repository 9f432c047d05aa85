"""Running `xtk` in tests: as a fresh process, or as a fork of one that has imported torch and transformers already.

Both are real processes with their own standard streams, working directory and exit code; the fork saves the seven
seconds that imports take, some hundred times.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HEAVY = ["torch", "transformers", "accelerate", "pyarrow", "preloaded_models", "xtk.__main__", "xtk.cli"]
_forks = multiprocessing.get_context("forkserver")


def start_fork_server() -> None:
    """Import the heavy things once, in a process that does nothing else."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    _forks.set_forkserver_preload(HEAVY)


def _child(arguments: list[str], streams: list[str], cwd: str, env: dict[str, str]) -> None:
    for number, path in enumerate(streams):
        descriptor = os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY)
        os.dup2(descriptor, number)
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
    """Run `xtk` in a fork of the server."""
    with tempfile.TemporaryDirectory() as folder:
        streams = [str(Path(folder) / name) for name in ("in", "out", "err")]
        for path, content in zip(streams, (stdin, "", ""), strict=True):
            Path(path).write_text(content, encoding="utf-8")
        process = _forks.Process(target=_child, args=(arguments, streams, str(cwd), env))
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
            raise TimeoutError(f"xtk {' '.join(arguments)}")
        out, err = (Path(path).read_text(encoding="utf-8") for path in streams[1:])
    return subprocess.CompletedProcess(["xtk", *arguments], process.exitcode or 0, out, err)


def run_fresh(
    arguments: list[str], stdin: str, cwd: Path, env: dict[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run `python -m xtk`."""
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
    """Run `xtk` as a process (a `fresh` one imports everything itself); assert its exit code unless `code` is None."""
    start = run_fresh if fresh else run_forked
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    done = start([str(argument) for argument in arguments], stdin, cwd or Path.cwd(), surroundings, timeout)
    if code is not None:
        assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done
