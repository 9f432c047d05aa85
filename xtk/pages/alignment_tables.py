"""Alignment statistics as tables, for terminals, plain text and HTML pages."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from xtk import terminal
from xtk.terminal_tables import print_table

MAX_NAME, MIN_TEXT = 26, 12  # columns of a tokenizer's name and of a text in a terminal
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

    @property
    def numeric_columns(self) -> list[bool]:
        """For each column whether its cells are numbers."""
        columns = zip(*self.rows, strict=True)
        return [all(not cell or cell[0].isdigit() for cell in column) and any(column) for column in columns]

    def fit(self, width: int) -> TextTable:
        """Return the table with the texts of its last column cut so that a terminal of `width` columns shows them."""
        columns = list(zip(self.column_titles, *self.rows, strict=True))
        taken = sum(max(map(len, column)) + 3 for column in columns[:-1] if any(column[1:]))
        room = max(width - taken - 4, MIN_TEXT)
        cut = [(*row[:-1], row[-1] if len(row[-1]) <= room else f"{row[-1][: room - 1]}…") for row in self.rows]
        return TextTable(self.title, self.column_titles, cut)


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
    tables = [_tokenizer_table(record), _span_kind_table(record)]
    tables += [_longest(record)] if record["longest_spans"] else []
    tables += [_worst(record)] if record["worst_documents"] else []
    return tables


def print_alignment_tables(record: dict[str, Any]) -> None:
    """Print the tables: formatted on a terminal, plain text elsewhere."""
    width = terminal.stdout_width()
    names = {side: _last_characters(record[side]) if width else record[side] for side in ("student", "teacher")}
    for table in alignment_tables({**record, **names}):
        shown = table if width is None else table.fit(width)
        print_table(shown.title, [*shown.column_titles], [[*row] for row in shown.rows], shown.numeric_columns)
        terminal.result_line("")
    terminal.result_line(
        f"{terminal.format_duration(record['seconds'])} to read, tokenize, align and count: "
        f"{record['nanoseconds_per_token']:,.0f} ns per token of either side"
    )


def _last_characters(name: str) -> str:
    return name if len(name) <= MAX_NAME else f"…{name[1 - MAX_NAME :]}"


def _tokenizer_table(record: dict[str, Any]) -> TextTable:
    rows = [
        (side, record[side], f"{record[f'{side}_tokens']:,}", f"{record[f'{side}_bytes_per_token']:.3f}",
         f"{record['normalized_documents'][side]:,}")
        for side in ("student", "teacher")
    ]  # fmt: skip
    documents = "1 document" if record["documents"] == 1 else f"{record['documents']:,} documents"
    title = f"{documents}, {record['bytes']:,} bytes; normalized: documents whose text a tokenizer changes"
    return TextTable(title, ("", "tokenizer", "tokens", "bytes/token", "normalized"), rows)


def _span_kind_table(record: dict[str, Any]) -> TextTable:
    rows: list[tuple[str, ...]] = [
        (name, f"{kind['spans']:,}", f"{kind['span_fraction']:.2%}", f"{kind['bytes']:,}",
         f"{kind['byte_fraction']:.2%}", f"{kind['student_tokens']:,}", f"{kind['teacher_tokens']:,}")
        for name, kind in record["span_kinds"].items()
    ]  # fmt: skip
    left = (
        record[f"{side}_tokens"] - sum(kind[f"{side}_tokens"] for kind in record["span_kinds"].values())
        for side in ("student", "teacher")
    )
    unaligned = (f"{record['unaligned_bytes']:,}", f"{record['unaligned_fraction']:.2%}")
    rows.append(("unaligned", "", "", *unaligned, *(f"{count:,}" for count in left)))
    heads = ("tokens", "spans", "% of spans", "bytes", "% of bytes", "student", "teacher")
    title = f"{record['spans']:,} spans by tokens of student:teacher, with the tokens of each side"
    return TextTable(title, heads, rows)


def _longest(record: dict[str, Any]) -> TextTable:
    rows = [
        (f"{span['document']:,}", f"{span['start_byte']:,}", f"{span['bytes']:,}",
         f"{span['student_tokens']}:{span['teacher_tokens']}", visible_text(span["excerpt"]).replace(" ", "·"))
        for span in record["longest_spans"]
    ]  # fmt: skip
    title = "Longest spans of several tokens; tokens of student:teacher"
    return TextTable(title, ("document", "byte offset", "bytes", "tokens", "text"), rows)


def _worst(record: dict[str, Any]) -> TextTable:
    rows = [
        (f"{document['document']:,}", f"{document['byte_fraction']:.2%}", f"{document['bytes']:,}",
         *(f"{document[key]:,}" if document[key] else "" for key in ("n:m_bytes", "unaligned_bytes")),
         " and ".join(document["normalized_by"]), visible_text(document["excerpt"]))
        for document in record["worst_documents"]
    ]  # fmt: skip
    title = "Worst documents, by the fraction of bytes in n:m spans or unaligned"
    return TextTable(title, ("document", "% of bytes", "bytes", "n:m", "unaligned", "normalized by", "text"), rows)
