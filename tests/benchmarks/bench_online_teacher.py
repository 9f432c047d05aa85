"""Time of an epoch from a cache compared with an epoch with an online teacher, four times as large as the student.

Both vocabularies are the real ones of Llama 3 and Qwen; the ratio of sizes holds for the backbone and for the output
head. Epochs alternate; seconds are those that `distill` logs, without the start and without the first step, which
compiles. Median of 3.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from measurement import gsm8k, model_folder, report, run_process
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from xtk.models.causal_lm import silence_transformers
from xtk.runs.metrics_file import read_metrics

REPEATS = 3
DOCUMENTS, BATCH = 48, 8


def make_models(folder: Path) -> float:
    """Write a student and a teacher; return the ratio of the teacher's number of weights to the student's."""
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


def train_epoch(folder: Path, name: str, *arguments: str) -> tuple[float, float]:
    """Train an epoch; return the seconds of its steps and its teacher, and those of the teacher."""
    command = [sys.executable, "-m", "xtk", "distill", str(folder / "student"), *arguments]
    common = ["--loss", "ce", "--loss", "byte-kl", "--per-device-train-batch-size", str(BATCH), "--logging-steps", "1",
              "--save-steps", "0", "-o", str(folder / name)]  # fmt: skip
    run_process(*command, *common)
    records = read_metrics(folder / name / "metrics.jsonl")
    teacher = float(records[-1].get("teacher_seconds", 0.0))
    # The teacher scores everything before the first step, as one block.
    steps = len(records) / (len(records) - 1) * (records[-1]["training_seconds"] - records[0]["training_seconds"])
    return steps + teacher, teacher


def main() -> None:
    """Measure and print."""
    silence_transformers()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size_ratio = make_models(folder)
        data = folder / "data.jsonl"
        data.write_text("".join(json.dumps({"text": text}) + "\n" for text in gsm8k(DOCUMENTS)))
        cache = ["cache-teacher", str(folder / "teacher"), str(data), "--top-k", "64", "-o", str(folder / "cache")]
        run_process(sys.executable, "-m", "xtk", *cache)
        from_cache, online, teacher_times = [], [], []
        for repeat in range(REPEATS):
            from_cache.append(train_epoch(folder, f"cached-{repeat}", str(folder / "cache"))[0])
            seconds, teacher = train_epoch(
                folder, f"live-{repeat}", str(data), "--teacher", f"{folder / 'teacher'}:top_k=64"
            )
            online.append(seconds)
            teacher_times.append(teacher)
    ratio = statistics.median(online) / statistics.median(from_cache)
    result = f"{ratio:.1f} x ({statistics.median(online):.1f} s, {statistics.median(from_cache):.1f} s from the cache)"
    teacher_share = f"{statistics.median(teacher_times):.1f} s, the teacher {size_ratio:.1f} x the student"
    report(__file__, [("an epoch with the live teacher over one from a cache", result, "4 x"),
                      ("of it the teacher's", teacher_share, "(none)")])  # fmt: skip


if __name__ == "__main__":
    main()
