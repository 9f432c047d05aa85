"""The command line: which commands there are, how options are read, how a command ends."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from xtk import __version__, terminal
from xtk.children import TOLD
from xtk.commands.align import align
from xtk.commands.build_projection import build_projection
from xtk.commands.cache_teacher import cache_teacher
from xtk.commands.distill import distill
from xtk.commands.doctor import doctor
from xtk.commands.evaluate import evaluate
from xtk.commands.export import export
from xtk.commands.inspect import inspect
from xtk.commands.prune_projection import prune_projection
from xtk.commands.quickstart import quickstart
from xtk.commands.report import report
from xtk.commands.rollout import rollout
from xtk.errors import XtkError, from_os_error
from xtk.lookup import unknown

DONE, INTERRUPTED = 0, 130
SECONDS_FOR_THE_FIRST_PROCESS = 3


class Command(TyperCommand):
    """A command whose options are also read in snake_case and from `--config FILE`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read a configuration file, if one is named, under the flags."""
        known = {name for parameter in self.params for name in parameter.opts if name.startswith("--")}
        args = [_kebab(argument, known) for argument in args]
        config = _value_of(args, "--config")
        if config is not None:
            ctx.default_map = {**(ctx.default_map or {}), **self._read(Path(config))}
        return super().parse_args(ctx, args)

    def _read(self, path: Path) -> dict[str, Any]:
        import yaml

        try:
            root = yaml.compose(path.read_text(encoding="utf-8"))
        except (yaml.YAMLError, RecursionError) as wrong:
            raise XtkError(f"this is no YAML: {wrong}", where=str(path)) from None
        except UnicodeDecodeError:
            raise XtkError("a configuration file is text in UTF-8", where=str(path)) from None
        if root is None:
            return {}
        if not isinstance(root, yaml.MappingNode):
            raise XtkError("a configuration file holds `option: value` lines", where=str(path))
        options = {_name_of(parameter): parameter for parameter in self.params}
        options = {name: option for name, option in options.items() if name not in ("config", "help")}
        values: dict[str, Any] = {}
        for key, value in root.value:
            name = str(key.value).replace("_", "-")
            if name not in options:
                wrong_name = unknown("option", str(key.value), options)
                raise XtkError(wrong_name.what, where=str(path), hint=wrong_name.hint)
            option = options[name]
            if option.name in values:
                raise XtkError(f"{name} stands twice in this file", where=str(path))
            several = getattr(option, "multiple", False) or option.nargs != 1
            values[option.name] = _value_in_file(value, name, several, f"{path}, line {value.start_mark.line + 1}")
        return values


def _name_of(parameter: Any) -> str:
    """Return what a parameter is called in a configuration file: its long option, or an argument's name."""
    long = [option for option in parameter.opts if option.startswith("--")]
    return long[0].removeprefix("--") if long else str(parameter.name).replace("_", "-")


def _value_in_file(node: Any, name: str, several: bool, where: str) -> Any:
    """Return a value as it is written, as on the command line: `no` is a word before it is a YAML truth value.

    Raises:
        XtkError: it is a list, a mapping or null where one value is asked for.
    """
    if several and node.id == "sequence":
        return [_value_in_file(part, name, False, where) for part in node.value]
    if node.id != "scalar":
        raise XtkError(
            f"{name} has {'a list' if node.id == 'sequence' else 'a mapping'} for a value",
            where=where,
            hint=f"{name}: VALUE" + (f", or {name}: [VALUE, ...]" if several else ""),
        )
    if node.tag == "tag:yaml.org,2002:null":
        raise XtkError(f"{name} has no value", where=where, hint="leave the line out, or write what it is")
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


class Group(TyperGroup):
    """The group of commands, in the order of the work rather than of the alphabet."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Name the commands in the order in which they were added."""
        return list(self.commands)


app = typer.Typer(
    cls=Group,
    rich_markup_mode=None,  # rich would cost a third of the time that --help has
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

COMMANDS = (
    quickstart,
    build_projection,
    prune_projection,
    cache_teacher,
    rollout,
    distill,
    evaluate,
    report,
    export,
    align,
    inspect,
    doctor,
)
for _function in COMMANDS:
    app.command(_function.__name__.replace("_", "-"), cls=Command)(_function)


def _print_version(asked: bool) -> None:
    if asked:
        terminal.result_line(f"xtk {__version__}")
        raise typer.Exit


@app.callback()
def _xtk(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    r"""Distil large language models across tokenizers.

    Commands chain: each prints the path of what it wrote, and reads `-` from a pipe.

    \b
      xtk build-projection STUDENT TEACHER -o p | xtk prune-projection - --top-k 4 -o p4
      xtk cache-teacher TEACHER corpus.jsonl --top-k 64 -o cache
      xtk distill STUDENT cache --projection p4 -o student
    """


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code; tracebacks are for bugs only.

    Raises:
        KeyboardInterrupt: for the process to end on.
    """
    signal.signal(signal.SIGTERM, _stop)
    if sys.stdin is not None and hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")
    if "-h" not in arguments and "--help" not in arguments:
        terminal.own_stdout()
    try:
        command = typer.main.get_command(app)
        code = command.main(args=arguments, prog_name="xtk", standalone_mode=False)
        if code == INTERRUPTED:  # typer turns the exception into a code
            raise KeyboardInterrupt
        return code if isinstance(code, int) else DONE
    except XtkError as failure:
        return _failed(failure)
    except typer.Abort:
        raise KeyboardInterrupt from None
    except KeyboardInterrupt:
        raise
    except Exception as failure:
        if hasattr(failure, "show") and hasattr(failure, "exit_code"):  # the command line's own errors
            failure.show(file=sys.stderr)
            return int(failure.exit_code)
        mendable = from_os_error(failure)
        if mendable is None:
            raise
        return _failed(mendable)


def _failed(failure: XtkError) -> int:
    if os.environ.get("RANK", "0") != "0":
        # What all processes find is told once: the launcher ends the others when the first has told it.
        time.sleep(SECONDS_FOR_THE_FIRST_PROCESS)
    if not _was_told(failure):
        terminal.error(failure)
    return failure.exit_code


def _was_told(failure: XtkError) -> bool:
    """Say whether another worker of the same launcher has told this; from now on one has."""
    folder = os.environ.get(TOLD)
    if folder is None:
        return False
    try:
        (Path(folder) / hashlib.sha256(str(failure).encode()).hexdigest()).touch(exist_ok=False)
    except FileExistsError:
        return True
    except OSError:  # the launcher has gone
        return False
    return False


def _stop(number: int, frame: object) -> None:
    sys.exit(128 + number)
