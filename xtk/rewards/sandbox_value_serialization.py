"""Serialization of plain Python values between processes that do not trust each other.

Decoded values have built-in types only: no user-defined `__eq__` can make an assert pass.
"""

from __future__ import annotations

import decimal
import json
import numbers
from collections import deque
from collections.abc import Iterator
from typing import Any

MAX_LAZY_ITEMS = 100_000  # of an iterator


class NotPlainError(Exception):
    """A value that cannot be serialized as plain values."""


def to_jsonable(value: Any) -> Any:
    """Return a value as JSON: itself, or `[type, content]`.

    Raises:
        NotPlainError: it is not a number, string, bytes or a collection of them.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, numbers.Integral):
        return ["int", hex(int(value))]
    if isinstance(value, numbers.Real):
        return ["float", float(value).hex()]
    if isinstance(value, numbers.Complex):
        return ["complex", complex(value).real.hex(), complex(value).imag.hex()]
    if isinstance(value, decimal.Decimal):
        return ["decimal", str(value)]
    if isinstance(value, bytes | bytearray):
        return ["bytes", bytes(value).hex()]
    if isinstance(value, dict):
        return ["dict", [[to_jsonable(key), to_jsonable(item)] for key, item in value.items()]]
    for kind in (list, tuple, set, frozenset, deque):
        if isinstance(value, kind):
            return [kind.__name__, [to_jsonable(item) for item in value]]
    if isinstance(value, range):
        return ["range", value.start, value.stop, value.step]
    if isinstance(value, Iterator):
        return ["iterator", [to_jsonable(item) for item, _ in zip(value, range(MAX_LAZY_ITEMS), strict=False)]]
    raise NotPlainError(type(value).__name__)


def from_jsonable(packed: Any) -> Any:
    """Return the value of `to_jsonable`'s result.

    Raises:
        ValueError: it is malformed.
    """
    if packed is None or isinstance(packed, bool | str):
        return packed
    if not isinstance(packed, list) or not packed:
        raise ValueError("the value is not in the format of serialized values")
    kind, *content = packed
    readers: dict[str, Any] = {
        "int": lambda text: int(text, 16),
        "float": float.fromhex,
        "complex": lambda real, imaginary: complex(float.fromhex(real), float.fromhex(imaginary)),
        "decimal": decimal.Decimal,
        "bytes": bytes.fromhex,
        "dict": lambda pairs: {from_jsonable(key): from_jsonable(item) for key, item in pairs},
        "list": lambda items: [from_jsonable(item) for item in items],
        "tuple": lambda items: tuple(from_jsonable(item) for item in items),
        "set": lambda items: {from_jsonable(item) for item in items},
        "frozenset": lambda items: frozenset(from_jsonable(item) for item in items),
        "deque": lambda items: deque(from_jsonable(item) for item in items),
        "range": range,
        "iterator": lambda items: iter([from_jsonable(item) for item in items]),
    }
    if not isinstance(kind, str) or kind not in readers:
        raise ValueError("the value is not in the format of serialized values")
    try:
        return readers[kind](*content)
    except (TypeError, ArithmeticError) as error:
        raise ValueError("the value is not in the format of serialized values") from error


def encode_value(value: Any) -> bytes:
    """Return a value as one line of JSON.

    Raises:
        NotPlainError: it is not a plain value, or is nested too deeply.
    """
    try:
        return json.dumps(to_jsonable(value)).encode() + b"\n"
    except (RecursionError, ValueError, TypeError) as error:
        raise NotPlainError(str(error)) from error


def decode_value(line: bytes) -> Any:
    """Return the value of a line of JSON.

    Raises:
        ValueError: it is malformed.
    """
    try:
        return from_jsonable(json.loads(line))
    except RecursionError as error:
        raise ValueError("the value is nested too deeply") from error
