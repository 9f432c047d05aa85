"""Tables of variants: a name stands for `module:object`, imported when it is asked for."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Mapping
from typing import Any

from xtk.errors import XtkError


def did_you_mean(name: str, known: Iterable[str]) -> str | None:
    """Return the known name nearest to `name`, if one is near."""
    near = difflib.get_close_matches(name.replace("_", "-"), list(known), n=1, cutoff=0.5)
    return near[0] if near else None


def unknown(noun: str, name: str, known: Iterable[str]) -> XtkError:
    """Return the error for a name that a table does not have."""
    known = sorted(known)
    near = did_you_mean(name, known)
    question = f"; did you mean {near}?" if near else ""
    return XtkError(f"no {noun} called {name!r}{question}", hint=f"one of: {', '.join(known)}")


def lookup(table: Mapping[str, str], name: str, noun: str) -> Any:
    """Import what `name` stands for in a table of `module:object` strings.

    Raises:
        XtkError: the table has no such name; the nearest one is told.
    """
    if name not in table:
        raise unknown(noun, name, table)
    module, _, attribute = table[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
