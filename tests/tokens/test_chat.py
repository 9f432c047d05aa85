"""Conversations: two templates, one alignment of what the assistant said."""

from __future__ import annotations

import json
import shutil
import time

import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_texts import PIECES, SPECIAL_SPELLINGS, quick

from xtk.errors import XtkError
from xtk.tokens.alignment import align_sequences
from xtk.tokens.chat_template import ChatTemplate, RenderedConversation
from xtk.tokens.document import Conversation, Document
from xtk.tokens.token_sequence import TokenSequence, count_lost_bytes, tokenize_documents
from xtk.tokens.tokenizer import Tokenizer

HEADERS = (
    "{{ bos_token }}{% for message in messages %}<|pad|>{{ message['role'] }}<|pad|>\n\n"
    "{{ message['content'] }}<|end_of_text|>{% endfor %}"
)
TURNS = "{% for message in messages %}<|im_end|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
TRIMMING = TURNS.replace("message.content", "message.content | trim")
# Drops what the assistant thought, and writes an empty thought before its last answer.
THINKING = (
    "{%- for message in messages %}{%- set content = message.content %}"
    "{%- if message.role == 'assistant' and '</think>' in content %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{{- '<|im_end|>' + message.role + '\\n' }}"
    "{%- if message.role == 'assistant' and loop.last %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{{- content + '<|im_end|>\\n' }}{%- endfor %}"
)
# A system prompt has no turn of its own: it is written into the first question.
INSTRUCTIONS = (
    "{{ bos_token }}{% set ns = namespace(system='') %}{% for message in messages %}"
    "{% if message.role == 'system' %}{% set ns.system = message.content + '\\n\\n' %}"
    "{% elif message.role == 'user' %}[INST] {{ ns.system }}{{ message.content }} [/INST]{% set ns.system = '' %}"
    "{% else %} {% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)
STRICT = "{% if messages[0].role != 'user' %}{{ raise_exception('the user begins') }}{% endif %}" + TURNS
TEMPLATES = {"student": HEADERS, "teacher": TURNS, "metaspace": INSTRUCTIONS, "composing": TURNS, "word-piece": TURNS}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Anna has 1234 apples and gives 12 to Bert?"},
    {"role": "assistant", "content": "Anna has 1222 apples left."},
    {"role": "tool", "content": "1222"},
    {"role": "assistant", "content": "日本 😀 that is 1222."},
]


