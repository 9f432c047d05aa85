"""Tables of results on standard output."""

from __future__ import annotations

from xtk import terminal


def format_with_error(value: float, error: float | None, sign: str = "") -> str:
    """Return a number with its standard error as text; `sign` is "+" for differences."""
    return f"{round(value, 4) + 0.0:{sign}.4f}" + ("" if error is None else f" ± {error:.4f}")


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
            table.add_column(Text(head), overflow="fold")
        for row in rows:
            table.add_row(*map(Text, row))
        Console(file=terminal.result_stream()).print(table)
        return
    widths = [max(map(len, column)) for column in zip(column_titles, *rows, strict=True)]
    terminal.result_line(title)
    for row in [column_titles, *rows]:
        terminal.result_line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
