"""The terminal view of `xtk align`: both rows line up, all tokens are shown, lines fit."""

from __future__ import annotations

import pytest
from rich.cells import cell_len

from xtk.commands.align_printing import BETWEEN_TOKENS, BORDER, print_boxes, visible_token
from xtk.text.alignment_statistics import align_documents
from xtk.text.document import Document
from xtk.text.tokenizer import Tokenizer

TEXTS = [
    "It costs 1234567 euros, or 2·0·2.",
    "日本語の文 😀👩\u200d👩\u200d👧 naïve\tfaçade\nend",
    "1234567890" * 12,
    "x",
]


def printed_pairs(output: str) -> list[tuple[str, str]]:
    """Return the lines of student and teacher without labels, two at a time."""
    lines = [line for line in output.splitlines() if line.startswith(("student ", "teacher "))]
    return list(zip(lines[::2], lines[1::2], strict=True))


def border_columns(line: str) -> list[int]:
    return [cell_len(line[:at]) for at, letter in enumerate(line) if letter == BORDER]


@pytest.mark.parametrize("width", [40, 80])
@pytest.mark.parametrize("text", TEXTS)
def test_rows_line_up_fit_and_show_all_tokens(pair, capsys, monkeypatch, text, width):
    monkeypatch.setenv("COLUMNS", str(width))
    student, teacher = Tokenizer(pair.student), Tokenizer(pair.teacher)
    (group,) = align_documents([Document.from_text(text)], student, teacher)
    ids = {"student": group[0].student.ids.tolist(), "teacher": group[0].teacher.ids.tolist()}
    record = {"student_ids": ids["student"], "teacher_ids": ids["teacher"], "spans": group[0].spans.tolist()}
    print_boxes(record, student, teacher)
    output = capsys.readouterr().out
    pairs = printed_pairs(output)
    for one, other in pairs:
        assert border_columns(one) == border_columns(other)
        assert cell_len(one) <= width
    for number, (name, side) in enumerate((("student", student), ("teacher", teacher))):
        shown = "".join(lines[number].removeprefix(name).replace(BORDER, "").replace(" ", "") for lines in pairs)
        expected = "".join(visible_token(side.vocabulary.bytes_of(token)) for token in ids[name]).replace(" ", "")
        assert shown.replace(BETWEEN_TOKENS, "") == expected
    assert f"{BORDER} between spans" in output
    assert ("⇥ tab" in output) == ("\t" in text)
    assert ("bytes of a part of a character" in output) == ("<" in expected)


def test_parts_of_characters_are_hexadecimal():
    assert visible_token("é".encode()[:1]) == "<C3>"
    assert visible_token(b"a \xe2\x82\n") == "a·<E2 82>⏎"


def test_tokens_in_no_span_are_shown_and_named(pair, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    student, teacher = Tokenizer(pair.student), Tokenizer(pair.teacher)
    print_boxes({"student_ids": [10, 11, 12], "teacher_ids": [9], "spans": [[1, 2, 0, 1]]}, student, teacher)
    output = capsys.readouterr().out
    ((one, _),) = printed_pairs(output)
    assert one.count(BORDER) == 4
    assert "red: in no span" in output