def with_template(families, tmp_path, name: str, template: str) -> Tokenizer:
    folder = shutil.copytree(families[name], tmp_path / f"{name}-{abs(hash(template))}", dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def sides(families, tmp_path_factory):
    folder = tmp_path_factory.mktemp("templates")
    return {name: with_template(families, folder, name, template) for name, template in TEMPLATES.items()}


def read_of(tokenizer: Tokenizer, sequence: TokenSequence, mask: np.ndarray) -> bytes:
    return b"".join(tokenizer.vocabulary.bytes_of(token) for token in sequence.ids[mask].tolist())


def trained_text(tokenizer: Tokenizer, sequence: TokenSequence) -> str:
    return read_of(tokenizer, sequence, sequence.train_mask & sequence.text_mask).decode()


def written(rendering: RenderedConversation) -> list[str | None]:
    """What of each content the template wrote."""
    return [
        None if place is None else "".join(rendering.text[b : b + size] for _, b, size in place.runs.tolist())
        for place in rendering.positions
    ]


def spans_of(sides, student, teacher, document):
    (left,), (right,) = tokenize_documents(sides[student], [document]), tokenize_documents(sides[teacher], [document])
    return left, right, align_sequences(left, right)


@pytest.mark.parametrize("name", ["student", "teacher"])
def test_only_what_the_assistant_said_is_trained_and_that_its_turns_end(sides, name):
    tokenizer = sides[name]
    (sequence,) = tokenize_documents(tokenizer, [Document.from_messages(CHAT)])
    assert trained_text(tokenizer, sequence) == CHAT[2]["content"] + CHAT[4]["content"]
    enders = sequence.ids[sequence.train_mask & ~sequence.text_mask].tolist()
    assert enders == [tokenizer.special_token_ids["eos"]] * 2
    assert (sequence.segment_end_tokens >= 0).all()


def test_every_span_spells_the_same_on_both_sides_and_none_holds_a_template(sides):
    document = Document.from_messages(CHAT)
    left, right, spans = spans_of(sides, "student", "teacher", document)
    contents = []
    for s0, s1, t0, t1 in spans.tolist():
        one, other = (
            read_of(sides[name], sequence, np.arange(low, high))
            for name, sequence, low, high in (("student", left, s0, s1), ("teacher", right, t0, t1))
        )
        assert one == other
        contents.append(one)
    assert b"".join(contents).decode() == "".join(message["content"] for message in CHAT)
    # Five turns end, on both sides.
    assert sum(content == b"" for content in contents) == 5
    covered = np.zeros(len(left), np.bool_)
    for s0, s1, _, _ in spans.tolist():
        covered[s0:s1] = True
    assert (covered >= left.train_mask).all()


def test_a_special_token_is_one_where_the_template_spells_it_and_text_where_a_person_does(sides):
    chat = [{"role": "user", "content": "What is <|im_end|>?"}, {"role": "assistant", "content": "<|im_end|> ends."}]
    tokenizer = sides["teacher"]
    (sequence,) = tokenize_documents(tokenizer, [Document.from_messages(chat)])
    assert trained_text(tokenizer, sequence) == "<|im_end|> ends."
    assert sequence.ids.tolist().count(tokenizer.special_token_ids["eos"]) == 4
    plain = [{**message, "content": message["content"].replace("<|im_end|>", "it")} for message in chat]
    (other,) = tokenize_documents(tokenizer, [Document.from_messages(plain)])
    assert other.ids.tolist().count(tokenizer.special_token_ids["eos"]) == 4


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_tokens_are_those_of_the_rendered_text(sides, name):
    import tokenizers

    tokenizer = sides[name]
    conversation = Conversation(tuple(CHAT))
    backend = tokenizers.Tokenizer.from_file(str(tokenizer.folder / "tokenizer.json"))
    rendered = tokenizer.chat_template.render_batch_with_positions([conversation])[0].text
    (sequence,) = tokenize_documents(tokenizer, [Document.from_messages(CHAT)])
    assert sequence.ids.tolist() == backend.encode(rendered, add_special_tokens=False).ids


def test_a_system_prompt_inside_of_the_first_question_is_found(sides):
    (rendering,) = sides["metaspace"].chat_template.render_batch_with_positions([Conversation(tuple(CHAT[:3]))])
    assert written(rendering) == [message["content"] for message in CHAT[:3]]


def test_white_space_that_a_template_trims_is_told_and_carries_no_loss(families, tmp_path):
    chat = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "  12 apples \n"}]
    document = Document.from_messages(chat)
    tokenizer = with_template(families, tmp_path, "teacher", TRIMMING)
    (sequence,) = tokenize_documents(tokenizer, [document])
    assert trained_text(tokenizer, sequence) == "12 apples"
    assert count_lost_bytes(document, sequence) == 4
    assert sequence.ids[sequence.segment_end_tokens[1]] == tokenizer.special_token_ids["eos"]


def test_a_thought_that_one_template_drops_is_in_no_span(sides, families, tmp_path):
    thought = "<think>1234 - 12 = 1222</think>\n\n"
    chat = [CHAT[1], {"role": "assistant", "content": thought + "Anna has 1222 apples left."}]
    document = Document.from_messages(chat)
    thinking = with_template(families, tmp_path, "teacher", THINKING)
    (left,), (right,) = tokenize_documents(sides["student"], [document]), tokenize_documents(thinking, [document])
    assert trained_text(thinking, right) == "Anna has 1222 apples left."
    assert count_lost_bytes(document, right) == len(thought)
    assert count_lost_bytes(document, left) == 0
    spans = align_sequences(left, right)
    spans = spans[left.train_mask[spans[:, 1] - 1]]
    assert (
        b"".join(read_of(sides["student"], left, np.arange(s0, s1)) for s0, s1, _, _ in spans.tolist()).decode()
        == "Anna has 1222 apples left."
    )


