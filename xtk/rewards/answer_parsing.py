"""Parsing and comparison of final answers in completions: GSM8K, boxed, numbers."""

from __future__ import annotations

import itertools
import math
import re
from fractions import Fraction

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)\s*(?:[$€£¥]|USD|EUR)?\s*(?P<sign2>[-+]?)"
    rf"(?:(?P<whole>{_DIGITS})\s+(?P<up>\d+)/(?P<down>\d+)"
    rf"|(?P<decimal>{_DIGITS}(?:\.\d*)?|\.\d+)(?:[eE](?P<power>[-+]?\d{{1,3}}))?(?:\s*/\s*(?P<divisor>{_DIGITS}(?:\.\d+)?))?)"
    r"(?:(?P<space>\s*)(?:\\?%|°|[$€£¥]|(?P<unit>[^\W\d_]+(?:[ /][^\W\d_]+){0,4})))?"
)
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_NO_UNITS = frozenset({"i", "e", "pi", "x", "y", "z", "n", "and", "or", "to"})  # parts of a formula, or of a list
_THIN_SPACES = re.compile(r"(?<=\d)(?:\\[,;!: ]|\{,\}|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))")
_NAME = re.compile(r"^[a-z]\w* ?= ?(?=[-+$€£¥.\d])")  # x = 18
_REMARK = re.compile(r"(?<=[\w%]) \([^\W\d_][^\W\d_ -]+(?:[ -][^\W\d_]+)*\)$")  # 18 (eighteen)
_LAST_NUMBER = re.compile(
    rf"(?:(?<![\w)])-)?[$€£¥]?(?:\d{{1,3}} \d+/\d+|{_DIGITS}(?:\.\d+)?|(?<![\d.])\.\d+)"
    r"(?:[eE][-+]?\d{1,3})?(?:/\d+)?%?"
)
_MARKUP = re.compile(r"\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}|\\[,;! ]|\\(?:left|right)(?![a-zA-Z])|\*\*|[`~]")
_FRACTION = re.compile(r"^([-+]?)\\[dt]?frac\s*(?:\{(\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d))$")


def answer_after_hashes(text: str) -> str | None:
    """Return the rest of the line after the last `####`; None without `####` (GSM8K)."""
    _, hashes, rest = text.rpartition("####")
    return rest.strip().partition("\n")[0].strip() if hashes else None


def last_boxed_content(text: str) -> str | None:
    r"""Return the content of the last complete `\boxed{...}` or `\fbox{...}`, or the word after `\boxed `; or None."""
    ends = _closing_braces(text)
    for match in reversed(list(re.finditer(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*", text))):
        start = match.end()
        if not text.startswith("{", start):
            bare = re.compile(r"[^\s{}$\\]+").match(text, start)
            if bare:
                return bare[0]
        elif start in ends:
            return text[start + 1 : ends[start]].strip()
    return None


def _closing_braces(text: str) -> dict[int, int]:
    """Return {place of an opening brace: place of its closing one}; escaped braces are none."""
    ends: dict[int, int] = {}
    opened: list[int] = []
    for match in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        if match[0] == "{":
            opened.append(match.start())
        elif match[0] == "}" and opened:
            ends[opened.pop()] = match.start()
    return ends


def last_number_text(text: str) -> str | None:
    """Return the last number in a text, as written."""
    numbers = _LAST_NUMBER.findall(without_thin_spaces(text.replace("−", "-")))
    return numbers[-1] if numbers else None


def without_thin_spaces(text: str) -> str:
    r"""Return a text with `10\,000` and `10{,}000` as `10000`."""
    return _THIN_SPACES.sub("", text)


def normalize_answer(text: str) -> str:
    """Return an answer without markup, outer punctuation, case and extra spaces, for string comparison."""
    text = without_thin_spaces(text.replace("−", "-").replace("\\$", "$"))
    text = _MARKUP.sub(lambda match: f" {match[1] or ''} ", text)
    text = re.sub(r"\s+", " ", text).strip().strip("$").strip()
    return text.rstrip(".").strip().casefold()


def without_lone_names(answer: str, reference: str) -> tuple[str, str]:
    """Return two answers without the name of a variable in front (`x = 3`) that only one of them has."""
    pair = normalize_answer(answer), normalize_answer(reference)
    named = [_NAME.match(text) is not None for text in pair]
    if named[0] == named[1]:
        return answer, reference
    return (_NAME.sub("", pair[0]), reference) if named[0] else (answer, _NAME.sub("", pair[1]))


def parse_number(text: str, *, in_formula: bool = False) -> Fraction | None:
    """Return the value of an answer: `1,234`, `$18.00`, `-3.`, `1/2`, `1 1/2`, `10%`, `5 apples`, `2e3`, `5 million`.

    A percent sign is ignored like other units: 10% is 10. None if the text is not exactly one number.
    `in_formula`: a letter after the number is a variable, not a unit, unless LaTeX marks it as text; names and remarks
    are part of the formula.
    """
    is_text = not in_formula or re.search(r"\\(?:text|mathrm|mbox)(?![a-zA-Z])", text) is not None
    text = normalize_answer(text)
    if not in_formula:
        text = _REMARK.sub("", _NAME.sub("", text))
    fraction = _FRACTION.match(text)
    if fraction:
        sign, *parts = fraction.groups(default="")
        text = f"{sign}{parts[0] or parts[1]}/{parts[2] or parts[3]}"
    if len(text) > 400:
        return None
    match = _NUMBER.fullmatch(text)
    if not match or (match["sign"] and match["sign2"]):
        return None
    words = re.split(r"[ /]", match["unit"] or "")
    is_variable = in_formula and match["unit"] and (not match["space"] or (len(words[0]) == 1 and not is_text))
    if is_variable or not _NO_UNITS.isdisjoint(words):
        return None
    factor = Fraction(-1 if "-" in (match["sign"], match["sign2"]) else 1) * math.prod(
        _SCALES[word] for word in itertools.takewhile(_SCALES.__contains__, words)
    )
    try:
        if match["whole"]:
            return factor * (_parse_digits(match["whole"]) + Fraction(int(match["up"]), int(match["down"])))
        value = _parse_digits(match["decimal"]) * Fraction(10) ** int(match["power"] or 0)
        return factor * value / (_parse_digits(match["divisor"]) if match["divisor"] else 1)
    except ZeroDivisionError:
        return None


def _parse_digits(digits: str) -> Fraction:
    return Fraction(digits.replace(",", "").rstrip("."))


def answers_match(answer: str, reference: str) -> bool:
    """Return whether two answers are equal as numbers, or as normalized strings."""
    left, right = parse_number(answer), parse_number(reference)
    if left is not None and right is not None:
        return left == right
    return normalize_answer(answer) == normalize_answer(reference) != ""
