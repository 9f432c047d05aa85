"""The runs of a sweep: which command lines of `xtk distill` it stands for, what they are called, what is wrong."""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from xtk.commands.distill import distill, read_request
from xtk.commands.reading import Command, name_of
from xtk.errors import XtkError
from xtk.lookup import unknown

# What the sweep says itself.
NOT_VARIED = ("output", "help", "json", "quiet", "force", "max-seconds")
_UNSAFE = re.compile(r"[^\w.+=-]+", re.ASCII)
LONGEST_NAME = 150


@dataclass(frozen=True)
class PlannedRun:
    """One run of a sweep.

    Attributes:
        name: of its folder in that of the sweep.
        folder: where it goes.
        arguments: of `xtk distill`, with `-o`.
        given: the same as its options, by the names of the parameters of the command.
        place: "FILE, line N: ", where it is from a list; how errors of it begin.
    """

    name: str
    folder: Path
    arguments: tuple[str, ...]
    given: dict[str, Any]
    place: str = ""

    @property
    def options(self) -> dict[str, Any]:
        """What was given, but for the folder."""
        return {name: value for name, value in self.given.items() if name != "output"}


@dataclass(frozen=True)
class _Part:
    """What one line, or one value, adds to a command line: words in front of it, words behind it, and to its name.

    A line has a `where`: its file and number.
    """

    name: str = ""
    front: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    where: str = ""


@functools.cache
def _command() -> Any:
    """Return the command line of `xtk distill`, which gives what it read instead of training."""

    @functools.wraps(distill)
    def read(**given: Any) -> dict[str, Any]:
        return given

    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(cls=Command)(read)
    return typer.main.get_command(app)


def _options() -> dict[str, Any]:
    """Return the parameters of `xtk distill`, by what a configuration file calls them."""
    return {name_of(parameter): parameter for parameter in _command().params}


def plan(
    arguments: Sequence[str], lines: Sequence[tuple[str, str]], vary: Sequence[str], folder: Path
) -> list[PlannedRun]:
    """Return the runs of a sweep: each line with each value of what varies, the last one the fastest.

    Args:
        arguments: of `xtk distill`, of all runs.
        lines: (where it stands, arguments of a run more).
        vary: `NAME=VALUE VALUE`, an option and its values; one that is named again gets more values.
        folder: of the sweep.

    Raises:
        XtkError: nothing varies, there is no such option, or two runs are one or have one name.
        typer.BadParameter: `xtk distill` would not take the options of a run.
    """
    if not lines and not vary:
        raise XtkError("nothing varies", hint="--vary 'seed=0 1 2', or --runs FILE with the arguments of a run a line")
    parts = [[_of_line(where, line) for where, line in lines]] if lines else []
    parts += [_of_option(name, values) for name, values in _read_vary(vary).items()]
    runs: dict[str, PlannedRun] = {}
    for chosen in itertools.product(*parts):
        name = _cut(",".join(part.name for part in chosen))
        place = "".join(f"{part.where}: " for part in chosen if part.where)
        front = [word for part in chosen for word in part.front]
        words = [*front, *arguments, *(word for part in chosen for word in part.words), "-o", str(folder / name)]
        if name in runs:
            raise XtkError(
                f"two runs are called {name}",
                where=f"{runs[name].place}{shlex.join(runs[name].arguments[:-2])} and {place}{shlex.join(words[:-2])}",
                hint="each value once; a line of --runs names its run by -o NAME",
            )
        runs[name] = run = PlannedRun(name, folder / name, tuple(words), _read(f"{place}{name}", words), place)
        same = next((one for one in runs.values() if one is not run and one.options == run.options), None)
        if same is not None:
            raise XtkError(
                f"{same.name} and {name} are one and the same run",
                where=f"{place}{shlex.join(words[:-2])}",
                hint="what varies is added to what all runs have: leave it out there",
            )
    return list(runs.values())


def _read(name: str, words: Sequence[str]) -> dict[str, Any]:
    """Return the options of a run as `xtk distill` reads them.

    Args:
        name: how errors call it.
        words: its command line.

    Raises:
        typer.BadParameter: it does not.
    """
    try:
        given = _command().main(args=list(words), prog_name="xtk distill", standalone_mode=False)
    except XtkError as wrong:
        raise of_run(name, wrong) from None
    except Exception as wrong:
        if not hasattr(wrong, "format_message"):
            raise
        raise typer.BadParameter(f"{name}: {wrong.format_message()}") from None
    if not isinstance(given, dict):
        raise typer.BadParameter(f"{name}: this asks for no run")
    if "-" in (given["student"], *given["cache"], *(given["projection"] or []), *(given["eval_data"] or [])):
        raise typer.BadParameter(f"{name}: a pipe is for what all runs have, on the command line of the sweep")
    if given["num_machines"] > 1:
        raise typer.BadParameter("a sweep is of one machine; --dry-run prints the commands to run on several")
    return given


def of_run(name: str, wrong: XtkError) -> XtkError:
    """Return an error that says of which run it is, by its name."""
    told = XtkError(f"{name}: {wrong.what}", where=wrong.where, hint=wrong.hint)
    told.exit_code = wrong.exit_code
    return told


