"""The HTML page of `xtk doctor --html`: conversations as both models read them, colored by region."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from markupsafe import Markup

from xtk.errors import XtkError
from xtk.pages.html_page import page, render, visible_bytes
from xtk.text.chat.conversation_tokens import NO_REGION, REGIONS
from xtk.text.chat.regions import token_regions
from xtk.text.document import Document
from xtk.text.token_sequence import tokenize_documents
from xtk.text.tokenizer import Tokenizer

SHOWN_DOCUMENTS, MAX_TOKENS_SHOWN = 3, 4000


def regions_page(documents: Sequence[Document], models: Sequence[tuple[str, Tokenizer]], request: str) -> str:
    """Return the page of some documents, for each model with its name and tokenizer."""
    readings = [(document, [(name, *_read(document, side)) for name, side in models]) for document in documents]
    return page("What is trained", render("regions", regions=REGIONS, documents=readings), request)


def _read(document: Document, tokenizer: Tokenizer) -> tuple[str, list[tuple[int | None, bool, Markup]], int]:
    """Return the error of reading a document, (region, whether it is trained, HTML) of its parts, tokens not shown."""
    try:
        (sequence,) = tokenize_documents(tokenizer, [document])
    except XtkError as error:
        return error.what, [], 0
    regions = token_regions(document, sequence)
    shown = range(min(len(sequence), MAX_TOKENS_SHOWN))

    def key(at: int) -> tuple[int | None, bool]:
        return None if regions[at] == NO_REGION else int(regions[at]), bool(sequence.train_mask[at])

    groups = itertools.groupby(shown, key)
    parts = [(*kind, _text(tokenizer, sequence.ids[list(tokens)].tolist())) for kind, tokens in groups]
    return "", parts, len(sequence) - len(shown)


def _text(tokenizer: Tokenizer, ids: Sequence[int]) -> Markup:
    """Return the text of tokens, with special tokens in gray and line breaks as they are."""
    parts, names = Markup(), tokenizer.special_token_names
    for is_special, tokens in itertools.groupby(ids, lambda token: token in names):
        if is_special:
            parts += Markup().join(Markup("<i>{}</i>").format(names[token]) for token in tokens)
        elif raw := b"".join(map(tokenizer.vocabulary.bytes_of, tokens)):
            parts += visible_bytes(raw, {" ": " ", "\n": "\n"})
    return parts
