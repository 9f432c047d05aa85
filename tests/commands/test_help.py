"""Help: nothing is broken inside of a word, types are written as people write them, long commands have a short form."""

from __future__ import annotations

import re
import sys

import pytest
import typer
from xtk_processes import run_here

from xtk.cli import COMMANDS, TOPICS, app
from xtk.commands.command_from_options import options_type
from xtk.commands.help_format import heading
from xtk.options.declaration import declared_options, flag

LONG = [name for name, function in COMMANDS.items() if options_type(function).MAIN_OPTIONS]


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture(scope="module", params=COMMANDS)
def shown(request) -> tuple[str, str]:
    """Return the name of a command and its whole help, 80 columns wide."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        return request.param, run_here(*request.param.split(), "--help-all").stdout


def test_all_texts_are_printed_whole(shown):
    name, printed = shown
    for field, option in declared_options(options_type(COMMANDS[name])):
        assert words(option.help) in words(printed), field.name
        assert option.is_argument or (option.flags or (flag(field.name),))[0] in printed


def test_lines_fit_and_types_are_words(shown):
    _, printed = shown
    too_long = [line for line in printed.splitlines() if len(line) > 80 and len(line.split()) > 2]
    assert [line for line in too_long if not line.startswith("  xtk ")] == []
    assert not re.search(r"<\w+( \w+)?>|list\[|\[\[|MISSING|\{[A-Z]", printed)


def test_usage_has_the_options_that_are_needed(shown):
    name, printed = shown
    required = [(field, option) for field, option in declared_options(options_type(COMMANDS[name]))
                if not option.is_argument and repr(field.default).startswith("<dataclasses._MISSING")]  # fmt: skip
    for field, option in required:
        assert f" {(option.flags or (flag(field.name),))[-1]} {option.metavar}" in words(printed.partition("\n\n")[0])


def test_commands_with_many_options_have_a_short_help():
    counts = {name: sum(not option.is_argument for _, option in declared_options(options_type(function)))
              for name, function in COMMANDS.items()}  # fmt: skip
    assert {name for name, count in counts.items() if count > 20} == set(LONG)


@pytest.mark.parametrize("name", LONG)
def test_short_help_lists_the_most_used_options(name):
    printed = run_here(*name.split(), "--help").stdout
    main = options_type(COMMANDS[name]).MAIN_OPTIONS
    assert 9 <= len(main) <= 11
    assert len(re.findall(r"^  (?=-)", printed, re.MULTILINE)) == len(main) + 2  # and the two options for help
    assert "--help-all" in printed


def test_every_command_is_listed_under_one_topic():
    listed = [name for names in TOPICS.values() for name in names]
    assert sorted(listed) == sorted(typer.main.get_command(app).list_commands(None))
    printed = run_here("--help").stdout
    assert [line[:-1] for line in printed.splitlines() if line.rstrip(":") in TOPICS] == list(TOPICS)
    assert "projection p4" not in printed


@pytest.mark.parametrize(("is_terminal", "expected"), [(True, "\x1b[1mData:\x1b[0m"), (False, "Data:")])
def test_headings_are_bold_on_a_terminal(monkeypatch, is_terminal, expected):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
    assert heading("Data") == expected


def test_limits_are_written_with_all_digits(shown):
    name, printed = shown
    assert not re.search(r"\d(\.\d+)?e\+\d", printed), name
