"""Random byte flips in caches and projections: none gives wrong values or a traceback, or passes verification."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import small_caches

WORKER = Path(__file__).parent / "bit_flip_process.py"


def run_flips(folder: Path, flips: int, seed: int) -> dict[str, dict[str, int]]:
    """Run the worker process and return its counts; if it crashes, the test fails."""
    result = subprocess.run(
        [sys.executable, str(WORKER), str(folder), str(flips), str(seed)],
        capture_output=True, text=True, check=False, timeout=1800, env=dict(os.environ),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    counts = json.loads(result.stdout)
    for kind, kind_counts in counts.items():
        print(f"{kind}: {kind_counts}")
        assert kind_counts == {"flips": kind_counts["flips"], "wrong": 0, "certified": 0, "tracebacks": 0}, (
            result.stderr
        )
    return counts


@pytest.mark.parametrize("flips", [120, pytest.param(2400, marks=pytest.mark.long)])
def test_no_flip_gives_wrong_values_or_a_traceback_or_passes_verification(run, pair, projection, tmp_path, flips):
    kinds = ("packed", "raw") if flips < 1000 else tuple(small_caches.KINDS)
    for kind in kinds:
        small_caches.make_cache(run, pair, tmp_path, kind)
    shutil.copy(projection, tmp_path)
    counts = run_flips(tmp_path, flips, seed=flips)
    assert len(counts) == 2 * len(kinds) + 1
    assert sum(kind_counts["flips"] for kind_counts in counts.values()) == flips
