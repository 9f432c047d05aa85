"""Random bytes of caches and projections, flipped: none gives a wrong number, a traceback, or passes verification."""

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


def flipped(folder: Path, flips: int, seed: int) -> dict[str, dict[str, int]]:
    """Run the worker; one that is ended by a signal fails the test."""
    done = subprocess.run(
        [sys.executable, str(WORKER), str(folder), str(flips), str(seed)],
        capture_output=True, text=True, check=False, timeout=1800, env=dict(os.environ),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for kind, figures in found.items():
        print(f"{kind}: {figures}")
        assert figures == {"flips": figures["flips"], "wrong": 0, "certified": 0, "tracebacks": 0}, done.stderr
    return found


@pytest.mark.parametrize("flips", [120, pytest.param(2400, marks=pytest.mark.long)])
def test_no_flip_gives_a_wrong_number_a_traceback_or_passes(run, pair, projection, tmp_path, flips):
    kinds = ("packed", "raw") if flips < 1000 else tuple(small_caches.KINDS)
    for kind in kinds:
        small_caches.make(run, pair, tmp_path, kind)
    shutil.copy(projection, tmp_path)
    found = flipped(tmp_path, flips, seed=flips)
    assert len(found) == 2 * len(kinds) + 1
    assert sum(figures["flips"] for figures in found.values()) == flips
