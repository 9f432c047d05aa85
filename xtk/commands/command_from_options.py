"""Command lines that are generated from dataclasses of options."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import textwrap
import typing
from collections.abc import Callable
from typing import Annotated, Any

import typer

from xtk.commands.config_file import ConfigFileCommand
from xtk.options.declaration import CommandOptions, Option, check_options, declared_options, flag

Command = Callable[[Any], Any]


def build_command(function: Command, name: str, **context_settings: Any) -> Any:
    """Return the command line of a function of one dataclass of options.

    Its docstring ends with `Examples:` and a command a line.
    """
    shown, _, examples = (function.__doc__ or "").partition("\n    Examples:\n")
    app = typer.Typer(rich_markup_mode=None, add_completion=False, pretty_exceptions_enable=False)
    app.command(
        name,
        cls=type("Command", (ConfigFileCommand,), {"headings": options_type(function).HEADINGS}),
        context_settings=context_settings,
        help=shown,
        epilog=textwrap.dedent(examples).strip(),
    )(command_function(function))
    return typer.main.get_command(app)


def short_help(function: Command) -> str:
    """Return the first line of the docstring of a command."""
    return (function.__doc__ or "").partition("\n")[0]


def options_type(function: Command) -> type[CommandOptions]:
    """Return the dataclass of the options of a command."""
    kind: type[CommandOptions] = typing.get_type_hints(function)["options"]
    return kind


def command_function(function: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a function with a parameter for each option, annotated for typer, that calls `function` with them."""
    kind = options_type(function)

    @functools.wraps(function)
    def run(**values: Any) -> Any:
        return function(options_from_command_line(kind, values))

    parameters = []
    for field, declared in declared_options(kind):
        annotation, default = _annotation(kind, field, declared)
        parameters.append(
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        )
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def options_from_command_line(kind: type[CommandOptions], values: dict[str, Any]) -> Any:
    """Return the options of a command.

    Args:
        values: values as typer parses them, by field name.
    """
    parsed = {}
    for field, declared in declared_options(kind):
        value = values[field.name]
        if declared.comma_separated:
            value = tuple(name.strip() for name in value.split(",") if name.strip())
        elif _is_list(kind, field):
            value = tuple(value or ())
        parsed[field.name] = value
    options = kind(**parsed)
    check_options(options)
    return options


def _is_list(kind: type, field: dataclasses.Field[Any]) -> bool:
    return bool(_field_types(kind)[field.name] == tuple[str, ...])


@functools.cache
def _field_types(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _annotation(kind: type, field: dataclasses.Field[Any], declared: Option) -> tuple[Any, Any]:
    """Return (type with the typer declaration, default) of an option."""
    type_ = _field_types(kind)[field.name]
    default: Any = field.default
    if declared.comma_separated:
        type_, default = str, ",".join(default)
    elif _is_list(kind, field):
        type_, default = (list[str], default) if default is dataclasses.MISSING else (list[str] | None, None)
    details: dict[str, Any] = {"help": declared.help, "show_default": declared.show_default}
    details["metavar"] = declared.metavar or (f"[{'|'.join(declared.choices)}]" if declared.choices else None)
    if type_ in (int, int | None):
        details |= {"min": declared.min, "max": declared.max}
    if default is dataclasses.MISSING:
        default = inspect.Parameter.empty
    if declared.is_argument:
        return Annotated[type_, typer.Argument(**details)], default
    names = declared.flags or (flag(field.name),)
    if type_ is bool and default is True:
        names = tuple(f"{name}/--no-{name.removeprefix('--')}" for name in names)
    return Annotated[type_, typer.Option(*names, **details)], default
