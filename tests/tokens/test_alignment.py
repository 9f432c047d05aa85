"""The alignment of two tokenisations of one text."""

from __future__ import annotations

import itertools
import json
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from test_properties import readable_spans
from texts import TEXTS, quick

from xtk.tokens.alignment import align, align_sequences, sequences
from xtk.tokens.document import Document
from xtk.tokens.kernels import smallest_spans
from xtk.tokens.tokenizer import Encoded, Tokenizer

GOLDEN = Path(__file__).parent / "golden_alignment.jsonl"
UNCHANGING = ["student", "teacher", "metaspace"]


@pytest.fixture(scope="session")
def tokenizer_of(families):
    return {name: Tokenizer(folder) for name, folder in families.items()}


def bytes_of_spans(tokenizer: Tokenizer, tokens: Encoded, spans: np.ndarray) -> list[bytes]:
    return [
        b"".join(tokenizer.vocabulary.spelling(token) for token in tokens.ids[start:stop])
        for start, stop in spans.tolist()
    ]


def ends_of(steps: list[int]) -> np.ndarray:
    return np.cumsum(steps, dtype=np.int32) if steps else np.zeros(0, np.int32)


STEPS = st.lists(st.integers(0, 4), max_size=30)


@given(student=STEPS, teacher=STEPS)
@quick
def test_the_span_kernel_agrees_with_its_readable_twin(student, teacher):
    student_ends, teacher_ends = ends_of(student), ends_of(teacher)
    spans = smallest_spans(student_ends, teacher_ends)
    assert spans.dtype == np.int32
    assert spans.tolist() == readable_spans(student_ends.tolist(), teacher_ends.tolist())


@pytest.mark.parametrize(("student_name", "teacher_name"), itertools.combinations(UNCHANGING, 2))
@given(text=TEXTS)
@quick
def test_the_bytes_of_a_span_are_equal_on_both_sides(tokenizer_of, student_name, teacher_name, text):
    assume("▁" not in text)  # which metaspace tokenizers read as a space
    one, other = tokenizer_of[student_name], tokenizer_of[teacher_name]
    (student,), (teacher,) = one.encode([text]), other.encode([text])
    spans = align(student, teacher)
    student_bytes = bytes_of_spans(one, student, spans[:, :2])
    teacher_bytes = bytes_of_spans(other, teacher, spans[:, 2:])
    if student_bytes and "metaspace" in (student_name, teacher_name) and not text.startswith(" "):
        teacher_bytes[0] = teacher_bytes[0].removeprefix(b" ")  # its own space in front
    assert student_bytes == teacher_bytes
    assert b"".join(student_bytes) == text.encode()


COMPOSED = st.text(
    st.sampled_from("ae\u00e9\u1ea1 \n9zα\u0301\u0323\u0302\u0327\u0345\u1112\u1161\u11ab\ud55c\u2126日😀"), max_size=30
)


@given(text=COMPOSED)
@example(text="aa\u0301\u0301")  # one token holds the "a" and a part of U+00E1
@settings(quick, max_examples=300)
def test_a_span_holds_what_the_normaliser_made_of_its_bytes(tokenizer_of, text):
    one, other = tokenizer_of["student"], tokenizer_of["composing"]
    (student,), (teacher,) = one.encode([text]), other.encode([text])
    spans = align(student, teacher)
    student_bytes = bytes_of_spans(one, student, spans[:, :2])
    teacher_bytes = bytes_of_spans(other, teacher, spans[:, 2:])
    assert b"".join(teacher_bytes).decode() == unicodedata.normalize("NFC", text)
    for raw, normal in zip(student_bytes, teacher_bytes, strict=True):
        assert raw == normal or unicodedata.normalize("NFC", raw.decode()) == normal.decode()


WORDS = ["Anna", "has", "12", "CAFÉ", "cafe\u0301", "naïve", "  ", "\n", ".", "Bert", "left,", "\u0301", "gives"]


@given(words=st.lists(st.sampled_from(WORDS), max_size=12))
@quick
def test_word_piece_spans_hold_the_lower_case_letters_of_the_text(tokenizer_of, words):
    text = " ".join(words)
    one, other = tokenizer_of["student"], tokenizer_of["word-piece"]
    (student,), (teacher,) = one.encode([text]), other.encode([text])
    assume(other.roles["unk"] not in teacher.ids.tolist())
    spans = align(student, teacher)
    for raw, pieces in zip(
        bytes_of_spans(one, student, spans[:, :2]), bytes_of_spans(other, teacher, spans[:, 2:]), strict=True
    ):
        letters = unicodedata.normalize("NFD", raw.decode().lower())
        assert "".join(x for x in letters if not x.isspace() and not unicodedata.combining(x)) == pieces.decode()


