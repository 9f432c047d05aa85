"""Reward `gsm8k`: compares the answer after `####` with the reference."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xtk.rewards.answer_parsing import answer_after_hashes, answers_match, last_boxed_content, last_number_text


@dataclass(frozen=True)
class Gsm8kReward:
    """gsm8k: 1 if the answer after the last `####` equals the reference, else 0, as in GSM8K.

    Numbers are compared by value: `1,234` is `1234`, `$18` is `18.00`, `0.5` is `1/2`, `10%` is `10`, `2 million` is
    `2000000`, `x = 18` and a box of 18 are `18`, and a unit after the number is ignored. Other answers are compared as
    strings, ignoring case. The reference is the text after `####` in the row's field `column`, or the whole field. With
    `last_number_fallback=true`, the last number is the answer of a completion without `####`.
    """

    column: str = "answer"
    last_number_fallback: bool = False

    def __call__(self, completion: str, prompt: str, row: Mapping[str, Any]) -> float:
        """Return 1 or 0; nan if the row has no reference."""
        if row.get(self.column) is None:
            return math.nan
        text = str(row[self.column])
        reference = answer_after_hashes(text) or text.strip()
        answer = answer_after_hashes(completion)
        if answer is None and self.last_number_fallback:
            answer = last_number_text(completion)
        if not reference:
            return math.nan
        reference, answer = last_boxed_content(reference) or reference, last_boxed_content(answer or "") or answer
        return float(answer is not None and answers_match(answer, reference))
