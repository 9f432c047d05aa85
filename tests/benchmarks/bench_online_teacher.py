"""An epoch from a cache against an epoch beside the live teacher, which is four times as large as the student.

Both vocabularies are the real ones of Llama 3 and Qwen; the sizes are of what is between embedding and head, and of the
head. The epochs are taken in turns; seconds are those that `distill` itself writes, without the start and without the
first step, which compiles. Median of 3.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from measurement import gsm8k, model_folder, process, report
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from xtk.models.causal_lm import silence_transformers
from xtk.training.metrics_file import read_metrics

TIMES = 3
DOCUMENTS, BATCH = 48, 8


def make_models(folder: Path) -> float:
    """Write a student and a teacher; return by how much the teacher's weights are more."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True}
    student = LlamaForCausalLM(
        LlamaConfig(vocab_size=128256, hidden_size=192, intermediate_size=768, num_hidden_layers=6, **heads)
    )
    teacher = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=151936, hidden_size=512, intermediate_size=2048, num_hidden_layers=8, head_dim=64, **heads
        )
    )
    model_folder(folder / "student", "llama3", student)
    model_folder(folder / "teacher", "qwen", teacher)
    return float(teacher.num_parameters() / student.num_parameters())


def epoch(folder: Path, name: str, *arguments: str) -> tuple[float, float]:
    """Train an epoch; return its seconds without those before the end of its first step, and those of the teacher."""
    command = [sys.executable, "-m", "xtk", "distill", str(folder / "student"), *arguments]
    common = ["--loss", "ce", "--loss", "byte-kl", "--per-device-train-batch-size", str(BATCH), "--logging-steps", "1",
              "--save-steps", "0", "-o", str(folder / name)]  # fmt: skip
    process(*command, *common)
    lines = read_metrics(folder / name / "metrics.jsonl")
    teacher = float(lines[-1].get("teacher_seconds", 0.0))
    # All is scored before the first step: it is one block.
    steps = len(lines) / (len(lines) - 1) * (lines[-1]["training_seconds"] - lines[0]["training_seconds"])
    return steps + teacher, teacher


def main() -> None:
    """Measure and print."""
    silence_transformers()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        larger = make_models(folder)
        data = folder / "data.jsonl"
        data.write_text("".join(json.dumps({"text": text}) + "\n" for text in gsm8k(DOCUMENTS)))
        cache = ["cache-teacher", str(folder / "teacher"), str(data), "--top-k", "64", "-o", str(folder / "cache")]
        process(sys.executable, "-m", "xtk", *cache)
        cached, live, teaching = [], [], []
        for turn in range(TIMES):
            cached.append(epoch(folder, f"cached-{turn}", str(folder / "cache"))[0])
            seconds, teacher = epoch(folder, f"live-{turn}", str(data), "--teacher", f"{folder / 'teacher'}:top_k=64")
            live.append(seconds)
            teaching.append(teacher)
    ratio = statistics.median(live) / statistics.median(cached)
    told = f"{ratio:.1f} x ({statistics.median(live):.1f} s, {statistics.median(cached):.1f} s from the cache)"
    share = f"{statistics.median(teaching):.1f} s, the teacher {larger:.1f} x the student"
    report(__file__, [("an epoch with the live teacher over one from a cache", told, "4 x"),
                      ("of it the teacher's", share, "(none)")])  # fmt: skip


if __name__ == "__main__":
    main()