def _read_vary(vary: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of each option that varies."""
    known = [name for name in _options() if name not in NOT_VARIED]
    found: dict[str, list[str]] = {}
    for text in vary:
        key, equals, values = text.partition("=")
        name = key.strip().replace("_", "-")
        if not equals:
            raise typer.BadParameter(f"--vary {text}: it is NAME=VALUE, or 'NAME=VALUE VALUE ...'")
        if name not in known:
            raise unknown("option of distill that can vary", key, known)
        words = _split(values, f"--vary {text}")
        if not words:
            raise typer.BadParameter(f"--vary {text}: {name} has no value")
        found.setdefault(name, []).extend(words)
    return found


def _split(text: str, where: str, *, comments: bool = False) -> list[str]:
    """Return the words of a text, as a shell has them."""
    try:
        return shlex.split(text, comments=comments)
    except ValueError as wrong:
        raise XtkError(f"this cannot be cut into words: {str(wrong).lower()}", where=where) from None


def _of_option(name: str, values: Sequence[str]) -> list[_Part]:
    """Return what each value of an option adds to a command line.

    Raises:
        typer.BadParameter: one of them is several values, and the option has one; or one of a flag is neither true nor
            false.
    """
    option = _options()[name]
    several = getattr(option, "multiple", False) or option.nargs == -1
    parts = []
    for value, short in zip(values, _shortened(values), strict=True):
        words = _split(value, f"--vary {name}={value}") if several else [value]
        front: tuple[str, ...] = ()
        if getattr(option, "is_flag", False):
            if value not in ("true", "false"):
                raise typer.BadParameter(f"--vary {name}={value}: it is true or false")
            words = option.opts[:1] if value == "true" else option.secondary_opts[:1]
        elif option.param_type_name != "argument":
            words = [part for word in words for part in _as_option(name, word)]
        elif not several:
            front, words = tuple(words), []
        parts.append(_Part(f"{name}={short}", front, tuple(words)))
    return parts


def _as_option(name: str, value: str) -> list[str]:
    return [f"--{name}={value}"] if value.startswith("-") else [f"--{name}", value]


def _of_line(where: str, line: str) -> _Part:
    """Return what a line of `--runs` adds to a command line; its name is told by `-o`, or made of all of it."""
    words, name, told = _split(line, where, comments=True), "", []
    if words[:2] == ["xtk", "distill"]:  # as --dry-run prints it
        del words[:2]
    options, kept, at = _options(), [], 0
    while at < len(words):
        key, equals, value = words[at].partition("=")
        long = key.startswith("--")
        option = options.get("output" if key == "-o" else key[2:].replace("_", "-") if long else "")
        taken = 1
        if option is not None and option.param_type_name == "option":
            if not equals and not getattr(option, "is_flag", False):
                value, taken = next(iter(words[at + 1 : at + 2]), ""), 2
            if name_of(option) == "output":
                name, at = ",".join(map(_safe, Path(value).name.split(","))).lstrip(".-"), at + taken
                continue
            told.append(f"{name_of(option)}={_safe(_last(value))}" if value else name_of(option))
        else:
            told.append(_safe(_last(words[at])) if not long else _safe(words[at][2:]))
        kept += words[at : at + taken]
        at += taken
    name = name or ",".join(told).lstrip(".-")
    if not name:
        raise XtkError("this line has no arguments", where=where)
    return _Part(name, words=tuple(kept), where=where)


def _shortened(values: Sequence[str]) -> list[str]:
    """Return values as parts of names of folders, each another one: the ends of paths, where they tell them apart."""
    for short in (lambda value: _safe("+".join(map(_last, value.split()))), _safe):
        found = [short(value) for value in values]
        if all(found) and len(set(found)) == len(set(values)):
            return found
    return [f"{_safe(value)}-{_hash(value)}" for value in values]


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _safe(text: str) -> str:
    """Return a text of letters that neither a shell nor a file system takes for something else."""
    return _UNSAFE.sub("-", text.strip("/")).rstrip("-")


def _cut(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}-{_hash(name)}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def varying(runs: Iterable[PlannedRun]) -> list[dict[str, str]]:
    """Return the options of each run that are not the same in all, as tables show them."""
    shown = [{name: _shown(value) for name, value in run.options.items()} for run in runs]
    names = [name for name in shown[0] if len({one[name] for one in shown}) > 1]
    return [{name.replace("_", "-"): one[name] for name in names} for one in shown]


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)


def finished(run: PlannedRun, *, force: bool) -> tuple[dict[str, Any] | None, bool]:
    """Open all that a run reads, and look for the run in its folder.

    Args:
        run: that is asked for.
        force: a run of another recipe in its folder is to be replaced.

    Returns:
        What the finished run wrote to `xtk.json`, None if there is something left to train; and whether what is in its
        folder is to be replaced.

    Raises:
        XtkError: inputs do not fit each other, or the folder holds other things, or a run of another recipe.
    """
    from xtk.commands.rerun import check_rerun, kept_options
    from xtk.tokens.tokenizer import Tokenizer
    from xtk.training.checkpoint import find_run
    from xtk.training.distill import identity_of, open_inputs
    from xtk.training.layout import read_layout

    try:
        places, recipe, reporting = read_request(run.given)
        layout = read_layout(recipe.parallel, run.given["num_processes"])
        inputs = open_inputs(places, recipe, Tokenizer(places.student))
        identity = identity_of(recipe, inputs, layout.data_ranks, reporting)
        check_rerun(run.given["config"], kept_options(run.given), identity)
        try:
            return find_run(run.folder, identity, force=False), False
        except XtkError:
            if not force:
                raise
            return find_run(run.folder, identity, force=True), True
    except XtkError as wrong:
        raise of_run(f"{run.place}{run.name}", wrong) from None


def piped_named(arguments: Sequence[str], piped: str) -> list[str]:
    """Return arguments in which what came through the pipe is named: runs have no pipe."""
    named: Mapping[str, str] = {"-": piped, "--projection=-": f"--projection={piped}"}
    return [named.get(argument, argument) for argument in arguments]
