"""Forward passes of teachers of real size in bf16, with random weights: tokens/s, TFLOP/s and memory.

    python tests/benchmarks/bench_forward.py [--models 1B 4B 8B] [--tokens 8192] [--length 512]

For a GPU; on a CPU a toy in place of the models, to test the script. The shapes are those of Llama 3.2 1B, Qwen3 4B and
Qwen3 8B. A pass has documents of equal length, as rows of a batch: with PyTorch's attention, and with
`flash_attention_2` if flash-attn is installed. For comparison, the same documents packed into one sequence, as in
training. Hidden states only: the output head is computed in chunks (`bench_teacher_operations.py --time`). Operations:
2 per weight of a layer and token, and 4 per key, width of the queries and token in attention, causal.
"""

from __future__ import annotations

import argparse
import importlib.util
from typing import Any

import torch
from measurement import median_seconds, report
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.causal_lm import silence_transformers
from xtk.models.packed_attention import PackedSequence

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
REPEATS = 5
QWEN3 = {"vocab_size": 151936, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
MODELS: dict[str, tuple[type[Any], Any]] = {
    "1B": (LlamaForCausalLM, LlamaConfig(vocab_size=128256, hidden_size=2048, intermediate_size=8192,
                                         num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
                                         tie_word_embeddings=True)),
    "4B": (Qwen3ForCausalLM, Qwen3Config(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36,
                                         tie_word_embeddings=True, **QWEN3)),
    "8B": (Qwen3ForCausalLM, Qwen3Config(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
                                         tie_word_embeddings=False, **QWEN3)),
    "toy": (LlamaForCausalLM, LlamaConfig(vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                                          num_attention_heads=4, num_key_value_heads=2)),
}  # fmt: skip


def forward_flops(model: Any, tokens: int, length: int) -> float:
    """Return the floating-point operations of a pass, without embedding and head."""
    config = model.config
    weights = sum(one.numel() for layer in model.model.layers for one in layer.parameters() if one.dim() == 2)
    width = config.num_attention_heads * (getattr(config, "head_dim", None) or config.hidden_size)
    return tokens * (2 * weights + 4 * config.num_hidden_layers * width * length / 2)


def measure(name: str, tokens: int, length: int) -> list[tuple[str, str, str]]:
    """Return rows of the table for a model."""
    model_class, config = MODELS[name]
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with DEVICE:
        model = model_class(config).eval().requires_grad_(False)
        ids = torch.randint(0, config.vocab_size, (tokens // length, length))
    torch.set_default_dtype(torch.float32)
    backbone = BackboneWithHead(model)
    implementations = ["sdpa", *(["flash_attention_2"] if importlib.util.find_spec("flash_attn") else []), "packed"]
    flops, rows = forward_flops(model, ids.numel(), length), []
    for implementation in implementations:
        packed = None
        if implementation == "packed":
            assert backbone.enable_packing(), f"{name}: documents cannot be packed in bf16"
            ids, packed = ids.flatten()[None], PackedSequence((length,) * (tokens // length))
        else:
            model.set_attn_implementation(implementation)

        def forward(ids: torch.Tensor = ids, packed: PackedSequence | None = packed) -> None:
            with torch.no_grad():
                backbone(ids, packed)
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()

        if DEVICE.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = median_seconds(forward, REPEATS)
        memory = torch.cuda.max_memory_allocated() / 2**30 if DEVICE.type == "cuda" else 0.0
        result = f"{ids.numel() / seconds:,.0f} tokens/s, {flops / seconds / 1e12:.3g} TFLOP/s, {memory:.1f} GiB"
        rows.append((f"{name}, bf16, {tokens // length} documents of {length} tokens, {implementation}", result, ""))
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    real = [name for name in MODELS if name != "toy"]
    parser.add_argument("--models", nargs="+", choices=MODELS, default=real if DEVICE.type == "cuda" else ["toy"])
    parser.add_argument("--tokens", type=int, default=8192 if DEVICE.type == "cuda" else 64)
    parser.add_argument("--length", type=int, default=512 if DEVICE.type == "cuda" else 16)
    args = parser.parse_args()
    silence_transformers()
    rows = [("device", f"{DEVICE.type}, {torch.get_num_threads()} threads", "")]
    for name in args.models:
        rows += measure(name, args.tokens, args.length)
    report(__file__, rows)


if __name__ == "__main__":
    main()
