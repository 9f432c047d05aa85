"""`distill` builds a missing projection from the student and the cache, and stores it in XTK_CACHE."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from xtk.batches.losses_per_teacher import AUTO_LOSSES


def metrics(done) -> dict:
    return json.loads(done.stdout)["metrics"]


@pytest.mark.slow
def test_an_automatic_projection_gives_the_same_student_as_a_given_one(
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
    (stored,) = (tmp_path / "kept" / "projections").iterdir()
    record = json.loads(run("inspect", stored, "--json").stdout)
    assert record["header"]["method"] == "multitoken"


@pytest.mark.slow
def test_the_default_losses_depend_on_the_tokenizers_of_the_pair(run, pair, cache, corpus, tmp_path):
    across = run("distill", pair.student, cache, "--max-steps", 1, "-o", tmp_path / "across", "--json")
    assert {text.partition(":")[0] for text in AUTO_LOSSES["bytes"]} <= set(metrics(across))
    same = run("distill", pair.teacher, cache, "--max-steps", 1, "-o", tmp_path / "same", "--json")
    assert {text.partition(":")[0] for text in AUTO_LOSSES["tokens"]} <= set(metrics(same))


def test_no_projection_is_built_for_losses_without_one(run, pair, cache, tmp_path):
    env = {"XTK_CACHE": str(tmp_path / "kept")}
    run("distill", pair.student, cache, "--loss", "ce", "--max-steps", 1, "-o", tmp_path / "ce", env=env)
    assert not Path(tmp_path / "kept").exists()