def test_what_two_models_do_not_both_read_joins_no_span_however_it_lies():
    def sequence(ends: list[int], pieces: list[list[int]]) -> TokenSequence:
        size = len(ends)
        return TokenSequence(
            np.zeros(size, np.int32), np.array(ends, np.int32), np.ones(size, np.bool_),
            np.array(pieces, np.int32).reshape(-1, 3), np.array([-1], np.int32),
        )  # fmt: skip

    whole = sequence([2, 3, 12, 14], [[0, 4, 0]])
    # Bytes 3 to 8 are missing on this side, and its next token begins in the middle of the other's third.
    gap = sequence([1, 2, 3, 10, 12, 14], [[0, 3, 0], [3, 6, 8]])
    assert align_sequences(whole, gap).tolist() == [[0, 1, 0, 2], [1, 2, 2, 3], [3, 4, 5, 6]]
    late = sequence([5, 14], [[0, 2, 3]])
    assert align_sequences(gap, late).tolist() == []
    assert align_sequences(sequence([3, 14], [[0, 2, 0]]), late).tolist() == [[1, 2, 0, 2]]
    assert align_sequences(late, sequence([], [])).tolist() == []


CONTENT = st.lists(st.sampled_from([*PIECES, *SPECIAL_SPELLINGS, "assistant", "[/INST]"]), max_size=5).map("".join)
CHATS = st.lists(st.tuples(CONTENT, CONTENT), min_size=1, max_size=3)


def messages_of(turns: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [
        message
        for question, answer in turns
        for message in ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
    ]


@pytest.mark.parametrize(
    ("student", "teacher"), [("student", "teacher"), ("teacher", "metaspace"), ("student", "composing")]
)
@given(turns=CHATS)
@settings(quick, max_examples=40)
def test_any_conversation_is_aligned_by_contents_alone(sides, student, teacher, turns):
    document = Document.from_messages(messages_of(turns))
    left, right, spans = spans_of(sides, student, teacher, document)
    for name, sequence in ((student, left), (teacher, right)):
        assert (np.diff(sequence.byte_ends) >= 0).all()
        assert not sequence.train_mask[0]
        assert 0 <= count_lost_bytes(document, sequence) <= sum(len(answer.encode()) for _, answer in turns)
        spelled = [
            read_of(sides[name], sequence, np.arange(piece[0], piece[1])) for piece in sequence.text_runs.tolist()
        ]
        # A space of the template may stand in front, as one that the tokenizer puts in front of a text.
        assert all(text.removeprefix(b" ") in document.text.encode() for text in spelled if sequence.exact)
        assert sequence.byte_ends[sequence.text_mask].max(initial=0) <= len(document.text.encode())
    # A span of contents ends at the same byte on both sides, and begins after the one before it.
    contents = spans[left.text_mask[spans[:, 0]]]
    assert (left.byte_ends[contents[:, 1] - 1] == right.byte_ends[contents[:, 3] - 1]).all()
    assert (spans[1:, 0] >= spans[:-1, 1]).all()
    assert (spans[1:, 2] >= spans[:-1, 3]).all()
    swapped = align_sequences(right, left)
    assert swapped[:, [2, 3, 0, 1]].tolist() == spans.tolist()


@given(turns=CHATS)
@settings(quick, max_examples=40)
def test_spans_of_any_conversation_hold_equal_bytes(sides, turns):
    document = Document.from_messages(messages_of(turns))
    left, right, spans = spans_of(sides, "student", "teacher", document)
    for s0, s1, t0, t1 in spans.tolist():
        assert read_of(sides["student"], left, np.arange(s0, s1)) == read_of(sides["teacher"], right, np.arange(t0, t1))


def test_a_sequence_cut_short_keeps_the_spans_that_it_still_holds(sides):
    document = Document.from_messages(CHAT)
    left, right, spans = spans_of(sides, "student", "teacher", document)
    for length in range(len(left) + 1):
        cut = left.truncate(length)
        assert align_sequences(cut, right).tolist() == spans[spans[:, 1] <= length].tolist()


# Templates.


def test_a_template_renders_as_transformers_does(sides):
    from transformers import PreTrainedTokenizerFast

    for name in ("student", "teacher"):
        theirs = PreTrainedTokenizerFast.from_pretrained(sides[name].folder)
        assert sides[name].chat_template.render(CHAT) == theirs.apply_chat_template(CHAT, tokenize=False)


def talk(*contents: str) -> Document:
    roles = ("user", "assistant")
    return Document.from_messages([{"role": roles[at % 2], "content": text} for at, text in enumerate(contents)])


def read_by(families, tmp_path, name: str, template: str, document: Document) -> tuple[Tokenizer, TokenSequence]:
    tokenizer = with_template(families, tmp_path, name, template)
    return tokenizer, tokenize_documents(tokenizer, [document])[0]


def places_of(tokenizer: Tokenizer, sequence: TokenSequence) -> list[tuple[int, bytes]]:
    """The byte of the contents where each piece begins, and what it spells."""
    return [
        (first, read_of(tokenizer, sequence, np.arange(start, stop)))
        for start, stop, first in sequence.text_runs.tolist()
    ]


def test_an_answer_that_its_thought_holds_too_is_the_answer(families, tmp_path):
    thought = "<think>Anna has 12 apples left.</think>\n\n"
    document = talk("12?", thought + "Anna has 12 apples left.", "and?", "yes")
    tokenizer, sequence = read_by(families, tmp_path, "teacher", THINKING, document)
    assert (3 + len(thought), b"Anna has 12 apples left.") in places_of(tokenizer, sequence)


def test_a_short_answer_after_a_long_thought_is_trained(families, tmp_path):
    document = talk("2+2?", "<think>hm, a long thought</think>\n\n4\n\n", "and 3?", "\n\n\n17\n\n\n")
    tokenizer, sequence = read_by(
        families, tmp_path, "teacher", THINKING.replace("content + '", "content | trim + '"), document
    )
    assert trained_text(tokenizer, sequence) == "417"


# One turn changes what is written around another: a user that answers a tool is no new question.
LOOKS_INTO_CONTENTS = (
    "{%- set ns = namespace(last=0) %}{%- for message in messages %}"
    "{%- if message.role == 'user' and not message.content.startswith('<result>') %}{%- set ns.last = loop.index0 %}"
    "{%- endif %}{%- endfor %}{%- for message in messages %}{{- '<|im_end|>' + message.role + '\n' }}"
    "{%- if message.role == 'assistant' and loop.index0 > ns.last %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{{- message.content + '<|im_end|>\n' }}{%- endfor %}"
)


def test_a_template_that_looks_into_one_turn_to_write_another_loses_none(families, tmp_path):
    import tokenizers

    document = talk("What is 12?", "I ask.", "<result>12</result>", "It is 12.", "Anna?", "Anna.")
    tokenizer, sequence = read_by(families, tmp_path, "teacher", LOOKS_INTO_CONTENTS, document)
    assert trained_text(tokenizer, sequence) == "I ask.It is 12.Anna."
    assert (sequence.segment_end_tokens >= 0).all()
    backend = tokenizers.Tokenizer.from_file(str(tokenizer.folder / "tokenizer.json"))
    rendered = tokenizer.chat_template.render_batch_with_positions([document.conversation])[0].text
    assert sequence.ids.tolist() == backend.encode(rendered, add_special_tokens=False).ids


def test_special_tokens_that_take_the_white_space_beside_them_leave_the_answer(families, tmp_path):
    folder = shutil.copytree(families["teacher"], tmp_path / "greedy")
    content = json.loads((folder / "tokenizer.json").read_text())
    for token in content["added_tokens"]:
        token["rstrip"] = token["lstrip"] = True
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}<|endoftext|>\n{{ message.content }} <|im_end|>\n{% endfor %}"
    )
    tokenizer = Tokenizer(folder)
    (sequence,) = tokenize_documents(tokenizer, [talk("12?", "It is 17.", "and?", "<|im_end|> ends")])
    assert trained_text(tokenizer, sequence) == "It is 17.<|im_end|> ends"
    assert (sequence.segment_end_tokens >= 0).all()


