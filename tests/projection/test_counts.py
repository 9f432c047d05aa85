"""Co-occurrence counts at shared boundaries."""

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
from xtk.projection.corpus_cooccurrence_counts import corpus_fingerprint, count_corpus_cooccurrences
from xtk.projection.methods.cooccurrence import (
    CooccurrenceCounter,
    CooccurrenceCounts,
    CooccurrenceMethod,
    count_cooccurrences,
)
from xtk.text import alignment
from xtk.text.alignment import align
from xtk.text.document import Document

FAMILIES = ["student", "teacher", "metaspace", "composing", "word-piece"]
PAIRS = list(itertools.product(FAMILIES, FAMILIES))


def reference_counts(student, teacher, texts) -> Counter:
    """Return co-occurrence counts as a dictionary, by a slow reference implementation."""
    counts: Counter = Counter()
    for text in texts:
        (student_tokens,), (teacher_tokens,) = student.encode([text]), teacher.encode([text])
        encoded, start = text.encode(), 0
        for s0, s1, t0, t1 in align(student_tokens, teacher_tokens).tolist():
            pair = []
            for tokenizer, tokens, first, stop in (
                (student, student_tokens, s0, s1),
                (teacher, teacher_tokens, t0, t1),
            ):
                positions = [token for token in range(first, stop) if tokens.byte_ends[token] > start]
                token = int(tokens.ids[positions[0]])
                token_bytes = tokenizer.vocabulary.bytes_of(token)
                pair.append(token if token_bytes and encoded[start : start + len(token_bytes)] == token_bytes else None)
            if None not in pair:
                counts[tuple(pair)] += 1
            start = int(student_tokens.byte_ends[s1 - 1])
    return counts


def as_dict(counts: CooccurrenceCounts) -> dict[tuple[int, int], int]:
    pairs = zip(counts.student_ids.tolist(), counts.teacher_ids.tolist(), strict=True)
    return dict(zip(pairs, counts.counts.tolist(), strict=True))


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_counts_agree_with_the_reference_implementation(tokenizer_of, cooccurrence_counts, student, teacher):
    found = cooccurrence_counts(student, teacher)
    assert as_dict(found) == reference_counts(tokenizer_of[student], tokenizer_of[teacher], TEXTS)
    assert found.num_documents == len(TEXTS)
    assert (np.diff(found.student_ids.astype(np.int64) * 10_000 + found.teacher_ids) > 0).all()


@given(texts=st.lists(st.text(max_size=30), min_size=1, max_size=4), pair=st.sampled_from(PAIRS))
@settings(max_examples=60, deadline=None)
def test_counted_tokens_of_any_text_are_prefixes_of_each_other(tokenizer_of, texts, pair):
    student_tokenizer, teacher_tokenizer = (tokenizer_of[name] for name in pair)
    texts = [text.encode("utf-8", "replace").decode() for text in texts]
    counter = CooccurrenceCounter(student_tokenizer, teacher_tokenizer)
    list(count_cooccurrences(counter, texts))
    found = as_dict(counter.to_counts(len(texts), ""))
    assert found == reference_counts(student_tokenizer, teacher_tokenizer, texts)
    for token, teacher_id in found:
        student_bytes, teacher_bytes = (
            student_tokenizer.vocabulary.bytes_of(token),
            teacher_tokenizer.vocabulary.bytes_of(teacher_id),
        )
        assert student_bytes
        assert teacher_bytes
        assert student_bytes.startswith(teacher_bytes) or teacher_bytes.startswith(student_bytes)


