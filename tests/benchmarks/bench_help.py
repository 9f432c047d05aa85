"""Time of `xtk --help`: the whole process, median of 15."""

from __future__ import annotations

import subprocess
import sys

from measurement import median_seconds, report

HEAVY = {"torch", "transformers", "pyarrow", "numpy", "numba"}


def main() -> None:
    """Measure and print."""
    command = [sys.executable, "-m", "xtk", "--help"]
    seconds = median_seconds(lambda: subprocess.run(command, capture_output=True, check=True), 15)
    bare = median_seconds(lambda: subprocess.run([sys.executable, "-c", ""], check=True), 15)
    script = f"import sys, xtk.cli; print(sorted({HEAVY!r} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    report(
        __file__,
        [
            ("`xtk --help`, whole process", f"{seconds:.2f} s (Python alone {bare:.2f} s)", "0.3 s"),
            ("heavy modules it imports", loaded, "[]"),
        ],
    )


if __name__ == "__main__":
    main()
