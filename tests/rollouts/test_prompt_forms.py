"""Prompt formats: rows become prompts through a template or as user messages; the row itself is unchanged."""

from __future__ import annotations

import json

import pytest

from xtk.data.corpus_reader import Corpus
from xtk.errors import XtkError
from xtk.rollouts.prompts import PromptFormat, read_prompt_template, read_prompts, read_template_arguments

ROW = {"prompt": "Add.", "problem": "1 + 1", "test_list": ["assert a", "assert b"], "answer": 2}


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    return lambda **columns: Corpus([str(tmp_path / "rows.jsonl")], columns)


def test_prompt_template_is_rendered_with_the_fields_of_the_row(corpus, tmp_path):
    (prompt,) = read_prompts(
        corpus(prompt="problem"), None, PromptFormat("{{prompt}}\n{{ test_list | join('; ') }} \\boxed{}")
    )
    assert prompt.document.text == "Add.\nassert a; assert b \\boxed{}"
    assert not any(segment.train for segment in prompt.document.segments)
    assert prompt.record == ROW
    (tmp_path / "form.jinja").write_text("{{problem}} =\n")
    (prompt,) = read_prompts(corpus(), None, PromptFormat(read_prompt_template(str(tmp_path / "form.jinja"))))
    assert prompt.document.text == "1 + 1 ="  # the newline at the end of the template file is removed


def test_as_chat_wraps_text_as_a_user_message_and_keeps_conversations(corpus, tmp_path):
    (prompt,) = read_prompts(corpus(prompt="problem"), None, PromptFormat(as_chat=True))
    assert prompt.document.conversation.messages == ({"role": "user", "content": "1 + 1"},)
    (prompt,) = read_prompts(corpus(), None, PromptFormat("Q: {{problem}}", as_chat=True))
    assert prompt.document.conversation.messages == ({"role": "user", "content": "Q: 1 + 1"},)
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi."}]
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    (prompt,) = read_prompts(Corpus([str(tmp_path / "talk.jsonl")]), None, PromptFormat(as_chat=True))
    assert list(prompt.document.conversation.messages) == messages


def test_invalid_prompt_templates_are_refused(corpus):
    for template, message in [("{{problm}}", "problm"), ("{{problem", "the prompt template is invalid"),
                              ("{{answer.x.y}}", "cannot be rendered for a row"),
                              ("{{problem.__class__.__mro__}}", "unsafe")]:  # fmt: skip
        with pytest.raises(XtkError, match=message):
            read_prompts(corpus(), None, PromptFormat(template))
    with pytest.raises(XtkError, match="prompt template file cannot be read"):
        read_prompt_template("no.jinja")


def test_completion_of_the_data_follows_the_formatted_prompt(corpus):
    (record, where), columns = next(iter(corpus().records())), {"prompt": "problem", "completion": "said"}
    completed = {**record, "said": " two"}
    for prompt_format, prompt_text in [(PromptFormat("{{problem}} ="), "1 + 1 ="), (PromptFormat(), "1 + 1")]:
        document = prompt_format.document_with_completion(completed, columns, where)
        assert [(segment.text, segment.train) for segment in document.segments] == [
            (prompt_text, False),
            (" two", True),
        ]
    chat_document = PromptFormat("{{problem}} =", as_chat=True).document_with_completion(completed, columns, where)
    assert chat_document.conversation.messages == (
        {"role": "user", "content": "1 + 1 ="}, {"role": "assistant", "content": " two"}
    )  # fmt: skip
    assert [segment.train for segment in chat_document.segments] == [False, True]
    for wrong_record in (record, {**record, "said": 2}):
        with pytest.raises(XtkError, match="said"):
            PromptFormat("{{problem}} =").document_with_completion(wrong_record, columns, where)


def test_teacher_prompt_is_formatted_like_the_prompt_and_no_column_is_lost(corpus):
    (record, where), columns = next(iter(corpus().records())), {"prompt": "problem"}
    for teacher_prompt in ("1 + 1 is 2.", [{"role": "user", "content": "1 + 1 is 2."}]):
        chat_document = PromptFormat(as_chat=True).prompt_document(
            {**record, "teacher_prompt": teacher_prompt}, columns, where
        )
        assert chat_document.conversation.messages == ({"role": "user", "content": "1 + 1"},)
        assert list(chat_document.teacher_prompt) == [{"role": "user", "content": "1 + 1 is 2."}]
    # The teacher's prompt is in a column with the default name of the prompt or the completion.
    row = {"question": "1 + 1", "prompt": "1 + 1, which is 2", "said": " two", "completion": "It is 2."}
    for column in ("prompt", "completion"):
        columns = {"teacher_prompt": column, "completion": "said"}
        for document in (
            PromptFormat("{{question}} =").prompt_document(row, columns, where),
            PromptFormat("{{question}} =").document_with_completion(row, columns, where),
        ):
            assert document.text.startswith("1 + 1 =")
            assert document.teacher_prompt == row[column]


def test_invalid_template_arguments_and_empty_templates_are_refused(tmp_path):
    assert read_template_arguments('{"enable_thinking": false}') == {"enable_thinking": False}
    for text in ('{"tools": []}', '{"messages": 1}', '{"add_generation_prompt": false}', "[]", "no"):
        with pytest.raises(XtkError, match="--chat-template-kwargs"):
            read_template_arguments(text)
    (tmp_path / "empty.jinja").write_text("\n")
    with pytest.raises(XtkError, match="empty"):
        read_prompt_template(str(tmp_path / "empty.jinja"))
