"""Small GGUF models as llama.cpp's converter writes them: a Llama with a byte-level tokenizer that splits digits."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import small_inputs
from gguf import GGUFWriter, TokenType
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tokenizers.decoders import ByteLevel

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def single_digit_tokenizer(vocabulary: int = 480) -> Tokenizer:
    """Train a tokenizer like SmolLM's: single digits, then GPT-2's pattern."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [*small_inputs.sentences(400, seed=1), "  two  spaces\n\n\n  and lines\n\n" * 40]
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def make_llama(folder: Path, *, tied: bool = False, seed: int = 0) -> Path:
    """Write a small Llama with the tokenizer of `single_digit_tokenizer` as a model folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    special_tokens = {
        "bos_token": SPECIALS[1],
        "eos_token": SPECIALS[2],
        "unk_token": SPECIALS[0],
        "pad_token": SPECIALS[2],
    }
    small_inputs.save_tokenizer(single_digit_tokenizer(), folder, **special_tokens, chat_template=TEMPLATE)
    torch.manual_seed(seed)
    configuration = LlamaConfig(
        vocab_size=480, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, initializer_range=0.2,
        tie_word_embeddings=tied, rms_norm_eps=1e-5, rope_theta=10000.0,
    )  # fmt: skip
    LlamaForCausalLM(configuration).save_pretrained(folder)
    return folder


def write_gguf(
    model: Path,
    path: Path,
    *,
    architecture: str = "llama",
    pre: str = "smollm",
    fields: dict[str, float | str] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    alignment: int = 0,
) -> Path:
    """Write the model of `make_llama` as a GGUF file with float32 weights and additional `fields` and `tensors`."""
    from safetensors.numpy import load_file

    config = json.loads((model / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = GGUFWriter(path, architecture)
    writer.add_name("Tiny")
    if alignment:
        writer.add_custom_alignment(alignment)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    content = json.loads((model / "tokenizer.json").read_text())
    tokens = sorted(content["model"]["vocab"], key=content["model"]["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in SPECIALS else TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_add_bos_token(content["post_processor"] is not None)  # `save_tokenizer` puts bos before each text
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, value in (fields or {}).items():
        (writer.add_string if isinstance(value, str) else writer.add_float32)(name, value)
    for name, weights in load_file(model / "model.safetensors").items():
        writer.add_tensor(_gguf_name(name), _permuted(name, weights, heads, kv_heads))
    for name, weights in (tensors or {}).items():
        writer.add_tensor(name, weights.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def set_field(path: Path, name: str, value: bytes) -> None:
    """Replace the bytes of a field's value of fixed size in a GGUF file."""
    at, content = _end_of_name(path, name) + 4, path.read_bytes()  # after the type of the value
    path.write_bytes(content[:at] + value + content[at + len(value) :])


def set_tensor(
    path: Path, name: str, *, shape: tuple[int, ...] | None = None, kind: int | None = None, offset: int | None = None
) -> None:
    """Replace the shape, type or offset of a tensor in the header of a GGUF file."""
    at, content = _end_of_name(path, name), bytearray(path.read_bytes())
    (dimensions,) = struct.unpack_from("<I", content, at)
    for number, size in enumerate(shape or ()):
        struct.pack_into("<Q", content, at + 4 + 8 * number, size)
    if kind is not None:
        struct.pack_into("<I", content, at + 4 + 8 * dimensions, kind)
    if offset is not None:
        struct.pack_into("<Q", content, at + 8 + 8 * dimensions, offset)
    path.write_bytes(content)


def _end_of_name(path: Path, name: str) -> int:
    key = struct.pack("<Q", len(name)) + name.encode()
    return path.read_bytes().index(key) + len(key)


def _gguf_name(name: str) -> str:
    parts = name.split(".")
    if parts[:2] == ["model", "layers"]:
        return f"blk.{parts[2]}.{NAMES['.'.join(parts[3:-1])]}.weight"
    return {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}[
        name.removesuffix(".weight")
    ] + ".weight"


def _permuted(name: str, weights: np.ndarray, heads: int, kv_heads: int) -> np.ndarray:
    """Return the weights in the row order of llama.cpp, whose rotary embedding pairs neighboring rows."""
    num_heads = heads if "q_proj" in name else kv_heads if "k_proj" in name else 0
    if not num_heads:
        return weights
    shape = (num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return np.ascontiguousarray(weights.reshape(shape).swapaxes(1, 2).reshape(weights.shape))
