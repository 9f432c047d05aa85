"""Reads a model's config.json, without building anything from it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from xtk.errors import XtkError
from xtk.untrusted_json import parse_json

CONFIG_FILE, ADAPTER_CONFIG = "config.json", "adapter_config.json"
MAX_TOKENS = 10_000_000  # the largest published vocabulary has 1.3 million; tables of all ids are in memory
# Under these keys transformers looks for code of attention and experts.
_IMPLEMENTATIONS = re.compile(r"^_?(attn|experts)_implementation(_internal)?$")
_KERNEL = re.compile(r"[^/:\s]+/[^/:\s]+")
_HINT = "copy or download the model again"


def read_model_config(folder: Path) -> dict[str, Any]:
    """Return the object in a folder's config.json; an empty dict if there is no such file."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        return {}
    try:
        text = path.read_text(encoding="utf-8")
    except ValueError as failure:
        raise XtkError(f"config.json is not UTF-8: {failure}", where=str(path), hint=_HINT) from None
    content = parse_json(text, what="this config.json", where=str(path))
    if not isinstance(content, dict):
        what = "config.json must contain a JSON object, but contains another JSON value"
        raise XtkError(what, where=str(path), hint=_HINT)
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


def hub_kernel_repositories(content: dict[str, Any]) -> list[str]:
    """Return the hub repositories from which a configuration would load code of attention or experts."""
    repositories = []
    for name, value in _walk_config(content):
        if _IMPLEMENTATIONS.search(name):
            texts = [text for _, text in _walk_config(value) if isinstance(text, str)]
            repositories += [text for text in texts if _KERNEL.search(text)]
    return sorted(set(repositories))
