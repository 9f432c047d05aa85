"""Runs that the attacks start from; all attacks are long tests."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from xtk_processes import run_xtk

sys.path.insert(0, str(Path(__file__).parent))


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session")
def finished_run(pair, corpus, tmp_path_factory) -> tuple[list[object], Path]:
    """Return arguments of a run, to be followed by its output folder, and a finished run with checkpoints 2 and 4."""
    arguments = [
        "distill", pair.student, corpus, "--loss", "ce", "--max-steps", 6, "--save-steps", 2, "--save-total-limit", 9,
        "--logging-steps", 1, "--learning-rate", 1e-3, "--per-device-train-batch-size", 4, "-o",
    ]  # fmt: skip
    folder = tmp_path_factory.mktemp("trained") / "run"
    run_xtk(*arguments, folder)
    return arguments, folder


@pytest.fixture
def unfinished_run(finished_run, tmp_path) -> Path:
    """Return a copy of the run, as if it had been killed after its last checkpoint."""
    copy = Path(shutil.copytree(finished_run[1], tmp_path / "run"))
    (copy / "xtk.json").unlink()
    return copy
