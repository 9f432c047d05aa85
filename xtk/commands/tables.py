"""Tables of results on standard output."""

from __future__ import annotations

from xtk import terminal


def with_error(value: float, error: float | None, sign: str = "") -> str:
    """Return a number with its standard error; `sign` is "+" for differences."""
    return f"{round(value, 4) + 0.0:{sign}.4f}" + ("" if error is None else f" ± {error:.4f}")


def print_table(title: str, heads: list[str], rows: list[list[str]]) -> None:
    """Print a table: drawn on a terminal, columns of plain text elsewhere. Columns without content are left out."""
    kept = [at for at in range(len(heads)) if any(row[at] for row in rows)]
    heads, rows = [heads[at] for at in kept], [[terminal.printable(row[at]) for at in kept] for row in rows]
    if terminal.results_are_seen_by_a_person():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(title=Text(terminal.printable(title)))
        for head in heads:
            table.add_column(Text(head), overflow="fold")
        for row in rows:
            table.add_row(*map(Text, row))
        Console(file=terminal.results()).print(table)
        return
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    terminal.result_line(title)
    for row in [heads, *rows]:
        terminal.result_line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
