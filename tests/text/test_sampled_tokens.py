"""Tokens that a student sampled: unchanged for its own tokenizer, decoded to text for others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_texts import quick
from test_chat import HEADERS_TEMPLATE, TURNS_TEMPLATE, with_template
from tokenizer_families import MAKERS

from xtk.data.record_to_document import record_to_document
from xtk.errors import XtkError
from xtk.text.alignment import align_sequences
from xtk.text.document import Document, Segment
from xtk.text.document_token_ids import SampledTokens
from xtk.text.rollout_tokens import completion_text, decode_tokens
from xtk.text.teacher_tokenization import teacher_views
from xtk.text.token_sequence import TokenSequence, tokenize_documents
from xtk.text.tokenizer import Tokenizer

STUDENT_FAMILIES = ["student", "teacher", "metaspace", "gpt2", "llama2", "gemma", "byte-lower"]


def rollout_document(tokenizer: Tokenizer, turns: list[tuple[str, list[int]]], advantage: float = 0.0) -> Document:
    """Return the document of prompts (or answers of tools), each followed by sampled tokens."""
    ids = list(tokenizer.start_ids)
    sampled, segments = [False] * len(ids), []
    for prompt, sampled_ids in turns:
        prompt_ids = tokenizer.encode([prompt])[0].ids.tolist()
        completion = decode_tokens(
            tokenizer,
            np.array(sampled_ids, np.int32),
            at_text_start=not any(segment.text for segment in segments) and not prompt,
        )
        segments += [Segment("prompt", prompt, False)] if prompt else []
        segments.append(Segment("completion", completion.text, True))
        ids += [*prompt_ids, *sampled_ids]
        sampled += [False] * len(prompt_ids) + [True] * len(sampled_ids)
    logprobs = np.linspace(-3, -1, len(ids)) * np.array(sampled)
    tokens = SampledTokens.from_lists(ids, sampled, logprobs, tokenizer.fingerprint, advantage=advantage)
    return Document(tuple(segments), is_complete=completion.end_token >= 0, sampled_tokens=tokens)


def ordinary_token_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the ids of tokens that are neither special tokens nor end tokens."""
    excluded = {*np.flatnonzero(tokenizer.vocabulary.special_mask).tolist(), *tokenizer.end_ids}
    return [token for token in range(len(tokenizer)) if token not in excluded]


def check_spans(
    student: Tokenizer,
    teacher: Tokenizer,
    student_sequence: TokenSequence,
    teacher_sequence: TokenSequence,
    text: bytes,
) -> None:
    """Check that every span contains the same bytes of the text on both sides."""
    for s0, s1, t0, t1 in align_sequences(student_sequence, teacher_sequence).tolist():
        if s0 in student_sequence.segment_end_tokens.tolist():
            assert s1 == s0 + 1
            assert t0 in teacher_sequence.segment_end_tokens.tolist()
            continue
        assert student_sequence.byte_ends[s1 - 1] == teacher_sequence.byte_ends[t1 - 1]
        span_bytes = b"".join(map(student.vocabulary.bytes_of, student_sequence.ids[s0:s1].tolist()))
        stop = int(student_sequence.byte_ends[s1 - 1])
        assert text[:stop].endswith(span_bytes.strip())


@pytest.mark.slow
@pytest.mark.parametrize("name", STUDENT_FAMILIES)
@given(data=st.data())
@quick
def test_sampled_tokens_are_kept_unchanged_and_aligned_by_their_bytes(families, name, data):
    student, teacher = Tokenizer(families[name]), Tokenizer(families["teacher" if name != "teacher" else "student"])
    tokens = st.lists(st.sampled_from(ordinary_token_ids(student)), min_size=1, max_size=12)
    turns = data.draw(
        st.lists(st.tuples(st.sampled_from(["Anna has ", "12 + 30 =", "日本 "]), tokens), min_size=1, max_size=3)
    )
    if data.draw(st.booleans()) and student.end_id is not None:
        turns[-1][1].append(student.end_id)
    document = rollout_document(student, turns)
    (student_sequence,), ((teacher_document, teacher_sequence),) = (
        tokenize_documents(student, [document]),
        teacher_views(teacher, [document]),
    )
    assert teacher_document.text == document.text
    np.testing.assert_array_equal(student_sequence.ids, document.sampled_tokens.ids)
    np.testing.assert_array_equal(student_sequence.train_mask[1:], document.sampled_tokens.sampled_mask[1:])
    check_spans(student, teacher, student_sequence, teacher_sequence, document.text.encode())
    # A teacher with the same tokenizer gets the sampled tokens, even if it would encode the text differently.
    ((_, same_tokenizer_sequence),) = teacher_views(student, [document])
    np.testing.assert_array_equal(same_tokenizer_sequence.ids, student_sequence.ids)
    spans = align_sequences(student_sequence, same_tokenizer_sequence)
    assert (spans[:, :2] == spans[:, 2:]).all()
    assert SampledTokens.from_bytes(document.sampled_tokens.to_bytes()) == document.sampled_tokens


