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


def test_align_flags_inexact_documents_and_prints_the_similarity_of_spans(run, pair, lossy, tmp_path):
    corpus = small_inputs.write_jsonl(tmp_path / "c.jsonl", TEXTS)
    done = run("align", pair.student, lossy, corpus)
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [record["exact"] for record in records] == [False, False, False]
    assert all(len(record["similarity"]) == len(record["spans"]) for record in records)
    assert all(0 < value <= 1 for record in records for value in record["similarity"])
    assert "of the characters of these texts" in done.stderr
    assert "' ' dropped" in done.stderr
    same = run("align", pair.student, pair.teacher, corpus)
    records = [json.loads(line) for line in same.stdout.splitlines()]
    assert [record["exact"] for record in records] == [True, True, True]
    assert "similarity" not in records[0]
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


def test_two_different_texts_are_aligned_where_they_agree(run, pair):
    text, other_text = "Anna has 1234 apples left.", "Anna had 1234 apples, left."
    done = run("align", pair.student, pair.teacher, text, "--teacher-text", other_text)
    (record,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert record["exact"] is False
    assert record["equal"] == [value == 1 for value in record["similarity"]]
    assert sum(record["equal"]) > 5
    assert not all(record["equal"])
    assert record["spans"][-1][1::2] == [len(record["student_ids"]), len(record["teacher_ids"])]
    same = json.loads(run("align", pair.student, pair.teacher, text, "--teacher-text", text).stdout)
    plain = json.loads(run("align", pair.student, pair.teacher, text).stdout)
    assert same["spans"] == plain["spans"]
    assert same["exact"] is True
    assert run("align", pair.student, pair.teacher, "--teacher-text", text, stdin="x", code=2).stdout == ""
