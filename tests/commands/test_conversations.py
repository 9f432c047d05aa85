"""Conversations through the commands: each side in its own template, only answers trained."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from xtk.artifacts.teacher_cache import TeacherCache
from xtk.tokens.token_sequence import tokenize_documents
from xtk.tokens.tokenizer import Tokenizer

HEADERS = (
    "{{ bos_token }}{% for message in messages %}<|pad|>{{ message['role'] }}<|pad|>\n\n"
    "{{ message['content'] }}<|end_of_text|>{% endfor %}"
)
TURNS = (
    "{% for message in messages %}<|endoftext|>{{ message.role }}\n{{ message.content.split('</think>')[-1] | trim }}"
    "<|im_end|>\n{% endfor %}"
)
ANSWER = "Anna has 1222 apples left."


@pytest.fixture(scope="module")
def chatting(pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp("chatting")
    for name, template in (("student", HEADERS), ("teacher", TURNS)):
        shutil.copytree(getattr(pair, name), folder / name)
        (folder / name / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="module")
def conversations(chatting):
    rows = [
        [{"role": "user", "content": f"Anna gives {number}?"}, {"role": "assistant", "content": thought + ANSWER}]
        for number, thought in ((12, ""), (13, "<think>1234 - 12</think>\n\n"), (14, ""))
    ]
    path = chatting / "chat.jsonl"
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def cache(run, chatting, conversations):
    done = run("cache-teacher", chatting / "teacher", conversations, "--top-k", 8, "-o", chatting / "cache")
    # The second teacher's answer is told to be cut, with its bytes: the thought, and the line feeds after it.
    assert "26 bytes of trained text in 1 of 3 checked conversations are not trained" in done.stderr
    return chatting / "cache"


def test_a_cache_of_conversations_holds_the_signal_of_answers_alone(cache):
    for row in TeacherCache(cache):
        assert row.document.conversation is not None
        spelled = np.flatnonzero(row.tokens.train_mask & row.tokens.text_mask)
        tokens = row.tokens.ids[spelled].tolist()
        vocabulary = TeacherCache(cache).teacher_tokenizer.vocabulary
        assert b"".join(vocabulary.bytes_of(token) for token in tokens).decode() == ANSWER
        # The answer's tokens, and the one that ends the turn.
        assert len(row.teacher_logprobs) == len(spelled) + 1


def test_a_student_learns_from_conversations_in_its_own_template(run, cache, chatting, tmp_path):
    run("build-projection", chatting / "student", chatting / "teacher", "-o", tmp_path / "p")
    done = run(
        "distill", chatting / "student", cache, "--projection", tmp_path / "p", "--loss", "p-kl", "--max-steps", 2,
        "--logging-steps", 1, "-o", tmp_path / "out", "--json",
    )  # fmt: skip
    assert json.loads(done.stdout)["metrics"]["p-kl"] > 0
    assert "bytes of trained text" not in done.stderr


def test_a_student_whose_template_rewrites_answers_says_so(run, chatting, cache, tmp_path):
    shutil.copytree(chatting / "student", tmp_path / "student")
    (tmp_path / "student" / "chat_template.jinja").write_text(
        HEADERS.replace("message['content']", "message['content'].split('</think>')[-1]")
    )
    done = run("distill", tmp_path / "student", cache, "--loss", "ce", "--max-steps", 1, "-o", tmp_path / "out")
    assert "24 bytes of trained text in 1 of 3 checked conversations" in done.stderr


def test_bits_per_byte_of_conversations_count_answers(run, chatting, conversations):
    done = run("evaluate", chatting / "student", conversations, "--json")
    assert json.loads(done.stdout)["bytes"] == 3 * len(ANSWER) + len("<think>1234 - 12</think>\n\n")


def test_a_conversation_that_is_too_long_is_cut_or_skipped_never_split(run, chatting, tmp_path):
    long = [{"role": "user", "content": "12?"}, {"role": "assistant", "content": "Anna has 1234 apples. " * 100}]
    (tmp_path / "long.jsonl").write_text(
        json.dumps({"messages": long}) + "\n" + json.dumps({"messages": long[:1]}) + "\n"
    )
    arguments = ("cache-teacher", chatting / "teacher", tmp_path / "long.jsonl", "--top-k", 4, "--long-documents")
    refused = run(*arguments, "split", "-o", tmp_path / "s", code=1)
    assert "cannot be split" in refused.stderr
    run(*arguments, "truncate", "-o", tmp_path / "t")
    row = TeacherCache(tmp_path / "t").read_document(0)
    assert len(row.tokens) == 256
    assert row.tokens.segment_end_tokens.tolist()[1] == -1
    assert len(row.teacher_logprobs) > 200


def test_a_student_without_a_template_is_told_what_to_do(run, pair, cache, tmp_path):
    done = run("distill", pair.student, cache, "--loss", "ce", "--max-steps", 1, "-o", tmp_path / "out", code=1)
    assert "no chat template" in done.stderr
    assert not (tmp_path / "out").exists()


def test_align_shows_what_of_a_conversation_is_compared(run, chatting, conversations):
    done = run("align", chatting / "student", chatting / "teacher", conversations)
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert records[0]["text"] == "Anna gives 12?" + ANSWER
    vocabulary = Tokenizer(chatting / "student").vocabulary
    compared = [
        b"".join(
            vocabulary.bytes_of(token) for s0, s1, _, _ in record["spans"] for token in record["student_ids"][s0:s1]
        )
        for record in records
    ]
    # The thought of the second answer is read by one side alone.
    assert [text.decode() for text in compared] == [f"Anna gives {number}?" + ANSWER for number in (12, 13, 14)]


def test_statistics_of_conversations_count_contents_alone(run, chatting, conversations):
    done = run("align", chatting / "student", chatting / "teacher", conversations, "--stats", "--json")
    record = json.loads(done.stdout)
    thought = len("<think>1234 - 12</think>\n\n")
    assert record["bytes"] == 3 * (len("Anna gives 12?") + len(ANSWER)) + thought
    assert record["unaligned_bytes"] == thought
    assert sum(kind["bytes"] for kind in record["span_kinds"].values()) == record["bytes"] - thought


def test_the_page_of_conversations_names_the_tokens_of_templates(run, chatting, conversations, tmp_path):
    run("align", chatting / "student", chatting / "teacher", conversations, "--html", "-o", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "&lt;|end_of_text|&gt;" in page
    assert "&lt;|im_end|&gt;" in page


TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "b": 1, "a": 2}}]


def test_a_conversation_comes_out_of_its_cache_as_the_teacher_read_it(run, chatting, tmp_path):
    template = (
        "{{ tools | tojson }}{% for message in messages %}{{ message | tojson }}{{ message.content }}<|im_end|>"
        "{% endfor %}"
    )
    shutil.copytree(chatting / "teacher", tmp_path / "teacher")
    (tmp_path / "teacher" / "chat_template.jinja").write_text(template)
    call = {"type": "function", "function": {"name": "add", "arguments": {"b": 1, "a": 12}}}
    chat = [
        {"role": "user", "content": "12?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "13", "name": "add"},
        {"role": "assistant", "content": ANSWER},
    ]
    short = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    rows = [{"messages": chat, "tools": TOOLS}, {"messages": short}]  # of the first nothing that is trained is left
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run("cache-teacher", tmp_path / "teacher", tmp_path / "c.jsonl", "--top-k", 4, "--long-documents", "truncate", "-o",
        tmp_path / "cache")  # fmt: skip
    cache = TeacherCache(tmp_path / "cache")
    row = cache.read_document(0)
    (again,) = tokenize_documents(cache.teacher_tokenizer, [row.document])
    assert again.truncate(len(row.tokens)).ids.tolist() == row.tokens.ids.tolist()


def test_what_a_template_adds_counts_for_the_students_context(run, chatting, cache, tmp_path):
    shutil.copytree(chatting / "student", tmp_path / "student")
    (tmp_path / "student" / "chat_template.jinja").write_text("many words " * 200 + HEADERS)
    arguments = ("distill", tmp_path / "student", cache, "--loss", "ce", "--max-steps", 1, "-o", tmp_path / "out")
    assert "3 of 3 documents have more tokens than the limit of 256" in run(*arguments, code=1).stderr


def test_a_conversation_that_a_template_refuses_is_named(run, chatting, tmp_path):
    shutil.copytree(chatting / "teacher", tmp_path / "teacher")
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system prompt') }}{% endif %}" + TURNS
    (tmp_path / "teacher" / "chat_template.jinja").write_text(strict)
    rows = [[{"role": role, "content": "a"}, {"role": "assistant", "content": "b"}] for role in ("user", "system")]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    done = run("cache-teacher", tmp_path / "teacher", tmp_path / "c.jsonl", "-o", tmp_path / "c", code=1)
    assert "no system prompt" in done.stderr
    assert "document 1" in done.stderr
