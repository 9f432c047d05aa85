"""Validators for JSON in artifacts: types, ranges and names."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

from xtk.errors import CorruptError

# A validator takes a value and its path ("shards[3].file") and raises SchemaViolation.
Validator = Callable[[Any, str], None]
MAX_SAFE_INTEGER = 2**53  # JSON parsers that use doubles round larger integers
MAX_SHOWN_CHARACTERS = 60


class SchemaViolation(ValueError):
    """A value that its schema does not allow."""

    def __init__(self, path: str, value: object, expected: str) -> None:
        shown = repr(value)
        shown = shown if len(shown) <= MAX_SHOWN_CHARACTERS else shown[: MAX_SHOWN_CHARACTERS - 3] + "..."
        super().__init__(f"{path or 'its content'} is {shown}, but must be {expected}")


class CheckedObject(dict[str, Any]):
    """A JSON object of an artifact; reading a missing key raises CorruptError with the path of the key.

    Args:
        content: the object.
        path: its path in the file, such as "shards[3]".
        where: the file, for the error.
    """

    def __init__(self, content: Mapping[str, Any], path: str, where: str) -> None:
        super().__init__(content)
        self._place, self._where = path, where

    def __missing__(self, key: str) -> Any:
        raise CorruptError(
            f"this file lacks the key {_child_path(self._place, key)}",
            where=self._where,
            hint="copy the file again, or create it again with the command that wrote it",
        )

    def __reduce__(self) -> tuple[type[CheckedObject], tuple[dict[str, Any], str, str]]:
        """Pickle with path and file, for other processes."""
        return CheckedObject, (dict(self), self._place, self._where)


def check_schema(content: object, schema: Validator, where: str, hint: str | None = None) -> None:
    """Check the content of a file.

    Raises:
        CorruptError: names the first value that the schema does not allow.
    """
    try:
        schema(content, "")
    except SchemaViolation as wrong:
        raise CorruptError(f"this file has an invalid value: {wrong}", where=where, hint=hint) from None


def integer(minimum: int = 0, maximum: int = MAX_SAFE_INTEGER) -> Validator:
    """Accept integers from `minimum` to `maximum`."""

    def checked(value: Any, place: str) -> None:
        if type(value) is not int or not minimum <= value <= maximum:
            raise SchemaViolation(place, value, f"an integer from {minimum:,} to {maximum:,}")

    return checked


_LARGEST = sys.float_info.max


def number(minimum: float = -math.inf, maximum: float = math.inf) -> Validator:
    """Accept finite numbers from `minimum` to `maximum`."""

    def checked(value: Any, place: str) -> None:
        is_finite = abs(value) <= _LARGEST if type(value) in (int, float) else False  # NaN is not
        if not is_finite or not minimum <= value <= maximum:
            raise SchemaViolation(place, value, f"a finite number from {minimum:g} to {maximum:g}")

    return checked


def text(pattern: str = "", max_length: int = 4096) -> Validator:
    """Accept text of at most `max_length` characters that matches `pattern`, if given."""
    matching = re.compile(pattern) if pattern else None

    def checked(value: Any, place: str) -> None:
        if not isinstance(value, str) or len(value) > max_length or (matching and not matching.fullmatch(value)):
            raise SchemaViolation(place, value, f"text of the form {pattern}" if pattern else "text")

    return checked


def one_of(values: Collection[str]) -> Validator:
    """Accept one of the given strings."""

    def checked(value: Any, place: str) -> None:
        if not isinstance(value, str) or value not in values:
            raise SchemaViolation(place, value, f"one of {', '.join(values)}")

    return checked


def optional(content: Validator) -> Validator:
    """Accept null and what `content` accepts."""

    def checked(value: Any, place: str) -> None:
        if value is not None:
            content(value, place)

    return checked


def list_of(items: Validator, max_length: int = MAX_SAFE_INTEGER) -> Validator:
    """Accept lists whose elements `items` accepts."""

    def checked(value: Any, place: str) -> None:
        if not isinstance(value, list) or len(value) > max_length:
            raise SchemaViolation(
                place, value, "a list" if max_length == MAX_SAFE_INTEGER else f"a list of at most {max_length:,}"
            )
        for at, one in enumerate(value):
            items(one, f"{place}[{at}]")

    return checked


def map_of(values: Validator) -> Validator:
    """Accept objects with any keys whose values `values` accepts."""

    def checked(value: Any, place: str) -> None:
        if not isinstance(value, dict):
            raise SchemaViolation(place, value, "an object")
        for key, one in value.items():
            values(one, _child_path(place, key))

    return checked


def any_json(max_depth: int = 6, *, finite: bool = True) -> Validator:
    """Accept any JSON value nested at most `max_depth` deep; with `finite`, only finite numbers."""

    def checked(value: Any, place: str, left: int = max_depth) -> None:
        if isinstance(value, dict | list):
            if not left:
                raise SchemaViolation(place, "...", f"nested at most {max_depth} deep")
            parts = value.items() if isinstance(value, dict) else enumerate(value)
            for key, one in parts:
                checked(one, _child_path(place, key), left - 1)
        elif finite and isinstance(value, float) and not math.isfinite(value):
            raise SchemaViolation(place, value, "finite")
        elif isinstance(value, int) and abs(value) >= 2**64:
            raise SchemaViolation(place, "...", "an integer of at most 64 bits")

    return checked


def json_object(
    required: Mapping[str, Validator],
    optional_keys: Mapping[str, Validator] | None = None,
    other_keys: Validator | None = None,
) -> Validator:
    """Accept objects whose values match the validators of their keys.

    Args:
        required: validators of required keys.
        optional_keys: validators of optional keys.
        other_keys: validator of all other keys; default: any JSON.
    """
    optional_keys = {**required, **(optional_keys or {})}
    other_keys = other_keys or any_json()

    def checked(value: Any, place: str) -> None:
        if not isinstance(value, dict):
            raise SchemaViolation(place, value, "an object")
        for key in required:
            if key not in value:
                raise SchemaViolation(_child_path(place, key), None, "present")
        for key, one in value.items():
            optional_keys.get(key, other_keys)(one, _child_path(place, key))

    return checked


def _child_path(place: str, key: object) -> str:
    shown = str(key)[:MAX_SHOWN_CHARACTERS]
    return f"{place}.{shown}" if place else shown
