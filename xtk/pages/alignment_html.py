"""The HTML page of `xtk align --html`: statistics, and documents with both tokenizations span by span."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from xtk.pages.alignment_tables import VISIBLE_SYMBOLS, TextTable, alignment_tables, numeric_columns, visible_symbol
from xtk.pages.html_page import PAGE_END, page_start, stacked_bar

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from xtk.text.alignment_statistics import AlignedDocument
    from xtk.text.tokenizer import Tokenizer

# A span takes about 250 bytes of HTML for 4 bytes of text; browsers scroll 10 MB smoothly.
MAX_DOCUMENT_BYTES_SHOWN = 16_384
MAX_PAGE_BYTES_SHOWN = 131_072
MAX_SPAN_TOKENS_SHOWN = 500
NUMBER_CLASS = ' class="number"'
SPAN_CLASSES = ("one", "to-many", "from-many", "many")  # of KINDS, in their order

ALIGNMENT_STYLE = """
:root { --to-many: #d7e9ff; --from-many: #ffe9c7; --many: #ffd5de; }
@media (prefers-color-scheme: dark) { :root { --to-many: #12395f; --from-many: #553a08; --many: #611d33; } }
article { content-visibility: auto; contain-intrinsic-size: auto 30rem; }
details article { content-visibility: visible; }
.spans, .span { font: 0.95rem/1.5 ui-monospace, monospace; }
.span { display: inline-flex; flex-direction: column; vertical-align: top; max-width: 100%; margin: 0.15rem 0.1rem;
  border: 1px solid var(--line); border-radius: 0.2rem; }
.to-many { background: var(--to-many); } .from-many { background: var(--from-many); } .many { background: var(--many); }
.left { border-style: dashed; }
.student, .teacher { display: flex; flex-wrap: wrap; padding: 0 0.1rem; }
.teacher { border-top: 1px solid var(--line); }
.span bdi { white-space: pre-wrap; padding: 0 0.15rem; }
.span bdi + bdi { border-inline-start: 1px solid var(--line); }
i, b { color: var(--faint); font-style: normal; font-weight: normal; font-size: 0.85em; }
b { text-decoration: underline dotted; } b + b { margin-inline-start: 0.25em; }
.kinds { display: flex; flex-wrap: wrap; gap: 0.6rem 1.6rem; padding: 0; list-style: none; }
.kinds li { display: flex; align-items: center; gap: 0.5rem; }
"""


def alignment_page(
    record: dict[str, Any],
    shown_documents: Sequence[AlignedDocument],
    student: Tokenizer,
    teacher: Tokenizer,
    *,
    order: str,
    request: str = "",
) -> Iterator[str]:
    """Yield the HTML of the page: statistics, then documents span by span.

    Args:
        record: JSON record of the alignment statistics.
        shown_documents: documents to show, in this order, up to the size limit of the page.
        student: the student's tokenizer.
        teacher: the teacher's tokenizer.
        order: "first" or "worst", printed on the page.
        request: fingerprint of the inputs, stored in the head of the page.

    Yields:
        HTML. A token is a `bdi` element; in it, `i` marks an invisible character, and `b` bytes of an incomplete
        character.
    """
    yield page_start(f"{record['student']} and {record['teacher']}, aligned", ALIGNMENT_STYLE, request)
    yield "<section>\n<h2>Statistics</h2>\n"
    yield _bar(record)
    for table in alignment_tables(record):
        yield from _html_table(table)
    yield f"</section>\n<section>\n<h2>Documents</h2>\n{_legend()}"
    yield from _document_sections(shown_documents, record["documents"], student, teacher, order)
    yield "</section>\n" + PAGE_END


def alignment_sections(
    record: dict[str, Any], documents: Sequence[AlignedDocument], student: Tokenizer, teacher: Tokenizer
) -> Iterator[str]:
    """Yield alignment statistics and some aligned documents, as HTML for another page.

    Args:
        record: JSON record of the alignment statistics.
        documents: documents to show.
        student: the student's tokenizer.
        teacher: the teacher's tokenizer.
    """
    yield _bar(record)
    for table in alignment_tables(record)[:2]:
        yield from _html_table(table)
    yield "<details><summary>Documents, span by span</summary>\n" + _legend()
    for document in documents:
        yield _aligned_document(document, student, teacher, MAX_DOCUMENT_BYTES_SHOWN // 8)[0]
    yield "</details>\n"


def _bar(record: dict[str, Any]) -> str:
    """Return the bytes of all documents by the kind of span that they are in."""
    kinds = [(f"{name} spans", kind["byte_fraction"], "") for name, kind in record["span_kinds"].items()]
    named = "Bytes by their span, as tokens of the student : tokens of the teacher"
    return f"<p>{named}</p>\n" + stacked_bar([*kinds, ("in no span", record["unaligned_fraction"], "")])


def _html_table(table: TextTable) -> Iterator[str]:
    numbers = numeric_columns(table)
    heads = (
        f'<th scope="col"{NUMBER_CLASS if number else ""}>{escape(head)}</th>'
        for head, number in zip(table.column_titles, numbers, strict=True)
    )
    yield f'<div class="scroll"><table>\n<caption>{escape(table.title)}</caption>\n<thead><tr>{"".join(heads)}'
    yield "</tr></thead>\n<tbody>\n"
    for row in table.rows:
        cells = (
            f"<td{NUMBER_CLASS}>{escape(cell)}</td>" if number else f"<td><bdi>{escape(cell)}</bdi></td>"
            for cell, number in zip(row, numbers, strict=True)
        )
        yield f"<tr>{''.join(cells)}</tr>\n"
    yield "</tbody>\n</table></div>\n"


def _legend() -> str:
    kinds = (
        ("one", "one token on each side"),
        ("to-many", "one student token, several teacher tokens"),
        ("from-many", "several student tokens, one teacher token"),
        ("many", "several tokens on both sides"),
        ("left", "unaligned"),
    )
    boxes = "".join(
        f'<li><span class="span {name}"><span class="student">student</span><span class="teacher">teacher</span></span>'
        f"{meaning}</li>"
        for name, meaning in kinds
    )
    return (
        "<p>A box is a span: the same bytes as student tokens (above) and as teacher tokens (below).</p>\n"
        f'<ul class="kinds">{boxes}</ul>\n'
        "<p>Grey symbols are invisible characters (<i>·</i> space, <i>⏎</i> newline, <i>U+200D</i> others by code "
        "point); underlined ones (<b>E6</b>) are bytes of an incomplete character. Point at a token to see its id "
        "and bytes.</p>\n"
    )


def _document_sections(
    documents: Sequence[AlignedDocument], total: int, student: Tokenizer, teacher: Tokenizer, order: str
) -> Iterator[str]:
    bytes_left, shown = MAX_PAGE_BYTES_SHOWN, 0
    parts = []
    for document in documents:
        if bytes_left <= 0:
            break
        part, used = _aligned_document(document, student, teacher, min(bytes_left, MAX_DOCUMENT_BYTES_SHOWN))
        parts.append(part)
        bytes_left -= used
        shown += 1
    chosen = "worst first" if order == "worst" else "in the order of the data"
    yield f"<p>{shown:,} of {total:,} documents are shown, {chosen}.</p>\n"
    yield from parts


def _aligned_document(
    document: AlignedDocument, student: Tokenizer, teacher: Tokenizer, max_bytes: int
) -> tuple[str, int]:
    """Return a document as HTML, up to the span that reaches `max_bytes`, and the number of bytes shown."""
    size = len(document.text.encode())
    ends, spans = document.student.byte_ends, document.spans
    stop = min(int(np.searchsorted(ends[spans[:, 1] - 1], max_bytes)) + 1, len(spans))
    used = int(ends[spans[stop - 1, 1] - 1]) if stop else 0
    is_complete = stop == len(spans)
    lengths = len(document.student.ids), len(document.teacher.ids)
    note = ""
    if not is_complete:
        note = f"<p>Shown up to byte {used:,}: {stop:,} of {len(spans):,} spans.</p>\n"
    elif used < size:
        note = f"<p>The last {size - used:,} bytes are unaligned.</p>\n"
    boxes = _boxes(document, student, teacher, stop, lengths if is_complete else None)
    figures = f"{size:,} bytes, {lengths[0]:,} student and {lengths[1]:,} teacher tokens, {len(spans):,} spans"
    part = (
        f'<article id="document-{document.index}">\n<h3>Document {document.index:,}</h3>\n<p>{figures}.</p>\n'
        f'<p class="spans" lang="" translate="no" dir="{text_direction(document.text)}">{"".join(boxes)}</p>\n{note}'
        "</article>\n"
    )
    return part, used


def _boxes(
    document: AlignedDocument, student: Tokenizer, teacher: Tokenizer, stop: int, lengths: tuple[int, int] | None
) -> Iterator[str]:
    """Yield the boxes of the first spans, and of the unaligned tokens between them.

    Args:
        document: the aligned document.
        student: the student's tokenizer.
        teacher: the teacher's tokenizer.
        stop: number of spans to show.
        lengths: numbers of student and teacher tokens, to show the tokens after the last span; None: do not.
    """
    from xtk.text.alignment_statistics import span_kinds

    sides = (student, document.student.ids), (teacher, document.teacher.ids)
    spans = document.spans[:stop]
    left_at, right_at = 0, 0
    for (s0, s1, t0, t1), kind in zip(spans.tolist(), span_kinds(spans).tolist(), strict=True):
        if s0 > left_at or t0 > right_at:
            yield _span(sides, (left_at, s0, right_at, t0), "left")
        yield _span(sides, (s0, s1, t0, t1), SPAN_CLASSES[kind])
        left_at, right_at = s1, t1
    if lengths and (left_at, right_at) != lengths:
        yield _span(sides, (left_at, lengths[0], right_at, lengths[1]), "left")


def _span(sides: tuple[tuple[Tokenizer, NDArray[np.int32]], ...], edges: tuple[int, int, int, int], kind: str) -> str:
    rows, breaks = [], False
    for name, (side, ids), start, stop in zip(("student", "teacher"), sides, edges[::2], edges[1::2], strict=True):
        shown = ids[start : min(stop, start + MAX_SPAN_TOKENS_SHOWN)].tolist()
        tokens = "".join(_token_html(side, token) for token in shown)
        breaks = breaks or VISIBLE_SYMBOLS["\n"] in tokens
        more = f"<i>… {stop - start - len(shown):,} more tokens</i>" if stop - start > len(shown) else ""
        rows.append(f'<span class="{name}">{tokens}{more}</span>')
    return f'<span class="span {kind}">{"".join(rows)}</span>' + ("<br>\n" if breaks else "\n")


def _token_html(side: Tokenizer, token: int) -> str:
    spelling = side.vocabulary.bytes_of(token)
    if token in side.special_token_names:
        return f'<bdi title="id {token}, a special token"><i>{escape(side.special_token_names[token])}</i></bdi>'
    title = f"id {token}, {'bytes ' + spelling.hex(' ').upper() if spelling else 'no bytes'}"
    return f'<bdi title="{title}">{visible_bytes(spelling)}</bdi>'


def visible_bytes(spelling: bytes) -> str:
    """Return bytes as HTML with visible symbols for all of them."""
    if not spelling:
        return "<i>∅</i>"
    text = spelling.decode("utf-8", "surrogateescape")
    # A combining mark at the start would be rendered on top of the previous character.
    parts = ["<i>◌</i>"] if unicodedata.category(text[0]).startswith("M") else []
    for character in text:
        if "\udc80" <= character <= "\udcff":
            parts.append(f"<b>{ord(character) - 0xDC00:02X}</b>")
        elif character == " ":
            parts.append("<i>·</i>")
        else:
            symbol = visible_symbol(character)
            parts.append(f"<i>{symbol}</i>" if symbol else escape(character))
    return "".join(parts)


def text_direction(text: str) -> str:
    """Return the direction of a text, "ltr" or "rtl", from its first letter with a direction."""
    for character in text[:MAX_DOCUMENT_BYTES_SHOWN]:
        kind = unicodedata.bidirectional(character)
        if kind in ("L", "R", "AL"):
            return "ltr" if kind == "L" else "rtl"
    return "ltr"
