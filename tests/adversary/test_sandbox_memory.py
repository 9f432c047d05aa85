"""Attacks on the memory limit of the sandbox: what fills more memory than it may is refused or killed."""

from __future__ import annotations

import contextlib
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from xtk.errors import XtkError
from xtk.rewards.sandbox import RunOutcome, Sandbox, SandboxLimits

LIMIT = 256 << 20
# Beyond the limit: what the processes fill between two measurements, and until the killed ones are gone.
OVERSHOOT = 768 << 20

START = """
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
KILLED = {
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
    "children that nobody may look into": """
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
REFUSED = {
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


def start(**more: object) -> Sandbox:
    try:
        return Sandbox(SandboxLimits(seconds=20, memory=LIMIT, disk=64 << 20), **more)
    except XtkError as error:
        pytest.skip(f"no sandbox here: {error.where}")


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with start() as made:
        yield made


def below(process: int) -> list[int]:
    found, todo = [], [process]
    while todo:
        found.append(todo.pop())
        with contextlib.suppress(OSError):  # it may end while it is looked at
            for path in Path(f"/proc/{found[-1]}/task").iterdir():
                todo += map(int, (path / "children").read_text().split())
    return found[1:]


def held_by(process: int) -> int:
    """Private memory and shared memory of the processes below one, and files without a name that they hold open."""
    total, files = 0, {}
    for one in below(process):
        with contextlib.suppress(OSError):
            rows = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
            total += 1024 * sum(int(row.split()[1]) for row in rows if row.startswith("Pss:"))
        with contextlib.suppress(OSError):
            for file in Path(f"/proc/{one}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if "memfd" in str(file.readlink()):
                        found = file.stat()
                        files[found.st_dev, found.st_ino] = found.st_blocks * 512
    return total + sum(files.values())


def run(sandbox: Sandbox, program: str) -> tuple[RunOutcome, int]:
    """Return how an attack ended, and the most memory that was seen from outside while it ran."""
    most, ended = 0, threading.Event()

    def look() -> None:
        nonlocal most
        while not ended.wait(0.02):
            most = max(most, held_by(sandbox._process.pid))

    watch = threading.Thread(target=look)
    watch.start()
    try:
        return sandbox.run(START + textwrap.dedent(program)), most
    finally:
        ended.set()
        watch.join()


@pytest.mark.parametrize("name", KILLED)
def test_memory_beyond_the_limit_is_killed(sandbox, name):
    outcome, most = run(sandbox, KILLED[name])
    assert outcome.end == "memory", outcome
    assert outcome.seconds < 15
    assert most < LIMIT + OVERSHOOT


@pytest.mark.parametrize("name", REFUSED)
def test_memory_that_no_process_is_charged_for_is_refused(sandbox, name):
    outcome, most = run(sandbox, REFUSED[name])
    assert (outcome.end, outcome.code) == ("ended", 1), outcome
    assert "PermissionError" in outcome.output or "FileNotFoundError" in outcome.output
    assert most < LIMIT


def test_memory_of_the_weaker_sandbox_is_that_of_one_process(monkeypatch):
    begin = Sandbox._start
    monkeypatch.setattr(
        Sandbox, "_start", lambda self, use_namespaces: "refused" if use_namespaces else begin(self, use_namespaces)
    )
    with start(allow_weak_isolation=True) as sandbox:
        for name in ("20 files without a name", "shared mappings of which one page stays",
                     "shared mappings of /dev/zero"):  # fmt: skip
            outcome, most = run(sandbox, REFUSED[name])
            assert (outcome.end, outcome.code) == ("ended", 1), (name, outcome)
            assert most < LIMIT
        outcome, most = run(
            sandbox, "held = []\nwhile True:\n    held.append(mmap.mmap(-1, 1 << 24, 2)); fill(held[-1])"
        )
        assert "error" in outcome.output.lower() or outcome.end == "memory"
        assert most < LIMIT + (64 << 20)


def test_what_needs_little_memory_is_not_killed(sandbox):
    program = """
        import asyncio, subprocess
        held = bytearray(b"1") * (150 << 20)  # shared with the children, who change none of it
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
    outcome, most = run(sandbox, program)
    assert (outcome.end, outcome.code, outcome.output) == ("ended", 0, "done\n"), outcome
    assert most < LIMIT
