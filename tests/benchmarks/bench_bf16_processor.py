"""bf16 against float32 on a processor: reading, generation and training of a model with the shape of SmolLM2-135M.

    python tests/benchmarks/bench_bf16_processor.py

For a processor with instructions for bf16 (avx512_bf16, amx_bf16). Random weights. Training is a step of AdamW over
float32 weights, with or without autocast to bf16.
"""

from __future__ import annotations

import torch
from measurement import median_seconds, report
from transformers import LlamaConfig, LlamaForCausalLM

from xtk.models.precision import has_bf16_processor

REPEATS = 5
SMOLLM2 = LlamaConfig(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
                      num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True)  # fmt: skip


def reading_seconds(dtype: torch.dtype) -> float:
    """Return the time of a forward pass over 4 documents of 256 tokens, without the output head."""
    model, ids = LlamaForCausalLM(SMOLLM2).to(dtype).eval(), torch.randint(0, SMOLLM2.vocab_size, (4, 256))
    with torch.no_grad():
        return median_seconds(lambda: model.model(ids), REPEATS)


def generation_seconds(dtype: torch.dtype, rows: int, tokens: int = 1) -> float:
    """Return the time of a step of generation for some rows, after 64 tokens."""
    model = LlamaForCausalLM(SMOLLM2).to(dtype).eval()
    with torch.no_grad():
        before = model(torch.randint(0, SMOLLM2.vocab_size, (rows, 64)), use_cache=True, logits_to_keep=1)
        ids = torch.randint(0, SMOLLM2.vocab_size, (rows, tokens))
        return median_seconds(lambda: model(ids, past_key_values=before.past_key_values, use_cache=True), REPEATS)


def training_seconds(dtype: torch.dtype) -> float:
    """Return the time of a step of 4 documents of 256 tokens."""
    model, ids = LlamaForCausalLM(SMOLLM2).train(), torch.randint(0, SMOLLM2.vocab_size, (4, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return median_seconds(step, REPEATS)


def main() -> None:
    """Measure and print."""
    rows = [("instructions for bf16", str(has_bf16_processor()), "")]
    for what, measure in (
        ("reading 4 x 256 tokens", reading_seconds),
        ("generation, 1 row", lambda dtype: generation_seconds(dtype, 1)),
        ("generation, 16 rows", lambda dtype: generation_seconds(dtype, 16)),
        ("verification of 5 tokens, 1 row", lambda dtype: generation_seconds(dtype, 1, 5)),
        ("training step, 4 x 256 tokens", training_seconds),
    ):
        wide, narrow = (measure(dtype) for dtype in (torch.float32, torch.bfloat16))
        rows.append((what, f"{wide * 1e3:,.0f} ms, {narrow * 1e3:,.0f} ms in bf16: {wide / narrow:.2f} times", ""))
    report(__file__, rows)


if __name__ == "__main__":
    main()
