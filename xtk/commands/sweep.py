"""`xtk sweep`: several runs of `xtk distill` or `xtk distill-on-policy`, one after another."""

from __future__ import annotations

import math
import os
import shlex
import signal
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from xtk import terminal
from xtk.commands.distill_options import DISTILL_COMMANDS
from xtk.options.declaration import CommandOptions, argument, option, output_option
from xtk.options.shared import ForceOption, QuietOption

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from xtk.commands.sweep_plan import PlannedRun

MAX_ERROR_LINES = 12
SEED_OPTION = "seed"
PROGRESS_BYTES = 4096  # at the end of a log, searched for the progress of the run
LOG_PREFIX = "$ "  # precedes the command of the run in its log
# Metrics shown in the table, and their column titles.
COLUMN_TITLES = {
    "steps": "steps",
    "loss": "loss",
    "ce": "ce",
    "reward": "reward",
    "eval_bits_per_byte": "bits per byte",
    "tokens_per_second": "tokens/s",
    "training_seconds": "seconds",
}
MIN_SHOWN_ERROR = 1e-4  # of errors that four decimals show
INTEGER_METRICS = ("steps", "tokens_per_second", "training_seconds")


@dataclass(frozen=True, kw_only=True)
class SweepOptions(ForceOption, QuietOption, CommandOptions):
    """Options of `xtk sweep`."""

    output: str = output_option("Folder of the sweep: each run is FOLDER/NAME, its log FOLDER/NAME.log.", "FOLDER")
    arguments: tuple[str, ...] = argument(
        (),
        "Arguments and options of the command that all runs share; - for standard input.",
        metavar="[STUDENT] [CACHE...] [DISTILL OPTION...]",
        show_default=False,
    )
    command: str = option(
        "distill",
        "Command of the runs, unless a line of --runs begins with xtk and another one.",
        choices=tuple(DISTILL_COMMANDS),
    )
    vary: tuple[str, ...] = option(
        (),
        "Option of the command with its values, such as 'seed=0 1 2'; repeat it for all combinations. Quoted values: "
        "\"loss=alm 'ce byte-kl'\" runs --loss alm, then --loss ce --loss byte-kl.",
        metavar="NAME=VALUE...",
    )
    runs: str = option(
        "",
        "File with one run per line: its additional arguments; - for standard input. -o NAME on a line "
        "names the run; # starts a comment.",
        metavar="FILE",
    )
    dry_run: bool = option(False, "Print the commands, for sh or GNU parallel, and run none.")
    max_seconds: float = option(
        0,
        "Time limit in seconds: then save a checkpoint and exit with code 75; 0: none. The same command resumes.",
        min=0,
    )
    as_json: bool = option(False, "Print one JSON object per run instead of the table.", flags=("--json",))


def sweep(options: SweepOptions) -> None:
    """Run distill or distill-on-policy with several settings, one after another.

    All runs are checked before the first one starts. A failed run does not end the sweep. The same command resumes: it
    repeats failed and unfinished runs only, and prints a table of results at the end.

    Examples:
        xtk sweep ./student cache --vary 'loss=byte-kl alm' --vary 'seed=0 1 2' --max-steps 500 -o sweep
        xtk sweep ./student cache --runs runs.txt --dry-run -o sweep
    """
    started = time.monotonic()
    from xtk.commands.distill import replace_piped_arguments
    from xtk.commands.sweep_plan import plan_runs, varying_options
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
    planned = plan_runs(common, _read_run_list(options.runs), options.vary, folder, options.command)
    if options.dry_run:
        limit = ["--max-seconds", f"{options.max_seconds:g}"] if options.max_seconds else []
        again = ["--force"] if options.force else []
        for run in planned:
            terminal.result_line_unescaped(shlex.join(["xtk", run.command, *run.arguments, *limit, *again]))
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
            "the --runs file has no runs",
            where=place,
            hint=f"write arguments of {' or '.join(DISTILL_COMMANDS)}, one run per line",
        )
    return numbered