def test_a_space_of_the_template_that_joins_the_first_word_costs_no_token(sides):
    document = talk("12?", "Anna has 12.", "and?", "Bert has 5.")
    tokenizer = sides["metaspace"]
    (sequence,) = tokenize_documents(tokenizer, [document])
    assert count_lost_bytes(document, sequence) == 0
    assert trained_text(tokenizer, sequence) == " Anna has 12. Bert has 5."
    (student,) = tokenize_documents(sides["student"], [document])
    spans = align_sequences(student, sequence)
    assert student.train_mask[spans[:, 1] - 1].sum() == len(spans) - sum(
        1 for span in spans if not student.train_mask[span[1] - 1]
    )
    covered = np.zeros(len(student), np.bool_)
    for s0, s1, _, _ in spans.tolist():
        covered[s0:s1] = True
    assert covered[student.train_mask].all()


def test_the_end_of_a_turn_is_found_past_white_space(families, tmp_path):
    template = TURNS.replace("{{ message.content }}<|im_end|>", "{{ message.content }} \n<|im_end|>")
    tokenizer, sequence = read_by(families, tmp_path, "teacher", template, talk("12?", "It is 12."))
    assert tokenizer.special_token_ids["eos"] == sequence.ids[sequence.segment_end_tokens[1]]
    assert sequence.train_mask[sequence.segment_end_tokens[1]]


