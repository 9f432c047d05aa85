"""Tables of results on standard output."""

from __future__ import annotations

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


def print_table(title: str, column_titles: list[str], rows: list[list[str]]) -> None:
    """Print a table: formatted on a terminal, plain text elsewhere. Empty columns are left out."""
    kept = [at for at in range(len(column_titles)) if any(row[at] for row in rows)]
    column_titles, rows = (
        [column_titles[at] for at in kept],
        [[terminal.printable(row[at]) for at in kept] for row in rows],
    )
    if terminal.stdout_is_terminal():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(title=Text(terminal.printable(title)))
        for head in column_titles:
            table.add_column(Text(head), no_wrap=True)
        for row in rows:
            table.add_row(*map(Text, row))
        print_wide(Console(file=terminal.result_stream()), table)
        return
    widths = [max(map(len, column)) for column in zip(column_titles, *rows, strict=True)]
    terminal.result_line(title)
    for row in [column_titles, *rows]:
        terminal.result_line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