def test_decoded_text_ends_at_the_first_token_that_is_not_text(families):
    tokenizer = Tokenizer(families["student"])
    spelling = {token: tokenizer.vocabulary.bytes_of(token) for token in ordinary_token_ids(tokenizer)}
    by_bytes = {spelling: token for token, spelling in spelling.items()}
    e, acute = by_bytes["é".encode()[:1]], by_bytes["é".encode()[1:]]
    a, end = by_bytes[b"a"], tokenizer.end_id
    cases = [
        ([a, end], "a", [1], 1),
        ([a, e, acute, end], "aé", [1, 2, 3], 3),
        ([a, e], "a", [1], -1),  # truncated within a character
        ([a, e, a, end], "a", [1], -1),  # not valid UTF-8
        ([end], "", [], 0),
        ([a, tokenizer.start_ids[0], a, end], "a", [1], -1),
    ]
    for ids, text, ends, end_token in cases:
        decoded = decode_tokens(tokenizer, np.array(ids, np.int32))
        assert (decoded.text, decoded.end_token) == (text, end_token), ids
        assert decoded.byte_ends.tolist() == ends, ids


def test_completion_text_includes_all_tokens_of_a_completion(families):
    tokenizer = Tokenizer(families["student"])
    by_bytes = tokenizer.vocabulary.token_of_bytes
    a, end, start = by_bytes[b"a"], tokenizer.end_id, tokenizer.start_ids[0]
    e = by_bytes["é".encode()[:1]]
    name = tokenizer.special_token_names[start]
    for ids, text in (
        ([a, end], "a"), ([a, start, a, end], f"a{name}a"), ([start, a], f"{name}a"), ([end], ""), ([], ""),
        ([a, e], "a"), ([a, e, a], "a\ufffda"), ([a, end, a], f"a{tokenizer.special_token_names[end]}a"),
    ):  # fmt: skip
        assert completion_text(tokenizer, np.array(ids, np.int32)) == text


def test_teacher_prompt_keeps_the_sampled_tokens_for_the_same_tokenizer(families):
    tokenizer = Tokenizer(families["student"])
    byte_tokens = [tokenizer.vocabulary.token_of_bytes[bytes([byte])] for byte in b"has 12 apples"]
    # The tokenizer encodes the text differently.
    assert tokenizer.encode(["has 12 apples"])[0].ids.tolist() != byte_tokens
    document = rollout_document(tokenizer, [("Anna: ", [*byte_tokens, tokenizer.end_id])])
    privileged = document.with_teacher_prompt("The answer is 12.\nAnna: ")
    ((_, teacher_sequence),) = teacher_views(tokenizer, [privileged])
    (student_sequence,) = tokenize_documents(tokenizer, [privileged])
    spans = align_sequences(student_sequence, teacher_sequence)
    trained = spans[student_sequence.train_mask[spans[:, 1] - 1]]
    assert (trained[:, 1] - trained[:, 0] == 1).all()
    assert (trained[:, 3] - trained[:, 2] == 1).all()
    np.testing.assert_array_equal(student_sequence.ids[trained[:, 0]], [*byte_tokens, tokenizer.end_id])
    np.testing.assert_array_equal(teacher_sequence.ids[trained[:, 2]], [*byte_tokens, tokenizer.end_id])
    assert teacher_sequence.train_mask.sum() == len(byte_tokens) + 1


