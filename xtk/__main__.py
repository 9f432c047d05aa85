"""The process `xtk`: from the first import to the exit code."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line and end with its exit code."""
    try:
        from xtk.cli import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        sys.stderr.write("xtk: interrupted; the same command goes on where this one stopped\n")
        sys.stderr.flush()
        os._exit(130)  # not sys.exit: interrupted while it imports, Python would end by the signal instead
    sys.exit(code)


if __name__ == "__main__":
    main()
