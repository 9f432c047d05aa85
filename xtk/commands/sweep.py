"""`xtk sweep`: several runs of `xtk distill` or `xtk distill-on-policy`, one after another."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import re
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer

from xtk import terminal
from xtk.commands.command_from_options import build_command, config_name, options_from_command_line
from xtk.commands.distill import distill, distill_on_policy, replace_piped_arguments
from xtk.commands.distill_options import DISTILL_COMMANDS, DistillOptions
from xtk.commands.usage_errors import usage_error
from xtk.errors import ResumableStop, XtkError
from xtk.name_registry import unknown_name_error
from xtk.options.declaration import CommandOptions, argument, declared_options, option, output_option
from xtk.options.shared import ForceOption, QuietOption
from xtk.options.spec_parsing import parse_pair

FUNCTIONS = {"distill": distill, "distill-on-policy": distill_on_policy}
# Set by the sweep itself.
FIXED_OPTIONS = ("output", "help", "json", "quiet", "force", "max-seconds")
MAX_NAME_LENGTH = 150
MAX_ERROR_LINES = 12
SEED_OPTION = "seed"
LOG_PREFIX = "$ "  # precedes the command of the run in its log
# Metrics shown in the table, and their column titles.
COLUMN_TITLES = {
    "steps": "steps",
    "loss": "loss",
    "ce": "ce",
    "reward": "reward",
    "eval_bits_per_byte": "bits per byte",
}
MIN_SHOWN_ERROR = 1e-4  # of errors that four decimals show


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
    command: str = option("distill", "Command of the runs.", choices=tuple(DISTILL_COMMANDS))
    vary: tuple[str, ...] = option(
        (),
        "Option of the command with its values, such as 'seed=0 1 2'; repeat it for all combinations. Quoted values: "
        "\"loss=alm 'ce byte-kl'\" runs --loss alm, then --loss ce --loss byte-kl.",
        metavar="NAME=VALUE...",
    )
    dry_run: bool = option(False, "Print the commands, for sh or GNU parallel, and run none.")
    max_seconds: float = option(
        0,
        "Time limit in seconds: then save a checkpoint and exit with code 75; 0: none. The same command resumes.",
        min=0,
    )
    as_json: bool = option(False, "Print one JSON object per run instead of the table.", flags=("--json",))


@dataclass(frozen=True)
class PlannedRun:
    """One run of a sweep: its name, output folder, command line after `xtk`, and options as the command parses them."""

    name: str
    folder: Path
    arguments: tuple[str, ...]
    options: DistillOptions

    @property
    def log(self) -> Path:
        """The file with its command and output."""
        return self.folder.with_name(f"{self.name}.log")


def sweep(options: SweepOptions) -> None:
    """Run distill or distill-on-policy with several settings, one after another.

    A failed run does not end the sweep. The same command resumes: finished runs stay, failed and unfinished ones are
    repeated. It prints a table of results at the end.

    Examples:
        xtk sweep ./student cache --vary 'loss=byte-kl alm' --vary 'seed=0 1 2' --max-steps 500 -o sweep
        xtk sweep ./student cache --vary 'seed=0 1 2' --dry-run -o sweep
    """
    deadline = time.monotonic() + options.max_seconds if options.max_seconds else math.inf
    from xtk.files.output import Output, OutputKind
    from xtk.parallel.graceful_stop import exit_resumable_on_signal
    from xtk.terminal_tables import print_table

    terminal.set_quiet(options.quiet)
    folder, common = Path(options.output), list(options.arguments)
    if {"-", "--projection=-"} & set(common):
        common = replace_piped_arguments(common, terminal.path_argument("-"))
    planned = plan_runs(common, options.vary, folder, options.command)
    if options.dry_run:
        limit = ["--max-seconds", f"{options.max_seconds:g}"] if options.max_seconds else []
        again = ["--force"] if options.force else []
        for run in planned:
            terminal.result_line_unescaped(shlex.join(["xtk", *run.arguments, *limit, *again]))
        return
    output = Output(folder, OutputKind[None]("a sweep", is_folder=True))
    if (folder / "recipe.json").is_file():
        raise XtkError(
            "the output folder is a run of xtk distill, not of a sweep", where=options.output, hint="use another -o"
        )
    for run in planned:
        Output(run.log, OutputKind[None]("the log of a run", _is_log, has_force=False)).find_finished()
    exit_resumable_on_signal()
    with output.lock():
        failed = _run_all(planned, deadline, force=options.force)
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


def plan_runs(
    arguments: Sequence[str], vary: Sequence[str], folder: Path, command: str = "distill"
) -> list[PlannedRun]:
    """Return the runs of a sweep: all combinations of varied values; the last option varies fastest.

    `vary`: `NAME=VALUE VALUE`, an option and its values; a repeated option gets more values.
    """
    if not vary:
        raise XtkError("--vary is missing", hint="add --vary 'seed=0 1 2'")
    parser = build_command(FUNCTIONS[command], command)
    runs: list[PlannedRun] = []
    equal: dict[str, str] = {}
    for chosen in itertools.product(*_varied_arguments(parser, vary)):
        name = ",".join(part for part, _, _ in chosen)
        if len(name) > MAX_NAME_LENGTH:
            name = f"{name[:MAX_NAME_LENGTH]}-{_hash(name)}"
        words = [word for _, before, _ in chosen for word in before]
        words += [*arguments, *(word for _, _, after in chosen for word in after), "-o", str(folder / name)]
        run = PlannedRun(name, folder / name, (command, *words), _parse(parser, command, name, words))
        if (same := equal.setdefault(repr(replace(run.options, output="")), name)) != name:
            raise XtkError(
                f"the runs {same} and {name} have the same options",
                where=shlex.join(words[:-2]),
                hint="remove one of them; an option of --vary must not also be among the arguments that all runs share",
            )
        if name.endswith(".log"):
            raise XtkError(f"the name of the run {name} ends in .log, as logs do", hint="vary another option last")
        runs.append(run)
    return runs


def _parse(parser: Any, command: str, name: str, words: Sequence[str]) -> DistillOptions:
    """Return the options of a run as its command parses them, without opening its inputs."""
    try:
        context = parser.make_context(f"xtk {command}", list(words))
        options: DistillOptions = options_from_command_line(DISTILL_COMMANDS[command], context.params)
    except XtkError as error:
        named = XtkError(f"{name}: {error.what}", where=error.where, hint=error.hint)
        named.exit_code = error.exit_code
        raise named from None
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        raise typer.BadParameter(
            f"xtk {command} refuses the options of the run {name}: {usage_error(error).what}"
        ) from None
    return options


def _varied_arguments(parser: Any, vary: Sequence[str]) -> list[list[tuple[str, list[str], list[str]]]]:
    """Return, for each varied option, (name, arguments before the shared ones, arguments after them) of its values."""
    parameters = {config_name(parameter): parameter for parameter in parser.params}
    known = [name for name in parameters if name not in FIXED_OPTIONS]
    values_of: dict[str, list[str]] = {}
    for text in vary:
        key, values = parse_pair(text, f"--vary {text}")
        name = key.replace("_", "-")
        if name not in known:
            raise unknown_name_error("option of --vary", name, known)
        words = _split_words(values, f"--vary {text}")
        if not words:
            raise typer.BadParameter(f"--vary {text}: {name} has no value; write values after =, such as {name}=VALUE")
        values_of.setdefault(name, []).extend(words)
    varied = []
    for name, listed in values_of.items():
        parts: dict[str, tuple[list[str], list[str]]] = {}
        for value in listed:
            # Characters that are special in shells or file systems become -; words of a list are joined by +.
            safe = re.sub(r"[^\w.+=-]+", "-", "+".join(value.strip("/").split()), flags=re.ASCII).rstrip("-")
            named = f"{name}={safe}"
            while named in parts:
                named += f"-{_hash(value)}"
            parts[named] = _arguments_of_value(parameters[name], name, value)
        varied.append([(named, before, after) for named, (before, after) in parts.items()])
    return varied


def _arguments_of_value(parameter: Any, name: str, value: str) -> tuple[list[str], list[str]]:
    """Return what a value of an option adds to a run: arguments before the shared ones, and after them."""
    if getattr(parameter, "is_flag", False):
        if value not in ("true", "false"):
            raise typer.BadParameter(f"--vary {name}={value}: the value must be true or false")
        return [], (parameter.opts if value == "true" else parameter.secondary_opts)[:1]
    several = getattr(parameter, "multiple", False) or parameter.nargs == -1
    words = _split_words(value, f"--vary {name}={value}") if several else [value]
    if parameter.param_type_name == "argument":
        return ([], words) if several else (words, [])
    return [], [part for word in words
                for part in ([f"--{name}={word}"] if word.startswith("-") else [f"--{name}", word])]  # fmt: skip


def _split_words(text: str, where: str) -> list[str]:
    """Return a text split into words as in a shell."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise XtkError(
            f"the arguments cannot be split into words: {str(error).lower()}", where=where, hint="close all quotes"
        ) from None


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def varying_options(runs: Sequence[PlannedRun]) -> list[dict[str, str]]:
    """Return, for each run, the options that differ between runs, as text."""
    names = [field.name for field, _ in declared_options(type(runs[0].options)) if field.name != "output"]
    shown = [{name: _format_option(getattr(run.options, name)) for name in names} for run in runs]
    varied = [name for name in names if len({texts[name] for texts in shown}) > 1]
    return [{name.replace("_", "-"): texts[name] for name in varied} for texts in shown]


