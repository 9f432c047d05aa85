"""Alignment statistics as tables, for terminals, plain text and HTML pages."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from xtk import terminal
from xtk.terminal_tables import print_table

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
    for table in alignment_tables(record):
        print_table(table.title, [*table.column_titles], [[*row] for row in table.rows], table.numeric_columns)
        terminal.result_line("")
    terminal.result_line(
        f"aligned in {terminal.format_duration(record['seconds'])}, "
        f"{record['nanoseconds_per_token']:,.0f} ns per token (student and teacher tokens)"
    )


def _tokenizer_table(record: dict[str, Any]) -> TextTable:
    rows = [
        (side, record[side], f"{record[f'{side}_tokens']:,}", f"{record[f'{side}_bytes_per_token']:.3f}",
         f"{record['normalized_documents'][side]:,}")
        for side in ("student", "teacher")
    ]  # fmt: skip
    title = f"{record['documents']:,} documents, {record['bytes']:,} bytes"
    return TextTable(title, ("", "tokenizer", "tokens", "bytes per token", "normalized documents"), rows)


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
    heads = ("tokens per span", "spans", "% of spans", "bytes", "% of bytes", "student tokens", "teacher tokens")
    return TextTable(f"{record['spans']:,} spans, by tokens of student:teacher", heads, rows)


def _longest(record: dict[str, Any]) -> TextTable:
    rows = [
        (f"{span['document']:,}", f"{span['start_byte']:,}", f"{span['bytes']:,}",
         f"{span['student_tokens']}:{span['teacher_tokens']}", visible_text(span["excerpt"]).replace(" ", "·"))
        for span in record["longest_spans"]
    ]  # fmt: skip
    title = "Longest spans with several tokens on both sides or on one"
    return TextTable(title, ("document", "byte offset", "bytes", "student:teacher tokens", "text"), rows)


def _worst(record: dict[str, Any]) -> TextTable:
    rows = [
        (f"{document['document']:,}", f"{document['byte_fraction']:.2%}", _why(document),
         visible_text(document["excerpt"]))
        for document in record["worst_documents"]
    ]  # fmt: skip
    title = "Worst documents, by the fraction of bytes in n:m spans or unaligned"
    return TextTable(title, ("document", "% of bytes", "reason", "text"), rows)


def _why(document: dict[str, Any]) -> str:
    reasons = []
    if document["n:m_bytes"]:
        reasons.append(f"{document['n:m_bytes']:,} bytes in n:m spans")
    if document["unaligned_bytes"]:
        reasons.append(f"{document['unaligned_bytes']:,} bytes in no span")
    if document["normalized_by"]:
        reasons.append(f"changed by the {' and the '.join(document['normalized_by'])}")
    return ", ".join(reasons) + f", of {document['bytes']:,}"
