"""Alignment of two tokenizations of one text."""

from __future__ import annotations

import itertools
import json
import random
import time
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from hypothesis_texts import FAMILIES, TEXTS, quick
from test_properties import reference_spans

from xtk.text.alignment import align, align_sequences
from xtk.text.alignment_numba import minimal_spans
from xtk.text.document import Document
from xtk.text.token_sequence import tokenize_documents
from xtk.text.tokenizer import EncodedText, Tokenizer

GOLDEN = Path(__file__).parent / "golden_alignment.jsonl"
LOSSLESS = ["student", "teacher", "metaspace"]


@pytest.fixture(scope="session")
def tokenizer_of(families):
    return {name: Tokenizer(folder) for name, folder in families.items()}


def bytes_of_spans(tokenizer: Tokenizer, tokens: EncodedText, spans: np.ndarray) -> list[bytes]:
    spellings, ids = tokenizer.vocabulary.bytes_by_id, tokens.ids.tolist()
    return [b"".join(spellings[token] for token in ids[start:stop]) for start, stop in spans.tolist()]


def byte_ends_of(sizes: list[int]) -> np.ndarray:
    return np.cumsum(sizes, dtype=np.int32) if sizes else np.zeros(0, np.int32)


TOKEN_SIZES = st.lists(st.integers(0, 4), max_size=30)


@given(student=TOKEN_SIZES, teacher=TOKEN_SIZES)
@quick
def test_span_kernel_agrees_with_the_reference_implementation(student, teacher):
    student_ends, teacher_ends = byte_ends_of(student), byte_ends_of(teacher)
    spans = minimal_spans(student_ends, teacher_ends)
    assert spans.dtype == np.int32
    assert spans.tolist() == reference_spans(student_ends.tolist(), teacher_ends.tolist())


@pytest.mark.parametrize(("student_name", "teacher_name"), itertools.combinations(LOSSLESS, 2))
@given(text=TEXTS)
@quick
def test_spans_contain_equal_bytes_on_both_sides(tokenizer_of, student_name, teacher_name, text):
    assume("▁" not in text)  # metaspace tokenizers replace it with a space
    student_tokenizer, teacher_tokenizer = tokenizer_of[student_name], tokenizer_of[teacher_name]
    (student,), (teacher,) = student_tokenizer.encode([text]), teacher_tokenizer.encode([text])
    spans = align(student, teacher)
    student_bytes = bytes_of_spans(student_tokenizer, student, spans[:, :2])
    teacher_bytes = bytes_of_spans(teacher_tokenizer, teacher, spans[:, 2:])
    if student_bytes and "metaspace" in (student_name, teacher_name) and not text.startswith(" "):
        teacher_bytes[0] = teacher_bytes[0].removeprefix(b" ")  # the space that a metaspace tokenizer adds
    assert student_bytes == teacher_bytes
    assert b"".join(student_bytes) == text.encode()


COMPOSED = st.text(
    st.sampled_from("ae\u00e9\u1ea1 \n9zα\u0301\u0323\u0302\u0327\u0345\u1112\u1161\u11ab\ud55c\u2126日😀"), max_size=30
)


@given(text=COMPOSED)
@example(text="aa\u0301\u0301")  # one token contains the "a" and a part of U+00E1
@settings(quick, max_examples=300)
def test_span_of_a_normalizing_teacher_contains_the_normalized_student_bytes(tokenizer_of, text):
    student_tokenizer, teacher_tokenizer = tokenizer_of["student"], tokenizer_of["composing"]
    (student,), (teacher,) = student_tokenizer.encode([text]), teacher_tokenizer.encode([text])
    spans = align(student, teacher)
    student_bytes = bytes_of_spans(student_tokenizer, student, spans[:, :2])
    teacher_bytes = bytes_of_spans(teacher_tokenizer, teacher, spans[:, 2:])
    assert b"".join(teacher_bytes).decode() == unicodedata.normalize("NFC", text)
    for student_span, teacher_span in zip(student_bytes, teacher_bytes, strict=True):
        assert (
            student_span == teacher_span or unicodedata.normalize("NFC", student_span.decode()) == teacher_span.decode()
        )


WORDS = ["Anna", "has", "12", "CAFÉ", "cafe\u0301", "naïve", "  ", "\n", ".", "Bert", "left,", "\u0301", "gives"]


