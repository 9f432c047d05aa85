"""What an engine is told beside what xtk says itself: `--engine name=value`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from xtk.errors import XtkError


def parse_engine_options(words: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Read `name=value` words, values as in YAML: numbers, true, "text", {"a": 1}; what is read already stays.

    Raises:
        XtkError: a word has no "=", or comes twice.
    """
    import yaml

    if isinstance(words, Mapping):
        return dict(words)
    options: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        name = name.strip().removeprefix("--").replace("-", "_")
        if not equals or not name:
            raise XtkError(f"--engine {word!r} is no name=value", hint="--engine tensor_parallel_size=4")
        if name in options:
            raise XtkError(f"--engine {name} is given twice")
        try:
            options[name] = yaml.safe_load(value)
        except yaml.YAMLError as wrong:
            raise XtkError(f"--engine {name}: {value!r} is no value: {wrong}") from None
    return options


def check_not_reserved(engine: Mapping[str, Any], reserved: Mapping[str, str | None]) -> None:
    """Refuse options that xtk says itself.

    Args:
        engine: the options.
        reserved: their names, and where a user says them; None: nowhere.

    Raises:
        XtkError: tells where.
    """
    for name in engine:
        if name in reserved:
            instead = reserved[name]
            raise XtkError(f"--engine {name} is set by xtk" + (f": use {instead}" if instead else ""))
