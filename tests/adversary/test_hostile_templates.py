"""Chat templates and prompt templates with unlimited output or nesting, or that reach for Python's objects."""

from __future__ import annotations

import json
import shutil
import subprocess
import time

import pytest

from xtk.errors import XtkError
from xtk.text.chat.template import ChatTemplate

pytestmark = pytest.mark.slow

CHAT = [{"role": "user", "content": "12 + 5?"}, {"role": "assistant", "content": "It is 17."}]
CONTENT_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
ATTACKS = {
    "{{ 'a'|center(10**8) }}": "the chat template writes more than",
    "{% set x = namespace(s='aa') %}{% for i in range(24) %}{% set x.s = x.s ~ x.s %}{% endfor %}{{ x.s }}": "writes",
    "{% for i in range(10**9) %}a{% endfor %}": "Range too big",
    "{% for i in range(99999) %}{% for j in range(99999) %}a{% endfor %}{% endfor %}": "writes more than",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "nested too deeply",
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}": "the chat template is invalid",
    "{{ " + "[" * 900 + "]" * 900 + " }}": "the chat template is invalid",
    "{% if 1 %}" * 3000 + "{% endif %}" * 3000: "the chat template is invalid",
    "{{ " + "not " * 100_000 + "1 }}": "the chat template is invalid",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}": "refuses a conversation",
    "{{ messages.append(1) }}": "refuses a conversation",
    "{{ cycler.__init__.__globals__ }}": "refuses a conversation",
    "{{ '{0.__class__.__mro__}'.format(1) }}": "refuses a conversation",
}


@pytest.mark.parametrize("source", ATTACKS, ids=[source[:60] for source in ATTACKS])
def test_template_that_exceeds_a_limit_or_leaves_the_sandbox_is_refused(source):
    started = time.monotonic()
    with pytest.raises(XtkError) as raised:
        ChatTemplate(source + CONTENT_TEMPLATE, {}, "here").render(CHAT)
    assert ATTACKS[source] in raised.value.what
    assert raised.value.where == "here"
    assert time.monotonic() - started < 60
    assert ChatTemplate(CONTENT_TEMPLATE, {}, "here").render(CHAT) == "12 + 5?It is 17."


def with_template(folder, target, source):
    shutil.copytree(folder, target)
    (target / "chat_template.jinja").write_text(source)
    return target


@pytest.fixture
def conversations(tmp_path):
    (tmp_path / "talks.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    return tmp_path / "talks.jsonl"


def assert_refused(result: subprocess.CompletedProcess[str], message: str) -> None:
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr
    assert message in result.stderr, result.stderr


@pytest.mark.parametrize("source", ["{{ 'a'|center(10**8) }}", "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}"])
def test_commands_refuse_templates_that_exceed_a_limit(run, pair, tmp_path, conversations, source):
    student, teacher = (
        with_template(model, tmp_path / name, source) for model, name in ((pair.student, "s"), (pair.teacher, "t"))
    )
    out = ("-o", tmp_path / "out")
    for command in (
        ("cache-teacher", teacher, conversations, *out),
        ("distill", student, conversations, "--loss", "ce", *out),
        ("rollout", student, conversations, "-o", tmp_path / "out.jsonl"),
        ("evaluate", student, conversations),
    ):
        assert_refused(run(*command, code=None), "template")


def test_prompt_template_has_the_same_limits(run, pair, tmp_path):
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"problem": "12 + 5"}) + "\n")
    command = ("rollout", pair.student, tmp_path / "prompts.jsonl", "-o", tmp_path / "out.jsonl", "--prompt-template")
    assert_refused(run(*command, "{{ problem * 10000000 }}", code=None), "the prompt template writes more than")
    assert_refused(
        run(*command, "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", code=None), "the prompt template is invalid"
    )


def test_cache_teacher_refuses_a_template_that_drops_all_text(run, pair, tmp_path, conversations):
    teacher = with_template(pair.teacher, tmp_path / "t", "{% for m in messages %}-{% endfor %}")
    result = run("cache-teacher", teacher, conversations, "-o", tmp_path / "cache", code=None)
    assert_refused(result, "the data has no trained tokens")
    assert not (tmp_path / "cache" / "manifest.json").exists()