@given(words=st.lists(st.sampled_from(WORDS), max_size=12))
@quick
def test_word_piece_spans_contain_the_lower_case_letters_of_the_text(tokenizer_of, words):
    text = " ".join(words)
    student_tokenizer, teacher_tokenizer = tokenizer_of["student"], tokenizer_of["word-piece"]
    (student,), (teacher,) = student_tokenizer.encode([text]), teacher_tokenizer.encode([text])
    assume(teacher_tokenizer.special_token_ids["unk"] not in teacher.ids.tolist())
    spans = align(student, teacher)
    for raw, teacher_bytes in zip(
        bytes_of_spans(student_tokenizer, student, spans[:, :2]),
        bytes_of_spans(teacher_tokenizer, teacher, spans[:, 2:]),
        strict=True,
    ):
        letters = unicodedata.normalize("NFD", raw.decode().lower())
        assert "".join(x for x in letters if not x.isspace() and not unicodedata.combining(x)) == teacher_bytes.decode()


@given(text=TEXTS, num_kept=st.integers(0, 40))
@quick
def test_spans_of_a_truncated_side_are_those_of_the_common_text(tokenizer_of, text, num_kept):
    (student,), (teacher,) = tokenizer_of["student"].encode([text]), tokenizer_of["teacher"].encode([text])
    truncated = EncodedText(teacher.ids[:num_kept], teacher.byte_ends[:num_kept])
    spans = align(student, teacher)
    assert align(student, truncated).tolist() == spans[spans[:, 3] <= num_kept].tolist()


def test_two_empty_texts_have_no_spans(tokenizer_of):
    (empty,) = tokenizer_of["student"].encode([""])
    assert align(empty, empty).shape == (0, 4)
    (not_empty,) = tokenizer_of["teacher"].encode(["Anna"])
    assert align(empty, not_empty).shape == (0, 4)


# Tokens of documents, with start and end tokens.


def test_document_is_enclosed_by_start_and_end_tokens(tokenizer_of):
    (student,) = tokenize_documents(tokenizer_of["student"], [Document.from_text("Anna has 12")])
    (teacher,) = tokenize_documents(tokenizer_of["teacher"], [Document.from_text("Anna has 12")])
    assert (student.ids[0], student.ids[-1], student.segment_end_tokens.tolist()) == (0, 1, [len(student) - 1])
    assert (teacher.ids[0], teacher.ids[-1]) == (1, 1)  # without a bos, the sequence starts with eos
    assert student.byte_ends[0] == 0
    assert student.byte_ends[-1] == student.byte_ends[-2] == len("Anna has 12")
    assert student.train_mask.tolist() == [False] + [True] * (len(student) - 1)
    assert student.text_runs.tolist() == [[1, len(student) - 1, 0]]


def test_only_the_completion_and_its_end_token_are_trained(tokenizer_of):
    document = Document.from_completion("Anna has ", "12 apples")
    for name in ("student", "teacher"):
        (sequence,) = tokenize_documents(tokenizer_of[name], [document])
        assert sequence.train_mask.tolist() == [
            *(end > len("Anna has ") for end in sequence.byte_ends[:-1].tolist()), True
        ]  # fmt: skip
        assert sequence.train_mask.any()
        assert not sequence.train_mask.all()


def test_token_across_prompt_and_completion_belongs_to_the_segment_of_its_last_byte(tokenizer_of):
    (sequence,) = tokenize_documents(tokenizer_of["student"], [Document.from_completion("An", "na has")])
    tokenizer = tokenizer_of["student"]
    assert tokenizer.vocabulary.bytes_of(sequence.ids[1]) == b"Anna"
    assert sequence.train_mask[1]


def test_empty_completion_trains_its_end_token_and_empty_text_trains_nothing(tokenizer_of):
    (completion,) = tokenize_documents(tokenizer_of["student"], [Document.from_completion("Anna has", "")])
    assert completion.train_mask.tolist() == [False] * (len(completion) - 1) + [True]
    (empty,) = tokenize_documents(tokenizer_of["student"], [Document.from_text("")])
    assert empty.ids.tolist() == [0, 1]
    assert not empty.train_mask.any()


def test_byte_slice_before_the_end_of_the_text_has_no_end_token(tokenizer_of):
    document = Document.from_text("Anna has 12 apples left.")
    first_part, last_part = document.byte_slice(0, 9), document.byte_slice(9, 24)
    (first,), (last,) = (
        tokenize_documents(tokenizer_of["student"], [first_part]),
        tokenize_documents(tokenizer_of["student"], [last_part]),
    )
    assert (first_part.text, last_part.text) == ("Anna has ", "12 apples left.")
    assert (first.segment_end_tokens.tolist(), last.segment_end_tokens.tolist()) == ([-1], [len(last) - 1])
    assert first.text_runs[-1, 1] == len(first)
    assert last.ids[-1] == 1