@pytest.mark.parametrize("smoothing", [0, 0.5, 1, 30])
@pytest.mark.parametrize(
    ("student", "teacher"), [("student", "teacher"), ("teacher", "student"), ("metaspace", "student")]
)
def test_weights_follow_the_smoothing_formula(tokenizer_of, cooccurrence_counts, student, teacher, smoothing):
    student_tokenizer, teacher_tokenizer = tokenizer_of[student], tokenizer_of[teacher]
    counts = cooccurrence_counts(student, teacher)
    built = build_projection(student_tokenizer, teacher_tokenizer, "cooccurrence", counts=counts, smoothing=smoothing)
    built.validate()
    first_token = build_projection(student_tokenizer, teacher_tokenizer, "first-token")
    totals = Counter()
    for (token, _), count in as_dict(counts).items():
        totals[token] += count
    expected: Counter = Counter()
    for token, teacher_id, weight in zip(
        first_token.entry_rows, first_token.teacher_ids, first_token.weights, strict=True
    ):
        count = totals[int(token)]
        expected[int(token), int(teacher_id)] += weight * (smoothing / (count + smoothing) if count else 1)
    for (token, teacher_id), count in as_dict(counts).items():
        expected[token, teacher_id] += count / (totals[token] + smoothing)
    found = dict(zip(zip(built.entry_rows.tolist(), built.teacher_ids.tolist(), strict=True),
                     built.weights.tolist(), strict=True))  # fmt: skip
    assert found == pytest.approx({entry: weight for entry, weight in expected.items() if weight}, rel=1e-5)


def test_prefix_of_longer_teacher_tokens_is_mapped_to_them(tokenizer_of, cooccurrence_counts):
    digit_tokenizer, number_tokenizer = tokenizer_of["teacher"], tokenizer_of["student"]
    built = build_projection(
        digit_tokenizer, number_tokenizer, "cooccurrence", counts=cooccurrence_counts("teacher", "student")
    )
    token_of_2 = digit_tokenizer.vocabulary.token_of_bytes[b"2"]
    span = slice(built.row_offsets[token_of_2], built.row_offsets[token_of_2 + 1])
    mapped_bytes = [number_tokenizer.vocabulary.bytes_of(token) for token in built.teacher_ids[span].tolist()]
    assert b"2" in mapped_bytes
    assert len(mapped_bytes) > 3
    assert all(spelling.startswith(b"2") for spelling in mapped_bytes)


@pytest.mark.parametrize(("texts", "characters"), [(1, 10), (3, 1 << 20), (1000, 50)])
def test_batch_size_does_not_change_the_counts(tokenizer_of, cooccurrence_counts, monkeypatch, texts, characters):
    monkeypatch.setattr(alignment, "BATCH_TEXTS", texts)
    monkeypatch.setattr(alignment, "BATCH_CHARACTERS", characters)
    counter = CooccurrenceCounter(tokenizer_of["student"], tokenizer_of["teacher"])
    assert list(count_cooccurrences(counter, TEXTS))[-1] == len(TEXTS)
    assert as_dict(counter.to_counts(0, "")) == as_dict(cooccurrence_counts("student", "teacher"))


def test_counts_of_a_corpus_state_its_documents_and_separate_messages(tokenizer_of, monkeypatch):
    monkeypatch.setattr(alignment, "BATCH_TEXTS", 3)
    student, teacher = tokenizer_of["student"], tokenizer_of["metaspace"]
    messages = ["how many", "12 of them"]
    conversation = Document.from_messages(
        [{"role": role, "content": content} for role, content in zip(("user", "assistant"), messages, strict=True)]
    )
    corpus = [*map(Document.from_text, TEXTS), conversation]
    progress: list[int] = []
    counts = count_corpus_cooccurrences(student, teacher, corpus, progress.append)
    assert as_dict(counts) == reference_counts(student, teacher, [*TEXTS, "\n\n".join(messages)])
    assert (counts.num_documents, counts.corpus_fingerprint) == corpus_fingerprint(corpus)
    assert sum(progress) == len(corpus)
    assert len(progress) > 1


def test_hash_table_grows(tokenizer_of, cooccurrence_counts):
    counter = CooccurrenceCounter(tokenizer_of["student"], tokenizer_of["teacher"])
    counter._keys, counter._counts = np.full(16, -1, np.int64), np.zeros(16, np.int64)
    list(count_cooccurrences(counter, TEXTS))
    assert len(counter._keys) > 16
    assert as_dict(counter.to_counts(0, "")) == as_dict(cooccurrence_counts("student", "teacher"))


@pytest.mark.parametrize("smoothing", [-1, float("nan"), float("inf")])
def test_invalid_smoothing_is_refused(cooccurrence_counts, smoothing):
    with pytest.raises(XtkError, match="--smoothing"):
        CooccurrenceMethod(cooccurrence_counts("student", "teacher"), smoothing)
