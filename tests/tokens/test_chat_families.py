"""Regions of conversations in the chat templates of 14 families, and the alignment of all ordered pairs of them."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from chat_families import FAMILIES, write_family

from xtk.tokens.alignment import align_sequences, separate_added_spaces
from xtk.tokens.conversation_tokens import NO_REGION, REGIONS
from xtk.tokens.document import Document
from xtk.tokens.token_regions import token_regions
from xtk.tokens.token_sequence import tokenize_documents
from xtk.tokens.tokenizer import Tokenizer

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
# Templates that end no turn, or only those before another message.
WITHOUT_LAST_END = {"glm4moe"}


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("families"), {}

    def get(name: str) -> Tokenizer:
        if name not in made:
            made[name] = Tokenizer(write_family(name, folder))
        return made[name]

    return get


def document_for(*names: str) -> Document:
    return Document.from_messages(WITH_TOOLS if all(FAMILIES[name].calls_tools for name in names) else WITHOUT_TOOLS)


def text_of(tokenizer: Tokenizer, ids: list[int]) -> str:
    special = {token: text for text, token in tokenizer.vocabulary.special_tokens.items()}
    raw = [special[one].encode() if one in special else tokenizer.vocabulary.bytes_of(one) for one in ids]
    return b"".join(raw).decode(errors="backslashreplace")  # a token may end within a character


def described(tokenizer: Tokenizer, document: Document) -> list[list[str]]:
    """[region, text] of all tokens with a loss; `region*`: of losses without a teacher only."""
    (sequence,) = tokenize_documents(tokenizer, [document])
    regions, result = token_regions(document, sequence), []
    for is_loss, rows in itertools.groupby(range(len(sequence)), lambda at: (regions[at], sequence.train_mask[at])):
        if is_loss[0] != NO_REGION:
            name = REGIONS[is_loss[0]] + ("" if is_loss[1] else "*")
            result.append([name, text_of(tokenizer, sequence.ids[list(rows)].tolist())])
    return result


@pytest.mark.parametrize("name", FAMILIES)
def test_the_regions_of_a_family(family, name):
    assert described(family(name), document_for(name)) == json.loads(GOLDEN.read_text())[name]


@pytest.mark.parametrize(("one", "other"), PAIRS, ids=map("-".join, PAIRS))
def test_a_pair_is_aligned_at_parts_and_ends_and_never_at_markup(family, one, other):
    document = document_for(one, other)
    student, teacher = family(one), family(other)
    (own,), (theirs,) = tokenize_documents(student, [document]), tokenize_documents(teacher, [document])
    for sequence in (own, theirs):
        regions = token_regions(document, sequence)
        assert ((regions != NO_REGION) == sequence.loss_mask).all()
        assert not (sequence.train_mask & (sequence.template_regions != NO_REGION)).any()
    spans = separate_added_spaces(align_sequences(own, theirs), own, theirs)
    assert len(spans)
    ends = [
        (a, b)
        for a, b in zip(own.segment_end_tokens.tolist(), theirs.segment_end_tokens.tolist(), strict=True)
        if a >= 0 and b >= 0
    ]
    paired = {(a, c): (b - a, d - c) for a, b, c, d in spans.tolist()}
    assert all(paired[end] == (1, 1) for end in ends)
    of_both = set(np.flatnonzero(own.segment_end_tokens >= 0)) & set(np.flatnonzero(theirs.segment_end_tokens >= 0))
    messages = [part.message for part in document.conversation.parts]
    ended = {messages[at] for at in of_both if own.train_mask[own.segment_end_tokens[at]]}
    without = {number for number, message in enumerate(WITH_TOOLS) if message.get("tool_calls")}
    expected = {
        number for number, message in enumerate(document.conversation.messages) if message["role"] == "assistant"
    }
    if WITHOUT_LAST_END & {one, other}:
        expected.discard(max(expected))
    if document.conversation.messages[1].get("tool_calls") and {"phi3", "phi4"} & {one, other}:
        expected -= without  # their templates write nothing of tool calls
    assert expected <= ended
    if without <= ended:  # both write the call: its name, keys and values are compared, whatever is around them
        covered = np.zeros(len(document.text.encode()), np.bool_)
        for a, b, *_ in spans[spans[:, 1] - spans[:, 0] > 0].tolist():
            covered[own.byte_ends[a - 1] if a else 0 : own.byte_ends[b - 1]] = True
        first = 0
        for segment in document.segments:
            if segment.role in ("tool-name", "tool-arguments"):
                for word in ("get_weather", "city", "Paris", "days", "3"):
                    if (at := segment.text.find(word)) >= 0:
                        start = first + len(segment.text[:at].encode())
                        assert covered[start : start + len(word)].all(), word
            first += len(segment.text.encode())
    # What a span compares is the same text on both sides, in the same region.
    own_regions, their_regions = token_regions(document, own), token_regions(document, theirs)
    own_ends, their_ends = (set(side.segment_end_tokens.tolist()) for side in (own, theirs))
    for a, b, c, d in spans.tolist():
        assert (own.template_regions[a:b] == NO_REGION).all()
        assert (theirs.template_regions[c:d] == NO_REGION).all()
        assert (a in own_ends) == (c in their_ends)
        if own.train_mask[b - 1]:
            assert own_regions[b - 1] == their_regions[d - 1]
        if a not in own_ends:
            assert text_of(student, own.ids[a:b].tolist()).strip() == text_of(teacher, theirs.ids[c:d].tolist()).strip()
