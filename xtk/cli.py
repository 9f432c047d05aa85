"""The command line: which commands there are, how options are read, how a command ends."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from xtk import __version__, terminal
from xtk.commands.align import align
from xtk.commands.build_projection import build_projection
from xtk.commands.cache_teacher import cache_teacher
from xtk.commands.config_file import ConfigFileCommand
from xtk.commands.distill import distill
from xtk.commands.doctor import doctor
from xtk.commands.evaluate import evaluate
from xtk.commands.export import export
from xtk.commands.inspect import inspect
from xtk.commands.prune_projection import prune_projection
from xtk.commands.quickstart import quickstart
from xtk.commands.report import report
from xtk.commands.rollout import rollout
from xtk.commands.sweep import sweep
from xtk.errors import Terminated, XtkError, from_os_error
from xtk.registry import unknown_name_error
from xtk.subprocesses import REPORTED_ERRORS_VARIABLE

EXIT_OK, EXIT_USAGE, EXIT_INTERRUPTED = 0, 2, 130
FIRST_PROCESS_HEAD_START_SECONDS = 3


class OrderedCommandGroup(TyperGroup):
    """The group of commands, in the order of the work rather than of the alphabet."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Name the commands in the order in which they were added."""
        return list(self.commands)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command of a line.

        Raises:
            XtkError: there is no such command; the nearest one is proposed.
        """
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            failure = unknown_name_error("command", args[0], self.commands)
            failure.exit_code = EXIT_USAGE
            raise failure
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=OrderedCommandGroup,
    rich_markup_mode=None,  # rich would cost a third of the time that --help has
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

COMMANDS = (
    quickstart,
    build_projection,
    prune_projection,
    cache_teacher,
    rollout,
    distill,
    sweep,
    evaluate,
    report,
    export,
    align,
    inspect,
    doctor,
)
for _function in COMMANDS:
    # What a sweep does not know is of the runs.
    _settings = {"ignore_unknown_options": _function is sweep}
    _help, _, _examples = (_function.__doc__ or "").partition("\n    Examples:\n")
    app.command(
        _function.__name__.replace("_", "-"),
        cls=ConfigFileCommand,
        context_settings=_settings,
        help=_help,
        epilog=textwrap.dedent(_examples).strip(),
    )(_function)


def _print_version(asked: bool) -> None:
    if asked:
        terminal.result_line(f"xtk {__version__}")
        raise typer.Exit


@app.callback()
def _xtk(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    """Distill large language models across tokenizers.

    Commands chain: each prints the path of what it wrote, and reads `-` from a pipe.

    \b
      xtk build-projection STUDENT TEACHER -o p | xtk prune-projection - --top-k 4 -o p4
      xtk cache-teacher TEACHER corpus.jsonl --top-k 64 -o cache
      xtk distill STUDENT cache --projection p4 -o student
    """  # noqa: D301


def run_command(arguments: list[str]) -> int:
    """Run one command line and return its exit code; tracebacks are for bugs only.

    Raises:
        KeyboardInterrupt: for the process to end on.
    """
    signal.signal(signal.SIGTERM, _raise_terminated)
    if sys.stdin is not None and hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")
    if "-h" not in arguments and "--help" not in arguments:
        terminal.redirect_stdout_to_stderr()
    try:
        command = typer.main.get_command(app)
        code = command.main(args=arguments, prog_name="xtk", standalone_mode=False)
        if code == EXIT_INTERRUPTED:  # typer turns the exception into a code
            raise KeyboardInterrupt
        return code if isinstance(code, int) else EXIT_OK
    except XtkError as failure:
        _end_by_the_signal(failure)
        return _report_failure(failure)
    except typer.Abort:
        raise KeyboardInterrupt from None
    except KeyboardInterrupt:
        raise
    except Exception as failure:
        _end_by_the_signal(failure)
        if hasattr(failure, "show") and hasattr(failure, "exit_code"):  # the command line's own errors
            shown = io.StringIO()
            failure.show(file=shown)
            sys.stderr.write(terminal.printable(shown.getvalue()))
            return int(failure.exit_code)
        mendable = from_os_error(failure)
        if mendable is None:
            raise
        return _report_failure(mendable)


def _report_failure(failure: XtkError) -> int:
    if os.environ.get("RANK", "0") != "0":
        # What all processes find is told once: the launcher ends the others when the first has told it.
        time.sleep(FIRST_PROCESS_HEAD_START_SECONDS)
    if not _was_already_reported(failure):
        terminal.error(failure)
    return failure.exit_code


def _was_already_reported(failure: XtkError) -> bool:
    """Say whether another worker of the same launcher has told this; from now on one has."""
    folder = os.environ.get(REPORTED_ERRORS_VARIABLE)
    if folder is None:
        return False
    try:
        (Path(folder) / hashlib.sha256(str(failure).encode()).hexdigest()).touch(exist_ok=False)
    except FileExistsError:
        return True
    except OSError:  # the launcher has gone
        return False
    return False


def _end_by_the_signal(failure: BaseException) -> None:
    """Raise what a signal raised, where something else failed on the way out: a map that is in use cannot be closed."""
    while failure.__context__ is not None:
        failure = failure.__context__
        if isinstance(failure, Terminated):
            raise failure from None


def _raise_terminated(number: int, frame: object) -> None:
    raise Terminated(128 + number)
