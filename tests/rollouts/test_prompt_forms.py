"""How a row is put to a model: by a template, as what a user says; the row itself stays as it is."""

from __future__ import annotations

import json

import pytest

from xtk.artifacts.corpus_reader import Corpus
from xtk.errors import XtkError
from xtk.rollouts.prompts import PromptFormat, read_prompt_template, read_prompts, read_template_arguments

ROW = {"prompt": "Add.", "problem": "1 + 1", "test_list": ["assert a", "assert b"], "answer": 2}


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    return lambda **columns: Corpus([str(tmp_path / "rows.jsonl")], columns)


def test_a_template_is_filled_with_the_fields_of_the_row(corpus, tmp_path):
    (one,) = read_prompts(
        corpus(prompt="problem"), None, PromptFormat("{{prompt}}\n{{ test_list | join('; ') }} \\boxed{}")
    )
    assert one.document.text == "Add.\nassert a; assert b \\boxed{}"
    assert not any(segment.train for segment in one.document.segments)
    assert one.record == ROW
    (tmp_path / "form.jinja").write_text("{{problem}} =\n")
    (one,) = read_prompts(corpus(), None, PromptFormat(read_prompt_template(str(tmp_path / "form.jinja"))))
    assert one.document.text == "1 + 1 ="  # the last line feed is the file's


def test_a_text_is_what_a_user_says_and_a_talk_stays(corpus, tmp_path):
    (one,) = read_prompts(corpus(prompt="problem"), None, PromptFormat(as_chat=True))
    assert one.document.conversation.messages == ({"role": "user", "content": "1 + 1"},)
    (one,) = read_prompts(corpus(), None, PromptFormat("Q: {{problem}}", as_chat=True))
    assert one.document.conversation.messages == ({"role": "user", "content": "Q: 1 + 1"},)
    talk = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi."}]
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    (one,) = read_prompts(Corpus([str(tmp_path / "talk.jsonl")]), None, PromptFormat(as_chat=True))
    assert list(one.document.conversation.messages) == talk


def test_what_no_template_can_be_filled_with_is_told(corpus):
    for template, message in [("{{problm}}", "problm"), ("{{problem", "the prompt template is invalid"),
                              ("{{answer.x.y}}", "cannot be rendered for a row"),
                              ("{{problem.__class__.__mro__}}", "unsafe")]:  # fmt: skip
        with pytest.raises(XtkError, match=message):
            read_prompts(corpus(), None, PromptFormat(template))
    with pytest.raises(XtkError, match="prompt template file does not exist"):
        read_prompt_template("no.jinja")


def test_an_answer_of_the_data_stands_behind_the_prompt_that_is_put(corpus):
    (record, where), columns = next(iter(corpus().records())), {"prompt": "problem", "completion": "said"}
    told = {**record, "said": " two"}
    for form, written in [(PromptFormat("{{problem}} ="), "1 + 1 ="), (PromptFormat(), "1 + 1")]:
        document = form.document_with_completion(told, columns, where)
        assert [(part.text, part.train) for part in document.segments] == [(written, False), (" two", True)]
    talk = PromptFormat("{{problem}} =", as_chat=True).document_with_completion(told, columns, where)
    assert talk.conversation.messages == (
        {"role": "user", "content": "1 + 1 ="}, {"role": "assistant", "content": " two"}
    )  # fmt: skip
    assert [part.train for part in talk.segments] == [False, True]
    for wrong in (record, {**record, "said": 2}):
        with pytest.raises(XtkError, match="said"):
            PromptFormat("{{problem}} =").document_with_completion(wrong, columns, where)


def test_what_only_the_teacher_reads_is_put_as_the_prompt_is_and_no_column_is_lost(corpus):
    (record, where), columns = next(iter(corpus().records())), {"prompt": "problem"}
    for told in ("1 + 1 is 2.", [{"role": "user", "content": "1 + 1 is 2."}]):
        talk = PromptFormat(as_chat=True).prompt_document({**record, "teacher_prompt": told}, columns, where)
        assert talk.conversation.messages == ({"role": "user", "content": "1 + 1"},)
        assert list(talk.teacher_prompt) == [{"role": "user", "content": "1 + 1 is 2."}]
    # The teacher's prompt stands in columns that are called as what is put.
    row = {"question": "1 + 1", "prompt": "1 + 1, which is 2", "said": " two", "completion": "It is 2."}
    for column in ("prompt", "completion"):
        columns = {"teacher_prompt": column, "completion": "said"}
        for document in (
            PromptFormat("{{question}} =").prompt_document(row, columns, where),
            PromptFormat("{{question}} =").document_with_completion(row, columns, where),
        ):
            assert document.text.startswith("1 + 1 =")
            assert document.teacher_prompt == row[column]


def test_what_templates_are_told_anyway_and_empty_ones_are_refused(tmp_path):
    assert read_template_arguments('{"enable_thinking": false}') == {"enable_thinking": False}
    for text in ('{"tools": []}', '{"messages": 1}', '{"add_generation_prompt": false}', "[]", "no"):
        with pytest.raises(XtkError, match="--chat-template-kwargs"):
            read_template_arguments(text)
    (tmp_path / "empty.jinja").write_text("\n")
    with pytest.raises(XtkError, match="empty"):
        read_prompt_template(str(tmp_path / "empty.jinja"))
