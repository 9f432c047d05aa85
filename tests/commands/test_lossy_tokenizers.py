"""Tokenizers that cannot spell a text: everything works, and what is lost is told, measured on the text at hand."""

from __future__ import annotations

import json
import shutil

import pytest
import small_inputs

TEXTS = ["Anna has 12 Äpfel.", "anna has 12", "Bert left."]


@pytest.fixture(scope="module")
def lossy(pair, families, tmp_path_factory):
    """The teacher, with a tokenizer that lower-cases and drops accents."""
    folder = tmp_path_factory.mktemp("lossy")
    shutil.copytree(pair.teacher, folder / "teacher")
    for path in families["word-piece"].iterdir():
        shutil.copyfile(path, folder / "teacher" / path.name)
    return folder / "teacher"


def test_align_flags_what_is_not_spelled_and_says_how_similar_it_is(run, pair, lossy, tmp_path):
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


def test_statistics_count_the_characters_that_are_lost(run, pair, lossy, tmp_path):
    corpus = small_inputs.write_jsonl(tmp_path / "c.jsonl", TEXTS)
    record = json.loads(run("align", pair.student, lossy, corpus, "--stats", "--json").stdout)
    assert record["normalization_loss"]["student"] == {"rewritten": 0, "dropped": 0, "unknown": 0}
    # Three capital letters, one of them with an accent, and six spaces, one of them right before it.
    lost = record["normalization_loss"]["teacher"]
    assert lost["unknown"] == 0
    assert lost["rewritten"] in (3, 4)
    assert lost["rewritten"] + lost["dropped"] == 3 + 6


def test_a_cache_and_a_run_say_what_their_tokenizers_lose(run, pair, lossy, tmp_path):
    corpus = small_inputs.write_jsonl(tmp_path / "c.jsonl", TEXTS)
    done = run("cache-teacher", lossy, corpus, "--top-k", 4, "-o", tmp_path / "cache")
    assert "of the characters of these texts" in done.stderr
    run("build-projection", pair.student, lossy, "-o", tmp_path / "p")
    done = run("distill", pair.student, tmp_path / "cache", "--projection", tmp_path / "p", "--max-steps", 1, "-o",
               tmp_path / "out")  # fmt: skip
    assert "of the characters of these texts" not in done.stderr  # this student can
    assert (
        "of the characters of these texts"
        in run("distill", lossy, corpus, "--loss", "ce", "--max-steps", 1, "-o", tmp_path / "ce").stderr
    )


def test_two_texts_that_differ_are_aligned_where_they_agree(run, pair):
    one, other = "Anna has 1234 apples left.", "Anna had 1234 apples, left."
    done = run("align", pair.student, pair.teacher, one, "--teacher-text", other)
    (record,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert record["exact"] is False
    assert record["equal"] == [value == 1 for value in record["similarity"]]
    assert sum(record["equal"]) > 5
    assert not all(record["equal"])
    assert record["spans"][-1][1::2] == [len(record["student_ids"]), len(record["teacher_ids"])]
    same = json.loads(run("align", pair.student, pair.teacher, one, "--teacher-text", one).stdout)
    plain = json.loads(run("align", pair.student, pair.teacher, one).stdout)
    assert same["spans"] == plain["spans"]
    assert same["exact"] is True
    assert run("align", pair.student, pair.teacher, "--teacher-text", one, stdin="x", code=2).stdout == ""