def _format_option(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)


def _run_all(planned: Sequence[PlannedRun], deadline: float, *, force: bool) -> dict[str, int]:
    """Start the command of each run, and return the exit codes of failed runs by name."""
    from xtk.progress import Progress
    from xtk.runs.folder import RUN_MANIFEST
    from xtk.subprocesses import SignalForwarder

    # Finished runs last: their checks, of some seconds each, must not use the time of others.
    planned = sorted(planned, key=lambda run: (run.folder / RUN_MANIFEST).is_file())
    num_finished = sum((run.folder / RUN_MANIFEST).is_file() for run in planned)
    terminal.note(f"sweep: {len(planned):,} runs, {num_finished:,} already finished")
    failed: dict[str, int] = {}
    planned[0].folder.parent.mkdir(parents=True, exist_ok=True)

    def execute(run: PlannedRun, *more: str) -> tuple[int, XtkError | None]:
        """Run a command; return its exit code, and its error if it failed."""
        command = [*run.arguments, *more]
        if deadline < math.inf:
            if (seconds := deadline - time.monotonic()) <= 0:
                raise _stopped(run, "--max-seconds is over")
            command += ["--max-seconds", f"{seconds:.3f}"]
        with run.log.open("a", encoding="utf-8", errors="surrogateescape") as stream:
            stream.write(f"{LOG_PREFIX}{shlex.join(['xtk', *command])}\n")
        size = run.log.stat().st_size
        code = forwarder.run_command([sys.executable, "-m", "xtk", *command], run.log)
        if forwarder.received_signal and (code or run is not planned[-1]):
            if forwarder.received_signal == signal.SIGINT:
                raise KeyboardInterrupt
            raise _stopped(run, signal.Signals(forwarder.received_signal).name)
        if code == os.EX_TEMPFAIL:
            raise _stopped(run, "the run was stopped by a signal" if deadline == math.inf else "--max-seconds is over")
        return code, _failure(run, code, size) if code else None

    with SignalForwarder() as forwarder, Progress("sweep", len(planned), "runs") as progress:
        for number, run in enumerate(planned, 1):
            begun = time.monotonic()
            terminal.note(f"sweep: run {number:,} of {len(planned):,}: {run.name}, log: {run.log}")
            code, failure = execute(run)
            if force and failure is not None and "--force" in failure.what:  # the hint of an output of other options
                code, failure = execute(run, "--force")
            progress.advance(1)
            if failure is not None:
                failed[run.name] = code
                terminal.error(failure)
            else:
                terminal.note(f"sweep: {run.name}: finished in {terminal.format_duration(time.monotonic() - begun)}")
    return failed