@given(text=TEXTS)
@quick
def test_end_tokens_of_both_sides_are_aligned(tokenizer_of, text):
    document = Document.from_text(text)
    (student,) = tokenize_documents(tokenizer_of["student"], [document])
    (teacher,) = tokenize_documents(tokenizer_of["metaspace"], [document])
    spans = align_sequences(student, teacher)
    assert spans[-1].tolist() == [len(student) - 1, len(student), len(teacher) - 1, len(teacher)]
    (student_text,), (teacher_text,) = (
        tokenizer_of["student"].encode([document.text]),
        tokenizer_of["metaspace"].encode([document.text]),
    )
    assert spans[:-1].tolist() == (align(student_text, teacher_text) + 1).tolist()


@given(text=TEXTS.filter(bool), num_kept=st.integers(1, 30))
@quick
def test_truncated_sequence_keeps_the_spans_of_its_remaining_tokens(tokenizer_of, text, num_kept):
    document = Document.from_text(text)
    (student,) = tokenize_documents(tokenizer_of["student"], [document])
    (teacher,) = tokenize_documents(tokenizer_of["teacher"], [document])
    truncated = student.truncate(num_kept)
    assert len(truncated) == min(num_kept, len(student))
    spans = align_sequences(student, teacher)
    assert align_sequences(truncated, teacher).tolist() == spans[spans[:, 1] <= num_kept].tolist()


def test_first_token_is_not_trained_without_a_start_token(families, tmp_path):
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((families["teacher"] / "tokenizer.json").read_bytes())
    (sequence,) = tokenize_documents(Tokenizer(folder, start_token="none"), [Document.from_text("Anna has")])
    assert (sequence.text_runs.tolist(), sequence.segment_end_tokens.tolist()) == ([[0, len(sequence), 0]], [-1])
    assert sequence.train_mask.tolist() == [False] + [True] * (len(sequence) - 1)


# Golden cases.


def decoded_tokens(tokenizer: Tokenizer, tokens: EncodedText) -> list[str]:
    unknown_text = next((text for text, token in tokenizer.vocabulary.special_tokens.items()
                         if token == tokenizer.unknown_id), "")  # fmt: skip
    return [
        unknown_text if token == tokenizer.unknown_id
        else tokenizer.vocabulary.bytes_of(token).decode("utf-8", "backslashreplace")
        for token in tokens.ids.tolist()
    ]  # fmt: skip


def encode_golden_text(tokenizer: Tokenizer, text: str, num_kept: int | None) -> EncodedText:
    (tokens,) = tokenizer.encode([text])
    return EncodedText(tokens.ids[:num_kept], tokens.byte_ends[:num_kept], tokens.exact)


