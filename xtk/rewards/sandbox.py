"""Runs untrusted code in isolated processes with limits of time, memory and disk.

See docs/explanation/sandbox.md for what each layer of isolation prevents.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from xtk.errors import XtkError

_START = (
    "import json, sys; package, control, setup = sys.argv[1:]; sys.path.insert(0, package); "
    "from xtk.rewards.sandbox_server import serve_sandbox; serve_sandbox(int(control), json.loads(setup))"
)


@dataclass(frozen=True)
class SandboxLimits:
    """Resource limits of one run."""

    seconds: float = 10.0  # wall-clock time; also the limit of CPU time per process
    memory: int = 1 << 30  # bytes of address space per process, and of memory of all processes together
    processes: int = 16  # processes and threads
    disk: int = 64 << 20  # bytes per file, and of all files together
    files: int = 64  # open files per process
    output: int = 10_000  # bytes of output that are kept


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended."""

    end: str  # `ended` by itself; killed for exceeding its `time` or `memory`
    code: int  # exit code; the negative signal number if it was killed
    output: str  # the beginning of its stdout and stderr
    seconds: float  # run time


class Sandbox:
    """A sandbox for Python code. Use it in a `with` statement, or close it.

    Args:
        allow_weak_isolation: run even if Linux refuses namespaces: the code can then read your files, but still cannot
            change files, use the network or start processes.
    """

    def __init__(self, limits: SandboxLimits | None = None, allow_weak_isolation: bool = False) -> None:
        self.limits = limits or SandboxLimits()
        if sys.platform != "linux":
            raise XtkError(
                "the sandbox for generated code needs Linux", hint="run xtk in a Linux container or virtual machine"
            )
        reason = self._start(use_namespaces=True)
        self.isolated = reason is None
        if reason is None:
            return
        if not allow_weak_isolation:
            raise XtkError(
                f"the sandbox for generated code cannot start without Linux namespaces: {reason}",
                hint="allow user namespaces (in a container: --security-opt seccomp=unconfined or --privileged), "
                "or use --reward tests:allow_weak_isolation=true, which lets the code read your files",
            )
        if (reason := self._start(use_namespaces=False)) is not None:
            raise XtkError(
                f"the sandbox for generated code cannot start, even with allow_weak_isolation=true: {reason}",
                hint="run xtk on another Linux machine, or in a container with --security-opt seccomp=unconfined",
            )
        if (trial := self.run("")).code != 0:
            self.close()
            raise XtkError(
                f"the sandbox for generated code needs seccomp filters, which this machine refuses: {trial.output}",
                hint="use a machine or container that allows seccomp filters",
            )

    def _start(self, use_namespaces: bool) -> str | None:
        """Start the sandbox process. Return an error message, or None on success."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        here = str(Path(__file__).parent.parent.parent)
        packages = list(dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]))
        with tempfile.TemporaryDirectory() as folder, theirs:
            setup = {
                "walled": use_namespaces,
                "folder": folder,
                "readable": _readable_folders(packages),
                "packages": packages,
            }
            arguments = [here, str(theirs.fileno()), json.dumps({**setup, "package": here})]
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", "-c", _START, *arguments],
                env={},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
            theirs.close()
            reply = ours.recv(4096).decode()
        self._channel = ours
        if reply == "ready":
            return None
        self.close()
        return reply or "the sandbox process ended during startup"

    def run(self, code: str) -> RunOutcome:
        """Run a Python program."""
        return self._outcome(self._send({"role": "program", "code": code}, []))

    def test(self, code: Sequence[str], tests: str, setup: Sequence[str] = (), entry_point: str = "") -> bool | None:
        """Return whether code passes its tests, in another process that it cannot reach; None: the tests are broken.

        Functions that the tests do not define are those of the code. They are called with copies of plain values
        (numbers, strings, bytes, collections) and return plain values. `code`: programs, run in order in one namespace.
        `setup`: helpers of the tests. If the tests define `check`, it is called with the function `entry_point` of the
        code.
        """
        job = {"tests": tests, "setup": list(setup), "entry_point": entry_point}
        here, there = socket.socketpair()
        verdicts, verdicts_writer = os.pipe()
        with here, there, os.fdopen(verdicts_writer, "wb") as writes:
            # Start the code first, so that its time limit ends first and the tests see it.
            code_report = self._send({"role": "code", "code": list(code)}, [here.fileno()])
            tests_report = self._send({"role": "tests", **job}, [there.fileno(), writes.fileno()], more_seconds=1)
        with os.fdopen(verdicts, "rb") as reads:
            marks = reads.read()
        self._outcome(tests_report)
        self._outcome(code_report)
        return None if b"?" in marks else marks == b"."

    def _send(self, job: dict[str, Any], files: list[int], more_seconds: float = 0) -> int:
        """Start a job. Return the read end of the pipe for its outcome."""
        limits = asdict(self.limits)
        limits["seconds"] += more_seconds
        source = os.memfd_create("job")
        report, written = os.pipe()
        try:
            with os.fdopen(os.dup(source), "wb") as file:
                file.write(json.dumps({**job, "limits": limits}).encode())
            os.lseek(source, 0, os.SEEK_SET)
            socket.send_fds(self._channel, [b"job"], [source, written, *files])
        except OSError as error:
            os.close(report)
            raise XtkError(
                f"the process of the sandbox for generated code has ended: {error}",
                hint="check that the machine has free memory, then run the same command again",
            ) from error
        finally:
            os.close(source)
            os.close(written)
        return report

    def _outcome(self, report: int) -> RunOutcome:
        with os.fdopen(report, "rb") as file:
            text = file.read()
        if not text:
            raise XtkError(
                "the sandbox for generated code could not start a program",
                hint="check the process limit (ulimit -u) and the free memory",
            )
        return RunOutcome(**json.loads(text))

    def close(self) -> None:
        """End the sandbox and all processes in it."""
        self._channel.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()


def _readable_folders(packages: Sequence[str]) -> list[str]:
    """Return the folders that Python needs: standard library, packages, system libraries."""
    python = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), str(Path(sys.base_prefix) / "lib")]
    system = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache"]
    return [*python, *packages, *system]
