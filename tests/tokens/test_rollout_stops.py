"""The tokens at which generation stops."""

from __future__ import annotations

import small_inputs

from xtk.tokens.tokenizer import Tokenizer

HARMONY = ["<|startoftext|>", "<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"]


def test_generation_stops_at_the_end_of_a_turn_not_of_a_message(tmp_path):
    """gpt-oss ends its reasoning with <|end|>, and goes on."""
    for name, specials, eos, stops in (
        ("harmony", HARMONY, "<|return|>", {"<|return|>", "<|call|>"}),
        ("phi3", ["<s>", "<|endoftext|>", "<|end|>", "<|user|>"], "<|endoftext|>", {"<|endoftext|>", "<|end|>"}),
    ):
        backend = small_inputs.byte_level_tokenizer(small_inputs.STUDENT_SPLIT, 320, specials, ["a b"])
        tokenizer = Tokenizer(
            small_inputs.save_tokenizer(backend, tmp_path / name, bos_token=specials[0], eos_token=eos)
        )
        assert {tokenizer.special_token_names[token] for token in tokenizer.stop_ids} == stops
        assert tokenizer.end_ids >= {tokenizer.end_id}
