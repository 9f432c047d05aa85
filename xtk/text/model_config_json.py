"""Reads a model's config.json and checks its values before anything is built from them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from xtk.errors import XtkError
from xtk.untrusted_json import parse_json

CONFIG_FILE, ADAPTER_CONFIG = "config.json", "adapter_config.json"
MAX_BYTES = 16 << 20
MAX_TOKENS = 10_000_000  # the largest published vocabulary has 1.3 million; tables of all ids are in memory
# Maximum values, by the end of the key. The largest models of 2026 have some 130 layers and 262,144 tokens.
MAX_VALUES = (
    (re.compile(r"vocab_size$"), MAX_TOKENS),
    (re.compile(r"(_layers?|_blocks?)$"), 10_000),
    (re.compile(r"(_size|_dim|_embd|_heads?|_experts?|_rank|d_model|d_ff)$"), 10_000_000),
)
# With a wrong type here, not even the embedding rows of a tokenizer are known.
NON_NEGATIVE_INTEGER_KEYS = re.compile(r"^(vocab_size|num_hidden_layers)$")
# Under these keys transformers looks for code of attention and experts.
_IMPLEMENTATIONS = re.compile(r"^_?(attn|experts)_implementation(_internal)?$")
_KERNEL = re.compile(r"[^/:\s]+/[^/:\s]+")
_HINT = "copy or download the model again"


def read_model_config(folder: Path) -> dict[str, Any]:
    """Return the object in a folder's config.json; an empty dict if there is no such file."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        return {}
    if path.stat().st_size > MAX_BYTES:
        what = f"config.json has {path.stat().st_size:,} bytes, but must have at most {MAX_BYTES:,}"
        raise XtkError(what, where=str(path), hint=_HINT)
    try:
        text = path.read_text(encoding="utf-8")
    except ValueError as failure:
        raise XtkError(f"config.json is not UTF-8: {failure}", where=str(path), hint=_HINT) from None
    content = parse_json(text, what="this config.json", where=str(path))
    if not isinstance(content, dict):
        what = "config.json must contain a JSON object, but contains another JSON value"
        raise XtkError(what, where=str(path), hint=_HINT)
    for name, value in _walk_config(content):
        _check_value(name, value, path)
    return content


def _walk_config(content: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of all values in a configuration; elements of a list have its key."""
    yield name, content
    if isinstance(content, dict):
        for key, value in content.items():
            yield from _walk_config(value, str(key))
    elif isinstance(content, list):
        for value in content:
            yield from _walk_config(value, name)


def _check_value(name: str, value: Any, path: Path) -> None:
    if (
        NON_NEGATIVE_INTEGER_KEYS.search(name)
        and value is not None
        and (not isinstance(value, int) or isinstance(value, bool) or value < 0)
    ):
        what = f"{name} in config.json is {json.dumps(value):.60}, but must be a non-negative integer"
        raise XtkError(what, where=str(path), hint=_HINT)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return
    for pattern, limit in MAX_VALUES:
        if pattern.search(name):
            if not value <= limit:
                what = f"{name} in config.json is {value:,}, but must be at most {limit:,}"
                raise XtkError(what, where=str(path), hint=_HINT)
            return


def hub_kernel_repositories(content: dict[str, Any]) -> list[str]:
    """Return the hub repositories from which a configuration would load code of attention or experts."""
    repositories = []
    for name, value in _walk_config(content):
        if _IMPLEMENTATIONS.search(name):
            texts = [text for _, text in _walk_config(value) if isinstance(text, str)]
            repositories += [text for text in texts if _KERNEL.search(text)]
    return sorted(set(repositories))
