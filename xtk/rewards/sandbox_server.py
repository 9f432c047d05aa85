"""The sandbox's server process: isolates itself, then forks a process for each job.

Started by `sandbox.py` as `python -I -S -c ...`, with an empty environment. Forking from a small process that has
already left the machine's files and network takes a few milliseconds; starting Python and new namespaces, fifty.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from typing import Any

from xtk.rewards import sandbox_isolation as isolation
from xtk.rewards import sandbox_workers

_MEASURE_EVERY = 0.01  # seconds between two measurements of the memory
_STARTING_A_PROGRAM = 0.002  # seconds: during vfork, the same memory counts for two processes
_LINK, _VERDICTS = 3, 4


def serve_sandbox(control_descriptor: int, setup: dict[str, Any]) -> None:
    """Isolate this process, report ready, and start a process for each job until the socket closes."""
    channel = socket.socket(fileno=control_descriptor)
    for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # the parent process decides when to stop
        signal.signal(stop, signal.SIG_IGN)
    os.umask(0o022)  # another user reads the folders of the new root, whatever umask the caller has
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
    try:
        if setup["walled"]:
            _enter_outer_namespaces(setup, proc)
        isolation.seccomp_program(without_namespaces=not setup["walled"])  # cached for the forked processes
        channel.send(b"ready")
    except OSError as error:
        channel.send(f"{error}".encode())
        return
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    sys.path[:] = [*[path for path in sys.path if path != setup["package"]], *setup["packages"]]
    gc.freeze()
    while True:
        message, files, _, _ = socket.recv_fds(channel, 64, 4)
        if not message:
            os._exit(0)
        if os.fork() == 0:
            channel.close()
            status = 1
            with contextlib.suppress(BaseException):
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _run_job_and_report(files, proc, setup["walled"])
                status = 0
            os._exit(status)
        for file in files:
            os.close(file)


def _enter_outer_namespaces(setup: dict[str, Any], proc: int) -> None:
    """Leave the machine's files, network and users; root becomes the user `nobody`."""
    outer = isolation.CLONE_NEWNS | isolation.CLONE_NEWNET | isolation.CLONE_NEWUTS | isolation.CLONE_NEWIPC
    superuser = os.geteuid() == 0
    isolation.enter_namespaces(outer if superuser else outer | isolation.CLONE_NEWUSER, proc)
    isolation.enter_new_root(setup["folder"], setup["readable"])
    if superuser:  # RLIMIT_NPROC does not apply to root
        os.setgroups([])
        os.setgid(isolation.NOBODY)
        os.setuid(isolation.NOBODY)
        isolation.call_libc("prctl", isolation.PR_SET_DUMPABLE, 1, 0, 0, 0)
    isolation.call_libc("prctl", isolation.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _run_job_and_report(files: list[int], proc: int, use_namespaces: bool) -> None:
    """Run one job and report its outcome; `files` are the job, the report, and files for the job's process."""
    source, report, *given = files
    with os.fdopen(source, "rb") as job_file:
        job = json.load(job_file)
    isolation.call_libc("prctl", isolation.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    started = time.monotonic()
    if use_namespaces:
        isolation.enter_namespaces(isolation.CLONE_NEWUSER | isolation.CLONE_NEWPID | isolation.CLONE_NEWNS, proc)
        folder = None
    else:
        folder = tempfile.mkdtemp()
    output, written = os.pipe()
    process = os.fork()
    if process == 0:
        _run_as_init(job, given, written, folder)
    os.close(written)
    for file in given:
        os.close(file)
    try:
        end, status, text = _wait(process, output, report, job["limits"], started, proc)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)  # PID 1 of its namespace: all others are killed with it
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
    code = os.waitstatus_to_exitcode(status)
    code = code if code < 128 else 128 - code
    outcome = {"end": end, "code": code, "output": text, "seconds": time.monotonic() - started}
    os.write(report, json.dumps(outcome).encode())


def _wait(
    process: int, output: int, report: int, limits: dict[str, Any], started: float, proc: int
) -> tuple[str, int, str]:
    """Wait until a process ends or exceeds its limits, while reading its output."""
    ended = os.pidfd_open(process)
    poll = select.poll()
    for file, events in ((ended, select.POLLIN), (output, select.POLLIN), (report, 0)):
        poll.register(file, events)
    kept, end = b"", "ended"
    measured = time.monotonic()
    while True:
        now = time.monotonic()
        left, until_measured = started + limits["seconds"] - now, measured + _MEASURE_EVERY - now
        ready = dict(poll.poll(max(0.0, min(left, until_measured)) * 1000))
        if output in ready:
            read = os.read(output, 65536)
            kept += read[: limits["output"] - len(kept)]
            if not read:
                poll.unregister(output)
        if ended in ready:
            break
        if left <= 0:
            end = "time"
        elif report in ready:  # the parent process has closed the report
            end = "dropped"
        elif time.monotonic() >= measured + _MEASURE_EVERY:  # measured at this interval, however much it prints
            if _exceeds(process, proc, limits["memory"]):
                end = "memory"
            measured = time.monotonic()
        if end != "ended":
            os.kill(process, signal.SIGKILL)
            break
    _, status = os.waitpid(process, 0)
    os.set_blocking(output, False)
    with contextlib.suppress(BlockingIOError):
        while len(kept) < limits["output"] and (read := os.read(output, 65536)):
            kept += read[: limits["output"] - len(kept)]
    return end, status, kept.decode("utf-8", "replace")


def _exceeds(process: int, proc: int, memory: int) -> bool:
    """Return whether a process and its descendants use more than `memory` bytes."""
    every = isolation.process_tree(process, proc)
    # Half: the kernel's per-CPU counters are late. The exact measurement reads the page tables.
    if isolation.memory_upper_bound(every, proc) <= memory // 2 or isolation.memory_in_use(every, proc) <= memory:
        return False
    time.sleep(_STARTING_A_PROGRAM)
    return isolation.memory_in_use(isolation.process_tree(process, proc), proc) > memory


def _run_as_init(job: dict[str, Any], given: list[int], output: int, folder: str | None) -> None:
    """Apply the inner isolation, then run the job in a child; when it ends, its remaining processes end too."""
    status = 126
    try:
        limits = job["limits"]
        if folder is None:
            options = f"size={limits['disk']},nr_inodes=1024,mode=700"
            isolation.mount("tmpfs", "/own", "tmpfs", isolation.MS_NOSUID | isolation.MS_NODEV, options)
        os.chdir(folder or "/own")
        nothing = os.open("/dev/null", os.O_RDONLY)
        kept = [os.dup2(file, 20 + place) for place, file in enumerate([nothing, output, output, *given])]
        for place, file in enumerate(kept):
            os.dup2(file, place)
        os.closerange(len(kept), 4096)
        isolation.call_libc("prctl", isolation.PR_SET_DUMPABLE, 0, 0, 0, 0)  # other processes cannot inspect this one
        for stop in (signal.SIGINT, signal.SIGTERM):  # SIGUSR1 to a whole Slurm step must not fail this program
            signal.signal(stop, signal.SIG_DFL)
        if folder is not None:
            _run_job(job, folder)
        child = os.fork()
        if child == 0:
            isolation.call_libc("prctl", isolation.PR_SET_DUMPABLE, 1, 0, 0, 0)
            _run_job(job, folder)
        os.closerange(0, len(kept))  # the child's end of the link must be the only one
        while True:
            ended, result = os.wait()
            if ended == child:
                code = os.waitstatus_to_exitcode(result)
                status = code if code >= 0 else 128 - code
                break
    finally:
        os._exit(status)


def _run_job(job: dict[str, Any], folder: str | None) -> None:
    status = 1
    try:
        limits = job["limits"]
        os.environ.clear()
        os.environ.update({"HOME": folder or "/own", "TMPDIR": folder or "/own", "OMP_NUM_THREADS": "1"})
        tempfile.tempdir = None
        isolation.set_resource_limits(
            limits["seconds"], limits["memory"], limits["processes"], limits["disk"], limits["files"]
        )
        if folder is None:
            isolation.drop_capabilities()
        isolation.install_seccomp_filter(without_namespaces=folder is not None)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        gc.unfreeze()
        if job["role"] == "code":
            sandbox_workers.serve_function_calls(job, _LINK)
        elif job["role"] == "tests":
            sandbox_workers.run_tests(job, _LINK, _VERDICTS)
        else:
            sandbox_workers.run_program(job)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.write(f"{type(error).__name__}: {error}\n"[:1000])
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status & 127)
