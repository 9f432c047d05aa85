"""Chat templates: tokens, training masks and alignment of conversations."""

from __future__ import annotations

import json
import shutil
import time

import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_texts import FRAGMENTS, SPECIAL_SPELLINGS, quick

from xtk.errors import XtkError
from xtk.text.alignment import align_sequences
from xtk.text.chat.jinja_template import CHAT_TEMPLATE, PROMPT_TEMPLATE, SandboxedTemplate
from xtk.text.chat.template import ChatTemplate, RenderedConversation
from xtk.text.document import Conversation, Document
from xtk.text.token_sequence import TokenSequence, count_lost_bytes, tokenize_documents
from xtk.text.tokenizer import Tokenizer

HEADERS_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|pad|>{{ message['role'] }}<|pad|>\n\n"
    "{{ message['content'] }}<|end_of_text|>{% endfor %}"
)
TURNS_TEMPLATE = (
    "{% for message in messages %}<|im_end|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
)
TRIMMING = TURNS_TEMPLATE.replace("message.content", "message.content | trim")
# Drops the assistant's reasoning, and writes an empty reasoning block before its last answer.
THINKING_TEMPLATE = (
    "{%- for message in messages %}{%- set content = message.content %}"
    "{%- if message.role == 'assistant' and '</think>' in content %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{{- '<|im_end|>' + message.role + '\\n' }}"
    "{%- if message.role == 'assistant' and loop.last %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{{- content + '<|im_end|>\\n' }}{%- endfor %}"
)
# A system prompt has no separate turn: it is written into the first user turn.
INSTRUCTIONS = (
    "{{ bos_token }}{% set ns = namespace(system='') %}{% for message in messages %}"
    "{% if message.role == 'system' %}{% set ns.system = message.content + '\\n\\n' %}"
    "{% elif message.role == 'user' %}[INST] {{ ns.system }}{{ message.content }} [/INST]{% set ns.system = '' %}"
    "{% else %} {% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)
STRICT = "{% if messages[0].role != 'user' %}{{ raise_exception('the user begins') }}{% endif %}" + TURNS_TEMPLATE
TEMPLATES = {
    "student": HEADERS_TEMPLATE,
    "teacher": TURNS_TEMPLATE,
    "metaspace": INSTRUCTIONS,
    "composing": TURNS_TEMPLATE,
    "word-piece": TURNS_TEMPLATE,
}
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
def chat_tokenizers(families, tmp_path_factory):
    folder = tmp_path_factory.mktemp("templates")
    return {name: with_template(families, folder, name, template) for name, template in TEMPLATES.items()}


def bytes_of_tokens(tokenizer: Tokenizer, sequence: TokenSequence, mask: np.ndarray) -> bytes:
    return b"".join(tokenizer.vocabulary.bytes_of(token) for token in sequence.ids[mask].tolist())


def trained_text(tokenizer: Tokenizer, sequence: TokenSequence) -> str:
    return bytes_of_tokens(tokenizer, sequence, sequence.train_mask & sequence.text_mask).decode()


def written_contents(rendering: RenderedConversation) -> list[str | None]:
    """Return, for each content, the part of it that the template wrote, or None."""
    return [
        None if position is None else "".join(rendering.text[b : b + size] for _, b, size in position.runs.tolist())
        for position in rendering.positions
    ]


def spans_of(chat_tokenizers, student_name, teacher_name, document):
    (student_sequence,), (teacher_sequence,) = (
        tokenize_documents(chat_tokenizers[student_name], [document]),
        tokenize_documents(chat_tokenizers[teacher_name], [document]),
    )
    return student_sequence, teacher_sequence, align_sequences(student_sequence, teacher_sequence)


@pytest.mark.parametrize("name", ["student", "teacher"])
def test_only_assistant_contents_and_their_end_of_turn_tokens_are_trained(chat_tokenizers, name):
    tokenizer = chat_tokenizers[name]
    (sequence,) = tokenize_documents(tokenizer, [Document.from_messages(CHAT)])
    assert trained_text(tokenizer, sequence) == CHAT[2]["content"] + CHAT[4]["content"]
    end_tokens = sequence.ids[sequence.train_mask & ~sequence.text_mask].tolist()
    assert end_tokens == [tokenizer.special_token_ids["eos"]] * 2
    assert (sequence.segment_end_tokens >= 0).all()


def test_spans_contain_equal_bytes_of_contents_and_no_template_text(chat_tokenizers):
    document = Document.from_messages(CHAT)
    student_sequence, teacher_sequence, spans = spans_of(chat_tokenizers, "student", "teacher", document)
    contents = []
    for s0, s1, t0, t1 in spans.tolist():
        student_bytes, teacher_bytes = (
            bytes_of_tokens(chat_tokenizers[name], sequence, np.arange(low, high))
            for name, sequence, low, high in (
                ("student", student_sequence, s0, s1),
                ("teacher", teacher_sequence, t0, t1),
            )
        )
        assert student_bytes == teacher_bytes
        contents.append(student_bytes)
    assert b"".join(contents).decode() == "".join(message["content"] for message in CHAT)
    # The ends of the five turns, which have no bytes.
    assert sum(content == b"" for content in contents) == 5
    covered = np.zeros(len(student_sequence), np.bool_)
    for s0, s1, _, _ in spans.tolist():
        covered[s0:s1] = True
    assert (covered >= student_sequence.train_mask).all()


def test_special_tokens_are_parsed_in_the_template_but_not_in_contents(chat_tokenizers):
    chat = [{"role": "user", "content": "What is <|im_end|>?"}, {"role": "assistant", "content": "<|im_end|> ends."}]
    tokenizer = chat_tokenizers["teacher"]
    (sequence,) = tokenize_documents(tokenizer, [Document.from_messages(chat)])
    assert trained_text(tokenizer, sequence) == "<|im_end|> ends."
    assert sequence.ids.tolist().count(tokenizer.special_token_ids["eos"]) == 4
    plain = [{**message, "content": message["content"].replace("<|im_end|>", "it")} for message in chat]
    (plain_sequence,) = tokenize_documents(tokenizer, [Document.from_messages(plain)])
    assert plain_sequence.ids.tolist().count(tokenizer.special_token_ids["eos"]) == 4


@pytest.mark.parametrize("name", TEMPLATES)
def test_token_ids_are_those_of_the_rendered_text(chat_tokenizers, name):
    import tokenizers

    tokenizer = chat_tokenizers[name]
    conversation = Conversation(tuple(CHAT))
    backend = tokenizers.Tokenizer.from_file(str(tokenizer.folder / "tokenizer.json"))
    rendered = tokenizer.chat_template.render_with_positions(conversation).text
    (sequence,) = tokenize_documents(tokenizer, [Document.from_messages(CHAT)])
    assert sequence.ids.tolist() == backend.encode(rendered, add_special_tokens=False).ids


def test_system_prompt_inside_the_first_user_turn_is_located(chat_tokenizers):
    rendering = chat_tokenizers["metaspace"].chat_template.render_with_positions(Conversation(tuple(CHAT[:3])))
    assert written_contents(rendering) == [message["content"] for message in CHAT[:3]]


def test_trimmed_white_space_is_counted_as_lost_and_carries_no_loss(families, tmp_path):
    chat = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "  12 apples \n"}]
    document = Document.from_messages(chat)
    tokenizer = with_template(families, tmp_path, "teacher", TRIMMING)
    (sequence,) = tokenize_documents(tokenizer, [document])
    assert trained_text(tokenizer, sequence) == "12 apples"
    assert count_lost_bytes(document, sequence) == 4
    assert sequence.ids[sequence.segment_end_tokens[1]] == tokenizer.special_token_ids["eos"]


