"""Regions of conversations in the chat templates of 14 model families, and the alignment of all ordered pairs."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from chat_families import FAMILIES, write_family

from xtk.text.alignment import align_sequences, separate_added_spaces
from xtk.text.chat.conversation_tokens import NO_REGION, REGIONS
from xtk.text.chat.regions import token_regions
from xtk.text.document import Document
from xtk.text.token_sequence import tokenize_documents
from xtk.text.tokenizer import Tokenizer

GOLDEN = Path(__file__).parent / "chat_family_regions.json"
CALL = {"name": "get_weather", "arguments": {"city": "Paris", "days": 3, "note": 'a\n"b" ü'}}
WITH_TOOLS = [
    {"role": "user", "content": "Weather in Paris?"},
    {
        "role": "assistant", "reasoning_content": "I need the tool.", "content": "",
        "tool_calls": [{"id": "call_1", "type": "function", "function": CALL}],
    },
    {"role": "tool", "tool_call_id": "call_1", "name": "get_weather", "content": "sunny"},
    {"role": "assistant", "reasoning_content": "It is sunny.", "content": "Sunny in Paris."},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": "Welcome."},
]  # fmt: skip
WITHOUT_TOOLS = [WITH_TOOLS[0], *WITH_TOOLS[3:]]
PAIRS = list(itertools.permutations(FAMILIES, 2))
# Families whose template ends no turn, or not the last one.
FAMILIES_WITHOUT_LAST_END = {"glm4moe"}


@pytest.fixture(scope="module")
def tokenizer_of_family(tmp_path_factory):
    folder, tokenizers = tmp_path_factory.mktemp("families"), {}

    def get(name: str) -> Tokenizer:
        if name not in tokenizers:
            tokenizers[name] = Tokenizer(write_family(name, folder))
        return tokenizers[name]

    return get


def document_for(*names: str) -> Document:
    return Document.from_messages(WITH_TOOLS if all(FAMILIES[name].calls_tools for name in names) else WITHOUT_TOOLS)


def text_of(tokenizer: Tokenizer, ids: list[int]) -> str:
    special_texts = {special_id: text for text, special_id in tokenizer.vocabulary.special_tokens.items()}
    token_bytes = [
        special_texts[token].encode() if token in special_texts else tokenizer.vocabulary.bytes_of(token)
        for token in ids
    ]
    return b"".join(token_bytes).decode(errors="backslashreplace")  # a token may end within a character


def region_texts(tokenizer: Tokenizer, document: Document) -> list[list[str]]:
    """Return `[region, text]` of all tokens with a loss; `region*` marks tokens with losses without a teacher only."""
    (sequence,) = tokenize_documents(tokenizer, [document])
    regions, result = token_regions(document, sequence), []
    for group, positions in itertools.groupby(
        range(len(sequence)), lambda position: (regions[position], sequence.train_mask[position])
    ):
        if group[0] != NO_REGION:
            name = REGIONS[group[0]] + ("" if group[1] else "*")
            result.append([name, text_of(tokenizer, sequence.ids[list(positions)].tolist())])
    return result


@pytest.mark.parametrize("name", FAMILIES)
def test_regions_of_each_family_match_the_golden_file(tokenizer_of_family, name):
    assert region_texts(tokenizer_of_family(name), document_for(name)) == json.loads(GOLDEN.read_text())[name]


@pytest.mark.parametrize(("student_name", "teacher_name"), PAIRS, ids=map("-".join, PAIRS))
def test_pairs_align_contents_and_end_tokens_but_no_template_markup(tokenizer_of_family, student_name, teacher_name):
    document = document_for(student_name, teacher_name)
    student, teacher = tokenizer_of_family(student_name), tokenizer_of_family(teacher_name)
    (student_sequence,), (teacher_sequence,) = (
        tokenize_documents(student, [document]),
        tokenize_documents(teacher, [document]),
    )
    for sequence in (student_sequence, teacher_sequence):
        regions = token_regions(document, sequence)
        assert ((regions != NO_REGION) == sequence.loss_mask).all()
        assert not (sequence.train_mask & (sequence.template_regions != NO_REGION)).any()
    spans = separate_added_spaces(
        align_sequences(student_sequence, teacher_sequence), student_sequence, teacher_sequence
    )
    assert len(spans)
    common_ends = [
        (a, b)
        for a, b in zip(
            student_sequence.segment_end_tokens.tolist(), teacher_sequence.segment_end_tokens.tolist(), strict=True
        )
        if a >= 0 and b >= 0
    ]
    span_sizes = {(a, c): (b - a, d - c) for a, b, c, d in spans.tolist()}
    assert all(span_sizes[end] == (1, 1) for end in common_ends)
    ended_segments = set(np.flatnonzero(student_sequence.segment_end_tokens >= 0)) & set(
        np.flatnonzero(teacher_sequence.segment_end_tokens >= 0)
    )
    message_of_segment = [part.message for part in document.conversation.parts]
    ended_messages = {
        message_of_segment[position]
        for position in ended_segments
        if student_sequence.train_mask[student_sequence.segment_end_tokens[position]]
    }
    messages_with_calls = {
        message_index for message_index, message in enumerate(WITH_TOOLS) if message.get("tool_calls")
    }
    expected_messages = {
        message_index
        for message_index, message in enumerate(document.conversation.messages)
        if message["role"] == "assistant"
    }
    if FAMILIES_WITHOUT_LAST_END & {student_name, teacher_name}:
        expected_messages.discard(max(expected_messages))
    if document.conversation.messages[1].get("tool_calls") and {"phi3", "phi4"} & {student_name, teacher_name}:
        expected_messages -= messages_with_calls  # their templates do not write tool calls
    assert expected_messages <= ended_messages
    # If both write the call, its name, keys and values are compared, whatever surrounds them.
    if messages_with_calls <= ended_messages:
        covered = np.zeros(len(document.text.encode()), np.bool_)
        for a, b, *_ in spans[spans[:, 1] - spans[:, 0] > 0].tolist():
            covered[student_sequence.byte_ends[a - 1] if a else 0 : student_sequence.byte_ends[b - 1]] = True
        segment_start = 0
        for segment in document.segments:
            if segment.role in ("tool-name", "tool-arguments"):
                for word in ("get_weather", "city", "Paris", "days", "3"):
                    if (position := segment.text.find(word)) >= 0:
                        start = segment_start + len(segment.text[:position].encode())
                        assert covered[start : start + len(word)].all(), word
            segment_start += len(segment.text.encode())
    # A span compares the same text on both sides, in the same region.
    student_regions, teacher_regions = (
        token_regions(document, student_sequence),
        token_regions(document, teacher_sequence),
    )
    student_ends, teacher_ends = (
        set(side.segment_end_tokens.tolist()) for side in (student_sequence, teacher_sequence)
    )
    for a, b, c, d in spans.tolist():
        assert (student_sequence.template_regions[a:b] == NO_REGION).all()
        assert (teacher_sequence.template_regions[c:d] == NO_REGION).all()
        assert (a in student_ends) == (c in teacher_ends)
        if student_sequence.train_mask[b - 1]:
            assert student_regions[b - 1] == teacher_regions[d - 1]
        if a not in student_ends:
            assert (
                text_of(student, student_sequence.ids[a:b].tolist()).strip()
                == text_of(teacher, teacher_sequence.ids[c:d].tolist()).strip()
            )
