"""Teacher views: documents with a teacher prompt or input_ids, and their alignment with any student."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from hypothesis_texts import FRAGMENTS, TEXTS, quick
from test_chat import (
    CHAT,
    HEADERS_TEMPLATE,
    THINKING_TEMPLATE,
    TURNS_TEMPLATE,
    bytes_of_tokens,
    trained_text,
    with_template,
)

from xtk.errors import XtkError
from xtk.text.alignment import align_sequences
from xtk.text.document import Document, Segment
from xtk.text.teacher_tokenization import teacher_views
from xtk.text.token_sequence import TokenSequence, count_lost_bytes, tokenize_documents
from xtk.text.tokenizer import Tokenizer

# Families whose tokens decode to every text, perhaps after an added space.
LOSSLESS = ["student", "teacher", "gpt2", "llama3", "tekken", "metaspace", "metaspace-always", "llama2", "gemma"]
SHORT_TEXTS = st.lists(st.sampled_from([*FRAGMENTS, "Anna", " has", "12", " "]), max_size=4).map("".join)
END_OF_TURN = "<|im_end|>"


@pytest.fixture(scope="session")
def tokenizer_of(families):
    return {name: Tokenizer(folder) for name, folder in families.items()}


@pytest.fixture(scope="module")
def chat_tokenizers(families, tmp_path_factory):
    folder = tmp_path_factory.mktemp("talkers")
    templates = {"student": HEADERS_TEMPLATE, "teacher": TURNS_TEMPLATE, "composing": TURNS_TEMPLATE}
    return {name: with_template(families, folder, name, template) for name, template in templates.items()}


def teacher_view(tokenizer: Tokenizer, document: Document) -> tuple[Document, TokenSequence]:
    return teacher_views(tokenizer, [document])[0]


def fields_of(sequence: TokenSequence) -> dict[str, list[object]]:
    names = ("ids", "byte_ends", "train_mask", "text_runs", "segment_end_tokens")
    return {name: getattr(sequence, name).tolist() for name in names}


def trained_spans(student: TokenSequence, teacher: TokenSequence) -> list[list[int]]:
    spans = align_sequences(student, teacher)
    return spans[student.train_mask[spans[:, 1] - 1]].tolist()


def assert_spans_have_equal_bytes(
    student_tokenizer: Tokenizer, student: TokenSequence, teacher_tokenizer: Tokenizer, teacher: TokenSequence
) -> None:
    """Check that spans have equal bytes on both sides, except for a space that a tokenizer or prompt adds in front."""
    for s0, s1, t0, t1 in align_sequences(student, teacher).tolist():
        student_bytes, teacher_bytes = (
            bytes_of_tokens(student_tokenizer, student, np.arange(s0, s1)),
            bytes_of_tokens(teacher_tokenizer, teacher, np.arange(t0, t1)),
        )
        assert student_bytes == teacher_bytes or student_bytes.lstrip(b" ") == teacher_bytes.lstrip(b" ")


def assert_valid_sequence(document: Document, sequence: TokenSequence) -> None:
    """Check the properties of every sequence."""
    size = len(document.text.encode())
    assert (np.diff(sequence.byte_ends) >= 0).all()
    assert sequence.byte_ends.max(initial=0) <= size
    assert not sequence.train_mask[:1].any()
    assert len(sequence.segment_end_tokens) == len(document.segments)
    ranges = sequence.byte_ranges()
    assert (ranges[:, 0] <= ranges[:, 1]).all()
    assert (ranges[1:, 0] >= ranges[:-1, 1]).all()
    for start, _, first in sequence.text_runs.tolist():
        assert start == 0 or sequence.byte_ends[start - 1] == first


# Teacher prompts: texts.


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSLESS)
@given(prompt=SHORT_TEXTS, teacher_prompt=SHORT_TEXTS, completion=SHORT_TEXTS)
@quick
@example(prompt="Q: 12 =", teacher_prompt="A hint. Q: 12 = ", completion="17")
@example(prompt="é", teacher_prompt="\u0129", completion="x")
@example(prompt="", teacher_prompt="", completion="Anna")
@example(prompt="abc", teacher_prompt="", completion="Anna")
@example(prompt="An", teacher_prompt="xAn", completion="na has 12")
def test_teacher_view_contains_the_teacher_prompt_and_the_completion(
    tokenizer_of, name, prompt, teacher_prompt, completion
):
    teacher, student = tokenizer_of[name], tokenizer_of["student"]
    plain = Document.from_completion(prompt, completion)
    document, sequence = teacher_view(teacher, plain.with_teacher_prompt(teacher_prompt))
    (alone,) = tokenize_documents(teacher, [Document.from_completion(teacher_prompt, completion)])
    assert (document.text, document.segments) == (plain.text, plain.segments)
    assert sequence.ids.tolist() == alone.ids.tolist()
    assert_valid_sequence(document, sequence)
    # The trained tokens are those of that text, except for a token that begins in the part that only the teacher reads.
    lost = alone.train_mask & ~sequence.train_mask
    assert lost.sum() <= 1
    assert not (sequence.train_mask & ~alone.train_mask).any()
    if not lost.any() and alone.exact and "▁" not in teacher_prompt + completion:
        trained_bytes = bytes_of_tokens(teacher, sequence, sequence.train_mask & sequence.text_mask)
        assert trained_bytes.endswith(completion.encode())
        assert len(sequence.text_runs) == 0 or sequence.byte_ends[sequence.text_runs[-1, 1] - 1] == len(
            document.text.encode()
        )
    (student_sequence,) = tokenize_documents(student, [document])
    if "▁" not in completion + teacher_prompt:
        assert_spans_have_equal_bytes(student, student_sequence, teacher, sequence)
    assert trained_spans(student_sequence, sequence) or not (
        student_sequence.train_mask.any() and teacher.end_id is not None
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LOSSLESS, "composing", "t5", "word-piece"])
@given(prompt=TEXTS, completion=TEXTS)
@quick
def test_teacher_prompt_equal_to_the_prompt_changes_nothing(tokenizer_of, name, prompt, completion):
    plain = Document.from_completion(prompt, completion)
    _, sequence = teacher_view(tokenizer_of[name], plain.with_teacher_prompt(plain.segments[0].text))
    assert fields_of(sequence) == fields_of(tokenize_documents(tokenizer_of[name], [plain])[0])


def test_token_across_the_prompt_end_keeps_its_span_if_both_prompts_end_alike(tokenizer_of):
    teacher = tokenizer_of["teacher"]
    document = Document.from_completion("Say: An", "na has 12")
    _, sequence = teacher_view(teacher, document.with_teacher_prompt("A hint. Say: An"))
    assert trained_text(teacher, sequence) == " Anna has 12"
    (student,) = tokenize_documents(tokenizer_of["student"], [document])
    (alone,) = tokenize_documents(teacher, [document])
    moved = len(sequence) - len(alone)
    assert trained_spans(student, sequence) == [
        [s0, s1, t0 + moved, t1 + moved] for s0, s1, t0, t1 in trained_spans(student, alone)
    ]


def test_token_that_begins_in_the_teacher_prompt_is_not_trained(tokenizer_of):
    teacher = tokenizer_of["teacher"]
    document = Document.from_completion("Who? ", "na has 12").with_teacher_prompt("Who? An")
    _, sequence = teacher_view(teacher, document)
    first = sequence.text_runs[0, 0]
    assert teacher.vocabulary.bytes_of(sequence.ids[first - 1]).endswith(b"na")
    assert not sequence.train_mask[first - 1]
    assert trained_text(teacher, sequence) == " has 12"
    assert sequence.text_runs[0, 2] == len("Who? na")


def test_first_word_merged_with_the_space_of_the_teacher_prompt_is_trained(tokenizer_of):
    document = Document.from_text("Anna has 12").with_teacher_prompt("A hint: ")
    _, sequence = teacher_view(tokenizer_of["teacher"], document)
    assert trained_text(tokenizer_of["teacher"], sequence) == " Anna has 12"
    assert sequence.text_runs[0, 2] == 0
    (student,) = tokenize_documents(tokenizer_of["student"], [document])
    assert len(trained_spans(student, sequence)) == student.train_mask.sum()


def test_whole_text_is_trained_after_a_teacher_prompt(tokenizer_of):
    teacher = tokenizer_of["teacher"]
    document, sequence = teacher_view(
        teacher, Document.from_text("Anna has 12 apples.").with_teacher_prompt("Known: 12.\n")
    )
    assert document.segments == (Segment("text", "Anna has 12 apples.", True),)
    assert trained_text(teacher, sequence) == "Anna has 12 apples."
    assert bytes_of_tokens(teacher, sequence, sequence.ids >= 0) == b"Known: 12.\nAnna has 12 apples."
    assert sequence.segment_end_tokens.tolist() == [len(sequence) - 1]
    assert count_lost_bytes(document, sequence) == 0


@given(text=TEXTS.filter(bool), prompt=SHORT_TEXTS, num_kept=st.integers(1, 40))
@quick
def test_truncated_teacher_view_keeps_the_spans_of_its_remaining_tokens(tokenizer_of, text, prompt, num_kept):
    document, sequence = teacher_view(tokenizer_of["teacher"], Document.from_text(text).with_teacher_prompt(prompt))
    (student,) = tokenize_documents(tokenizer_of["student"], [document])
    spans = align_sequences(student, sequence)
    assert align_sequences(student, sequence.truncate(num_kept)).tolist() == spans[spans[:, 3] <= num_kept].tolist()


def test_normalized_teacher_prompt_does_not_shift_the_completion(tokenizer_of):
    document = Document.from_completion("Cafe\u0301?", " Anna has 12").with_teacher_prompt(
        "Cafe\u0301 e\u0301 e\u0301!"
    )
    teacher = tokenizer_of["composing"]
    _, sequence = teacher_view(teacher, document)
    assert trained_text(teacher, sequence) == " Anna has 12"
    assert sequence.text_runs[0, 2] == len("Cafe\u0301?".encode())


# Teacher prompts: conversations.


def trained_answers(document: Document) -> str:
    return "".join(segment.text for segment in document.segments if segment.train)


@pytest.mark.parametrize("name", ["student", "teacher", "composing"])
@given(
    contents=st.lists(SHORT_TEXTS, min_size=4, max_size=4),
    prompt=st.one_of(SHORT_TEXTS, st.lists(SHORT_TEXTS, max_size=3)),
    system=st.booleans(),
)
@quick
def test_conversation_after_other_messages_is_aligned_by_its_answers(chat_tokenizers, name, contents, prompt, system):
    roles = ["user", "assistant"] * 2
    chat = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)]
    chat = [{"role": "system", "content": "Be brief."}, *chat] if system else chat
    plain = Document.from_messages(chat)
    teacher_prompt = prompt if isinstance(prompt, str) else [{"role": "user", "content": text} for text in prompt]
    document, sequence = teacher_view(chat_tokenizers[name], plain.with_teacher_prompt(teacher_prompt))
    teacher_chat = (
        [{"role": "system", "content": teacher_prompt}, *chat[system:]]
        if isinstance(teacher_prompt, str)
        else [*teacher_prompt, *chat[1 + system :]]
    )
    (alone,) = tokenize_documents(chat_tokenizers[name], [Document.from_messages(teacher_chat)])
    assert sequence.ids.tolist() == alone.ids.tolist()
    assert (document.segments, document.conversation) == (plain.segments, plain.conversation)
    assert_valid_sequence(document, sequence)
    assert sequence.train_mask.tolist() == alone.train_mask.tolist()
    (student_sequence,) = tokenize_documents(chat_tokenizers["student"], [document])
    (plain_sequence,) = tokenize_documents(chat_tokenizers[name], [plain])
    assert [span[:2] for span in trained_spans(student_sequence, sequence)] == [
        span[:2] for span in trained_spans(student_sequence, plain_sequence)
    ]


def test_teacher_prompt_messages_replace_only_those_before_the_first_answer(chat_tokenizers):
    hints = [{"role": "system", "content": "The solution: 1222."}, {"role": "user", "content": "Anna?"}]
    document, sequence = teacher_view(
        chat_tokenizers["teacher"], Document.from_messages(CHAT).with_teacher_prompt(hints)
    )
    decoded = bytes_of_tokens(chat_tokenizers["teacher"], sequence, sequence.ids >= 0).decode()
    assert decoded.startswith("system\nThe solution: 1222.\nuser\nAnna?\nassistant\nAnna has 1222 apples left.")
    assert CHAT[1]["content"] not in decoded
    assert "tool\n1222" in decoded
    assert trained_text(chat_tokenizers["teacher"], sequence) == trained_answers(document)
    assert (sequence.segment_end_tokens >= 0).tolist() == [False, False, True, True, True]


def test_text_as_teacher_prompt_becomes_the_system_message(chat_tokenizers):
    for chat in (CHAT, CHAT[1:]):
        document, sequence = teacher_view(
            chat_tokenizers["teacher"], Document.from_messages(chat).with_teacher_prompt("Solve it.")
        )
        decoded = bytes_of_tokens(chat_tokenizers["teacher"], sequence, sequence.ids >= 0).decode()
        assert decoded.startswith("system\nSolve it.\nuser\nAnna has 1234")
        assert "Be brief" not in decoded
        assert trained_text(chat_tokenizers["teacher"], sequence) == trained_answers(document)


def test_answer_that_the_template_changes_is_found_after_a_teacher_prompt(families, tmp_path):
    teacher = with_template(families, tmp_path, "teacher", THINKING_TEMPLATE)
    thought = "<think>a long thought about 12</think>\n\n"
    chat = [CHAT[1], {"role": "assistant", "content": thought + "Anna has 1222 apples left."}]
    document, sequence = teacher_view(teacher, Document.from_messages(chat).with_teacher_prompt("The solution: 1222."))
    assert trained_text(teacher, sequence) == "Anna has 1222 apples left."
    assert count_lost_bytes(document, sequence) == len(thought)


def test_teacher_prompt_is_ignored_in_a_conversation_without_an_answer(chat_tokenizers):
    document = Document.from_messages(CHAT[:2])
    _, sequence = teacher_view(chat_tokenizers["teacher"], document.with_teacher_prompt([CHAT[1]]))
    assert fields_of(sequence) == fields_of(tokenize_documents(chat_tokenizers["teacher"], [document])[0])


@pytest.mark.parametrize(
    ("document", "prompt", "message"),
    [
        (Document.from_text("a"), [CHAT[0]], "has no messages"),
        (Document.from_messages(CHAT), [{"content": "who?"}], "role"),
        (Document.from_messages([{"role": "system", "content": "a", "train": True}]), "b", "is trained"),
        (Document.from_teacher_ids([1, 2]), "b", "input_ids, which are used unchanged"),
    ],
)
def test_teacher_prompt_that_does_not_fit_the_document_is_refused(document, prompt, message):
    with pytest.raises(ValueError, match=message):
        document.with_teacher_prompt(prompt)


# Fields `train` and `weight` of messages.


def test_train_and_weight_fields_set_whether_a_message_is_trained():
    cases = [{}, {"train": True}, {"train": False}, {"weight": 0}, {"weight": 1}, {"weight": None, "train": None},
             {"train": True, "weight": 0}]  # fmt: skip
    for role, trained in (("assistant", [1, 1, 0, 0, 1, 1, 0]), ("user", [0, 1, 0, 0, 0, 0, 0])):
        document = Document.from_messages([{"role": role, "content": "a", **fields} for fields in cases])
        assert [segment.train for segment in document.segments] == [bool(flag) for flag in trained]
        assert all(set(message) == {"role", "content"} for message in document.conversation.messages)
        prompt = Document.from_messages(
            [{"role": role, "content": "a", **fields} for fields in cases], num_prompt_messages=len(cases)
        )
        assert not any(segment.train for segment in prompt.segments)


@pytest.mark.parametrize("fields", [{"train": "yes"}, {"weight": 0.5}, {"weight": float("nan")}, {"train": []}])
def test_train_or_weight_that_is_neither_true_nor_false_is_refused(fields):
    with pytest.raises(ValueError, match=r"must be true or false"):
        Document.from_messages([{"role": "assistant", "content": "a", **fields}])


def test_untrained_answer_is_context_without_loss(chat_tokenizers):
    chat = [*CHAT[:2], {**CHAT[2], "train": False}, *CHAT[3:]]
    (sequence,) = tokenize_documents(chat_tokenizers["teacher"], [Document.from_messages(chat)])
    assert trained_text(chat_tokenizers["teacher"], sequence) == CHAT[4]["content"]
    (plain,) = tokenize_documents(chat_tokenizers["teacher"], [Document.from_messages(CHAT)])
    assert sequence.ids.tolist() == plain.ids.tolist()


# Documents given as input_ids.


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSLESS)
@given(prompt=TEXTS, completion=TEXTS.filter(bool), is_text=st.booleans())
@quick
def test_input_ids_of_a_text_result_in_the_same_sequence_as_the_text(tokenizer_of, name, prompt, completion, is_text):
    assume("▁" not in prompt + completion)
    document = Document.from_text(completion) if is_text else Document.from_completion(prompt, completion)
    tokenizer = tokenizer_of[name]
    assume(not (tokenizer.adds_prefix_space and document.text.startswith(" ")))  # it merges with the added space
    (expected,) = tokenize_documents(tokenizer, [document])
    assume(expected.exact)
    (student,) = tokenize_documents(tokenizer_of["student"], [document])
    converted, sequence = teacher_view(tokenizer, Document.from_teacher_ids(expected.ids, expected.train_mask))
    assert (converted.text, converted.is_complete) == (document.text, document.is_complete)
    assert_valid_sequence(converted, sequence)
    assert sequence.ids.tolist() == expected.ids.tolist()
    assert sequence.byte_ends.tolist() == expected.byte_ends.tolist()
    assert sequence.train_mask.tolist() == expected.train_mask.tolist()
    assert sequence.text_runs.tolist() == expected.text_runs.tolist()
    assert sequence.segment_end_tokens[-1] == expected.segment_end_tokens[-1]
    if is_text:
        # Without a mask, every token with a predecessor is trained, including an added space that is a separate token.
        _, without_mask = teacher_view(tokenizer, Document.from_teacher_ids(expected.ids))
        assert without_mask.train_mask.tolist() == [at > 0 for at in range(len(without_mask))]
        assert {**fields_of(without_mask), "train_mask": 0} == {**fields_of(sequence), "train_mask": 0}
    # Students train and compare the same tokens, unless a token of the teacher crosses the end of the prompt.
    (student_sequence,) = tokenize_documents(tokenizer_of["student"], [converted])
    assert student_sequence.ids.tolist() == student.ids.tolist()
    if (
        len(document.text.encode()) == len(completion.encode())
        or len(document.segments[0].text.encode()) in expected.byte_ends
    ):
        assert student_sequence.train_mask.tolist() == student.train_mask.tolist()
        assert trained_spans(student_sequence, sequence) == trained_spans(student, expected)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode([text])[0].ids.tolist()


def test_special_tokens_in_input_ids_have_no_text_and_separate_segments(tokenizer_of):
    teacher = tokenizer_of["teacher"]
    pad, end = teacher.special_token_ids["pad"], teacher.special_token_ids["eos"]
    prompt, answer, second_answer = (ids_of(teacher, text) for text in ("user\nAnna?", "Anna has 12.", "12 apples"))
    ids = [end, *prompt, end, *answer, end, pad, *second_answer, end, pad, pad]
    train_mask = [0, *[0] * len(prompt), 0, *[1] * len(answer), 1, 0, *[1] * len(second_answer), 1, 0, 0]
    document, sequence = teacher_view(teacher, Document.from_teacher_ids(ids, train_mask))
    assert [(segment.role, segment.text, segment.train) for segment in document.segments] == [
        ("prompt", "user\nAnna?", False),
        ("completion", "Anna has 12.", True),
        ("completion", "12 apples", True),
    ]
    assert document.is_complete
    assert sequence.ids.tolist() == ids[:-2]  # tokens after the last trained token are dropped
    assert sequence.train_mask.tolist() == [bool(flag) for flag in train_mask[:-2]]
    assert sequence.segment_end_tokens.tolist() == [-1, 2 + len(prompt) + len(answer), len(sequence) - 1]
    assert_valid_sequence(document, sequence)
    (student,) = tokenize_documents(tokenizer_of["student"], [document])
    assert_spans_have_equal_bytes(tokenizer_of["student"], student, teacher, sequence)
    assert trained_spans(student, sequence)[-1] == [len(student) - 1, len(student), len(sequence) - 1, len(sequence)]


def test_document_is_complete_only_with_a_trained_end_token(tokenizer_of):
    teacher = tokenizer_of["teacher"]
    ids = ids_of(teacher, "Anna has 12")
    end, pad = teacher.special_token_ids["eos"], teacher.special_token_ids["pad"]
    for end_ids, end_mask, is_complete in (
        ([end], [1], True),
        ([end], [0], False),
        ([], [], False),
        ([pad], [1], False),
    ):
        document, sequence = teacher_view(
            teacher, Document.from_teacher_ids([end, *ids, *end_ids], [1, *[1] * len(ids), *end_mask])
        )
        assert document.is_complete == is_complete
        assert (sequence.segment_end_tokens[-1] >= 0) == is_complete
        (student,) = tokenize_documents(tokenizer_of["student"], [document])
        assert (student.ids[-1] == tokenizer_of["student"].end_id) == is_complete


def test_end_of_turn_token_completes_a_document(families, tmp_path):
    folder = shutil.copytree(families["teacher"], tmp_path / "base")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    tokenizer = Tokenizer(folder)
    ids = [*ids_of(tokenizer, "Anna"), tokenizer.vocabulary.special_tokens[END_OF_TURN]]
    assert tokenizer.end_id != ids[-1]
    document, sequence = teacher_view(tokenizer, Document.from_teacher_ids(ids))
    assert document.is_complete
    assert sequence.segment_end_tokens.tolist() == [len(ids) - 1]


def test_empty_answer_trains_its_end_token(tokenizer_of):
    teacher = tokenizer_of["teacher"]
    ids = [*ids_of(teacher, "Anna has"), teacher.special_token_ids["eos"]]
    document, sequence = teacher_view(teacher, Document.from_teacher_ids(ids, [0] * (len(ids) - 1) + [1]))
    assert document.segments == (Segment("prompt", "Anna has", False), Segment("completion", "", True))
    (student,) = tokenize_documents(tokenizer_of["student"], [document])
    assert trained_spans(student, sequence) == [[len(student) - 1, len(student), len(ids) - 1, len(ids)]]


@given(text=st.text(st.sampled_from("ab 日😀é\u0301"), min_size=1, max_size=8), start=st.integers(0, 9), data=st.data())
@quick
def test_incomplete_characters_at_both_ends_are_not_in_the_text(tokenizer_of, text, start, data):
    teacher = tokenizer_of["teacher"]
    bos = teacher.start_ids[0]
    ids = ids_of(teacher, text)
    start = min(start, len(ids) - 1)
    stop = data.draw(st.integers(start + 1, len(ids)))
    part = ids[start:stop]
    document, sequence = teacher_view(teacher, Document.from_teacher_ids([bos, *part]))
    part_bytes = b"".join(map(teacher.vocabulary.bytes_of, part))
    assert document.text == part_bytes.decode("utf-8", "ignore")
    assert_valid_sequence(document, sequence)
    assert sequence.ids.tolist() == [bos, *part]
    assert sequence.train_mask.sum() == len(part)
    decoded = bytes_of_tokens(teacher, sequence, sequence.text_mask)
    assert decoded in document.text.encode()
    (student,) = tokenize_documents(tokenizer_of["student"], [document])
    assert_spans_have_equal_bytes(tokenizer_of["student"], student, teacher, sequence)


def test_character_belongs_to_the_segment_of_the_token_with_its_last_byte(tokenizer_of):
    teacher = tokenizer_of["teacher"]
    table = teacher.vocabulary.token_of_bytes
    ids = [table[bytes([byte])] for byte in "a日b".encode()]
    for train_mask, texts in (
        ([0, 0, 1, 1, 1], [("a", False), ("日b", True)]),
        ([1, 1, 1, 0, 1], [("a", True), ("日", False), ("b", True)]),
        ([0, 1, 1, 0, 0], [("a", False)]),
    ):
        document, sequence = teacher_view(teacher, Document.from_teacher_ids(ids, train_mask))
        assert [(segment.text, segment.train) for segment in document.segments] == texts
        assert sequence.train_mask.tolist() == [False, *(bool(flag) for flag in train_mask[1:])][: len(sequence)]


@pytest.mark.parametrize("middle", [b"\xe6\x97", b"\xff", b"\x80", b"\xed\xa0\x80"])
def test_trained_input_ids_that_are_not_utf8_are_refused_with_the_token(tokenizer_of, middle):
    teacher = tokenizer_of["teacher"]
    table = teacher.vocabulary.token_of_bytes
    invalid_ids = [table[bytes([byte])] for byte in middle]
    ids = [teacher.start_ids[0], table[b"a"], *invalid_ids, table[b"a"]]
    with pytest.raises(XtkError, match=rf"token 2 \(id {invalid_ids[0]}\) results in invalid UTF-8"):
        teacher_view(teacher, Document.from_teacher_ids(ids))
    # The same bytes are ignored after the last trained token.
    document, _ = teacher_view(teacher, Document.from_teacher_ids(ids, [1, 1, *[0] * (len(ids) - 2)]))
    assert document.text == "a"


@pytest.mark.parametrize("ids", [[5, 480], [5, -1], [2**31 - 1]])
def test_input_ids_outside_the_vocabulary_are_refused(tokenizer_of, ids):
    with pytest.raises(XtkError, match=rf"input_ids\[{len(ids) - 1}\] of a document is {ids[-1]}; the teacher"):
        teacher_view(tokenizer_of["teacher"], Document.from_teacher_ids(ids))


@pytest.mark.parametrize("name", ["word-piece", "word-piece-cased", "word-level"])
def test_input_ids_of_a_tokenizer_that_drops_spaces_are_refused(tokenizer_of, name):
    with pytest.raises(XtkError, match="do not contain the spaces"):
        teacher_view(tokenizer_of[name], Document.from_teacher_ids(ids_of(tokenizer_of[name], "Anna has")))


@pytest.mark.parametrize("ids", [[], [1], [1, 1]])
def test_input_ids_without_text_train_no_student_tokens(tokenizer_of, ids):
    document, sequence = teacher_view(tokenizer_of["teacher"], Document.from_teacher_ids(ids))
    assert document.text == ""
    assert_valid_sequence(document, sequence)
    (student,) = tokenize_documents(tokenizer_of["student"], [document])
    assert not student.train_mask.any()


def test_student_cannot_tokenize_a_document_with_only_input_ids(tokenizer_of):
    with pytest.raises(XtkError, match="only input_ids"):
        tokenize_documents(tokenizer_of["student"], [Document.from_teacher_ids([5, 6])])


def test_mixed_documents_keep_their_order_and_views(chat_tokenizers):
    teacher = chat_tokenizers["teacher"]
    documents = [
        Document.from_teacher_ids(ids_of(teacher, "Anna has")),
        Document.from_text("Anna"),
        Document.from_messages(CHAT).with_teacher_prompt("12"),
        Document.from_completion("a", "b").with_teacher_prompt("c"),
        Document.from_messages(CHAT),
        Document.from_teacher_ids(ids_of(teacher, "12")),
    ]
    pairs = teacher_views(teacher, documents)
    for document, pair in zip(documents, pairs, strict=True):
        single_document, sequence = teacher_view(teacher, document)
        assert (single_document, fields_of(sequence)) == (pair[0], fields_of(pair[1]))


def test_student_sequence_needs_only_the_fields_that_a_cache_stores(chat_tokenizers):
    teacher, student = chat_tokenizers["teacher"], chat_tokenizers["student"]
    ids = [*ids_of(teacher, "Anna has 日本"), teacher.special_token_ids["eos"]]
    documents = [
        Document.from_teacher_ids(ids, [0, 0, *[1] * (len(ids) - 2)]).with_candidate_ids([[1]] * (len(ids) - 2)),
        Document.from_completion("12 =", " 17").with_teacher_prompt("It is 17."),
        Document.from_messages(CHAT).with_teacher_prompt(CHAT[:1]),
    ]
    for document, sequence in teacher_views(teacher, documents):
        cached = Document(document.segments, is_complete=document.is_complete, conversation=document.conversation)
        (original_sequence,), (cached_sequence,) = (
            tokenize_documents(student, [document]),
            tokenize_documents(student, [cached]),
        )
        assert fields_of(original_sequence) == fields_of(cached_sequence)
        spans = trained_spans(cached_sequence, sequence)
        assert sum(stop - start for start, stop, _, _ in spans) == cached_sequence.train_mask.sum()


def test_unsplittable_documents_refuse_byte_slices(tokenizer_of):
    text = Document.from_text("Anna has 12")
    with_ids, _ = teacher_view(tokenizer_of["teacher"], Document.from_teacher_ids([5, 6]))
    for document in (
        text.with_teacher_prompt("a"),
        with_ids,
        Document.from_messages(CHAT),
        text.with_candidate_ids([[1]]),
    ):
        assert document.unsplittable_reason
        with pytest.raises(ValueError, match=document.unsplittable_reason):
            document.byte_slice(0, 1)
    assert text.unsplittable_reason is None


# Candidate ids.


def test_candidate_ids_need_one_list_of_valid_ids_per_trained_token(tokenizer_of):
    teacher = tokenizer_of["teacher"]
    ids = [teacher.start_ids[0], *ids_of(teacher, "Anna has 12")]
    lists = [[at, at + 1, at] for at in range(len(ids) - 1)]
    document, sequence = teacher_view(teacher, Document.from_teacher_ids(ids).with_candidate_ids(lists))
    assert len(document.candidate_ids) == sequence.train_mask.sum()
    assert document.candidate_ids.to_padded().tolist() == [[at, at + 1] for at in range(len(ids) - 1)]
    with pytest.raises(
        XtkError,
        match=rf"candidate_ids of a document has {len(lists) - 1} lists, but {len(lists)} of its tokens",
    ):
        teacher_view(teacher, Document.from_teacher_ids(ids).with_candidate_ids(lists[1:]))
    for wrong in (-1, teacher.embedding_rows):
        with pytest.raises(XtkError, match=f"candidate_ids of a document contains token id {wrong}; the teacher"):
            teacher_view(teacher, Document.from_teacher_ids(ids).with_candidate_ids([[wrong], *lists[1:]]))


@given(lists=st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=5), count=st.integers(0, 5))
@quick
def test_candidate_ids_are_padded_at_the_end(lists, count):
    candidate_ids = Document.from_text("a").with_candidate_ids(lists).candidate_ids
    table = candidate_ids.to_padded(count)
    assert [[number for number in row if number >= 0] for row in table.tolist()] == [
        sorted(set(numbers)) for numbers in lists[:count]
    ]
    assert table.shape[1] == max((len(set(numbers)) for numbers in lists[:count]), default=0)


@pytest.mark.parametrize("ids", [[1.5], ["a"], [None], [[1], [2, 3]], [2**31], [2**70], [True]])
def test_invalid_ids_are_refused(ids):
    with pytest.raises(ValueError, match="input_ids"):
        Document.from_teacher_ids(ids)
    with pytest.raises(ValueError, match="candidate_ids"):
        Document.from_text("a").with_candidate_ids([ids])


# Real tokenizers.


@pytest.mark.slow
def test_real_rollouts_keep_their_sampled_tokens(real_data):
    qwen, llama = (Tokenizer(real_data / "tokenizers" / name) for name in ("qwen", "llama3"))
    chat = [
        {"role": "user", "content": "Was kostet 日本茶 😀?"},
        {"role": "assistant", "content": "Das kostet 1234 €."},
    ]
    (chat_sequence,) = tokenize_documents(qwen, [Document.from_messages(chat)])
    document, sequence = teacher_view(qwen, Document.from_teacher_ids(chat_sequence.ids, chat_sequence.train_mask))
    assert trained_answers(document) == chat[1]["content"]
    assert document.is_complete
    (student,) = tokenize_documents(llama, [document])
    assert_spans_have_equal_bytes(llama, student, qwen, sequence)
    spans = trained_spans(student, sequence)
    assert sum(stop - start for start, stop, _, _ in spans) >= student.train_mask.sum() - 1
    # Truncated within a character.
    (incomplete,) = qwen.encode(["It says 🦙"])
    document, sequence = teacher_view(qwen, Document.from_teacher_ids(incomplete.ids[:-1]))
    assert document.text == "It says "
    assert not document.is_complete
    assert_valid_sequence(document, sequence)


@pytest.mark.slow
def test_real_teacher_view_contains_a_solution_that_the_student_does_not_see(real_data):
    qwen, llama = (Tokenizer(real_data / "tokenizers" / name) for name in ("qwen", "llama3"))
    plain = Document.from_completion("Question: 12 + 1222?\nAnswer:", " It is 1234.")
    document, sequence = teacher_view(qwen, plain.with_teacher_prompt("Question: 12 + 1222?\nSolution: 1234\nAnswer:"))
    (student,) = tokenize_documents(llama, [document])
    assert trained_text(qwen, sequence) == " It is 1234."
    assert trained_text(llama, student) == " It is 1234."
    spans = trained_spans(student, sequence)
    (alone,) = tokenize_documents(qwen, [plain])
    moved = len(sequence) - len(alone)
    assert spans == [[s0, s1, t0 + moved, t1 + moved] for s0, s1, t0, t1 in trained_spans(student, alone)]