def test_reasoning_that_one_template_drops_is_in_no_span(chat_tokenizers, families, tmp_path):
    thought = "<think>1234 - 12 = 1222</think>\n\n"
    chat = [CHAT[1], {"role": "assistant", "content": thought + "Anna has 1222 apples left."}]
    document = Document.from_messages(chat)
    thinking = with_template(families, tmp_path, "teacher", THINKING_TEMPLATE)
    (student_sequence,), (teacher_sequence,) = (
        tokenize_documents(chat_tokenizers["student"], [document]),
        tokenize_documents(thinking, [document]),
    )
    assert trained_text(thinking, teacher_sequence) == "Anna has 1222 apples left."
    assert count_lost_bytes(document, teacher_sequence) == len(thought)
    assert count_lost_bytes(document, student_sequence) == 0
    spans = align_sequences(student_sequence, teacher_sequence)
    spans = spans[student_sequence.train_mask[spans[:, 1] - 1]]
    assert (
        b"".join(
            bytes_of_tokens(chat_tokenizers["student"], student_sequence, np.arange(s0, s1))
            for s0, s1, _, _ in spans.tolist()
        ).decode()
        == "Anna has 1222 apples left."
    )


def test_bytes_that_only_one_side_has_are_in_no_span():
    def sequence(ends: list[int], text_runs: list[list[int]]) -> TokenSequence:
        size = len(ends)
        return TokenSequence(
            np.zeros(size, np.int32), np.array(ends, np.int32), np.ones(size, np.bool_),
            np.array(text_runs, np.int32).reshape(-1, 3), np.array([-1], np.int32),
        )  # fmt: skip

    whole = sequence([2, 3, 12, 14], [[0, 4, 0]])
    # Bytes 3 to 8 are missing on this side, and its next token begins within the third token of the other side.
    with_gap = sequence([1, 2, 3, 10, 12, 14], [[0, 3, 0], [3, 6, 8]])
    assert align_sequences(whole, with_gap).tolist() == [[0, 1, 0, 2], [1, 2, 2, 3], [3, 4, 5, 6]]
    late = sequence([5, 14], [[0, 2, 3]])
    assert align_sequences(with_gap, late).tolist() == []
    assert align_sequences(sequence([3, 14], [[0, 2, 0]]), late).tolist() == [[1, 2, 0, 2]]
    assert align_sequences(late, sequence([], [])).tolist() == []


