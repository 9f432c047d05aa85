"""Rewards `regex` and `json`: check the format of a completion."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xtk.errors import XtkError


@dataclass(frozen=True)
class RegexReward:
    """regex: 1 if the pattern is found in the completion, else 0.

    A dot also matches newlines; `^` and `$` are the beginning and end of the completion without surrounding space. With
    `column`, the group `group` (a number or a name) must equal that field of the row, ignoring surrounding space.
    """

    pattern: str = ""
    group: str = "0"
    column: str = ""
    _compiled: Any = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.pattern:
            raise XtkError("--reward regex needs a pattern", hint="use --reward 'regex:pattern=<answer>.*</answer>'")
        try:
            compiled = re.compile(self.pattern, re.DOTALL)
        except (re.error, RecursionError, OverflowError) as error:
            raise XtkError(
                f"the pattern of --reward regex is not a valid Python regular expression: {error}",
                where=self.pattern,
                hint="correct the pattern; put a backslash before ( ) [ ] * + ? . to match the character itself",
            ) from error
        if self._key not in (*range(compiled.groups + 1), *compiled.groupindex):
            raise XtkError(
                f"the pattern of --reward regex has no group {self.group!r}",
                where=self.pattern,
                hint="put the answer in parentheses, such as 'regex:pattern=answer (.*),group=1,column=NAME'",
            )
        object.__setattr__(self, "_compiled", compiled)

    @property
    def _key(self) -> int | str:
        return int(self.group) if self.group.isdecimal() else self.group

    def __call__(self, completion: str, prompt: str, row: Mapping[str, Any]) -> float:
        """Return 1 or 0; nan if the row lacks the field."""
        match = self._compiled.search(completion.strip())
        if not self.column:
            return float(match is not None)
        if row.get(self.column) is None:
            return math.nan
        return float(match is not None and (match[self._key] or "").strip() == str(row[self.column]).strip())


@dataclass(frozen=True)
class JsonReward:
    """json: 1 if the completion is valid JSON, else 0. Surrounding space and one pair of code fences are ignored.

    With `schema` (a file) or `column` (a field of the row), it must also be valid under that JSON schema
    (`pip install '.[schemas]'` in xtk's repository). References (`$ref`) must lead to a part of the same schema, or to
    a JSON Schema metaschema: nothing is downloaded.
    """

    schema: str = ""
    column: str = ""
    _schema: Any = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.schema:
            try:
                schema = json.loads(Path(self.schema).read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                problem = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else f"is not JSON: {error}"
                raise XtkError(
                    f"the schema file of --reward json {problem}",
                    where=self.schema,
                    hint="use --reward json:schema=FILE with a file that contains a JSON schema",
                ) from error
            object.__setattr__(self, "_schema", _validator(schema, self.schema))
        elif self.column:
            _validator({}, self.column)

    def __call__(self, completion: str, prompt: str, row: Mapping[str, Any]) -> float:
        """Return 1 or 0; nan if the row has no valid schema."""
        schema = self._schema
        if self.column:
            given = row.get(self.column)
            try:
                schema = _validator(json.loads(given) if isinstance(given, str) else given, self.column)
            except (XtkError, ValueError):
                return math.nan
        try:
            value = json.loads(_without_fences(completion), parse_constant=_refuse_nan_constant)
            return float(schema is None or _is_valid(schema, value, self.column or self.schema))
        except XtkError:
            if self.column:
                return math.nan
            raise
        except (ValueError, RecursionError, ArithmeticError):  # ArithmeticError: numbers beyond the range of floats
            return 0.0


def _refuse_nan_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not valid JSON")


def _without_fences(text: str) -> str:
    fenced = re.fullmatch(r"\s*```(?:json|JSON)?[^\S\n]*\n(.*)```\s*", text, re.DOTALL)
    return fenced[1] if fenced else text


def _validator(schema: Any, place: str) -> Any:
    if not isinstance(schema, dict | bool):
        raise XtkError(
            "the schema of --reward json must be a JSON object or a boolean",
            where=place,
            hint='use a JSON schema such as {"type": "object"}',
        )
    try:
        import jsonschema
        import referencing
    except ImportError as error:
        raise XtkError(
            "schemas of --reward json need the package jsonschema",
            hint="run pip install '.[schemas]' in xtk's repository",
        ) from error
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise XtkError(
            f"the schema of --reward json is not a valid JSON schema: {error.message}",
            where=place,
            hint="correct the schema",
        ) from error
    # Without a registry, jsonschema downloads references. It adds its metaschemas to this empty one.
    return kind(schema, registry=referencing.Registry())


def _is_valid(validator: Any, value: Any, place: str) -> bool:
    """Return whether a value is valid under a schema."""
    import referencing.exceptions

    try:
        return bool(validator.is_valid(value))
    except (referencing.exceptions.Unresolvable, AttributeError, TypeError) as error:  # leads to a string
        raise XtkError(
            f"a reference ($ref) in the schema of --reward json does not lead to a schema: {str(error)[:200]}",
            where=place,
            hint="correct $ref, or add the missing part under $defs of the same schema; nothing is downloaded",
        ) from error
