"""Mutated manifests, headers, recipes and configurations: no traceback, no file outside is read or written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from forged_artifacts import with_checksum


@pytest.fixture(scope="module")
def pristine(run, pair, cache, projection, tmp_path_factory) -> Path:
    """Return a folder with one artifact of each kind."""
    folder = tmp_path_factory.mktemp("pristine")
    shutil.copytree(cache, folder / "cache")
    shutil.copytree(pair.student, folder / "student")
    shutil.copyfile(projection, folder / "projection")
    run("distill", pair.student, cache, "--max-steps", 2, "--loss", "ce", "--loss", "byte-kl", "-o", folder / "run")
    return folder


def run_cases(pristine: Path, first_seed: int, count: int) -> list[dict]:
    """Return the result of each command on each mutated file."""
    command = [
        sys.executable,
        str(Path(__file__).with_name("mutated_files_process.py")),
        pristine,
        str(first_seed),
        str(count),
    ]
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    process = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=3000, check=False)
    assert process.returncode == 0, process.stderr[-3000:]
    return [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]


def assert_no_harm(results: list[dict]) -> None:
    for result in results:
        description = f"seed {result['seed']} ({result['kind']}), {result['command']}: {result['printed']}"
        assert result["code"] in (0, 1), description
        assert not result["changed"], f"{description}\nchanged {result['changed']}"
        assert not result["opened"], f"{description}\nopened {result['opened']}"
        assert not result["secret"], description


def test_a_few_mutated_artifacts_cause_no_harm(pristine):
    assert_no_harm(run_cases(pristine, 0, 24))


@pytest.mark.parametrize("value", ["x" * 70000, None, [], 10**400, float("nan")])
@pytest.mark.parametrize("name", ["entropy", "quantization_kl"])
def test_shard_statistic_that_is_not_a_number_is_refused(run, cache, tmp_path, name, value):
    folder = Path(shutil.copytree(cache, tmp_path / "cache"))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["shards"][0][name] = value
    (folder / "manifest.json").write_bytes(with_checksum(manifest))
    result = run("inspect", folder, code=1)
    assert f"shards[0].{name} is" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.long
def test_hundreds_of_mutated_artifacts_cause_no_harm(pristine):
    results = run_cases(pristine, 1000, 600)
    assert_no_harm(results)
    assert len({result["seed"] for result in results}) == 600
    print(Counter((result["kind"], result["command"], result["code"]) for result in results))
