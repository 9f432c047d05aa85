"""What the tests of projections share: tokenizers of all families, and what each method needs beside them."""

from __future__ import annotations

import functools

import pytest
from projection_inputs import TEXTS, embedding_of

from xtk.projection.methods.cooccurrence import CooccurrenceCounter, CooccurrenceCounts, count_cooccurrences
from xtk.tokens.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer_of(families):
    return {name: Tokenizer(folder) for name, folder in families.items()}


@pytest.fixture(scope="session")
def counted(tokenizer_of):
    """Counts of some texts for a pair of families."""

    @functools.cache
    def count(student: str, teacher: str) -> CooccurrenceCounts:
        counter = CooccurrenceCounter(tokenizer_of[student], tokenizer_of[teacher])
        (*_, documents) = count_cooccurrences(counter, TEXTS)
        return counter.to_counts(documents, "sha256:0")

    return count


@pytest.fixture(scope="session")
def options_of(tokenizer_of, counted):
    """Return the options that a method cannot do without."""

    def options(method: str, student: str, teacher: str) -> dict[str, object]:
        if method == "cooccurrence":
            return {"counts": counted(student, teacher)}
        if method == "embedding":
            return {f"{side}_embedding": embedding_of(tokenizer_of[name], size)
                    for side, name, size in (("student", student, 12), ("teacher", teacher, 16))}  # fmt: skip
        return {}

    return options
