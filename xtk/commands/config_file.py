"""The command class: snake_case options, `--config FILE`, and help with headings and examples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from typer.core import TyperCommand

from xtk.commands.distill_options import DISTILL_COMMANDS, distill_command
from xtk.commands.renamed import EXIT_USAGE, renamed_error
from xtk.errors import XtkError
from xtk.name_registry import unknown_name_error
from xtk.options.declaration import Heading, declared_options, flag, headings_of

MAX_CONFIG_BYTES = 1 << 24  # a recipe lists every file that the run has read


class ConfigFileCommand(TyperCommand):
    """A command whose options are also read in snake_case and, if it has one, from `--config FILE`.

    Its help lists options under headings, and ends with examples.

    Attributes:
        headings: the headings.
    """

    headings: Sequence[Heading] = ()

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, then options by heading; those without one come last."""
        titles = {name: heading.title for heading, names in headings_of(self.headings) for name in names}
        order = {name: at for at, name in enumerate(titles)}
        general = "General" if titles else "Options"
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        sections |= {title: [] for title in titles.values()} | {general: []}
        for parameter in sorted(self.get_params(ctx), key=lambda one: order.get(str(one.name), len(order))):
            record = parameter.get_help_record(ctx)
            if record is not None:
                is_argument = parameter.param_type_name == "argument"
                sections["Arguments" if is_argument else titles.get(str(parameter.name), general)].append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples, a command a line."""
        with formatter.section("Examples"):
            for line in (self.epilog or "").splitlines():
                formatter.write(f"  {line}\n")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments; a `--config` file provides defaults for options that are not on the command line."""
        known = {name for parameter in self.params for name in parameter.opts if name.startswith("--")}
        args = [_kebab(argument, known) for argument in args]
        for argument in args:
            self._check_renamed(argument.partition("=")[0])
        config = _value_of(args, "--config") if "--config" in known else None
        if config is not None:
            ctx.default_map = {**(ctx.default_map or {}), **self._read(Path(config))}
        return super().parse_args(ctx, args)

    def _check_renamed(self, option: str) -> None:
        if failure := renamed_error(f"{self.name} {option.replace('_', '-')}"):
            raise failure

    def _read(self, path: Path) -> dict[str, Any]:
        import yaml

        with path.open("rb") as stream:
            content = stream.read(MAX_CONFIG_BYTES + 1)
        if len(content) > MAX_CONFIG_BYTES:
            raise XtkError(
                f"the --config file is larger than {MAX_CONFIG_BYTES:,} bytes",
                where=str(path),
                hint="use a file with options of this command only",
            )
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
            self._check_renamed(f"--{name}")
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
    """Return the keys of a recipe that are not options; none if the file is not the recipe of a run.

    Args:
        command: the command that reads it, which must be that of the run.
    """
    from xtk.runs.folder import RECIPE_KEYS, identity_in_recipe, is_recipe

    if not is_recipe(content):
        return ()
    identity_in_recipe(content, str(path))
    command_of_run = distill_command(on_policy=content.get("on_policy", content.get("on-policy")) is True)
    if command != command_of_run:
        failure = XtkError(f"this recipe is of a run of {command_of_run}: use `xtk {command_of_run} --config {path}`")
        failure.exit_code = EXIT_USAGE
        raise failure
    # Recipes of earlier versions list options of distill-on-policy for all runs.
    listed, known = (
        {flag(field.name).removeprefix("--") for field, _ in declared_options(DISTILL_COMMANDS[name])}
        for name in ("distill-on-policy", command)
    )
    return (*RECIPE_KEYS, "on-policy", *(listed - known))


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
    for at, argument in enumerate(args):
        if argument == option and at + 1 < len(args):
            return args[at + 1]
        if argument.startswith(option + "="):
            return argument.partition("=")[2]
    return None
