"""Tokenizers that lose characters: all commands work and report the loss that they measure on the given text."""

from __future__ import annotations

import json
import shutil

import pytest
import small_inputs

TEXTS = ["Anna has 12 Äpfel.", "anna has 12", "Bert left."]


@pytest.fixture(scope="module")
def lossy(pair, families, tmp_path_factory):
    """Return the teacher with a tokenizer that lower-cases text and drops accents."""
    folder = tmp_path_factory.mktemp("lossy")
    shutil.copytree(pair.teacher, folder / "teacher")
    for path in families["word-piece"].iterdir():
        shutil.copyfile(path, folder / "teacher" / path.name)
    return folder / "teacher"


def test_align_flags_inexact_documents(run, pair, lossy, tmp_path):
    corpus = small_inputs.write_jsonl(tmp_path / "c.jsonl", TEXTS)
    done = run("align", pair.student, lossy, corpus)
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [record["exact"] for record in records] == [False, False, False]
    assert "of the characters of these texts" in done.stderr
    assert "' ' dropped" in done.stderr
    same = run("align", pair.student, pair.teacher, corpus)
    records = [json.loads(line) for line in same.stdout.splitlines()]
    assert [record["exact"] for record in records] == [True, True, True]
    assert same.stderr == ""


def test_statistics_count_lost_characters(run, pair, lossy, tmp_path):
    corpus = small_inputs.write_jsonl(tmp_path / "c.jsonl", TEXTS)
    record = json.loads(run("align", pair.student, lossy, corpus, "--stats", "--json").stdout)
    assert record["normalization_loss"]["student"] == {"rewritten": 0, "dropped": 0, "unknown": 0}
    # Three capital letters, one of them with an accent, and six spaces, one of them right before it.
    lost = record["normalization_loss"]["teacher"]
    assert lost["unknown"] == 0
    assert lost["rewritten"] in (3, 4)
    assert lost["rewritten"] + lost["dropped"] == 3 + 6


@pytest.mark.slow
def test_cache_teacher_and_distill_report_characters_that_the_tokenizer_loses(run, pair, lossy, tmp_path):
    corpus = small_inputs.write_jsonl(tmp_path / "c.jsonl", TEXTS)
    done = run("cache-teacher", lossy, corpus, "--top-k", 4, "-o", tmp_path / "cache")
    assert "of the characters of these texts" in done.stderr
    run("build-projection", pair.student, lossy, "-o", tmp_path / "p")
    done = run("distill", pair.student, tmp_path / "cache", "--projection", tmp_path / "p", "--max-steps", 1, "-o",
               tmp_path / "out")  # fmt: skip
    assert "of the characters of these texts" not in done.stderr  # this student's tokenizer loses nothing
    assert (
        "of the characters of these texts"
        in run("distill", lossy, corpus, "--loss", "ce", "--max-steps", 1, "-o", tmp_path / "ce").stderr
    )
