"""Options of losses and divergences, from what was written to the fields of a dataclass."""

from __future__ import annotations

import dataclasses
from typing import Any

from xtk.errors import XtkError


def names_of(rule: type) -> list[str]:
    """Return the options of a loss or a divergence: the fields of its dataclass, if it is one."""
    return [field.name for field in dataclasses.fields(rule)] if dataclasses.is_dataclass(rule) else []


def filled(rule: type, options: dict[str, str], place: str) -> Any:
    """Return a loss or a divergence with its options.

    Args:
        rule: the class.
        options: some of its fields, as they were written.
        place: how the whole was written, for messages.

    Raises:
        XtkError: a value is not what the field wants.
    """
    fields = {field.name: field for field in dataclasses.fields(rule)} if options else {}
    return rule(**{key: _value(place, key, text, fields[key].default) for key, text in options.items()})


def _value(place: str, key: str, text: str, default: Any) -> Any:
    if isinstance(default, bool):
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise XtkError(f"{key} of the loss {place} is {text!r}", hint="true or false")
    whole = isinstance(default, int)
    try:
        return int(text) if whole else float(text)
    except ValueError:
        example = "a number" if default is None else f"a {'whole ' * whole}number, such as {key}={default}"
        raise XtkError(f"{key} of the loss {place} is {text!r}", hint=example) from None
