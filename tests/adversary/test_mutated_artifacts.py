"""Mutated manifests, headers, recipes and configurations: no traceback, and nothing outside is read or written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from forged_artifacts import sealed


@pytest.fixture(scope="module")
def pristine(run, pair, cache, projection, tmp_path_factory) -> Path:
    """One artifact of each kind."""
    folder = tmp_path_factory.mktemp("pristine")
    shutil.copytree(cache, folder / "cache")
    shutil.copytree(pair.student, folder / "student")
    shutil.copyfile(projection, folder / "projection")
    run("distill", pair.student, cache, "--max-steps", 2, "--loss", "ce", "--loss", "byte-kl", "-o", folder / "run")
    return folder


def cases(pristine: Path, first: int, count: int) -> list[dict]:
    """Return what each command did with each mutated file."""
    command = [
        sys.executable,
        str(Path(__file__).with_name("mutated_files_process.py")),
        pristine,
        str(first),
        str(count),
    ]
    root = str(Path(__file__).parents[2])
    surroundings = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, env=surroundings, timeout=3000, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def check(found: list[dict]) -> None:
    for one in found:
        told = f"seed {one['seed']} ({one['kind']}), {one['command']}: {one['printed']}"
        assert one["code"] in (0, 1), told
        assert not one["changed"], f"{told}\nchanged {one['changed']}"
        assert not one["opened"], f"{told}\nopened {one['opened']}"
        assert not one["secret"], told


def test_a_few_mutated_artifacts_end_in_sentences(pristine):
    check(cases(pristine, 0, 24))


@pytest.mark.parametrize("value", ["x" * 70000, None, [], 10**400, float("nan")])
@pytest.mark.parametrize("name", ["entropy", "quantization_kl"])
def test_a_sum_of_a_shard_that_is_no_number_is_named(run, cache, tmp_path, name, value):
    folder = Path(shutil.copytree(cache, tmp_path / "cache"))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["shards"][0][name] = value
    (folder / "manifest.json").write_bytes(sealed(manifest))
    refused = run("inspect", folder, code=1)
    assert f"shards[0].{name} is" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.long
def test_hundreds_of_mutated_artifacts_end_in_sentences(pristine):
    found = cases(pristine, 1000, 600)
    check(found)
    assert len({one["seed"] for one in found}) == 600
    print(Counter((one["kind"], one["command"], one["code"]) for one in found))
