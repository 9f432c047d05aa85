"""Messages about misspelled commands and columns, losses without a teacher, and automatic projections."""

from __future__ import annotations

import json

import pytest
from xtk_processes import run_here


def test_a_misspelled_command_is_refused_with_a_suggestion():
    done = run_here("distil", code=2)
    assert "no command called 'distil'; did you mean distill?" in done.stderr
    assert "Traceback" not in run_here("nosuch", code=2).stderr


def test_a_misspelled_column_is_refused_with_a_suggestion(pair, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"body": "Anna", "id": 1}) + "\n")
    done = run_here("align", pair.student, pair.teacher, tmp_path / "a.jsonl", "--columns", "text=bdy", code=1)
    assert "this document has no column bdy; its columns: body, id; did you mean body?" in done.stderr


@pytest.mark.parametrize("loss", ["p-kl", "auto"])
def test_a_loss_that_needs_a_teacher_refuses_plain_data(pair, corpus, tmp_path, loss):
    done = run_here("distill", pair.student, corpus, "--loss", loss, "-o", tmp_path / "out", code=1)
    assert f"--loss {loss} needs teacher log-probabilities, but CACHE is plain data" in done.stderr
    assert f"where: {corpus}" in done.stderr
    assert "xtk cache-teacher TEACHER" in done.stderr


def test_an_automatically_built_projection_is_reported(run, pair, cache, tmp_path):
    options = ("--loss", "p-kl", "--max-steps", 1, "-o", tmp_path / "out")
    done = run("distill", pair.student, cache, *options, env={"XTK_CACHE": str(tmp_path / "kept")})
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("distill: projection to "))
    assert "method multitoken" in line
    assert "student tokens exact, unmapped mass" in line
    assert str(next((tmp_path / "kept" / "projections").iterdir())) in line
