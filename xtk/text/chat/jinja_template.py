"""Jinja templates of chats and prompts, rendered in Jinja's sandbox with a limit of the output's length.

The sandbox keeps files and Python objects from a template. It does not limit memory and time: a template is part of a
model folder that the user chose.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from xtk.errors import XtkError

# Templates that use the current date get this one, so that the same inputs give the same bytes on every day.
FIXED_DATE = datetime(2024, 7, 26)
# Jinja environments: that of transformers for chat templates; that of --prompt-template.
CHAT_TEMPLATE, PROMPT_TEMPLATE = "chat", "prompt"
# The output has at most this ratio times the characters of template and input, plus a number of characters.
MAX_OUTPUT_RATIO, MIN_OUTPUT_LIMIT = 100, 1 << 16
_MAX_ERROR_CHARACTERS = 300  # of a template's error message


class SandboxedTemplate:
    """A compiled Jinja template; `where` names its owner in errors."""

    def __init__(self, source: str, kind: str, where: str) -> None:
        self.source, self.kind, self.where = source, kind, where
        try:
            _compiled(source, kind)
        except Exception as error:  # Jinja and Python's parser also raise RecursionError, MemoryError, OverflowError
            raise self._failure(f"is invalid: {_error_text(error)}") from None

    def _failure(self, problem: str) -> XtkError:
        unit = "conversation" if self.kind == CHAT_TEMPLATE else "row"
        hint = f"correct the template, or remove the {unit}"
        return XtkError(f"the {self.kind} template {problem}", where=self.where, hint=hint)

    def render(self, variables: Mapping[str, Any]) -> str:
        """Return the rendered text; values without a JSON type become strings."""
        values = json.dumps(variables, default=str)
        limit = MAX_OUTPUT_RATIO * (len(self.source) + len(values)) + MIN_OUTPUT_LIMIT
        parts, size = [], 0
        try:
            for part in _compiled(self.source, self.kind).generate(json.loads(values)):
                parts.append(part)
                size += len(part)
                if size > limit:
                    break
        except Exception as error:  # a template is a program
            verb = (
                "refuses a conversation of the data" if self.kind == CHAT_TEMPLATE else "cannot be rendered for a row"
            )
            raise self._failure(f"{verb}: {_error_text(error)}") from None
        if size > limit:
            raise self._failure(
                f"writes more than {limit:,} characters, about {MAX_OUTPUT_RATIO} times those of template and input"
            )
        return "".join(parts)


def _error_text(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "it uses more memory than there is"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    text = str(error) or type(error).__name__
    return text if len(text) <= _MAX_ERROR_CHARACTERS else text[:_MAX_ERROR_CHARACTERS] + "..."


@functools.lru_cache(maxsize=64)
def _compiled(source: str, kind: str) -> Any:
    return _environment(kind).from_string(source)


@functools.cache
def _environment(kind: str) -> Any:
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    if kind == PROMPT_TEMPLATE:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            undefined=jinja2.StrictUndefined, keep_trailing_newline=True
        )
        return _without_random_choices(environment)

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks the assistant's text; here its body is rendered as usual."""

        tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_template_error
    environment.globals["strftime_now"] = FIXED_DATE.strftime
    return _without_random_choices(environment)


def _without_random_choices(environment: Any) -> Any:
    """Return an environment in which the same inputs give the same text."""
    del environment.filters["random"], environment.globals["lipsum"]
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_template_error(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)
