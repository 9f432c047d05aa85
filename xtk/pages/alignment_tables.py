"""Alignment statistics as tables, for terminals, plain text and HTML pages."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from xtk import terminal
from xtk.terminal_tables import print_wide

# Symbols shown in place of invisible characters.
VISIBLE_SYMBOLS = {"\n": "⏎", "\t": "⇥", "\r": "␍", "\x7f": "␡"} | {
    chr(code): chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t\r"
}
# Unicode categories: control, format, surrogate, private use, unassigned, line and paragraph separators.
_INVISIBLE = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs")


@dataclass(frozen=True)
class TextTable:
    """A table of text cells."""

    title: str
    column_titles: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def visible_symbol(character: str) -> str | None:
    """Return the symbol shown for an invisible character; None for a visible one, and for a space."""
    if character in VISIBLE_SYMBOLS:
        return VISIBLE_SYMBOLS[character]
    if character == " " or unicodedata.category(character) not in _INVISIBLE:
        return None
    return f"U+{ord(character):04X}"


def visible_text(text: str) -> str:
    """Return a text with visible symbols in place of invisible and control characters."""
    return "".join(visible_symbol(character) or character for character in text)


def alignment_tables(record: dict[str, Any]) -> list[TextTable]:
    """Return the tables for the JSON statistics of `xtk align --stats`."""
    found = [_tokenizer_table(record), _span_kind_table(record)]
    if record["longest_spans"]:
        found.append(_longest(record))
    if record["worst_documents"]:
        found.append(_worst(record))
    return found


def print_alignment_tables(record: dict[str, Any]) -> None:
    """Print the tables: formatted on a terminal, plain text elsewhere."""
    formatted = terminal.stdout_is_terminal()
    for table in alignment_tables(record):
        if formatted:
            _print_rich_table(table)
        else:
            _print_plain_table(table)
    terminal.result_line(
        f"aligned in {terminal.format_duration(record['seconds'])}, "
        f"{record['nanoseconds_per_token']:,.0f} ns per token (student and teacher tokens)"
    )


def _tokenizer_table(record: dict[str, Any]) -> TextTable:
    rows = [
        (
            side,
            record[side],
            _format_count(record[f"{side}_tokens"]),
            f"{record[f'{side}_bytes_per_token']:.3f}",
            _format_count(record["normalized_documents"][side]),
        )
        for side in ("student", "teacher")
    ]
    title = f"{_format_count(record['documents'])} documents, {_format_count(record['bytes'])} bytes"
    return TextTable(title, ("", "tokenizer", "tokens", "bytes per token", "normalized documents"), rows)


def _span_kind_table(record: dict[str, Any]) -> TextTable:
    rows: list[tuple[str, ...]] = [
        (
            name,
            _format_count(kind["spans"]),
            _format_percent(kind["span_fraction"]),
            _format_count(kind["bytes"]),
            _format_percent(kind["byte_fraction"]),
            _format_count(kind["student_tokens"]),
            _format_count(kind["teacher_tokens"]),
        )
        for name, kind in record["span_kinds"].items()
    ]
    unaligned = (_format_count(record["unaligned_bytes"]), _format_percent(record["unaligned_fraction"]))
    in_spans = {
        side: sum(kind[f"{side}_tokens"] for kind in record["span_kinds"].values()) for side in ("student", "teacher")
    }
    left = tuple(_format_count(record[f"{side}_tokens"] - in_spans[side]) for side in ("student", "teacher"))
    rows.append(("unaligned", "", "", *unaligned, *left))
    heads = ("tokens per span", "spans", "% of spans", "bytes", "% of bytes", "student tokens", "teacher tokens")
    return TextTable(f"{_format_count(record['spans'])} spans, by tokens of student:teacher", heads, rows)


def _longest(record: dict[str, Any]) -> TextTable:
    rows = [
        (
            _format_count(span["document"]),
            _format_count(span["start_byte"]),
            _format_count(span["bytes"]),
            f"{span['student_tokens']}:{span['teacher_tokens']}",
            visible_text(span["excerpt"]).replace(" ", "·"),
        )
        for span in record["longest_spans"]
    ]
    title = "Longest spans with several tokens on both sides or on one"
    return TextTable(title, ("document", "byte offset", "bytes", "student:teacher tokens", "text"), rows)


def _worst(record: dict[str, Any]) -> TextTable:
    rows = [
        (
            _format_count(document["document"]),
            _format_percent(document["byte_fraction"]),
            _why(document),
            visible_text(document["excerpt"]),
        )
        for document in record["worst_documents"]
    ]
    title = "Worst documents, by the fraction of bytes in n:m spans or unaligned"
    return TextTable(title, ("document", "% of bytes", "reason", "text"), rows)


def _why(document: dict[str, Any]) -> str:
    reasons = []
    if document["n:m_bytes"]:
        reasons.append(f"{_format_count(document['n:m_bytes'])} bytes in n:m spans")
    if document["unaligned_bytes"]:
        reasons.append(f"{_format_count(document['unaligned_bytes'])} bytes in no span")
    if document["normalized_by"]:
        reasons.append(f"changed by the {' and the '.join(document['normalized_by'])}")
    return ", ".join(reasons) + f", of {_format_count(document['bytes'])}"


def _print_rich_table(table: TextTable) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    rich_table = RichTable(title=Text(table.title), title_justify="left", box=box.SIMPLE_HEAD)
    for head, right in zip(table.column_titles, numeric_columns(table), strict=True):
        rich_table.add_column(Text(head), justify="right" if right else "left", no_wrap=True)
    for row in table.rows:
        rich_table.add_row(*(Text(terminal.printable(cell)) for cell in row))
    print_wide(Console(force_terminal=True, highlight=False, file=terminal.result_stream()), rich_table)


def _print_plain_table(table: TextTable) -> None:
    lines = [table.column_titles, *(tuple(map(terminal.printable, row)) for row in table.rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(table.column_titles))]
    terminal.result_line(table.title)
    for line in lines:
        cells = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric_columns(table), strict=True)
        ]
        terminal.result_line(("  " + "  ".join(cells)).rstrip())
    terminal.result_line("")


def numeric_columns(table: TextTable) -> list[bool]:
    """Return for each column whether its cells are numbers."""
    columns = zip(*table.rows, strict=True)
    return [all(not cell or cell[0].isdigit() for cell in column) and any(column) for column in columns]


def _format_count(number: int) -> str:
    return f"{number:,}"


def _format_percent(share: float) -> str:
    return f"{share:.2%}"
