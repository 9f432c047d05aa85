"""Alignment of different texts: the dynamic program, its anchors, and the runs."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis_texts import TEXTS, quick

from xtk.text.different_text_alignment import longest_common_runs, matching_runs

FEW_LETTERS = st.text("abc", max_size=14)
SUFFICIENT_LIMIT = 64


def code_points(text: str) -> np.ndarray:
    return np.array([ord(letter) for letter in text], np.int32)


def longest_common_length(one: str, other: str) -> int:
    """Return the length of the longest common subsequence (reference implementation: the table of all prefixes)."""
    previous_row = [0] * (len(other) + 1)
    for letter in one:
        row = [0]
        for index, other_letter in enumerate(other):
            row.append(previous_row[index] + 1 if letter == other_letter else max(previous_row[index + 1], row[index]))
        previous_row = row
    return previous_row[-1]


def assert_runs(one: str, other: str, runs: np.ndarray) -> None:
    for a, b, size in runs.tolist():
        assert size > 0
        assert one[a : a + size] == other[b : b + size]
    assert (runs[1:, :2] >= runs[:-1, :2] + runs[:-1, 2:]).all()


@given(one=FEW_LETTERS, other=FEW_LETTERS)
@quick
def test_dynamic_program_finds_runs_of_maximal_total_length(one, other):
    runs = longest_common_runs(code_points(one), code_points(other), SUFFICIENT_LIMIT)
    assert_runs(one, other, runs)
    assert runs[:, 2].sum() == longest_common_length(one, other)


@given(one=FEW_LETTERS, other=FEW_LETTERS, limit=st.integers(1, 4))
@quick
def test_limited_search_finds_only_common_runs(one, other, limit):
    runs = longest_common_runs(code_points(one), code_points(other), limit)
    assert_runs(one, other, runs)
    assert runs[:, 2].sum() <= longest_common_length(one, other)


@pytest.mark.slow
@given(one=TEXTS, other=TEXTS)
@quick
def test_matching_runs_are_common_ordered_and_symmetric(one, other):
    runs = matching_runs(one, other)
    assert_runs(one, other, runs)
    assert matching_runs(other, one)[:, [1, 0, 2]].tolist() == runs.tolist()


@given(text=TEXTS)
@quick
def test_equal_texts_have_one_run(text):
    assert matching_runs(text, text).tolist() == ([[0, 0, len(text)]] if text else [])


@given(before=TEXTS, middle=st.text("xyz", max_size=60), after=TEXTS)
@example(before="0000", middle="yxxx", after="x000")
@quick
def test_runs_cover_all_remaining_text_after_a_deletion(before, middle, after):
    full, shortened = before + middle + after, before + after
    assert matching_runs(full, shortened)[:, 2].sum() == len(shortened)


def test_moved_anchor_does_not_lose_the_common_text_that_it_passes():
    # Both parts occur once in each text: an algorithm that uses the shorter one as an anchor loses the longer one.
    short = "".join(map(chr, range(1000, 1020)))
    long = "".join(map(chr, range(2000, 2200)))
    runs = matching_runs("1" + short + long + "2", "3" + long + short + "4")
    assert runs.tolist() == [[1 + len(short), 1, len(long)]]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x = x + 1\n" * 10_000, "x = x + 1\n" * 9_999 + "y"),  # repeats, without an anchor
        ("a" * 100_000, "a" * 99_000),
        ("word " * 5_000 + "<think>" + "y " * 2_000 + "</think>" + "tail " * 5_000, "word " * 5_000 + "tail " * 5_000),
    ],
)
def test_long_similar_texts_are_matched_within_five_seconds(one, other):
    matching_runs("warm", "up")
    started = time.perf_counter()
    runs = matching_runs(one, other)
    assert time.perf_counter() - started < 5
    assert runs[:, 2].sum() >= 0.99 * len(other)


def test_long_unrelated_texts_are_matched_within_ten_seconds():
    rng = random.Random(0)
    one, other = ("".join(rng.choices("abcdefgh ", k=20_000)) for _ in range(2))
    started = time.perf_counter()
    assert_runs(one, other, matching_runs(one, other))
    assert time.perf_counter() - started < 10
