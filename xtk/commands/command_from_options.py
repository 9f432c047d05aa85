"""Command lines that are generated from dataclasses of options: parsing, `--config FILE`, and help with headings."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import textwrap
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from xtk.commands.distill_options import DISTILL_COMMANDS, distill_command
from xtk.commands.help_format import HELP_ALL, definition_lines, heading, option_record, sections, usage, wrap
from xtk.commands.usage_errors import EXIT_USAGE
from xtk.errors import XtkError
from xtk.name_registry import unknown_name_error
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
        cls=type("Command", (ConfigFileCommand,), {"kind": options_type(function)}),
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
    """Return the options of a command from values as typer parses them, by field name."""
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
    if declared.choices:
        choices = declared.choices  # the parameter's name is typer's
        details["autocompletion"] = lambda incomplete: [name for name in choices if name.startswith(incomplete)]
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


class ConfigFileCommand(TyperCommand):
    """A command with options also in snake_case and from `--config FILE`; its help has headings and examples."""

    kind: Any = CommandOptions

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        """Write the usage, with the options that the command needs."""
        line = usage(ctx.command_path, [(name, option) for name, option, _, _ in self._declared()], self._required())
        lines = wrap(line, formatter.width - len("Usage: "), " " * len("Usage: "))
        formatter.write(f"{heading('Usage')} {chr(10).join(lines).lstrip()}\n")

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write what the command does."""
        for paragraph in (self.help or "").strip().split("\n\n"):
            formatter.write("\n" + "\n".join(wrap(" ".join(paragraph.split()), formatter.width)) + "\n")

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, then options by heading, those without one last; or the most used ones only."""
        required, records, arguments = self._required(), {}, []
        for name, option, type_, default in self._declared():
            records[name] = option_record(name, option, type_, default, is_required=name in required)
            arguments += [name] if option.is_argument else []
        most_used: Sequence[str] = self.kind.MAIN_OPTIONS
        main = () if ctx.meta.get(HELP_ALL) else most_used
        count = len(records) - len(arguments)
        records["help"] = ("-h, --help", "Print the most used options." if most_used else "Print this.")
        if most_used:
            records["help_all"] = (HELP_ALL, f"Print all {count} options by topic.")
        shown = sections(records, arguments, self.kind.HEADINGS, (*main, "help", "help_all") if main else ())
        for title, lines in shown.items():
            if lines:
                text = "\n".join(definition_lines(lines, formatter.width))
                formatter.write(f"\n{heading(title)}\n{text}\n")

    def _declared(self) -> list[tuple[str, Option, Any, Any]]:
        """Return (name, option, type, default) of all options."""
        types = _field_types(self.kind)
        return [(field.name, option, types[field.name], field.default) for field, option in declared_options(self.kind)]

    def _required(self) -> list[str]:
        return [name for name, _, _, default in self._declared() if default is dataclasses.MISSING]

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples, a command a line."""
        lines = "".join(f"  {line}\n" for line in (self.epilog or "").splitlines())
        formatter.write(f"\n{heading('Examples')}\n{lines}")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments; a `--config` file provides defaults for options that are not on the command line."""
        if HELP_ALL in args:
            ctx.meta[HELP_ALL] = True
            args = ["--help"]
        known = {name for parameter in self.params for name in parameter.opts if name.startswith("--")}
        args = [_kebab(argument, known) for argument in args]
        config = _value_of(args, "--config") if "--config" in known else None
        if config is not None:
            ctx.default_map = {**(ctx.default_map or {}), **self._read(Path(config))}
        try:
            return super().parse_args(ctx, args)
        except Exception as failure:
            if getattr(failure, "ctx", ctx) is None:  # an option without its value
                failure.ctx = ctx  # type: ignore[attr-defined]
            raise

    def _read(self, path: Path) -> dict[str, Any]:
        import yaml

        content = path.read_bytes()
        try:
            root = yaml.compose(content.decode())
        except (yaml.YAMLError, RecursionError) as failure:
            raise XtkError(
                f"the --config file is not valid YAML or JSON: {failure}",
                where=str(path),
                hint="write one option a line, such as max-steps: 500",
            ) from None
        except UnicodeDecodeError:
            raise XtkError(
                "the --config file is not valid UTF-8", where=str(path), hint="save the file as UTF-8"
            ) from None
        if root is None:
            return {}
        if not isinstance(root, yaml.MappingNode):
            raise XtkError(
                "the --config file is not a mapping of options",
                hint="write one option a line, such as max-steps: 500",
                where=str(path),
            )
        options = {config_name(parameter): parameter for parameter in self.params}
        options = {name: option for name, option in options.items() if name not in ("config", "help")}
        values: dict[str, Any] = {}
        of_a_recipe = (
            _check_recipe(yaml.safe_load(content.decode()), path, str(self.name))
            if self.name in DISTILL_COMMANDS
            else ()
        )
        for key, value in root.value:
            name = str(key.value).replace("_", "-")
            if name in of_a_recipe:
                continue
            if name not in options:
                wrong_name = unknown_name_error("option", str(key.value), options)
                raise XtkError(wrong_name.what, where=str(path), hint=wrong_name.hint)
            option = options[name]
            if option.name in values:
                raise XtkError(
                    f"the --config file sets {name} twice", where=str(path), hint="remove one of the two lines"
                )
            several = getattr(option, "multiple", False) or option.nargs != 1
            values[option.name] = _value_in_file(value, name, several, f"{path}, line {value.start_mark.line + 1}")
        return values


def _check_recipe(content: dict[Any, Any], path: Path, command: str) -> tuple[str, ...]:
    """Return the keys of a recipe, or of a copy of its options, that are not options of `command`."""
    from xtk.runs.folder import RECIPE_KEYS, identity_in_recipe, is_recipe

    keys: tuple[str, ...] = ()
    if is_recipe(content):
        identity_in_recipe(content, str(path))
        keys = RECIPE_KEYS
    on_policy = content.get("on_policy", content.get("on-policy"))
    if on_policy is None:
        return keys
    command_of_run = distill_command(on_policy=on_policy is True)
    if command != command_of_run:
        failure = XtkError(f"this recipe is of a run of {command_of_run}: use `xtk {command_of_run} --config {path}`")
        failure.exit_code = EXIT_USAGE
        raise failure
    return (*keys, "on-policy")


def config_name(parameter: Any) -> str:
    """Return the name of a parameter in a configuration file: its long option without dashes, or an argument's name."""
    long = [option for option in parameter.opts if option.startswith("--")]
    return long[0].removeprefix("--") if long else str(parameter.name).replace("_", "-")


def _value_in_file(node: Any, name: str, several: bool, where: str) -> Any:
    """Return a value as text, as on the command line: `no` stays a word instead of a YAML boolean."""
    if several and node.id == "sequence":
        return [_value_in_file(part, name, False, where) for part in node.value]
    if node.id != "scalar":
        raise XtkError(
            f"{name} takes one value, but the --config file has {'a list' if node.id == 'sequence' else 'a mapping'}",
            where=where,
            hint=f"write {name}: VALUE" + (f", or {name}: [VALUE, ...]" if several else ""),
        )
    if node.tag == "tag:yaml.org,2002:null":
        raise XtkError(f"{name} in the --config file has no value", where=where, hint="remove the line, or add a value")
    return [node.value] if several else node.value


def _kebab(argument: str, known: set[str]) -> str:
    name, equals, value = argument.partition("=")
    kebab = name.replace("_", "-")
    return kebab + equals + value if name.startswith("--") and kebab in known else argument


def _value_of(args: list[str], option: str) -> str | None:
    """Return the value of an option among arguments; None: it is not there."""
    for at, argument in enumerate(args):
        if argument == option and at + 1 < len(args):
            return args[at + 1]
        if argument.startswith(option + "="):
            return argument.partition("=")[2]
    return None