CALLS = (
    "{% for message in messages %}<|endoftext|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<call>{{ call.name }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
)


def test_the_end_of_a_turn_is_found_after_tool_calls_with_and_without_content(families, tmp_path):
    calls = [{"name": "add"}]
    messages = [
        {"role": "user", "content": "12 + 5?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "17"},
        {"role": "assistant", "content": "Again.", "tool_calls": calls},
        {"role": "tool", "content": "17"},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]
    tokenizer, sequence = read_by(families, tmp_path, "teacher", CALLS, Document.from_messages(messages))
    eos = tokenizer.special_token_ids["eos"]
    assert trained_text(tokenizer, sequence) == "addAgain.addadd"
    found = sequence.segment_end_tokens[sequence.segment_end_tokens >= 0]
    assert found.tolist() == np.flatnonzero(sequence.ids == eos).tolist()
    assert sequence.train_mask[found].tolist() == [False, True] * 3
    # Messages of which the template writes nothing have an end too, one each.
    empty = {"role": "assistant", "content": ""}
    twice = [messages[0], empty, empty, {"role": "assistant", "content": "17."}]
    _, sequence = read_by(families, tmp_path, "teacher", CALLS, Document.from_messages(twice))
    ends = np.flatnonzero(sequence.ids == eos)
    assert sequence.segment_end_tokens.tolist() == ends.tolist()
    untrained = [{**message, "train": False} for message in messages]
    _, sequence = read_by(families, tmp_path, "teacher", CALLS, Document.from_messages(untrained))
    assert not sequence.train_mask.any()


def test_the_end_of_tool_calls_is_found_after_a_prompt_without_an_end(families, tmp_path):
    template = INSTRUCTIONS.replace("{% generation %}", "{{ message.tool_calls or '' }}{% generation %}")
    messages = [
        {"role": "user", "content": "12 + 5?"},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]},
        {"role": "user", "content": "17"},
        {"role": "assistant", "content": "It is 17."},
    ]
    tokenizer, sequence = read_by(families, tmp_path, "metaspace", template, Document.from_messages(messages))
    ends = np.flatnonzero(sequence.ids == tokenizer.special_token_ids["eos"]).tolist()
    assert [end for end in sequence.segment_end_tokens.tolist() if end >= 0] == ends
    assert sequence.train_mask[ends].all()


def test_a_token_that_a_configuration_calls_eos_ends_turns_whether_or_not_it_is_special(families, tmp_path):
    folder = shutil.copytree(families["teacher"], tmp_path / "plain")
    content = json.loads((folder / "tokenizer.json").read_text())
    for token in content["added_tokens"]:
        token["special"] = False
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(TURNS + "{{ eos_token }}")
    tokenizer = Tokenizer(folder)
    (sequence,) = tokenize_documents(tokenizer, [talk("12?", "It is 12.")])
    assert sequence.ids[sequence.segment_end_tokens[1]] == tokenizer.special_token_ids["eos"]
    assert json.loads(tokenizer.to_files()["tokenizer_config.json"])["eos_token"] == "<|im_end|>"


@pytest.mark.parametrize("template", [TURNS, TRIMMING, THINKING])
def test_long_conversations_are_placed_in_time(families, tmp_path, template):
    document = talk(*(f" Anna has {at} apples. " for at in range(300)))
    started = time.perf_counter()
    tokenizer, sequence = read_by(families, tmp_path, "teacher", template, document)
    assert time.perf_counter() - started < 5
    assert trained_text(tokenizer, sequence).count("apples") == 150


def test_the_time_of_an_alignment_is_linear_in_its_segments():
    def seconds(size: int) -> float:
        ends = np.arange(1, 2 * size + 1, dtype=np.int32)
        offset = np.array([-1], np.int32)
        one_segment = TokenSequence(ends, ends, ends > 0, np.array([[0, 2 * size, 0]], np.int32), offset)
        starts = np.arange(0, 2 * size, 2)
        segments = np.column_stack([starts, starts + 1, starts]).astype(np.int32)
        many_segments = TokenSequence(ends, ends, ends > 0, segments, offset)
        took = []
        for _ in range(15):
            started = time.process_time()
            spans = align_sequences(many_segments, one_segment)
            took.append(time.process_time() - started)
            assert len(spans) == size
        return min(took)

    seconds(10)  # compiles
    assert seconds(80_000) < 24 * seconds(10_000)  # linear: 8, quadratic: 64


