"""Small random models, with tokenizers that differ like those of Llama-3 and Qwen."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

# The pre-tokenizers of Llama-3 and Qwen differ in one place: the digits per word.
PRE_TOKENIZER_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
STUDENT_VOCABULARY_SIZE, TEACHER_VOCABULARY_SIZE = 4000, 3000
# Small models trained for minutes learn faster with larger initial weights than the usual 0.02.
INITIALIZER_RANGE = 0.06
CONTEXT_LENGTH = 1024


def make_student(folder: Path, texts: list[str], seed: int) -> None:
    """Write a Llama model with 0.9 million random weights and a tokenizer that splits numbers into groups of three."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _train_tokenizer("{1,3}", STUDENT_VOCABULARY_SIZE, ["<|begin_of_text|>", "<|end_of_text|>"], texts)
    configuration = LlamaConfig(**_shape(STUDENT_VOCABULARY_SIZE, layers=2), bos_token_id=0, eos_token_id=1)
    _write_random_model(
        folder, tokenizer, "<|begin_of_text|>", "<|end_of_text|>", LlamaForCausalLM, configuration, seed
    )


def make_teacher(folder: Path, texts: list[str], seed: int) -> None:
    """Write a Qwen3 model with 1.2 million random weights and a tokenizer that splits numbers into digits."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = _train_tokenizer("", TEACHER_VOCABULARY_SIZE, ["<|endoftext|>"], texts)
    configuration = Qwen3Config(**_shape(TEACHER_VOCABULARY_SIZE, layers=4), bos_token_id=None, eos_token_id=0)
    _write_random_model(folder, tokenizer, None, "<|endoftext|>", Qwen3ForCausalLM, configuration, seed)


def _shape(tokens: int, layers: int) -> dict[str, Any]:
    return {
        "vocab_size": tokens,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": CONTEXT_LENGTH,
        "tie_word_embeddings": True,
        "initializer_range": INITIALIZER_RANGE,
    }


def _train_tokenizer(digits: str, tokens: int, specials: list[str], texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKENIZER_PATTERN.replace("DIGITS", digits)), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=tokens, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _write_random_model(
    folder: Path, tokenizer: Tokenizer, bos: str | None, eos: str, architecture: Any, configuration: Any, seed: int
) -> None:
    import torch

    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        architecture(configuration).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos}
    (folder / "tokenizer_config.json").write_text(json.dumps(names, indent=1) + "\n", encoding="utf-8")
