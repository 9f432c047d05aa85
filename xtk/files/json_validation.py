"""Checks of JSON in artifacts: a `TypedDict` declares the keys of an object, their types and ranges."""

from __future__ import annotations

import functools
import math
import re
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

from xtk.errors import CorruptError

# Checks a value at a path ("shards[3].file") and raises InvalidValueError.
Check = Callable[[Any, str], None]
MAX_SAFE_INTEGER = 2**53  # JSON parsers that use doubles round larger integers
MAX_TEXT, MAX_DEPTH, MAX_SHOWN_CHARACTERS = 4096, 6, 60


class InvalidValueError(ValueError):
    """A value that its type does not allow."""

    def __init__(self, path: str, value: object, expected: str) -> None:
        shown = shorten(repr(value), MAX_SHOWN_CHARACTERS)
        super().__init__(f"has an invalid value: {path or 'its content'} is {shown}, but must be {expected}")


def shorten(text: str, length: int = 80) -> str:
    """Return a text for a message: with ... at its end if it is longer."""
    return text if len(text) <= length else text[: length - 3] + "..."


def check_json(content: object, expected: type, where: str, hint: str | None = None) -> None:
    """Check the content of a file against a `TypedDict`.

    Keys must be present unless they are `NotRequired`; other keys may have any JSON value. Types of values:

    - `int` from 0, `float` (finite), `str`, `Annotated[int, LOWEST, HIGHEST]`, `Annotated[str, PATTERN]`, `Literal`
    - `list[...]`, `dict[str, ...]`, another `TypedDict`, `... | None`
    - `Any`: JSON with finite numbers, nested at most `MAX_DEPTH` deep; `object`: any value, also from a user
    """
    try:
        _check_of(expected)(content, "")
    except InvalidValueError as error:
        raise CorruptError(f"this file {error}", where=where, hint=hint) from None
    except KeyError as error:
        raise CorruptError(f"this file lacks the key {error.args[0]}", where=where, hint=hint) from None


@functools.cache
def _check_of(expected: Any) -> Check:
    """Return the check of a type."""
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if typing.is_typeddict(expected):
        return _check_of_object(expected)
    if expected is object:
        return lambda value, path: None
    if origin in (typing.Union, types.UnionType):
        inner = _check_of(arguments[0])
        return lambda value, path: None if value is None else inner(value, path)
    if origin is typing.NotRequired:
        return _check_of(arguments[0])
    if origin is list:
        return _check_of_list(_check_of(arguments[0]))
    if origin is dict:
        return _check_of_object(None, _check_of(arguments[1]))
    if origin is typing.Literal:
        return _require(lambda value: isinstance(value, str) and value in arguments, f"one of {', '.join(arguments)}")
    kind, *limits = arguments if origin is typing.Annotated else (expected,)
    if kind is str:
        pattern = re.compile(limits[0] if limits else r"[\s\S]*")
        return _require(
            lambda value: isinstance(value, str) and len(value) <= MAX_TEXT and pattern.fullmatch(value) is not None,
            f"text of the form {limits[0]}" if limits else f"text of at most {MAX_TEXT:,} characters",
        )
    if kind is int:
        low, high = limits or (0, MAX_SAFE_INTEGER)
        return _require(
            lambda value: type(value) is int and low <= value <= high, f"an integer from {low:,} to {high:,}"
        )
    if kind is float:
        low, high = limits or (-sys.float_info.max, sys.float_info.max)
        shown = f"a finite number from {low:g} to {high:g}"
        return _require(lambda value: type(value) in (int, float) and low <= value <= high, shown)
    return _check_any_json


def _require(is_valid: Callable[[Any], bool], description: str) -> Check:
    def check(value: Any, path: str) -> None:
        if not is_valid(value):
            raise InvalidValueError(path, value, description)

    return check


def _check_of_list(check_item: Check) -> Check:
    def check(value: Any, path: str) -> None:
        if not isinstance(value, list):
            raise InvalidValueError(path, value, "a list")
        for at, item in enumerate(value):
            check_item(item, f"{path}[{at}]")

    return check


def _check_of_object(declared: Any, check_others: Check | None = None) -> Check:
    """Return the check of an object with the keys of a `TypedDict`, if given, and other keys."""
    hints = typing.get_type_hints(declared, include_extras=True) if declared else {}
    required = [name for name, hint in hints.items() if typing.get_origin(hint) is not typing.NotRequired]
    checks = {name: _check_of(hint) for name, hint in hints.items()}
    others = check_others or _check_any_json

    def check(value: Any, path: str) -> None:
        if not isinstance(value, dict):
            raise InvalidValueError(path, value, "an object")
        for key in required:
            if key not in value:
                raise KeyError(_child_path(path, key))
        for key, part in value.items():
            checks.get(key, others)(part, _child_path(path, key))

    return check


def _check_any_json(value: Any, path: str, levels: int = MAX_DEPTH) -> None:
    if isinstance(value, dict | list):
        if not levels:
            raise InvalidValueError(path, "...", f"nested at most {MAX_DEPTH} deep")
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            _check_any_json(part, _child_path(path, key), levels - 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise InvalidValueError(path, value, "finite")
    elif isinstance(value, int) and abs(value) >= 2**64:
        raise InvalidValueError(path, "...", "an integer of at most 64 bits")


def _child_path(path: str, key: object) -> str:
    shown = str(key)[:MAX_SHOWN_CHARACTERS]
    return f"{path}.{shown}" if path else shown