def test_conversations_keep_the_sampled_tokens_of_their_turns(families, tmp_path):
    student = with_template(families, tmp_path, "student", HEADERS_TEMPLATE)
    teacher = with_template(families, tmp_path, "teacher", TURNS_TEMPLATE)
    other_template = with_template(families, tmp_path, "student", HEADERS_TEMPLATE.replace("\n\n", " says\n"))
    messages = [
        {"role": "user", "content": "12 + 30?"},
        {"role": "assistant", "content": "48/2="},
        {"role": "tool", "content": "24"},
        {"role": "assistant", "content": "It is 42."},
    ]
    plain = Document.from_messages(messages)
    (plain_sequence,) = tokenize_documents(student, [plain])
    assert [
        student.vocabulary.bytes_of(token) for token in plain_sequence.ids[plain_sequence.segment_end_tokens].tolist()
    ] == [b""] * 4
    ids, sampled, previous_stop = [], [], 0
    for start, stop in (
        np.flatnonzero(np.diff(plain_sequence.train_mask.astype(int), prepend=0, append=0)).reshape(-1, 2).tolist()
    ):
        content = plain_sequence.ids[start : stop - 1].tolist()
        content_bytes = b"".join(map(student.vocabulary.bytes_of, content))
        byte_tokens = [student.vocabulary.token_of_bytes[bytes([byte])] for byte in content_bytes]
        template_ids = plain_sequence.ids[previous_stop:start].tolist()
        ids += [*template_ids, *byte_tokens, int(plain_sequence.ids[stop - 1])]
        sampled += [False] * len(template_ids) + [True] * (len(byte_tokens) + 1)
        previous_stop = stop
    sampled_tokens = SampledTokens.from_lists(
        ids, sampled, -np.array(sampled, float), student.fingerprint, student.template_fingerprint
    )
    document = Document(plain.segments, conversation=plain.conversation, sampled_tokens=sampled_tokens)
    (student_sequence,) = tokenize_documents(student, [document])
    np.testing.assert_array_equal(student_sequence.ids, ids)
    assert (student_sequence.segment_end_tokens >= 0).sum() == 2
    # With another template, the sampled tokens are inserted; another tokenizer encodes the text.
    ((_, spliced),), ((_, teacher_sequence),) = (
        teacher_views(other_template, [document]),
        teacher_views(teacher, [document]),
    )
    for sequence, tokenizer in ((spliced, other_template), (teacher_sequence, teacher)):
        spans = align_sequences(student_sequence, sequence)
        check_spans(student, tokenizer, student_sequence, sequence, document.text.encode())
        covered = np.concatenate([np.arange(start, stop) for start, stop in spans[:, :2].tolist()])
        np.testing.assert_array_equal(
            np.intersect1d(covered, np.flatnonzero(student_sequence.train_mask)),
            np.flatnonzero(student_sequence.train_mask),
        )
    spans = align_sequences(student_sequence, spliced)
    np.testing.assert_array_equal(student_sequence.ids[spans[:, 0]], spliced.ids[spans[:, 2]])


def test_text_that_does_not_match_its_student_ids_is_refused(families):
    tokenizer = Tokenizer(families["student"])
    document = rollout_document(tokenizer, [("Anna has ", tokenizer.encode(["12 apples"])[0].ids.tolist())])
    changed = Document(
        (document.segments[0], Segment("completion", "13 apples", True)), sampled_tokens=document.sampled_tokens
    )
    with pytest.raises(XtkError, match="does not match its student_ids"):
        tokenize_documents(tokenizer, [changed])


def test_rollout_records_become_documents_and_invalid_ones_are_refused(families):
    tokenizer = Tokenizer(families["student"])
    document = rollout_document(
        tokenizer, [("Anna has ", tokenizer.encode(["12 apples"])[0].ids.tolist())], advantage=0.5
    )
    sampled_tokens = document.sampled_tokens
    record = {
        "prompt": "Anna has ",
        "completion": "12 apples",
        "complete": False,
        "student_ids": sampled_tokens.ids.tolist(),
        "sampled_mask": sampled_tokens.sampled_mask.astype(int).tolist(),
        "student_logprobs": sampled_tokens.logprobs.tolist(),
        "student_tokenizer": sampled_tokens.tokenizer_fingerprint,
        "advantage": 0.5,
    }
    assert record_to_document(record, {}, "a line") == document
    record_with_segments = {**record, "segments": [{"role": "prompt", "text": "Anna has ", "train": False},
                                      {"role": "completion", "text": "12 apples", "train": True}]}  # fmt: skip
    del record_with_segments["prompt"], record_with_segments["completion"]
    assert record_to_document(record_with_segments, {}, "a line") == document
    for change in ({"sampled_mask": [1]}, {"student_logprobs": None}, {"advantage": "nan"},
                   {"student_logprobs": [1.0] * len(sampled_tokens.ids)}):  # fmt: skip
        with pytest.raises(XtkError):
            record_to_document({**record, **change}, {}, "a line")


def test_all_student_families_have_a_tokenizer():
    assert set(STUDENT_FAMILIES) <= set(MAKERS)
