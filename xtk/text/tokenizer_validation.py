"""Checks of a tokenizer.json before loading: limits of memory, empty tokens, BPE dropout."""

from __future__ import annotations

import base64
import binascii
import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from xtk.errors import XtkError
from xtk.untrusted_json import MAX_DEPTH, check_depth

MAX_TOKENS = 10_000_000  # the largest published vocabulary has 1.3 million; tables of all ids are in memory
MAX_NORMALIZER_GROWTH = 1_000  # output bytes per input byte of a normalizer; the NFKC charsmap has at most 11
_HINT = "download tokenizer.json of the model again, from a trusted source"


def check_tokenizer_json(content: Any, where: str) -> None:
    """Refuse a tokenizer.json that could take unlimited memory or time, before anything is built from it.

    Args:
        where: name of the tokenizer in errors.
    """
    model = content.get("model") if isinstance(content, dict) else None
    if not isinstance(model, dict):
        raise XtkError("invalid tokenizer.json: it must be a JSON object with the key model", where=where, hint=_HINT)
    tables = ("vocab", "merges")  # long, and flat
    outline = {**content, "model": {key: value for key, value in model.items() if key not in tables}}
    check_depth(outline, MAX_DEPTH + 1, what="this tokenizer.json", where=where)
    added = content.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
        raise XtkError("added_tokens in tokenizer.json must be a list of objects", where=where, hint=_HINT)
    for token in added:
        if not token.get("content"):
            raise XtkError(f"added token {token.get('id')} in tokenizer.json has no text", where=where, hint=_HINT)
    table = model.get("vocab")
    ids = list(table.values()) if isinstance(table, dict) else [len(table) - 1] if isinstance(table, list) else []
    numbers = [number for number in (*ids, *(token.get("id") for token in added)) if isinstance(number, int)]
    if numbers and max(numbers) >= MAX_TOKENS:
        raise XtkError(
            f"this tokenizer has a token with id {max(numbers):,}; ids must be at most {MAX_TOKENS - 1:,}",
            where=where,
            hint=_HINT,
        )
    marks = [model.get(name) for name in ("continuing_subword_prefix", "end_of_word_suffix")]
    growth = max(
        _normalizer_growth(content.get("normalizer")), *(float(len(mark)) for mark in marks if isinstance(mark, str)), 0
    )
    if growth > MAX_NORMALIZER_GROWTH:
        raise XtkError(
            f"the normalizer of this tokenizer outputs up to {growth:,.0f} bytes per input byte; xtk allows at most "
            f"{MAX_NORMALIZER_GROWTH:,}",
            where=where,
            hint=_HINT,
        )


def bpe_dropout(content: Mapping[str, Any]) -> float:
    """Return the BPE dropout, the fraction of merges that are skipped at random; 0 for nearly all tokenizers."""
    dropout = content["model"].get("dropout")
    return float(dropout) if isinstance(dropout, int | float) else 0.0


@contextlib.contextmanager
def wrap_backend_errors(what: str, where: str) -> Iterator[None]:
    """Convert exceptions of the tokenizers library, including Rust panics, to XtkError."""
    try:
        yield
    except XtkError:
        raise
    except BaseException as failure:
        # Rust panics derive from BaseException.
        if not isinstance(failure, Exception) and type(failure).__name__ != "PanicException":
            raise
        raise XtkError(f"{what}: {str(failure)[:300]}", where=where, hint=_HINT) from None


def _normalizer_growth(part: Any) -> float:
    """Return the maximum output bytes of a normalizer per input byte."""
    if not isinstance(part, dict):
        return 1.0
    kind, growth = part.get("type"), 1.0
    if kind == "Sequence":
        for inner in part.get("normalizers") or []:
            growth *= _normalizer_growth(inner)
    elif kind == "Replace":
        pattern = part.get("pattern")
        replaced = pattern.get("String") if isinstance(pattern, dict) else None
        growth = _utf8_length(part.get("content")) / max(_utf8_length(replaced), 1)
    elif kind == "Prepend":
        growth = 1.0 + _utf8_length(part.get("prepend"))
    elif kind == "Precompiled":
        growth = float(_longest_charsmap_replacement(part.get("precompiled_charsmap")))
    return max(growth, 1.0)


def _utf8_length(text: Any) -> int:
    return len(text.encode("utf-8", "replace")) if isinstance(text, str) else 0


def _longest_charsmap_replacement(encoded: Any) -> int:
    """Return the length in bytes of the longest replacement: zero-terminated strings after a trie and its size."""
    try:
        raw = base64.b64decode(encoded or "")
    except (ValueError, TypeError, binascii.Error):
        return 0  # loading fails later with a message
    return max(map(len, raw[4 + int.from_bytes(raw[:4], "little") :].split(b"\0")))