CONTENT = st.lists(st.sampled_from([*FRAGMENTS, *SPECIAL_SPELLINGS, "assistant", "[/INST]"]), max_size=5).map("".join)
CHAT_TURNS = st.lists(st.tuples(CONTENT, CONTENT), min_size=1, max_size=3)


def messages_of(turns: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [
        message
        for question, answer in turns
        for message in ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
    ]


@pytest.mark.parametrize(
    ("student", "teacher"), [("student", "teacher"), ("teacher", "metaspace"), ("student", "composing")]
)
@given(turns=CHAT_TURNS)
@settings(quick, max_examples=40)
def test_any_conversation_is_aligned_by_its_contents(chat_tokenizers, student, teacher, turns):
    document = Document.from_messages(messages_of(turns))
    student_sequence, teacher_sequence, spans = spans_of(chat_tokenizers, student, teacher, document)
    for name, sequence in ((student, student_sequence), (teacher, teacher_sequence)):
        assert (np.diff(sequence.byte_ends) >= 0).all()
        assert not sequence.train_mask[0]
        assert 0 <= count_lost_bytes(document, sequence) <= sum(len(answer.encode()) for _, answer in turns)
        run_bytes = [
            bytes_of_tokens(chat_tokenizers[name], sequence, np.arange(run[0], run[1]))
            for run in sequence.text_runs.tolist()
        ]
        # A space of the template, or one that the tokenizer adds to a text, may come first.
        assert all(text.removeprefix(b" ") in document.text.encode() for text in run_bytes if sequence.exact)
        assert sequence.byte_ends[sequence.text_mask].max(initial=0) <= len(document.text.encode())
    # A span of contents ends at the same byte on both sides, and begins after the previous span.
    contents = spans[student_sequence.text_mask[spans[:, 0]]]
    assert (student_sequence.byte_ends[contents[:, 1] - 1] == teacher_sequence.byte_ends[contents[:, 3] - 1]).all()
    assert (spans[1:, 0] >= spans[:-1, 1]).all()
    assert (spans[1:, 2] >= spans[:-1, 3]).all()
    swapped = align_sequences(teacher_sequence, student_sequence)
    assert swapped[:, [2, 3, 0, 1]].tolist() == spans.tolist()


@given(turns=CHAT_TURNS)
@settings(quick, max_examples=40)
def test_spans_of_any_conversation_contain_equal_bytes(chat_tokenizers, turns):
    document = Document.from_messages(messages_of(turns))
    student_sequence, teacher_sequence, spans = spans_of(chat_tokenizers, "student", "teacher", document)
    for s0, s1, t0, t1 in spans.tolist():
        assert bytes_of_tokens(chat_tokenizers["student"], student_sequence, np.arange(s0, s1)) == bytes_of_tokens(
            chat_tokenizers["teacher"], teacher_sequence, np.arange(t0, t1)
        )


def test_truncated_sequence_keeps_the_spans_of_its_remaining_tokens(chat_tokenizers):
    document = Document.from_messages(CHAT)
    student_sequence, teacher_sequence, spans = spans_of(chat_tokenizers, "student", "teacher", document)
    for length in range(len(student_sequence) + 1):
        truncated = student_sequence.truncate(length)
        assert align_sequences(truncated, teacher_sequence).tolist() == spans[spans[:, 1] <= length].tolist()


# Templates.


def test_template_renders_the_same_text_as_transformers(chat_tokenizers):
    from transformers import PreTrainedTokenizerFast

    for name in ("student", "teacher"):
        reference = PreTrainedTokenizerFast.from_pretrained(chat_tokenizers[name].folder)
        assert chat_tokenizers[name].chat_template.render(CHAT) == reference.apply_chat_template(CHAT, tokenize=False)


def conversation_of(*contents: str) -> Document:
    roles = ("user", "assistant")
    return Document.from_messages([{"role": roles[index % 2], "content": text} for index, text in enumerate(contents)])


def tokenize_with_template(
    families, tmp_path, name: str, template: str, document: Document
) -> tuple[Tokenizer, TokenSequence]:
    tokenizer = with_template(families, tmp_path, name, template)
    return tokenizer, tokenize_documents(tokenizer, [document])[0]


def text_runs_of(tokenizer: Tokenizer, sequence: TokenSequence) -> list[tuple[int, bytes]]:
    """Return, for each text run, the byte of the contents where it begins, and its bytes."""
    return [
        (first, bytes_of_tokens(tokenizer, sequence, np.arange(start, stop)))
        for start, stop, first in sequence.text_runs.tolist()
    ]


def test_answer_that_also_occurs_in_its_reasoning_is_located_as_the_answer(families, tmp_path):
    thought = "<think>Anna has 12 apples left.</think>\n\n"
    document = conversation_of("12?", thought + "Anna has 12 apples left.", "and?", "yes")
    tokenizer, sequence = tokenize_with_template(families, tmp_path, "teacher", THINKING_TEMPLATE, document)
    assert (3 + len(thought), b"Anna has 12 apples left.") in text_runs_of(tokenizer, sequence)


def test_short_answer_after_long_dropped_reasoning_is_trained(families, tmp_path):
    document = conversation_of("2+2?", "<think>hm, a long thought</think>\n\n4\n\n", "and 3?", "\n\n\n17\n\n\n")
    tokenizer, sequence = tokenize_with_template(
        families, tmp_path, "teacher", THINKING_TEMPLATE.replace("content + '", "content | trim + '"), document
    )
    assert trained_text(tokenizer, sequence) == "417"


# A turn depends on another turn's content: a user turn with a tool's result does not count as a new question.
DEPENDS_ON_OTHER_TURNS = (
    "{%- set ns = namespace(last=0) %}{%- for message in messages %}"
    "{%- if message.role == 'user' and not message.content.startswith('<result>') %}{%- set ns.last = loop.index0 %}"
    "{%- endif %}{%- endfor %}{%- for message in messages %}{{- '<|im_end|>' + message.role + '\n' }}"
    "{%- if message.role == 'assistant' and loop.index0 > ns.last %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{{- message.content + '<|im_end|>\n' }}{%- endfor %}"
)


def test_template_that_depends_on_the_content_of_other_turns_keeps_all_answers(families, tmp_path):
    import tokenizers

    document = conversation_of("What is 12?", "I ask.", "<result>12</result>", "It is 12.", "Anna?", "Anna.")
    tokenizer, sequence = tokenize_with_template(families, tmp_path, "teacher", DEPENDS_ON_OTHER_TURNS, document)
    assert trained_text(tokenizer, sequence) == "I ask.It is 12.Anna."
    assert (sequence.segment_end_tokens >= 0).all()
    backend = tokenizers.Tokenizer.from_file(str(tokenizer.folder / "tokenizer.json"))
    rendered = tokenizer.chat_template.render_with_positions(document.conversation).text
    assert sequence.ids.tolist() == backend.encode(rendered, add_special_tokens=False).ids


def test_special_tokens_that_strip_adjacent_white_space_keep_the_answer(families, tmp_path):
    folder = shutil.copytree(families["teacher"], tmp_path / "greedy")
    content = json.loads((folder / "tokenizer.json").read_text())
    for token in content["added_tokens"]:
        token["rstrip"] = token["lstrip"] = True
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}<|endoftext|>\n{{ message.content }} <|im_end|>\n{% endfor %}"
    )
    tokenizer = Tokenizer(folder)
    (sequence,) = tokenize_documents(tokenizer, [conversation_of("12?", "It is 17.", "and?", "<|im_end|> ends")])
    assert trained_text(tokenizer, sequence) == "It is 17.<|im_end|> ends"
    assert (sequence.segment_end_tokens >= 0).all()


