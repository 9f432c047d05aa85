"""Texts where paths are expected, and paths where texts are: each is read as one or the other, or refused."""

from __future__ import annotations

import json

import pytest
from test_bad_input import refused

LONG = "many/words " * 500


def aligned(run, pair, *arguments: object, **keywords) -> list[str]:
    lines = run("align", pair.student, pair.teacher, *arguments, **keywords).stdout.splitlines()
    return [json.loads(line)["text"] for line in lines]


@pytest.mark.slow
def test_any_text_is_aligned_wherever_it_stands(run, pair, tmp_path):
    for text in (LONG, "x" * 5000, "~nobody/x", "a/b/c"):
        assert aligned(run, pair, text, cwd=tmp_path) == [text]
        assert aligned(run, pair, "-", stdin=text, cwd=tmp_path) == [text]
    (tmp_path / "one.jsonl").write_text('{"text": "of the folder"}\n')
    (record,) = run("align", pair.student, pair.teacher, "", cwd=tmp_path).stdout.splitlines()
    assert (json.loads(record)["text"], json.loads(record)["spans"]) == ("", [])


def test_a_word_that_is_a_folder_is_text_unless_it_holds_data_or_ends_as_a_path(run, pair, tmp_path):
    (tmp_path / "notes").mkdir()
    assert aligned(run, pair, "notes", cwd=tmp_path) == ["notes"]
    refused(run("align", pair.student, pair.teacher, "notes/", cwd=tmp_path, code=None), "no data files")
    (tmp_path / "notes" / "one.jsonl").write_text('{"text": "of the folder"}\n')
    assert aligned(run, pair, "notes", cwd=tmp_path) == ["of the folder"]


@pytest.mark.parametrize("text", [LONG.strip(), "x" * 5000, "~nobody/x"])
def test_a_text_where_a_path_is_expected_is_refused(run, pair, projection, tmp_path, text):
    for arguments in (
        ("build-projection", text, pair.teacher, "-o", "p"),
        ("build-projection", pair.student, pair.teacher, "--special-tokens", text, "-o", "p"),
        ("build-projection", pair.student, pair.teacher, "--method", "cooccurrence", "--corpus", text, "-o", "p"),
        ("prune-projection", text, "-o", "p"),
        ("evaluate", pair.student, text),
        ("inspect", text),
    ):
        refused(run(*arguments, cwd=tmp_path, code=None), text[:20])
    assert not any(tmp_path.iterdir())


def test_an_output_of_too_long_a_name_is_refused(run, pair, tmp_path):
    for command in (
        ("build-projection", pair.student, pair.teacher),
        ("align", pair.student, pair.teacher, "x", "--html"),
    ):
        refused(run(*command, "-o", "x" * 300, cwd=tmp_path, code=None), "too long")
    assert not any(tmp_path.iterdir())