def _run_all(planned: Sequence[PlannedRun], folder: Path, deadline: float | None, *, force: bool) -> dict[str, int]:
    """Check all runs, run the unfinished ones, and return the exit codes of failed runs by name."""
    from xtk.commands.sweep_plan import find_finished_run
    from xtk.files.output import Output, OutputKind
    from xtk.progress import Progress
    from xtk.subprocesses import SignalForwarder

    for run in planned:
        Output(run_log_path(run), OutputKind[None]("the log of a run", _is_log, has_force=False)).find_finished()
    checked = {run.name: find_finished_run(run, force=force) for run in planned}
    left = [run for run in planned if checked[run.name][0] is None]
    terminal.note(f"sweep: {len(planned):,} runs, {len(planned) - len(left):,} already finished")
    failed: dict[str, int] = {}
    folder.mkdir(parents=True, exist_ok=True)
    started: list[tuple[Path, int]] = []  # log of a run, and its size before the run
    progress = Progress("sweep", len(planned), "runs", done=len(planned) - len(left))
    progress.get_detail = lambda: progress_in_log(*started[-1]) if started else ""
    with SignalForwarder() as forwarder, progress:
        for number, run in enumerate(left, len(planned) - len(left) + 1):
            command = [run.command, *run.arguments]
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
            started.append((log, size))
            code = forwarder.run_command([sys.executable, "-m", "xtk", *command], log)
            if forwarder.received_signal and (code or run is not left[-1]):
                if forwarder.received_signal == signal.SIGINT:
                    raise KeyboardInterrupt
                raise _stopped(run, signal.Signals(forwarder.received_signal).name)
            if code == os.EX_TEMPFAIL:
                raise _stopped(run, "the run was stopped by a signal" if deadline is None else "--max-seconds is over")
            progress.advance(1)
            if code:
                failed[run.name] = code
                terminal.error(_failure(run, code, log, size))
            else:
                terminal.note(f"sweep: {run.name}: finished in {terminal.format_duration(time.monotonic() - begun)}")
    return failed


def progress_in_log(log: Path, start: int) -> str:
    """Return the last progress of a run (`this run: 40/60 steps  12s left`) from its log after `start` bytes."""
    try:
        with log.open("rb") as stream:
            stream.seek(max(start, log.stat().st_size - PROGRESS_BYTES))
            lines = stream.read().decode("utf-8", "replace").split("\n")
    except OSError:  # the log was moved or deleted during the run
        return ""
    last = next((line for line in reversed(lines[:-1]) if line.startswith("distill")), "")  # either command
    return last and f"this run: {last.partition(': ')[2]}"


def _stopped(run: PlannedRun, why: str) -> Exception:
    from xtk.errors import ResumableStop

    return ResumableStop(f"the sweep was stopped in run {run.name}: {why}", where=str(run.folder.parent),
                   hint="run the same command again to resume")  # fmt: skip


def _failure(run: PlannedRun, code: int, log: Path, size: int) -> Any:
    """Return the error of a failed run, with the error or the last lines of its log after `size` bytes."""
    from xtk.errors import XtkError

    with log.open("rb") as stream:
        stream.seek(size)
        lines = stream.read().decode("utf-8", "replace").rstrip().split("\n")
    own = next((at for at in reversed(range(len(lines))) if lines[at].startswith("xtk")), 0)
    last = lines[own:][-MAX_ERROR_LINES:]
    how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
    return XtkError("\n    ".join([f"the run {run.name} failed with {how}", *last]), where=str(log))


