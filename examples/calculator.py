"""A calculator as an environment: a student that writes `<<48/2=` reads `24>>`, as in the annotations of GSM8K.

xtk rollout STUDENT questions.jsonl --environment examples/calculator.py:Calculator --stop = -o rollouts.jsonl
"""

from __future__ import annotations

import re
from fractions import Fraction

TOKEN = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+|[-+*/()])")
LONGEST = 200  # characters of an expression


class Calculator:
    """Returns the value of each `<<EXPRESSION=`, and nothing for other text."""

    role = "tool"

    def reset(self, record):
        """Begin without a first message; the prompt is complete."""
        self.page = ""

    def step(self, text):
        """Read what was written; return `VALUE>>`, and that the student goes on until it ends its text itself."""
        self.page += text
        found = re.search(r"<<([^<>=]*)=$", self.page)
        answer = "" if found is None else f"{calculated(found[1])}>>"
        self.page += answer
        return answer, False


def calculated(expression):
    """Return the value of an expression of + - * / and brackets, as GSM8K writes it; "?" for what is none."""
    try:
        if len(expression) > LONGEST:
            return "?"
        tokens = [*TOKEN.findall(expression.replace(",", "")), "end"]
        if "".join(tokens[:-1]) != re.sub(r"[\s,]", "", expression):
            return "?"
        value = _sum(tokens)
        if tokens != ["end"]:
            return "?"
        return str(value) if value.denominator == 1 else repr(round(float(value), 4))
    except (ValueError, ZeroDivisionError, OverflowError):
        return "?"


def _sum(tokens):
    value = _product(tokens)
    while tokens[0] in ("+", "-"):
        value += _product(tokens) if tokens.pop(0) == "+" else -_product(tokens)
    return value


def _product(tokens):
    value = _factor(tokens)
    while tokens[0] in ("*", "/"):
        value = value * _factor(tokens) if tokens.pop(0) == "*" else value / _factor(tokens)
    return value


def _factor(tokens):
    token = tokens.pop(0)
    if token in ("+", "-"):
        return _factor(tokens) if token == "+" else -_factor(tokens)
    if token == "(":
        value = _sum(tokens)
        if tokens.pop(0) != ")":
            raise ValueError("a bracket is not closed")
        return value
    return Fraction(token)  # a ValueError for a sign, and for the end
