"""Errors of command lines in the style of all others; what was probably meant: other names, order, kinds of paths."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from xtk.commands.help_format import value_name
from xtk.commands.path_kinds import (
    ADAPTER,
    CACHE,
    DATA,
    DATA_FOLDER,
    FILES_OF_A_FOLDER,
    GGUF,
    MODEL,
    PROJECTION,
    RUN,
    TOKENIZER,
    path_kind,
)
from xtk.errors import XtkError, path_exists
from xtk.name_registry import did_you_mean
from xtk.options.declaration import CommandOptions, declared_options, flag

ARGUMENTS = "xtk arguments"  # key of the context of a command: its arguments as given
MAX_KEPT_MESSAGE = 100
_MODELS = (MODEL, RUN, TOKENIZER, GGUF, ADAPTER)
_DATA = (DATA, DATA_FOLDER)
# By metavar of an argument or option: the kinds of paths that it takes, and how an error names them.
ACCEPTED_KINDS: dict[str, tuple[tuple[str, ...], str]] = {
    "STUDENT": (_MODELS, "a model"),
    "MODEL": (_MODELS, "a model"),
    "TEACHER": (_MODELS, "a model"),
    "TOKENIZER": (_MODELS, "a model or tokenizer"),
    "DRAFT": (_MODELS, "a model"),
    "TARGET": (_MODELS, "a model"),
    "CACHE": ((CACHE, *_DATA), "a teacher cache or data"),
    "DATA": ((CACHE, *_DATA), "data"),
    "DATA|CACHE": ((CACHE, *_DATA), "data or a teacher cache"),
    "PROMPTS": (_DATA, "data"),
    "PROJECTION": ((PROJECTION,), "a projection"),
    "PATH|auto": ((PROJECTION,), "a projection"),
    "RUN": ((RUN,), "a run of xtk distill"),
    "ARTIFACT": ((), ""),
}


def usage_error(failure: Any) -> XtkError:
    """Return a usage error of typer as an XtkError: what, and the command that helps."""
    context = failure.ctx
    command = context.command_path if context is not None else "xtk"
    help_hint = f"{command} --help"
    match type(failure).__name__:
        case "NoSuchOption":
            near = did_you_mean(failure.option_name, failure.possibilities or ())
            error = XtkError(f"no option called {failure.option_name}{near}", hint=None if near else f"{help_hint}-all")
        case "MissingParameter":
            error = _missing_parameter(failure, help_hint)
        case "BadOptionUsage":
            error = XtkError(_bad_usage(failure), hint=help_hint)
        case "BadParameter" if failure.param is not None:
            error = XtkError(_bad_value(failure), hint=help_hint)
        case _:
            text = failure.message.replace("Got unexpected extra argument(s)", "too many arguments:")
            hint = help_hint if context is not None and text != failure.message else None
            error = XtkError(_begin_small(text).removesuffix("."), hint=hint)
    error.exit_code = failure.exit_code
    return error


def _begin_small(text: str) -> str:
    """Return a message as part of a sentence; a name in capitals at its beginning keeps them."""
    return text if text[1:2].isupper() else text[:1].lower() + text[1:]


def _missing_parameter(failure: Any, help_hint: str) -> XtkError:
    """Return the error for an argument or option that was not given, with an example of the command."""
    parameter = failure.param
    name = parameter.metavar or parameter.name.upper()
    if parameter.param_type_name == "option":
        name = f"{parameter.opts[-1]} {name}"
    example = (failure.ctx.command.epilog or "").partition("\n")[0]
    return XtkError(f"{name} is missing", hint=f"for example: {example}" if example else help_hint)


def _bad_usage(failure: Any) -> str:
    if "requires an argument" not in failure.message:
        return f"{failure.option_name} takes no value"
    value = "value"
    for name, option, type_ in _declared(failure.ctx):
        if failure.option_name in (option.flags or (flag(name),)):
            value = f"value: {value_name(option, type_)}"
    return f"{failure.option_name} needs a {value}"


def _bad_value(failure: Any) -> str:
    """Return option, value and what it must be; typer's message has neither value nor limits in words."""
    name = failure.param.opts[-1] if failure.param.param_type_name == "option" else str(failure.param.metavar)
    given = next(filter(None, (value_of(failure.ctx.meta.get(ARGUMENTS, []), one) for one in failure.param.opts)), None)
    number = re.fullmatch(r"-?[\d.]+", given or "")
    value = "" if given is None else f" is {given if number else repr(given)}, but"
    for field, option, type_ in _declared(failure.ctx):
        if field == failure.param.name and type_ in (int, float, int | None, float | None):
            wanted = "a whole number" if type_ in (int, int | None) else "a number"
            return f"{name}{value} must be {wanted}" + (f" {option.limits}" if option.limits else "")
    return f"{name}{value or ':'} {_begin_small(failure.message)}"