@given(text=TEXTS, keep=st.integers(0, 40))
@quick
def test_where_one_side_is_cut_short_the_spans_are_those_of_the_common_text(tokenizer_of, text, keep):
    (student,), (teacher,) = tokenizer_of["student"].encode([text]), tokenizer_of["teacher"].encode([text])
    cut = Encoded(teacher.ids[:keep], teacher.ends[:keep])
    whole = align(student, teacher)
    assert align(student, cut).tolist() == whole[whole[:, 3] <= keep].tolist()


def test_two_empty_texts_have_no_spans(tokenizer_of):
    (empty,) = tokenizer_of["student"].encode([""])
    assert align(empty, empty).shape == (0, 4)
    (some,) = tokenizer_of["teacher"].encode(["Anna"])
    assert align(empty, some).shape == (0, 4)


# Documents as models read them.


def test_a_document_stands_between_its_start_and_end_token(tokenizer_of):
    (student,) = sequences(tokenizer_of["student"], [Document.of_text("Anna has 12")])
    (teacher,) = sequences(tokenizer_of["teacher"], [Document.of_text("Anna has 12")])
    assert (student.ids[0], student.ids[-1], student.starts, student.finished) == (0, 1, 1, True)
    assert (teacher.ids[0], teacher.ids[-1]) == (1, 1)  # without a bos, eos is in front too
    assert student.ends[0] == 0
    assert student.ends[-1] == student.ends[-2] == len("Anna has 12")
    assert student.trained.tolist() == [False] + [True] * (len(student) - 1)
    assert len(student.text_tokens().ids) == len(student) - 2


def test_only_the_completion_and_the_end_after_it_are_trained(tokenizer_of):
    document = Document.of_completion("Anna has ", "12 apples")
    for name in ("student", "teacher"):
        (sequence,) = sequences(tokenizer_of[name], [document])
        assert sequence.trained.tolist() == [
            *(end > len("Anna has ") for end in sequence.ends[:-1].tolist()), True
        ]  # fmt: skip
        assert sequence.trained.any()
        assert not sequence.trained.all()


def test_a_token_across_the_edge_of_prompt_and_completion_belongs_to_its_last_byte(tokenizer_of):
    (sequence,) = sequences(tokenizer_of["student"], [Document.of_completion("An", "na has")])
    tokenizer = tokenizer_of["student"]
    assert tokenizer.vocabulary.spelling(sequence.ids[1]) == b"Anna"
    assert sequence.trained[1]


def test_an_empty_completion_trains_its_end_and_an_empty_text_trains_nothing(tokenizer_of):
    (completion,) = sequences(tokenizer_of["student"], [Document.of_completion("Anna has", "")])
    assert completion.trained.tolist() == [False] * (len(completion) - 1) + [True]
    (empty,) = sequences(tokenizer_of["student"], [Document.of_text("")])
    assert empty.ids.tolist() == [0, 1]
    assert not empty.trained.any()


def test_a_piece_that_does_not_end_the_text_has_no_end_token(tokenizer_of):
    document = Document.of_text("Anna has 12 apples left.")
    head, tail = document.piece(0, 9), document.piece(9, 24)
    (first,), (last,) = sequences(tokenizer_of["student"], [head]), sequences(tokenizer_of["student"], [tail])
    assert (head.text, tail.text) == ("Anna has ", "12 apples left.")
    assert (first.finished, last.finished) == (False, True)
    assert first.text_stop == len(first)
    assert last.ids[-1] == 1


@given(text=TEXTS)
@quick
def test_the_end_token_is_aligned_with_the_end_token(tokenizer_of, text):
    document = Document.of_text(text)
    (student,) = sequences(tokenizer_of["student"], [document])
    (teacher,) = sequences(tokenizer_of["metaspace"], [document])
    spans = align_sequences(student, teacher)
    assert spans[-1].tolist() == [len(student) - 1, len(student), len(teacher) - 1, len(teacher)]
    of_text = align(student.text_tokens(), teacher.text_tokens())
    assert spans[:-1].tolist() == (of_text + 1).tolist()


