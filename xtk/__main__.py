"""The process `xtk`: from the first import to the exit code."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and end with its exit code."""
    try:
        from xtk.cli import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        sys.stderr.write("xtk: interrupted; the same command goes on where this one stopped\n")
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
