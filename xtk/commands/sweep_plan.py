"""Planning of a sweep: the command lines and names of its runs, and checks before the first one starts."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from xtk.commands.command_from_options import build_command, config_name
from xtk.commands.distill import read_configs
from xtk.commands.distill_options import DISTILL_COMMANDS, DistillOptions
from xtk.commands.usage_errors import usage_error
from xtk.errors import XtkError
from xtk.name_registry import unknown_name_error
from xtk.options.declaration import declared_options
from xtk.options.spec_parsing import parse_pair

# Set by the sweep itself.
FIXED_OPTIONS = ("output", "help", "json", "quiet", "force", "max-seconds")
MAX_NAME_LENGTH = 150
_UNSAFE = re.compile(r"[^\w.+=-]+", re.ASCII)
# Words of a shell up to a comment, which a number sign at the beginning of a word begins; `shlex` also takes others.
_BEFORE_COMMENT = re.compile(r"""(\\.|'[^']*'|"(\\.|[^"\\])*"|(?<=\S)#|[^'"\\#])*""", re.DOTALL)


@dataclass(frozen=True)
class PlannedRun:
    """One run of a sweep.

    Attributes:
        name: name of its folder inside the folder of the sweep.
        folder: its output folder.
        command: `distill` or `distill-on-policy`.
        arguments: its arguments, with `-o`.
        distill_options: its parsed options.
        source: "FILE, line N: " for a run of a --runs file, the prefix of its errors; "" otherwise.
    """

    name: str
    folder: Path
    command: str
    arguments: tuple[str, ...]
    distill_options: DistillOptions
    source: str = ""

    @property
    def options(self) -> dict[str, Any]:
        """The command, and its options without the output folder."""
        names = (option.name for option, _ in declared_options(type(self.distill_options)) if option.name != "output")
        return {"command": self.command, **{name: getattr(self.distill_options, name) for name in names}}


@dataclass(frozen=True)
class _Part:
    """What a line of --runs or a value of --vary adds to a run: arguments before and after the shared ones, and a name.

    A line also has a `source`: its file and number; and a `command`, if it begins with one.
    """

    name: str = ""
    words_before: tuple[str, ...] = ()
    words_after: tuple[str, ...] = ()
    source: str = ""
    command: str = ""


@functools.cache
def _command(name: str) -> Any:
    """Return the command line of `distill` or `distill-on-policy`; it returns the parsed options, without training."""

    def read(options: Any) -> Any:
        return options

    read.__annotations__["options"] = DISTILL_COMMANDS[name]
    return build_command(read, name)


def _distill_options(command: str) -> dict[str, Any]:
    """Return the parameters of a command by their names in configuration files."""
    return {config_name(parameter): parameter for parameter in _command(command).params}


def plan_runs(
    arguments: Sequence[str],
    lines: Sequence[tuple[str, str]],
    vary: Sequence[str],
    folder: Path,
    command: str = "distill",
) -> list[PlannedRun]:
    """Return the runs of a sweep: all combinations of lines and varied values; the last option varies fastest.

    Args:
        arguments: arguments for all runs.
        lines: (place, additional arguments of a run).
        vary: `NAME=VALUE VALUE`, an option and its values; a repeated option gets more values.
        command: `distill` or `distill-on-policy`, of runs whose line does not name it.

    Raises:
        typer.BadParameter: the command refuses the options of a run.
    """
    if not lines and not vary:
        raise XtkError(
            "--vary or --runs is missing",
            hint="add --vary 'seed=0 1 2', or --runs FILE with the arguments of one run per line",
        )
    parts = [[_of_line(where, line) for where, line in lines]] if lines else []
    parts += [_of_option(command, name, values) for name, values in _read_vary(command, vary).items()]
    runs: dict[str, PlannedRun] = {}
    equal: dict[str, str] = {}
    for chosen in itertools.product(*parts):
        place = "".join(f"{part.source}: " for part in chosen if part.source)
        words = [*(word for part in chosen for word in part.words_before), *arguments]
        words += [word for part in chosen for word in part.words_after]
        name = ",".join(part.name for part in chosen)
        if len(name) > MAX_NAME_LENGTH:
            name = f"{name[:MAX_NAME_LENGTH]}-{_hash(name)}"
        if name in runs:
            raise XtkError(
                f"two runs have the name {name}",
                where=f"{runs[name].source}{shlex.join(runs[name].arguments[:-2])} and {place}{shlex.join(words)}",
                hint="give each value once; in a --runs file, -o NAME names a run",
            )
        if name.endswith(".log"):
            raise XtkError(f"the name of the run {name} ends in .log, as logs do", where=place, hint="use another name")
        options = [*words, "-o", str(folder / name)]
        of_run = next((part.command for part in chosen if part.command), command)
        parsed = _parse_run(f"{place}{name}", of_run, options)
        run = PlannedRun(name, folder / name, of_run, tuple(options), parsed, place)
        same = equal.setdefault(repr(run.options), name)
        if same != name:
            raise XtkError(
                f"the runs {same} and {name} have the same options",
                where=f"{place}{shlex.join(words)}",
                hint="remove one of them; an option of --vary must not also be among the arguments that all runs share",
            )
        runs[name] = run
    return list(runs.values())


def _parse_run(name: str, command: str, words: Sequence[str]) -> DistillOptions:
    """Return the options of a run as its command parses them."""
    try:
        given = _command(command).main(args=list(words), prog_name=f"xtk {command}", standalone_mode=False)
    except XtkError as error:
        raise name_run_in_error(name, error) from None
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        raise typer.BadParameter(
            f"xtk {command} refuses the options of the run {name}: {usage_error(error).what}"
        ) from None
    if not isinstance(given, DistillOptions):
        raise typer.BadParameter(f"the run {name} has the argument --help; remove it")
    if "-" in (given.student, *given.cache, *given.projection, *given.eval_data):
        raise typer.BadParameter(
            f"the run {name} reads standard input (-); move - to the arguments that all runs share"
        )
    if given.num_machines > 1:
        raise typer.BadParameter(
            "a sweep runs on one machine; remove --num-machines. For several machines, print the commands "
            "with --dry-run and start each on one of them"
        )
    return given


