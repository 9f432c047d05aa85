"""Counting at common boundaries."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from projection_inputs import TEXTS

from xtk.errors import XtkError
from xtk.projection.build import build_projection
from xtk.projection.methods import cooccurrence as module
from xtk.projection.methods.cooccurrence import (
    CooccurrenceCounter,
    CooccurrenceCounts,
    CooccurrenceMethod,
    count_cooccurrences,
)
from xtk.tokens.alignment import align

FAMILIES = ["student", "teacher", "metaspace", "composing", "word-piece"]
PAIRS = list(itertools.product(FAMILIES, FAMILIES))


def readable_counts(student, teacher, texts) -> Counter:
    """Slow twin: a dictionary."""
    found: Counter = Counter()
    for text in texts:
        (one,), (other,) = student.encode([text]), teacher.encode([text])
        raw, start = text.encode(), 0
        for s0, s1, t0, t1 in align(one, other).tolist():
            pair = []
            for side, tokens, first, stop in ((student, one, s0, s1), (teacher, other, t0, t1)):
                spelling_of = [token for token in range(first, stop) if tokens.byte_ends[token] > start]
                token = int(tokens.ids[spelling_of[0]])
                spelling = side.vocabulary.bytes_of(token)
                pair.append(token if spelling and raw[start : start + len(spelling)] == spelling else None)
            if None not in pair:
                found[tuple(pair)] += 1
            start = int(one.byte_ends[s1 - 1])
    return found


def as_dict(counts: CooccurrenceCounts) -> dict[tuple[int, int], int]:
    places = zip(counts.student_ids.tolist(), counts.teacher_ids.tolist(), strict=True)
    return dict(zip(places, counts.counts.tolist(), strict=True))


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_counts_agree_with_a_dictionary(tokenizer_of, counted, student, teacher):
    found = counted(student, teacher)
    assert as_dict(found) == readable_counts(tokenizer_of[student], tokenizer_of[teacher], TEXTS)
    assert found.num_documents == len(TEXTS)
    assert (np.diff(found.student_ids.astype(np.int64) * 10_000 + found.teacher_ids) > 0).all()


@given(texts=st.lists(st.text(max_size=30), min_size=1, max_size=4), pair=st.sampled_from(PAIRS))
@settings(max_examples=60, deadline=None)
def test_counts_of_any_text_share_their_beginning(tokenizer_of, texts, pair):
    one, other = (tokenizer_of[name] for name in pair)
    texts = [text.encode("utf-8", "replace").decode() for text in texts]
    counter = CooccurrenceCounter(one, other)
    list(count_cooccurrences(counter, texts))
    found = as_dict(counter.to_counts(len(texts), ""))
    assert found == readable_counts(one, other, texts)
    for token, teacher_id in found:
        left, right = one.vocabulary.bytes_of(token), other.vocabulary.bytes_of(teacher_id)
        assert left
        assert right
        assert left.startswith(right) or right.startswith(left)


@pytest.mark.parametrize("smoothing", [0, 0.5, 1, 30])
@pytest.mark.parametrize(
    ("student", "teacher"), [("student", "teacher"), ("teacher", "student"), ("metaspace", "student")]
)
def test_weights_are_the_formula(tokenizer_of, counted, student, teacher, smoothing):
    one, other = tokenizer_of[student], tokenizer_of[teacher]
    counts = counted(student, teacher)
    built = build_projection(one, other, "cooccurrence", counts=counts, smoothing=smoothing)
    built.validate()
    first = build_projection(one, other, "first-token")
    totals = Counter()
    for (token, _), times in as_dict(counts).items():
        totals[token] += times
    expected: Counter = Counter()
    for token, teacher_id, weight in zip(first.entry_rows, first.teacher_ids, first.weights, strict=True):
        times = totals[int(token)]
        expected[int(token), int(teacher_id)] += weight * (smoothing / (times + smoothing) if times else 1)
    for (token, teacher_id), times in as_dict(counts).items():
        expected[token, teacher_id] += times / (totals[token] + smoothing)
    found = dict(zip(zip(built.entry_rows.tolist(), built.teacher_ids.tolist(), strict=True),
                     built.weights.tolist(), strict=True))  # fmt: skip
    assert found == pytest.approx({place: weight for place, weight in expected.items() if weight}, rel=1e-5)


def test_a_prefix_of_longer_teacher_tokens_lands_on_them(tokenizer_of, counted):
    single, packed = tokenizer_of["teacher"], tokenizer_of["student"]
    built = build_projection(single, packed, "cooccurrence", counts=counted("teacher", "student"))
    two = single.vocabulary.token_of_bytes[b"2"]
    place = slice(built.row_offsets[two], built.row_offsets[two + 1])
    landed = [packed.vocabulary.bytes_of(token) for token in built.teacher_ids[place].tolist()]
    assert b"2" in landed
    assert len(landed) > 3
    assert all(spelling.startswith(b"2") for spelling in landed)


@pytest.mark.parametrize(("texts", "characters"), [(1, 10), (3, 1 << 20), (1000, 50)])
def test_the_size_of_batches_changes_nothing(tokenizer_of, counted, monkeypatch, texts, characters):
    monkeypatch.setattr(module, "BATCH_TEXTS", texts)
    monkeypatch.setattr(module, "BATCH_CHARACTERS", characters)
    counter = CooccurrenceCounter(tokenizer_of["student"], tokenizer_of["teacher"])
    assert list(count_cooccurrences(counter, TEXTS))[-1] == len(TEXTS)
    assert as_dict(counter.to_counts(0, "")) == as_dict(counted("student", "teacher"))


def test_the_table_grows(tokenizer_of, counted):
    counter = CooccurrenceCounter(tokenizer_of["student"], tokenizer_of["teacher"])
    counter._keys, counter._counts = np.full(16, -1, np.int64), np.zeros(16, np.int64)
    list(count_cooccurrences(counter, TEXTS))
    assert len(counter._keys) > 16
    assert as_dict(counter.to_counts(0, "")) == as_dict(counted("student", "teacher"))


@pytest.mark.parametrize("smoothing", [-1, float("nan"), float("inf")])
def test_smoothing_without_meaning_is_refused(counted, smoothing):
    with pytest.raises(XtkError, match="--smoothing"):
        CooccurrenceMethod(counted("student", "teacher"), smoothing)
