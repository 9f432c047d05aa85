"""The tokens at which generation stops."""

from __future__ import annotations

import small_inputs

from xtk.tokens.tokenizer import Tokenizer

HARMONY = ["<|startoftext|>", "<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"]


def test_generation_stops_at_the_end_of_a_turn_not_of_a_message(tmp_path):
    """gpt-oss ends its reasoning with <|end|>, and goes on. Some end turns with calls with another token."""
    for name, specials, eos, stops in (
        ("harmony", HARMONY, "<|return|>", {"<|return|>", "<|call|>"}),
        ("llama3", ["<s>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"], "<|eot_id|>", {"<|eom_id|>", "<|eot_id|>"}),
        (
            "glm4",
            ["<|endoftext|>", "<|user|>", "<|observation|>"],
            "<|endoftext|>",
            {"<|endoftext|>", "<|user|>", "<|observation|>"},
        ),
        ("phi3", ["<s>", "<|endoftext|>", "<|end|>", "<|user|>"], "<|endoftext|>", {"<|endoftext|>", "<|end|>"}),
    ):
        backend = small_inputs.byte_level_tokenizer(small_inputs.STUDENT_SPLIT, 320, specials, ["a b"])
        tokenizer = Tokenizer(
            small_inputs.save_tokenizer(backend, tmp_path / name, bos_token=specials[0], eos_token=eos)
        )
        assert {tokenizer.special_token_names[token] for token in tokenizer.stop_ids} == stops
        assert tokenizer.end_ids >= {tokenizer.end_id}
