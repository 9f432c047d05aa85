"""Small random models, with tokenizers that differ like those of Llama-3 and Qwen."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

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
    specials = ["<|begin_of_text|>", "<|end_of_text|>"]
    write_llama(folder, train_tokenizer("{1,3}", STUDENT_VOCABULARY_SIZE, specials, texts), seed)


def write_llama(folder: Path, tokenizer: Tokenizer, seed: int) -> None:
    """Write the quickstart's student, a Llama model with random weights, with a tokenizer.

    Its start token is `<|begin_of_text|>`, if the tokenizer has it; its end token `<|end_of_text|>` or `<|endoftext|>`.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    start = "<|begin_of_text|>" if tokenizer.token_to_id("<|begin_of_text|>") is not None else None
    end = "<|endoftext|>" if tokenizer.token_to_id("<|end_of_text|>") is None else "<|end_of_text|>"
    shape = _shape(tokenizer.get_vocab_size(), layers=2)
    configuration = LlamaConfig(**shape, **_token_ids(tokenizer, start, end))
    _write_random_model(folder, tokenizer, start, end, LlamaForCausalLM, configuration, seed)


def make_teacher(folder: Path, texts: list[str], seed: int) -> None:
    """Write a Qwen3 model with 1.2 million random weights and a tokenizer that splits numbers into digits."""
    write_qwen3(folder, train_tokenizer("", TEACHER_VOCABULARY_SIZE, ["<|endoftext|>"], texts), seed)


def write_qwen3(folder: Path, tokenizer: Tokenizer, seed: int) -> None:
    """Write the quickstart's teacher, a Qwen3 model with random weights, with a tokenizer that has `<|endoftext|>`."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    end = "<|endoftext|>"
    configuration = Qwen3Config(**_shape(tokenizer.get_vocab_size(), layers=4), **_token_ids(tokenizer, None, end))
    _write_random_model(folder, tokenizer, None, end, Qwen3ForCausalLM, configuration, seed)


def _token_ids(tokenizer: Tokenizer, bos: str | None, eos: str) -> dict[str, int | None]:
    return {
        "bos_token_id": None if bos is None else tokenizer.token_to_id(bos),
        "eos_token_id": tokenizer.token_to_id(eos),
    }


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


def train_tokenizer(
    digits: str, tokens: int, specials: list[str], texts: list[str], *, merge_spaces: bool = True
) -> Tokenizer:
    """Train a byte-level BPE tokenizer.

    Args:
        digits: quantifier of the digits that may form one token: `""` one, `"{1,3}"` up to three.
        specials: special tokens; they have the first ids.
        merge_spaces: whether spaces of an indentation may form one token.
    """
    pattern = PRE_TOKENIZER_PATTERN.replace("DIGITS", digits)
    if not merge_spaces:
        pattern = r"[ \t](?=[ \t])|" + pattern
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
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
    start = bos or eos
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A", pair=f"{start} $A $B", special_tokens=[(start, tokenizer.token_to_id(start))]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos}
    (folder / "tokenizer_config.json").write_text(json.dumps(names, indent=1) + "\n", encoding="utf-8")