def test_first_word_merged_with_a_template_space_is_still_trained_and_aligned(chat_tokenizers):
    document = conversation_of("12?", "Anna has 12.", "and?", "Bert has 5.")
    tokenizer = chat_tokenizers["metaspace"]
    (sequence,) = tokenize_documents(tokenizer, [document])
    assert count_lost_bytes(document, sequence) == 0
    assert trained_text(tokenizer, sequence) == " Anna has 12. Bert has 5."
    (student,) = tokenize_documents(chat_tokenizers["student"], [document])
    spans = align_sequences(student, sequence)
    covered = np.zeros(len(student), np.bool_)
    for s0, s1, _, _ in spans.tolist():
        covered[s0:s1] = True
    assert covered[student.train_mask].all()


def test_end_of_turn_is_found_after_white_space(families, tmp_path):
    template = TURNS_TEMPLATE.replace("{{ message.content }}<|im_end|>", "{{ message.content }} \n<|im_end|>")
    tokenizer, sequence = tokenize_with_template(
        families, tmp_path, "teacher", template, conversation_of("12?", "It is 12.")
    )
    assert tokenizer.special_token_ids["eos"] == sequence.ids[sequence.segment_end_tokens[1]]
    assert sequence.train_mask[sequence.segment_end_tokens[1]]


