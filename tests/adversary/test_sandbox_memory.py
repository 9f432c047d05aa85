"""Attacks on the memory limit of the sandbox: programs that exceed it are refused or killed."""

from __future__ import annotations

import contextlib
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from xtk.errors import XtkError
from xtk.rewards.sandbox import RunOutcome, Sandbox, SandboxLimits

MEMORY_LIMIT = 256 << 20
# Memory above the limit that processes may fill between two measurements and until the killed ones have exited.
OVERSHOOT = 768 << 20

PRELUDE = """
import ctypes, mmap, os, socket, sys, threading, time

PAGE = b"x" * 4096

def fill(memory):
    for start in range(0, len(memory), 4096):
        memory[start:start + 4096] = PAGE

def hold(size):
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE)
    fill(memory)
    time.sleep(60)

def six_children_hold(size):
    for _ in range(6):
        if os.fork() == 0:
            hold(size)
"""
KILLED_PROGRAMS = {
    "a process that prints all the time": """
        six_children_hold(120 << 20)
        while True:
            os.write(1, b"x" * 65536)
    """,
    "children that print all the time": """
        for _ in range(6):
            if os.fork() == 0:
                held = mmap.mmap(-1, 120 << 20, mmap.MAP_PRIVATE)
                for start in range(0, len(held), 4096):
                    held[start:start + 4096] = PAGE
                    os.write(1, b"x")
                while True:
                    os.write(1, b"x" * 4096)
        time.sleep(60)
    """,
    "children of a thread": """
        threading.Thread(target=six_children_hold, args=(120 << 20,)).start()
        time.sleep(60)
    """,
    "children whose parents have ended": """
        for _ in range(6):
            if os.fork() == 0:
                if os.fork() == 0:
                    hold(120 << 20)
                os._exit(0)
        time.sleep(60)
    """,
    "children that other users may not inspect": """
        for _ in range(6):
            if os.fork() == 0:
                ctypes.CDLL(None).prctl(4, 0)
                hold(120 << 20)
        time.sleep(60)
    """,
    "buffers of sockets in many processes": """
        for _ in range(12):
            if os.fork() == 0:
                pairs = []
                try:
                    while True:
                        pairs.append(socket.socketpair())
                        for end in pairs[-1]:
                            end.setblocking(False)
                            try:
                                while True:
                                    end.send(b"x" * 32768)
                            except BlockingIOError:
                                pass
                except OSError:
                    time.sleep(60)
        time.sleep(60)
    """,
}
REFUSED_PROGRAMS = {
    "20 files without a name": """
        for number in range(20):
            file = os.memfd_create(str(number))
            for _ in range(60):
                os.write(file, bytes(1 << 20))
    """,
    "secret files without a name": """
        if ctypes.CDLL(None, use_errno=True).syscall(447, 0) < 0:
            raise PermissionError
    """,
    "shared mappings in six children": """
        for _ in range(6):
            if os.fork() == 0:
                fill(mmap.mmap(-1, 120 << 20))
                time.sleep(60)
            else:
                mmap.mmap(-1, 4096)
        time.sleep(60)
    """,
    "shared mappings of which one page stays": """
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        for _ in range(40):
            place = libc.mmap(None, 60 << 20, 3, 0x21, -1, 0)
            if place == 2**64 - 1:
                raise PermissionError(ctypes.get_errno())
            ctypes.memset(place, 1, 60 << 20)
            libc.munmap(place + 4096, (60 << 20) - 4096)
        time.sleep(60)
    """,
    "shared mappings of /dev/zero": """
        for _ in range(20):
            file = os.open("/dev/zero", os.O_RDWR)
            fill(mmap.mmap(file, 60 << 20))
        time.sleep(60)
    """,
    "larger buffers of sockets": """
        socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)
    """,
    "pages given to pipes": """
        read, write = os.pipe()
        data = ctypes.create_string_buffer(4096)
        vector = (ctypes.c_void_p * 2)(ctypes.addressof(data), 4096)
        if ctypes.CDLL(None, use_errno=True).vmsplice(write, vector, 1, 0) < 0:
            raise PermissionError
    """,
}


