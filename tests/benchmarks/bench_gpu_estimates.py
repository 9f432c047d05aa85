"""Estimated memory and hours of pairs of real size on a GPU, and the bytes of their caches; nothing is measured here.

Memory: the formulas of `xtk doctor`, for passes of 8,192 tokens (teacher) and 16,384 (student). Cache: the bytes per
position of the doctor, for the default support, one position per token. Hours: floating-point operations over an
assumed rate. Operations per token, with P weights of layers and output head: 2 P for a forward pass; 6 P for a step;
with LoRA 4 P, because most weights have no gradient; 2 P more with gradient checkpointing. Reading data, packing
shards, attention over long documents and everything for which the GPU waits are left out.

    python tests/benchmarks/bench_gpu_estimates.py
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

from xtk.doctor import memory_and_disk_estimates
from xtk.doctor.doctor_inputs import DataSample, RunPlan
from xtk.doctor.memory_and_disk_estimates import (
    BYTES_PER_POSITION,
    estimate_caching_memory,
    estimate_training_memory,
)

RATE = 400e12  # operations per second: 40 % of the dense bf16 peak of an H100 SXM, 989e12
LLAMA3 = {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072}
QWEN3 = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960}
CONFIGS: dict[str, PretrainedConfig] = {
    "Llama 3.2 1B": LlamaConfig(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
                                tie_word_embeddings=True, **LLAMA3),
    "Llama 3.1 8B": LlamaConfig(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
                                **LLAMA3),
    "Qwen3 0.6B": Qwen3Config(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
                              tie_word_embeddings=True, **QWEN3),
    "Qwen3 4B": Qwen3Config(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
                            tie_word_embeddings=True, **QWEN3),
    "Qwen3 8B": Qwen3Config(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
                            **QWEN3),
    "Qwen3 32B": Qwen3Config(hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64,
                             **QWEN3),
}  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """A student, a teacher, and the options of `distill`."""

    student: str
    teacher: str
    tokens: float
    options: str = ""

    @property
    def plan(self) -> RunPlan:
        """The options as a plan of the doctor, for documents of 1,024 tokens."""
        plan = RunPlan(teacher_dtype="bfloat16", mixed_precision="bf16", max_batch_tokens=16_384,
                       per_device_train_batch_size=16)  # fmt: skip
        if "--lora-r 16" in self.options:
            plan = replace(plan, lora_r=16, dtype="bfloat16")
        return replace(plan, gradient_checkpointing="--gradient-checkpointing" in self.options)


PAIRS = (
    Pair("Qwen3 0.6B", "Llama 3.1 8B", 1e8),
    Pair("Llama 3.2 1B", "Qwen3 4B", 1e8),
    Pair("Llama 3.2 1B", "Qwen3 8B", 1e9, "--gradient-checkpointing"),
    Pair("Llama 3.1 8B", "Qwen3 32B", 1e8, "--lora-r 16 --dtype bfloat16 --gradient-checkpointing"),
)


def computed_weights(config: PretrainedConfig) -> int:
    """Return the number of weights of layers and output head: the embedding is looked up, not multiplied."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    total = sum(parameter.numel() for parameter in model.parameters())
    return total if embedding is head else total - embedding.numel()


def on_gpu(bytes_by_purpose: dict[str, int] | None) -> str:
    """Return the memory of an estimate without what exists on a CPU only."""
    assert bytes_by_purpose is not None
    on_cpu = ("libraries", "merging of adapters")
    return f"{sum(size for name, size in bytes_by_purpose.items() if name not in on_cpu) / 2**30:,.0f} GiB"


def cells_of(pair: Pair, folder: Path) -> list[str]:
    """Return the cells of a pair."""
    sides = []
    for name in (pair.student, pair.teacher):
        CONFIGS[name].save_pretrained(folder / name)
        sides.append(SimpleNamespace(folder=folder / name, tensor_headers={}, context_length=None))
    inputs = cast(
        Any,
        SimpleNamespace(student=sides[0], teacher=sides[1], models=sides, plan=pair.plan, data_sample=DataSample()),
    )
    student_weights, teacher_weights = (computed_weights(CONFIGS[name]) for name in (pair.student, pair.teacher))
    per_token = (4 if pair.plan.lora_r else 6) + 2 * pair.plan.gradient_checkpointing
    hours = [
        pair.tokens * operations / RATE / 3600 for operations in (2 * teacher_weights, per_token * student_weights)
    ]
    return [
        f"{pair.student}, {pair.teacher}",
        f"{pair.tokens / 1e6:,.0f} M",
        f"{BYTES_PER_POSITION * pair.tokens / 1e9:,.1f} GB",
        on_gpu(estimate_caching_memory(inputs)),
        f"{hours[0]:,.1f} h",
        f"`{pair.options}`" if pair.options else "",
        on_gpu(estimate_training_memory(inputs)),
        f"{hours[1]:,.1f} h",
    ]


def main() -> None:
    """Print the table of docs/how-to/real-models.md."""
    head = ["student, teacher", "tokens", f"cache: tokens x {BYTES_PER_POSITION} bytes, measured on a CPU",
            "`cache-teacher`: memory, estimated", "time, estimated", "options of `distill`",
            "`distill`: memory, estimated", "time, estimated"]  # fmt: skip
    memory_and_disk_estimates.default_device = lambda: torch.device("cuda")  # chunks of logits are larger there
    with tempfile.TemporaryDirectory() as folder:
        rows = [cells_of(pair, Path(folder)) for pair in PAIRS]
    for row in (head, ["---"] * len(head), *rows):
        sys.stdout.write(f"| {' | '.join(row)} |\n")


if __name__ == "__main__":
    main()
