"""`distill` builds the projection that it lacks, from the student and the cache alone, and keeps it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from xtk.training.losses_per_teacher import AUTO_LOSSES


def metrics(done) -> dict:
    return json.loads(done.stdout)["metrics"]


@pytest.mark.slow
def test_a_run_without_a_projection_is_the_run_with_the_one_that_would_be_built(
    run, pair, cache, projection, tmp_path, monkeypatch
):
    monkeypatch.setenv("XTK_CACHE", str(tmp_path / "kept"))
    arguments = ("distill", pair.student, cache, "--loss", "p-kl", "--max-steps", 2, "--logging-steps", 1, "--json")
    named = run(*arguments, "--projection", projection, "-o", tmp_path / "named", env=dict(os.environ))
    auto = run(*arguments, "-o", tmp_path / "auto", env=dict(os.environ))
    again = run(*arguments, "--projection", "auto", "-o", tmp_path / "again", env=dict(os.environ))
    assert metrics(auto)["p-kl"] == metrics(again)["p-kl"] == metrics(named)["p-kl"]
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("named", "auto", "again")]
    assert weights[0] == weights[1] == weights[2]
    (kept,) = (tmp_path / "kept" / "projections").iterdir()
    described = json.loads(run("inspect", kept, "--json").stdout)
    assert described["header"]["method"] == "multitoken"


def test_losses_that_nobody_names_fit_the_pair(run, pair, cache, corpus, tmp_path):
    across = run("distill", pair.student, cache, "--max-steps", 1, "-o", tmp_path / "across", "--json")
    assert {text.partition(":")[0] for text in AUTO_LOSSES["bytes"]} <= set(metrics(across))
    same = run("distill", pair.teacher, cache, "--max-steps", 1, "-o", tmp_path / "same", "--json")
    assert {text.partition(":")[0] for text in AUTO_LOSSES["tokens"]} <= set(metrics(same))


def test_nothing_is_built_for_losses_that_need_no_projection(run, pair, cache, tmp_path):
    kept = {"XTK_CACHE": str(tmp_path / "kept")}
    run("distill", pair.student, cache, "--loss", "ce", "--max-steps", 1, "-o", tmp_path / "ce", env=kept)
    assert not Path(tmp_path / "kept").exists()