GOLDEN_CASES = [json.loads(line) for line in GOLDEN.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("golden", GOLDEN_CASES, ids=[golden["case"] for golden in GOLDEN_CASES])
def test_golden_cases_have_the_recorded_tokens_and_spans(tokenizer_of, golden):
    student_tokenizer, teacher_tokenizer = tokenizer_of[golden["student"]], tokenizer_of[golden["teacher"]]
    text = Document.from_text(golden["text"]).text
    student = encode_golden_text(student_tokenizer, text, golden.get("student_keeps"))
    teacher = encode_golden_text(teacher_tokenizer, text, golden.get("teacher_keeps"))
    assert decoded_tokens(student_tokenizer, student) == golden["student_tokens"]
    assert decoded_tokens(teacher_tokenizer, teacher) == golden["teacher_tokens"]
    assert align(student, teacher).tolist() == golden["spans"]


def test_golden_cases_cover_all_families(families):
    assert len(GOLDEN_CASES) >= 60
    assert {golden[side] for golden in GOLDEN_CASES for side in ("student", "teacher")} == set(families)


LONG_TEXTS = {
    "letters": "abcdefghij" * 10_000,
    "one letter": "a" * 100_000,
    "accents": "e\u0301" * 50_000,
    "marks alone": "\u0301" * 100_000,
    "CJK": "日本語" * 33_333,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", LONG_TEXTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_100k_characters_without_spaces_are_aligned_within_seconds(tokenizer_of, name, kind):
    text = LONG_TEXTS[kind]
    started = time.perf_counter()
    (tokens,), (student,) = tokenizer_of[name].encode([text]), tokenizer_of["student"].encode([text])
    spans = align(student, tokens)
    assert time.perf_counter() - started < 10
    if len(tokens.ids):
        assert tokens.byte_ends[-1] == len(text.encode())
        assert spans[-1, [1, 3]].tolist() == [len(student.ids), len(tokens.ids)]


# Real tokenizers.


@pytest.fixture(scope="session")
def real_tokenizers(real_data):
    names = ("llama3", "qwen", "gpt2", "mistral-v1")
    return {name: Tokenizer(real_data / "tokenizers" / name, name=name) for name in names}


def generated_texts() -> list[str]:
    """Return tables of numbers, emoji and CJK text, the same in every call."""
    rng = random.Random(0)
    rows = ("\t".join(f"{rng.randrange(10**k):,}" for k in range(1, 9)) for _ in range(150))
    table = "\n".join(f"{number} | {number * 7919} | {number / 7:.4f}" for number in range(0, 3000, 13))
    people = ["👩", "👨", "👧", "🧑🏽"]
    emoji = [
        lambda: "\u200d".join(rng.choices(people, k=rng.randint(1, 4))),
        lambda: "".join(chr(0x1F1E6 + rng.randrange(26)) for _ in range(2)),
        lambda: chr(rng.randrange(0x1F600, 0x1F650)) + rng.choice(["", " ", "!", "\n"]),
        lambda: rng.choice(["☎\ufe0f", "1\ufe0f\u20e3", "word", " 12"]),
    ]
    ranges = [range(0x4E00, 0x9FA0), range(0x4E00, 0x5200), range(0x3041, 0x3094), range(0xAC00, 0xD7A4)]
    cjk = ["".join(chr(rng.choice(rng.choice(ranges))) for _ in range(30)) + "，。 12" for _ in range(100)]
    return [table, "\n".join(rows), *("".join(rng.choice(emoji)() for _ in range(40)) for _ in range(50)), *cjk]


def real_texts(folder: Path, problems: int | None, paragraphs: int | None) -> list[str]:
    lines = (folder / "corpora/gsm8k_test.jsonl").read_text(encoding="utf-8").splitlines()[:problems]
    articles = (folder / "corpora/wikitext2-test.txt").read_text(encoding="utf-8").splitlines()
    prose = [line for line in articles if len(line) > (200 if paragraphs else 0)][:paragraphs]
    return [*(f"{record['question']}\n{record['answer']}" for record in map(json.loads, lines)), *prose]


def count_wrong_spans(tokenizers: dict[str, Tokenizer], texts: list[str]) -> tuple[int, int]:
    """Return the number of spans whose bytes differ, and of all spans, over all pairs of tokenizers."""
    encoded = {name: tokenizer.encode(texts) for name, tokenizer in tokenizers.items()}
    wrong = count = 0
    for student_name, teacher_name in itertools.combinations(tokenizers, 2):
        for text, student, teacher in zip(texts, encoded[student_name], encoded[teacher_name], strict=True):
            spans = align(student, teacher)
            student_bytes = bytes_of_spans(tokenizers[student_name], student, spans[:, :2])
            teacher_bytes = bytes_of_spans(tokenizers[teacher_name], teacher, spans[:, 2:])
            if not text.startswith(" "):  # Mistral adds a space in front
                student_bytes[0], teacher_bytes[0] = student_bytes[0].lstrip(b" "), teacher_bytes[0].lstrip(b" ")
            assert b"".join(student_bytes) == text.encode()
            wrong += sum(
                student_span != teacher_span
                for student_span, teacher_span in zip(student_bytes, teacher_bytes, strict=True)
            )
            count += len(spans)
    return wrong, count


@pytest.mark.slow
def test_real_tokenizers_have_equal_bytes_in_every_span(real_tokenizers, real_data):
    wrong, count = count_wrong_spans(real_tokenizers, [*real_texts(real_data, 150, 60), *generated_texts()])
    assert count > 200_000
    assert wrong == 0


@pytest.mark.long
def test_real_tokenizers_have_equal_bytes_in_every_span_of_full_corpora(real_tokenizers, real_data):
    wrong, count = count_wrong_spans(real_tokenizers, [*real_texts(real_data, None, None), *generated_texts()])
    print(f"{count:,} spans")
    assert count > 2_000_000
    assert wrong == 0


def test_spans_of_qwen_and_llama_match_where_qwen_composes_characters(real_tokenizers, real_data):
    articles = (real_data / "corpora/wikitext2-test.txt").read_text(encoding="utf-8").splitlines()
    texts = [unicodedata.normalize("NFD", line) for line in articles if unicodedata.normalize("NFD", line) != line]
    student_tokenizer, teacher_tokenizer = real_tokenizers["llama3"], real_tokenizers["qwen"]
    assert len(texts) > 20
    for student, teacher in zip(student_tokenizer.encode(texts), teacher_tokenizer.encode(texts), strict=True):
        spans = align(student, teacher)
        student_bytes = bytes_of_spans(student_tokenizer, student, spans[:, :2])
        teacher_bytes = bytes_of_spans(teacher_tokenizer, teacher, spans[:, 2:])
        for student_span, teacher_span in zip(student_bytes, teacher_bytes, strict=True):
            assert (
                student_span == teacher_span
                or unicodedata.normalize("NFC", student_span.decode()) == teacher_span.decode()
            )
