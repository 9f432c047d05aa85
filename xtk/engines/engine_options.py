"""Parsing of `--engine name=value`: extra arguments for vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from xtk.errors import XtkError
from xtk.options.spec_parsing import parse_pair


def parse_engine_options(words: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Return engine options from `name=value` words, with YAML values: numbers, true, "text", {"a": 1}.

    A mapping is returned as a dict, unchanged.
    """
    import yaml

    if isinstance(words, Mapping):
        return dict(words)
    options: dict[str, Any] = {}
    for word in words:
        name, value = parse_pair(word.removeprefix("--"), f"--engine {word}")
        if name in options:
            raise XtkError(f"--engine {name} is given twice", hint="remove one of them")
        try:
            options[name] = yaml.safe_load(value)
        except yaml.YAMLError as failure:
            raise XtkError(
                f"--engine {name}: {value!r} is not valid YAML: {failure}",
                hint='use a number, true, false, text, or {"key": value}',
            ) from None
    return options


def check_not_reserved(engine: Mapping[str, Any], reserved: Mapping[str, str | None]) -> None:
    """Refuse engine options that xtk sets.

    Args:
        reserved: names that xtk sets, with the xtk option to use instead; None: there is none.
    """
    for name in engine:
        if name in reserved:
            instead = reserved[name]
            hint = f"use {instead}" if instead else f"remove {name}"
            raise XtkError(f"the engine option {name} is not allowed: xtk sets this argument", hint=hint)
