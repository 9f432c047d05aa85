"""What a student wrote: read by itself as it drew it, by others as the text that it spells."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_texts import quick
from test_chat import HEADERS, TURNS, with_template
from tokenizer_families import MAKERS

from xtk.artifacts.record_to_document import record_to_document
from xtk.errors import XtkError
from xtk.tokens.alignment import align_sequences
from xtk.tokens.document import Document, Segment
from xtk.tokens.document_token_ids import SampledTokens
from xtk.tokens.rollout_tokens import completion_text, decode_tokens
from xtk.tokens.teacher_tokenization import teacher_views
from xtk.tokens.token_sequence import TokenSequence, tokenize_documents
from xtk.tokens.tokenizer import Tokenizer

WRITERS = ["student", "teacher", "metaspace", "gpt2", "llama2", "gemma", "byte-lower"]


def rollout(tokenizer: Tokenizer, turns: list[tuple[str, list[int]]], advantage: float = 0.0) -> Document:
    """Return the document of prompts (or what tools answer), each followed by tokens that were drawn."""
    ids = [tokenizer.start_id] if tokenizer.start_id is not None else []
    drawn, segments = [False] * len(ids), []
    for prompt, own in turns:
        read = tokenizer.encode([prompt])[0].ids.tolist()
        said = decode_tokens(
            tokenizer,
            np.array(own, np.int32),
            at_text_start=not any(segment.text for segment in segments) and not prompt,
        )
        segments += [Segment("prompt", prompt, False)] if prompt else []
        segments.append(Segment("completion", said.text, True))
        ids += [*read, *own]
        drawn += [False] * len(read) + [True] * len(own)
    logprobs = np.linspace(-3, -1, len(ids)) * np.array(drawn)
    tokens = SampledTokens.from_lists(ids, drawn, logprobs, tokenizer.fingerprint, advantage=advantage)
    return Document(tuple(segments), is_complete=said.end_token >= 0, sampled_tokens=tokens)


def ordinary(tokenizer: Tokenizer) -> list[int]:
    """Tokens that are neither controls nor ends."""
    apart = {*np.flatnonzero(tokenizer.vocabulary.special_mask).tolist(), *tokenizer.end_ids}
    return [token for token in range(len(tokenizer)) if token not in apart]


def check_spans(
    student: Tokenizer, teacher: Tokenizer, ours: TokenSequence, theirs: TokenSequence, text: bytes
) -> None:
    """Every span holds the same bytes of the text on both sides."""
    for s0, s1, t0, t1 in align_sequences(ours, theirs).tolist():
        if s0 in ours.segment_end_tokens.tolist():
            assert s1 == s0 + 1
            assert t0 in theirs.segment_end_tokens.tolist()
            continue
        assert ours.byte_ends[s1 - 1] == theirs.byte_ends[t1 - 1]
        mine = b"".join(map(student.vocabulary.bytes_of, ours.ids[s0:s1].tolist()))
        stop = int(ours.byte_ends[s1 - 1])
        assert text[:stop].endswith(mine.strip())


@pytest.mark.parametrize("name", WRITERS)
@given(data=st.data())
@quick
def test_drawn_tokens_are_read_as_drawn_and_aligned_by_their_bytes(families, name, data):
    student, teacher = Tokenizer(families[name]), Tokenizer(families["teacher" if name != "teacher" else "student"])
    tokens = st.lists(st.sampled_from(ordinary(student)), min_size=1, max_size=12)
    turns = data.draw(
        st.lists(st.tuples(st.sampled_from(["Anna has ", "12 + 30 =", "日本 "]), tokens), min_size=1, max_size=3)
    )
    if data.draw(st.booleans()) and student.end_id is not None:
        turns[-1][1].append(student.end_id)
    document = rollout(student, turns)
    (ours,), ((same, theirs),) = tokenize_documents(student, [document]), teacher_views(teacher, [document])
    assert same.text == document.text
    np.testing.assert_array_equal(ours.ids, document.sampled_tokens.ids)
    np.testing.assert_array_equal(ours.train_mask[1:], document.sampled_tokens.sampled_mask[1:])
    check_spans(student, teacher, ours, theirs, document.text.encode())
    # A teacher with the same tokenizer reads what was drawn, whatever its tokenizer would have made of the text.
    ((_, own),) = teacher_views(student, [document])
    np.testing.assert_array_equal(own.ids, ours.ids)
    spans = align_sequences(ours, own)
    assert (spans[:, :2] == spans[:, 2:]).all()
    assert SampledTokens.from_bytes(document.sampled_tokens.to_bytes()) == document.sampled_tokens


def test_text_ends_where_tokens_spell_none(families):
    tokenizer = Tokenizer(families["student"])
    spelling = {token: tokenizer.vocabulary.bytes_of(token) for token in ordinary(tokenizer)}
    by_bytes = {spelling: token for token, spelling in spelling.items()}
    e, acute = by_bytes["é".encode()[:1]], by_bytes["é".encode()[1:]]
    a, end = by_bytes[b"a"], tokenizer.end_id
    cases = [
        ([a, end], "a", [1], 1),
        ([a, e, acute, end], "aé", [1, 2, 3], 3),
        ([a, e], "a", [1], -1),  # cut in the middle of a character
        ([a, e, a, end], "a", [1], -1),  # no character
        ([end], "", [], 0),
        ([a, tokenizer.start_id, a, end], "a", [1], -1),
    ]
    for ids, text, ends, closer in cases:
        said = decode_tokens(tokenizer, np.array(ids, np.int32))
        assert (said.text, said.end_token) == (text, closer), ids
        assert len(said.byte_ends) == len(ends)


def test_rewards_read_all_of_a_completion(families):
    tokenizer = Tokenizer(families["student"])
    by_bytes = tokenizer.vocabulary.token_of_bytes
    a, end, start = by_bytes[b"a"], tokenizer.end_id, tokenizer.start_id
    e = by_bytes["é".encode()[:1]]
    name = tokenizer.special_token_names[start]
    for ids, text in (
        ([a, end], "a"), ([a, start, a, end], f"a{name}a"), ([start, a], f"{name}a"), ([end], ""), ([], ""),
        ([a, e], "a"), ([a, e, a], "a\ufffda"), ([a, end, a], f"a{tokenizer.special_token_names[end]}a"),
    ):  # fmt: skip
        assert completion_text(tokenizer, np.array(ids, np.int32)) == text


def test_a_teacher_with_another_prompt_reads_the_same_tokens(families):
    tokenizer = Tokenizer(families["student"])
    pieces = [tokenizer.vocabulary.token_of_bytes[bytes([byte])] for byte in b"has 12 apples"]
    assert tokenizer.encode(["has 12 apples"])[0].ids.tolist() != pieces  # not what the tokenizer would make of it
    document = rollout(tokenizer, [("Anna: ", [*pieces, tokenizer.end_id])])
    privileged = document.with_teacher_prompt("The answer is 12.\nAnna: ")
    ((_, read),) = teacher_views(tokenizer, [privileged])
    (ours,) = tokenize_documents(tokenizer, [privileged])
    spans = align_sequences(ours, read)
    trained = spans[ours.train_mask[spans[:, 1] - 1]]
    assert (trained[:, 1] - trained[:, 0] == 1).all()
    assert (trained[:, 3] - trained[:, 2] == 1).all()
    np.testing.assert_array_equal(ours.ids[trained[:, 0]], [*pieces, tokenizer.end_id])
    np.testing.assert_array_equal(read.ids[trained[:, 2]], [*pieces, tokenizer.end_id])
    assert read.train_mask.sum() == len(pieces) + 1


def test_conversations_keep_their_drawn_turns(families, tmp_path):
    student = with_template(families, tmp_path, "student", HEADERS)
    teacher = with_template(families, tmp_path, "teacher", TURNS)
    other = with_template(families, tmp_path, "student", HEADERS.replace("\n\n", " says\n"))
    messages = [
        {"role": "user", "content": "12 + 30?"},
        {"role": "assistant", "content": "48/2="},
        {"role": "tool", "content": "24"},
        {"role": "assistant", "content": "It is 42."},
    ]
    plain = Document.from_messages(messages)
    (read,) = tokenize_documents(student, [plain])
    assert [student.vocabulary.bytes_of(token) for token in read.ids[read.segment_end_tokens].tolist()] == [b""] * 4
    ids, flags, last = [], [], 0
    for start, stop in (
        np.flatnonzero(np.diff(read.train_mask.astype(int), prepend=0, append=0)).reshape(-1, 2).tolist()
    ):
        content = read.ids[start : stop - 1].tolist()
        letters = b"".join(map(student.vocabulary.bytes_of, content))
        own = [student.vocabulary.token_of_bytes[bytes([byte])] for byte in letters]
        before = read.ids[last:start].tolist()
        ids += [*before, *own, int(read.ids[stop - 1])]
        flags += [False] * len(before) + [True] * (len(own) + 1)
        last = stop
    drawn = SampledTokens.from_lists(
        ids, flags, -np.array(flags, float), student.fingerprint, student.template_fingerprint
    )
    document = Document(plain.segments, conversation=plain.conversation, sampled_tokens=drawn)
    (ours,) = tokenize_documents(student, [document])
    np.testing.assert_array_equal(ours.ids, ids)
    assert (ours.segment_end_tokens >= 0).sum() == 2
    # Another template around the same turns: what was drawn is spliced in; another tokenizer reads the text.
    ((_, spliced),), ((_, theirs),) = teacher_views(other, [document]), teacher_views(teacher, [document])
    for side, tokenizer in ((spliced, other), (theirs, teacher)):
        spans = align_sequences(ours, side)
        check_spans(student, tokenizer, ours, side, document.text.encode())
        covered = np.concatenate([np.arange(start, stop) for start, stop in spans[:, :2].tolist()])
        np.testing.assert_array_equal(
            np.intersect1d(covered, np.flatnonzero(ours.train_mask)), np.flatnonzero(ours.train_mask)
        )
    spans = align_sequences(ours, spliced)
    np.testing.assert_array_equal(ours.ids[spans[:, 0]], spliced.ids[spans[:, 2]])


def test_other_text_than_that_of_the_tokens_is_refused(families):
    tokenizer = Tokenizer(families["student"])
    document = rollout(tokenizer, [("Anna has ", tokenizer.encode(["12 apples"])[0].ids.tolist())])
    changed = Document(
        (document.segments[0], Segment("completion", "13 apples", True)), sampled_tokens=document.sampled_tokens
    )
    with pytest.raises(XtkError, match="does not match its student_ids"):
        tokenize_documents(tokenizer, [changed])


def test_records_of_rollouts(families):
    tokenizer = Tokenizer(families["student"])
    document = rollout(tokenizer, [("Anna has ", tokenizer.encode(["12 apples"])[0].ids.tolist())], advantage=0.5)
    drawn = document.sampled_tokens
    record = {
        "prompt": "Anna has ",
        "completion": "12 apples",
        "complete": False,
        "student_ids": drawn.ids.tolist(),
        "sampled_mask": drawn.sampled_mask.astype(int).tolist(),
        "student_logprobs": drawn.logprobs.tolist(),
        "student_tokenizer": drawn.tokenizer_fingerprint,
        "advantage": 0.5,
    }
    assert record_to_document(record, {}, "a line") == document
    several = {**record, "segments": [{"role": "prompt", "text": "Anna has ", "train": False},
                                      {"role": "completion", "text": "12 apples", "train": True}]}  # fmt: skip
    del several["prompt"], several["completion"]
    assert record_to_document(several, {}, "a line") == document
    for wrong in ({"sampled_mask": [1]}, {"student_logprobs": None}, {"advantage": "nan"},
                  {"student_logprobs": [1.0] * len(drawn.ids)}):  # fmt: skip
        with pytest.raises(XtkError):
            record_to_document({**record, **wrong}, {}, "a line")


def test_all_writers_are_families():
    assert set(WRITERS) <= set(MAKERS)
