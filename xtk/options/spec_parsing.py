"""Parsing of `NAME:key=value,...` and `key=value,...`: options with sub-options."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable
from typing import Any, TypeVar

from xtk.errors import XtkError
from xtk.name_registry import unknown_name_error
from xtk.options.declaration import Option, find_option

T = TypeVar("T")
MAX_WEIGHT = 1e12
_WEIGHT = Option("weight", above=0, max=MAX_WEIGHT)


@dataclasses.dataclass(frozen=True)
class OptionSpec:
    """A parsed `NAME:key=value,...`: one term of a weighted sum."""

    name: str  # name of the variant
    weight: float = 1.0  # factor in the sum
    options: tuple[tuple[str, str], ...] = ()  # (key, value) pairs without the weight

    def __str__(self) -> str:
        weight = () if self.weight == 1 else (("weight", repr(self.weight)),)
        options = ",".join(f"{key}={value}" for key, value in (*weight, *self.options))
        return f"{self.name}:{options}" if options else self.name


def parse_pair(text: str, where: str) -> tuple[str, str]:
    """Return the key and the value of `key=value`; a key may be written with `-` instead of `_`."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise XtkError(f"{where}: {text.strip()!r} is not NAME=VALUE", hint=f"use {key or 'NAME'}=VALUE")
    return key.replace("-", "_"), value


def parse_pairs(
    text: str,
    where: str,
    known: Collection[str] = (),
    *,
    noun: str = "option",
    repeatable: Collection[str] = (),
    values_have_commas: bool = False,
) -> list[tuple[str, str]]:
    """Return the (key, value) pairs of `key=value,...`; a key may be written with `-` instead of `_`.

    Args:
        where: the option and its value, for messages, such as `--parallel fsdp=2`.
        known: legal keys; (): all.
        noun: what a key is, for messages.
        repeatable: keys that may be given several times.
        values_have_commas: a comma separates pairs only if a known key and `=` follow.
    """
    separator = rf",(?=(?:{'|'.join(known)})=)" if values_have_commas else ","
    pairs: list[tuple[str, str]] = []
    for part in filter(None, re.split(separator, text)):
        key, value = parse_pair(part, where)
        if known and key not in known:
            raise unknown_name_error(noun, key, known)
        if key in dict(pairs) and key not in repeatable:
            raise XtkError(f"{where}: {key} is given twice", hint=f"remove one {key}=")
        pairs.append((key, value))
    return pairs


def option_names(kind: type) -> list[str]:
    """Return the option names of a class: the fields of a dataclass; none for other classes."""
    return list(_option_fields(kind)) if dataclasses.is_dataclass(kind) else []


def _option_fields(kind: type) -> dict[str, Any]:
    """Return the fields of a dataclass that are options, by name."""
    return {field.name: field for field in dataclasses.fields(kind) if field.init}


def from_pairs(kind: type[T], pairs: Iterable[tuple[str, str]], owner: str) -> T:
    """Return an instance of a dataclass from (field, text), with values of the types of its defaults.

    Limits and choices are those of its declared options. `owner`: for messages, such as `the loss jsd:beta=0.5`.
    """
    fields = _option_fields(kind) if dataclasses.is_dataclass(kind) else {}
    return kind(**{key: _parse_value(text, fields[key], f"{key} of {owner}") for key, text in pairs})


def _parse_value(text: str, field: dataclasses.Field[Any], what: str) -> Any:
    declared, default = find_option(field), field.default
    if isinstance(default, bool):
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise XtkError(
            f"{what} is {text!r}, but must be true or false", hint=f"use {field.name}=true or {field.name}=false"
        )
    if isinstance(default, str):
        if declared is not None and declared.choices and text not in declared.choices:
            raise unknown_name_error(f"value of {what}", text, declared.choices)
        return text
    example = f"{field.name}=NUMBER" if default is None else f"for example {field.name}={default}"
    return parse_number(text, int if isinstance(default, int) else float, what, example, declared)


def parse_number(text: str, kind: type, what: str, example: str, limits: Option | None = None) -> Any:
    """Return the number in a text; `what` (such as `alpha of --teacher-weights`) and `example` are for messages."""
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or (limits is not None and not limits.allows(value)):
        wanted, legal = "an integer" if kind is int else "a number", "" if limits is None else limits.limits
        wanted += f" of {legal}" if legal.startswith("at ") else f" {legal}" if legal else ""
        raise XtkError(f"{what} is {text!r}, but must be {wanted}", hint=f"use {example}")
    return value


def parse_weight(text: str, name: str, noun: str) -> float:
    """Return the weight of a variant."""
    example = f"for example --{noun} {name}:weight=0.5"
    return float(parse_number(text, float, f"the weight of the {noun} {name}", example, _WEIGHT))
