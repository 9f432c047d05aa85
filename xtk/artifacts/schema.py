"""Checks of JSON that artifacts contain: types, ranges and names, stated once per kind of file."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from xtk.errors import Damaged

# A check takes a value and its place ("shards[3].rows"), and raises Invalid.
Check = Callable[[Any, str], None]
LARGEST = 2**53  # integers above it are not the same in every reader of JSON
SHOWN = 60


class Invalid(ValueError):
    """A value that its schema does not allow."""

    def __init__(self, place: str, value: object, expected: str) -> None:
        shown = repr(value)
        shown = shown if len(shown) <= SHOWN else shown[: SHOWN - 3] + "..."
        super().__init__(f"{place or 'the content'} is {shown}; must be {expected}")


class Stated(dict[str, Any]):
    """An object of an artifact; a key that it lacks is damage of its file, wherever the key is read.

    Args:
        content: the object.
        place: its place in the file.
        where: the file, for the error.
    """

    def __init__(self, content: Mapping[str, Any], place: str, where: str) -> None:
        super().__init__(content)
        self._place, self._where = place, where

    def __missing__(self, key: str) -> Any:
        raise Damaged(f"this file does not state {_inside(self._place, key)}", where=self._where)

    def __reduce__(self) -> tuple[type[Stated], tuple[dict[str, Any], str, str]]:
        """Travel to another process."""
        return Stated, (dict(self), self._place, self._where)


def check(content: object, schema: Check, where: str, hint: str | None = None) -> None:
    """Check the content of a file.

    Raises:
        Damaged: names the first value that the schema does not allow.
    """
    try:
        schema(content, "")
    except Invalid as wrong:
        raise Damaged(f"this file cannot be as xtk wrote it: {wrong}", where=where, hint=hint) from None


def whole(low: int = 0, high: int = LARGEST) -> Check:
    """Accept integers from `low` to `high`."""

    def checked(value: Any, place: str) -> None:
        if type(value) is not int or not low <= value <= high:
            raise Invalid(place, value, f"an integer from {low:,} to {high:,}")

    return checked


def number(low: float = -math.inf, high: float = math.inf) -> Check:
    """Accept finite numbers from `low` to `high`."""

    def checked(value: Any, place: str) -> None:
        if type(value) not in (int, float) or not math.isfinite(value) or not low <= value <= high:
            raise Invalid(place, value, f"a finite number from {low:g} to {high:g}")

    return checked


def text(pattern: str = "", longest: int = 4096) -> Check:
    """Accept text, of a pattern if one is given."""
    matching = re.compile(pattern) if pattern else None

    def checked(value: Any, place: str) -> None:
        if not isinstance(value, str) or len(value) > longest or (matching and not matching.fullmatch(value)):
            raise Invalid(place, value, f"text of the form {pattern}" if pattern else "text")

    return checked


def one_of(values: Collection[str]) -> Check:
    """Accept some texts."""

    def checked(value: Any, place: str) -> None:
        if not isinstance(value, str) or value not in values:
            raise Invalid(place, value, f"one of {', '.join(values)}")

    return checked


def optional(content: Check) -> Check:
    """Accept null too."""

    def checked(value: Any, place: str) -> None:
        if value is not None:
            content(value, place)

    return checked


def list_of(content: Check, longest: int = LARGEST) -> Check:
    """Accept lists."""

    def checked(value: Any, place: str) -> None:
        if not isinstance(value, list) or len(value) > longest:
            raise Invalid(place, value, "a list" if longest == LARGEST else f"a list of at most {longest:,}")
        for at, one in enumerate(value):
            content(one, f"{place}[{at}]")

    return checked


def map_of(content: Check) -> Check:
    """Accept objects with any keys."""

    def checked(value: Any, place: str) -> None:
        if not isinstance(value, dict):
            raise Invalid(place, value, "an object")
        for key, one in value.items():
            content(one, _inside(place, key))

    return checked


def plain(depth: int = 6, *, finite: bool = True) -> Check:
    """Accept any JSON value that is at most `depth` deep, with finite numbers if asked for."""

    def checked(value: Any, place: str, left: int = depth) -> None:
        if isinstance(value, dict | list):
            if not left:
                raise Invalid(place, "...", f"nested at most {depth} deep")
            parts = value.items() if isinstance(value, dict) else enumerate(value)
            for key, one in parts:
                checked(one, _inside(place, key), left - 1)
        elif finite and isinstance(value, float) and not math.isfinite(value):
            raise Invalid(place, value, "finite")
        elif isinstance(value, int) and abs(value) >= 2**64:
            raise Invalid(place, "...", "an integer of at most 64 bits")

    return checked


def record(
    required: Mapping[str, Check], known: Mapping[str, Check] | None = None, others: Check | None = None
) -> Check:
    """Accept objects.

    Args:
        required: keys that have to be there.
        known: keys that may be there.
        others: for all other keys; left out: anything plain.
    """
    known = {**required, **(known or {})}
    others = others or plain()

    def checked(value: Any, place: str) -> None:
        if not isinstance(value, dict):
            raise Invalid(place, value, "an object")
        for key in required:
            if key not in value:
                raise Invalid(_inside(place, key), None, "there")
        for key, one in value.items():
            known.get(key, others)(one, _inside(place, key))

    return checked


def _inside(place: str, key: object) -> str:
    shown = str(key)[:SHOWN]
    return f"{place}.{shown}" if place else shown
