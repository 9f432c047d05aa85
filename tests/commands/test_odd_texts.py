"""Arguments that could be a text or a path: each is read as one of the two, or refused."""

from __future__ import annotations

import json

import pytest
from test_bad_input import assert_refused

LONG = "many/words " * 500


def aligned_texts(run, pair, *arguments: object, **keywords) -> list[str]:
    lines = run("align", pair.student, pair.teacher, *arguments, **keywords).stdout.splitlines()
    return [json.loads(line)["text"] for line in lines]


@pytest.mark.slow
def test_any_text_is_aligned_as_an_argument_and_from_stdin(run, pair, tmp_path):
    for text in (LONG, "x" * 5000, "~nobody/x", "a/b/c"):
        assert aligned_texts(run, pair, text, cwd=tmp_path) == [text]
        assert aligned_texts(run, pair, "-", stdin=text, cwd=tmp_path) == [text]
    (tmp_path / "one.jsonl").write_text('{"text": "of the folder"}\n')
    (record,) = run("align", pair.student, pair.teacher, "", cwd=tmp_path).stdout.splitlines()
    assert (json.loads(record)["text"], json.loads(record)["spans"]) == ("", [])


def test_a_folder_name_is_text_unless_it_contains_data_or_ends_with_a_slash(run, pair, tmp_path):
    (tmp_path / "notes").mkdir()
    assert aligned_texts(run, pair, "notes", cwd=tmp_path) == ["notes"]
    assert_refused(run("align", pair.student, pair.teacher, "notes/", cwd=tmp_path, code=None), "no data files")
    (tmp_path / "notes" / "one.jsonl").write_text('{"text": "of the folder"}\n')
    assert aligned_texts(run, pair, "notes", cwd=tmp_path) == ["of the folder"]


@pytest.mark.slow
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
        assert_refused(run(*arguments, cwd=tmp_path, code=None), text[:20])
    assert not any(tmp_path.iterdir())


def test_a_too_long_output_name_is_refused(run, pair, tmp_path):
    for command in (
        ("build-projection", pair.student, pair.teacher),
        ("align", pair.student, pair.teacher, "x"),
    ):
        assert_refused(
            run(*command, "--html" if command[0] == "align" else "-o", "x" * 300, cwd=tmp_path, code=None), "too long"
        )
    assert not any(tmp_path.iterdir())