def run_record(run: PlannedRun, varies: dict[str, str], exit_code: int) -> dict[str, Any]:
    """Return the JSON record of a run with the exit code of its command, and its options that differ between runs."""
    from xtk.commands.sweep_plan import name_run_in_error
    from xtk.errors import CorruptError
    from xtk.runs.folder import METRICS_FILE, read_run_manifest
    from xtk.runs.metrics_file import read_metrics

    entry: dict[str, Any] = {"path": str(run.folder), "kind": "student", "name": run.name, "varied_options": varies}
    if exit_code:
        return {**entry, "state": "failed", "exit_code": exit_code, "log": str(run_log_path(run))}
    content = read_run_manifest(run.folder)
    metrics = dict(content.get("metrics", {}))
    if "best" in content:  # the best evaluation is the student
        metrics["eval_bits_per_byte"] = content["best"]["eval_bits_per_byte"]
    try:
        lines = read_metrics(run.folder / METRICS_FILE)
    except CorruptError as error:  # the student is complete; only its speed is unknown
        terminal.error(name_run_in_error(run.name, error))
        lines = []
    metrics |= {"steps": content["steps"], "training_seconds": total_seconds(lines) if lines else math.nan}
    rates = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
    # The median, since the first one includes compilation.
    metrics["tokens_per_second"] = statistics.median(rates or [math.nan])
    figures = {name: metrics[name] for name in COLUMN_TITLES if math.isfinite(metrics.get(name, math.nan))}
    return {**entry, "state": "finished", **figures, "metrics": content["metrics"]}


def run_log_path(run: PlannedRun) -> Path:
    """Return the path of a run's log."""
    return run.folder.with_name(f"{run.name}.log")


def _is_log(path: Path) -> bool:
    with path.open("rb") as stream:
        start = stream.read(len(LOG_PREFIX) + 4)
    return not start or start == f"{LOG_PREFIX}xtk ".encode()


def total_seconds(metrics: Sequence[Mapping[str, Any]]) -> float:
    """Return the seconds of a run, over all processes that went on with it: each counts from its own beginning."""
    seconds = [line["training_seconds"] for line in metrics if "training_seconds" in line]
    ends = [now for now, after in zip(seconds, [*seconds[1:], -math.inf], strict=True) if after < now]
    return float(sum(ends))


def add_seed_means(records: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the records grouped by options other than the seed, and add `seed_means` to those of several seeds.

    They are the mean of each figure and its standard error, None of a single run.
    """
    groups: dict[tuple[tuple[str, str], ...], list[dict[str, Any]]] = {}
    for record in records:
        key = tuple((name, value) for name, value in record["varied_options"].items() if name != SEED_OPTION)
        groups.setdefault(key, []).append(record)
    for group in groups.values():
        finished = [record for record in group if record["state"] == "finished"]
        means: dict[str, Any] = {"runs": len(finished)}
        for name in COLUMN_TITLES:
            if values := [record[name] for record in finished if name in record]:
                error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
                means[name] = {"mean": statistics.fmean(values), "standard_error": error}
        for record in group if len(group) > 1 else ():
            record["seed_means"] = means
    return list(groups.values())


def sweep_table(records: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the heads and rows of the table: a row for all seeds of one recipe, or for one run."""
    rows = []
    names = [name for name in records[0]["varied_options"] if name != SEED_OPTION]
    for group in add_seed_means(records):
        first = group[0]
        finished = [record for record in group if record["state"] == "finished"]
        seeds = " ".join(record["varied_options"].get(SEED_OPTION, "") for record in finished)
        figures = [_figure(first.get("seed_means", first).get(name), name) for name in COLUMN_TITLES]
        failed = len(group) - len(finished)
        varied = [first["varied_options"][name] for name in names]
        rows.append([*varied, seeds, *figures, f"{failed} failed" if failed else ""])
    return [*names, SEED_OPTION, *COLUMN_TITLES.values(), "state"], rows


def _figure(value: Any, name: str) -> str:
    """Return a number, or a mean with its standard error, as text."""
    if value is None:
        return ""
    shown = ",.0f" if name in INTEGER_METRICS else ".4f"
    mean, error = (value["mean"], value["standard_error"]) if isinstance(value, dict) else (value, None)
    if not error:
        return f"{mean:{shown}}"
    return f"{mean:{shown}} ± " + (f"{error:{shown}}" if error >= MIN_SHOWN_ERROR else f"{error:.0e}")
