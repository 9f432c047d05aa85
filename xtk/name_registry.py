"""Tables of variants by name (`module:object`, imported on use), and errors for unknown names."""

from __future__ import annotations

import difflib
import importlib
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from xtk.errors import XtkError

HINT_INDENT = " " * len("  try:   ")
HINT_WIDTH = 80 - len(HINT_INDENT)


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most similar to `name`; None if none is similar."""
    near = difflib.get_close_matches(name.replace("_", "-"), list(known), n=1, cutoff=0.5)
    return near[0] if near else None


def unknown_name_error(kind: str, name: str, known: Iterable[str]) -> XtkError:
    """Return the error for an unknown name; it suggests the nearest known one."""
    known = sorted(known)
    near = did_you_mean(name, known)
    lines = textwrap.wrap(f"use one of: {', '.join(known)}", HINT_WIDTH, break_on_hyphens=False)
    return XtkError(f"no {kind} called {name!r}{near}", hint=None if near else ("\n" + HINT_INDENT).join(lines))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean NAME?" with the most similar known name; "" if none is similar."""
    near = nearest_name(name, known)
    return f"; did you mean {near}?" if near else ""


def load_registered(registry: Mapping[str, str], name: str, kind: str) -> Any:
    """Import and return the object that a table of `module:object` strings has under a name."""
    if name not in registry:
        raise unknown_name_error(kind, name, registry)
    module, _, attribute = registry[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