def name_run_in_error(name: str, error: XtkError) -> XtkError:
    """Return an error with the name of its run as a prefix."""
    named = XtkError(f"{name}: {error.what}", where=error.where, hint=error.hint)
    named.exit_code = error.exit_code
    return named


def _read_vary(command: str, vary: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of each varied option."""
    known = [name for name in _distill_options(command) if name not in FIXED_OPTIONS]
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
    return values_of


def _split_words(text: str, where: str) -> list[str]:
    """Return a text split into words as in a shell."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise XtkError(
            f"the arguments cannot be split into words: {str(error).lower()}", where=where, hint="close all quotes"
        ) from None


def _of_option(command: str, name: str, values: Sequence[str]) -> list[_Part]:
    """Return what each value of an option adds to a run."""
    option = _distill_options(command)[name]
    several = getattr(option, "multiple", False) or option.nargs == -1
    parts: list[_Part] = []
    for value in values:
        words = _split_words(value, f"--vary {name}={value}") if several else [value]
        front: tuple[str, ...] = ()
        if getattr(option, "is_flag", False):
            if value not in ("true", "false"):
                raise typer.BadParameter(f"--vary {name}={value}: the value must be true or false")
            words = option.opts[:1] if value == "true" else option.secondary_opts[:1]
        elif option.param_type_name != "argument":
            words = [part for word in words for part in _as_option(name, word)]
        elif not several:
            front, words = tuple(words), []
        named = f"{name}={_safe(value)}"
        named += f"-{_hash(value)}" if any(part.name == named for part in parts) else ""
        parts.append(_Part(named, front, tuple(words)))
    return parts


def _as_option(name: str, value: str) -> list[str]:
    return [f"--{name}={value}"] if value.startswith("-") else [f"--{name}", value]


def _of_line(where: str, line: str) -> _Part:
    """Return what a line of `--runs` adds to a run; the run's name comes from `-o`, or from all arguments."""
    match = _BEFORE_COMMENT.match(line)
    end = match.end() if match else 0
    words, name, command = _split_words(line[:end] if line[end : end + 1] == "#" else line, where), "", ""
    if words[:1] == ["xtk"] and words[1:2] and words[1] in DISTILL_COMMANDS:  # as --dry-run prints it
        command = words[1]
        del words[:2]
    words = [part for word in words for part in (("-o", word[9:]) if word.startswith("--output=") else (word,))]
    for at in reversed(range(len(words))):
        if words[at] in ("-o", "--output"):
            name = name or "".join(words[at + 1 : at + 2])
            del words[at : at + 2]
    named = "".join(
        f"={word}" if before.startswith("--") and not word.startswith("--") else f",{word.lstrip('-')}"
        for before, word in zip(["", *words], words, strict=False)
    )
    name = ",".join(map(_safe, (Path(name).name or named).split(","))).lstrip(".-,")
    if not name:
        raise XtkError(
            "a line of the --runs file has no arguments from which the run can get its name",
            where=where,
            hint="add options to the line, or -o NAME",
        )
    return _Part(name, words_after=tuple(words), source=where, command=command)


def _safe(text: str) -> str:
    """Return a text without characters that are special in shells or file systems; a list of words is joined by +."""
    return _UNSAFE.sub("-", "+".join(text.strip("/").split())).rstrip("-")


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def varying_options(runs: Iterable[PlannedRun]) -> list[dict[str, str]]:
    """Return, for each run, the options that differ between runs, as text."""
    shown = [{name: _format_option(value) for name, value in run.options.items()} for run in runs]
    known = dict.fromkeys(name for texts in shown for name in texts)
    names = [name for name in known if len({texts.get(name) for texts in shown}) > 1]
    return [{name.replace("_", "-"): texts.get(name, "") for name in names} for texts in shown]


def _format_option(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)


def find_finished_run(run: PlannedRun, *, force: bool) -> tuple[dict[str, Any] | None, bool]:
    """Check the inputs of a run; return its `xtk.json` (None: unfinished), and whether to replace its folder."""
    from xtk.commands.recorded_run_options import check_rerun, recipe_options
    from xtk.files.output import Output
    from xtk.parallel.parallel_config import parse_parallel
    from xtk.runs.resume_point import RUN_FOLDER, check_evaluation
    from xtk.text.tokenizer import Tokenizer
    from xtk.training.distill import evaluation_identity, run_identity
    from xtk.training.kinds.open_inputs import open_inputs

    try:
        places, recipe, reporting = read_configs(run.distill_options)
        layout = parse_parallel(recipe.parallel, run.distill_options.num_processes)
        inputs = open_inputs(places, recipe, Tokenizer(places.student.folder, start_token=recipe.start_token))
        identity = run_identity(recipe, inputs, layout.num_data_shards, reporting)
        check_rerun(run.distill_options, recipe_options(run.distill_options), identity)
        try:
            output = Output(run.folder, RUN_FOLDER)
            if (finished := output.find_finished(identity)) is not None:
                with contextlib.suppress(XtkError), output.lock():  # removes the lock of a killed process
                    pass
            check_evaluation(run.folder, evaluation_identity(inputs, reporting), is_finished=finished is not None)
            return finished, False
        except XtkError:
            if not force:
                raise
            return None, True
    except XtkError as error:
        raise name_run_in_error(f"{run.source}{run.name}", error) from None
