"""The HTML page of `xtk doctor --html`: conversations as both models read them, colored by region."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from xtk.pages.alignment_html import text_direction, visible_bytes
from xtk.pages.html_page import COLORS, PAGE_END, page_start

if TYPE_CHECKING:
    from xtk.text.document import Document
    from xtk.text.tokenizer import Tokenizer

SHOWN_DOCUMENTS, MAX_TOKENS_SHOWN = 3, 4000

REGIONS_STYLE = """
.text { font: 0.95rem/1.7 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
.text span { border-bottom: 3px solid; padding-bottom: 1px; } .text span.template { border-bottom-style: dotted; }
.text span.none { border-bottom-color: transparent; color: var(--faint); }
.text i, .text b { color: var(--faint); font-style: normal; font-weight: normal; }
"""


def regions_page(documents: Sequence[Document], models: Sequence[tuple[str, Tokenizer]], request: str) -> Iterator[str]:
    """Yield the HTML of the page.

    Args:
        documents: the documents to show.
        models: (name, tokenizer) of each model.
        request: fingerprint of the inputs, stored in the head of the page.
    """
    yield page_start("What is trained", REGIONS_STYLE, request)
    yield f"<section>\n{_legend()}</section>\n"
    for number, document in enumerate(documents):
        yield f"<section>\n<h2>Document {number}</h2>\n"
        for name, tokenizer in models:
            yield f"<h3>{escape(name)}</h3>\n" + _document_html(document, tokenizer)
        yield "</section>\n"
    yield PAGE_END


def _legend() -> str:
    from xtk.text.chat.conversation_tokens import REGIONS

    keys = [
        f'<span><span class="key" style="background: {COLORS[number]}"></span>{name}</span>'
        for number, name in enumerate(REGIONS)
    ]
    explained = (
        "A line under a text shows its region. Both models are compared where it is solid. Dotted: text of a model's "
        "own chat template, which losses without a teacher train; markup only with --train-on. Gray: not trained."
    )
    return f'<p>{explained}</p>\n<p class="keys">{"".join(keys)}</p>\n'


def _document_html(document: Document, tokenizer: Tokenizer) -> str:
    """Return a document as a model reads it."""
    from xtk.errors import XtkError
    from xtk.text.chat.conversation_tokens import NO_REGION, REGIONS
    from xtk.text.chat.regions import token_regions
    from xtk.text.token_sequence import tokenize_documents

    try:
        (sequence,) = tokenize_documents(tokenizer, [document])
    except XtkError as wrong:
        return f"<p>{escape(wrong.what)}</p>\n"
    regions, parts = token_regions(document, sequence), []
    shown = range(min(len(sequence), MAX_TOKENS_SHOWN))
    for (region, is_trained), tokens in itertools.groupby(
        shown, lambda at: (int(regions[at]), bool(sequence.train_mask[at]))
    ):
        text = _text_html(tokenizer, sequence.ids[list(tokens)].tolist())
        if region == NO_REGION:
            parts.append(f'<span class="none">{text}</span>')
            continue
        kind = "" if is_trained else ' class="template"'
        parts.append(f'<span{kind} style="border-color: {COLORS[region]}" title="{REGIONS[region]}">{text}</span>')
    more = len(sequence) - len(shown)
    rest = f"<p>{more:,} more tokens</p>\n" if more else ""
    return f'<div class="text" dir="{text_direction(document.text)}">{"".join(parts)}</div>\n{rest}'


def _text_html(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return the text of tokens, with special tokens in gray and line breaks as they are."""
    parts, names = [], tokenizer.special_token_names
    for is_special, group in itertools.groupby(ids, lambda one: one in names):
        tokens = list(group)
        if is_special:
            parts.append("".join(f"<i>{escape(names[one])}</i>" for one in tokens))
            continue
        raw = b"".join(map(tokenizer.vocabulary.bytes_of, tokens))
        lines = [visible_bytes(line).replace("<i>·</i>", " ") if line else "" for line in raw.split(b"\n")]
        parts.append("\n".join(lines))
    return "".join(parts)
