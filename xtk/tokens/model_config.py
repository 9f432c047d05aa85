"""The configuration of a model (config.json), checked before anything is built from it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from xtk.errors import XtkError

FILE = "config.json"
BYTES, DEPTH = 16 << 20, 64
# The most that a number may be whose name ends so. The largest models of 2026 have some 130 layers, 262,144 tokens.
LIMITS = (
    (re.compile(r"vocab_size$"), 10_000_000),
    (re.compile(r"(_layers?|_blocks?)$"), 10_000),
    (re.compile(r"(_size|_dim|_embd|_heads?|_experts?|_rank|d_model|d_ff)$"), 10_000_000),
)
# Without these in the right type not even a tokenizer's rows are known.
WHOLE = re.compile(r"^(vocab_size|num_hidden_layers)$")
# Under these names transformers looks for the code of attention and of experts.
_IMPLEMENTATIONS = re.compile(r"^_?(attn|experts)_implementation(_internal)?$")
_KERNEL = re.compile(r"[^/:\s]+/[^/:\s]+")
_HINT = "copy or download the model again"


def model_config(folder: Path) -> dict[str, Any]:
    """Return the object in a folder's config.json; empty if there is no such file.

    Raises:
        XtkError: it is no JSON object, is nested too deeply, or has a number that no model has.
    """
    path = folder / FILE
    if not path.is_file():
        return {}
    if path.stat().st_size > BYTES:
        what = f"this configuration has {path.stat().st_size:,} bytes; the limit is {BYTES:,}"
        raise XtkError(what, where=str(path), hint=_HINT)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise _too_deep(path) from None
    except ValueError as wrong:
        raise XtkError(f"this configuration is no JSON: {wrong}", where=str(path), hint=_HINT) from None
    if not isinstance(content, dict):
        what = f"a configuration is a JSON object, and this is a JSON {type(content).__name__}"
        raise XtkError(what, where=str(path), hint=_HINT)
    for name, value, depth in _entries(content):
        if depth > DEPTH:
            raise _too_deep(path)
        _check(name, value, path)
    return content


def _too_deep(path: Path) -> XtkError:
    return XtkError(f"this configuration is nested more than {DEPTH} levels deep", where=str(path), hint=_HINT)


def _entries(content: Any) -> Iterator[tuple[str, Any, int]]:
    """Yield (name, value, depth) of everything in a configuration; elements of a list have its name."""
    stack: list[tuple[str, Any, int]] = [("", content, 0)]
    while stack:
        name, value, depth = stack.pop()
        yield name, value, depth
        if isinstance(value, dict):
            stack += [(str(key), one, depth + 1) for key, one in value.items()]
        elif isinstance(value, list):
            stack += [(name, one, depth + 1) for one in value]


def _check(name: str, value: Any, path: Path) -> None:
    if WHOLE.search(name) and value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        what = f"{name} is {_short(value)}; it must be a whole number"
        raise XtkError(what, where=str(path), hint=_HINT)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return
    for pattern, limit in LIMITS:
        if pattern.search(name):
            if not value <= limit:
                what = f"{name} is {value:,}; xtk loads models of at most {limit:,}"
                raise XtkError(what, where=str(path), hint=_HINT)
            return


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= 60 else text[:57] + "..."


def hub_kernels(content: dict[str, Any]) -> list[str]:
    """Return the repositories of a hub from which a configuration would have code loaded for attention or experts."""
    found = []
    for name, value, _ in _entries(content):
        if _IMPLEMENTATIONS.search(name):
            found += [one for _, one, _ in _entries(value) if isinstance(one, str) and _KERNEL.search(one)]
    return sorted(set(found))
