"""Reward `boxed`: compares the mathematical answer in the last box with the reference."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from xtk.errors import XtkError
from xtk.rewards.answer_parsing import (
    answer_after_hashes,
    last_boxed_content,
    normalize_answer,
    parse_number,
    without_lone_names,
)
from xtk.rewards.math_equality import MathComparer

COMPARISONS = ("math", "strings")


@dataclass(frozen=True)
class BoxedReward:
    r"""boxed: 1 if the content of the last `\boxed{...}` or `\fbox{...}` equals the reference, else 0.

    Numbers are compared as in `exact`, but units must be words or LaTeX text: `3x` is not 3. Words are compared as
    strings. Other answers with `compare=math` (the default): as formulas, by math-verify
    (`pip install '.[maths]'` in xtk's repository), in a subprocess with a time limit of `seconds` per comparison,
    after which the score is 0; with `compare=strings`: as strings, ignoring markup. Both ignore case, as math-verify
    does: `X` is `x`, and `\Delta` is `\delta`. The reference is the box in the row's field `column`, else the text
    after `####` there, else the whole field.
    """

    column: str = "answer"
    compare: str = "math"
    seconds: float = 5.0
    _symbols: MathComparer | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.compare not in COMPARISONS:
            raise XtkError(
                f"compare={self.compare!r} is not a comparison of --reward boxed",
                hint=f"use compare=VALUE, one of: {', '.join(COMPARISONS)}",
            )
        if self.compare == "math":
            if importlib.util.find_spec("math_verify") is None:
                raise XtkError(
                    "--reward boxed needs the package math-verify",
                    hint="run pip install '.[maths]' in xtk's repository, or use --reward boxed:compare=strings",
                )
            object.__setattr__(self, "_symbols", MathComparer(self.seconds))

    def __call__(self, completion: str, prompt: str, row: Mapping[str, Any]) -> float:
        """Return 1 or 0; nan if the row has no reference, or one that is not a formula."""
        if row.get(self.column) is None:
            return math.nan
        text = str(row[self.column])
        reference = last_boxed_content(text) or answer_after_hashes(text) or text.strip()
        if not reference:
            return math.nan
        answer = last_boxed_content(completion)
        if not answer:
            return 0.0
        left, right = (parse_number(one, in_formula=True) for one in without_lone_names(answer, reference))
        if left is not None and right is not None and left == right:
            return 1.0
        if _letters(answer) == _letters(reference):
            return 1.0
        if self._symbols is None or (_is_word(answer) and _is_word(reference)):
            return 0.0
        return self._symbols.equal(answer, reference)


def _is_word(text: str) -> bool:
    """Whether an answer is a word or a name, which computer algebra would take for a product: AB is BA."""
    plain = re.sub(r"\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}", r" \1 ", text).strip()
    is_marked = plain != text.strip()
    return re.fullmatch(r"[^\W\d_]{2,}", plain) is not None and (is_marked or len(plain) > 3 or not plain.islower())


def _letters(text: str) -> str:
    return (
        re.sub(r"(?<!\w) | (?!\w)", "", normalize_answer(text))
        .replace("\\dfrac", "\\frac")
        .replace("\\tfrac", "\\frac")
    )
