"""The HTML page of `xtk align --html`: statistics, and documents with both tokenizations span by span."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from xtk.pages.alignment_tables import VISIBLE_SYMBOLS, alignment_tables
from xtk.pages.html_page import page, render, visible_bytes
from xtk.text.alignment_statistics import AlignedDocument, span_kinds
from xtk.text.tokenizer import Tokenizer

# A span takes about 250 bytes of HTML for 4 bytes of text; browsers scroll 10 MB smoothly.
MAX_DOCUMENT_BYTES_SHOWN = 16_384
MAX_PAGE_BYTES_SHOWN = 131_072
MAX_SPAN_TOKENS_SHOWN = 500
# CSS classes of KINDS, in their order, and of unaligned tokens, with their meanings.
LEGEND = {
    "one": "one token on each side",
    "to-many": "one student token, several teacher tokens",
    "from-many": "several student tokens, one teacher token",
    "many": "several tokens on both sides",
    "left": "unaligned",
}
Sides = tuple[tuple[Tokenizer, NDArray[np.int32]], tuple[Tokenizer, NDArray[np.int32]]]


def alignment_page(
    record: dict[str, Any],
    shown_documents: Sequence[AlignedDocument],
    student: Tokenizer,
    teacher: Tokenizer,
    *,
    order: str,
    request: str = "",
) -> str:
    """Return the page: statistics, then documents span by span, up to the size limit of the page.

    A token is a `bdi` element; in it, `i` marks an invisible character, and `b` bytes of an incomplete character.
    """
    bytes_left, documents = MAX_PAGE_BYTES_SHOWN, []
    for document in shown_documents:
        if bytes_left <= 0:
            break
        documents.append(_aligned_document(document, student, teacher, min(bytes_left, MAX_DOCUMENT_BYTES_SHOWN)))
        bytes_left -= documents[-1]["used"]
    fractions = {f"{name} spans": kind["byte_fraction"] for name, kind in record["span_kinds"].items()}
    fractions["in no span"] = record["unaligned_fraction"]
    content = render(
        "alignment",
        kinds=[(fraction, f"{name} {100 * fraction:.1f} %") for name, fraction in fractions.items()],
        tables=alignment_tables(record),
        legend=LEGEND.items(),
        documents=documents,
        total=record["documents"],
        chosen="worst first" if order == "worst" else "in the order of the data",
    )
    names = [Path(record[side]).name or record[side] for side in ("student", "teacher")]
    return page(f"{' and '.join(names)}, aligned", content, request)


def _aligned_document(
    document: AlignedDocument, student: Tokenizer, teacher: Tokenizer, max_bytes: int
) -> dict[str, Any]:
    """Return what is shown of a document: the spans up to the one that reaches `max_bytes`."""
    ends, spans = document.student.byte_ends, document.spans
    stop = min(int(np.searchsorted(ends[spans[:, 1] - 1], max_bytes)) + 1, len(spans))
    lengths = len(document.student.ids), len(document.teacher.ids)
    return {
        "index": document.index,
        "text": document.text,
        "size": len(document.text.encode()),
        "used": int(ends[spans[stop - 1, 1] - 1]) if stop else 0,
        "lengths": lengths,
        "spans": len(spans),
        "stop": stop,
        "boxes": _boxes(document, (student, teacher), stop, lengths if stop == len(spans) else None),
    }


def _boxes(
    document: AlignedDocument, tokenizers: tuple[Tokenizer, Tokenizer], stop: int, lengths: tuple[int, int] | None
) -> Iterator[tuple[str, Any, bool]]:
    """Yield the first `stop` spans and the unaligned tokens between them; those after the last span with `lengths`."""
    sides = (tokenizers[0], document.student.ids), (tokenizers[1], document.teacher.ids)
    spans = document.spans[:stop]
    left_at, right_at = 0, 0
    for (s0, s1, t0, t1), kind in zip(spans.tolist(), span_kinds(spans).tolist(), strict=True):
        if s0 > left_at or t0 > right_at:
            yield _box(sides, (left_at, s0, right_at, t0), "left")
        yield _box(sides, (s0, s1, t0, t1), [*LEGEND][kind])
        left_at, right_at = s1, t1
    if lengths and (left_at, right_at) != lengths:
        yield _box(sides, (left_at, lengths[0], right_at, lengths[1]), "left")


def _box(sides: Sides, edges: tuple[int, int, int, int], kind: str) -> tuple[str, Any, bool]:
    """Return the CSS class, (side, tokens, number of tokens not shown) per side, and whether a line ends here."""
    rows = []
    for name, (tokenizer, ids), start, stop in zip(("student", "teacher"), sides, edges[::2], edges[1::2], strict=True):
        shown = ids[start : min(stop, start + MAX_SPAN_TOKENS_SHOWN)].tolist()
        rows.append((name, [_token(tokenizer, token) for token in shown], stop - start - len(shown)))
    has_break = any(VISIBLE_SYMBOLS["\n"] in token for _, tokens, _ in rows for _, token in tokens)
    return kind, rows, has_break


def _token(tokenizer: Tokenizer, token: int) -> tuple[str, Markup]:
    """Return the title and the HTML of a token."""
    if token in tokenizer.special_token_names:
        return f"id {token}, a special token", Markup("<i>{}</i>").format(tokenizer.special_token_names[token])
    spelling = tokenizer.vocabulary.bytes_of(token)
    title = f"id {token}, {'bytes ' + spelling.hex(' ').upper() if spelling else 'no bytes'}"
    return title, visible_bytes(spelling)
