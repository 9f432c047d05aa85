"""boxed: mathematics in a box."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from xtk.errors import XtkError
from xtk.rewards.answer_parsing import answer_after_hashes, last_boxed_content, normalize_answer, parse_number
from xtk.rewards.math_equality import MathComparer

COMPARISONS = ("math", "strings")


@dataclass(frozen=True)
class BoxedReward:
    r"""boxed: 1 if what the last `\boxed{...}` or `\fbox{...}` holds equals the reference, else 0.

    Numbers are compared as in `exact`. Everything else with `compare=math`: as mathematics, by math-verify
    (`pip install 'xtk[maths]'`), in a process apart that is killed after `seconds` for a comparison, which is then 0;
    or with `compare=strings`: letter by letter, without markup and case. The reference is the box in the row's field
    `column`, or what stands after `####` there, or the whole of it.
    """

    column: str = "answer"
    compare: str = "math"
    seconds: float = 5.0
    _symbols: MathComparer | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.compare not in COMPARISONS:
            raise XtkError(f"no comparison called {self.compare!r}", hint=f"one of: {', '.join(COMPARISONS)}")
        if self.compare == "math":
            if importlib.util.find_spec("math_verify") is None:
                raise XtkError(
                    "the reward boxed needs math-verify",
                    hint="pip install 'xtk[maths]', or --reward boxed:compare=strings",
                )
            object.__setattr__(self, "_symbols", MathComparer(self.seconds))

    def __call__(self, completion: str, prompt: str, row: Mapping[str, Any]) -> float:
        """Judge one completion; nan if the row has no reference, or one that is no mathematics."""
        if row.get(self.column) is None:
            return math.nan
        text = str(row[self.column])
        reference = last_boxed_content(text) or answer_after_hashes(text) or text.strip()
        if not reference:
            return math.nan
        answer = last_boxed_content(completion)
        if not answer:
            return 0.0
        left, right = parse_number(answer), parse_number(reference)
        if left is not None and right is not None and left == right:
            return 1.0
        if _letters(answer) == _letters(reference):
            return 1.0
        if self._symbols is None:
            return 0.0
        return self._symbols.equal(answer, reference)


def _letters(text: str) -> str:
    return (
        re.sub(r"(?<!\w) | (?!\w)", "", normalize_answer(text))
        .replace("\\dfrac", "\\frac")
        .replace("\\tfrac", "\\frac")
    )
