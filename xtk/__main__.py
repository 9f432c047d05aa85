"""The process `xtk`: from the first import to the exit code."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

SECONDS_TO_LEAVE_A_DESTRUCTOR = 0.01


def main() -> None:
    """Run the command line and end with its exit code."""
    sys.unraisablehook = _stop_again
    # Before transformers is imported: it writes advice on kernels of the hub while it is.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        _check_streams()
        _choose_caches(sys.argv[1:])
        from xtk.cli import run_command

        code = run_command(sys.argv[1:])
    except KeyboardInterrupt:
        sys.stderr.write("xtk: interrupted; the same command goes on where this one stopped\n")
        sys.stderr.flush()
        os._exit(130)  # not sys.exit: interrupted while it imports, Python would end by the signal instead
    except SystemExit as ending:
        # The launcher of several processes ends the others when one has failed, and prints why.
        if ending.code == 128 + signal.SIGTERM and "RANK" not in os.environ:
            sys.stderr.write("xtk: terminated; the same command goes on where this one stopped\n")
            sys.stderr.flush()
        raise
    sys.exit(code)


def _choose_caches(arguments: list[str]) -> None:
    """Find folders that libraries can write, before they are imported."""
    if not arguments or not {"-h", "--help", "--version"}.isdisjoint(arguments):
        return
    from xtk.cache_directories import use_writable_cache_folders
    from xtk.errors import XtkError

    try:
        use_writable_cache_folders(quiet=not {"-q", "--quiet"}.isdisjoint(arguments))
    except XtkError as failure:
        sys.stderr.write(f"xtk: {failure}\n")
        sys.exit(failure.exit_code)


def _check_streams() -> None:
    """Refuse to run without a stdout for the result, and let no file get the number of a stream that is closed."""
    closed = []
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            closed.append(number)
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free, which is this one
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if 1 in closed:
        sys.stderr.write("xtk: stdout is closed, and results are written to it\n  try:   xtk ... > /dev/null\n")
        sys.exit(1)


def _stop_again(dropped: Any) -> None:
    """Send a signal once more whose exception fell into a destructor, where Python would drop it."""
    raised = dropped.exc_type
    number = (
        signal.SIGINT if raised is KeyboardInterrupt else signal.SIGTERM if issubclass(raised, SystemExit) else None
    )
    if number is None:
        sys.__unraisablehook__(dropped)
        return
    later = threading.Timer(SECONDS_TO_LEAVE_A_DESTRUCTOR, os.kill, (os.getpid(), number))
    later.daemon = True
    later.start()


if __name__ == "__main__":
    main()
