"""Running `xtk` in tests: as a new process, as a fork of a process with torch and transformers, or in this process.

The first two are real processes with their own standard streams, working directory and exit code. A fork saves the
seven seconds of the imports in each of several hundred runs. `run_here` is for refusals, which end before any work:
it has the same result without a process, but shows nothing about pipes and signals.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from unittest import mock

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


def run_here(
    *arguments: object, stdin: str = "", code: int | None = 0, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `xtk` in this process, with own standard streams and working directory; else as `run_xtk`."""
    from xtk import cli, terminal

    before, kept = Path.cwd(), [os.dup(stream) for stream in range(3)]
    handler = signal.getsignal(signal.SIGTERM)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as held:
        paths = [Path(folder, name) for name in ("in", "out", "err")]
        paths[0].write_text(stdin, encoding="utf-8")
        files = [held.enter_context(path.open("w" if at else "r", encoding="utf-8")) for at, path in enumerate(paths)]
        for name, file in zip(("stdin", "stdout", "stderr"), files, strict=True):
            held.enter_context(mock.patch.object(sys, name, file))
        held.enter_context(mock.patch.object(terminal, "_terminal", type(terminal._terminal)()))
        try:
            for stream, file in enumerate(files):
                os.dup2(file.fileno(), stream)
            os.chdir(cwd or before)
            held.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # pytest turns them into errors, which a process does not
            status = cli.run_command([str(argument) for argument in arguments])
        finally:
            os.chdir(before)
            signal.signal(signal.SIGTERM, handler)
            if terminal._terminal.results is not None:
                terminal._terminal.results.close()
            for stream, file in enumerate(files):
                if stream:
                    file.flush()
                os.dup2(kept[stream], stream)
                os.close(kept[stream])
        stdout, stderr = (path.read_text(encoding="utf-8") for path in paths[1:])
    if code is not None:
        assert status == code, f"exit code {status}\n{stdout}\n{stderr}"
    return subprocess.CompletedProcess(["xtk", *map(str, arguments)], status, stdout, stderr)
