"""Run code that nobody has read: shut in, limited, and judged from outside.

What each wall stops is told in docs/explanation/sandbox.md.
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
from types import TracebackType
from typing import Any

from xtk.errors import XtkError

_START = (
    "import json, sys; package, control, setup = sys.argv[1:]; sys.path.insert(0, package); "
    "from xtk.rewards.sandbox_server import serve_sandbox; serve_sandbox(int(control), json.loads(setup))"
)


@dataclass(frozen=True)
class SandboxLimits:
    """What one run may use.

    Attributes:
        seconds: by the clock; of the CPU, as much for each process.
        memory: bytes of address space of a process, and of the memory of all its processes together.
        processes: with their threads.
        disk: bytes of a file, and of all files together.
        files: open at once, a process.
        output: bytes kept of what it prints.
    """

    seconds: float = 10.0
    memory: int = 1 << 30
    processes: int = 16
    disk: int = 64 << 20
    files: int = 64
    output: int = 10_000


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended.

    Attributes:
        end: `ended` by itself; killed for its `time` or `memory`.
        code: the exit code; minus the signal's number where it was killed.
        output: the beginning of what it printed, errors too.
        seconds: how long it ran.
    """

    end: str
    code: int
    output: str
    seconds: float


@dataclass(frozen=True)
class TestVerdict:
    """What tests say of code.

    Attributes:
        num_passed: how many asserts held.
        num_asserts: how many there are: those that were evaluated, or those in the text where that is more.
        all_passed: all were run and all held. None: the tests are broken, or call nothing.
        code_outcome: how the process of the code ended.
    """

    num_passed: int
    num_asserts: int
    all_passed: bool | None
    code_outcome: RunOutcome


class Sandbox:
    """A place to run code. Use it in a `with`, or close it.

    Args:
        limits: of each run.
        allow_weak_isolation: where Linux refuses namespaces, run all the same: code can then read the files that you
            can read, but still changes none, opens no network and starts no process.

    Raises:
        XtkError: this machine cannot build the walls, and `allow_weak_isolation` was not asked for or does not help.
    """

    def __init__(self, limits: SandboxLimits | None = None, allow_weak_isolation: bool = False) -> None:
        self.limits = limits or SandboxLimits()
        if sys.platform != "linux":
            raise XtkError("the sandbox needs Linux", hint="run it in a container or a virtual machine with Linux")
        why = self._start(walled=True)
        self.isolated = why is None
        if why is None:
            return
        if not allow_weak_isolation:
            raise XtkError(
                "this machine does not let xtk shut code in: no namespaces",
                where=why,
                hint="allow namespaces of users (a container needs --security-opt seccomp=unconfined or --privileged), "
                "or allow the weaker sandbox, in which code can read your files",
            )
        if (why := self._start(walled=False)) is not None:
            raise XtkError("this machine does not let xtk shut code in", where=why)
        if (trial := self.run("")).code != 0:
            self.close()
            raise XtkError("this machine does not let xtk shut code in: no filter of calls", where=trial.output)

    def _start(self, walled: bool) -> str | None:
        """Start the process inside. Return what went wrong, if anything did."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        here = str(Path(__file__).parent.parent.parent)
        packages = list(dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]))
        with tempfile.TemporaryDirectory() as folder, theirs:
            setup = {"walled": walled, "folder": folder, "readable": _readable_folders(packages), "packages": packages}
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
            said = ours.recv(4096).decode()
        self._channel = ours
        if said == "ready":
            return None
        self.close()
        return said or "the process inside ended at once"

    def run(self, code: str) -> RunOutcome:
        """Run a Python program by itself."""
        return self._outcome(self._send({"role": "program", "code": code}, []))

    def test(
        self, code: Sequence[str], tests: str, setup: Sequence[str] = (), entry_point: str = "", partial: bool = False
    ) -> TestVerdict:
        """Run code in one process and its tests in another, where the code cannot reach them.

        Functions that the tests do not define are those of the code. They are called with copies of plain values
        (numbers, text, bytes, collections), and plain values come back.

        Args:
            code: programs, run one after the other with the same names.
            tests: a program with asserts.
            setup: programs that define what the tests use.
            entry_point: a function of the code. If the tests define `check`, it is called with that function.
            partial: go on after a test that fails.
        """
        job = {"tests": tests, "setup": list(setup), "entry_point": entry_point, "partial": partial}
        here, there = socket.socketpair()
        verdicts, told = os.pipe()
        with here, there, os.fdopen(told, "wb") as writes:
            # The code first: its time runs out first, which the tests then see.
            answers = self._send({"role": "code", "code": list(code)}, [here.fileno()])
            asks = self._send({"role": "tests", **job}, [there.fileno(), writes.fileno()], more_seconds=1)
        with os.fdopen(verdicts, "rb") as reads:
            head, _, said = reads.read().partition(b"\n")
        self._outcome(asks)
        passed, failed = said.count(b"+"), said.count(b"-")
        good = None if b"?" in said else said.endswith(b".") and not failed
        return TestVerdict(passed, max(passed + failed, int(head or 0)), good, self._outcome(answers))

    def _send(self, job: dict[str, Any], files: list[int], more_seconds: float = 0) -> int:
        """Have a job started. Return the end of a pipe that will tell its outcome."""
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
            raise XtkError("the sandbox has ended", where=str(error)) from error
        finally:
            os.close(source)
            os.close(written)
        return report

    def _outcome(self, report: int) -> RunOutcome:
        with os.fdopen(report, "rb") as file:
            text = file.read()
        if not text:
            raise XtkError("the sandbox has ended, or could not start a process")
        return RunOutcome(**json.loads(text))

    def close(self) -> None:
        """End it, with all that still runs in it."""
        self._channel.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()


def _readable_folders(packages: Sequence[str]) -> list[str]:
    """Return the folders that Python needs: its library, the packages, the libraries of the system."""
    python = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), str(Path(sys.base_prefix) / "lib")]
    system = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache"]
    return [*python, *packages, *system]