TOOL_CALLS = (
    "{% for message in messages %}<|endoftext|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<call>{{ call.name }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
)


def test_end_of_turn_is_found_after_tool_calls_with_and_without_content(families, tmp_path):
    calls = [{"name": "add"}]
    messages = [
        {"role": "user", "content": "12 + 5?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "17"},
        {"role": "assistant", "content": "Again.", "tool_calls": calls},
        {"role": "tool", "content": "17"},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]
    tokenizer, sequence = tokenize_with_template(
        families, tmp_path, "teacher", TOOL_CALLS, Document.from_messages(messages)
    )
    eos = tokenizer.special_token_ids["eos"]
    assert trained_text(tokenizer, sequence) == "addAgain.addadd"
    found = sequence.segment_end_tokens[sequence.segment_end_tokens >= 0]
    assert found.tolist() == np.flatnonzero(sequence.ids == eos).tolist()
    assert sequence.train_mask[found].tolist() == [False, True] * 3
    # Messages of which the template writes no text have one end each, too.
    empty = {"role": "assistant", "content": ""}
    twice = [messages[0], empty, empty, {"role": "assistant", "content": "17."}]
    _, sequence = tokenize_with_template(families, tmp_path, "teacher", TOOL_CALLS, Document.from_messages(twice))
    ends = np.flatnonzero(sequence.ids == eos)
    assert sequence.segment_end_tokens.tolist() == ends.tolist()
    untrained = [{**message, "train": False} for message in messages]
    _, sequence = tokenize_with_template(families, tmp_path, "teacher", TOOL_CALLS, Document.from_messages(untrained))
    assert not sequence.train_mask.any()


def test_end_of_tool_calls_is_found_after_a_prompt_without_an_end_token(families, tmp_path):
    template = INSTRUCTIONS.replace("{% generation %}", "{{ message.tool_calls or '' }}{% generation %}")
    messages = [
        {"role": "user", "content": "12 + 5?"},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]},
        {"role": "user", "content": "17"},
        {"role": "assistant", "content": "It is 17."},
    ]
    tokenizer, sequence = tokenize_with_template(
        families, tmp_path, "metaspace", template, Document.from_messages(messages)
    )
    ends = np.flatnonzero(sequence.ids == tokenizer.special_token_ids["eos"]).tolist()
    assert [end for end in sequence.segment_end_tokens.tolist() if end >= 0] == ends
    assert sequence.train_mask[ends].all()