def _declared(context: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, option, type) of the options of a command."""
    import typing

    kind = getattr(context.command, "kind", None) if context is not None else None
    types = typing.get_type_hints(kind) if kind else {}
    for field, option in declared_options(kind) if kind else ():
        yield field.name, option, types[field.name]


def explain(failure: XtkError, options: CommandOptions, command: str) -> None:
    """Change an error of a command into what was probably meant: swapped arguments, another kind of file, a sibling."""
    given = list(_path_values(options))
    text = f"{failure.what} {failure.where}"
    if swapped := _swapped(given):
        (one, first, first_kind), (other, second, second_kind) = swapped
        failure.what = f"{one} and {other} seem to be swapped: {first} is {first_kind}, {second} is {second_kind}"
        failure.where, failure.hint = None, f"xtk {command} {second} {first} ..."
        return
    for label, metavar, value in given:
        if value not in text and os.path.normpath(value) not in text:
            continue
        kinds, expected = ACCEPTED_KINDS[metavar]
        kind = path_kind(value)
        names_kind = kind is not None and kind.split()[1] in failure.what  # as "this is a model folder, not data"
        if kind is not None and kinds and kind not in kinds and not names_kind:
            failure.what, failure.where = f"{label} must be {expected}, but this is {kind}", value
            is_part = kind in FILES_OF_A_FOLDER.values()
            failure.hint = f"use its folder: {Path(value).parent}" if is_part else f"xtk inspect {value}"
            return
        if near := _neighbor(value):
            # The hub's errors are several sentences about networks.
            what = failure.what if len(failure.what) < MAX_KEPT_MESSAGE else f"{label} does not exist"
            failure.what, failure.where, failure.hint = f"{what}; did you mean {near}?", value, None
            return


def _path_values(options: CommandOptions) -> Iterator[tuple[str, str, str]]:
    """Yield (how an error names it, metavar, value) of arguments and options that take paths of known kinds."""
    for field, option in declared_options(type(options)):
        metavar = (option.metavar or "").strip("[]").split("[")[0].removesuffix("...")
        if metavar not in ACCEPTED_KINDS:
            continue
        values = getattr(options, field.name)
        for value in (values,) if isinstance(values, str) else values or ():
            if value not in ("", "-", "auto"):
                yield metavar if option.is_argument else flag(field.name), metavar, value


def _swapped(given: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """Return (label, value, kind) of two arguments of which each is what the other must be; [] if there are none."""
    known = [(label, value, path_kind(value), ACCEPTED_KINDS[metavar][0]) for label, metavar, value in given
             if label == metavar]  # fmt: skip
    for at, (label, value, kind, kinds) in enumerate(known):
        for other_label, other, other_kind, other_kinds in known[at + 1 :]:
            if kind is None or other_kind is None or kind in kinds or other_kind in other_kinds:
                continue
            if kind in other_kinds and other_kind in kinds:
                return [(label, value, kind), (other_label, other, other_kind)]
    return []


def _neighbor(value: str) -> str | None:
    """Return an existing path with a similar name in the same folder; None if the path exists, or none is similar."""
    import difflib

    path = Path(value)
    if path_exists(value) or not path_exists(str(path.parent)) or not path.parent.is_dir():
        return None
    names = [child.name for child in path.parent.iterdir() if not child.name.startswith(".")]
    # Names with the same ending are compared without it: x.jsonl is not like p.jsonl.
    ending = len(path.suffix)
    folded = {name.lower()[: len(name) - ending]: name for name in names if name.endswith(path.suffix)}
    near = difflib.get_close_matches(path.name.lower()[: len(path.name) - ending], list(folded), n=1, cutoff=0.75)
    return str(path.parent / folded[near[0]]) if near else None


def value_of(args: list[str], option: str) -> str | None:
    """Return the value of an option among arguments; None: it is not there."""
    for at, argument in enumerate(args):
        if argument == option and at + 1 < len(args):
            return args[at + 1]
        if argument.startswith(option + "="):
            return argument.partition("=")[2]
    return None