def test_tools_calls_and_dates_reach_the_template():
    template = ChatTemplate(
        "{{ tools | tojson }}{{ strftime_now('%Y-%m-%d') }}{% for message in messages %}{% if message.tool_calls %}"
        "{{ message.tool_calls | tojson }}{% endif %}{{ message.content }}|{% endfor %}",
        {},
        "here",
    )
    messages = [
        {"role": "user", "content": "<b>"},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "é<", "arguments": {}}]},
        {"role": "tool", "content": "5"},
    ]
    conversation = Document.from_messages(messages, tools=[{"name": "add"}]).conversation
    (rendering,) = template.render_batch_with_positions([conversation])
    call = '{"type": "function", "function": {"name": "é<", "arguments": {}}}'
    assert rendering.text == f'[{{"name": "add"}}]2024-07-26<b>|[{call}]|5|'
    assert written(rendering) == ["<b>", None, None, "é<", "{}", "5"]


def test_a_template_that_leaves_a_message_out_gives_it_no_region():
    template = ChatTemplate("{% for m in messages if m.role != 'system' %}{{ m.content }}.{% endfor %}", {}, "here")
    (rendering,) = template.render_batch_with_positions(
        [Conversation(({"role": "system", "content": "s"}, {"role": "user", "content": "u"}))]
    )
    assert written(rendering) == [None, "u"]


def test_a_template_that_writes_a_content_twice_is_no_trap():
    template = ChatTemplate("{{ messages[0].content }}; {{ messages[0].content }}!", {}, "here")
    (rendering,) = template.render_batch_with_positions([Conversation(({"role": "user", "content": "abc"},))])
    assert [place.runs.tolist() for place in rendering.positions] == [[[0, 5, 3]]]  # the last of the two


@pytest.mark.parametrize(
    ("template", "what"),
    [
        ("{% for %}", "the chat template is invalid"),
        (STRICT, "the user begins"),
        ("{{ nothing.at.all }}", "refuses a conversation"),
        ("{{ ''.__class__.__mro__ }}", "refuses a conversation"),
        ("{{ messages[99].content }}", "refuses a conversation"),
        ("{{ 1 // 0 }}", "refuses a conversation"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "refuses a conversation"),
    ],
)
def test_a_template_that_fails_is_told_with_its_reason(families, tmp_path, template, what):
    tokenizer = with_template(families, tmp_path, "teacher", template)
    with pytest.raises(XtkError, match=what) as caught:
        tokenize_documents(tokenizer, [Document.from_messages(CHAT)])
    assert str(tokenizer.folder) in caught.value.where


def test_a_tokenizer_without_a_template_says_so(families):
    with pytest.raises(XtkError, match="no chat template"):
        tokenize_documents(Tokenizer(families["student"]), [Document.from_messages(CHAT)])


def test_a_content_that_a_template_writes_as_json_moves_no_other(families, tmp_path):
    """Llama 3.1 writes what a tool returns as a string of JSON."""
    as_json = (
        "{% for message in messages %}<|im_end|>{{ message.role }}\n{% if message.role == 'tool' %}"
        "{{ message.content | tojson }}{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}"
    )
    result = '{"temp": 22, "unit": "°C"}\nfine \\ good'
    document = Document.from_messages([
        {"role": "user", "content": "Weather?"}, {"role": "tool", "content": result},
        {"role": "assistant", "content": "It is 22 degrees, fine and good all day."},
    ])  # fmt: skip
    sides = {name: with_template(families, tmp_path / name, "teacher", template)
             for name, template in (("json", as_json), ("plain", TURNS))}  # fmt: skip
    (rendering,) = sides["json"].chat_template.render_batch_with_positions([document.conversation])
    place = rendering.positions[1]
    told = {own: rendering.text[at] for first, start, size in place.runs.tolist() for own, at in
            zip(range(first, first + size), range(start, start + size), strict=True)}  # fmt: skip
    assert all(result[own] == character for own, character in told.items())
    assert {own for own in range(len(result)) if result[own] not in '"\n\\'} == told.keys()
    assert json.loads(f'"{rendering.text[place.start : place.stop]}"') == result
    for student, teacher in (("json", "plain"), ("plain", "json")):
        left, right, spans = spans_of(sides, student, teacher, document)
        assert trained_text(sides[student], left) == document.segments[-1].text
        assert (np.diff(left.text_runs[:, 2]) > 0).all()
        covered = 0
        for a, b, c, d in spans.tolist():
            texts = [b"".join(map(side.vocabulary.bytes_of, ids)) for side, ids in
                     ((sides[student], left.ids[a:b].tolist()), (sides[teacher], right.ids[c:d].tolist()))]  # fmt: skip
            assert texts[0] == texts[1]
            covered += int((left.train_mask & left.text_mask)[a:b].sum())
        assert covered == (left.train_mask & left.text_mask).sum()


