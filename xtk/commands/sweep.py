"""`xtk sweep`: several runs of `xtk distill`, one after another."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from xtk import terminal
from xtk.options.declaration import REQUIRED, CommandOptions, argument, option
from xtk.options.shared import ForceOption, QuietOption

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xtk.commands.sweep_plan import PlannedRun

MAX_ERROR_LINES = 12


@dataclass(frozen=True, kw_only=True)
class SweepOptions(ForceOption, QuietOption, CommandOptions):
    """Options of `xtk sweep`."""

    output: str = option(
        REQUIRED,
        "Folder of the sweep: each run is FOLDER/NAME, its log FOLDER/NAME.log.",
        flags=("--output", "-o"),
        metavar="FOLDER",
    )
    arguments: tuple[str, ...] = argument(
        (),
        "Arguments and options of xtk distill that all runs share; - for standard input.",
        metavar="[STUDENT] [CACHE...] [DISTILL OPTION...]",
        show_default=False,
    )
    vary: tuple[str, ...] = option(
        (),
        "Option of distill with its values, such as 'seed=0 1 2'; repeat it for all combinations. Quoted values: "
        "\"loss=alm 'ce byte-kl'\" runs --loss alm, then --loss ce --loss byte-kl.",
        metavar="NAME=VALUE...",
    )
    runs: str = option(
        "",
        "File with one run per line: its additional arguments of distill; - for standard input. -o NAME on a line "
        "names the run; # starts a comment.",
        metavar="FILE",
    )
    dry_run: bool = option(False, "Print the distill commands, for sh or GNU parallel, and run none.")
    max_seconds: float = option(
        0,
        "Time limit in seconds: then save a checkpoint and exit with code 75; 0: none. The same command resumes.",
        min=0,
    )
    as_json: bool = option(False, "Print one JSON object per run instead of the table.", flags=("--json",))


def sweep(options: SweepOptions) -> None:
    """Run distill with several settings, one after another.

    All runs are checked before the first one starts. A failed run does not end the sweep. The same command resumes: it
    repeats failed and unfinished runs only, and prints a table of results at the end.

    Examples:
        xtk sweep ./student cache --vary 'loss=byte-kl alm' --vary 'seed=0 1 2' --max-steps 500 -o sweep
        xtk sweep ./student cache --runs runs.txt --dry-run -o sweep
    """
    started = time.monotonic()
    from xtk.commands.sweep_plan import plan_runs, replace_piped_arguments, varying_options
    from xtk.commands.sweep_table import add_seed_means, run_record, sweep_table
    from xtk.errors import XtkError
    from xtk.files.output import Output, OutputKind
    from xtk.terminal_tables import print_table

    terminal.set_quiet(options.quiet)
    folder, common = Path(options.output), list(options.arguments)
    piped = {"-", "--projection=-"} & set(common)
    if piped and options.runs == "-":
        raise typer.BadParameter("only one of --runs and the shared arguments can be read from standard input (-)")
    if piped:
        common = replace_piped_arguments(common, terminal.path_argument("-"))
    planned = plan_runs(common, _read_run_list(options.runs), options.vary, folder)
    if options.dry_run:
        limit = ["--max-seconds", f"{options.max_seconds:g}"] if options.max_seconds else []
        again = ["--force"] if options.force else []
        for run in planned:
            terminal.result_line_unescaped(shlex.join(["xtk", "distill", *run.arguments, *limit, *again]))
        return
    output = Output(folder, OutputKind[None]("a sweep", is_folder=True))
    if (folder / "recipe.json").is_file():
        raise XtkError(
            "the output folder is a run of xtk distill, not of a sweep", where=options.output, hint="use another -o"
        )
    from xtk.parallel.graceful_stop import exit_resumable_on_signal

    exit_resumable_on_signal()
    with output.lock():
        failed = _run_all(
            planned, folder, started + options.max_seconds if options.max_seconds else None, force=options.force
        )
    varies = varying_options(planned)
    records = [run_record(run, varied, failed.get(run.name, 0)) for run, varied in zip(planned, varies, strict=True)]
    if options.as_json:
        add_seed_means(records)
        for record in records:
            terminal.result_json(record)
    else:
        print_table(f"{len(planned) - len(failed)} of {len(planned)} runs in {options.output}", *sweep_table(records))
    if failed:
        raise XtkError(
            f"{len(failed)} of the {len(planned)} runs of the sweep failed",
            where=", ".join(failed),
            hint="see their logs, then run the same command again to repeat only these",
        )


def _read_run_list(runs: str) -> list[tuple[str, str]]:
    """Return (place, text) of each line of a --runs file, without comments and empty lines."""
    from xtk.errors import XtkError

    if not runs:
        return []
    try:
        lines = terminal.piped_lines() if runs == "-" else Path(runs).read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError:
        raise XtkError("the --runs file is not valid UTF-8", where=runs, hint="save the file as UTF-8") from None
    place = "stdin" if runs == "-" else runs
    numbered = [
        (f"{place}, line {number}", line)
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not numbered:
        raise XtkError(
            "the --runs file has no runs", where=place, hint="write arguments of xtk distill, one run per line"
        )
    return numbered


def _run_all(planned: Sequence[PlannedRun], folder: Path, deadline: float | None, *, force: bool) -> dict[str, int]:
    """Check all runs, run the unfinished ones, and return the exit codes of failed runs by name.

    Raises:
        ResumableStop: a signal or the time limit stopped the sweep.
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    from xtk.commands.sweep_plan import find_finished_run
    from xtk.commands.sweep_table import LOG, LOG_PREFIX, run_log_path
    from xtk.files.output import Output
    from xtk.subprocesses import SignalForwarder

    for run in planned:
        Output(run_log_path(run), LOG).find_finished()
    checked = {run.name: find_finished_run(run, force=force) for run in planned}
    left = [run for run in planned if checked[run.name][0] is None]
    terminal.note(f"sweep: {len(planned):,} runs, {len(planned) - len(left):,} already finished")
    failed: dict[str, int] = {}
    folder.mkdir(parents=True, exist_ok=True)
    with SignalForwarder() as forwarder:
        for number, run in enumerate(left, len(planned) - len(left) + 1):
            command = ["distill", *run.arguments]
            if deadline is not None:
                seconds = deadline - time.monotonic()
                if seconds <= 0:
                    raise _stopped(run, "--max-seconds is over")
                command += ["--max-seconds", f"{seconds:.3f}"]
            if checked[run.name][1]:
                command.append("--force")
            log, begun = run_log_path(run), time.monotonic()
            terminal.note(f"sweep: run {number:,} of {len(planned):,}: {run.name}, log: {log}")
            with log.open("a", encoding="utf-8", errors="surrogateescape") as stream:
                stream.write(f"{LOG_PREFIX}{shlex.join(['xtk', *command])}\n")
            size = log.stat().st_size
            code = forwarder.run_command([sys.executable, "-m", "xtk", *command], log)
            if forwarder.received_signal and (code or run is not left[-1]):
                if forwarder.received_signal == signal.SIGINT:
                    raise KeyboardInterrupt
                raise _stopped(run, signal.Signals(forwarder.received_signal).name)
            if code == os.EX_TEMPFAIL:
                raise _stopped(run, "the run was stopped by a signal" if deadline is None else "--max-seconds is over")
            if code:
                failed[run.name] = code
                terminal.error(_failure(run, code, log, size))
            else:
                terminal.note(f"sweep: {run.name}: finished in {terminal.format_duration(time.monotonic() - begun)}")
    return failed


def _stopped(run: PlannedRun, why: str) -> Exception:
    from xtk.errors import ResumableStop

    return ResumableStop(f"the sweep was stopped in run {run.name}: {why}", where=str(run.folder.parent),
                   hint="run the same command again to resume")  # fmt: skip


def _failure(run: PlannedRun, code: int, log: Path, size: int) -> Any:
    """Return the error of a failed run, with the error or the last lines of its log.

    Args:
        code: its exit code, or minus the number of a signal.
        size: bytes of the log before the run.
    """
    from xtk.errors import XtkError

    with log.open("rb") as stream:
        stream.seek(size)
        lines = stream.read().decode("utf-8", "replace").rstrip().split("\n")
    own = next((at for at in reversed(range(len(lines))) if lines[at].startswith("xtk")), 0)
    last = lines[own:][-MAX_ERROR_LINES:]
    how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
    return XtkError("\n    ".join([f"the run {run.name} failed with {how}", *last]), where=str(log))
