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
