"""Fixtures of the projection tests: tokenizers of all families, and the required options of each method."""

from __future__ import annotations

import functools

import pytest
from projection_inputs import TEXTS

from xtk.projection.methods.cooccurrence import CooccurrenceCounter, CooccurrenceCounts, count_cooccurrences
from xtk.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer_of(families):
    return {name: Tokenizer(folder) for name, folder in families.items()}


@pytest.fixture(scope="session")
def cooccurrence_counts(tokenizer_of):
    """Return a function: (student, teacher) -> co-occurrence counts of TEXTS for this pair of families."""

    @functools.cache
    def count(student: str, teacher: str) -> CooccurrenceCounts:
        counter = CooccurrenceCounter(tokenizer_of[student], tokenizer_of[teacher])
        (*_, documents) = count_cooccurrences(counter, TEXTS)
        return counter.to_counts(documents, "sha256:0")

    return count


@pytest.fixture(scope="session")
def method_options(cooccurrence_counts):
    """Return a function: (method, student, teacher) -> the options that the method requires."""

    def options(method: str, student: str, teacher: str) -> dict[str, object]:
        if method == "cooccurrence":
            return {"counts": cooccurrence_counts(student, teacher)}
        return {}

    return options
