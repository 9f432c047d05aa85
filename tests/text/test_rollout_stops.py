"""Stop tokens of generation."""

from __future__ import annotations

import small_inputs

from xtk.text.tokenizer import Tokenizer

HARMONY_TOKENS = ["<|startoftext|>", "<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"]


def test_stop_tokens_end_a_turn_and_not_a_message(tmp_path):
    """gpt-oss ends its reasoning with <|end|> and continues. Some models end a turn with tool calls differently."""
    for name, special_tokens, eos, stop_tokens in (
        ("harmony", HARMONY_TOKENS, "<|return|>", {"<|return|>", "<|call|>"}),
        ("llama3", ["<s>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"], "<|eot_id|>", {"<|eom_id|>", "<|eot_id|>"}),
        (
            "glm4",
            ["<|endoftext|>", "<|user|>", "<|observation|>"],
            "<|endoftext|>",
            {"<|endoftext|>", "<|user|>", "<|observation|>"},
        ),
        ("phi3", ["<s>", "<|endoftext|>", "<|end|>", "<|user|>"], "<|endoftext|>", {"<|endoftext|>", "<|end|>"}),
    ):
        backend = small_inputs.byte_level_tokenizer(small_inputs.STUDENT_SPLIT, 320, special_tokens, ["a b"])
        tokenizer = Tokenizer(
            small_inputs.save_tokenizer(backend, tmp_path / name, bos_token=special_tokens[0], eos_token=eos)
        )
        assert {tokenizer.special_token_names[token] for token in tokenizer.stop_ids} == stop_tokens
        assert tokenizer.end_ids >= {tokenizer.end_id}


def test_stop_tokens_of_the_generation_config_and_of_the_template_are_kept_by_a_cache(tmp_path):
    special_tokens = ["<s>", "<|endoftext|>", "<|done|>", "<|halt|>"]
    backend = small_inputs.byte_level_tokenizer(small_inputs.STUDENT_SPLIT, 320, special_tokens, ["a b"])
    folder = small_inputs.save_tokenizer(backend, tmp_path / "model", bos_token="<s>", eos_token="<|endoftext|>")
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}<|done|>{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 1, 300]}')
    tokenizer = Tokenizer(folder)
    cached = tmp_path / "cache"
    cached.mkdir()
    for name, content in tokenizer.to_files().items():
        (cached / name).write_bytes(content)
    for one in (tokenizer, Tokenizer(cached)):
        assert one.stop_ids == {1, 2, 3}
        assert one.declared_stop_ids == (3, 1)
    assert tokenizer.ordinary_stop_tokens == [300]  # a token of text


def test_an_unreadable_generation_config_names_no_stop_tokens(tmp_path):
    folder = small_inputs.make_student_tokenizer(tmp_path / "model")
    stops = ("true", '{"a": 1}', "[null, 2.5, -1]")
    for content in ("[1]", "{", *(f'{{"eos_token_id": {value}}}' for value in stops)):
        (folder / "generation_config.json").write_text(content)
        assert Tokenizer(folder).declared_stop_ids == (Tokenizer(folder).end_id,)
