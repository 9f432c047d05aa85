"""The statistics of an alignment as tables: the same rows on a terminal, as plain text and on a page."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from xtk import terminal

# What is drawn for characters that have no picture of their own.
PICTURES = {"\n": "⏎", "\t": "⇥", "\r": "␍", "\x7f": "␡"} | {
    chr(code): chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t\r"
}
# Control and format characters, separators, private use and what is not assigned.
_INVISIBLE = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs")


@dataclass(frozen=True)
class Table:
    """A title, the heads of its columns, and rows of words."""

    title: str
    heads: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def picture(character: str) -> str | None:
    """Return what is drawn for a character that cannot be seen; None for one that can, and for the space."""
    if character in PICTURES:
        return PICTURES[character]
    if character == " " or unicodedata.category(character) not in _INVISIBLE:
        return None
    return f"U+{ord(character):04X}"


def visible(text: str) -> str:
    """Return a text in which every character can be seen, and none moves a terminal's cursor."""
    return "".join(picture(character) or character for character in text)


def tables(record: dict[str, Any]) -> list[Table]:
    """Return the statistics of `Statistics.record` for people."""
    found = [_sides(record), _kinds(record)]
    if record["longest_spans"]:
        found.append(_longest(record))
    if record["worst_documents"]:
        found.append(_worst(record))
    return found


def show(record: dict[str, Any]) -> None:
    """Print the tables: drawn on a terminal, plain elsewhere."""
    drawn = terminal.results_are_seen_by_a_person()
    for table in tables(record):
        if drawn:
            _draw(table)
        else:
            _write(table)
    terminal.result_line(
        f"{terminal.duration(record['seconds'])}, {record['nanoseconds_per_token']:,.0f} ns a token of either side"
    )


def _sides(record: dict[str, Any]) -> Table:
    rows = [
        (
            side,
            record[side],
            _count(record[f"{side}_tokens"]),
            f"{record[f'{side}_bytes_per_token']:.3f}",
            _count(record["rewritten_documents"][side]),
        )
        for side in ("student", "teacher")
    ]
    title = f"{_count(record['documents'])} documents, {_count(record['bytes'])} bytes"
    return Table(title, ("", "tokenizer", "tokens", "bytes a token", "documents that it rewrote"), rows)


def _kinds(record: dict[str, Any]) -> Table:
    rows: list[tuple[str, ...]] = [
        (
            name,
            _count(kind["spans"]),
            _share(kind["share_of_spans"]),
            _count(kind["bytes"]),
            _share(kind["share_of_bytes"]),
            _count(kind["student_tokens"]),
            _count(kind["teacher_tokens"]),
        )
        for name, kind in record["kinds"].items()
    ]
    unaligned = (_count(record["unaligned_bytes"]), _share(record["unaligned_share_of_bytes"]))
    in_spans = {
        side: sum(kind[f"{side}_tokens"] for kind in record["kinds"].values()) for side in ("student", "teacher")
    }
    left = tuple(_count(record[f"{side}_tokens"] - in_spans[side]) for side in ("student", "teacher"))
    rows.append(("in no span", "", "", *unaligned, *left))
    heads = ("tokens, student:teacher", "spans", "share", "bytes", "share", "student tokens", "teacher tokens")
    return Table(f"{_count(record['spans'])} spans", heads, rows)


def _longest(record: dict[str, Any]) -> Table:
    rows = [
        (
            _count(span["document"]),
            _count(span["at_byte"]),
            _count(span["bytes"]),
            f"{span['student_tokens']}:{span['teacher_tokens']}",
            visible(span["excerpt"]).replace(" ", "·"),
        )
        for span in record["longest_spans"]
    ]
    title = "Longest spans of more than one token on a side"
    return Table(title, ("document", "at byte", "bytes", "tokens", "text"), rows)


def _worst(record: dict[str, Any]) -> Table:
    rows = [
        (_count(document["document"]), _share(document["share_of_bytes"]), _why(document), visible(document["excerpt"]))
        for document in record["worst_documents"]
    ]
    title = "Worst documents, by the share of their bytes in n:m spans or in none"
    return Table(title, ("document", "share", "why", "text"), rows)


def _why(document: dict[str, Any]) -> str:
    reasons = []
    if document["n:m_bytes"]:
        reasons.append(f"{_count(document['n:m_bytes'])} bytes in n:m spans")
    if document["unaligned_bytes"]:
        reasons.append(f"{_count(document['unaligned_bytes'])} bytes in no span")
    if document["rewritten_by"]:
        reasons.append(f"rewritten by the {' and the '.join(document['rewritten_by'])}")
    return ", ".join(reasons) + f", of {_count(document['bytes'])}"


def _draw(table: Table) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table as Drawn
    from rich.text import Text

    drawn = Drawn(title=Text(table.title), title_justify="left", box=box.SIMPLE_HEAD)
    for head, right in zip(table.heads, numeric(table), strict=True):
        drawn.add_column(Text(head), justify="right" if right else "left", no_wrap=True)
    for row in table.rows:
        drawn.add_row(*(Text(terminal.printable(cell)) for cell in row))
    Console(force_terminal=True, highlight=False, file=terminal.results()).print(drawn)


def _write(table: Table) -> None:
    lines = [table.heads, *(tuple(map(terminal.printable, row)) for row in table.rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(table.heads))]
    terminal.result_line(table.title)
    for line in lines:
        cells = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric(table), strict=True)
        ]
        terminal.result_line(("  " + "  ".join(cells)).rstrip())
    terminal.result_line("")


def numeric(table: Table) -> list[bool]:
    """Say for each column whether it holds numbers."""
    columns = zip(*table.rows, strict=True)
    return [all(not cell or cell[0].isdigit() for cell in column) and any(column) for column in columns]


def _count(number: int) -> str:
    return f"{number:,}"


def _share(share: float) -> str:
    return f"{share:.2%}"