def _stopped(run: PlannedRun, why: str) -> ResumableStop:
    return ResumableStop(f"the sweep was stopped in run {run.name}: {why}", where=str(run.folder.parent),
                         hint="run the same command again to resume")  # fmt: skip


def _failure(run: PlannedRun, code: int, size: int) -> XtkError:
    """Return the error of a failed run, with the error or the last lines of its log after `size` bytes."""
    with run.log.open("rb") as stream:
        stream.seek(size)
        lines = stream.read().decode("utf-8", "replace").rstrip().split("\n")
    own = next((at for at in reversed(range(len(lines))) if lines[at].startswith("xtk")), 0)
    last = lines[own:][-MAX_ERROR_LINES:]
    how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
    return XtkError("\n    ".join([f"the run {run.name} failed with {how}", *last]), where=str(run.log))


def _is_log(path: Path) -> bool:
    with path.open("rb") as stream:
        start = stream.read(len(LOG_PREFIX) + 4)
    return not start or start == f"{LOG_PREFIX}xtk ".encode()


def run_record(run: PlannedRun, varies: dict[str, str], exit_code: int) -> dict[str, Any]:
    """Return the JSON record of a run with the exit code of its command, and its options that differ between runs."""
    from xtk.runs.folder import read_run_manifest

    entry: dict[str, Any] = {"path": str(run.folder), "kind": "student", "name": run.name, "varied_options": varies}
    if exit_code:
        return {**entry, "state": "failed", "exit_code": exit_code, "log": str(run.log)}
    content = read_run_manifest(run.folder)
    metrics = {**content.get("metrics", {}), "steps": content["steps"]}
    if "best" in content:  # the best evaluation is the student
        metrics["eval_bits_per_byte"] = content["best"]["eval_bits_per_byte"]
    figures = {name: metrics[name] for name in COLUMN_TITLES if math.isfinite(metrics.get(name, math.nan))}
    return {**entry, "state": "finished", **figures, "metrics": content["metrics"]}


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
    shown = ",.0f" if name == "steps" else ".4f"
    mean, error = (value["mean"], value["standard_error"]) if isinstance(value, dict) else (value, None)
    if not error:
        return f"{mean:{shown}}"
    return f"{mean:{shown}} ± " + (f"{error:{shown}}" if error >= MIN_SHOWN_ERROR else f"{error:.0e}")