@given(text=TEXTS.filter(bool), keep=st.integers(1, 30))
@quick
def test_a_sequence_cut_short_loses_its_end_and_keeps_its_spans(tokenizer_of, text, keep):
    document = Document.of_text(text)
    (student,) = sequences(tokenizer_of["student"], [document])
    (teacher,) = sequences(tokenizer_of["teacher"], [document])
    cut = student.cut(keep)
    assert len(cut) == min(keep, len(student))
    whole = align_sequences(student, teacher)
    assert align_sequences(cut, teacher).tolist() == whole[whole[:, 1] <= keep].tolist()


def test_without_a_start_token_the_first_token_is_not_trained(families, tmp_path):
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((families["teacher"] / "tokenizer.json").read_bytes())
    (sequence,) = sequences(Tokenizer(folder), [Document.of_text("Anna has")])
    assert (sequence.starts, sequence.finished) == (0, False)
    assert sequence.trained.tolist() == [False] + [True] * (len(sequence) - 1)


# Golden cases.


def shown(tokenizer: Tokenizer, tokens: Encoded) -> list[str]:
    return [tokenizer.vocabulary.spelling(token).decode("utf-8", "backslashreplace") for token in tokens.ids]


@pytest.mark.parametrize("line", GOLDEN.read_text(encoding="utf-8").splitlines())
def test_known_texts_align_as_they_always_did(tokenizer_of, line):
    golden = json.loads(line)
    one, other = tokenizer_of[golden["student"]], tokenizer_of[golden["teacher"]]
    (student,), (teacher,) = one.encode([golden["text"]]), other.encode([golden["text"]])
    assert shown(one, student) == golden["student_tokens"]
    assert shown(other, teacher) == golden["teacher_tokens"]
    assert align(student, teacher).tolist() == golden["spans"]


# Real tokenizers.


@pytest.fixture(scope="session")
def real_tokenizers(real_data):
    names = ("llama3", "qwen", "gpt2", "mistral-v1")
    return {name: Tokenizer(real_data / "tokenizers" / name, name=name) for name in names}


@pytest.fixture(scope="session")
def real_texts(real_data):
    lines = (real_data / "corpora/gsm8k_test.jsonl").read_text(encoding="utf-8").splitlines()[:200]
    problems = [f"{record['question']}\n{record['answer']}" for record in map(json.loads, lines)]
    articles = (real_data / "corpora/wikitext2-test.txt").read_text(encoding="utf-8")
    paragraphs = [line for line in articles.splitlines() if len(line) > 200][:100]
    table = "\n".join(f"{number} | {number * 7919} | {number / 7:.4f}" for number in range(0, 3000, 13))
    return [*problems, *paragraphs, table]


def test_real_tokenizers_spell_equal_bytes_in_every_span(real_tokenizers, real_texts):
    encoded = {name: tokenizer.encode(real_texts) for name, tokenizer in real_tokenizers.items()}
    for one, other in itertools.permutations(real_tokenizers, 2):
        unequal = count = 0
        for text, student, teacher in zip(real_texts, encoded[one], encoded[other], strict=True):
            spans = align(student, teacher)
            student_bytes = bytes_of_spans(real_tokenizers[one], student, spans[:, :2])
            teacher_bytes = bytes_of_spans(real_tokenizers[other], teacher, spans[:, 2:])
            if not text.startswith(" "):  # Mistral's own space in front
                student_bytes[0], teacher_bytes[0] = student_bytes[0].lstrip(b" "), teacher_bytes[0].lstrip(b" ")
            assert b"".join(student_bytes) == text.encode()
            unequal += sum(ours != theirs for ours, theirs in zip(student_bytes, teacher_bytes, strict=True))
            count += len(spans)
        assert count > 20_000
        assert unequal == 0, f"{one} with {other}"


def test_qwen_composes_what_llama_reads_in_parts_and_every_span_still_fits(real_tokenizers, real_data):
    articles = (real_data / "corpora/wikitext2-test.txt").read_text(encoding="utf-8").splitlines()
    texts = [unicodedata.normalize("NFD", line) for line in articles if unicodedata.normalize("NFD", line) != line]
    one, other = real_tokenizers["llama3"], real_tokenizers["qwen"]
    assert len(texts) > 20
    for student, teacher in zip(one.encode(texts), other.encode(texts), strict=True):
        spans = align(student, teacher)
        student_bytes = bytes_of_spans(one, student, spans[:, :2])
        teacher_bytes = bytes_of_spans(other, teacher, spans[:, 2:])
        for raw, normal in zip(student_bytes, teacher_bytes, strict=True):
            assert raw == normal or unicodedata.normalize("NFC", raw.decode()) == normal.decode()
