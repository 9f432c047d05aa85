"""Declaration of options as dataclass fields: type, default, help, limits and effect in one place."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from xtk.errors import XtkError
from xtk.name_registry import unknown_name_error

T = TypeVar("T")
_KEY = "xtk"
REQUIRED: Any = dataclasses.MISSING
# What an option decides: the result of a run; which inputs it reads; only how fast it is computed; or neither.
RESULT, INPUTS, SPEED, REPORTING = "result", "inputs", "speed", "reporting"


@dataclass(frozen=True)
class Option:
    """A declared option."""

    help: str  # one phrase, or two
    metavar: str | None = None  # how help writes the value; None: the type
    min: float | None = None  # smallest legal value; None: none
    max: float | None = None  # largest legal value; None: none
    above: float | None = None  # every legal value is larger; None: none
    below: float | None = None  # every legal value is smaller; None: none
    choices: tuple[str, ...] = ()  # legal values of a text; (): any
    flags: tuple[str, ...] = ()  # names on the command line; (): `--field-name`
    is_argument: bool = False  # a positional argument instead of an option
    show_default: bool = True  # whether help shows the default
    comma_separated: bool = False  # a list that is one value on the command line; other lists are repeated options
    effect: str = RESULT  # RESULT, INPUTS, SPEED or REPORTING
    is_recorded: bool = True  # whether the recipe of a run has it; False for what belongs to one execution
    is_path: bool = False  # whether its values are paths, which recipes store as absolute ones
    identity_if_set: bool = False  # not in a run's identity at its default: it is newer than runs that may be resumed

    @property
    def limits(self) -> str:
        """The legal numbers in words: `at least 0 and below 1`; "" if all are."""
        pairs = {"at least": self.min, "above": self.above, "at most": self.max, "below": self.below}
        texts = {word: f"{int(value):,}" if float(value).is_integer() else f"{value:g}"
                 for word, value in pairs.items() if value is not None}  # fmt: skip
        return " and ".join(f"{word} {text}" for word, text in texts.items())

    def allows(self, value: float) -> bool:
        """Return whether a number is finite and within the limits."""
        return math.isfinite(value) and not (
            (self.min is not None and value < self.min)
            or (self.max is not None and value > self.max)
            or (self.above is not None and value <= self.above)
            or (self.below is not None and value >= self.below)
        )


def option(default: T, help: str, **details: Any) -> T:  # noqa: A002 (as in typer)
    """Return a dataclass field for an option; `default`: `REQUIRED` for none; `details`: attributes of `Option`."""
    field: T = dataclasses.field(default=default, metadata={_KEY: Option(help, **details)})
    return field


def output_option(help: str, metavar: str, default: Any = REQUIRED, **details: Any) -> Any:  # noqa: A002
    """Return a dataclass field for the option `--output` or `-o`; see `option`."""
    return option(default, help, flags=("--output", "-o"), metavar=metavar, **details)


def argument(default: T, help: str, *, metavar: str, **details: Any) -> T:  # noqa: A002
    """Return a dataclass field for a positional argument; see `option`."""
    return option(default, help, metavar=metavar, is_argument=True, **details)


def redeclared(kind: type, name: str, default: Any = ..., **details: Any) -> Any:
    """Return a field like an option of another dataclass; `details`: attributes of `Option` that differ."""
    field = kind.__dataclass_fields__[name]  # type: ignore[attr-defined]
    declared = dataclasses.replace(field.metadata[_KEY], **details)
    return dataclasses.field(default=field.default if default is ... else default, metadata={_KEY: declared})


def find_option(field: dataclasses.Field[Any]) -> Option | None:
    """Return the declaration of a field; None: it is not declared."""
    return field.metadata.get(_KEY)


def declared_options(kind: type) -> Iterator[tuple[dataclasses.Field[Any], Option]]:
    """Yield (field, option) of a dataclass: arguments, of bases first; then its own options; then those of bases."""
    order = [name for base in kind.__mro__ for name in inspect.get_annotations(base)]
    declared = [(field, field.metadata[_KEY]) for field in dataclasses.fields(kind) if _KEY in field.metadata]
    yield from sorted(declared, key=lambda pair: -1 if pair[1].is_argument else order.index(pair[0].name))


def options_of(kind: type[T], given: Any, **others: Any) -> T:
    """Return a dataclass with the values of those fields that `given` has, and of `others`, which come first."""
    names = [field.name for field in dataclasses.fields(kind) if field.init and hasattr(given, field.name)]  # type: ignore[arg-type]
    return kind(**{name: getattr(given, name) for name in names} | others)


def flag(name: str) -> str:
    """Return how the command line writes an option: `--max-steps`."""
    return "--" + name.replace("_", "-")


def check_options(options: Any) -> None:
    """Check the limits and choices of all options of a dataclass."""
    for field, declared in declared_options(type(options)):
        value, name = getattr(options, field.name), declared.metavar if declared.is_argument else flag(field.name)
        if declared.choices and value not in declared.choices:
            raise unknown_name_error(f"value of {name}", value, declared.choices)
        if isinstance(value, int | float) and not isinstance(value, bool) and not declared.allows(value):
            wanted = f"a number {declared.limits}" if declared.limits else "a finite number"
            message = f"{name} is {value}, but must be {declared.limits or wanted}"
            raise XtkError(message, hint=f"use {name} with {wanted}")


@dataclass(frozen=True)
class Heading:
    """Options that help lists under one heading."""

    title: str
    # Names of options, or dataclasses whose options are listed, in this order. An option that is named under one
    # heading is not listed with its dataclass under another.
    options: tuple[type | str, ...]


class CommandOptions:
    """Base class of the options of one command; all fields of a subclass are options."""

    HEADINGS: ClassVar[Sequence[Heading]] = ()  # what help lists under headings; all other options come last
    MAIN_OPTIONS: ClassVar[Sequence[str]] = ()  # names of the most used options, which --help lists; (): it lists all


def headings_of(headings: Sequence[Heading]) -> list[tuple[Heading, list[str]]]:
    """Return (heading, names of its options)."""
    named = {one for heading in headings for one in heading.options if isinstance(one, str)}

    def names(one: type | str) -> list[str]:
        return [one] if isinstance(one, str) else [f.name for f, _ in declared_options(one) if f.name not in named]

    return [(heading, [name for one in heading.options for name in names(one)]) for heading in headings]


def flags_of_set_options(options: CommandOptions, names: Sequence[str]) -> list[str]:
    """Return how the command line writes those options that differ from their defaults."""
    fields = type(options).__dataclass_fields__  # type: ignore[attr-defined]
    changed = [name for name in names if getattr(options, name) != fields[name].default]
    return [f"--no-{flag(name)[2:]}" if fields[name].default is True else flag(name) for name in changed]