def test_configured_eos_token_ends_turns_even_if_it_is_not_special(families, tmp_path):
    folder = shutil.copytree(families["teacher"], tmp_path / "plain")
    content = json.loads((folder / "tokenizer.json").read_text())
    for token in content["added_tokens"]:
        token["special"] = False
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(TURNS_TEMPLATE + "{{ eos_token }}")
    tokenizer = Tokenizer(folder)
    (sequence,) = tokenize_documents(tokenizer, [conversation_of("12?", "It is 12.")])
    assert sequence.ids[sequence.segment_end_tokens[1]] == tokenizer.special_token_ids["eos"]
    assert json.loads(tokenizer.to_files()["tokenizer_config.json"])["eos_token"] == "<|im_end|>"


@pytest.mark.parametrize("template", [TURNS_TEMPLATE, TRIMMING, THINKING_TEMPLATE])
def test_long_conversations_are_tokenized_within_five_seconds(families, tmp_path, template):
    document = conversation_of(*(f" Anna has {at} apples. " for at in range(300)))
    started = time.perf_counter()
    tokenizer, sequence = tokenize_with_template(families, tmp_path, "teacher", template, document)
    assert time.perf_counter() - started < 5
    assert trained_text(tokenizer, sequence).count("apples") == 150


def test_alignment_time_is_linear_in_the_number_of_text_runs():
    def seconds(size: int) -> float:
        ends = np.arange(1, 2 * size + 1, dtype=np.int32)
        offset = np.array([-1], np.int32)
        one_run = TokenSequence(ends, ends, ends > 0, np.array([[0, 2 * size, 0]], np.int32), offset)
        starts = np.arange(0, 2 * size, 2)
        text_runs = np.column_stack([starts, starts + 1, starts]).astype(np.int32)
        many_runs = TokenSequence(ends, ends, ends > 0, text_runs, offset)
        durations = []
        for _ in range(15):
            started = time.process_time()
            spans = align_sequences(many_runs, one_run)
            durations.append(time.process_time() - started)
            assert len(spans) == size
        return min(durations)

    seconds(10)  # compiles
    assert seconds(80_000) < 24 * seconds(10_000)  # linear: 8, quadratic: 64


def test_tools_tool_calls_and_dates_reach_the_template():
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
    rendering = template.render_with_positions(conversation)
    call = '{"type": "function", "function": {"name": "é<", "arguments": {}}}'
    assert rendering.text == f'[{{"name": "add"}}]2024-07-26<b>|[{call}]|5|'
    assert written_contents(rendering) == ["<b>", None, None, "é<", "{}", "5"]


