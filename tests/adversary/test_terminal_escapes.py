"""Control characters in data, responses and names are escaped in printed text; results for programs are unchanged."""

from __future__ import annotations

import json

import pytest
from xtk_processes import run_xtk

from xtk import terminal

CONTROL_TEXT = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\r\x00"
CONTROL_CHARACTERS = "\x1b\x07\x9b\u202e\r\x00"


def test_every_control_character_but_newline_and_tab_is_escaped():
    for number in [*range(32), *range(0x7F, 0xA0), 0x2028, 0x202E, 0x2066, 0xD800]:
        shown = terminal.printable(f"a{chr(number)}b")
        assert shown == f"a{chr(number)}b" if chr(number) in "\n\t" else chr(number) not in shown
        shown.encode()
    assert terminal.printable("Größe 数 👍🏽 é") == "Größe 数 👍🏽 é"


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "data.jsonl"
    path.write_text(json.dumps({"text": f"Anna has {CONTROL_TEXT} apples."}) + "\n")
    return path


def test_align_escapes_control_characters_in_data(pair, texts):
    result = run_xtk("align", pair.student, pair.teacher, texts)
    assert not any(character in result.stdout + result.stderr for character in CONTROL_CHARACTERS)
    json_result = run_xtk("align", pair.student, pair.teacher, texts, "--json")
    assert not any(character in json_result.stdout for character in CONTROL_CHARACTERS)


def test_errors_and_usage_errors_escape_control_characters_in_arguments(tmp_path):
    for arguments in (["inspect", tmp_path / "no\x1b[31mwhere"], ["inspect", "--no\x1b[31mthing"]):
        result = run_xtk(*arguments, code=None)
        assert result.returncode in (1, 2)
        assert "\x1b" not in result.stderr
        assert "\\x1b[31m" in result.stderr
