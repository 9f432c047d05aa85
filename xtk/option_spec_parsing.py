"""Parsing of `NAME:key=value,...`: options of losses, divergences and rewards, from dataclass fields."""

from __future__ import annotations

import dataclasses
from typing import Any

from xtk.errors import XtkError

MAX_WEIGHT = 1e12


@dataclasses.dataclass(frozen=True)
class OptionSpec:
    """A parsed `NAME:key=value,...`: one term of a weighted sum.

    Attributes:
        name: name of the variant.
        weight: factor in the sum.
        options: (key, value) pairs without the weight.
    """

    name: str
    weight: float = 1.0
    options: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        weight = () if self.weight == 1 else (("weight", repr(self.weight)),)
        options = ",".join(f"{key}={value}" for key, value in (*weight, *self.options))
        return f"{self.name}:{options}" if options else self.name


def option_names(variant: type) -> list[str]:
    """Return the option names of a variant: the fields of its dataclass; none for other classes."""
    return list(_option_fields(variant)) if dataclasses.is_dataclass(variant) else []


def _option_fields(variant: type) -> dict[str, Any]:
    """Return the fields of a dataclass that are options, by name."""
    return {field.name: field for field in dataclasses.fields(variant) if field.init}


def from_options(variant: type, options: dict[str, str], spec_text: str, kind: str = "loss") -> Any:
    """Return an instance of a variant, made from options.

    Args:
        variant: the class.
        options: values of some fields, as text.
        spec_text: the whole specification, for messages.
        kind: "loss" or "reward", for messages.

    Raises:
        XtkError: a value has the wrong type.
    """
    fields = _option_fields(variant) if options else {}
    return variant(
        **{
            fields[key].name: _parse_value(f"{kind} {spec_text}", key, text, fields[key].default)
            for key, text in options.items()
        }
    )


def _parse_value(owner: str, key: str, text: str, default: Any) -> Any:
    if isinstance(default, bool):
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise XtkError(
            f"{key} of the {owner} is {text!r}, but must be true or false", hint=f"use {key}=true or {key}=false"
        )
    if isinstance(default, str):
        return text
    is_integer = isinstance(default, int)
    try:
        return int(text) if is_integer else float(text)
    except ValueError:
        wanted = "an integer" if is_integer else "a number"
        hint = f"use {key}=NUMBER" if default is None else f"use for example {key}={default}"
        raise XtkError(f"{key} of the {owner} is {text!r}, but must be {wanted}", hint=hint) from None


def parse_weight(value: str, name: str, noun: str) -> float:
    """Return the weight of a variant.

    Raises:
        XtkError: it is not above 0 and at most `MAX_WEIGHT`.
    """
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    if not 0 < number <= MAX_WEIGHT:
        raise XtkError(
            f"the weight of the {noun} {name} is {value!r}, but must be above 0 and at most {MAX_WEIGHT:g}",
            hint=f"use for example --{noun} {name}:weight=0.5",
        )
    return number
