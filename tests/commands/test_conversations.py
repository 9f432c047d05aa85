"""Conversations in all commands: each model uses its own chat template, and only answers are trained."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from xtk.cache.reader import TeacherCache
from xtk.text.token_sequence import tokenize_documents
from xtk.text.tokenizer import Tokenizer

STUDENT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|pad|>{{ message['role'] }}<|pad|>\n\n"
    "{{ message['content'] }}<|end_of_text|>{% endfor %}"
)
TEACHER_TEMPLATE = (
    "{% for message in messages %}<|endoftext|>{{ message.role }}\n{{ message.content.split('</think>')[-1] | trim }}"
    "<|im_end|>\n{% endfor %}"
)
ANSWER = "Anna has 1222 apples left."


@pytest.fixture(scope="module")
def chat_models(pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp("chatting")
    for name, template in (("student", STUDENT_TEMPLATE), ("teacher", TEACHER_TEMPLATE)):
        shutil.copytree(getattr(pair, name), folder / name)
        (folder / name / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="module")
def conversations(chat_models):
    rows = [
        [{"role": "user", "content": f"Anna gives {number}?"}, {"role": "assistant", "content": reasoning + ANSWER}]
        for number, reasoning in ((12, ""), (13, "<think>1234 - 12</think>\n\n"), (14, ""))
    ]
    path = chat_models / "chat.jsonl"
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def cache(run, chat_models, conversations):
    done = run("cache-teacher", chat_models / "teacher", conversations, "--top-k", 8, "-o", chat_models / "cache")
    # The template removes 26 bytes of the second answer: the reasoning and the line feeds after it.
    assert "26 bytes of trained text in 1 of 3 checked conversations are not trained" in done.stderr
    return chat_models / "cache"


def test_a_cache_of_conversations_has_log_probabilities_of_answers_only(cache):
    for row in TeacherCache(cache):
        assert row.document.conversation is not None
        answer_positions = np.flatnonzero(row.tokens.train_mask & row.tokens.text_mask)
        tokens = row.tokens.ids[answer_positions].tolist()
        vocabulary = TeacherCache(cache).teacher_tokenizer.vocabulary
        assert b"".join(vocabulary.bytes_of(token) for token in tokens).decode() == ANSWER
        # The answer's tokens, and the one that ends the turn.
        assert len(row.teacher_logprobs) == len(answer_positions) + 1


def test_a_student_trains_on_conversations_in_its_own_template(run, cache, chat_models, tmp_path):
    run("build-projection", chat_models / "student", chat_models / "teacher", "-o", tmp_path / "p")
    done = run(
        "distill", chat_models / "student", cache, "--projection", tmp_path / "p", "--loss", "p-kl", "--max-steps", 2,
        "--logging-steps", 1, "-o", tmp_path / "out", "--json",
    )  # fmt: skip
    assert json.loads(done.stdout)["metrics"]["p-kl"] > 0
    assert "bytes of trained text" not in done.stderr


def test_distill_reports_answer_text_that_the_student_template_removes(run, chat_models, cache, tmp_path):
    shutil.copytree(chat_models / "student", tmp_path / "student")
    (tmp_path / "student" / "chat_template.jinja").write_text(
        STUDENT_TEMPLATE.replace("message['content']", "message['content'].split('</think>')[-1]")
    )
    done = run("distill", tmp_path / "student", cache, "--loss", "ce", "--max-steps", 1, "-o", tmp_path / "out")
    assert "24 bytes of trained text in 1 of 3 checked conversations" in done.stderr


def test_bits_per_byte_of_conversations_count_answers_only(run, chat_models, conversations):
    done = run("evaluate", chat_models / "student", conversations, "--json")
    assert json.loads(done.stdout)["bytes"] == 3 * len(ANSWER) + len("<think>1234 - 12</think>\n\n")


@pytest.mark.slow
def test_a_conversation_that_is_too_long_is_truncated_or_skipped_but_never_split(run, chat_models, tmp_path):
    long = [{"role": "user", "content": "12?"}, {"role": "assistant", "content": "Anna has 1234 apples. " * 100}]
    short = [long[0], {"role": "assistant", "content": "Anna has 12 apples."}]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in (long, short)))
    arguments = ("cache-teacher", chat_models / "teacher", tmp_path / "long.jsonl", "--top-k", 4, "--long-documents")
    done = run(*arguments, "split", "-o", tmp_path / "s", code=1)
    assert "cannot be split" in done.stderr
    run(*arguments, "truncate", "-o", tmp_path / "t")
    row = TeacherCache(tmp_path / "t").read_document(0)
    assert len(row.tokens) == 256
    assert row.tokens.segment_end_tokens.tolist()[1] == -1
    assert len(row.teacher_logprobs) > 200
    run(*arguments, "skip", "-o", tmp_path / "skipped")
    assert [len(row.tokens) < 256 for row in TeacherCache(tmp_path / "skipped")] == [True]


def test_a_student_without_a_chat_template_is_refused(run, pair, cache, tmp_path):
    done = run("distill", pair.student, cache, "--loss", "ce", "--max-steps", 1, "-o", tmp_path / "out", code=1)
    assert "no chat template" in done.stderr
    assert not (tmp_path / "out").exists()


def test_align_compares_the_text_that_both_templates_keep(run, chat_models, conversations):
    done = run("align", chat_models / "student", chat_models / "teacher", conversations)
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert records[0]["text"] == "Anna gives 12?" + ANSWER
    vocabulary = Tokenizer(chat_models / "student").vocabulary
    compared = [
        b"".join(
            vocabulary.bytes_of(token) for s0, s1, _, _ in record["spans"] for token in record["student_ids"][s0:s1]
        )
        for record in records
    ]
    # Only the student reads the reasoning of the second answer.
    assert [text.decode() for text in compared] == [f"Anna gives {number}?" + ANSWER for number in (12, 13, 14)]


def test_statistics_of_conversations_count_message_contents_only(run, chat_models, conversations):
    done = run("align", chat_models / "student", chat_models / "teacher", conversations, "--stats", "--json")
    record = json.loads(done.stdout)
    reasoning_bytes = len("<think>1234 - 12</think>\n\n")
    assert record["bytes"] == 3 * (len("Anna gives 12?") + len(ANSWER)) + reasoning_bytes
    assert record["unaligned_bytes"] == reasoning_bytes
    assert sum(kind["bytes"] for kind in record["span_kinds"].values()) == record["bytes"] - reasoning_bytes


def test_the_alignment_page_of_conversations_shows_template_tokens(run, chat_models, conversations, tmp_path):
    run("align", chat_models / "student", chat_models / "teacher", conversations, "--html", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "&lt;|end_of_text|&gt;" in page
    assert "&lt;|im_end|&gt;" in page


TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "b": 1, "a": 2}}]


def test_a_conversation_from_a_cache_tokenizes_to_the_stored_ids(run, chat_models, tmp_path):
    template = (
        "{{ tools | tojson }}{% for message in messages %}{{ message | tojson }}{{ message.content }}<|im_end|>"
        "{% endfor %}"
    )
    shutil.copytree(chat_models / "teacher", tmp_path / "teacher")
    (tmp_path / "teacher" / "chat_template.jinja").write_text(template)
    call = {"type": "function", "function": {"name": "add", "arguments": {"b": 1, "a": 12}}}
    chat = [
        {"role": "user", "content": "12?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "13", "name": "add"},
        {"role": "assistant", "content": ANSWER},
    ]
    short = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    rows = [{"messages": chat, "tools": TOOLS}, {"messages": short}]  # truncation leaves no trained token in the first
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run("cache-teacher", tmp_path / "teacher", tmp_path / "c.jsonl", "--top-k", 4, "--long-documents", "truncate", "-o",
        tmp_path / "cache")  # fmt: skip
    cache = TeacherCache(tmp_path / "cache")
    row = cache.read_document(0)
    (tokenized,) = tokenize_documents(cache.teacher_tokenizer, [row.document])
    assert tokenized.truncate(len(row.tokens)).ids.tolist() == row.tokens.ids.tolist()


def test_template_text_counts_toward_the_students_context(run, chat_models, cache, tmp_path):
    shutil.copytree(chat_models / "student", tmp_path / "student")
    (tmp_path / "student" / "chat_template.jinja").write_text("many words " * 200 + STUDENT_TEMPLATE)
    arguments = ("distill", tmp_path / "student", cache, "--loss", "ce", "--max-steps", 1, "-o", tmp_path / "out")
    assert "3 of 3 documents have more tokens than the limit of 256" in run(*arguments, code=1).stderr


def test_a_conversation_that_a_template_refuses_is_named(run, chat_models, tmp_path):
    shutil.copytree(chat_models / "teacher", tmp_path / "teacher")
    strict = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system prompt') }}{% endif %}" + TEACHER_TEMPLATE
    )
    (tmp_path / "teacher" / "chat_template.jinja").write_text(strict)
    rows = [[{"role": role, "content": "a"}, {"role": "assistant", "content": "b"}] for role in ("user", "system")]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    done = run("cache-teacher", tmp_path / "teacher", tmp_path / "c.jsonl", "-o", tmp_path / "c", code=1)
    assert "no system prompt" in done.stderr
    assert "document 1" in done.stderr
