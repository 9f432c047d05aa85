"""Limits of the sandbox, tested with code that tries to break them."""

import os
import signal
import socket
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from xtk.errors import XtkError
from xtk.rewards.sandbox import Sandbox, SandboxLimits

TESTS = "assert f(1) == 2\nassert f(2) == 3\nassert f([1]) == 4"
GOOD = "def f(x): return x + 1 if isinstance(x, int) else 4"


def start_sandbox(allow_weak_isolation=False, **limits):
    try:
        return Sandbox(SandboxLimits(**limits), allow_weak_isolation)
    except XtkError as error:
        pytest.skip(f"no sandbox here: {error.where}")


@pytest.fixture(scope="module")
def sandbox():
    with start_sandbox(seconds=20, memory=300 << 20, disk=8 << 20) as opened_sandbox:
        yield opened_sandbox


@pytest.fixture(scope="module")
def two_second_sandbox():
    with start_sandbox(seconds=2, memory=300 << 20, disk=8 << 20) as opened_sandbox:
        yield opened_sandbox


def children_of(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def no_children_left(sandbox):
    for _ in range(100):
        if not children_of(sandbox._process.pid):
            return True
        time.sleep(0.05)
    return False


def test_program_output_and_exit_code_are_returned(sandbox):
    result = sandbox.run("import json\nprint(json.dumps([1]))\nopen('own', 'w').write('x')\nraise SystemExit(3)")
    assert (result.end, result.code, result.output) == ("ended", 3, "[1]\n")
    second_result = sandbox.run("import os\nprint(os.listdir())\n1 / 0")
    assert (second_result.code, second_result.output) == (1, "[]\nZeroDivisionError: division by zero\n")


@pytest.mark.parametrize("umask", [0o077, 0o777])
def test_code_runs_whatever_umask_the_caller_has(umask):
    before = os.umask(umask)
    try:
        with start_sandbox(seconds=20) as opened_sandbox:
            assert opened_sandbox.run("print(open('own', 'w').write('x'))").output == "1\n"
    finally:
        os.umask(before)


def test_signals_to_the_process_group_of_a_run_do_not_end_its_sandbox():
    before = set(psutil.Process().children())
    with start_sandbox(seconds=20) as opened_sandbox:
        (server,) = set(psutil.Process().children()) - before
        for stop in (signal.SIGTERM, signal.SIGUSR1):
            server.send_signal(stop)
        assert opened_sandbox.run("print(1)").output == "1\n"
        assert opened_sandbox.run("import os; os.kill(os.getpid(), 15)").code != 0  # programs can be terminated
        assert opened_sandbox.run("import os, signal; os.kill(os.getpid(), signal.SIGUSR1); print(1)").output == "1\n"


@pytest.mark.slow
def test_endless_loop_is_killed(two_second_sandbox):
    started = time.monotonic()
    assert two_second_sandbox.run("while True: pass").end == "time"
    assert (
        two_second_sandbox.run("import time, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(99)").end
        == "time"
    )
    assert time.monotonic() - started < 20


def test_fork_bomb_is_limited_and_leaves_no_processes(two_second_sandbox):
    code = """
        import os, time
        made = 0
        try:
            while made < 200:
                if os.fork() == 0:
                    time.sleep(60)
                made += 1
        except OSError as error:
            print(made < 16, type(error).__name__, flush=True)
            time.sleep(60)
        print("no end of it", flush=True)
    """
    result = two_second_sandbox.run(textwrap.dedent(code))
    assert (result.end, result.output) == ("time", "True BlockingIOError\n")
    assert no_children_left(two_second_sandbox)


def test_background_processes_end_with_the_program(sandbox):
    result = sandbox.run(
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(60)\nprint('bye', flush=True)"
    )
    assert (result.end, result.code, result.output) == ("ended", 0, "bye\n")
    assert result.seconds < 15
    assert no_children_left(sandbox)


def test_memory_is_limited_per_process_and_in_total(sandbox):
    assert "MemoryError" in sandbox.run("x = bytearray(10 * 2**30)").output
    assert "MemoryError" in sandbox.run("x = []\nwhile True: x.append(bytearray(2**24))").output
    code = """
        import os, time
        for _ in range(5):
            if os.fork() == 0:
                break
        x = bytearray(b"1") * (150 * 2**20)
        time.sleep(60)
    """
    assert sandbox.run(textwrap.dedent(code)).end == "memory"


def test_files_outside_are_neither_readable_nor_writable(sandbox, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("the key")
    paths = [str(tmp_path), str(Path.home()), str(Path(__file__)), "/etc/passwd", "/proc/self", "/sys", "/home"]
    code = f"""
        import os
        for place in {paths!r}:
            print(os.path.exists(place))
        for place in ("/new", "/tmp/new", os.__file__, "/dev/new", "/own/../new", {str(secret)!r}):
            try:
                open(place, "a")
                print("open")
            except OSError:
                print("closed")
    """
    result = sandbox.run(textwrap.dedent(code))
    home_line = "True\n" if os.path.commonpath([os.__file__, Path.home()]) == str(Path.home()) else "False\n"
    assert result.output == "False\n" + home_line + 5 * "False\n" + 6 * "closed\n"
    assert secret.read_text() == "the key"


def test_file_size_and_disk_use_are_limited(sandbox):
    code = """
        import os, signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with open("big", "wb") as file:
            try:
                for _ in range(10 * 1024):
                    file.write(bytes(2**20))
                    file.flush()
            except OSError as error:
                print(os.strerror(error.errno))
        os.truncate("big", 2**20)
        try:
            for number in range(100):
                open(str(number), "wb").write(bytes(2**20))
        except OSError as error:
            print(number < 8, os.strerror(error.errno))
    """
    result = sandbox.run(textwrap.dedent(code))
    assert result.output.splitlines()[0] in ("File too large", "No space left on device"), result
    assert result.output.splitlines()[1] == "True No space left on device"


def test_network_is_unavailable(sandbox):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 2)"
        assert "Error" in sandbox.run(code).output
        with pytest.raises(TimeoutError):
            server.accept()
    assert "PermissionError" in sandbox.run("import socket\nsocket.socket(socket.AF_UNIX)").output


def test_dangerous_system_calls_are_refused(sandbox):
    code = """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        print(libc.unshare(0x10000000), libc.mount(b"a", b"/own", b"tmpfs", 0, None), libc.ptrace(0, 1, 0, 0))
        print(libc.setns(0, 0), libc.syscall(425, 1, 0), libc.syscall(435, 0, 0))
        print(os.getpid() > 1)
        try:
            os.kill(1, 9)
        except OSError:
            pass
        print("here")
    """
    assert sandbox.run(textwrap.dedent(code)).output == "-1 -1 -1\n-1 -1 -1\nTrue\nhere\n"


def test_environment_variables_are_not_inherited(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "the key")
    with start_sandbox() as sandbox:
        assert sandbox.run("import os\nprint(sorted(os.environ))").output == "['HOME', 'OMP_NUM_THREADS', 'TMPDIR']\n"
        code = "import ctypes\nget = ctypes.CDLL(None).getenv\nget.restype = ctypes.c_char_p\nprint(get(b'HF_TOKEN'))"
        assert sandbox.run(code).output == "None\n"


@pytest.mark.slow
def test_deep_recursion_and_crashes_are_reported(sandbox):
    assert "RecursionError" in sandbox.run("def f(): return f()\nf()").output
    code = "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return [f([x])]\nf(0)"
    assert sandbox.run(code).code != 0
    assert sandbox.run("import ctypes\nctypes.string_at(0)").code == -11
    assert sandbox.run("import os\nos.abort()").code == -6


def test_output_is_truncated(sandbox):
    result = sandbox.run("import sys\nfor _ in range(2000): sys.stdout.write('x' * 10_000)")
    assert (result.end, result.code, result.output) == ("ended", 0, "x" * 10_000)


CHEATING_CODE = {
    "prints a result": GOOD.replace("4", "5") + "\nprint('passed', '+++.')",
    "leaves early": "import os\nos._exit(0)",
    "leaves early by exit": "raise SystemExit(0)",
    "leaves in the call": "import os\ndef f(x): os._exit(0)",
    "equals everything": "class A:\n    __eq__ = lambda s, o: True\n    __hash__ = None\ndef f(x): return A()",
    "a number that equals everything": "class A(int):\n    __eq__ = lambda s, o: True\ndef f(x): return A()",
    "a list that equals everything": "class A(list):\n    __eq__ = lambda s, o: True\ndef f(x): return A()",
    "no asserts": "import builtins\nbuiltins.AssertionError = None\ndef f(x): return None",
    "all is true": "import builtins\nbuiltins.bool = lambda x: True\nbuiltins.isinstance = lambda *x: True\n"
    "def f(x): return 0",
    "writes to all files": "import os\nfor n in range(64):\n"
    "    try: os.write(n, b'3\\n+++.')\n    except OSError: pass\n"
    "def f(x): return None",
    "answers before a request": "import os\nfor _ in range(9):\n"
    '    os.write(3, b\'["tuple", [true, ["int", "0x2"], null]]\\n\')\ndef f(x): return None',
    "patches the runner": "import sys, gc\n"
    "for name, module in list(sys.modules.items()):\n"
    "    if name.startswith('xtk'):\n"
    "        for key in list(vars(module)):\n"
    "            if callable(vars(module)[key]): setattr(module, key, lambda *a, **k: b'+++.')\n"
    "def f(x): return None",
    "raises what the tests raise": "def f(x): raise AssertionError",
    "forks another that answers": "import os\nos.fork()\ndef f(x): return None",
    "returns too much": "def f(x): return 'x' * 10**8",
    "returns too deep": "def f(x):\n    y = []\n    for _ in range(10**5): y = [y]\n    return y",
    "changes the arguments": "def f(x):\n    if isinstance(x, list): x.append(1)\n    return None",
    "has no function": "g = 1",
    "is no program": "def f(x)",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHEATING_CODE)
def test_cheating_code_does_not_pass(sandbox, name):
    verdict = sandbox.test([CHEATING_CODE[name]], TESTS)
    assert verdict is False, verdict


def test_tests_call_the_code(sandbox):
    assert sandbox.test([GOOD], TESTS) is True
    assert sandbox.test(["def f(x): return x + 1"], TESTS) is False
    assert sandbox.test([GOOD], "assert f(1) == 2\nassert f(object()) == 4") is None
    assert sandbox.test([GOOD], "assert f(1) ==") is None
    assert sandbox.test([GOOD], "assert 1 + 1 == 2") is None
    assert sandbox.test([GOOD], "import no_such_module") is None


def test_plain_values_are_transferred_in_both_directions(sandbox):
    tests = """
        from collections import Counter, deque
        from decimal import Decimal
        values = [None, True, 2**5000, -1, 0.1, float("inf"), 1j, "é\\ud800", b"x", [1, [2]], (1, (2,)), {1: (2,)},
                  {1, 2}, frozenset([1]), deque([1]), range(3), Decimal("1.10")]
        for value in values:
            got = same(value)
            assert got == value and type(got) is type(value)
        assert list(same(iter([1, 2]))) == [1, 2]
        assert same(Counter("aab")) == {"a": 2, "b": 1}
        changed = [3, 1, 2]
        assert sort(changed) is None and changed == [1, 2, 3]
        try:
            fail(1, key=2)
            assert False
        except KeyError:
            pass
        try:
            own(1)
            assert False
        except ValueError:
            pass
    """
    code = """
        class Own(ValueError): pass
        def same(x): return x
        def sort(x): x.sort()
        def fail(x, key): return {}[key]
        def own(x): raise Own("x")
    """
    verdict = sandbox.test([textwrap.dedent(code)], textwrap.dedent(tests))
    assert verdict is True, verdict


@pytest.mark.slow
def test_hanging_code_fails_the_remaining_tests(two_second_sandbox):
    code = "def f(x):\n    while x == 2: pass\n    return x + 1"
    verdict = two_second_sandbox.test([code], TESTS)
    assert verdict is False
    assert two_second_sandbox.test(["while True: pass"], TESTS) is False
    assert no_children_left(two_second_sandbox)


@pytest.mark.slow
def test_weak_sandbox_cannot_change_files_or_reach_processes_and_network(tmp_path, monkeypatch):
    monkeypatch.setattr(Sandbox, "_start", refuse_namespaces(Sandbox._start))
    with pytest.raises(XtkError, match="cannot start without Linux namespaces"):
        Sandbox()
    (tmp_path / "f").write_text("text")
    with (
        start_sandbox(allow_weak_isolation=True, seconds=3) as sandbox,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        server.settimeout(0.2)
        code = f"""
            import os, socket, subprocess, threading
            def tried(what):
                try:
                    what()
                    print("done")
                except OSError as error:
                    print(os.strerror(error.errno))
            tried(lambda: socket.create_connection(("127.0.0.1", {server.getsockname()[1]}), 2))
            tried(lambda: open({str(tmp_path / "f")!r}, "w"))
            tried(lambda: os.unlink({str(tmp_path / "f")!r}))
            tried(lambda: os.mkdir({str(tmp_path / "new")!r}))
            tried(lambda: os.fork())
            tried(lambda: os.kill({os.getpid()}, 0))
            tried(lambda: subprocess.run(["/bin/true"]))
            tried(lambda: os.execv("/bin/true", ["true"]))
            import fcntl, struct
            ends = os.pipe()
            fcntl.fcntl(ends[0], fcntl.F_SETFL, os.O_NONBLOCK | fcntl.fcntl(ends[0], fcntl.F_GETFL))
            tried(lambda: fcntl.fcntl(ends[0], fcntl.F_SETOWN, {os.getpid()}))
            tried(lambda: fcntl.fcntl(ends[0], 10, 9))  # F_SETSIG
            tried(lambda: fcntl.fcntl(ends[0], 15, struct.pack("ii", 1, {os.getpid()})))  # F_SETOWN_EX
            tried(lambda: fcntl.ioctl(ends[0], 0x8901, struct.pack("i", {os.getpid()})))  # FIOSETOWN
            thread = threading.Thread(target=print, args=("thread",))
            thread.start()
            thread.join()
        """
        assert sandbox.run(textwrap.dedent(code)).output == 12 * "Operation not permitted\n" + "thread\n"
        with pytest.raises(TimeoutError):
            server.accept()
        assert (tmp_path / "f").read_text() == "text"
        assert sandbox.test([GOOD], TESTS) is True
        assert sandbox.test(["import os\nos._exit(0)"], TESTS) is False
        assert sandbox.run("while True: pass").end == "time"
        assert no_children_left(sandbox)


def refuse_namespaces(start):
    """Return a start function that fails as on a machine without Linux namespaces."""
    return lambda self, use_namespaces: (
        "unshare: Operation not permitted" if use_namespaces else start(self, use_namespaces)
    )


def test_sandbox_process_ends_when_it_is_closed():
    with start_sandbox() as sandbox:
        process = sandbox._process
    assert process.poll() is not None
    with pytest.raises(XtkError, match="process of the sandbox for generated code has ended"):
        sandbox.run("")
