"""Help of commands: usage, headings, options with their values and limits, without line breaks inside of words."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from xtk import terminal
from xtk.options.declaration import Heading, Option, flag, headings_of

HELP_ALL = "--help-all"
NAME_COLUMN = 30  # columns of an option and its value; a longer one takes a separate line
MANUAL = "docs/README.md in the repository of xtk"


def heading(title: str) -> str:
    """Return a heading: bold on a terminal."""
    return terminal.styled(f"{title}:", "bold", sys.stdout)


def wrap(text: str, width: int, indent: str = "") -> list[str]:
    """Return the lines of a text; options, paths and words with hyphens are not broken."""
    return textwrap.wrap(
        text, max(width, 20), break_on_hyphens=False, break_long_words=False, initial_indent=indent,
        subsequent_indent=indent,
    )  # fmt: skip


def definition_lines(records: Iterable[tuple[str, str]], width: int, name_column: int = NAME_COLUMN) -> Iterator[str]:
    """Yield lines of (name, text) in two columns."""
    for name, text in records:
        lines = wrap(text, width - name_column - 4)
        fits = len(name) <= name_column
        if not fits or not lines:
            yield f"  {name}"
        for at, line in enumerate(lines):
            yield f"  {name if fits and not at else '':{name_column}}  {line}"


def usage(path: str, options: Sequence[tuple[str, Option]], required: Sequence[str]) -> str:
    """Return the usage of a command: its arguments, and the options that it needs."""
    words = [option.metavar or name.upper() for name, option in options if option.is_argument]
    needed = [
        f"{(option.flags or (flag(name),))[-1]} {option.metavar}"
        for name, option in options
        if not option.is_argument and name in required
    ]
    return " ".join([path, *words, *needed, "[OPTIONS]"])


def option_record(name: str, option: Option, type_: Any, default: Any, *, is_required: bool) -> tuple[str, str]:
    """Return how help writes an option, and its text with default and limits."""
    if option.is_argument:
        shown = [f"[default: {default}]"] if default and option.show_default and not is_required else []
        return option.metavar or name.upper(), " ".join([option.help, *shown])
    names = ", ".join(sorted(option.flags or (flag(name),), key=len))
    if type_ is bool:
        return (f"{names} / --no-{names.removeprefix('--')}", f"{option.help}  [default: {names.removeprefix('--')}]") \
            if default is True else (names, option.help)  # fmt: skip
    has_default = option.show_default and not is_required and default not in (None, "", ())
    notes = ["required"] if is_required else [f"default: {_default(default)}"] if has_default else []
    notes += [option.limits] if option.limits and option.limits != "at least 0" else []
    text = f"{option.help}  [{'; '.join(notes)}]" if notes else option.help
    return f"{names} {value_name(option, type_)}", text


def _default(default: Any) -> str:
    return ",".join(default) if isinstance(default, tuple) else str(default)


def value_name(option: Option, type_: Any) -> str:
    """Return how help writes the value of an option: its choices, N, or what it is."""
    if option.metavar or option.choices:
        return option.metavar or f"[{'|'.join(option.choices)}]"
    return "N" if type_ in (int, float, int | None, float | None) else "TEXT"


def sections(
    records: Mapping[str, tuple[str, str]], arguments: Sequence[str], headings: Sequence[Heading], main: Sequence[str]
) -> dict[str, list[tuple[str, str]]]:
    """Return (name, text) by heading.

    Args:
        records: of all parameters by field name.
        arguments: the names of positional ones.
        main: names of the options to list, in this order; (): all, by heading.
    """
    listed: dict[str, list[tuple[str, str]]] = {"Arguments": [records[name] for name in arguments]}
    if main:
        return {**listed, "Most used options": [records[name] for name in main]}
    titles = {name: part.title for part, names in headings_of(headings) for name in names}
    general = "General" if titles else "Options"
    listed |= {title: [] for title in titles.values()} | {general: []}
    for name in (*titles, *(name for name in records if name not in titles)):
        if name in records and name not in arguments:
            listed[titles.get(name, general)].append(records[name])
    return listed
