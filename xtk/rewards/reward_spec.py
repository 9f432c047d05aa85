"""Parses `--reward NAME:key=value,...` and `--reward FILE.py:FUNCTION`; sums weighted rewards."""

from __future__ import annotations

import contextlib
import copy
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xtk.errors import XtkError, path_exists
from xtk.files.atomic_files import sha256_of_file
from xtk.name_registry import load_registered, unknown_name_error
from xtk.options.spec_parsing import OptionSpec, from_pairs, option_names, parse_pairs, parse_weight
from xtk.rewards import REWARDS
from xtk.user_code import load_user_object, user_code_errors

RewardFunction = Callable[[str, str, Mapping[str, Any]], float]

LARGEST = 3.4e38  # maximum absolute value of a reward: the range of float32
_FUNCTION = re.compile(r"(?P<place>.+\.py:[^\W\d]\w*)(:(?P<options>.*))?", re.DOTALL)
# Paths of files in the specification of a reward or environment.
_USER_FILE = re.compile(r"^.+\.py(?=:)|(?<=[:,]schema=)[^,]+", re.DOTALL)


@dataclass(frozen=True)
class RewardSpec(OptionSpec):
    """Specification of a reward; its name is a key of `REWARDS`, or `FILE.py:FUNCTION`."""

    def load_reward(self) -> RewardFunction:
        """Return the reward function; imports a user's function."""
        if self.name not in REWARDS:
            reward: RewardFunction = load_user_object(self.name, "--reward FILE.py:FUNCTION", "function")
            return reward
        rule = load_registered(REWARDS, self.name, "reward")
        judge: RewardFunction = from_pairs(rule, self.options, f"the reward {self}")
        return judge


def paths_as_checksums(text: str) -> str:
    """Return `FILE.py:NAME`, or a reward with `schema=FILE`, with file paths replaced by file name and checksum."""

    def named(match: re.Match[str]) -> str:
        path = Path(match[0])
        is_file = path_exists(match[0]) and path.is_file()
        return f"{path.name}@{sha256_of_file(path)}" if is_file else match[0]

    return _USER_FILE.sub(named, text)


def parse_reward(text: str) -> RewardSpec:
    """Parse `gsm8k`, `boxed:weight=0.5`, `score.py:polite`, ....

    A comma separates options only before a known option name and `=`, so patterns may contain commas.
    """
    own = _FUNCTION.fullmatch(text)
    name, options = (own["place"], own["options"] or "") if own else text.partition(":")[::2]
    if not own and name not in REWARDS:
        raise unknown_name_error("reward", name, [*REWARDS, "FILE.py:FUNCTION"])
    known = ["weight", *([] if own else option_names(load_registered(REWARDS, name, "reward")))]
    noun = f"option of the reward {name}"
    pairs = dict(parse_pairs(options, f"--reward {text}", known, noun=noun, values_have_commas=True))
    weight = parse_weight(pairs.pop("weight"), name, "reward") if "weight" in pairs else 1.0
    return RewardSpec(name, weight, tuple(sorted(pairs.items())))


@contextlib.contextmanager
def name_row_in_errors(number: int) -> Iterator[None]:
    """Add the number of the data row, counted from 0, to errors."""
    try:
        yield
    except XtkError as error:
        where = f"row {number} of the data" + (f"; {error.where}" if error.where else "")
        raise XtkError(error.what, where=where, hint=error.hint) from error


@dataclass
class WeightedRewards:
    """Weighted sum of several rewards."""

    specs: Sequence[RewardSpec]
    unscored: dict[str, int] = field(default_factory=dict)  # number of completions that each reward could not score

    def __post_init__(self) -> None:
        texts = [str(specification) for specification in self.specs]
        if repeated := sorted({text for text in texts if texts.count(text) > 1}):
            raise XtkError(
                f"the reward {repeated[0]} is given twice", hint="give it once, with a weight: --reward NAME:weight=2"
            )
        self._rewards = [(specification, specification.load_reward()) for specification in self.specs]

    def __call__(self, completion: str, prompt: str, row: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
        """Return the weighted sum of the rewards that could be computed, nan if none could; and each one by name."""
        values: dict[str, float] = {}
        for specification, reward in self._rewards:
            values[str(specification)] = value = _checked_score(reward, specification, completion, prompt, row)
            if math.isnan(value):
                self.unscored[str(specification)] = self.unscored.get(str(specification), 0) + 1
        pairs = zip(self.specs, values.values(), strict=True)
        judged = [specification.weight * value for specification, value in pairs if not math.isnan(value)]
        return sum(judged) if judged else math.nan, values

    def can_score(self, row: Mapping[str, Any]) -> bool:
        """Return whether any reward may score completions of a row, as far as the row's fields show."""
        return any(_can_judge(reward, specification, row) for specification, reward in self._rewards)


def _can_judge(reward: RewardFunction, specification: RewardSpec, row: Mapping[str, Any]) -> bool:
    if specification.name not in REWARDS:  # only called with completions: a user's function may do anything
        return True
    if hasattr(reward, "can_score"):
        return bool(reward.can_score(row))
    return not math.isnan(_checked_score(reward, specification, "", "", row))


def float_of_reward(value: Any) -> float | None:
    """Return a reward as a float: numbers of any library, infinity beyond the range of floats. None: not a number."""
    try:
        return None if isinstance(value, str | bytes) else float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError, RuntimeError):
        return None


def _checked_score(
    reward: RewardFunction, specification: RewardSpec, completion: str, prompt: str, row: Mapping[str, Any]
) -> float:
    where, hint = f"completion {completion[:80]!r}", "return a number, or nan or None if it cannot be scored"
    # A user's function may change its arguments; other rewards and the rollout file read the row too.
    given = row if specification.name in REWARDS else copy.deepcopy(row)
    with user_code_errors(f"the reward {specification}", where=where, hint=hint):
        value: Any = reward(completion, prompt, given)
        shown = repr(value)[:80]
        if value is None:
            return math.nan
        number = float_of_reward(value)
    if number is None or abs(number) > LARGEST:
        failure = "not a number" if number is None else "not finite in float32"
        raise XtkError(f"--reward {specification} returned {shown}, which is {failure}", where=where, hint=hint)
    return number
