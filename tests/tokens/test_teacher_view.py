"""What a teacher reads beside the text: a prompt of its own, tokens as they are; aligned with any student."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from hypothesis_texts import PIECES, TEXTS, quick
from test_chat import CHAT, HEADERS, THINKING, TURNS, read_of, trained_text, with_template

from xtk.errors import XtkError
from xtk.tokens.alignment import align_sequences
from xtk.tokens.document import Document, Segment
from xtk.tokens.teacher_tokenization import teacher_views
from xtk.tokens.token_sequence import TokenSequence, count_lost_bytes, tokenize_documents
from xtk.tokens.tokenizer import Tokenizer

# Families whose tokens spell every text, perhaps after a space of their own.
SPELLING = ["student", "teacher", "gpt2", "llama3", "tekken", "metaspace", "metaspace-always", "llama2", "gemma"]
SHORT = st.lists(st.sampled_from([*PIECES, "Anna", " has", "12", " "]), max_size=4).map("".join)
END = "<|im_end|>"


@pytest.fixture(scope="session")
def tokenizer_of(families):
    return {name: Tokenizer(folder) for name, folder in families.items()}


@pytest.fixture(scope="module")
def talkers(families, tmp_path_factory):
    folder = tmp_path_factory.mktemp("talkers")
    templates = {"student": HEADERS, "teacher": TURNS, "composing": TURNS}
    return {name: with_template(families, folder, name, template) for name, template in templates.items()}


def read(tokenizer: Tokenizer, document: Document) -> tuple[Document, TokenSequence]:
    return teacher_views(tokenizer, [document])[0]


def parts_of(sequence: TokenSequence) -> dict[str, list[object]]:
    names = ("ids", "byte_ends", "train_mask", "text_runs", "segment_end_tokens")
    return {name: getattr(sequence, name).tolist() for name in names}


def trained_spans(student: TokenSequence, teacher: TokenSequence) -> list[list[int]]:
    spans = align_sequences(student, teacher)
    return spans[student.train_mask[spans[:, 1] - 1]].tolist()


def assert_spans_spell(one: Tokenizer, student: TokenSequence, other: Tokenizer, teacher: TokenSequence) -> None:
    """Spans hold the same bytes on both sides; a space that a tokenizer or a prompt put in front is forgiven."""
    for s0, s1, t0, t1 in align_sequences(student, teacher).tolist():
        left, right = read_of(one, student, np.arange(s0, s1)), read_of(other, teacher, np.arange(t0, t1))
        assert left == right or left.lstrip(b" ") == right.lstrip(b" ")


def assert_whole(document: Document, sequence: TokenSequence) -> None:
    """Hold a reading against what is promised of every sequence."""
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


# A prompt of its own: texts.


@pytest.mark.parametrize("name", SPELLING)
@given(prompt=SHORT, other=SHORT, completion=SHORT)
@quick
@example(prompt="Q: 12 =", other="A hint. Q: 12 = ", completion="17")
@example(prompt="é", other="\u0129", completion="x")
@example(prompt="", other="", completion="Anna")
@example(prompt="abc", other="", completion="Anna")
@example(prompt="An", other="xAn", completion="na has 12")
def test_the_teacher_reads_its_own_prompt_and_the_completion(tokenizer_of, name, prompt, other, completion):
    teacher, student = tokenizer_of[name], tokenizer_of["student"]
    plain = Document.from_completion(prompt, completion)
    document, sequence = read(teacher, plain.with_teacher_prompt(other))
    (alone,) = tokenize_documents(teacher, [Document.from_completion(other, completion)])
    assert (document.text, document.segments) == (plain.text, plain.segments)
    assert sequence.ids.tolist() == alone.ids.tolist()
    assert_whole(document, sequence)
    # Trained is what is trained in that text, but for a token that begins in what only the teacher reads.
    lost = alone.train_mask & ~sequence.train_mask
    assert lost.sum() <= 1
    assert not (sequence.train_mask & ~alone.train_mask).any()
    if not lost.any() and alone.exact and "▁" not in other + completion:
        spelled = read_of(teacher, sequence, sequence.train_mask & sequence.text_mask)
        assert spelled.endswith(completion.encode())
        assert len(sequence.text_runs) == 0 or sequence.byte_ends[sequence.text_runs[-1, 1] - 1] == len(
            document.text.encode()
        )
    (reader,) = tokenize_documents(student, [document])
    if "▁" not in completion + other:
        assert_spans_spell(student, reader, teacher, sequence)
    assert trained_spans(reader, sequence) or not (reader.train_mask.any() and teacher.end_id is not None)


@pytest.mark.parametrize("name", [*SPELLING, "composing", "t5", "word-piece"])
@given(prompt=TEXTS, completion=TEXTS)
@quick
def test_the_same_prompt_again_changes_nothing(tokenizer_of, name, prompt, completion):
    plain = Document.from_completion(prompt, completion)
    _, sequence = read(tokenizer_of[name], plain.with_teacher_prompt(plain.segments[0].text))
    assert parts_of(sequence) == parts_of(tokenize_documents(tokenizer_of[name], [plain])[0])


def test_a_token_over_the_edge_is_read_with_its_span_where_both_prompts_end_alike(tokenizer_of):
    teacher = tokenizer_of["teacher"]
    document = Document.from_completion("Say: An", "na has 12")
    _, sequence = read(teacher, document.with_teacher_prompt("A hint. Say: An"))
    assert trained_text(teacher, sequence) == " Anna has 12"
    (student,) = tokenize_documents(tokenizer_of["student"], [document])
    (alone,) = tokenize_documents(teacher, [document])
    moved = len(sequence) - len(alone)
    assert trained_spans(student, sequence) == [
        [s0, s1, t0 + moved, t1 + moved] for s0, s1, t0, t1 in trained_spans(student, alone)
    ]


def test_a_token_that_begins_in_what_only_the_teacher_reads_is_not_trained(tokenizer_of):
    teacher = tokenizer_of["teacher"]
    document = Document.from_completion("Who? ", "na has 12").with_teacher_prompt("Who? An")
    _, sequence = read(teacher, document)
    first = sequence.text_runs[0, 0]
    assert teacher.vocabulary.bytes_of(sequence.ids[first - 1]).endswith(b"na")
    assert not sequence.train_mask[first - 1]
    assert trained_text(teacher, sequence) == " has 12"
    assert sequence.text_runs[0, 2] == len("Who? na")


def test_a_space_of_the_prompt_that_begins_the_first_word_costs_no_token(tokenizer_of):
    document = Document.from_text("Anna has 12").with_teacher_prompt("A hint: ")
    _, sequence = read(tokenizer_of["teacher"], document)
    assert trained_text(tokenizer_of["teacher"], sequence) == " Anna has 12"
    assert sequence.text_runs[0, 2] == 0
    (student,) = tokenize_documents(tokenizer_of["student"], [document])
    assert len(trained_spans(student, sequence)) == student.train_mask.sum()


def test_a_text_stays_trained_whole_behind_a_prompt(tokenizer_of):
    teacher = tokenizer_of["teacher"]
    document, sequence = read(teacher, Document.from_text("Anna has 12 apples.").with_teacher_prompt("Known: 12.\n"))
    assert document.segments == (Segment("text", "Anna has 12 apples.", True),)
    assert trained_text(teacher, sequence) == "Anna has 12 apples."
    assert read_of(teacher, sequence, sequence.ids >= 0) == b"Known: 12.\nAnna has 12 apples."
    assert sequence.segment_end_tokens.tolist() == [len(sequence) - 1]
    assert count_lost_bytes(document, sequence) == 0


@given(text=TEXTS.filter(bool), prompt=SHORT, keep=st.integers(1, 40))
@quick
def test_cut_short_it_keeps_its_spans(tokenizer_of, text, prompt, keep):
    document, sequence = read(tokenizer_of["teacher"], Document.from_text(text).with_teacher_prompt(prompt))
    (student,) = tokenize_documents(tokenizer_of["student"], [document])
    whole = align_sequences(student, sequence)
    assert align_sequences(student, sequence.truncate(keep)).tolist() == whole[whole[:, 3] <= keep].tolist()


def test_a_normaliser_before_the_edge_moves_nothing_behind_it(tokenizer_of):
    document = Document.from_completion("Cafe\u0301?", " Anna has 12").with_teacher_prompt(
        "Cafe\u0301 e\u0301 e\u0301!"
    )
    teacher = tokenizer_of["composing"]
    _, sequence = read(teacher, document)
    assert trained_text(teacher, sequence) == " Anna has 12"
    assert sequence.text_runs[0, 2] == len("Cafe\u0301?".encode())


# A prompt of its own: conversations.


def answers(document: Document) -> str:
    return "".join(segment.text for segment in document.segments if segment.train)


@pytest.mark.parametrize("name", ["student", "teacher", "composing"])
@given(
    contents=st.lists(SHORT, min_size=4, max_size=4),
    prompt=st.one_of(SHORT, st.lists(SHORT, max_size=3)),
    system=st.booleans(),
)
@quick
def test_a_conversation_after_other_messages_is_aligned_by_its_answers(talkers, name, contents, prompt, system):
    roles = ["user", "assistant"] * 2
    chat = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)]
    chat = [{"role": "system", "content": "Be brief."}, *chat] if system else chat
    plain = Document.from_messages(chat)
    told = prompt if isinstance(prompt, str) else [{"role": "user", "content": text} for text in prompt]
    document, sequence = read(talkers[name], plain.with_teacher_prompt(told))
    before = (
        [{"role": "system", "content": told}, *chat[system:]] if isinstance(told, str) else [*told, *chat[1 + system :]]
    )
    (alone,) = tokenize_documents(talkers[name], [Document.from_messages(before)])
    assert sequence.ids.tolist() == alone.ids.tolist()
    assert (document.segments, document.conversation) == (plain.segments, plain.conversation)
    assert_whole(document, sequence)
    assert sequence.train_mask.tolist() == alone.train_mask.tolist()
    (reader,) = tokenize_documents(talkers["student"], [document])
    (same,) = tokenize_documents(talkers[name], [plain])
    assert [span[:2] for span in trained_spans(reader, sequence)] == [span[:2] for span in trained_spans(reader, same)]


def test_messages_replace_those_before_the_first_answer_and_what_stands_between_answers_stays(talkers):
    hints = [{"role": "system", "content": "The solution: 1222."}, {"role": "user", "content": "Anna?"}]
    document, sequence = read(talkers["teacher"], Document.from_messages(CHAT).with_teacher_prompt(hints))
    said = read_of(talkers["teacher"], sequence, sequence.ids >= 0).decode()
    assert said.startswith("system\nThe solution: 1222.\nuser\nAnna?\nassistant\nAnna has 1222 apples left.")
    assert CHAT[1]["content"] not in said
    assert "tool\n1222" in said
    assert trained_text(talkers["teacher"], sequence) == answers(document)
    assert (sequence.segment_end_tokens >= 0).tolist() == [False, False, True, True, True]


def test_a_text_is_the_system_message_of_a_conversation(talkers):
    for chat in (CHAT, CHAT[1:]):
        document, sequence = read(talkers["teacher"], Document.from_messages(chat).with_teacher_prompt("Solve it."))
        said = read_of(talkers["teacher"], sequence, sequence.ids >= 0).decode()
        assert said.startswith("system\nSolve it.\nuser\nAnna has 1234")
        assert "Be brief" not in said
        assert trained_text(talkers["teacher"], sequence) == answers(document)


def test_an_answer_that_a_template_rewrites_is_found_behind_another_prompt(families, tmp_path):
    teacher = with_template(families, tmp_path, "teacher", THINKING)
    thought = "<think>a long thought about 12</think>\n\n"
    chat = [CHAT[1], {"role": "assistant", "content": thought + "Anna has 1222 apples left."}]
    document, sequence = read(teacher, Document.from_messages(chat).with_teacher_prompt("The solution: 1222."))
    assert trained_text(teacher, sequence) == "Anna has 1222 apples left."
    assert count_lost_bytes(document, sequence) == len(thought)


def test_a_conversation_without_an_answer_is_read_as_it_is(talkers):
    document = Document.from_messages(CHAT[:2])
    _, sequence = read(talkers["teacher"], document.with_teacher_prompt([CHAT[1]]))
    assert parts_of(sequence) == parts_of(tokenize_documents(talkers["teacher"], [document])[0])


@pytest.mark.parametrize(
    ("document", "prompt", "what"),
    [
        (Document.from_text("a"), [CHAT[0]], "has no messages"),
        (Document.from_messages(CHAT), [{"content": "who?"}], "role"),
        (Document.from_messages([{"role": "system", "content": "a", "train": True}]), "b", "is trained"),
        (Document.from_teacher_ids([1, 2]), "b", "input_ids, which are used unchanged"),
    ],
)
def test_a_prompt_that_has_no_place_is_refused(document, prompt, what):
    with pytest.raises(ValueError, match=what):
        document.with_teacher_prompt(prompt)


# Marks of messages.


def test_messages_say_themselves_whether_they_are_trained():
    marks = [{}, {"train": True}, {"train": False}, {"weight": 0}, {"weight": 1}, {"weight": None, "train": None},
             {"train": True, "weight": 0}]  # fmt: skip
    for role, trained in (("assistant", [1, 1, 0, 0, 1, 1, 0]), ("user", [0, 1, 0, 0, 0, 0, 0])):
        document = Document.from_messages([{"role": role, "content": "a", **mark} for mark in marks])
        assert [segment.train for segment in document.segments] == [bool(flag) for flag in trained]
        assert all(set(message) == {"role", "content"} for message in document.conversation.messages)
        prompt = Document.from_messages(
            [{"role": role, "content": "a", **mark} for mark in marks], num_prompt_messages=len(marks)
        )
        assert not any(segment.train for segment in prompt.segments)


@pytest.mark.parametrize("mark", [{"train": "yes"}, {"weight": 0.5}, {"weight": float("nan")}, {"train": []}])
def test_a_mark_that_is_neither_yes_nor_no_is_refused(mark):
    with pytest.raises(ValueError, match=r"must be true or false"):
        Document.from_messages([{"role": "assistant", "content": "a", **mark}])


def test_an_answer_that_is_masked_is_read_and_carries_no_loss(talkers):
    chat = [*CHAT[:2], {**CHAT[2], "train": False}, *CHAT[3:]]
    (sequence,) = tokenize_documents(talkers["teacher"], [Document.from_messages(chat)])
    assert trained_text(talkers["teacher"], sequence) == CHAT[4]["content"]
    (plain,) = tokenize_documents(talkers["teacher"], [Document.from_messages(CHAT)])
    assert sequence.ids.tolist() == plain.ids.tolist()


# Tokens as they are.


@pytest.mark.parametrize("name", SPELLING)
@given(prompt=TEXTS, completion=TEXTS.filter(bool), whole=st.booleans())
@quick
def test_the_tokens_of_a_text_are_read_as_the_text(tokenizer_of, name, prompt, completion, whole):
    assume("▁" not in prompt + completion)
    document = Document.from_text(completion) if whole else Document.from_completion(prompt, completion)
    tokenizer = tokenizer_of[name]
    assume(not (tokenizer.adds_prefix_space and document.text.startswith(" ")))  # which is then one with its own
    (expected,) = tokenize_documents(tokenizer, [document])
    assume(expected.exact)
    (student,) = tokenize_documents(tokenizer_of["student"], [document])
    again, sequence = read(tokenizer, Document.from_teacher_ids(expected.ids, expected.train_mask))
    assert (again.text, again.is_complete) == (document.text, document.is_complete)
    assert_whole(again, sequence)
    assert sequence.ids.tolist() == expected.ids.tolist()
    assert sequence.byte_ends.tolist() == expected.byte_ends.tolist()
    assert sequence.train_mask.tolist() == expected.train_mask.tolist()
    assert sequence.text_runs.tolist() == expected.text_runs.tolist()
    assert sequence.segment_end_tokens[-1] == expected.segment_end_tokens[-1]
    if whole:
        # Without flags every token is trained that another one predicts: also a space alone that was put in front.
        _, other = read(tokenizer, Document.from_teacher_ids(expected.ids))
        assert other.train_mask.tolist() == [at > 0 for at in range(len(other))]
        assert {**parts_of(other), "train_mask": 0} == {**parts_of(sequence), "train_mask": 0}
    # What students train and compare is the same, but for tokens over a prompt's edge where the teacher has one too.
    (reader,) = tokenize_documents(tokenizer_of["student"], [again])
    assert reader.ids.tolist() == student.ids.tolist()
    if (
        len(document.text.encode()) == len(completion.encode())
        or len(document.segments[0].text.encode()) in expected.byte_ends
    ):
        assert reader.train_mask.tolist() == student.train_mask.tolist()
        assert trained_spans(reader, sequence) == trained_spans(student, expected)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode([text])[0].ids.tolist()


def test_special_tokens_spell_nothing_and_bound_segments(tokenizer_of):
    teacher = tokenizer_of["teacher"]
    pad, end = teacher.special_token_ids["pad"], teacher.special_token_ids["eos"]
    prompt, answer, other = (ids_of(teacher, text) for text in ("user\nAnna?", "Anna has 12.", "12 apples"))
    ids = [end, *prompt, end, *answer, end, pad, *other, end, pad, pad]
    flags = [0, *[0] * len(prompt), 0, *[1] * len(answer), 1, 0, *[1] * len(other), 1, 0, 0]
    document, sequence = read(teacher, Document.from_teacher_ids(ids, flags))
    assert [(part.role, part.text, part.train) for part in document.segments] == [
        ("prompt", "user\nAnna?", False),
        ("completion", "Anna has 12.", True),
        ("completion", "12 apples", True),
    ]
    assert document.is_complete
    assert sequence.ids.tolist() == ids[:-2]  # what stands behind the last trained token changes nothing
    assert sequence.train_mask.tolist() == [bool(flag) for flag in flags[:-2]]
    assert sequence.segment_end_tokens.tolist() == [-1, 2 + len(prompt) + len(answer), len(sequence) - 1]
    assert_whole(document, sequence)
    (student,) = tokenize_documents(tokenizer_of["student"], [document])
    assert_spans_spell(tokenizer_of["student"], student, teacher, sequence)
    assert trained_spans(student, sequence)[-1] == [len(student) - 1, len(student), len(sequence) - 1, len(sequence)]


def test_a_document_ends_only_where_a_trained_end_token_ends_it(tokenizer_of):
    teacher = tokenizer_of["teacher"]
    ids = ids_of(teacher, "Anna has 12")
    end, pad = teacher.special_token_ids["eos"], teacher.special_token_ids["pad"]
    for tail, flags, ends in (([end], [1], True), ([end], [0], False), ([], [], False), ([pad], [1], False)):
        document, sequence = read(teacher, Document.from_teacher_ids([end, *ids, *tail], [1, *[1] * len(ids), *flags]))
        assert document.is_complete == ends
        assert (sequence.segment_end_tokens[-1] >= 0) == ends
        (student,) = tokenize_documents(tokenizer_of["student"], [document])
        assert (student.ids[-1] == tokenizer_of["student"].end_id) == ends


def test_the_end_of_a_turn_ends_a_document_too(families, tmp_path):
    folder = shutil.copytree(families["teacher"], tmp_path / "base")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    tokenizer = Tokenizer(folder)
    ids = [*ids_of(tokenizer, "Anna"), tokenizer.vocabulary.special_tokens[END]]
    assert tokenizer.end_id != ids[-1]
    document, sequence = read(tokenizer, Document.from_teacher_ids(ids))
    assert document.is_complete
    assert sequence.segment_end_tokens.tolist() == [len(ids) - 1]


def test_an_answer_of_its_end_alone_trains_that_end(tokenizer_of):
    teacher = tokenizer_of["teacher"]
    ids = [*ids_of(teacher, "Anna has"), teacher.special_token_ids["eos"]]
    document, sequence = read(teacher, Document.from_teacher_ids(ids, [0] * (len(ids) - 1) + [1]))
    assert document.segments == (Segment("prompt", "Anna has", False), Segment("completion", "", True))
    (student,) = tokenize_documents(tokenizer_of["student"], [document])
    assert trained_spans(student, sequence) == [[len(student) - 1, len(student), len(ids) - 1, len(ids)]]


@given(text=st.text(st.sampled_from("ab 日😀é\u0301"), min_size=1, max_size=8), start=st.integers(0, 9), data=st.data())
@quick
def test_half_a_character_at_either_end_is_in_no_text(tokenizer_of, text, start, data):
    teacher = tokenizer_of["teacher"]
    bos = teacher.start_id
    ids = ids_of(teacher, text)
    start = min(start, len(ids) - 1)
    stop = data.draw(st.integers(start + 1, len(ids)))
    part = ids[start:stop]
    document, sequence = read(teacher, Document.from_teacher_ids([bos, *part]))
    raw = b"".join(map(teacher.vocabulary.bytes_of, part))
    assert document.text == raw.decode("utf-8", "ignore")
    assert_whole(document, sequence)
    assert sequence.ids.tolist() == [bos, *part]
    assert sequence.train_mask.sum() == len(part)
    spelled = read_of(teacher, sequence, sequence.text_mask)
    assert spelled in document.text.encode()
    (student,) = tokenize_documents(tokenizer_of["student"], [document])
    assert_spans_spell(tokenizer_of["student"], student, teacher, sequence)


def test_a_character_belongs_to_the_token_of_its_last_byte(tokenizer_of):
    teacher = tokenizer_of["teacher"]
    table = teacher.vocabulary.token_of_bytes
    ids = [table[bytes([byte])] for byte in "a日b".encode()]
    for flags, texts in (
        ([0, 0, 1, 1, 1], [("a", False), ("日b", True)]),
        ([1, 1, 1, 0, 1], [("a", True), ("日", False), ("b", True)]),
        ([0, 1, 1, 0, 0], [("a", False)]),
    ):
        document, sequence = read(teacher, Document.from_teacher_ids(ids, flags))
        assert [(part.text, part.train) for part in document.segments] == texts
        assert sequence.train_mask.tolist() == [False, *(bool(flag) for flag in flags[1:])][: len(sequence)]


@pytest.mark.parametrize("middle", [b"\xe6\x97", b"\xff", b"\x80", b"\xed\xa0\x80"])
def test_bytes_that_are_no_text_are_refused_by_their_token(tokenizer_of, middle):
    teacher = tokenizer_of["teacher"]
    table = teacher.vocabulary.token_of_bytes
    broken = [table[bytes([byte])] for byte in middle]
    ids = [teacher.start_id, table[b"a"], *broken, table[b"a"]]
    with pytest.raises(XtkError, match=rf"token 2 \(id {broken[0]}\) results in invalid UTF-8"):
        read(teacher, Document.from_teacher_ids(ids))
    # Not where it is read by nobody.
    document, _ = read(teacher, Document.from_teacher_ids(ids, [1, 1, *[0] * (len(ids) - 2)]))
    assert document.text == "a"


@pytest.mark.parametrize("ids", [[5, 480], [5, -1], [2**31 - 1]])
def test_ids_that_no_token_has_are_refused(tokenizer_of, ids):
    with pytest.raises(XtkError, match=rf"input_ids\[{len(ids) - 1}\] of a document is {ids[-1]}; the teacher"):
        read(tokenizer_of["teacher"], Document.from_teacher_ids(ids))


@pytest.mark.parametrize("name", ["word-piece", "word-piece-cased", "word-level"])
def test_a_tokenizer_that_drops_spaces_makes_no_text(tokenizer_of, name):
    with pytest.raises(XtkError, match="do not contain the spaces"):
        read(tokenizer_of[name], Document.from_teacher_ids(ids_of(tokenizer_of[name], "Anna has")))


@pytest.mark.parametrize("ids", [[], [1], [1, 1]])
def test_tokens_without_a_text_train_nothing_on_a_student(tokenizer_of, ids):
    document, sequence = read(tokenizer_of["teacher"], Document.from_teacher_ids(ids))
    assert document.text == ""
    assert_whole(document, sequence)
    (student,) = tokenize_documents(tokenizer_of["student"], [document])
    assert not student.train_mask.any()


def test_tokens_have_no_text_before_a_teacher_read_them(tokenizer_of):
    with pytest.raises(XtkError, match="only input_ids"):
        tokenize_documents(tokenizer_of["student"], [Document.from_teacher_ids([5, 6])])


def test_documents_of_all_kinds_are_read_in_their_order(talkers):
    teacher = talkers["teacher"]
    documents = [
        Document.from_teacher_ids(ids_of(teacher, "Anna has")),
        Document.from_text("Anna"),
        Document.from_messages(CHAT).with_teacher_prompt("12"),
        Document.from_completion("a", "b").with_teacher_prompt("c"),
        Document.from_messages(CHAT),
        Document.from_teacher_ids(ids_of(teacher, "12")),
    ]
    together = teacher_views(teacher, documents)
    for document, pair in zip(documents, together, strict=True):
        again, sequence = read(teacher, document)
        assert (again, parts_of(sequence)) == (pair[0], parts_of(pair[1]))


def test_students_read_what_a_cache_keeps_of_a_document(talkers):
    teacher, student = talkers["teacher"], talkers["student"]
    ids = [*ids_of(teacher, "Anna has 日本"), teacher.special_token_ids["eos"]]
    documents = [
        Document.from_teacher_ids(ids, [0, 0, *[1] * (len(ids) - 2)]).with_candidate_ids([[1]] * (len(ids) - 2)),
        Document.from_completion("12 =", " 17").with_teacher_prompt("It is 17."),
        Document.from_messages(CHAT).with_teacher_prompt(CHAT[:1]),
    ]
    for document, sequence in teacher_views(teacher, documents):
        kept = Document(document.segments, is_complete=document.is_complete, conversation=document.conversation)
        (one,), (other,) = tokenize_documents(student, [document]), tokenize_documents(student, [kept])
        assert parts_of(one) == parts_of(other)
        spans = trained_spans(other, sequence)
        assert sum(stop - start for start, stop, _, _ in spans) == other.train_mask.sum()


def test_what_belongs_together_is_not_cut(tokenizer_of):
    text = Document.from_text("Anna has 12")
    ids, _ = read(tokenizer_of["teacher"], Document.from_teacher_ids([5, 6]))
    for document in (text.with_teacher_prompt("a"), ids, Document.from_messages(CHAT), text.with_candidate_ids([[1]])):
        assert document.unsplittable_reason
        with pytest.raises(ValueError, match=document.unsplittable_reason):
            document.byte_slice(0, 1)
    assert text.unsplittable_reason is None


# Ids that are asked about.


def test_given_ids_are_as_many_as_trained_tokens(tokenizer_of):
    teacher = tokenizer_of["teacher"]
    ids = [teacher.start_id, *ids_of(teacher, "Anna has 12")]
    lists = [[at, at + 1, at] for at in range(len(ids) - 1)]
    document, sequence = read(teacher, Document.from_teacher_ids(ids).with_candidate_ids(lists))
    assert len(document.candidate_ids) == sequence.train_mask.sum()
    assert document.candidate_ids.to_padded().tolist() == [[at, at + 1] for at in range(len(ids) - 1)]
    with pytest.raises(
        XtkError,
        match=rf"candidate_ids of a document has {len(lists) - 1} lists, but {len(lists)} of its tokens",
    ):
        read(teacher, Document.from_teacher_ids(ids).with_candidate_ids(lists[1:]))
    for wrong in (-1, teacher.embedding_rows):
        with pytest.raises(XtkError, match=f"candidate_ids of a document contains token id {wrong}; the teacher"):
            read(teacher, Document.from_teacher_ids(ids).with_candidate_ids([[wrong], *lists[1:]]))


@given(lists=st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=5), count=st.integers(0, 5))
@quick
def test_lists_of_ids_are_padded_behind(lists, count):
    candidate_ids = Document.from_text("a").with_candidate_ids(lists).candidate_ids
    table = candidate_ids.to_padded(count)
    assert [[number for number in row if number >= 0] for row in table.tolist()] == [
        sorted(set(numbers)) for numbers in lists[:count]
    ]
    assert table.shape[1] == max((len(set(numbers)) for numbers in lists[:count]), default=0)


@pytest.mark.parametrize("ids", [[1.5], ["a"], [None], [[1], [2, 3]], [2**31], [2**70], [True]])
def test_what_are_no_ids_is_refused(ids):
    with pytest.raises(ValueError, match="input_ids"):
        Document.from_teacher_ids(ids)
    with pytest.raises(ValueError, match="candidate_ids"):
        Document.from_text("a").with_candidate_ids([ids])


# Real tokenizers.


def test_real_rollouts_are_read_as_they_were_drawn(real_data):
    qwen, llama = (Tokenizer(real_data / "tokenizers" / name) for name in ("qwen", "llama3"))
    chat = [
        {"role": "user", "content": "Was kostet 日本茶 😀?"},
        {"role": "assistant", "content": "Das kostet 1234 €."},
    ]
    (talk,) = tokenize_documents(qwen, [Document.from_messages(chat)])
    document, sequence = read(qwen, Document.from_teacher_ids(talk.ids, talk.train_mask))
    assert answers(document) == chat[1]["content"]
    assert document.is_complete
    (student,) = tokenize_documents(llama, [document])
    assert_spans_spell(llama, student, qwen, sequence)
    spans = trained_spans(student, sequence)
    assert sum(stop - start for start, stop, _, _ in spans) >= student.train_mask.sum() - 1
    # Cut by length in the midst of a character.
    (cut,) = qwen.encode(["It says 🦙"])
    document, sequence = read(qwen, Document.from_teacher_ids(cut.ids[:-1]))
    assert document.text == "It says "
    assert not document.is_complete
    assert_whole(document, sequence)


def test_a_real_teacher_reads_a_solution_and_its_student_does_not(real_data):
    qwen, llama = (Tokenizer(real_data / "tokenizers" / name) for name in ("qwen", "llama3"))
    plain = Document.from_completion("Question: 12 + 1222?\nAnswer:", " It is 1234.")
    document, sequence = read(qwen, plain.with_teacher_prompt("Question: 12 + 1222?\nSolution: 1234\nAnswer:"))
    (student,) = tokenize_documents(llama, [document])
    assert trained_text(qwen, sequence) == " It is 1234."
    assert trained_text(llama, student) == " It is 1234."
    spans = trained_spans(student, sequence)
    (alone,) = tokenize_documents(qwen, [plain])
    moved = len(sequence) - len(alone)
    assert spans == [[s0, s1, t0 + moved, t1 + moved] for s0, s1, t0, t1 in trained_spans(student, alone)]
