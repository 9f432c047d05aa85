"""Parsing and comparison of final answers in completions: GSM8K, boxed, numbers."""

from __future__ import annotations

import re
from fractions import Fraction

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)\s*(?:[$€£¥]|USD|EUR)?\s*(?P<sign2>[-+]?)"
    rf"(?:(?P<whole>{_DIGITS})\s+(?P<up>\d+)/(?P<down>\d+)"
    rf"|(?P<decimal>{_DIGITS}(?:\.\d*)?|\.\d+)(?:[eE](?P<power>[-+]?\d{{1,3}}))?(?:\s*/\s*(?P<divisor>{_DIGITS}(?:\.\d+)?))?)"
    r"\s*(?:\\?%|°|[$€£¥]|[^\W\d_][^\W\d_ ]*(?: [^\W\d_]+){0,3})?"
)
_MARKUP = re.compile(r"\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}|\\[,;! ]|\\(?:left|right)(?![a-zA-Z])|\*\*|[`~]")
_FRACTION = re.compile(r"^([-+]?)\\[dt]?frac\s*(?:\{(\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d))$")


def answer_after_hashes(text: str) -> str | None:
    """Return the rest of the line after the last `####`; None without `####` (GSM8K)."""
    _, found, rest = text.rpartition("####")
    return rest.strip().partition("\n")[0].strip() if found else None


def last_boxed_content(text: str) -> str | None:
    r"""Return the content of the last complete `\boxed{...}` or `\fbox{...}`, or the word after `\boxed `; or None."""
    for match in reversed(list(re.finditer(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*", text))):
        rest = text[match.end() :]
        if not rest.startswith("{"):
            bare = re.match(r"[^\s{}$\\]+", rest)
            if bare:
                return bare[0]
            continue
        depth = 0
        for place, sign in enumerate(rest):
            escaped = place > 0 and rest[place - 1] == "\\"
            depth += 0 if escaped else (sign == "{") - (sign == "}")
            if depth == 0:
                return rest[1:place].strip()
    return None


def last_number_text(text: str) -> str | None:
    """Return the last number in a text, as written."""
    found = re.findall(rf"-?[$€£¥]?{_DIGITS}(?:\.\d+)?(?:/\d+)?%?", text)
    return found[-1] if found else None


def normalize_answer(text: str) -> str:
    """Return an answer without markup, outer punctuation, case and extra spaces, for string comparison."""
    text = _MARKUP.sub(lambda match: f" {match[1] or ''} ", text.replace("−", "-").replace("\\$", "$"))
    text = re.sub(r"\s+", " ", text).strip().strip("$").strip()
    return text.rstrip(".").strip().casefold()


def parse_number(text: str) -> Fraction | None:
    """Return the value of an answer: `1,234`, `$18.00`, `-3.`, `1/2`, `1 1/2`, `10%`, `5 apples`, `2e3`.

    A percent sign is ignored like other units: 10% is 10. None if the text is not exactly one number.
    """
    text = normalize_answer(text)
    fraction = _FRACTION.match(text)
    if fraction:
        sign, *parts = fraction.groups(default="")
        text = f"{sign}{parts[0] or parts[1]}/{parts[2] or parts[3]}"
    if len(text) > 400:
        return None
    found = _NUMBER.fullmatch(text)
    if not found or (found["sign"] and found["sign2"]):
        return None
    factor = Fraction(-1 if "-" in (found["sign"], found["sign2"]) else 1)
    try:
        if found["whole"]:
            return factor * (_parse_digits(found["whole"]) + Fraction(int(found["up"]), int(found["down"])))
        value = _parse_digits(found["decimal"]) * Fraction(10) ** int(found["power"] or 0)
        return factor * value / (_parse_digits(found["divisor"]) if found["divisor"] else 1)
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
