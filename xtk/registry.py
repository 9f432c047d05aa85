"""Tables of variants: a name stands for `module:object`, imported when it is asked for."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Mapping
from typing import Any

from xtk.errors import XtkError


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name nearest to `name`, if one is near."""
    near = difflib.get_close_matches(name.replace("_", "-"), list(known), n=1, cutoff=0.5)
    return near[0] if near else None


def unknown_name_error(kind: str, name: str, known: Iterable[str]) -> XtkError:
    """Return the error for a name that a table does not have."""
    known = sorted(known)
    near = nearest_name(name, known)
    question = f"; did you mean {near}?" if near else ""
    return XtkError(f"no {kind} called {name!r}{question}", hint=f"one of: {', '.join(known)}")


def load_registered(registry: Mapping[str, str], name: str, kind: str) -> Any:
    """Import what `name` stands for in a table of `module:object` strings.

    Raises:
        XtkError: the table has no such name; the nearest one is told.
    """
    if name not in registry:
        raise unknown_name_error(kind, name, registry)
    module, _, attribute = registry[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
