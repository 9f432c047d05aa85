"""Tables of results on standard output."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from xtk import terminal

NAN_TEXT = "not a number"


def format_with_error(value: float | None, error: float | None, sign: str = "") -> str:
    """Return a number with its standard error as text; `sign` is "+" for differences. None: it is not a number."""
    if value is None:
        return NAN_TEXT
    return f"{round(value, 4) + 0.0:{sign}.4f}" + ("" if error is None else f" ± {error:.4f}")


def print_wide(console: Any, table: Any) -> None:
    """Print a table of rich in its full width: where the terminal is narrower, it wraps lines, and no number is cut."""
    console.width = max(console.width, console.measure(table, options=console.options.update(width=10_000)).maximum)
    console.print(table, soft_wrap=True)


def print_table(
    title: str,
    column_titles: list[str],
    rows: list[list[str]],
    is_number: Sequence[bool] = (),
    *,
    as_note: bool = False,
) -> None:
    """Print a table: formatted on a terminal, plain text elsewhere. Empty columns are left out.

    `is_number`: for each column whether it is aligned to the right; `as_note`: to stderr, not to stdout as a result.
    """
    kept = [at for at in range(len(column_titles)) if any(row[at] for row in rows)]
    right = [bool(is_number) and is_number[at] for at in kept]
    column_titles, rows = (
        [column_titles[at] for at in kept],
        [[terminal.printable(row[at]) for at in kept] for row in rows],
    )
    if as_note and not terminal.shows_notes():
        return
    if sys.stderr.isatty() if as_note else terminal.stdout_is_terminal():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(title=Text(terminal.printable(title)))
        for head, at_right in zip(column_titles, right, strict=True):
            table.add_column(Text(head), justify="right" if at_right else "left", no_wrap=True)
        for row in rows:
            table.add_row(*map(Text, row))
        print_wide(Console(file=sys.stderr if as_note else terminal.result_stream()), table)
        return
    print_line = terminal.note if as_note else terminal.result_line
    print_line(title)
    for line in plain_lines([column_titles, *rows], right):
        print_line(line)


def plain_lines(rows: Sequence[Sequence[str]], is_number: Sequence[bool]) -> list[str]:
    """Return rows of a table as lines with columns of one width each; numbers are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = (
        [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, is_number, strict=True)
        ]
        for row in rows
    )
    return ["  ".join(cells).rstrip() for cells in padded]
