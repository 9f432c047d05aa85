"""The command line: the commands, and how errors and signals become exit codes."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import typer
from typer.completion import completion_init  # type: ignore[attr-defined]
from typer.core import TyperGroup

from xtk import __version__, terminal
from xtk.commands.align import align
from xtk.commands.build_projection import build_projection
from xtk.commands.cache import export_cache, import_cache, merge
from xtk.commands.cache_teacher import cache_teacher
from xtk.commands.command_from_options import Command, build_command, short_help
from xtk.commands.completion import COMPLETION_VARIABLE, completion
from xtk.commands.distill import distill, distill_on_policy
from xtk.commands.doctor import doctor
from xtk.commands.evaluate import evaluate
from xtk.commands.evaluate_answers import evaluate_answers
from xtk.commands.evaluate_draft import evaluate_draft
from xtk.commands.evaluate_tasks import evaluate_tasks
from xtk.commands.export import export
from xtk.commands.help_format import HELP_ALL, MANUAL, definition_lines, heading
from xtk.commands.inspect import inspect
from xtk.commands.prune_projection import prune_projection
from xtk.commands.query_teacher import query_teacher
from xtk.commands.quickstart import quickstart
from xtk.commands.report import report
from xtk.commands.rollout import rollout
from xtk.commands.sweep import sweep
from xtk.commands.transplant import transplant
from xtk.commands.usage_errors import EXIT_USAGE, usage_error
from xtk.errors import Terminated, XtkError, from_os_error
from xtk.name_registry import unknown_name_error
from xtk.subprocesses import REPORTED_ERRORS_VARIABLE

EXIT_OK, EXIT_INTERRUPTED = 0, 130
COMMAND_COLUMN = 18
FIRST_PROCESS_HEAD_START_SECONDS = 3


# In the order of a workflow, which is the order of the help text.
COMMANDS: dict[str, Command] = {
    "quickstart": quickstart,
    "build-projection": build_projection,
    "prune-projection": prune_projection,
    "transplant": transplant,
    "cache-teacher": cache_teacher,
    "query-teacher": query_teacher,
    "cache merge": merge,
    "cache import": import_cache,
    "cache export": export_cache,
    "rollout": rollout,
    "distill": distill,
    "distill-on-policy": distill_on_policy,
    "sweep": sweep,
    "evaluate": evaluate,
    "evaluate-answers": evaluate_answers,
    "evaluate-tasks": evaluate_tasks,
    "evaluate-draft": evaluate_draft,
    "report": report,
    "export": export,
    "align": align,
    "inspect": inspect,
    "doctor": doctor,
    "completion": completion,
}
GROUPS = {"cache": "Merge, import or export teacher caches."}
# The headings of `xtk --help`; a command of none would not be listed, which a test checks.
TOPICS = {
    "Start": ("quickstart", "doctor", "align", "inspect", "completion"),
    "Teacher": ("cache-teacher", "query-teacher", "cache"),
    "Train": ("distill", "distill-on-policy", "rollout", "sweep"),
    "Evaluate and publish": ("evaluate", "evaluate-answers", "evaluate-tasks", "evaluate-draft", "report", "export"),
    "Vocabularies": ("build-projection", "prune-projection", "transplant"),
}


class LazyCommandGroup(TyperGroup):
    """A group of commands; the options of a command are read when it is called."""

    prefix = ""  # what the names of its commands begin with: `cache ` for `xtk cache`, nothing for `xtk`

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands and groups, in the order of a workflow."""
        names = [name.removeprefix(self.prefix).partition(" ")[0] for name in COMMANDS if name.startswith(self.prefix)]
        return list(dict.fromkeys(names))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a group, or a command with its options; None if there is no such command."""
        name = self.prefix + cmd_name
        if cmd_name not in self.commands and name in COMMANDS:
            # Options that sweep does not have are passed on to distill.
            built = build_command(COMMANDS[name], cmd_name, ignore_unknown_options=name == "sweep")
            self.add_command(built, cmd_name)
        elif cmd_name not in self.commands and name in GROUPS:
            group = LazyCommandGroup(name=name, help=GROUPS[name], no_args_is_help=True, rich_markup_mode=None)
            group.prefix = f"{name} "
            self.add_command(group, cmd_name)
        return self.commands.get(cmd_name)

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        """Write the usage."""
        formatter.write(f"{heading('Usage')} {ctx.command_path} COMMAND ...\n")

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the names of the commands by topic, with the first lines of their docstrings; then options."""
        names = self.list_commands(ctx)
        topics = {"Commands": names} if self.prefix else TOPICS
        lines = {
            title: [(name, GROUPS.get(self.prefix + name) or short_help(COMMANDS[self.prefix + name])) for name in part]
            for title, part in topics.items()
        }
        options = [] if self.prefix else [("--version", "Print the version.")]
        lines["Options"] = [*options, ("-h, --help", "Print this; xtk COMMAND --help: the options of a command.")]
        for title, records in lines.items():
            text = "\n".join(definition_lines(records, formatter.width, COMMAND_COLUMN))
            formatter.write(f"\n{heading(title)}\n{text}\n")
        formatter.write(f"\n{heading('Manual')} {MANUAL}\n")

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that a command line names."""
        known = self.list_commands(ctx)
        if args and not args[0].startswith("-") and args[0] not in known:
            failure = unknown_name_error("command", args[0], known)
            failure.exit_code = EXIT_USAGE
            raise failure
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=LazyCommandGroup,
    rich_markup_mode=None,  # importing rich would take a third of the time allowed for --help
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        terminal.result_line(f"xtk {__version__}")
        raise typer.Exit


@app.callback()
def _xtk(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    """Distill large language models across tokenizers.

    \b
      xtk doctor STUDENT TEACHER corpus.jsonl
      xtk cache-teacher TEACHER corpus.jsonl -o cache
      xtk distill STUDENT cache -o student
      xtk evaluate student test.jsonl

    Each command prints the path of its output. The argument - reads a path from a pipe.
    """  # noqa: D301


def run_command(arguments: list[str]) -> int:
    """Run one command line and return its exit code; only bugs print a traceback."""
    signal.signal(signal.SIGTERM, _raise_terminated)
    if sys.stdin is not None and hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")
    if COMPLETION_VARIABLE in os.environ:
        completion_init()
    elif {"-h", "--help", HELP_ALL}.isdisjoint(arguments):
        terminal.redirect_stdout_to_stderr()
    try:
        command = typer.main.get_command(app)
        code = command.main(args=arguments, prog_name="xtk", standalone_mode=False)
        if code == EXIT_INTERRUPTED:  # typer turns the exception into this code
            raise KeyboardInterrupt
        return code if isinstance(code, int) else EXIT_OK
    except XtkError as failure:
        _raise_cause_if_terminated(failure)
        return _report_failure(failure)
    except typer.Abort:
        raise KeyboardInterrupt from None
    except KeyboardInterrupt:
        raise
    except Exception as failure:
        _raise_cause_if_terminated(failure)
        if type(failure).__name__ == "NoArgsIsHelpError":
            sys.stderr.write(terminal.printable(str(failure)) + "\n")
            return EXIT_USAGE
        if hasattr(failure, "show") and hasattr(failure, "exit_code"):  # usage errors of typer
            return _report_failure(usage_error(failure))
        known = from_os_error(failure)
        if known is None:
            raise
        return _report_failure(known)


def _report_failure(failure: XtkError) -> int:
    if os.environ.get("RANK", "0") != "0":
        # An error of all processes is printed once: by the first, after which the launcher ends the others.
        time.sleep(FIRST_PROCESS_HEAD_START_SECONDS)
    if not _was_already_reported(failure):
        terminal.error(failure)
    return failure.exit_code


def _was_already_reported(failure: XtkError) -> bool:
    """Return whether another worker of the same launcher has printed this error, and record it as printed."""
    folder = os.environ.get(REPORTED_ERRORS_VARIABLE)
    if folder is None:
        return False
    try:
        (Path(folder) / hashlib.sha256(str(failure).encode()).hexdigest()).touch(exist_ok=False)
    except FileExistsError:
        return True
    except OSError:  # the launcher has ended
        return False
    return False


def _raise_cause_if_terminated(failure: BaseException) -> None:
    """Raise the exception of a signal if another error followed from it, such as closing a memory map in use."""
    while failure.__context__ is not None:
        failure = failure.__context__
        if isinstance(failure, Terminated):
            raise failure from None


def _raise_terminated(number: int, frame: object) -> None:
    raise Terminated(128 + number)
