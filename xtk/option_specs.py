"""`NAME:key=value,...`, options of losses, divergences and rewards as the fields of a dataclass."""

from __future__ import annotations

import dataclasses
from typing import Any

from xtk.errors import XtkError


@dataclasses.dataclass(frozen=True)
class OptionSpec:
    """One of several that are added up, as it was written.

    Attributes:
        name: of the variant.
        weight: its factor in the sum.
        options: its own.
    """

    name: str
    weight: float = 1.0
    options: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        weight = () if self.weight == 1 else (("weight", repr(self.weight)),)
        told = ",".join(f"{key}={value}" for key, value in (*weight, *self.options))
        return f"{self.name}:{told}" if told else self.name


def option_names(variant: type) -> list[str]:
    """Return the options of a variant: the fields of its dataclass, if it is one."""
    return list(_option_fields(variant)) if dataclasses.is_dataclass(variant) else []


def _option_fields(variant: type) -> dict[str, Any]:
    """Return the fields of a dataclass that are options, by how they are written."""
    return {field.name: field for field in dataclasses.fields(variant) if field.init}


def from_options(variant: type, options: dict[str, str], spec_text: str, kind: str = "loss") -> Any:
    """Return a variant with its options.

    Args:
        variant: the class.
        options: some of its fields, as they were written.
        spec_text: how the whole was written, for messages.
        kind: what it is a variant of, for messages.

    Raises:
        XtkError: a value is not what the field wants.
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
        raise XtkError(f"{key} of the {owner} is {text!r}", hint="true or false")
    if isinstance(default, str):
        return text
    whole = isinstance(default, int)
    try:
        return int(text) if whole else float(text)
    except ValueError:
        example = "a number" if default is None else f"a {'whole ' * whole}number, such as {key}={default}"
        raise XtkError(f"{key} of the {owner} is {text!r}", hint=example) from None


def parse_weight(value: str, name: str, noun: str) -> float:
    """Read the weight of a variant.

    Raises:
        XtkError: it is no positive number.
    """
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    if not 0 < number < float("inf"):
        raise XtkError(f"the weight of the {noun} {name} is {value!r}", hint=f"--{noun} {name}:weight=0.5")
    return number
