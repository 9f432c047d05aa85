"""Entry point of the `xtk` program: streams, cache folders, signals and exit code."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

try:
    from xtk.cli import run_command
except KeyboardInterrupt:  # an interruption of the import ends like one of a command
    sys.stderr.write("xtk: interrupted; run the same command again to resume\n")
    sys.stderr.flush()
    os._exit(130)  # sys.exit during an import would end with the signal instead
from xtk.errors import XtkError
from xtk.progress import command_phase
from xtk.writable_cache_folders import use_writable_cache_folders

SECONDS_UNTIL_REPEATED_SIGNAL = 0.01
# How OpenMP's threads wait for work; OpenMP reads them when torch is loaded.
OPENMP_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def main() -> None:
    """Run the command line and end with its exit code."""
    sys.unraisablehook = _repeat_signal
    # Set before transformers is imported, which prints advice about hub kernels.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # By default OpenMP's threads wait actively for 3 ms, and take the cores that another process needs.
    if not any(name in os.environ for name in OPENMP_WAITING):
        os.environ["GOMP_SPINCOUNT"] = "1000"  # turns of a loop, about 0.01 ms
    # Not in functions that the Python API uses: with it, tokenizers stops responding in forked DataLoader workers.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        _check_streams()
        _set_cache_folders(sys.argv[1:])
        with command_phase(sys.argv[1:]):
            code = run_command(sys.argv[1:])
    except KeyboardInterrupt:
        sys.stderr.write("xtk: interrupted; run the same command again to resume\n")
        sys.stderr.flush()
        os._exit(130)
    except SystemExit as ending:
        # With several processes, the launcher terminates the others after a failure and prints the reason.
        if ending.code == 128 + signal.SIGTERM and "RANK" not in os.environ:
            sys.stderr.write("xtk: terminated; run the same command again to resume\n")
            sys.stderr.flush()
        raise
    sys.exit(code)


def _set_cache_folders(arguments: list[str]) -> None:
    """Set cache folders that libraries can write to, before they are imported."""
    if not arguments or not {"-h", "--help", "--help-all", "--version"}.isdisjoint(arguments):
        return
    try:
        use_writable_cache_folders(quiet=not {"-q", "--quiet"}.isdisjoint(arguments))
    except XtkError as failure:
        sys.stderr.write(f"xtk: {failure}\n")
        sys.exit(failure.exit_code)


def _check_streams() -> None:
    """Refuse a closed stdout, and reserve the numbers of closed streams so that no file gets them."""
    closed = []
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            closed.append(number)
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if 1 in closed:
        sys.stderr.write("xtk: stdout is closed, but results are printed there\n  try:   xtk ... > /dev/null\n")
        sys.exit(1)


def _repeat_signal(dropped: Any) -> None:
    """Repeat a signal whose exception was raised in a destructor, where Python drops it."""
    raised = dropped.exc_type
    number = (
        signal.SIGINT if raised is KeyboardInterrupt else signal.SIGTERM if issubclass(raised, SystemExit) else None
    )
    if number is None:
        sys.__unraisablehook__(dropped)
        return
    later = threading.Timer(SECONDS_UNTIL_REPEATED_SIGNAL, os.kill, (os.getpid(), number))
    later.daemon = True
    later.start()


if __name__ == "__main__":
    main()
