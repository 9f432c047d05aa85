"""Alignment statistics of a corpus: compared with a reference implementation, and independent of batch sizes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from _pytest.mark.structures import ParameterSet
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_texts import FAMILIES, TEXTS, quick

from xtk.text import alignment
from xtk.text import alignment_statistics as module
from xtk.text.alignment_statistics import SPAN_KINDS, AlignedDocument, AlignmentStatistics, align_documents
from xtk.text.document import Document
from xtk.text.tokenizer import Tokenizer

FAMILY_INDEX = {name: position for position, name in enumerate(FAMILIES)}


def pairs_of(all_pairs: Iterable[tuple[str, str]]) -> list[ParameterSet]:
    """Return all pairs; a fifth of them runs by default, with each family several times on each side."""
    return [
        pytest.param(
            *pair, marks=[] if (3 * FAMILY_INDEX[pair[0]] + FAMILY_INDEX[pair[1]]) % 5 == 0 else [pytest.mark.long]
        )
        for pair in all_pairs
    ]


PAIRS = pairs_of(itertools.product(FAMILIES, FAMILIES))
UNORDERED_PAIRS = pairs_of(itertools.combinations(FAMILIES, 2))


@pytest.fixture(scope="session")
def tokenizer_of(families):
    return {name: Tokenizer(folder) for name, folder in families.items()}


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(alignment, "BATCH_TEXTS", 3)


def count_statistics(student: Tokenizer, teacher: Tokenizer, texts: list[str]) -> tuple[dict, list[AlignedDocument]]:
    statistics = AlignmentStatistics(student, teacher)
    documents = []
    for batch in align_documents(map(Document.from_text, texts), student, teacher):
        statistics.add(batch)
        documents += batch
    return statistics.to_json(), documents


def reference_kind(span: list[int]) -> str:
    s0, s1, t0, t1 = span
    return f"{'1' if s1 - s0 == 1 else 'n'}:{'1' if t1 - t0 == 1 else 'm' if s1 - s0 > 1 else 'n'}"


def sizes_of(document: AlignedDocument) -> list[int]:
    ends = [0, *document.student.byte_ends.tolist()]
    return [ends[s1] - ends[s0] for s0, s1, _, _ in document.spans.tolist()]


def reference_counts(documents: list[AlignedDocument]) -> dict[str, list[int]]:
    """Return `{kind: [spans, bytes, student tokens, teacher tokens]}`, by a slow reference implementation."""
    counts = {kind: [0, 0, 0, 0] for kind in SPAN_KINDS}
    for document in documents:
        for span, size in zip(document.spans.tolist(), sizes_of(document), strict=True):
            count = counts[reference_kind(span)]
            for field, amount in enumerate((1, size, span[1] - span[0], span[3] - span[2])):
                count[field] += amount
    return counts


def reference_byte_fraction(document: AlignedDocument) -> float:
    size = len(document.text.encode())
    pairs = list(zip(map(reference_kind, document.spans.tolist()), sizes_of(document), strict=True))
    many_to_many = sum(num_bytes for kind, num_bytes in pairs if kind == "n:m")
    return (many_to_many + size - sum(num_bytes for _, num_bytes in pairs)) / max(size, 1)


def is_lossless(tokenizer: Tokenizer, document: AlignedDocument, ids: list[int]) -> bool:
    decoded = b"".join(map(tokenizer.vocabulary.bytes_of, ids))
    return decoded in (document.text.encode(), b" " + document.text.encode())


def counts_by_kind(record: dict) -> dict[str, list[int]]:
    names = ("spans", "bytes", "student_tokens", "teacher_tokens")
    return {kind: [found[name] for name in names] for kind, found in record["span_kinds"].items()}


@pytest.mark.slow
@pytest.mark.parametrize(("student_name", "teacher_name"), PAIRS)
@given(texts=st.lists(TEXTS, min_size=1, max_size=8))
@settings(quick, max_examples=15)
def test_counts_agree_with_the_reference_implementation(tokenizer_of, student_name, teacher_name, texts):
    student, teacher = tokenizer_of[student_name], tokenizer_of[teacher_name]
    record, documents = count_statistics(student, teacher, texts)
    assert [document.text for document in documents] == [Document.from_text(text).text for text in texts]
    assert record["documents"] == len(texts)
    assert record["bytes"] == sum(len(document.text.encode()) for document in documents)
    assert counts_by_kind(record) == reference_counts(documents)
    assert record["student_tokens"] == sum(len(document.student.ids) for document in documents)
    assert record["teacher_tokens"] == sum(len(document.teacher.ids) for document in documents)
    normalized = [
        [not is_lossless(tokenizer, document, getattr(document, name).ids.tolist()) for document in documents]
        for name, tokenizer in (("student", student), ("teacher", teacher))
    ]
    assert record["normalized_documents"] == {
        "student": sum(normalized[0]),
        "teacher": sum(normalized[1]),
        "either": sum(map(max, zip(*normalized, strict=True))),
    }


@pytest.mark.slow
@pytest.mark.parametrize(("student_name", "teacher_name"), UNORDERED_PAIRS)
@given(texts=st.lists(TEXTS, min_size=1, max_size=8))
@settings(quick, max_examples=15)
def test_span_kinds_and_unaligned_bytes_sum_to_the_total(tokenizer_of, student_name, teacher_name, texts):
    record, _ = count_statistics(tokenizer_of[student_name], tokenizer_of[teacher_name], texts)
    kinds = record["span_kinds"].values()
    assert sum(kind["spans"] for kind in kinds) == record["spans"]
    assert sum(kind["bytes"] for kind in kinds) + record["unaligned_bytes"] == record["bytes"]
    if record["spans"]:
        assert sum(kind["span_fraction"] for kind in kinds) == pytest.approx(1, abs=1e-5)
        shares = sum(kind["byte_fraction"] for kind in kinds) + record["unaligned_fraction"]
        assert shares == pytest.approx(1, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("student_name", "teacher_name"), UNORDERED_PAIRS)
@given(texts=st.lists(TEXTS, min_size=1, max_size=8))
@settings(quick, max_examples=15)
def test_swapping_the_tokenizers_swaps_the_span_kinds(tokenizer_of, student_name, teacher_name, texts):
    student, teacher = tokenizer_of[student_name], tokenizer_of[teacher_name]
    counts, counts_of_swapped = (
        counts_by_kind(count_statistics(student, teacher, texts)[0]),
        counts_by_kind(count_statistics(teacher, student, texts)[0]),
    )
    for kind, swapped_kind in (("1:1", "1:1"), ("1:n", "n:1"), ("n:1", "1:n"), ("n:m", "n:m")):
        spans, size, student_tokens, teacher_tokens = counts[kind]
        assert counts_of_swapped[swapped_kind] == [spans, size, teacher_tokens, student_tokens]


def test_equal_tokenizers_have_only_one_to_one_spans(tokenizer_of):
    record, _ = count_statistics(
        tokenizer_of["student"], tokenizer_of["student"], ["Anna has 1234 apples", "日本 😀", ""]
    )
    assert record["span_kinds"]["1:1"]["byte_fraction"] == 1
    assert record["worst_documents"] == record["longest_spans"] == []


def test_empty_documents_count_as_documents(tokenizer_of):
    record, documents = count_statistics(tokenizer_of["student"], tokenizer_of["teacher"], ["", ""])
    assert (record["documents"], record["bytes"], record["spans"], record["unaligned_bytes"]) == (2, 0, 0, 0)
    assert record["student_bytes_per_token"] == record["span_kinds"]["1:1"]["byte_fraction"] == 0
    assert record["normalized_documents"]["either"] == 0
    assert [document.index for document in documents] == [0, 1]


def test_text_that_one_tokenizer_drops_is_unaligned(tokenizer_of):
    record, _ = count_statistics(tokenizer_of["student"], tokenizer_of["word-piece"], ["Anna has", "   "])
    assert record["unaligned_bytes"] == 3
    (worst, *_) = record["worst_documents"]
    assert (worst["document"], worst["byte_fraction"], worst["unaligned_bytes"]) == (1, 1, 3)
    assert worst["normalized_by"] == ["teacher"]


@pytest.mark.slow
@pytest.mark.parametrize(("student_name", "teacher_name"), UNORDERED_PAIRS)
@given(texts=st.lists(TEXTS, min_size=1, max_size=20))
@settings(quick, max_examples=15, suppress_health_check=[])
def test_worst_documents_and_longest_spans_are_those_of_the_whole_corpus(
    tokenizer_of, student_name, teacher_name, texts
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alignment, "BATCH_TEXTS", 3)
        record, documents = count_statistics(tokenizer_of[student_name], tokenizer_of[teacher_name], texts)
    shares = [(-reference_byte_fraction(document), document.index) for document in documents]
    worst = [index for share, index in sorted(shares) if share < 0][: module.NUM_LISTED]
    assert [found["document"] for found in record["worst_documents"]] == worst
    longest: dict[bytes, int] = {}
    for document in documents:
        ends, text = [0, *document.student.byte_ends.tolist()], document.text.encode()
        for s0, s1, t0, t1 in document.spans.tolist():
            if (s1 - s0, t1 - t0) != (1, 1) and ends[s1] > ends[s0]:
                longest.setdefault(text[ends[s0] : ends[s1]], ends[s1] - ends[s0])
    sizes = sorted(longest.values(), reverse=True)[: module.NUM_LISTED]
    assert [found["bytes"] for found in record["longest_spans"]] == sizes


def test_batch_sizes_do_not_change_the_statistics(tokenizer_of, monkeypatch):
    import small_inputs

    texts = [*small_inputs.sentences(20), "", *small_inputs.ODD_TEXTS, "x" * 300]
    pair = tokenizer_of["student"], tokenizer_of["metaspace"]
    in_one_batch, _ = count_statistics(*pair, texts)
    for name, value in (("BATCH_TEXTS", 1), ("BATCH_TEXTS", 7), ("BATCH_CHARACTERS", 100)):
        monkeypatch.setattr(alignment, name, value)
        in_batches, documents = count_statistics(*pair, texts)
        assert [document.index for document in documents] == list(range(len(texts)))
        for key in set(in_one_batch) - {"seconds", "nanoseconds_per_token"}:
            assert in_batches[key] == in_one_batch[key], key


def test_corpus_is_read_lazily(tokenizer_of, small_batches):
    num_read = 0

    def endless_documents():
        nonlocal num_read
        while True:
            num_read += 1
            yield Document.from_text("Anna has 12 apples")

    batches = align_documents(endless_documents(), tokenizer_of["student"], tokenizer_of["teacher"])
    for _ in range(4):
        next(batches)
    batches.close()
    assert num_read <= 3 * 6
