"""Texts that differ: the dynamic program, its anchors, and the spans made from them."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis_texts import TEXTS, quick

from xtk.tokens.different_text_alignment import (
    align_different_texts,
    longest_common_runs,
    matching_runs,
    text_similarity,
)

FEW_LETTERS = st.text("abc", max_size=14)
ENOUGH = 64


def codes(text: str) -> np.ndarray:
    return np.array([ord(letter) for letter in text], np.int32)


def longest_common(one: str, other: str) -> int:
    """Slow twin: the table of all prefixes."""
    before = [0] * (len(other) + 1)
    for letter in one:
        row = [0]
        for at, found in enumerate(other):
            row.append(before[at] + 1 if letter == found else max(before[at + 1], row[at]))
        before = row
    return before[-1]


def assert_runs(one: str, other: str, runs: np.ndarray) -> None:
    for a, b, size in runs.tolist():
        assert size > 0
        assert one[a : a + size] == other[b : b + size]
    assert (runs[1:, :2] >= runs[:-1, :2] + runs[:-1, 2:]).all()


@given(one=FEW_LETTERS, other=FEW_LETTERS)
@quick
def test_the_dynamic_program_finds_as_much_as_the_whole_table(one, other):
    runs = longest_common_runs(codes(one), codes(other), ENOUGH)
    assert_runs(one, other, runs)
    assert runs[:, 2].sum() == longest_common(one, other)


@given(one=FEW_LETTERS, other=FEW_LETTERS, limit=st.integers(1, 4))
@quick
def test_a_search_that_is_given_up_still_finds_what_is_common(one, other, limit):
    runs = longest_common_runs(codes(one), codes(other), limit)
    assert_runs(one, other, runs)
    assert runs[:, 2].sum() <= longest_common(one, other)


@given(one=TEXTS, other=TEXTS)
@quick
def test_runs_are_common_and_rise_and_swap_with_the_texts(one, other):
    runs = matching_runs(one, other)
    assert_runs(one, other, runs)
    assert matching_runs(other, one)[:, [1, 0, 2]].tolist() == runs.tolist()


@given(text=TEXTS)
@quick
def test_equal_texts_are_one_run(text):
    assert matching_runs(text, text).tolist() == ([[0, 0, len(text)]] if text else [])


@given(before=TEXTS, middle=st.text("xyz", max_size=60), after=TEXTS)
@example(before="0000", middle="yxxx", after="x000")
@quick
def test_what_is_cut_out_is_all_that_is_missing(before, middle, after):
    whole, cut = before + middle + after, before + after
    assert matching_runs(whole, cut)[:, 2].sum() == len(cut)


def test_what_stands_on_other_places_does_not_anchor_what_lies_between():
    # "abc" is unique on both sides, at other places: a tool that anchors there loses the twenty "m".
    one, other = "qabc" + "m" * 20 + "abcz", "qabc" + "m" * 20 + "a-b-cz"
    runs = matching_runs(one, other)
    assert [24, 24] in runs[:, :2].tolist() or runs[0].tolist()[2] >= 24


def test_case_accents_and_width_are_folded_when_asked():
    assert matching_runs("ÉCOLE", "ecole", ignore_case_and_accents=True).tolist() == [[0, 0, 5]]
    assert len(matching_runs("ÉCOLE", "ecole")) == 0
    assert text_similarity("ÉCOLE", "ecole") == 1
    assert text_similarity("abcd", "wxyz") == 0
    assert text_similarity("", "") == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x = x + 1\n" * 10_000, "x = x + 1\n" * 9_999 + "y"),  # repeats, without an anchor
        ("a" * 100_000, "a" * 99_000),
        ("word " * 5_000 + "<think>" + "y " * 2_000 + "</think>" + "tail " * 5_000, "word " * 5_000 + "tail " * 5_000),
    ],
)
def test_long_texts_take_time_by_what_differs(one, other):
    matching_runs("warm", "up")
    started = time.perf_counter()
    runs = matching_runs(one, other)
    assert time.perf_counter() - started < 5
    assert runs[:, 2].sum() >= 0.99 * len(other)


def test_unrelated_texts_end_in_time_too():
    draw = random.Random(0)
    one, other = ("".join(draw.choices("abcdefgh ", k=20_000)) for _ in range(2))
    started = time.perf_counter()
    assert_runs(one, other, matching_runs(one, other))
    assert time.perf_counter() - started < 10


# Spans.


def ends_by_word(text: str) -> np.ndarray:
    """A token ends after each space, and at the end."""
    raw = text.encode()
    ends = [at + 1 for at, byte in enumerate(raw) if byte == 32]
    return np.array([*ends, len(raw)] if raw and (not ends or ends[-1] != len(raw)) else ends, np.int32)


def words_of(text: str, low: int, high: int) -> str:
    ends = [0, *ends_by_word(text).tolist()]
    return text.encode()[ends[low] : ends[high]].decode()


def test_spans_of_texts_that_differ_close_where_they_agree_again():
    one, other = "he said <think>hmm, well</think> yes to all of it", "he said yes to all of it, twice"
    found = align_different_texts(one, ends_by_word(one), other, ends_by_word(other))
    shown = [(words_of(one, s0, s1), words_of(other, t0, t1)) for s0, s1, t0, t1 in found.spans.tolist()]
    assert shown == [
        ("he ", "he "),
        ("said ", "said "),
        ("<think>hmm, well</think> yes ", "yes "),
        ("to ", "to "),
        ("all ", "all "),
        ("of ", "of "),
        ("it", "it, twice"),
    ]
    assert found.equal.tolist() == [True, True, False, True, True, True, False]
    assert (found.similarity[found.equal] == 1).all()
    assert (found.similarity[~found.equal] < 1).all()
    assert found.similarity[2] == np.float32(2 * 4 / (29 + 4))


@given(one=TEXTS, other=TEXTS)
@example(one="a b", other="")
@quick
def test_spans_of_any_two_texts_hold_every_token_once_and_swap(one, other):
    left, right = ends_by_word(one), ends_by_word(other)
    found = align_different_texts(one, left, other, right)
    spans = found.spans
    if len(left) or len(right):
        assert spans[0, [0, 2]].tolist() == [0, 0]
        assert spans[-1, [1, 3]].tolist() == [len(left), len(right)]
        assert (spans[1:, [0, 2]] == spans[:-1, [1, 3]]).all()
    swapped = align_different_texts(other, right, one, left)
    assert swapped.spans[:, [2, 3, 0, 1]].tolist() == spans.tolist()
    assert swapped.equal.tolist() == found.equal.tolist()
    for (s0, s1, t0, t1), equal, similarity in zip(spans.tolist(), found.equal, found.similarity, strict=True):
        assert equal == (words_of(one, s0, s1) == words_of(other, t0, t1))
        assert 0 <= similarity <= 1


@given(text=TEXTS)
@quick
def test_equal_texts_are_aligned_as_by_bytes(text):
    ends = ends_by_word(text)
    found = align_different_texts(text, ends, text, ends)
    assert found.spans.tolist() == [[at, at + 1, at, at + 1] for at in range(len(ends))]
    assert found.equal.all()