def test_calls_of_templates_that_want_no_content_are_written(families, tmp_path):
    """DeepSeek-R1-Distill writes calls only of messages whose content is none."""
    template = (
        "{% for message in messages %}<|im_end|>{{ message.role }}\n"
        "{% if message.content is none and message.tool_calls %}"
        "{% for call in message.tool_calls %}CALL {{ call.function.name }} {{ call.function.arguments }}{% endfor %}"
        "{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
    asked = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    tokenizer = with_template(families, tmp_path, "teacher", template)
    document = Document.from_messages(
        [*asked, {"role": "tool", "content": "22"}, {"role": "assistant", "content": "It is."}]
    )
    assert 'CALL weather {"city": "Paris"}' in tokenizer.chat_template.render(document.conversation.messages)
    (sequence,) = tokenize_documents(tokenizer, [document])
    assert "weather" in trained_text(tokenizer, sequence)


def test_of_several_templates_that_for_tools_is_taken_with_tools(families, tmp_path):
    folder = shutil.copytree(families["teacher"], tmp_path / "several")
    configuration = json.loads((folder / "tokenizer_config.json").read_text())
    tools = "\n{%- for tool in tools -%} {{ tool.function.name }}: {%- endfor %}" + TURNS + "{{ bos_token }}\n"
    named = [{"name": "tool_use", "template": tools}, {"name": "default", "template": f"\n {TURNS}"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({**configuration, "chat_template": named}))
    other = shutil.copytree(families["teacher"], tmp_path / "files")
    (other / "additional_chat_templates").mkdir()
    (other / "chat_template.jinja").write_text(f"\n {TURNS}")
    (other / "additional_chat_templates" / "tool_use.jinja").write_text(tools)
    add = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    expected = transformers.AutoTokenizer.from_pretrained(folder)
    for place in (folder, other):
        template = Tokenizer(place).chat_template
        for offered in (None, add):
            told = expected.apply_chat_template(CHAT[:1], tools=offered, tokenize=False)
            assert template.render(CHAT[:1], tools=offered) == told
    assert Tokenizer(folder).template_fingerprint != Tokenizer(families["teacher"]).template_fingerprint


def test_of_several_templates_the_default_is_taken(families, tmp_path):
    folder = shutil.copytree(families["teacher"], tmp_path / "several")
    configuration = json.loads((folder / "tokenizer_config.json").read_text())
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": TURNS}]
    (folder / "tokenizer_config.json").write_text(json.dumps({**configuration, "chat_template": named}))
    assert Tokenizer(folder).chat_template.render(CHAT[:1]) == "<|im_end|>system\nBe brief.<|im_end|>\n"


# Documents.


def test_messages_become_segments_of_their_contents():
    document = Document.from_messages(
        [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b\ud800"}]},
            {"role": "assistant", "content": None, "tool_calls": []},
            {"role": "assistant", "content": "c"},
        ]
    )
    assert [(part.role, part.text, part.train) for part in document.segments] == [
        ("user", "ab\ufffd", False),
        ("assistant", "", True),
        ("assistant", "c", True),
    ]


def test_answers_inside_of_a_prompt_are_not_trained():
    document = Document.from_messages(CHAT, num_prompt_messages=3)
    assert [part.train for part in document.segments] == [False, False, False, False, True]


@pytest.mark.parametrize(
    "message",
    [
        {"content": "a"},
        {"role": "user", "content": 5},
        {"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "a"}]},
        "a",
    ],
)
def test_what_is_no_message_is_refused(message):
    with pytest.raises(ValueError, match="message"):
        Document.from_messages([message])