def start_sandbox(**options: object) -> Sandbox:
    try:
        return Sandbox(SandboxLimits(seconds=20, memory=MEMORY_LIMIT, disk=64 << 20), **options)
    except XtkError as error:
        pytest.skip(f"no sandbox here: {error.where}")


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with start_sandbox() as started:
        yield started


def descendants(pid: int) -> list[int]:
    found, pending = [], [pid]
    while pending:
        found.append(pending.pop())
        with contextlib.suppress(OSError):  # the process may exit meanwhile
            for path in Path(f"/proc/{found[-1]}/task").iterdir():
                pending += map(int, (path / "children").read_text().split())
    return found[1:]


def memory_of_descendants(pid: int) -> int:
    """Return the bytes of private and shared memory, and of open files without a name, of all descendants."""
    total, files = 0, {}
    for descendant in descendants(pid):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{descendant}/smaps_rollup").read_text().splitlines()
            total += 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        with contextlib.suppress(OSError):
            for file in Path(f"/proc/{descendant}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if "memfd" in str(file.readlink()):
                        status = file.stat()
                        files[status.st_dev, status.st_ino] = status.st_blocks * 512
    return total + sum(files.values())


def run_attack(sandbox: Sandbox, program: str) -> tuple[RunOutcome, int]:
    """Return how an attack ended, and the peak memory that was measured from outside while it ran."""
    peak, ended = 0, threading.Event()

    def measure() -> None:
        nonlocal peak
        while not ended.wait(0.02):
            peak = max(peak, memory_of_descendants(sandbox._process.pid))

    watcher = threading.Thread(target=measure)
    watcher.start()
    try:
        return sandbox.run(PRELUDE + textwrap.dedent(program)), peak
    finally:
        ended.set()
        watcher.join()


@pytest.mark.parametrize("name", KILLED_PROGRAMS)
def test_program_beyond_the_memory_limit_is_killed(sandbox, name):
    outcome, peak = run_attack(sandbox, KILLED_PROGRAMS[name])
    assert outcome.end == "memory", outcome
    assert outcome.seconds < 15
    assert peak < MEMORY_LIMIT + OVERSHOOT


@pytest.mark.parametrize("name", REFUSED_PROGRAMS)
def test_memory_that_is_charged_to_no_process_is_refused(sandbox, name):
    outcome, peak = run_attack(sandbox, REFUSED_PROGRAMS[name])
    assert (outcome.end, outcome.code) == ("ended", 1), outcome
    assert "PermissionError" in outcome.output or "FileNotFoundError" in outcome.output
    assert peak < MEMORY_LIMIT


def test_weak_isolation_limits_the_memory_of_one_process(monkeypatch):
    original_start = Sandbox._start
    monkeypatch.setattr(
        Sandbox,
        "_start",
        lambda self, use_namespaces: "refused" if use_namespaces else original_start(self, use_namespaces),
    )
    with start_sandbox(allow_weak_isolation=True) as sandbox:
        for name in ("20 files without a name", "shared mappings of which one page stays",
                     "shared mappings of /dev/zero"):  # fmt: skip
            outcome, peak = run_attack(sandbox, REFUSED_PROGRAMS[name])
            assert (outcome.end, outcome.code) == ("ended", 1), (name, outcome)
            assert peak < MEMORY_LIMIT
        outcome, peak = run_attack(
            sandbox, "held = []\nwhile True:\n    held.append(mmap.mmap(-1, 1 << 24, 2)); fill(held[-1])"
        )
        assert "error" in outcome.output.lower() or outcome.end == "memory"
        assert peak < MEMORY_LIMIT + (64 << 20)


def test_program_with_little_memory_is_not_killed(sandbox):
    program = """
        import asyncio, subprocess
        held = bytearray(b"1") * (150 << 20)  # shared with the children, which change none of it
        children = []
        for _ in range(5):
            children.append(os.fork())
            if children[-1] == 0:
                time.sleep(1)
                os._exit(0)
        for child in children:
            os.waitpid(child, 0)
        print(asyncio.run(asyncio.sleep(0.1, "done")), flush=True)
        file = open("mapped", "w+b")
        file.truncate(1 << 20)
        fill(mmap.mmap(file.fileno(), 1 << 20))
    """
    outcome, peak = run_attack(sandbox, program)
    assert (outcome.end, outcome.code, outcome.output) == ("ended", 0, "done\n"), outcome
    assert peak < MEMORY_LIMIT