def test_message_that_the_template_omits_has_no_position():
    template = ChatTemplate("{% for m in messages if m.role != 'system' %}{{ m.content }}.{% endfor %}", {}, "here")
    rendering = template.render_with_positions(
        Conversation(({"role": "system", "content": "s"}, {"role": "user", "content": "u"}))
    )
    assert written_contents(rendering) == [None, "u"]


def test_content_that_the_template_writes_twice_is_located_once():
    template = ChatTemplate("{{ messages[0].content }}; {{ messages[0].content }}!", {}, "here")
    rendering = template.render_with_positions(Conversation(({"role": "user", "content": "abc"},)))
    assert [position.runs.tolist() for position in rendering.positions] == [[[0, 5, 3]]]  # the last of the two


@pytest.mark.parametrize(
    ("template", "message"),
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
def test_failing_template_is_reported_with_its_reason_and_folder(families, tmp_path, template, message):
    tokenizer = with_template(families, tmp_path, "teacher", template)
    with pytest.raises(XtkError, match=message) as raised:
        tokenize_documents(tokenizer, [Document.from_messages(CHAT)])
    assert str(tokenizer.folder) in raised.value.where


def test_messages_for_a_tokenizer_without_a_chat_template_are_refused(families):
    with pytest.raises(XtkError, match="no chat template"):
        tokenize_documents(Tokenizer(families["student"]), [Document.from_messages(CHAT)])


def test_content_that_the_template_writes_as_json_keeps_the_alignment_of_the_others(families, tmp_path):
    """As Llama 3.1, which writes the result of a tool as a JSON string."""
    as_json = (
        "{% for message in messages %}<|im_end|>{{ message.role }}\n{% if message.role == 'tool' %}"
        "{{ message.content | tojson }}{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}"
    )
    result = '{"temp": 22, "unit": "°C"}\nfine \\ good'
    document = Document.from_messages([
        {"role": "user", "content": "Weather?"}, {"role": "tool", "content": result},
        {"role": "assistant", "content": "It is 22 degrees, fine and good all day."},
    ])  # fmt: skip
    chat_tokenizers = {name: with_template(families, tmp_path / name, "teacher", template)
             for name, template in (("json", as_json), ("plain", TURNS_TEMPLATE))}  # fmt: skip
    rendering = chat_tokenizers["json"].chat_template.render_with_positions(document.conversation)
    position = rendering.positions[1]
    rendered = {index: rendering.text[rendered_index] for first, start, size in position.runs.tolist()
                for index, rendered_index in
                zip(range(first, first + size), range(start, start + size), strict=True)}  # fmt: skip
    assert all(result[index] == character for index, character in rendered.items())
    assert {index for index in range(len(result)) if result[index] not in '"\n\\'} == rendered.keys()
    assert json.loads(f'"{rendering.text[position.start : position.stop]}"') == result
    for student, teacher in (("json", "plain"), ("plain", "json")):
        student_sequence, teacher_sequence, spans = spans_of(chat_tokenizers, student, teacher, document)
        assert trained_text(chat_tokenizers[student], student_sequence) == document.segments[-1].text
        assert (np.diff(student_sequence.text_runs[:, 2]) > 0).all()
        covered = 0
        for s0, s1, t0, t1 in spans.tolist():
            texts = [b"".join(map(tokenizer.vocabulary.bytes_of, ids)) for tokenizer, ids in
                     ((chat_tokenizers[student], student_sequence.ids[s0:s1].tolist()),
                      (chat_tokenizers[teacher], teacher_sequence.ids[t0:t1].tolist()))]  # fmt: skip
            assert texts[0] == texts[1]
            covered += int((student_sequence.train_mask & student_sequence.text_mask)[s0:s1].sum())
        assert covered == (student_sequence.train_mask & student_sequence.text_mask).sum()


def test_tool_calls_are_rendered_by_a_template_that_requires_content_none(families, tmp_path):
    """As DeepSeek-R1-Distill, which writes tool calls only of messages whose content is None."""
    template = (
        "{% for message in messages %}<|im_end|>{{ message.role }}\n"
        "{% if message.content is none and message.tool_calls %}"
        "{% for call in message.tool_calls %}CALL {{ call.function.name }} {{ call.function.arguments }}{% endfor %}"
        "{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
    question_and_call = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    tokenizer = with_template(families, tmp_path, "teacher", template)
    document = Document.from_messages(
        [*question_and_call, {"role": "tool", "content": "22"}, {"role": "assistant", "content": "It is."}]
    )
    assert 'CALL weather {"city": "Paris"}' in tokenizer.chat_template.render(document.conversation.messages)
    (sequence,) = tokenize_documents(tokenizer, [document])
    assert "weather" in trained_text(tokenizer, sequence)


def test_tool_use_template_is_selected_when_tools_are_given(families, tmp_path):
    folder = shutil.copytree(families["teacher"], tmp_path / "several")
    configuration = json.loads((folder / "tokenizer_config.json").read_text())
    tools = "\n{%- for tool in tools -%} {{ tool.function.name }}: {%- endfor %}" + TURNS_TEMPLATE + "{{ bos_token }}\n"
    templates = [{"name": "tool_use", "template": tools}, {"name": "default", "template": f"\n {TURNS_TEMPLATE}"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({**configuration, "chat_template": templates}))
    folder_with_files = shutil.copytree(families["teacher"], tmp_path / "files")
    (folder_with_files / "additional_chat_templates").mkdir()
    (folder_with_files / "chat_template.jinja").write_text(f"\n {TURNS_TEMPLATE}")
    (folder_with_files / "additional_chat_templates" / "tool_use.jinja").write_text(tools)
    add_tool = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    expected = transformers.AutoTokenizer.from_pretrained(folder)
    for path in (folder, folder_with_files):
        template = Tokenizer(path).chat_template
        for tools_given in (None, add_tool):
            rendered = expected.apply_chat_template(CHAT[:1], tools=tools_given, tokenize=False)
            assert template.render(CHAT[:1], tools=tools_given) == rendered
    assert Tokenizer(folder).template_fingerprint != Tokenizer(families["teacher"]).template_fingerprint


def test_default_template_is_selected_among_several(families, tmp_path):
    folder = shutil.copytree(families["teacher"], tmp_path / "several")
    configuration = json.loads((folder / "tokenizer_config.json").read_text())
    templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": TURNS_TEMPLATE}]
    (folder / "tokenizer_config.json").write_text(json.dumps({**configuration, "chat_template": templates}))
    assert Tokenizer(folder).chat_template.render(CHAT[:1]) == "<|im_end|>system\nBe brief.<|im_end|>\n"


# Documents.


def test_message_contents_become_segments():
    document = Document.from_messages(
        [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b\ud800"}]},
            {"role": "assistant", "content": None, "tool_calls": []},
            {"role": "assistant", "content": "c"},
        ]
    )
    assert [(segment.role, segment.text, segment.train) for segment in document.segments] == [
        ("user", "ab\ufffd", False),
        ("assistant", "", True),
        ("assistant", "c", True),
    ]


def test_answers_within_the_prompt_messages_are_not_trained():
    document = Document.from_messages(CHAT, num_prompt_messages=3)
    assert [segment.train for segment in document.segments] == [False, False, False, False, True]


@pytest.mark.parametrize(
    "message",
    [
        {"content": "a"},
        {"role": "user", "content": 5},
        {"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "a"}]},
        "a",
    ],
)
def test_invalid_message_is_refused(message):
    with pytest.raises(ValueError, match="message"):
        Document.from_messages([message])


@pytest.mark.parametrize("kind", [CHAT_TEMPLATE, PROMPT_TEMPLATE])
def test_templates_that_make_random_choices_are_refused(kind):
    with pytest.raises(XtkError, match=f"the {kind} template is invalid: No filter named 'random'"):
        SandboxedTemplate("{{ range(10000) | random }}", kind, "here")
    with pytest.raises(XtkError, match="'lipsum' is undefined"):
        SandboxedTemplate("{{ lipsum(n=1) }}", kind, "here").render({})
